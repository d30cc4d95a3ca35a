#include "eval/recall.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <deque>
#include <set>
#include <string_view>

#include "eval/words.hpp"

namespace kvzap::eval {
namespace {

/// Content of a task's prompts.
struct RecallTask {
  const char* name;
  bool facts;            // facts about objects in a house, instead of numbers
  bool noise;            // filled with five repeated sentences
  std::int64_t most;     // most statements
  std::int64_t a_thing;  // tokens per statement, up to `most`; 1: as many statements as fit
};

// The settings of inputs/eval/recall-*.jsonl, which the demo model has not seen in training.
constexpr std::array recall_tasks = {
    RecallTask{"niah_single_noise", false, true, 1, 24},
    RecallTask{"niah_single", false, false, 1, 24},
    RecallTask{"niah_multikey", false, false, 12, 24},
    RecallTask{"niah_dense", false, false, 46, 1},
    RecallTask{"facts", true, false, 10, 24},
};

/// Words that are whole tokens of the demo model.
struct RecallWords {
  std::vector<std::string_view> nouns = words_of(
      "garden river bridge lantern harbor window basket mirror ladder blanket kettle "
      "cabin meadow forest valley tower market engine bottle pocket candle hammer "
      "pillow saddle anchor barrel carpet curtain drawer feather fiddle hallway island "
      "jacket kitchen library mountain needle orchard painting quarry ribbon station "
      "teacher umbrella village wagon yard zebra");
  std::vector<std::string_view> adjectives = words_of(
      "quiet green narrow bright wooden gentle distant golden heavy hollow little "
      "modern muddy pale rusty silent simple steep sunny tiny warm windy yellow ancient "
      "busy calm crooked dusty empty famous");
  std::vector<std::string_view> verbs =
      words_of("rests waits shines turns moves sleeps stands leans drifts listens breathes sways");
  std::vector<std::string_view> prepositions =
      words_of("near behind beside below above under across beyond");
  std::vector<std::string_view> keys = words_of(
      "alpha bravo charlie delta echo foxtrot golf hotel india juliet kilo lima mike "
      "november oscar papa quebec romeo sierra tango uniform victor whiskey xray yankee "
      "zulu amber basil cedar daisy ember fable grove hazel indigo jasmine krypton "
      "lotus maple nectar olive pearl quartz raven sable topaz velvet willow yarrow "
      "zinnia");
  std::vector<std::string_view> colors =
      words_of("red blue green white black brown orange purple gray silver");
  std::vector<std::string_view> noise = {
      "The sky was clear and the road was long.", "Nothing much happened on that day.",
      "The wind kept moving over the hills.", "People came and went as they always did.",
      "It was neither early nor late."};
};

const RecallWords& recall_words() {
  static const RecallWords words;
  return words;
}

const RecallTask& recall_task(const std::string& name) {
  for (const RecallTask& task : recall_tasks) {
    if (name == task.name) return task;
  }
  throw Error(fmt::format("'{}' is no task of recall", name));
}

std::string recall_sentence(RowRandom& random, bool noise) {
  const RecallWords& words = recall_words();
  if (noise) return std::string(random.pick(words.noise));
  const auto thing = [&] {
    const std::string_view adjective = random.pick(words.adjectives);
    return fmt::format("the {} {}", adjective, random.pick(words.nouns));
  };
  std::string first = thing();
  first.front() = 'T';
  const std::string_view verb = random.pick(words.verbs);
  const std::string_view preposition = random.pick(words.prepositions);
  return fmt::format("{} {} {} {}.", first, verb, preposition, thing());
}

/// A statement about one key, and its question.
struct RecallThing {
  std::string said;
  std::string question;
  std::string answer;
};

std::vector<RecallThing> draw_things(const RecallTask& task, RowRandom& random) {
  std::vector<RecallThing> things;
  std::set<std::string> numbers;
  const RecallWords& words = recall_words();
  for (const auto key : random.sample(words.keys, static_cast<std::size_t>(task.most))) {
    if (task.facts) {
      const std::string_view color = random.pick(words.colors);
      const std::string fact =
          fmt::format("In the house of {} there is a {} {}.", key, color, random.pick(words.nouns));
      things.push_back({fact, fmt::format("What is in the house of {}?", key), fact});
      continue;
    }
    std::string number;
    do {
      constexpr std::uint64_t all_numbers = 10000;
      number = fmt::format("{:04}", random.below(all_numbers));
    } while (!numbers.insert(number).second);
    things.push_back({fmt::format("One of the special magic numbers for {} is: {}.", key, number),
                      fmt::format("What is the special magic number for {}?", key),
                      fmt::format("The special magic number for {} is {}.", key, number)});
  }
  return things;
}

}  // namespace

const std::vector<std::string>& recall_task_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    all.reserve(recall_tasks.size());
    for (const RecallTask& task : recall_tasks) all.emplace_back(task.name);
    return all;
  }();
  return names;
}

MadeTask make_recall(const PromptMeter& meter, std::uint64_t seed, const std::string& task_name,
                     std::int64_t length, std::int64_t index) {
  const RecallTask& task = recall_task(task_name);
  RowRandom random(seed, task_name, length, index);
  const std::vector<RecallThing> things = draw_things(task, random);
  std::vector<double> places;
  for (std::size_t i = 0; i < things.size(); ++i) places.push_back(random.uniform());

  MadeTask made;
  made.length = length;
  made.task.task = task_name;
  made.task.id = fmt::format("{}/{}/{}", task_name, length, index);
  made.task.question = "\n\n" + things.front().question;
  made.task.answers = {things.front().answer};
  made.task.max_new_tokens = 24;
  made.haystack = task.noise ? "noise" : "sentences";

  std::deque<std::string> sentences;  // a deque, as views refer to them
  const auto context = [&](std::int64_t count, std::int64_t words) {
    std::vector<std::string_view> lines;
    for (std::size_t i = 0; words > 0; ++i) {
      if (i == sentences.size()) sentences.push_back(recall_sentence(random, task.noise));
      lines.push_back(first_words(sentences[i], words));
      words -= count_words(lines.back());
    }
    std::vector<std::string> said;
    for (std::int64_t i = 0; i < count; ++i)
      said.push_back(things[static_cast<std::size_t>(i)].said);
    return with_needles(lines, said, places, " ");
  };
  std::int64_t count = std::clamp<std::int64_t>(length / task.a_thing, 1, task.most);
  if (count > 1) {
    // The number of statements that fit beside two sentences.
    constexpr std::int64_t two_sentences = 16;
    const std::int64_t budget =
        length - made.task.max_new_tokens - meter.question_tokens(made.task.question, "");
    count = fit_context(meter, budget, 1, count, [&](std::int64_t size) {
              return context(size, two_sentences);
            }).size;
  }
  constexpr std::int64_t unlimited_words = std::int64_t{1} << 40;
  fit_task(meter, made, 1, unlimited_words,
           [&](std::int64_t words) { return context(count, words); });
  return made;
}

}  // namespace kvzap::eval
