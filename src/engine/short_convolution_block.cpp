#include "engine/short_convolution_block.hpp"

#include <algorithm>

#include "base/host_threads.hpp"
#include "base/launch.hpp"
#include "base/machine.hpp"
#include "linalg/host/row_kernels.hpp"

namespace kvzap::engine {

using linalg::ConstMatrix;
using linalg::Matrix;

namespace {

using ShortRange = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;

// Channels of a work item, so that a decode step uses all threads.
constexpr std::int64_t short_channels = 256;

bool is_short(const Step& step, int layer) {
  return step.config.layer(layer).mixing == TokenMixing::short_convolution;
}

/// Runs work(row, first column, count) on the host for parts of all rows of y.
template <class Work>
void for_short_parts(const char* label, const Matrix& y, const Work& work) {
  const auto columns = static_cast<std::int64_t>(y.extent(1));
  const std::int64_t parts = (columns + short_channels - 1) / short_channels;
  base::host_for(label, static_cast<std::int64_t>(y.extent(0)) * parts, short_channels,
                 [=](std::int64_t i) {
                   const std::int64_t first = i % parts * short_channels;
                   work(i / parts, first, std::min(short_channels, columns - first));
                 });
}

}  // namespace

void multiply_inputs(const ExecutionSpace& exec, const ConstMatrix& projected, const Matrix& y) {
  const auto n = static_cast<std::int64_t>(y.extent(1));
  if (base::machine().on_host()) {
    return for_short_parts("kvzap::short_convolution::inputs", y,
                           [=](std::int64_t row, std::int64_t first, std::int64_t count) {
                             std::copy_n(&projected(row, first), count, &y(row, first));
                             linalg::multiply(&y(row, first), &projected(row, 2 * n + first),
                                              count);
                           });
  }
  base::parallel_for(
      "kvzap::short_convolution::inputs", ShortRange(exec, 0, static_cast<std::int64_t>(y.size())),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t row = i / n, c = i % n;
        y(row, c) = projected(row, c) * projected(row, 2 * n + c);
      });
}

void multiply_outputs(const ExecutionSpace& exec, const ConstMatrix& projected, const Matrix& y) {
  const auto n = static_cast<std::int64_t>(y.extent(1));
  if (base::machine().on_host()) {
    return for_short_parts("kvzap::short_convolution::outputs", y,
                           [=](std::int64_t row, std::int64_t first, std::int64_t count) {
                             linalg::multiply(&y(row, first), &projected(row, n + first), count);
                           });
  }
  base::parallel_for(
      "kvzap::short_convolution::outputs", ShortRange(exec, 0, static_cast<std::int64_t>(y.size())),
      KOKKOS_LAMBDA(std::int64_t i) { y(i / n, i % n) *= projected(i / n, n + i % n); });
}

void ShortConvolutionBlock::reserve(Step& step) {
  for (int l = 0; l < static_cast<int>(step.config.num_hidden_layers); ++l) {
    if (!is_short(step, l)) continue;
    const std::int64_t channels = step.cache.shape().states[l].heads;
    step.reserve(Step::projected, step.most_rows() * 3 * channels);
    step.reserve(Step::mixed, step.most_rows() * channels);
  }
}

Matrix ShortConvolutionBlock::run(Step& step, int layer, const RowRange& rows, const Matrix& x) {
  const auto& weights = step.weights(layer);
  const std::int64_t channels = step.cache.shape().states[layer].heads;
  const std::int64_t kernel = step.config.short_convolution->kernel;
  const Matrix projected = step.matrix(Step::projected, rows.count(), 3 * channels);
  const Matrix mixed = step.matrix(Step::mixed, rows.count(), channels);
  step.locally([&] {
    step.linear(step.exec, x, step.rounded, weights.mixer_in, weights.mixer_in_bias, projected);
    multiply_inputs(step.exec, projected, mixed);
    const ConvolutionWeights own{weights.convolution, weights.convolution_bias, kernel, channels};
    ConvolvedRuns runs;
    runs.runs = 1;
    runs.channels = channels;
    runs.token_stride = 1;
    runs.channel_stride = kernel - 1;
    step.for_each_span(rows, [&](std::size_t s, std::int64_t begin, std::int64_t end) {
      const SequenceId sequence = step.spans()[s].sequence;
      const auto state = step.cache.state(step.exec, sequence, layer);
      const Matrix of_span =
          Kokkos::subview(mixed, range(begin - rows.begin, end - rows.begin), Kokkos::ALL);
      convolve(step.exec, own, runs, of_span, state.before, state.after);
    });
    multiply_outputs(step.exec, projected, mixed);
  });
  return mixed;
}

}  // namespace kvzap::engine
