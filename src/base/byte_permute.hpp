// Bytes of words as numbers, in few instructions on a GPU.
#pragma once

#include <kvzap/core/types.hpp>

namespace kvzap::base {

/// Returns byte i of a word as a float.
KOKKOS_FORCEINLINE_FUNCTION float byte_float(std::uint32_t word, int i) {
  // The bits of 2^23 + byte. A conversion has half the rate of these operations on a GPU.
#if defined(__CUDA_ARCH__)
  const std::uint32_t bits = __byte_perm(word, 0x4b000000u, 0x7440u | static_cast<unsigned>(i));
#else
  const std::uint32_t bits = 0x4b000000u | ((word >> (8 * i)) & 0xffu);
#endif
  return bits_float(bits) - 8388608.0f;
}

/// Returns four of the eight bytes of `low` and `high`: the one whose number is in the lower 3 bits
/// of each of the selector's lower four groups of 4 bits, whose upper bit is 0.
KOKKOS_FORCEINLINE_FUNCTION std::uint32_t permute_bytes(std::uint32_t low, std::uint32_t high,
                                                        std::uint32_t selector) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(low, high, selector & 0xffffu);
#else
  if ((selector & 0x8888u) != 0) Kokkos::abort("permute_bytes: a selector names no byte");
  const std::uint64_t all = std::uint64_t{high} << 32 | low;
  std::uint32_t found = 0;
  for (int i = 0; i < 4; ++i) {
    const auto byte = static_cast<std::uint32_t>(all >> (8 * ((selector >> (4 * i)) & 7u)));
    found |= (byte & 0xffu) << (8 * i);
  }
  return found;
#endif
}

}  // namespace kvzap::base
