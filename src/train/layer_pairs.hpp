// The finite pairs of a layer in kernel memory. An MLP reads them in each epoch.
#pragma once

#include <cstdint>
#include <kvzap/lab/train.hpp>
#include <vector>

#include "train/mlp_kernels.hpp"

namespace kvzap::train {

template <class Value>
struct LayerPairs {
  Kokkos::View<Value**, Kokkos::LayoutRight, MemorySpace> hidden;  // (rows, inputs), as stored
  linalg::Matrix scores;                                           // (rows, heads)
  std::vector<std::int64_t> training, validation;                  // rows, ascending
  std::vector<float> validation_scores;                            // (validation, heads)
  std::int64_t dropped = 0;
};

/// Reads the pairs. Throws Error if memory is exhausted, and forwards the errors of
/// PairSource::read.
template <class Value>
LayerPairs<Value> read_layer(const PairSource& source, int layer, const PairSplit& split);

}  // namespace kvzap::train
