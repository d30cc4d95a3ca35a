// The prompt of KVzip and KVzip+, the slow oracle from which surrogates learn. The model repeats
// the context; a pair's score is the largest attention that the repeat pays to it.
#pragma once

#include <cstdint>
#include <kvzap/core/types.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <string_view>
#include <vector>

namespace kvzap {

/// The prompt that makes the model repeat a context, in token ids (KVzip, arXiv 2505.23416, as in
/// kvpress).
struct RepeatPrompt {
  std::vector<TokenId> first;  // "\n\nRepeat the previous context exactly."
  /// "\n\nRepeat the part of the previous context exactly, starting with"
  std::vector<TokenId> later;
  std::vector<TokenId> suffix;  // the chat template's text after a user's message
  /// Tokens that the chat template puts at the beginning of the context. They are not repeated.
  std::int64_t prefix = 0;
  std::int64_t chunk = 2048;  // tokens repeated at a time
  std::int64_t overlap = 8;   // tokens of the previous chunk, shown after `later`
  /// The steps are the tokens of the context alone, its prefix included: nothing asks for them
  /// (KVCompose, arXiv 2509.05165).
  bool is_bare = false;
};

/// Returns the prompt for the `prefix` and `suffix` of a chat template (of an answer without
/// thinking). Without a template, pass "" and "\n" as kvpress does. `prefix` includes the special
/// tokens.
RepeatPrompt make_repeat_prompt(const Tokenizer& tokenizer, std::string_view prefix,
                                std::string_view suffix);

/// One step of the repeat: its tokens, and the positions of the context that they repeat.
struct RepeatStep {
  std::vector<TokenId> tokens;
  std::int64_t begin = 0;  // of the context
  std::int64_t end = 0;
};
/// Returns the steps that repeat a context, in order. Each step has the prompt, from the second
/// step on the end of the previous chunk, then the suffix and the chunk. Throws Error if the
/// context has no tokens after the prefix, or if the numbers in `prompt` are out of range.
std::vector<RepeatStep> repeat_steps(const std::vector<TokenId>& context,
                                     const RepeatPrompt& prompt);
/// Returns the tokens of the longest step for a context of `context` tokens. Their rows take memory
/// temporarily.
std::int64_t longest_repeat(std::int64_t context, const RepeatPrompt& prompt);

}  // namespace kvzap
