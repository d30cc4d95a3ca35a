// FNV-1a: a hash for data without deliberate collisions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace kvzap::files {

constexpr std::uint64_t fnv_start = 14695981039346656037u;

/// Continues `hash` with the bytes of `data`.
inline std::uint64_t fnv1a(std::string_view data, std::uint64_t hash = fnv_start) {
  constexpr std::uint64_t prime = 1099511628211u;
  for (const char c : data) hash = (hash ^ static_cast<unsigned char>(c)) * prime;
  return hash;
}

}  // namespace kvzap::files
