// Random numbers of training. They depend on the seed and their purpose, never on earlier draws.
// Any rank can train any layer, and training can resume at any epoch.
#pragma once

#include <cstdint>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

namespace kvzap::train {

enum class RandomStream : std::uint64_t { split = 1, initial = 2, order = 3 };

/// Derives a 64-bit seed for a purpose (SplitMix64: Steele, Lea and Flood, OOPSLA 2014).
inline std::uint64_t seed_of(std::uint64_t seed, RandomStream stream, std::uint64_t layer,
                             std::uint64_t epoch) {
  std::uint64_t state = seed;
  for (const std::uint64_t word : {static_cast<std::uint64_t>(stream), layer, epoch}) {
    state += 0x9e3779b97f4a7c15u * (word + 1);
    state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9u;
    state = (state ^ (state >> 27)) * 0x94d049bb133111ebu;
    state ^= state >> 31;
  }
  return state;
}

/// Draws a uniform whole number in [0, bound). The standard library's distributions differ between
/// implementations; its generators do not.
inline std::uint64_t below(std::mt19937_64& random, std::uint64_t bound) {
  const std::uint64_t rest = (~bound + 1) % bound;  // 2^64 mod bound
  std::uint64_t drawn = random();
  while (drawn < rest) drawn = random();
  return drawn % bound;
}

/// Draws uniformly from [0, 1), in multiples of 2^-53.
inline double uniform(std::mt19937_64& random) {
  return static_cast<double>(random() >> 11) * 0x1p-53;
}

/// Draws a uniformly random permutation of 0 … count - 1 (Fisher and Yates).
inline std::vector<std::int64_t> permutation(std::int64_t count, std::uint64_t seed) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), std::int64_t{0});
  std::mt19937_64 random(seed);
  for (std::size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1], order[below(random, i)]);
  }
  return order;
}

}  // namespace kvzap::train
