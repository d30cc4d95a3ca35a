// The recurrences of state spaces and short convolutions on the host, compiled for several
// instruction sets as row_kernels.hpp is.
#pragma once

#include <cstdint>

namespace kvzap::linalg {

/// The tokens that one head of a state space takes up. Rows of different tokens lie `stride` floats
/// apart.
struct StateSpaceRows {
  const float* x = nullptr;  // (token, head_dim)
  const float* b = nullptr;  // (token, state_dim)
  const float* c = nullptr;  // (token, state_dim)
  std::int64_t stride = 0;
  const float* steps = nullptr;  // (token), `step_stride` floats apart
  std::int64_t step_stride = 0;
  const float* decays = nullptr;  // (token), `decay_stride` floats apart
  std::int64_t decay_stride = 0;
  float skip = 0;
  // Of Mamba-1, else null: each cell and channel by itself. `steps` is (token, head_dim) then, and
  // decays and skip are unused.
  const float* rates = nullptr;  // (state_dim, head_dim)
  const float* skips = nullptr;  // (head_dim)
  float* outputs = nullptr;      // (token, head_dim)
  std::int64_t output_stride = 0;
  std::int64_t tokens = 0;
  int state_dim = 0, head_dim = 0;
};

/// Columns of a state that state_space takes at once: with 128 rows, half of an L1 cache of 32 KiB.
constexpr int space_columns = 32;

/// Updates the columns first … first + count - 1 of a head's state S (state_dim, head_dim) with
/// each token in turn, S' = decay S + b (step x)^T, from `before` to `after`, which may be the
/// same, and writes these columns of the outputs S'^T c + skip x (StateSpaceConfig has the
/// formula, and that of Mamba-1). count <= space_columns. `room`: state_dim * space_columns floats.
void state_space(const float* before, float* after, const StateSpaceRows& rows, int first,
                 int count, float* room);

/// Does the same with all columns of a head and one token, row by row of the state. A decode step
/// reads each state from memory once, and parts of rows would come at half the rate. Not of
/// Mamba-1. `room`: 2 * head_dim floats.
void state_space_token(const float* before, float* after, const StateSpaceRows& rows, float* room);

/// Neighbouring channels of a causal convolution, each by itself.
struct ConvolutionRows {
  float* rows = nullptr;  // (token, count): inputs, overwritten by outputs; `stride` floats apart
  std::int64_t stride = 0, tokens = 0;
  const float* weights = nullptr;  // (kernel, count), `weight_stride` floats apart, oldest first
  std::int64_t weight_stride = 0;
  const float* bias = nullptr;     // (count), or null
  const float* earlier = nullptr;  // (kernel - 1, convolution_channels): inputs of tokens before
  int kernel = 1, count = 0;
};

/// Channels that convolve takes at most.
constexpr int convolution_channels = 32;

void convolve(const ConvolutionRows& channels);

}  // namespace kvzap::linalg
