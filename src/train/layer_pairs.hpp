// The finite pairs of a layer in kernel memory. An MLP reads them in each epoch.
#pragma once

#include <cstdint>
#include <kvzap/lab/train.hpp>
#include <vector>

#include "train/mlp_kernels.hpp"

namespace kvzap::train {

struct LayerPairs {
  Kokkos::View<char**, Kokkos::LayoutRight, MemorySpace> hidden_bytes;  // (rows, bytes of inputs)
  linalg::Matrix scores;                                                // (rows, heads)
  std::vector<std::int64_t> training, validation;                       // rows, ascending
  std::vector<float> validation_scores;                                 // (validation, heads)
  std::int64_t dropped = 0;
  DType dtype = DType::f32;

  /// Returns the hidden states as stored: (rows, inputs).
  ConstArrayView hidden() const {
    const auto inputs = static_cast<std::int64_t>(hidden_bytes.extent(1) / size_of(dtype));
    return {hidden_bytes.data(),
            dtype,
            {static_cast<std::int64_t>(hidden_bytes.extent(0)), 1, inputs},
            {inputs, inputs, 1}};
  }
};

/// Reads the pairs. Throws Error if memory is exhausted, and forwards the errors of
/// PairSource::read.
LayerPairs read_layer(const PairSource& source, int layer, const PairSplit& split);

}  // namespace kvzap::train
