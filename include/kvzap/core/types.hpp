// Value types and the error type that all other headers use.
#pragma once

#include <Kokkos_Core.hpp>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>

/// A KV cache that frees the memory of evicted pairs, and a decoder over it.
namespace kvzap {

/// An error: the fault, the file and field, what was expected and what was found. Every public
/// function that can fail throws it. The program prints what() on rank 0 and exits with a non-zero
/// status.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

namespace base {
KOKKOS_INLINE_FUNCTION std::uint32_t float_bits(float value) {
  std::uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}
KOKKOS_INLINE_FUNCTION float bits_float(std::uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}
}  // namespace base

/// 16-bit brain floating point: the upper half of an IEEE binary32. Kokkos 3.4 has no such type. It
/// is a storage type with conversions only: arithmetic uses float.
struct bfloat16 {
  std::uint16_t bits;

  bfloat16() = default;
  /// Rounds to nearest even; NaN stays NaN.
  KOKKOS_INLINE_FUNCTION explicit bfloat16(float value) {
    const std::uint32_t word = base::float_bits(value);
    if ((word & 0x7fffffffu) > 0x7f800000u) {
      bits = static_cast<std::uint16_t>((word >> 16) | 0x40u);
    } else {
      bits = static_cast<std::uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
    }
  }
  // Implicit, because it is exact. NOLINTNEXTLINE(google-explicit-constructor)
  KOKKOS_INLINE_FUNCTION operator float() const {
    return base::bits_float(static_cast<std::uint32_t>(bits) << 16);
  }
};

/// IEEE binary16 as a storage type. (Kokkos 3.4's half_t is a float on the host.)
struct half {
  std::uint16_t bits;

  half() = default;
  /// Rounds to nearest even; overflow gives infinity; NaN stays NaN.
  KOKKOS_INLINE_FUNCTION explicit half(float value) {
    const std::uint32_t word = base::float_bits(value);
    const std::uint32_t sign = (word >> 16) & 0x8000u;
    const std::uint32_t magnitude = word & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
      bits = static_cast<std::uint16_t>(sign | 0x7e00u);
    } else if (magnitude >= 0x477ff000u) {  // 65520 and more round to infinity
      bits = static_cast<std::uint16_t>(sign | 0x7c00u);
    } else if (magnitude < 0x38800000u) {  // below 2^-14: subnormal, the addition rounds it
      const float shifted = base::bits_float(magnitude) + 0.5f;
      bits = static_cast<std::uint16_t>(sign | (base::float_bits(shifted) - 0x3f000000u));
    } else {
      const std::uint32_t odd = (magnitude >> 13) & 1u;
      bits = static_cast<std::uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
    }
  }
  // Implicit, because it is exact. NOLINTNEXTLINE(google-explicit-constructor)
  KOKKOS_INLINE_FUNCTION operator float() const {
    // A multiplication moves the exponent up. It is exact, subnormals included. Infinity and NaN
    // (all exponent bits set) need their exponent filled in. No branches, so that loops over rows
    // vectorize.
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
    const std::uint32_t magnitude = static_cast<std::uint32_t>(bits & 0x7fffu) << 13;
    const std::uint32_t special = (bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
    const float scaled = base::bits_float(magnitude) * base::bits_float(0x77800000u);
    return base::bits_float(base::float_bits(scaled) | special | sign);
  }
};

/// Value type of weights and of cached keys and values. Arithmetic always accumulates in float.
enum class DType { f32, f16, bf16 };

/// Returns the bytes of one value: 4, 2 or 2.
std::size_t size_of(DType dtype);
/// Returns "f32", "f16" or "bf16".
std::string_view name_of(DType dtype);
/// Returns the type with this name. Throws Error for any other text.
DType dtype_from_name(std::string_view name);

/// The DType of a C++ type.
template <class Value>
struct DTypeOf;
/// f32
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::f32;
};
/// f16
template <>
struct DTypeOf<half> {
  static constexpr DType value = DType::f16;
};
/// bf16
template <>
struct DTypeOf<bfloat16> {
  static constexpr DType value = DType::bf16;
};

/// The execution space of kernels: Kokkos' default.
using ExecutionSpace = Kokkos::DefaultExecutionSpace;
/// The memory space of weights, pages and activations.
using MemorySpace = ExecutionSpace::memory_space;

/// Token id; ids are below 2^31 in every published vocabulary.
using TokenId = std::int32_t;

}  // namespace kvzap
