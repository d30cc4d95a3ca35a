#include "engine/rope_angles.hpp"

#include <cmath>
#include <map>

namespace kvzap::engine {
namespace {

linalg::Vector on_device(const std::vector<float>& frequencies) {
  linalg::Vector copy("kvzap::decoder::inverse_frequencies", frequencies.size());
  Kokkos::deep_copy(
      copy, Kokkos::View<const float*, Kokkos::HostSpace>(frequencies.data(), frequencies.size()));
  return copy;
}

bool scales_queries(const ModelConfig& config) {
  return config.attention_multiplier || config.query_scaling;
}

template <class Angles>
void reserve_angles(Angles& angles, std::int64_t tokens, std::int64_t pairs) {
  if (static_cast<std::int64_t>(angles.extent(0)) >= tokens) return;
  angles = Angles();
  ++base::memory_moves;
  angles = Angles(Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::decoder::angles"), tokens,
                  pairs, 2);
}

}  // namespace

RopeAngles::RopeAngles(const ModelConfig& config)
    : m_frequencies(on_device(rope_inverse_frequencies(config))) {
  if (config.window_rope_theta) {
    const ModelConfig of_windows = with_window_rope(config);
    m_window_frequencies = on_device(rope_inverse_frequencies(of_windows));
    if (of_windows.head_dim != config.head_dim) m_window_dim = of_windows.head_dim;
  }
}

void RopeAngles::reserve(const Step& step) {
  if (!step.model.weights().are_here()) return;  // keys arrive after RoPE
  const ModelConfig& config = step.config;
  reserve_angles(m_angles, step.tokens(), config.head_dim / 2);
  if (config.window_rope_theta) {
    reserve_angles(m_of_windows, step.tokens(),
                   static_cast<std::int64_t>(m_window_frequencies.extent(0)));
  }
  if (config.rope_depends_on_length()) {
    base::reserve_scratch(m_table_of, step.tokens(), "kvzap::decoder::tables");
  }
  if (scales_queries(config)) {
    base::reserve_scratch(m_query_scales, step.tokens(), "kvzap::decoder::query_scales");
    base::reserve_scratch(m_window_scales, m_window_dim > 0 ? step.tokens() : 0,
                          "kvzap::decoder::query_scales");
  }
}

void RopeAngles::fill(Step& step) {
  step.locally([&] {
    linalg::ConstMatrix frequencies(m_frequencies.data(), 1, m_frequencies.extent(0));
    Kokkos::View<const std::int64_t*, MemorySpace> tables;
    if (step.config.rope_depends_on_length()) {
      choose_tables(step);
      frequencies = m_tables;
      tables = m_table_of;
    }
    fill_angles(step.exec, step.tokens(), step.positions, tables, frequencies,
                step.config.rope_attention_factor(), m_angles);
    const auto pairs = static_cast<std::int64_t>(m_window_frequencies.extent(0));
    if (pairs > 0) {
      fill_angles(step.exec, step.tokens(), step.positions, {},
                  linalg::ConstMatrix(m_window_frequencies.data(), 1, pairs), 1, m_of_windows);
    }
    if (!scales_queries(step.config)) return;
    scale_queries(step, step.config.head_dim, m_query_scales);
    if (m_window_dim > 0) scale_queries(step, m_window_dim, m_window_scales);
  });
}

// Chooses the frequencies of each span by the length of its sequence after the step.
void RopeAngles::choose_tables(const Step& step) {
  const RopeScaling& scaling = *step.config.rope_scaling;
  const auto host = Kokkos::create_mirror_view(m_table_of);
  std::map<std::int64_t, std::int64_t> table_of_length = {{0, 0}};
  std::vector<float> rows = rope_inverse_frequencies(step.config);
  for (std::size_t s = 0; s < step.spans().size(); ++s) {
    const StepBatch::Span& span = step.spans()[s];
    std::int64_t length = step.first_positions[s] + span.count;
    if (length <= scaling.original_max_position_embeddings) length = 0;
    // longrope has one table for all longer texts.
    if (length > 0 && scaling.type == RopeType::longrope) {
      length = scaling.original_max_position_embeddings + 1;
    }
    const auto [entry, is_new] =
        table_of_length.emplace(length, static_cast<std::int64_t>(table_of_length.size()));
    if (is_new) {
      const std::vector<float> row = rope_inverse_frequencies(step.config, length);
      rows.insert(rows.end(), row.begin(), row.end());
    }
    std::fill_n(host.data() + span.first, span.count, entry->second);
  }
  Kokkos::deep_copy(m_table_of, host);
  const std::int64_t pairs = step.config.head_dim / 2;
  const auto count = static_cast<std::int64_t>(rows.size()) / pairs;
  if (static_cast<std::int64_t>(m_tables.extent(0)) != count) {
    m_tables = linalg::Matrix("kvzap::decoder::frequency_tables", count, pairs);
  }
  Kokkos::deep_copy(m_tables, Kokkos::View<const float**, Kokkos::LayoutRight, Kokkos::HostSpace>(
                                  rows.data(), count, pairs));
}

void RopeAngles::scale_queries(const Step& step, std::int64_t head_dim,
                               const linalg::Vector& of_tokens) {
  const ModelConfig& config = step.config;
  const double all = config.attention_multiplier
                         ? *config.attention_multiplier * std::sqrt(static_cast<double>(head_dim))
                         : 1;
  const auto scales = Kokkos::subview(of_tokens, range(0, step.tokens()));
  const auto host = Kokkos::create_mirror_view(scales);
  for (std::size_t s = 0; s < step.spans().size(); ++s) {
    const StepBatch::Span& span = step.spans()[s];
    for (std::int64_t i = 0; i < span.count; ++i) {
      double scale = all;
      if (config.query_scaling) {
        const QueryScaling& scaling = *config.query_scaling;
        const std::int64_t position = step.first_positions[s] + i + scaling.offset;
        scale *= 1 + scaling.beta * std::log1p(static_cast<double>(position / scaling.length));
      }
      host(span.first + i) = static_cast<float>(scale);
    }
  }
  Kokkos::deep_copy(scales, host);
}

linalg::ConstVector RopeAngles::query_scales(const ModelConfig& config,
                                             const LayerConfig& layer) const {
  const bool in_layer =
      !config.query_scaling || config.query_scaling->in_rope_layers || !layer.has_rope;
  if (!scales_queries(config) || !in_layer) return {};
  return layer.head_dim > 0 && m_window_dim > 0 ? m_window_scales : m_query_scales;
}

void RopeAngles::release() {
  // Not = {}: Clang 14 would emit no destructor for these types.
  m_angles = Buffer();
  m_of_windows = Buffer();
  m_table_of = decltype(m_table_of)();
  m_query_scales = m_window_scales = {};
}

}  // namespace kvzap::engine
