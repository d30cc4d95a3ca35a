// Rows of activations, rounded to the type of a device's products.
#pragma once

#include <kvzap/core/types.hpp>
#include <type_traits>

#include "base/kokkos_compat.hpp"

namespace kvzap::linalg {

/// Returns the power of two that scales `largest`, the largest magnitude of a row, to [2^14, 2^15),
/// near the largest value of f16. Returns 0 for infinity and NaN, which stay unscaled.
KOKKOS_INLINE_FUNCTION int half_shift(float largest) {
  const int exponent = static_cast<int>((base::float_bits(largest) >> 23) & 0xffu) - 127;
  return exponent == 128 ? 0 : (exponent < -112 ? 126 : 14 - exponent);
}

/// 2^exponent, for -126 <= exponent <= 127.
KOKKOS_INLINE_FUNCTION float power_of_two(int exponent) {
  return base::bits_float(static_cast<std::uint32_t>(127 + exponent) << 23);
}

/// Rows of x (m, k), rounded to the type of weights, one after the other. They are made once for
/// all products that read them. Each row of f16 is scaled by a power of two so that nothing
/// overflows. Without values products take x itself, as they do for f32.
struct RoundedRows {
  DType dtype = DType::f32;
  void* values = nullptr;    // (m, k)
  float* unscale = nullptr;  // (m), f16 alone: undoes each row's scaling

  bool exist() const { return values != nullptr; }
};

/// Rounds rows in a kernel. Value must be the type of the rows' dtype.
template <class Value>
struct RowRounder {
  Value* values;
  float* unscale;

  explicit RowRounder(const RoundedRows& rows)
      : values(static_cast<Value*>(rows.values)), unscale(rows.unscale) {}

  static constexpr bool is_scaled = std::is_same_v<Value, half>;
  KOKKOS_INLINE_FUNCTION bool has_room() const { return values != nullptr; }

  /// Rounds a row of `size` values x(k). All threads of a team call this together, after they have
  /// written the values that x(k) reads.
  template <class Member, class Row>
  KOKKOS_INLINE_FUNCTION void store(const Member& team, std::int64_t row, std::int64_t size,
                                    const Row& x) const {
    if (!has_room()) return;
    Value* const target = values + row * size;
    float scale = 1;
    if constexpr (is_scaled) {
      float largest = 0;
      Kokkos::parallel_reduce(
          Kokkos::TeamThreadRange(team, size),
          [&](std::int64_t k, float& most) {
            const float magnitude = base::math::fabs(x(k));
            if (magnitude > most) most = magnitude;
          },
          Kokkos::Max<float>(largest));
      const int shift = half_shift(largest);
      scale = power_of_two(shift);
      Kokkos::single(Kokkos::PerTeam(team), [&] { unscale[row] = power_of_two(-shift); });
    }
    Kokkos::parallel_for(Kokkos::TeamThreadRange(team, size),
                         [&](std::int64_t k) { target[k] = Value(x(k) * scale); });
  }
};

}  // namespace kvzap::linalg
