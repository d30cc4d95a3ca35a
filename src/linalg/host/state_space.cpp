#include "linalg/host/state_space.hpp"

#include <algorithm>

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

}  // namespace
}  // namespace kvzap::linalg

#define KVZAP_LEVEL_BODY "linalg/host/state_space.inc"
#include "base/each_level.hpp"

namespace kvzap::linalg {

void state_space(const float* before, float* after, const StateSpaceRows& rows, int first,
                 int count, float* room) {
  KVZAP_AT_LEVEL(state_space)(before, after, rows, first, count, room);
}

void state_space_token(const float* before, float* after, const StateSpaceRows& rows, float* room) {
  KVZAP_AT_LEVEL(state_space_token)(before, after, rows, room);
}

KVZAP_KERNEL(void, convolve, (const ConvolutionRows& channels), (channels))

}  // namespace kvzap::linalg

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
