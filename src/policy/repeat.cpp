#include <fmt/format.h>

#include <algorithm>
#include <kvzap/engine/repeat_prompt.hpp>

namespace kvzap {
namespace {

void append_ids(std::vector<TokenId>& target, const std::vector<TokenId>& ids) {
  target.insert(target.end(), ids.begin(), ids.end());
}

RepeatPrompt without_words(std::int64_t chunk) {
  RepeatPrompt bare;
  bare.chunk = chunk;
  bare.overlap = 0;
  bare.is_bare = true;
  return bare;
}

}  // namespace

RepeatPrompt make_repeat_prompt(const Tokenizer& tokenizer, std::string_view prefix,
                                std::string_view suffix) {
  RepeatPrompt prompt;
  prompt.first = tokenizer.encode("\n\nRepeat the previous context exactly.");
  prompt.later =
      tokenizer.encode("\n\nRepeat the part of the previous context exactly, starting with");
  prompt.suffix = tokenizer.encode(suffix);
  prompt.prefix = static_cast<std::int64_t>(tokenizer.encode(prefix).size());
  return prompt;
}

std::vector<RepeatStep> repeat_steps(const std::vector<TokenId>& context,
                                     const RepeatPrompt& asked) {
  const RepeatPrompt prompt = asked.is_bare ? without_words(asked.chunk) : asked;
  const auto tokens = static_cast<std::int64_t>(context.size());
  if (prompt.chunk < 1 || prompt.overlap < 0 || prompt.prefix < 0) {
    throw Error(
        fmt::format("repeat of the context: chunks of {} tokens, {} of the chunk before, a "
                    "prefix of {}; expected at least 1, 0 and 0",
                    prompt.chunk, prompt.overlap, prompt.prefix));
  }
  if (tokens <= prompt.prefix) {
    throw Error(
        fmt::format("there is nothing to repeat: the context has {} tokens, of which the first {} "
                    "are the chat template's",
                    tokens, prompt.prefix));
  }
  std::vector<RepeatStep> steps;
  for (std::int64_t begin = prompt.prefix; begin < tokens; begin += prompt.chunk) {
    RepeatStep step;
    step.begin = begin;
    step.end = std::min(tokens, begin + prompt.chunk);
    append_ids(step.tokens, steps.empty() ? prompt.first : prompt.later);
    if (!steps.empty()) {
      // No more tokens than the previous chunk has: the prefix is not part of it.
      const std::int64_t from = std::max(steps.back().begin, begin - prompt.overlap);
      step.tokens.insert(step.tokens.end(), context.begin() + from, context.begin() + begin);
    }
    append_ids(step.tokens, prompt.suffix);
    step.tokens.insert(step.tokens.end(), context.begin() + begin, context.begin() + step.end);
    steps.push_back(std::move(step));
  }
  return steps;
}

std::int64_t longest_repeat(std::int64_t context, const RepeatPrompt& prompt) {
  if (prompt.is_bare) return std::min(context, prompt.chunk);
  const std::int64_t repeated = std::max<std::int64_t>(0, context - prompt.prefix);
  auto words = static_cast<std::int64_t>(prompt.first.size());
  if (repeated > prompt.chunk) {
    words = std::max(words, static_cast<std::int64_t>(prompt.later.size()) +
                                std::min(prompt.overlap, prompt.chunk));
  }
  return words + static_cast<std::int64_t>(prompt.suffix.size()) + std::min(repeated, prompt.chunk);
}

}  // namespace kvzap
