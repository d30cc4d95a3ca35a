// KVzip and KVzip+: the slow oracle that surrogates learn from. The model repeats the context; a
// pair's score is the largest attention that the repeat pays to it.
#pragma once

#include <cstdint>
#include <kvzap/tokenizer.hpp>
#include <kvzap/types.hpp>
#include <string>
#include <vector>

namespace kvzap {

/// How the model is asked to repeat a context, in token ids (KVzip, arXiv 2505.23416, as kvpress
/// has it).
struct RepeatPrompt {
  std::vector<TokenId> first;  // "\n\nRepeat the previous context exactly."
  std::vector<TokenId>
      later;  // "\n\nRepeat the part of the previous context exactly, starting with"
  std::vector<TokenId> suffix;  // what the chat template puts behind a user's message
  /// Tokens at the beginning of the context that the chat template puts there, which are not
  /// repeated.
  std::int64_t prefix = 0;
  std::int64_t chunk = 2048;  // tokens repeated at a time
  std::int64_t overlap = 8;   // of the chunk before, shown after `later`
};

/// A step of the repeat: its tokens, and which positions of the context they repeat.
struct RepeatStep {
  std::vector<TokenId> tokens;
  std::int64_t begin = 0;  // of the context
  std::int64_t end = 0;
};
/// The steps that repeat a context, in order.
std::vector<RepeatStep> repeat_steps(const std::vector<TokenId>& context,
                                     const RepeatPrompt& prompt);

}  // namespace kvzap
