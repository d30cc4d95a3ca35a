// From what options say of a policy to the policy itself: its files, the prompt with which the
// model repeats a context, the texts that it learns from.
#pragma once

#include <kvzap/core/communicator.hpp>
#include <kvzap/engine/engine.hpp>
#include <kvzap/engine/policies.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "commands/setup.hpp"
#include "options/options.hpp"
#include "options/policy_options.hpp"

namespace kvzap::driver {

/// Of all layers, of which the first are used: that is what a policy's files are for.
ModelConfig whole_config(const ModelSetup& setup);

/// How the model is asked to repeat the context, if the policy wants that; the same on all ranks.
/// Rank 0 has the context and the tokenizer, or loads one where the prompt is token ids.
/// Collective. Throws AgreedError if there is nothing to repeat.
std::optional<RepeatPrompt> share_repeat_prompt(
    const RunOptions& options, const std::optional<PolicySpec>& spec, const Tokenizer* tokenizer,
    const std::vector<TokenId>& context, const ModelConfig& config, const Communicator& comm);

/// Loads what the policy needs. Does not communicate.
std::shared_ptr<PolicyChoice> load_choice(const RunOptions& options, const PolicySpec& spec,
                                          const std::optional<RepeatPrompt>& repeat,
                                          const ModelSetup& setup, const Communicator& comm);

/// Token ids of texts.
using Texts = std::vector<std::vector<TokenId>>;

/// The texts from which the policy learns, if it does. Rank 0 has the tokenizer, or loads one.
/// Collective.
Texts load_policy_texts(const RunOptions& options, const PolicyChoice* choice,
                        const Tokenizer* tokenizer, const ModelConfig& config,
                        const Communicator& comm);

/// What the options say of a cache, but for a policy that is to be loaded.
CacheOptions cache_options(const RunOptions& options);

/// The threshold that reaches --evict-ratio. Rank 0 alone reads the table, so that no rank has
/// another threshold while somebody replaces the file; prints warnings if `talks`. Collective.
LookedUpThreshold share_threshold(const RunOptions& options, bool talks, const Communicator& comm);

}  // namespace kvzap::driver
