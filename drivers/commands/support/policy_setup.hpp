// Makes a policy from options: its files, the prompt with which the model repeats a context, and
// the texts from which it learns.
#pragma once

#include <kvzap/core/communicator.hpp>
#include <kvzap/engine/engine.hpp>
#include <kvzap/engine/thresholds.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "commands/support/setup.hpp"
#include "options/options.hpp"
#include "options/policy_options.hpp"

namespace kvzap::driver {

/// Returns the prompt that asks the model to repeat the context, if the policy needs one. All ranks
/// get the same prompt. Rank 0 has the context and the tokenizer; for prompts of token ids it loads
/// the tokenizer. Collective. Throws AgreedError if there is nothing to repeat.
std::optional<RepeatPrompt> share_repeat_prompt(const EngineOptions& options,
                                                const ModelSetup& setup, const Tokenizer* tokenizer,
                                                const std::vector<TokenId>& context,
                                                const Communicator& comm);

/// Loads the policy of the options' pruning. Does not communicate.
LoadedPruning load_policy(const EngineOptions& options, const std::optional<RepeatPrompt>& repeat,
                          const ModelSetup& setup, const Communicator& comm);

/// Throws UsageError for an amount of the options that keeps less than one row of `tokens`.
void check_budget(const EngineOptions& options, const PolicyChoice& policy,
                  const ModelConfig& config, std::int64_t tokens, const PageFormat& format);

/// Token ids of texts.
using Texts = std::vector<std::vector<TokenId>>;

/// Returns the texts from which the policy learns; none for other policies. Rank 0 has the
/// tokenizer or loads it. Collective.
Texts load_policy_texts(const EngineOptions& options, const PolicyChoice* choice,
                        const ModelSetup& setup, const Tokenizer* tokenizer,
                        const Communicator& comm);

/// Calls kvzap::resolve_window. Prints the window of `--window auto` if `talks`. Collective.
void resolve_window(Pruning& pruning, const Communicator& comm, bool talks);

/// Calls resolve_window, and kvzap::resolve_threshold for the options' pruning. Prints the warnings
/// if `talks`. Collective.
std::optional<LookedUpThreshold> resolve_threshold(EngineOptions& options, bool talks,
                                                   const Communicator& comm);

}  // namespace kvzap::driver
