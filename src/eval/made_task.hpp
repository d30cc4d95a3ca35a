// Shared by the task makers: token counts as in an evaluation, prompts filled to a length, and
// random draws that are the same on every platform.
#pragma once

#include <cstdint>
#include <functional>
#include <kvzap/lab/tasks.hpp>
#include <kvzap/model/chat_template.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "train/random.hpp"

namespace kvzap::eval {

/// A row of the file: the task and further fields.
struct MadeTask {
  Task task;
  std::int64_t length = 0;  // requested: tokens of prompt and answer
  std::int64_t tokens = 0;  // of the prompt
  std::string haystack;     // name of the filler text
};

/// Returns the row, without the newline.
std::string to_json_line(const MadeTask& made);

/// Thrown if the length is below that of the task's shortest prompt.
class TooShort : public Error {
 public:
  using Error::Error;
};

/// Thrown if a text contains special tokens of the tokenizer, which could end the user's message.
class SpecialText : public Error {
 public:
  using Error::Error;
};

/// Counts tokens of prompts as `kvzap eval` and `kvzap run` encode them: the context as the start
/// of a user's message, and separately the question with everything after it.
class PromptMeter {
 public:
  /// Without `parts`: no chat template (--raw). The tokenizer must outlive the meter.
  PromptMeter(const Tokenizer& tokenizer, std::optional<ChatTemplate::Parts> parts);

  /// Both throw SpecialText.
  std::int64_t context_tokens(std::string_view context) const;
  std::int64_t question_tokens(std::string_view question, std::string_view answer_prefix) const;

 private:
  std::int64_t count(const std::vector<TokenId>& ids, std::int64_t special) const;
  std::int64_t special_tokens(const std::vector<TokenId>& ids) const;

  const Tokenizer& m_tokenizer;
  std::optional<ChatTemplate::Parts> m_parts;
  std::int64_t m_special_of_context;
  std::int64_t m_special_of_question;
};

/// A context of a size, in units of the task.
struct FittedContext {
  std::int64_t size = 0;
  std::int64_t tokens = 0;  // exceeds the budget if even the smallest size does not fit
  std::string text;
};

/// Finds a size from `least` to `most` whose context has at most `budget` tokens while that of the
/// next size has more. (Tokens need not grow with each step of the size.) Encodes only a few
/// contexts of about the final size.
FittedContext fit_context(const PromptMeter& meter, std::int64_t budget, std::int64_t least,
                          std::int64_t most,
                          const std::function<std::string(std::int64_t)>& context);

/// Fills the context of made.task, as far as made.length allows. The caller has set the other
/// fields. Returns the size. Throws TooShort, naming the task and the shortest possible length.
std::int64_t fit_task(const PromptMeter& meter, MadeTask& made, std::int64_t least,
                      std::int64_t most, const std::function<std::string(std::int64_t)>& context);

/// Random draws of one row.
class RowRandom {
 public:
  /// Each name has its own sequence of random numbers.
  explicit RowRandom(std::string_view name);
  RowRandom(std::uint64_t seed, std::string_view task, std::int64_t length, std::int64_t index);

  std::uint64_t below(std::uint64_t bound) { return train::below(m_random, bound); }
  double uniform() { return train::uniform(m_random); }
  std::uint64_t bits() { return m_random(); }
  /// Draws from [low, high].
  std::int64_t between(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(below(static_cast<std::uint64_t>(high - low + 1)));
  }
  template <class T>
  const T& pick(const std::vector<T>& values) {
    return values[below(values.size())];
  }
  template <class T>
  void shuffle(std::vector<T>& values) {
    for (std::size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[below(i)]);
  }
  /// Returns `count` of the values, in random order; count <= values.size().
  template <class T>
  std::vector<T> sample(std::vector<T> values, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i)
      std::swap(values[i], values[i + below(values.size() - i)]);
    values.resize(count);
    return values;
  }

 private:
  std::mt19937_64 m_random;
};

/// Returns the first `count` words of a text whose words are separated by single spaces and
/// hyphens.
std::string_view first_words(std::string_view text, std::int64_t count);
/// Counts the words of such a text.
std::int64_t count_words(std::string_view text);

/// Returns the lines with needles between them. Needle i is before line floor(places[i] *
/// (lines.size() + 1)), or after the last line. Needles at the same place keep their order.
std::string with_needles(const std::vector<std::string_view>& lines,
                         const std::vector<std::string>& needles, const std::vector<double>& places,
                         std::string_view separator);

}  // namespace kvzap::eval
