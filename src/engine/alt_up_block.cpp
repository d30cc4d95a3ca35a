#include "engine/alt_up_block.hpp"

#include <cmath>

#include "base/launch.hpp"
#include "engine/step_kernels.hpp"

namespace kvzap::engine {

using linalg::Matrix;

void AltUpBlock::reserve(Step& step) {
  const AltUpConfig& config = *step.config.alt_up;
  const std::int64_t m = step.most_rows(), hidden = step.config.hidden_size;
  const auto reserve_floats = [](linalg::Vector& buffer, std::int64_t count) {
    base::reserve_scratch(buffer, count, "kvzap::decoder::streams");
  };
  reserve_floats(m_streams, config.streams * step.tokens() * hidden);
  reserve_floats(m_normed, m * hidden);
  reserve_floats(m_augmented, m * hidden);
  reserve_floats(m_ranked, m * config.laurel_rank);
  reserve_floats(m_routed, m * config.streams);
  reserve_floats(m_factors, m * config.streams * config.streams);
}

void AltUpBlock::release() {
  for (linalg::Vector* const buffer :
       {&m_streams, &m_normed, &m_augmented, &m_ranked, &m_routed, &m_factors}) {
    *buffer = {};
  }
}

StreamRows AltUpBlock::streams(const Step& step, const RowRange& rows) const {
  const std::int64_t hidden = step.config.hidden_size;
  return {m_streams.data() + rows.begin * hidden, step.tokens() * hidden,
          step.config.alt_up->streams, rows.count(), hidden};
}

Matrix AltUpBlock::stream(const Step& step, std::int64_t stream, const RowRange& rows) const {
  return Matrix(streams(step, rows).at(stream, 0), rows.count(), step.config.hidden_size);
}

void AltUpBlock::make_streams(Step& step) {
  const auto& maps = step.model.weights().stream_in;
  for (std::int64_t begin = 0; begin < step.tokens(); begin += step.most_rows()) {
    const RowRange rows{begin, std::min(step.tokens(), begin + step.most_rows())};
    const Matrix h = Kokkos::subview(step.h, range(rows.begin, rows.end), Kokkos::ALL);
    const Matrix first = stream(step, 0, rows);
    base::launch([exec = step.exec, first, h] { Kokkos::deep_copy(exec, first, h); });
    for (std::size_t s = 0; s < maps.size(); ++s) {
      const Matrix other = stream(step, static_cast<std::int64_t>(s) + 1, rows);
      step.linear(step.exec, h, {}, maps[s], {}, other);
      match_magnitude(step.exec, h, other);
    }
  }
}

// The learned functions of x from which the factors follow: (row, stream).
Matrix AltUpBlock::route(Step& step, int layer, const Matrix& x) {
  const auto& weights = step.weights(layer).alt_up;
  const auto m = static_cast<std::int64_t>(x.extent(0));
  const std::int64_t hidden = step.config.hidden_size;
  const Matrix normed(m_normed.data(), m, hidden);
  const Matrix routed(m_routed.data(), m, step.config.alt_up->streams);
  add_and_norm(step.exec, x, Matrix(), norm_of(step.config, weights.router_norm), normed, {});
  scale(step.exec, normed, 1.0f / static_cast<float>(hidden));
  step.linear(step.exec, normed, {}, weights.router, {}, routed);
  tanh_rows(step.exec, routed);
  return routed;
}

void AltUpBlock::predict(Step& step, int layer, const RowRange& rows) {
  const AltUpConfig& config = *step.config.alt_up;
  const Matrix routed = route(step, layer, stream(step, config.active, rows));
  const Matrix factors(m_factors.data(), rows.count(), config.streams * config.streams);
  step.linear(step.exec, routed, {}, step.weights(layer).alt_up.prediction, {}, factors);
  mix_streams(step.exec, streams(step, rows), factors, config.active,
              Kokkos::subview(step.h, range(rows.begin, rows.end), Kokkos::ALL));
}

void AltUpBlock::augment(Step& step, int layer, const Matrix& x) {
  const auto& weights = step.weights(layer).alt_up;
  const auto m = static_cast<std::int64_t>(x.extent(0));
  const Matrix ranked(m_ranked.data(), m, step.config.alt_up->laurel_rank);
  const Matrix augmented(m_augmented.data(), m, step.config.hidden_size);
  step.linear(step.exec, x, {}, weights.laurel_in, {}, ranked);
  step.linear(step.exec, ranked, {}, weights.laurel_out, {}, augmented);
  add_and_norm(step.exec, augmented, Matrix(), norm_of(step.config, weights.laurel_norm), augmented,
               {});
  add(step.exec, augmented, x);
}

void AltUpBlock::add_augmented(Step& step, const Matrix& of_tokens, const Matrix& h) {
  add(step.exec, h, of_tokens);
  add(step.exec, h, Matrix(m_augmented.data(), h.extent(0), h.extent(1)));
  scale(step.exec, h, std::sqrt(0.5f));
}

void AltUpBlock::correct(Step& step, int layer, const RowRange& rows) {
  const AltUpConfig& config = *step.config.alt_up;
  const auto& weights = step.weights(layer).alt_up;
  const Matrix h = Kokkos::subview(step.h, range(rows.begin, rows.end), Kokkos::ALL);
  const Matrix routed = route(step, layer, h);
  const Matrix factors(m_factors.data(), rows.count(), config.streams);
  step.linear(step.exec, routed, {}, weights.correction, {}, factors);
  correct_streams(step.exec, streams(step, rows), factors, config.active,
                  config.scales_output ? linalg::ConstVector(weights.scale) : linalg::ConstVector(),
                  h);
}

void AltUpBlock::add_to_others(Step& step, const RowRange& rows, const Matrix& y) {
  for (std::int64_t s = 1; s < step.config.alt_up->streams; ++s) {
    add(step.exec, stream(step, s, rows), y);
  }
}

void AltUpBlock::join_streams(Step& step) {
  const auto& maps = step.model.weights().stream_out;
  const RowRange read =
      step.read_rows(static_cast<int>(step.config.num_hidden_layers) - 1, {0, step.tokens()});
  for (std::int64_t begin = read.begin; begin < read.end; begin += step.most_rows()) {
    const RowRange rows{begin, std::min(read.end, begin + step.most_rows())};
    const Matrix h = Kokkos::subview(step.h, range(rows.begin, rows.end), Kokkos::ALL);
    const Matrix first = stream(step, 0, rows);
    const Matrix other(m_normed.data(), rows.count(), step.config.hidden_size);
    base::launch([exec = step.exec, first, h] { Kokkos::deep_copy(exec, h, first); });
    for (std::size_t s = 0; s < maps.size(); ++s) {
      step.linear(step.exec, stream(step, static_cast<std::int64_t>(s) + 1, rows), {}, maps[s], {},
                  other);
      match_magnitude(step.exec, first, other);
      add(step.exec, h, other);
    }
    scale(step.exec, h, 1.0f / static_cast<float>(maps.size() + 1));
  }
}

}  // namespace kvzap::engine
