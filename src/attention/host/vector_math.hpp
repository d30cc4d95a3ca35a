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
