// Random-looking bits of a number, the same on any rank and in every step.
#pragma once

#include <Kokkos_Macros.hpp>
#include <cstdint>

namespace kvzap::policy {

/// The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection with
/// random-looking outputs.
KOKKOS_INLINE_FUNCTION std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace kvzap::policy
