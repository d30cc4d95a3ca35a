#include "eval/long_answers.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <string_view>
#include <utility>

#include "eval/words.hpp"

namespace kvzap::eval {
namespace {

constexpr const char* copying = "long_copy";
constexpr const char* looking_up = "long_lookups";
constexpr const char* adding = "long_sums";

/// A statement, and the part of the answer that is about it.
struct Item {
  std::string said;
  std::string key;
  std::string answer;
};

/// "The number of the quiet garden is 4711."
std::vector<Item> draw_numbers(RowRandom& random, std::size_t count) {
  std::vector<std::pair<std::string_view, std::string_view>> things;
  for (const std::string_view adjective : adjectives()) {
    for (const std::string_view noun : common_nouns()) things.emplace_back(adjective, noun);
  }
  constexpr std::uint64_t all_numbers = 100000;
  std::set<std::string> numbers;
  std::vector<Item> items;
  for (const auto& [adjective, noun] : random.sample(std::move(things), count)) {
    std::string number;
    do {
      number = fmt::format("{:05}", random.below(all_numbers));
    } while (!numbers.insert(number).second);
    const std::string key = fmt::format("the {} {}", adjective, noun);
    items.push_back({fmt::format("The number of {} is {}.", key, number), key, number});
  }
  return items;
}

/// "Step 3: add 12.", with the answer "Step 3: 40 + 12 = 52". Sums stay from 0 to 999.
std::vector<Item> draw_steps(RowRandom& random, std::size_t count) {
  constexpr std::int64_t largest_sum = 999, largest_step = 99;
  std::int64_t sum = random.between(1, largest_step);
  std::vector<Item> items = {{fmt::format("Begin with {}.", sum), "", ""}};
  for (std::size_t step = 1; items.size() < count; ++step) {
    const std::int64_t number = random.between(1, largest_step);
    const bool adds = sum < number || (sum + number <= largest_sum && random.below(2) == 0);
    const std::int64_t next = adds ? sum + number : sum - number;
    items.push_back(
        {fmt::format("Step {}: {} {}.", step, adds ? "add" : "subtract", number), "",
         fmt::format("Step {}: {} {} {} = {}", step, sum, adds ? "+" : "-", number, next)});
    sum = next;
  }
  return items;
}

/// The task about the first `count` items, whose answers are in `order`.
MadeTask task_of(const std::string& name, const std::vector<Item>& items, std::size_t count,
                 const std::vector<std::size_t>& order) {
  MadeTask made;
  std::vector<std::string_view> said, keys;
  for (std::size_t i = 0; i < count; ++i) said.push_back(items[i].said);
  for (const std::size_t i : order) {
    if (i >= count || items[i].answer.empty()) continue;
    keys.push_back(items[i].key);
    made.task.answers.push_back(items[i].answer);
  }
  made.task.context = fmt::format("{}", fmt::join(said, " "));
  if (name == copying) {
    made.task.question = "\n\nRepeat the previous context exactly.";
  } else if (name == looking_up) {
    made.task.question = fmt::format("\n\nWrite a line for each of these, with its number: {}.",
                                     fmt::join(keys, ", "));
  } else {
    made.task.question =
        "\n\nWrite a line for every step, such as \"Step 1: 20 + 5 = 25\", and go on with its "
        "result.";
  }
  return made;
}

/// Tokens that an answer takes, with room for other words than the expected ones.
std::int64_t answer_tokens(const PromptMeter& meter, const std::string& name,
                           const std::vector<Item>& items, std::size_t count) {
  std::string text;
  for (std::size_t i = 0; i < count; ++i) {
    text += (name == adding ? items[i].answer : items[i].said) + "\n";
  }
  return meter.context_tokens(text) * 9 / 8 + 16;
}

}  // namespace

const std::vector<std::string>& long_answer_task_names() {
  static const std::vector<std::string> names = {copying, looking_up, adding};
  return names;
}

MadeTask make_long_answer(const PromptMeter& meter, std::uint64_t seed, const std::string& name,
                          std::int64_t length, std::int64_t index) {
  RowRandom random(seed, name, length, index);
  // No statement takes fewer than four tokens of prompt and answer; there are enough things to
  // name.
  constexpr std::int64_t least_tokens = 4, most_items = 50000;  // half of the numbers
  const auto most =
      static_cast<std::size_t>(std::clamp<std::int64_t>(length / least_tokens, 2, most_items));
  const std::vector<Item> items =
      name == adding ? draw_steps(random, most) : draw_numbers(random, most);
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < most; ++i) order.push_back(i);
  if (name == looking_up) random.shuffle(order);

  const auto tokens_of = [&](const MadeTask& made) {
    return meter.context_tokens(made.task.context) + meter.question_tokens(made.task.question, "");
  };
  const auto make = [&](std::size_t count) {
    MadeTask made = task_of(name, items, count, order);
    made.tokens = tokens_of(made);
    made.task.max_new_tokens = answer_tokens(meter, name, items, count);
    return made;
  };
  const auto is_short = [&](const MadeTask& made) {
    return made.tokens + made.task.max_new_tokens <= length;
  };
  std::size_t fits = 2, too_many = most + 1;
  MadeTask made = make(fits);
  if (!is_short(made)) {
    throw TooShort(fmt::format(
        "a length of {} is too short for {}: this prompt takes at least {} tokens, {} of them "
        "generated",
        length, name, made.tokens + made.task.max_new_tokens, made.task.max_new_tokens));
  }
  while (fits + 1 < too_many) {
    const std::size_t count = fits + (too_many - fits) / 2;
    MadeTask larger = make(count);
    if (is_short(larger)) {
      fits = count;
      made = std::move(larger);
    } else {
      too_many = count;
    }
  }
  made.length = length;
  made.task.task = name;
  made.task.id = fmt::format("{}/{}/{}", name, length, index);
  made.task.metric = "string_match_all";
  made.haystack = "none";
  return made;
}

}  // namespace kvzap::eval
