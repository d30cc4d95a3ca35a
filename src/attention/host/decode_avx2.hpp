// Decode attention's kernels for processors with AVX2 and FMA.
#pragma once

#include <type_traits>

#include "attention/host/row_blocks.hpp"

namespace kvzap::attention {

/// Returns the lane of dim d in a block of 16 dims of queries and sums. The kernels widen a vector
/// of 16 bfloat16 to the even dims and the odd dims.
template <class Value>
constexpr int avx2_lane_of_dim(int d) {
  return std::is_same_v<Value, bfloat16> ? d % 2 * 8 + d / 2 : d;
}

#if KVZAP_X86
/// Adds a run's rows to blocks of `block_queries` (1, 2 or 4) query heads. blocks.queries:
/// [block][16 dims][query][16]; maximum and weight: [block][block_lanes], where lane e of the first
/// 8 belongs to query e % block_queries; sums: [query][padded]. Needs SimdLevel::avx2.
template <class Value>
void attend_blocks_avx2(int block_queries, const Blocks<Value>& blocks, const RowRun<Value>& run,
                        const RowRun<Value>& next);
#endif

}  // namespace kvzap::attention
