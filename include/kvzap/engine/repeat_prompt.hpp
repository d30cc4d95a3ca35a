// KVzip and KVzip+: the slow oracle that surrogates learn from. The model repeats the context; a
// pair's score is the largest attention that the repeat pays to it.
#pragma once

#include <cstdint>
#include <kvzap/core/types.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <string_view>
#include <vector>

namespace kvzap {

/// How the model is asked to repeat a context, in token ids (KVzip, arXiv 2505.23416, as kvpress
/// has it).
struct RepeatPrompt {
  std::vector<TokenId> first;  // "\n\nRepeat the previous context exactly."
  /// "\n\nRepeat the part of the previous context exactly, starting with"
  std::vector<TokenId> later;
  std::vector<TokenId> suffix;  // what the chat template puts behind a user's message
  /// Tokens at the beginning of the context that the chat template puts there, which are not
  /// repeated.
  std::int64_t prefix = 0;
  std::int64_t chunk = 2048;  // tokens repeated at a time
  std::int64_t overlap = 8;   // of the chunk before, shown after `later`
};

/// The prompt between a chat template's `prefix` and `suffix` (of an answer without thinking);
/// without a template kvpress has "" and "\n". Special tokens belong into `prefix`.
RepeatPrompt make_repeat_prompt(const Tokenizer& tokenizer, std::string_view prefix,
                                std::string_view suffix);

/// A step of the repeat: its tokens, and which positions of the context they repeat.
struct RepeatStep {
  std::vector<TokenId> tokens;
  std::int64_t begin = 0;  // of the context
  std::int64_t end = 0;
};
/// The steps that repeat a context, in order: each shows the prompt, what is left of the chunk
/// before (from the second on), the suffix, and the chunk. Throws Error if the context has no
/// tokens behind the prefix, or the prompt's numbers are out of range.
std::vector<RepeatStep> repeat_steps(const std::vector<TokenId>& context,
                                     const RepeatPrompt& prompt);
/// Tokens of the longest step for a context of so many tokens: what its rows take for a while.
std::int64_t longest_repeat(std::int64_t context, const RepeatPrompt& prompt);

}  // namespace kvzap
