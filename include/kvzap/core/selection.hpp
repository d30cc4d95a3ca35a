// Selection of the largest scores of heads, of a layer or of a whole model, over ranks.
#pragma once

#include <cstdint>
#include <kvzap/core/communicator.hpp>
#include <kvzap/core/eviction.hpp>
#include <kvzap/core/types.hpp>
#include <vector>

namespace kvzap {

/// The scores of one KV head of one layer, and the pool in which they compete.
struct ScoreSegment {
  /// (row), in order of position; may be empty.
  Kokkos::View<const float*, Kokkos::LayoutStride, MemorySpace> scores;
  /// Segments of the same pool compete with each other, whichever ranks they are on.
  std::int64_t pool = 0;
  /// Rank of the segment within its pool for ties, for example layer * KV heads + KV head. Two
  /// segments of a pool must not have the same order.
  std::int64_t order = 0;
};

/// Selects the largest scores of each pool, exactly. It computes the cutoff of each of this rank's
/// segments `mine` such that `keep_of_pool[p]` rows of pool p stay, over all ranks and segments.
/// Three passes over the bits of the scores find the k-th largest score. Ranks exchange only
/// counts. So the result does not depend on the number of ranks, on the placement of segments or on
/// their order in `mine`.
///
/// Ties stay in order of (segment's order, position). Zero and negative zero are equal. As in
/// EvictionRule, a score that is NaN or infinite, of either sign, cannot be judged. It counts as
/// larger than all others and stays, even if more than `keep_of_pool[p]` rows then stay. So the
/// number of rows that stay is max(keep, number of NaN or infinite scores), and a larger `keep`
/// keeps all rows of a smaller one.
///
/// Returns a Cutoff for each segment in `mine`; {infinity, 0} if no finite score stays. Collective,
/// with the same `keep_of_pool` on every rank; a rank may have no segments. If each pool's segments
/// are all on one rank, the call communicates only to exchange extents and for one agreement. Waits
/// for `exec`. Allocates.
///
/// Throws AgreedError if `keep_of_pool` differs over ranks, lacks a segment's pool, or is not
/// within [0, rows of the pool]. Throws it also if two segments of a pool have the same order.
std::vector<Cutoff> select_top(const ExecutionSpace& exec, const Communicator& comm,
                               const std::vector<ScoreSegment>& mine,
                               const std::vector<std::int64_t>& keep_of_pool);

}  // namespace kvzap
