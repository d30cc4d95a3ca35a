// The numbers of rows that KVCompose's structured budget gives the layers.
#pragma once

#include <kvzap/engine/budget.hpp>
#include <vector>

namespace kvzap::policy {

/// Scores of composite tokens, descending. The composite token k of a layer consists of the row
/// with the k-th largest score of each of its heads.
using CompositeScores = std::vector<float>;

/// Returns the scores of a layer's composite tokens: means over the heads that have so many rows.
/// Scores that are NaN or infinite precede all others. Ranks exchange each head's sorted scores, so
/// that the means are the same for any placement of heads. Collective; waits for `exec`.
CompositeScores composite_scores(const ExecutionSpace& exec, const Communicator& comm,
                                 const ScoredLayer& layer, int kv_heads);

/// Returns how many composite tokens of each layer are among the `keep` with the largest scores, at
/// least 1 of a layer that has any. The scores of the first layer are the largest of all layers at
/// the same place, so that it keeps the most (KVCompose, arXiv 2509.05165, as in kvpress). Of equal
/// scores those of earlier layers stay. If `is_exact`, layers get their least token from `keep`.
std::vector<std::int64_t> composite_rows(std::vector<CompositeScores> layers, std::int64_t keep,
                                         bool is_exact);

}  // namespace kvzap::policy
