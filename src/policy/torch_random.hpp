// The normal random numbers that torch draws, for policies that are defined by them.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

namespace kvzap::policy {

/// The results of torch.randn on the CPU in float32, call after call, after
/// torch.manual_seed(seed): MT19937 and Box-Muller in blocks of 16 numbers. They are equal up to
/// the rounding of logarithm, sine and cosine. Calls for fewer than 16 numbers differ, because
/// torch handles them in another way.
class TorchNormals {
 public:
  explicit TorchNormals(std::uint32_t seed) : m_engine(seed) {}

  /// Returns the `count` numbers of the next call.
  std::vector<float> draw(std::int64_t count);
  /// Skips a call for `count` numbers.
  void skip(std::int64_t count);

 private:
  std::mt19937 m_engine;
};

/// The numbers of one call for each layer of a model, in the order of layers. They equal those of
/// torch in a program that sets the seed, runs the model and draws nothing else.
class LayerNormals {
 public:
  explicit LayerNormals(std::uint32_t seed) : m_seed(seed), m_stream(seed) {}

  /// Returns the numbers of a layer's call for `count` numbers. All layers must have the same
  /// count.
  std::vector<float> draw(int layer, std::int64_t count);

 private:
  std::uint32_t m_seed;
  TorchNormals m_stream;
  int m_next = 0;  // next layer
};

}  // namespace kvzap::policy
