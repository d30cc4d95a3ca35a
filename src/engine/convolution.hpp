// Causal convolutions of channels, each by itself, with a form for hosts and a form for devices.
#pragma once

#include <kvzap/core/types.hpp>
#include <kvzap/model/model_config.hpp>

#include "linalg/gemm.hpp"

namespace kvzap::engine {

/// A layer's state of one sequence: (head, value).
using LayerState = Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>;
using ConstIndices = Kokkos::View<const int*, MemorySpace>;

struct ConvolutionWeights {
  linalg::ConstVector weights;  // (kernel, channels), oldest token first
  linalg::ConstVector bias;     // (channels), or empty
  std::int64_t kernel = 1;      // at most DeltaNetConfig::max_kernel
  std::int64_t channels = 0;
};

/// Runs of channels: run r has the channels and columns first + r * channels, …. The inputs of the
/// kernel - 1 tokens before lie in the state of one head: input k, oldest first, of the run's
/// channel c is value offset + k * token_stride + c * channel_stride.
struct ConvolvedRuns {
  std::int64_t first = 0, runs = 0, channels = 0;
  std::int64_t offset = 0, token_stride = 0, channel_stride = 1;
  ConstIndices heads = {};  // of each run; empty: run r has head r
};

/// Replaces a sequence's rows (token, column) by their convolution, and writes the inputs of the
/// last tokens to `after`, which may be `before`.
void convolve(const ExecutionSpace& exec, const ConvolutionWeights& weights,
              const ConvolvedRuns& runs, const linalg::Matrix& rows, const LayerState& before,
              const LayerState& after);

}  // namespace kvzap::engine
