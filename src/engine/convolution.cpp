#include "engine/convolution.hpp"

#include <algorithm>

#include "base/host_threads.hpp"
#include "base/launch.hpp"
#include "base/machine.hpp"
#include "linalg/host/state_space.hpp"

namespace kvzap::engine {
namespace {

/// The inputs of tokens before, in the state of a run's head.
struct EarlierInputs {
  ConvolvedRuns runs;
  LayerState before, after;

  KOKKOS_FUNCTION std::int64_t value(std::int64_t k, std::int64_t channel) const {
    return runs.offset + k * runs.token_stride + channel * runs.channel_stride;
  }
  KOKKOS_FUNCTION std::int64_t head(std::int64_t run) const {
    return runs.heads.extent(0) > 0 ? runs.heads(run) : run;
  }
};

/// The form of linalg::convolve for devices: one channel. From the last token to the first, so that
/// inputs are still there when later outputs need them.
struct ConvolveChannel {
  EarlierInputs earlier;
  linalg::Matrix rows;
  ConvolutionWeights weights;

  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const std::int64_t run = i / earlier.runs.channels, channel = i % earlier.runs.channels;
    const std::int64_t head = earlier.head(run), column = earlier.runs.first + i;
    const auto tokens = static_cast<std::int64_t>(rows.extent(0));
    const std::int64_t kept = weights.kernel - 1;
    float* const before = earlier.before.data() + head * earlier.before.stride(0);
    float* const after = earlier.after.data() + head * earlier.after.stride(0);
    float inputs[DeltaNetConfig::max_kernel] = {};
    for (std::int64_t k = 0; k < kept; ++k) inputs[k] = before[earlier.value(k, channel)];
    for (std::int64_t k = 0; k < kept; ++k) {
      const std::int64_t token = tokens - kept + k;
      after[earlier.value(k, channel)] = token >= 0 ? rows(token, column) : inputs[token + kept];
    }
    for (std::int64_t t = tokens - 1; t >= 0; --t) {
      float sum = weights.bias.extent(0) > 0 ? weights.bias(column) : 0.0f;
      for (std::int64_t k = 0; k <= kept; ++k) {
        const std::int64_t token = t - kept + k;
        sum += weights.weights(k * weights.channels + column) *
               (token >= 0 ? rows(token, column) : inputs[token + kept]);
      }
      rows(t, column) = sum;
    }
  }
};

/// The same for up to linalg::convolution_channels channels of a run, on a host.
void convolve_block(const ConvolveChannel& work, std::int64_t run, std::int64_t begin, int count) {
  constexpr int most = linalg::convolution_channels;
  const EarlierInputs& earlier = work.earlier;
  const std::int64_t column = earlier.runs.first + run * earlier.runs.channels + begin;
  const std::int64_t kept = work.weights.kernel - 1;
  const auto tokens = static_cast<std::int64_t>(work.rows.extent(0));
  const float* const before =
      earlier.before.data() +
      earlier.head(run) * static_cast<std::int64_t>(earlier.before.stride(0));
  float* const after =
      earlier.after.data() + earlier.head(run) * static_cast<std::int64_t>(earlier.after.stride(0));
  float inputs[DeltaNetConfig::max_kernel * most];
  for (std::int64_t k = 0; k < kept; ++k) {
    for (int c = 0; c < count; ++c) inputs[k * most + c] = before[earlier.value(k, begin + c)];
  }
  for (std::int64_t k = 0; k < kept; ++k) {
    const std::int64_t token = tokens - kept + k;
    const float* const from =
        token >= 0 ? &work.rows(token, column) : inputs + (token + kept) * most;
    for (int c = 0; c < count; ++c) after[earlier.value(k, begin + c)] = from[c];
  }
  linalg::ConvolutionRows channels;
  channels.rows = &work.rows(0, column);
  channels.stride = static_cast<std::int64_t>(work.rows.stride(0));
  channels.tokens = tokens;
  channels.weights = work.weights.weights.data() + column;
  channels.weight_stride = work.weights.channels;
  if (work.weights.bias.extent(0) > 0) channels.bias = work.weights.bias.data() + column;
  channels.earlier = inputs;
  channels.kernel = static_cast<int>(work.weights.kernel);
  channels.count = count;
  linalg::convolve(channels);
}

}  // namespace

void convolve(const ExecutionSpace& exec, const ConvolutionWeights& weights,
              const ConvolvedRuns& runs, const linalg::Matrix& rows, const LayerState& before,
              const LayerState& after) {
  const ConvolveChannel work{{runs, before, after}, rows, weights};
  const auto tokens = static_cast<std::int64_t>(rows.extent(0));
  if (tokens == 0) return;
  if (!base::machine().on_host()) {
    base::parallel_for("kvzap::convolve",
                       Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>(
                           exec, 0, runs.runs * runs.channels),
                       work);
    return;
  }
  constexpr std::int64_t most = linalg::convolution_channels;
  const std::int64_t blocks = (runs.channels + most - 1) / most;
  base::host_for("kvzap::convolve", runs.runs * blocks, most * weights.kernel * tokens,
                 [=](std::int64_t i) {
                   const std::int64_t begin = i % blocks * most;
                   convolve_block(work, i / blocks, begin,
                                  static_cast<int>(std::min(most, runs.channels - begin)));
                 });
}

}  // namespace kvzap::engine
