// The memory that a run needs, planned before anything is loaded.
#pragma once

#include <kvzap/core/communicator.hpp>
#include <kvzap/engine/policies.hpp>
#include <kvzap/model/memory_plan.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <string>

#include "commands/run/prompt.hpp"
#include "commands/support/setup.hpp"
#include "options/policy_options.hpp"

namespace kvzap::driver {

/// Returns the plan for `tokens` tokens on `ranks` ranks. `config` has the layers in use.
MemoryPlan plan_of(const EngineOptions& options, const ModelConfig& config, std::int64_t tokens,
                   int ranks, const PlannedEviction& eviction);

/// Returns a lower bound of the bytes that the largest rank needs: weights and prefill. `pruned`:
/// only one layer's keys and values are dense at a time, and the number of rows that stay is
/// unknown.
std::int64_t least_bytes(const MemoryPlan& plan, bool pruned);

/// Returns the most tokens that a budget prunes at once: the context, with a question if the policy
/// waits for it.
std::int64_t pruned_tokens(const Prompt& prompt, const Pruning& pruning);

/// Returns --kv-type, or the type that `auto` means for a context of `tokens`.
std::string resolved_kv_type(const EngineOptions& options, const ModelConfig& config,
                             std::int64_t tokens);

/// Carries out --dry-run: prints the plan and writes the report of --json. Collective. Throws
/// AgreedError.
void dry_run(RunOptions options, const ModelSetup& setup, const Tokenizer* tokenizer,
             std::int64_t limit, const Communicator& comm);

}  // namespace kvzap::driver
