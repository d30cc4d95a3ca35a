#include "eval/ruler.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <functional>
#include <limits>
#include <optional>
#include <set>

#include "eval/document_mix.hpp"
#include "eval/words.hpp"

namespace kvzap::eval {
namespace {

enum class RulerKind { needles, variables, common_words, frequent_words, questions };
enum class Haystack { noise, essay, needles };
enum class Word { words, numbers, uuids };

/// The parameters of a task in RULER's scripts/synthetic.yaml.
struct RulerTask {
  const char* name = "";
  RulerKind kind = RulerKind::needles;
  Haystack haystack = Haystack::noise;
  Word key = Word::words;
  Word value = Word::numbers;
  int keys = 1;
  int values = 1;
  int queries = 1;
};

constexpr std::array ruler_parameters = {
    RulerTask{"niah_single_1", RulerKind::needles},
    RulerTask{"niah_single_2", RulerKind::needles, Haystack::essay},
    RulerTask{"niah_single_3", RulerKind::needles, Haystack::essay, Word::words, Word::uuids},
    RulerTask{"niah_multikey_1", RulerKind::needles, Haystack::essay, Word::words, Word::numbers,
              4},
    RulerTask{"niah_multikey_2", RulerKind::needles, Haystack::needles},
    RulerTask{"niah_multikey_3", RulerKind::needles, Haystack::needles, Word::uuids, Word::uuids},
    RulerTask{"niah_multivalue", RulerKind::needles, Haystack::essay, Word::words, Word::numbers, 1,
              4},
    RulerTask{"niah_multiquery", RulerKind::needles, Haystack::essay, Word::words, Word::numbers, 4,
              1, 4},
    RulerTask{"vt", RulerKind::variables},
    RulerTask{"cwe", RulerKind::common_words},
    RulerTask{"fwe", RulerKind::frequent_words},
    RulerTask{"qa_1", RulerKind::questions},
    RulerTask{"qa_2", RulerKind::questions},
};

const RulerTask& ruler_task(const std::string& name) {
  for (const RulerTask& task : ruler_parameters) {
    if (name == task.name) return task;
  }
  throw Error(fmt::format("'{}' is no task of RULER", name));
}

constexpr std::string_view noise_line =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";
// Largest size that a fit tries. Nearly every token has a character.
constexpr std::int64_t unlimited = std::int64_t{1} << 40;

std::string random_letters(RowRandom& random, std::size_t count, char first) {
  std::string word(count, first);
  for (char& c : word) c = static_cast<char>(c + static_cast<char>(random.below(26)));
  return word;
}

std::string random_digits(RowRandom& random, int digits) {
  std::int64_t low = 1;
  for (int i = 1; i < digits; ++i) low *= 10;
  return std::to_string(random.between(low, 10 * low - 1));
}

/// Returns a UUID of version 4 (RFC 9562).
std::string random_uuid(RowRandom& random) {
  const std::uint64_t high = (random.bits() & ~std::uint64_t{0xF000}) | 0x4000u;
  const std::uint64_t low = (random.bits() & ~(std::uint64_t{3} << 62)) | (std::uint64_t{2} << 62);
  return fmt::format("{:08x}-{:04x}-{:04x}-{:04x}-{:012x}", high >> 32, (high >> 16) & 0xFFFF,
                     high & 0xFFFF, low >> 48, low & 0xFFFFFFFFFFFFu);
}

std::string random_word_of(RowRandom& random, Word kind) {
  if (kind == Word::uuids) return random_uuid(random);
  constexpr int digits_of_values = 7;
  if (kind == Word::numbers) return random_digits(random, digits_of_values);
  return fmt::format("{}-{}", random.pick(adjectives()), random.pick(common_nouns()));
}

class NoWordsLeft : public Error {
 public:
  using Error::Error;
};

/// Draws words without repetition; skips empty ones.
class Distinct {
 public:
  explicit Distinct(std::function<std::string()> draw) : m_draw(std::move(draw)) {}
  /// Returns a word. Throws NoWordsLeft if hardly any are left.
  const std::string& next() {
    constexpr int most_draws = 1000;
    for (int i = 0; i < most_draws; ++i) {
      const std::string drawn = m_draw();
      if (drawn.empty()) continue;
      const auto [found, is_new] = m_seen.insert(drawn);
      if (is_new) return *found;
    }
    throw NoWordsLeft(
        fmt::format("expected words that are not yet in the prompt, found hardly any (after {})",
                    m_seen.size()));
  }

 private:
  std::function<std::string()> m_draw;
  std::set<std::string> m_seen;
};

const char* plural_of(Word kind) {
  return kind == Word::numbers ? "numbers" : (kind == Word::uuids ? "uuids" : "words");
}

std::string needle_line(Word kind, std::string_view key, std::string_view value) {
  return fmt::format("One of the special magic {} for {} is: {}.", plural_of(kind), key, value);
}

/// Joins words: "a", "a, and b", "a, b, and c".
std::string enumeration(const std::vector<std::string>& words) {
  std::string text = words.front();
  for (std::size_t i = 1; i < words.size(); ++i) {
    text += (i + 1 == words.size() ? ", and " : ", ") + words[i];
  }
  return text;
}

/// Returns the whole lines that `words` words fill, and the beginning of the next line.
std::vector<std::string_view> lines_of_words(
    std::int64_t words, const std::function<std::string_view(std::size_t)>& line) {
  std::vector<std::string_view> lines;
  while (words > 0) {
    lines.push_back(first_words(line(lines.size()), words));
    words -= count_words(lines.back());
  }
  return lines;
}

void make_needles(const RulerTask& task, const Prose& prose, const PromptMeter& meter,
                  RowRandom& random, MadeTask& made) {
  const bool in_prose = task.haystack == Haystack::essay;
  const auto drawn = [&](Word kind) {
    return Distinct([&random, &prose, in_prose, kind] {
      std::string word = random_word_of(random, kind);
      // The answer must occur only once in the context.
      return in_prose && prose.has(word) ? std::string() : word;
    });
  };
  Distinct keys = drawn(task.key), values = drawn(task.value);
  std::vector<std::string> all_keys, needles;
  std::vector<std::vector<std::string>> all_values;
  for (int k = 0; k < task.keys; ++k) {
    all_keys.push_back(keys.next());
    all_values.emplace_back();
    for (int v = 0; v < task.values; ++v) {
      all_values.back().push_back(values.next());
      needles.push_back(needle_line(task.value, all_keys.back(), all_values.back().back()));
    }
  }
  random.shuffle(needles);

  std::vector<std::size_t> order(all_keys.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::vector<std::string> asked;
  for (const std::size_t i : random.sample(order, static_cast<std::size_t>(task.queries))) {
    asked.push_back(all_keys[i]);
    made.task.answers.insert(made.task.answers.end(), all_values[i].begin(), all_values[i].end());
  }
  const std::string query = enumeration(asked);
  const std::string plural = plural_of(task.value);
  std::string intro;
  if (made.task.answers.size() == 1) {
    const std::string kind = plural.substr(0, plural.size() - 1);
    intro = fmt::format(
        "Somewhere in the text below there is a special magic {}. Remember it: there will be a "
        "question about the {} afterwards.\n",
        kind, kind);
    made.task.question = fmt::format(
        "What is the special magic {} for {} mentioned in the provided text?", kind, query);
    made.task.answer_prefix =
        fmt::format(" The special magic {} for {} mentioned in the provided text is", kind, query);
  } else {
    intro = fmt::format(
        "Somewhere in the text below there are special magic {}. Remember them: there will be a "
        "question about the {} afterwards.\n",
        plural, plural);
    made.task.question = fmt::format(
        "What are all the special magic {} for {} mentioned in the provided text?", plural, query);
    made.task.answer_prefix = fmt::format(
        " The special magic {} for {} mentioned in the provided text are", plural, query);
  }
  made.task.max_new_tokens = 128;
  made.task.metric = "string_match_all";

  if (in_prose) {
    made.haystack = prose.name();
    constexpr int number_of_depths = 40;
    std::vector<int> all_depths(number_of_depths);
    for (int i = 0; i < number_of_depths; ++i) all_depths[static_cast<std::size_t>(i)] = i;
    std::vector<double> depths;
    for (const int depth : random.sample(all_depths, needles.size())) {
      depths.push_back(static_cast<double>(depth) / (number_of_depths - 1));
    }
    std::sort(depths.begin(), depths.end());
    const std::uint64_t first = random.bits();
    fit_task(meter, made, 1, unlimited, [&](std::int64_t words) {
      return intro + prose.with_needles(first, words, needles, depths) + "\n";
    });
    return;
  }
  made.haystack = task.haystack == Haystack::noise ? "noise" : "needles";
  std::vector<double> places;
  for (std::size_t i = 0; i < needles.size(); ++i) places.push_back(random.uniform());
  std::deque<std::string> others;  // further lines; a deque, as views refer to them
  // The number of lines used may be smaller: later draws must not depend on it.
  RowRandom of_others = random;
  Distinct other_keys([&] {
    std::string key = random_word_of(of_others, task.key);
    return std::find(all_keys.begin(), all_keys.end(), key) == all_keys.end() ? key : "";
  });
  Distinct other_values([&] {
    std::string value = random_word_of(of_others, task.value);
    const auto& taken = made.task.answers;
    return std::find(taken.begin(), taken.end(), value) == taken.end() ? value : "";
  });
  const auto other = [&](std::size_t i) -> std::string_view {
    if (task.haystack == Haystack::noise) return noise_line;
    while (others.size() <= i) {
      others.push_back(needle_line(task.value, other_keys.next(), other_values.next()));
    }
    return others[i];
  };
  fit_task(meter, made, 1, unlimited, [&](std::int64_t words) {
    return intro + with_needles(lines_of_words(words, other), needles, places, "\n") + "\n";
  });
}

struct VariableChain {
  std::vector<std::string> names;
  std::string value;
  std::vector<std::string> lines;
  std::vector<double> places;  // ascending
};

VariableChain draw_chain(RowRandom& random, std::size_t letters) {
  constexpr int hops = 4;
  VariableChain chain;
  Distinct names([&] { return random_letters(random, letters, 'A'); });
  constexpr int digits = 5;
  chain.value = random_digits(random, digits);
  for (int i = 0; i <= hops; ++i) {
    chain.names.push_back(names.next());
    chain.lines.push_back(i == 0 ? fmt::format("VAR {} = {}", chain.names[0], chain.value)
                                 : fmt::format("VAR {} = VAR {}", chain.names.back(),
                                               chain.names[chain.names.size() - 2]));
    chain.places.push_back(random.uniform());
  }
  std::sort(chain.places.begin(), chain.places.end());
  return chain;
}

std::string text_of_chain(const VariableChain& chain, std::int64_t words) {
  const auto lines = lines_of_words(words, [](std::size_t /*line*/) { return noise_line; });
  return "Follow the chain(s) of variable assignment that are hidden in the text below.\n\n" +
         with_needles(lines, chain.lines, chain.places, "\n") + "\n";
}

std::string question_of_chain(const VariableChain& chain) {
  return fmt::format(
      "Question: Find all variables that are assigned the value {} in the text above.",
      chain.value);
}

std::string prefix_of_chain(const VariableChain& chain) {
  return fmt::format(
      " Answer: According to the chain(s) of variable assignment in the text above, {} variables "
      "are assigned the value {}, they are: ",
      chain.names.size(), chain.value);
}

void make_variables(const PromptMeter& meter, RowRandom& random, MadeTask& made) {
  // An example with a shorter chain and its answer comes first.
  constexpr std::size_t letters_of_example = 3, letters = 5;
  VariableChain example = draw_chain(random, letters_of_example);
  const VariableChain chain = draw_chain(random, letters);
  while (example.value == chain.value) example = draw_chain(random, letters_of_example);
  made.haystack = "noise";
  made.task.answers = chain.names;
  made.task.question = question_of_chain(chain);
  made.task.answer_prefix = prefix_of_chain(chain);
  made.task.max_new_tokens = 30;
  made.task.metric = "string_match_all";

  constexpr std::int64_t most_of_example = 500, share_of_example = 8;
  const std::int64_t budget = std::min(most_of_example, made.length / share_of_example);
  const FittedContext shown = fit_context(meter, budget, 1, unlimited, [&](std::int64_t words) {
    std::string text = text_of_chain(example, words);
    text += question_of_chain(example) + prefix_of_chain(example);
    for (const auto& name : example.names) text += " " + name;
    return text + "\n\n";
  });
  fit_task(meter, made, 1, unlimited,
           [&](std::int64_t words) { return shown.text + text_of_chain(chain, words); });
}

/// Numbers words: "1. word 2. word ...".
std::string numbered(const std::vector<std::string>& words) {
  std::string text;
  for (std::size_t i = 0; i < words.size(); ++i) {
    text += fmt::format("{}{}. {}", i == 0 ? "" : " ", i + 1, words[i]);
  }
  return text;
}

constexpr std::string_view common_words_intro =
    "The numbered list below has words in it that appear more often than others. Memorize those "
    "that appear most often.\n";
constexpr std::string_view common_words_question =
    "Question: What are the 10 most common words in the above list?";
constexpr std::string_view common_words_prefix =
    " Answer: The top 10 words that appear most often in the list are:";

/// Returns words for a list: single ones, or pairs if the list has more entries than there are
/// words.
std::vector<std::string> words_for_lists(RowRandom& random, bool pairs) {
  std::vector<std::string> words;
  if (pairs) {
    for (const auto adjective : adjectives()) {
      for (const auto noun : common_nouns()) words.push_back(fmt::format("{}-{}", adjective, noun));
    }
  } else {
    for (const auto* list : {&common_nouns(), &adjectives(), &verbs()}) {
      words.insert(words.end(), list->begin(), list->end());
    }
  }
  random.shuffle(words);
  return words;
}

/// Returns common words and the first of the other words, repeated as given, in random order.
/// `rest_entries` is the total number of entries of the other words.
std::string word_list(const std::vector<std::string>& common, int times,
                      const std::vector<std::string>& rest, int rest_times,
                      std::int64_t rest_entries, RowRandom random) {
  std::vector<std::string> words;
  for (const auto& word : common) words.insert(words.end(), static_cast<std::size_t>(times), word);
  for (std::int64_t i = 0; i < rest_entries; ++i) {
    words.push_back(rest[static_cast<std::size_t>(i / rest_times)]);
  }
  random.shuffle(words);
  return numbered(words);
}

/// Repetitions of the ten common words and of the others in a list.
struct WordCounts {
  int common;
  int other;
  std::int64_t least_others;  // distinct other words
  std::size_t example_words;
  int example_common;
  int example_other;
};
// RULER's numbers for lengths of at least 4,096 tokens, and for shorter ones.
constexpr WordCounts long_list{30, 3, 30, 40, 10, 3};
constexpr WordCounts short_list{6, 1, 10, 20, 3, 1};

/// Returns whether there are enough words.
bool fit_common_words(const WordCounts& counts, bool pairs, const PromptMeter& meter,
                      RowRandom random, MadeTask& made) {
  constexpr std::size_t common_words = 10;
  const std::size_t example_others = counts.example_words - common_words;
  std::vector<std::string> words = words_for_lists(random, pairs);
  const auto take = [&](std::size_t count) {
    const auto end = words.end() - static_cast<std::ptrdiff_t>(count);
    std::vector<std::string> taken(end, words.end());
    words.erase(end, words.end());
    return taken;
  };
  const auto common = take(common_words), example_common = take(common_words);
  std::string shown(common_words_intro);
  shown +=
      word_list(example_common, counts.example_common, take(example_others), counts.example_other,
                counts.example_other * static_cast<std::int64_t>(example_others), random);
  shown += "\n";
  shown += common_words_question;
  shown += common_words_prefix;
  shown += " " + numbered(example_common) + "\n";
  shown += common_words_intro;

  made.haystack = "words";
  made.task.answers = common;
  made.task.question = common_words_question;
  made.task.answer_prefix = common_words_prefix;
  made.task.max_new_tokens = 120;
  made.task.metric = "string_match_all";
  const std::int64_t most = counts.other * static_cast<std::int64_t>(words.size());
  return fit_task(meter, made, counts.other * counts.least_others, most, [&](std::int64_t entries) {
           return shown + word_list(common, counts.common, words, counts.other, entries, random) +
                  "\n";
         }) < most;
}

void make_common_words(const PromptMeter& meter, const RowRandom& random, MadeTask& made) {
  constexpr std::int64_t usual_length = 4096;
  const WordCounts* counts = made.length >= usual_length ? &long_list : &short_list;
  for (bool pairs = false;; pairs = true) {
    try {
      if (fit_common_words(*counts, pairs, meter, random, made)) return;
    } catch (const TooShort&) {
      // With tokenizers that split digits, the long list does not fit in 4,096 tokens.
      if (counts == &short_list) throw;
      counts = &short_list;
      if (fit_common_words(*counts, pairs, meter, random, made)) return;
    }
    if (pairs) break;
  }
  throw Error(fmt::format("a length of {} needs more words than cwe has", made.length));
}

/// Returns how often word `rank` (from 1) occurs among `words` words: Zipf's law with RULER's alpha
/// of 2, whose sum over all ranks is pi^2 / 6.
std::int64_t zipf_count(std::int64_t words, std::int64_t rank) {
  constexpr double zeta_of_2 = 1.6449340668482264;
  return static_cast<std::int64_t>(
      std::floor(static_cast<double>(words) / static_cast<double>(rank * rank) / zeta_of_2));
}

std::int64_t zipf_total(std::int64_t words) {
  std::int64_t total = 0;
  for (std::int64_t rank = 1, count = 0; (count = zipf_count(words, rank)) > 0; ++rank) {
    total += count;
  }
  return total;
}

void make_frequent_words(const PromptMeter& meter, RowRandom& random, MadeTask& made) {
  constexpr std::size_t letters = 6;
  constexpr std::string_view dots = "...";  // the most frequent word, not part of the answer
  std::deque<std::string> words;            // a deque, as views refer to them
  Distinct coded([&] { return random_letters(random, letters, 'a'); });
  constexpr std::size_t asked = 3;
  while (words.size() < asked) words.push_back(coded.next());
  made.haystack = "coded words";
  made.task.answers = {words.begin(), words.end()};
  made.task.question =
      "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three "
      "most frequently appeared words in the above coded text?";
  made.task.answer_prefix =
      " Answer: According to the coded text above, the three most frequently appeared words are:";
  made.task.max_new_tokens = 50;
  made.task.metric = "string_match_all";

  const std::uint64_t order = random.bits();
  // From this size on the fourth word is more frequent than the fifth.
  constexpr std::int64_t least_words = 79;
  fit_task(meter, made, zipf_total(least_words), unlimited, [&](std::int64_t size) {
    std::int64_t low = least_words, high = 2 * size + least_words;
    while (high - low > 1) {
      const std::int64_t middle = low + (high - low) / 2;
      (zipf_total(middle) <= size ? low : high) = middle;
    }
    std::vector<std::string_view> text;
    for (std::int64_t rank = 1, count = 0; (count = zipf_count(low, rank)) > 0; ++rank) {
      while (static_cast<std::int64_t>(words.size()) < rank) words.push_back(coded.next());
      const std::string_view word = rank == 1 ? dots : words[static_cast<std::size_t>(rank - 2)];
      text.insert(text.end(), static_cast<std::size_t>(count), word);
    }
    text.resize(static_cast<std::size_t>(size), dots);
    RowRandom(fmt::format("order {}", order)).shuffle(text);
    std::string context =
        "Keep count of each coded word in the coded text below, and find the three coded words "
        "that appear most often.";
    for (const auto word : text) {
      context += ' ';
      context += word;
    }
    return context + "\n";
  });
}

constexpr std::string_view qa_instruction =
    "Answer the question from the documents alone. Reply with nothing but the answer.";

void set_question(const QuestionFile::Question& question, Task& task) {
  task.question = fmt::format("{}\n\nQuestion: {}", qa_instruction, question.text);
  task.answers = question.answers;
  task.answer_prefix = " Answer:";
  task.max_new_tokens = 32;
  task.metric = "string_match_part";
}

/// Returns the index of a task's file of questions.
std::size_t file_of(const std::string& task) { return task == "qa_1" ? 0 : 1; }

}  // namespace

const std::vector<std::string>& ruler_task_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    all.reserve(ruler_parameters.size());
    for (const RulerTask& task : ruler_parameters) all.emplace_back(task.name);
    return all;
  }();
  return names;
}

Ruler::Ruler(const PromptMeter& meter, Prose prose, std::vector<QuestionFile> questions,
             std::uint64_t seed)
    : m_meter(meter), m_prose(std::move(prose)), m_questions(std::move(questions)), m_seed(seed) {}

bool Ruler::can_make(const std::string& task) const {
  return ruler_task(task).kind != RulerKind::questions || file_of(task) < m_questions.size();
}

std::int64_t Ruler::different_rows(const std::string& task, std::int64_t length) const {
  const auto found = m_orders.find({task, length});
  if (found == m_orders.end() || found->second.tried < found->second.order.size()) {
    return std::numeric_limits<std::int64_t>::max();
  }
  return static_cast<std::int64_t>(found->second.fitting.size());
}

const QuestionFile::Question& Ruler::question(const std::string& task, std::int64_t length,
                                              std::int64_t index) {
  const QuestionFile& file = m_questions[file_of(task)];
  QuestionOrder& asked = m_orders[{task, length}];
  if (asked.order.empty()) {
    asked.order.resize(file.questions.size());
    for (std::uint32_t i = 0; i < asked.order.size(); ++i) asked.order[i] = i;
    RowRandom(m_seed, task, length, -1).shuffle(asked.order);
  }
  while (static_cast<std::int64_t>(asked.fitting.size()) <= index &&
         asked.tried < asked.order.size()) {
    const std::uint32_t next = asked.order[asked.tried++];
    Task probe;
    set_question(file.questions[next], probe);
    const std::int64_t tokens =
        m_meter.context_tokens(
            DocumentMix(file, file.questions[next], RowRandom(m_seed, task, length, 0)).text(0)) +
        m_meter.question_tokens(probe.question, probe.answer_prefix) + probe.max_new_tokens;
    if (tokens <= length) {
      asked.fitting.push_back(next);
    } else {
      asked.least = asked.least == 0 ? tokens : std::min(asked.least, tokens);
    }
  }
  if (asked.fitting.empty()) {
    throw TooShort(fmt::format(
        "a length of {} is too short for {}: no question of {} fits in less than {} tokens", length,
        task, file.name, asked.least));
  }
  return file.questions[asked.fitting[static_cast<std::size_t>(index) % asked.fitting.size()]];
}

MadeTask Ruler::make(const std::string& task, std::int64_t length, std::int64_t index) {
  const RulerTask& ruler = ruler_task(task);
  MadeTask made;
  made.length = length;
  made.task.task = task;
  made.task.id = fmt::format("{}/{}/{}", task, length, index);
  try {
    fill(made, index);
  } catch (const SpecialText& error) {
    const std::string source =
        ruler.kind == RulerKind::questions ? m_questions[file_of(task)].name : m_prose.name();
    throw Error(fmt::format("{}: {}: {}", task, source, error.what()));
  } catch (const NoWordsLeft& error) {
    throw Error(fmt::format("{} of {} tokens{}: {}", task, length,
                            ruler.haystack == Haystack::essay ? " in " + m_prose.name() : "",
                            error.what()));
  }
  return made;
}

void Ruler::fill(MadeTask& made, std::int64_t index) {
  const std::string& task = made.task.task;
  const std::int64_t length = made.length;
  const RulerTask& ruler = ruler_task(task);
  RowRandom random(m_seed, task, length, index);
  switch (ruler.kind) {
    case RulerKind::needles:
      make_needles(ruler, m_prose, m_meter, random, made);
      break;
    case RulerKind::variables:
      make_variables(m_meter, random, made);
      break;
    case RulerKind::common_words:
      make_common_words(m_meter, random, made);
      break;
    case RulerKind::frequent_words:
      make_frequent_words(m_meter, random, made);
      break;
    case RulerKind::questions: {
      const QuestionFile& file = m_questions[file_of(task)];
      const QuestionFile::Question& asked = question(task, length, index);
      set_question(asked, made.task);
      made.haystack = file.name;
      DocumentMix mix(file, asked, random);
      fit_task(m_meter, made, 0, unlimited, [&](std::int64_t pieces) { return mix.text(pieces); });
      break;
    }
  }
}

}  // namespace kvzap::eval
