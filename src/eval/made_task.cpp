#include "eval/made_task.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>

#include "files/fnv.hpp"
#include "files/json_file.hpp"

namespace kvzap::eval {
namespace {

// Separators within words. An identifier of five parts takes some thirty tokens, too many for one
// word.
constexpr std::string_view word_ends = " -";

}  // namespace

std::string to_json_line(const MadeTask& made) {
  auto row = files::parse_own_json(kvzap::to_json_line(made.task));
  row["length"] = made.length;
  row["tokens"] = made.tokens;
  row["haystack"] = made.haystack;
  return row.dump();
}

PromptMeter::PromptMeter(const Tokenizer& tokenizer, std::optional<ChatTemplate::Parts> parts)
    : m_tokenizer(tokenizer), m_parts(std::move(parts)) {
  m_special_of_context = special_tokens(m_parts ? m_tokenizer.encode(m_parts->context(""))
                                                : m_tokenizer.encode("", true));
  m_special_of_question = m_parts ? special_tokens(m_tokenizer.encode(m_parts->suffix)) : 0;
}

std::int64_t PromptMeter::special_tokens(const std::vector<TokenId>& ids) const {
  return std::count_if(ids.begin(), ids.end(),
                       [&](TokenId id) { return m_tokenizer.is_special(id); });
}

std::int64_t PromptMeter::count(const std::vector<TokenId>& ids, std::int64_t special) const {
  if (special_tokens(ids) > special) {
    // The template adds special tokens at both ends.
    std::int64_t seen = 0;
    for (const TokenId id : ids) {
      if (!m_tokenizer.is_special(id) || ++seen <= special) continue;
      throw SpecialText(fmt::format(
          "the text has '{}' in it, which this model's tokenizer takes as a special token",
          m_tokenizer.decode({id}, false)));
    }
  }
  return static_cast<std::int64_t>(ids.size());
}

std::int64_t PromptMeter::context_tokens(std::string_view context) const {
  return count(
      m_parts ? m_tokenizer.encode(m_parts->context(context)) : m_tokenizer.encode(context, true),
      m_special_of_context);
}

std::int64_t PromptMeter::question_tokens(std::string_view question,
                                          std::string_view answer_prefix) const {
  std::string text(question);
  if (m_parts) text += m_parts->suffix;
  text += answer_prefix;
  return count(m_tokenizer.encode(text), m_special_of_question);
}

FittedContext fit_context(const PromptMeter& meter, std::int64_t budget, std::int64_t least,
                          std::int64_t most,
                          const std::function<std::string(std::int64_t)>& context) {
  const auto of_size = [&](std::int64_t size) {
    FittedContext made{size, 0, context(size)};
    made.tokens = meter.context_tokens(made.text);
    return made;
  };
  FittedContext fits = of_size(least);
  if (fits.tokens >= budget || least >= most) return fits;

  // Secant method. A small first step gives the slope. While steps stay on the same side, each
  // overshoots the secant's size twice as far, so few steps remain even if tokens are not
  // monotonic.
  std::int64_t too_large = most + 1, too_large_tokens = 0;
  constexpr std::int64_t least_step = 16, first_share = 32;
  std::int64_t guess =
      std::min(most, least + std::max(least_step, (budget - fits.tokens) / first_share));
  int steps_below = 0, steps_above = 0;
  while (too_large - fits.size > 1 && fits.tokens < budget) {
    FittedContext made = of_size(guess);
    double tokens_per_unit = 0;
    if (made.tokens <= budget) {
      tokens_per_unit = static_cast<double>(made.tokens - fits.tokens) /
                        static_cast<double>(made.size - fits.size);
      fits = std::move(made);
      ++steps_below;
      steps_above = 0;
    } else {
      too_large = made.size;
      too_large_tokens = made.tokens;
      ++steps_above;
      steps_below = 0;
    }
    const bool has_above = too_large_tokens > 0;
    if (has_above) {
      tokens_per_unit = static_cast<double>(too_large_tokens - fits.tokens) /
                        static_cast<double>(too_large - fits.size);
    }
    constexpr double least_slope = 0.05;
    tokens_per_unit = std::max(tokens_per_unit, least_slope);
    const auto units = [&](std::int64_t tokens) {
      return std::max<std::int64_t>(
          1, static_cast<std::int64_t>(static_cast<double>(tokens) / tokens_per_unit));
    };
    constexpr int most_doublings = 30;
    const auto doubled = [&](std::int64_t step, int steps) {
      return step << std::min(std::max(steps - 1, 0), most_doublings);
    };
    guess = has_above && steps_above > 1
                ? too_large - doubled(units(too_large_tokens - budget), steps_above)
                : fits.size + doubled(units(budget - fits.tokens), has_above ? steps_below : 0);
    guess = std::clamp(guess, fits.size + 1, std::max(fits.size + 1, too_large - 1));
  }
  return fits;
}

std::int64_t fit_task(const PromptMeter& meter, MadeTask& made, std::int64_t least,
                      std::int64_t most, const std::function<std::string(std::int64_t)>& context) {
  Task& task = made.task;
  const std::int64_t after =
      meter.question_tokens(task.question, task.answer_prefix) + task.max_new_tokens;
  FittedContext fitted = fit_context(meter, made.length - after, least, most, context);
  if (fitted.tokens + after > made.length) {
    throw TooShort(
        fmt::format("a length of {} is too short for {}: this prompt takes at least {} tokens, {} "
                    "generated ones among them",
                    made.length, task.task, fitted.tokens + after, task.max_new_tokens));
  }
  task.context = std::move(fitted.text);
  made.tokens = fitted.tokens + after - task.max_new_tokens;
  return fitted.size;
}

RowRandom::RowRandom(std::string_view name) : m_random(files::fnv1a(name)) {}

RowRandom::RowRandom(std::uint64_t seed, std::string_view task, std::int64_t length,
                     std::int64_t index)
    : RowRandom(fmt::format("{} {} {} {}", seed, task, length, index)) {}

std::string_view first_words(std::string_view text, std::int64_t count) {
  std::size_t end = 0;
  for (; count > 0 && end != std::string_view::npos; --count) {
    end = text.find_first_of(word_ends, end + 1);
  }
  return text.substr(0, end);
}

std::int64_t count_words(std::string_view text) {
  const auto is_end = [](char c) { return word_ends.find(c) != std::string_view::npos; };
  return text.empty() ? 0 : 1 + std::count_if(text.begin() + 1, text.end(), is_end);
}

std::string with_needles(const std::vector<std::string_view>& lines,
                         const std::vector<std::string>& needles, const std::vector<double>& places,
                         std::string_view separator) {
  std::vector<std::size_t> order(needles.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return places[a] < places[b]; });
  const auto slots = static_cast<double>(lines.size() + 1);
  std::string text;
  const auto add = [&](std::string_view line) {
    if (!text.empty()) text += separator;
    text += line;
  };
  std::size_t next = 0;
  for (std::size_t i = 0; i <= lines.size(); ++i) {
    while (next < order.size() &&
           (i == lines.size() || static_cast<std::size_t>(places[order[next]] * slots) <= i)) {
      add(needles[order[next++]]);
    }
    if (i < lines.size()) add(lines[i]);
  }
  return text;
}

}  // namespace kvzap::eval
