// Scores of a sequence's rows, by which the engine cuts.
#pragma once

#include <cstdint>

#include "engine/policy_step.hpp"

namespace kvzap::engine {

using LayerScores = decltype(PolicyStep::scores);

/// Copies the scores of the first rows, which a choice overwrites to mark sinks.
LayerScores copy_first(const ExecutionSpace& exec, const LayerScores& scores, std::int64_t sink);

/// Writes the copies of `copy_first` back.
void put_back(const ExecutionSpace& exec, const LayerScores& copies, const LayerScores& scores);

/// Counts the rows of [0, end) of each head that stay and lack a finite score. Waits.
std::int64_t count_non_finite(const ExecutionSpace& exec, const ScoredLayer& layer,
                              std::int64_t end);

/// Sets `keep` to the rows of [0, end) of each head that `rule` keeps, by their positions, and to
/// all rows after them.
void judge_rows(const ExecutionSpace& exec, const ScoredLayer& layer, const EvictionRule& rule,
                std::int64_t end);

}  // namespace kvzap::engine
