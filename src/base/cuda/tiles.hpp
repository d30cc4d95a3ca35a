// Pieces of products on tensor cores that kernels share.
#pragma once

#if defined(__CUDACC__)
#include "base/cuda/instructions.hpp"
#else
#include "base/cuda/emulated.hpp"
#endif

namespace kvzap::base::cuda {

KVZAP_CUDA bool is_finite(float x) { return (float_bits(x) & 0x7f800000u) != 0x7f800000u; }

/// Two floats as pairs of Value whose sums are within 2^-18 of them: rounded, and what that leaves.
/// The rest of a value that is not finite is 0 if `keeps_infinity`, otherwise NaN.
template <class Value, bool keeps_infinity = true>
struct SplitPair {
  std::uint32_t upper, rest;

  KVZAP_CUDA SplitPair(float first, float second) : upper(rounded_pair<Value>(first, second)) {
    const FloatPair of_upper = floats_of<Value>(upper);
    float of_first = first - of_upper.lower, of_second = second - of_upper.upper;
    if constexpr (keeps_infinity) {
      if (!is_finite(of_upper.lower)) of_first = 0;
      if (!is_finite(of_upper.upper)) of_second = 0;
    }
    rest = rounded_pair<Value>(of_first, of_second);
  }
};

/// The largest of a number of four neighbouring lanes, which share a row of sums.
KVZAP_CUDA float largest_of_four(float x) {
  x = fmaxf(x, of_lane(x, lane_of_warp() ^ 1));
  return fmaxf(x, of_lane(x, lane_of_warp() ^ 2));
}
KVZAP_CUDA float sum_of_four(float x) {
  x += of_lane(x, lane_of_warp() ^ 1);
  return x + of_lane(x, lane_of_warp() ^ 2);
}

}  // namespace kvzap::base::cuda
