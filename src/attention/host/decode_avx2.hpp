// Decode attention's kernels for processors with AVX2 and FMA.
#pragma once

#include <type_traits>

#include "attention/host/row_blocks.hpp"

namespace kvzap::detail {

/// Lane of a block of 16 dims, of queries and sums, in which the kernels keep dim d of it. A vector
/// of 16 bfloat16 is widened to those of even and those of odd dims.
template <class Value>
constexpr int avx2_lane_of_dim(int d) {
  return std::is_same_v<Value, bfloat16> ? d % 2 * 8 + d / 2 : d;
}

#if KVZAP_X86
/// Takes a run's rows into blocks of `block_queries` (1, 2 or 4) query heads.
/// blocks.queries: [block][16 dims][query][16]; maximum and weight: [block][block_lanes], lane e of
/// the first 8 belongs to query e % block_queries; sums: [query][padded]. Needs
/// SimdLevel::avx2.
template <class Value>
void attend_blocks_avx2(int block_queries, const Blocks<Value>& blocks, const RowRun<Value>& run,
                        const RowRun<Value>& next);
#endif

}  // namespace kvzap::detail
