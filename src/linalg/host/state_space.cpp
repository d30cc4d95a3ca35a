#include "linalg/host/state_space.hpp"

#include <algorithm>

#include "base/exp_nonpositive.hpp"
#include "base/vec.hpp"

// Within the columns that a call works on, offsets fit an int.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

namespace kvzap::linalg {
namespace {

// From the last token to the first, so that inputs are still there when later outputs need them.
KVZAP_BODY void convolve_body(const ConvolutionRows& channels) {
  constexpr int most = convolution_channels;
  const int count = channels.count, kernel = channels.kernel;
  for (std::int64_t t = channels.tokens - 1; t >= 0; --t) {
    float sums[most] = {};
    if (channels.bias != nullptr) std::copy_n(channels.bias, count, sums);
    for (int k = 0; k < kernel; ++k) {
      const std::int64_t token = t - (kernel - 1) + k;
      const float* const weights = channels.weights + k * channels.weight_stride;
      const float* const inputs = token >= 0 ? channels.rows + token * channels.stride
                                             : channels.earlier + (token + kernel - 1) * most;
      if (count == most) {
        for (int c = 0; c < most; ++c) sums[c] += weights[c] * inputs[c];
      } else {
        for (int c = 0; c < count; ++c) sums[c] += weights[c] * inputs[c];
      }
    }
    std::copy_n(sums, count, channels.rows + t * channels.stride);
  }
}

/// One row of columns of Mamba-1's state takes up a token.
KVZAP_BODY void update_cells(float* cells, const float* rates, const float* steps,
                             const float* inputs, float b, float c, float* sums, int count) {
  for (int i = 0; i < count; ++i) {
    cells[i] = base::exp_nonpositive(-rates[i] * steps[i]) * cells[i] + b * inputs[i];
    sums[i] += c * cells[i];
  }
}

KVZAP_BODY void channel_space_body(const float* before, float* after, const StateSpaceRows& rows,
                                   int first, int count) {
  constexpr int most = space_columns;
  const std::int64_t dim = rows.head_dim;
  for (int n = 0; n < rows.state_dim; ++n) {
    std::copy_n(before + n * dim + first, count, after + n * dim + first);
  }
  for (std::int64_t t = 0; t < rows.tokens; ++t) {
    const float* const x = rows.x + t * rows.stride + first;
    const float* const b = rows.b + t * rows.stride;
    const float* const c = rows.c + t * rows.stride;
    const float* const steps = rows.steps + t * rows.step_stride + first;
    float inputs[most] = {}, sums[most] = {};
    for (int i = 0; i < count; ++i) inputs[i] = steps[i] * x[i];
    for (int n = 0; n < rows.state_dim; ++n) {
      float* const cells = after + n * dim + first;
      const float* const rates = rows.rates + n * dim + first;
      if (count == most) {  // a number that the compiler knows
        update_cells(cells, rates, steps, inputs, b[n], c[n], sums, most);
      } else {
        update_cells(cells, rates, steps, inputs, b[n], c[n], sums, count);
      }
    }
    float* const out = rows.outputs + t * rows.output_stride + first;
    for (int i = 0; i < count; ++i) out[i] = sums[i] + rows.skips[first + i] * x[i];
  }
}

KVZAP_KERNEL(void, channel_space,
             (const float* before, float* after, const StateSpaceRows& rows, int first, int count),
             (before, after, rows, first, count))

}  // namespace
}  // namespace kvzap::linalg

#define KVZAP_LEVEL_BODY "linalg/host/state_space.inc"
#include "base/each_level.hpp"

namespace kvzap::linalg {

void state_space(const float* before, float* after, const StateSpaceRows& rows, int first,
                 int count, float* room) {
  if (rows.rates != nullptr) return channel_space(before, after, rows, first, count);
  KVZAP_AT_LEVEL(state_space)(before, after, rows, first, count, room);
}

void state_space_token(const float* before, float* after, const StateSpaceRows& rows, float* room) {
  KVZAP_AT_LEVEL(state_space_token)(before, after, rows, room);
}

KVZAP_KERNEL(void, convolve, (const ConvolutionRows& channels), (channels))

}  // namespace kvzap::linalg

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
