// Helpers of the vectorized attention kernels: padding, exp, and the shift of a softmax.
#pragma once

#include <cstdint>
#include <kvzap/core/types.hpp>

#include "base/simd.hpp"
#include "base/vec.hpp"

namespace kvzap::attention {

/// Returns `count` rounded up to a multiple of `unit`.
constexpr std::int64_t whole(std::int64_t count, std::int64_t unit) {
  return (count + unit - 1) / unit * unit;
}

}  // namespace kvzap::attention

#define KVZAP_LEVEL_BODY "attention/host/vector_math.inc"
#include "base/each_level.hpp"

#if KVZAP_X86
namespace kvzap::attention {

// For code that uses intrinsics.
KVZAP_INLINE_AVX2 __m256 exp_nonpositive(__m256 x) {
  return avx2::exp_nonpositive(base::Vec8{x}).v;
}
KVZAP_INLINE_AVX512 __m512 exp_nonpositive(__m512 x) {
  return avx512::exp_nonpositive(base::Vec16{x}).v;
}
KVZAP_INLINE_AVX2 __m256 shift_of(__m256 maximum) { return avx2::shift_of(base::Vec8{maximum}).v; }
KVZAP_INLINE_AVX512 __m512 shift_of(__m512 maximum) {
  return avx512::shift_of(base::Vec16{maximum}).v;
}

KVZAP_INLINE_AVX512 __m512 exp2_of(__m512 x) { return avx512::exp2_of(base::Vec16{x}).v; }

/// Returns lanes first + i < count of 8 as a mask.
KVZAP_INLINE_AVX2 __m256i lanes_before(int count, int first) {
  return base::Vec8::first(count - first).m;
}

}  // namespace kvzap::attention
#endif
