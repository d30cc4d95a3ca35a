// The normal random numbers that torch draws, for policies that are defined with them.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

namespace kvzap::detail {

/// What torch.randn gives on the CPU in float32, call after call, after torch.manual_seed(seed):
/// MT19937 and Box-Muller in blocks of 16 numbers, up to the rounding of logarithm, sine and
/// cosine. Calls for fewer than 16 numbers, which torch serves in another way, get others.
class TorchNormals {
 public:
  explicit TorchNormals(std::uint32_t seed) : m_engine(seed) {}

  /// `count` numbers: those of the next call.
  std::vector<float> draw(std::int64_t count);
  /// Leaves out a call for as many.
  void skip(std::int64_t count);

 private:
  std::mt19937 m_engine;
};

/// The numbers of one call for each layer of a model, in order of layers: torch's in a program
/// that sets the seed, runs the model and draws nothing else.
class LayerNormals {
 public:
  explicit LayerNormals(std::uint32_t seed) : m_seed(seed), m_stream(seed) {}

  /// Those of a layer's call for `count`, which is the same for all layers.
  std::vector<float> draw(int layer, std::int64_t count);

 private:
  std::uint32_t m_seed;
  TorchNormals m_stream;
  int m_next = 0;  // layer whose numbers come next
};

}  // namespace kvzap::detail
