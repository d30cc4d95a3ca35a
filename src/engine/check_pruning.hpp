// The rules that an engine adds to those of every LoadedPruning.
#pragma once

#include <kvzap/engine/pruning.hpp>
#include <kvzap/model/model_config.hpp>

namespace kvzap::engine {

/// Throws PruningError as check does. Throws Error for a policy that rotates keys or queries to
/// other positions, if the model's RoPE frequencies depend on the length of the sequence. Throws
/// Error for a policy that lacks the prompt with which the model repeats the context.
void check_for_engine(const LoadedPruning& pruning, bool has_scorer, const ModelConfig& config);

}  // namespace kvzap::engine
