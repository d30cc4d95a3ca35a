// Which scores are the largest of many heads, of a layer, or of a whole model, over ranks.
#pragma once

#include <cstdint>
#include <kvzap/core/communicator.hpp>
#include <kvzap/core/eviction.hpp>
#include <kvzap/core/types.hpp>
#include <vector>

namespace kvzap {

/// The scores of one KV head of one layer, and what they compete with.
struct ScoreSegment {
  /// (row), in order of position; may be empty.
  Kokkos::View<const float*, Kokkos::LayoutStride, MemorySpace> scores;
  /// The segments of one pool, on whichever ranks, compete for the same places.
  std::int64_t pool = 0;
  /// The segment's place among those of its pool, for ties: layer * KV heads + KV head, say. No two
  /// segments of a pool have the same.
  std::int64_t order = 0;
};

/// Exact selection of the largest scores of each pool: where to cut each of this rank's segments
/// `mine` so that `keep_of_pool[p]` rows of pool p stay, over all ranks and segments. The k-th
/// largest score is found by three passes over the scores' bits; what is summed over ranks are
/// counts, so that the result depends neither on the number of ranks, nor on where segments are or
/// in which order they are given.
///
/// Ties stay in order of (segment's order, position). Zero and negative zero are equal. As in
/// EvictionRule, a score that is NaN or infinite, of either sign, is no number to judge by: it
/// counts as larger than all others and stays, even if that makes more than `keep_of_pool[p]`. So
/// the rows that stay are max(keep, scores that are NaN or infinite), and those of a larger `keep`
/// include those of a smaller one.
///
/// Returns a Cutoff for each of `mine`; where no finite score stays, it is {infinity, 0}.
/// Collective, with the same `keep_of_pool` on every rank; a rank may have no segments. Pools
/// whose segments all lie on one rank cost no communication but the call's exchange of extents and
/// one agreement. Waits for `exec`. Throws AgreedError if `keep_of_pool` differs over ranks or is
/// not within [0, rows of the pool], a pool is not in it, or two segments of a pool have the same
/// order.
std::vector<Cutoff> select_top(const ExecutionSpace& exec, const Communicator& comm,
                               const std::vector<ScoreSegment>& mine,
                               const std::vector<std::int64_t>& keep_of_pool);

}  // namespace kvzap
