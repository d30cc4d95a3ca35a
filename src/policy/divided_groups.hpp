// The rows that stay of groups that a budget may divide.
#pragma once

#include <cstdint>
#include <vector>

namespace kvzap::policy {

struct GroupSizes {
  std::int64_t length;  // rows of a group; the last may be shorter
  std::int64_t spiky;   // rows that stay of a spiky group
};

/// Returns which of the rows stay (kvpress' EntropyGatedChunkKVPress). Groups are taken by the mean
/// of their scores s, the largest first, until `keep` rows stay:
///
///   h = -sum_i p_i log p_i / log n,  p_i = s_i / sum_i s_i, from scores less the least if that is
///   negative
///
/// Of a group with at least the median mean and less than the median h, only the `spiky` rows with
/// the largest scores stay. Rows with the largest scores fill what is left. Of equal ones the older
/// come first. Rows without a finite score stay in addition; groups see them as 0.
std::vector<std::uint8_t> divided_groups(const std::vector<double>& scores, const GroupSizes& sizes,
                                         std::int64_t keep);

}  // namespace kvzap::policy
