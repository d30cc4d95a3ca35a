// Whether values are finite.
#pragma once

#include <cstdint>
#include <kvzap/core/types.hpp>

namespace kvzap::attention {

// Without branches, so that the loops vectorize.
inline bool all_finite(const float* values, std::int64_t count) {
  std::uint32_t found = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    found |= (base::float_bits(values[i]) & 0x7f800000u) == 0x7f800000u ? 1u : 0u;
  }
  return found == 0;
}

inline bool all_finite(const bfloat16* values, std::int64_t count) {
  std::uint16_t found = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    found |= static_cast<std::uint16_t>((values[i].bits & 0x7f80u) == 0x7f80u);
  }
  return found == 0;
}

}  // namespace kvzap::attention
