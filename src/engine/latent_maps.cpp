#include "engine/latent_maps.hpp"

#include <algorithm>

#include "base/host_threads.hpp"
#include "base/launch.hpp"
#include "base/machine.hpp"
#include "engine/attention_gates.hpp"
#include "engine/policy_layer.hpp"
#include "engine/step_kernels.hpp"

namespace kvzap::engine {

using linalg::Matrix;

namespace {

using Range = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;

template <class Work>
void for_each_token(const ExecutionSpace& exec, const char* label, std::int64_t tokens,
                    std::int64_t weight, const Work& work) {
  if (base::machine().on_host()) return base::host_for(label, tokens, weight, work);
  base::parallel_for(label, Range(exec, 0, tokens), work);
}

Matrix columns_of(const Matrix& matrix, std::int64_t begin, std::int64_t count) {
  return Kokkos::subview(matrix, Kokkos::ALL, range(begin, begin + count));
}

/// Where a row of head_dim values has its parts: the first dimensions of RoPE's pairs from 0 on,
/// the second ones half a head later, and the latent in two parts behind them.
struct RowParts {
  std::int64_t turning;  // pairs
  std::int64_t half;
  std::int64_t dim;

  static RowParts of(const ModelConfig& config) {
    return {config.latent->rope_dim / 2, config.head_dim / 2, config.head_dim};
  }
};

// Copies RoPE's dimensions of queries, which project() has computed behind the others of a head.
void place_queries(const ExecutionSpace& exec, const LatentConfig& latent, const RowParts& parts,
                   std::int64_t heads, const Matrix& queries, const Matrix& target) {
  const std::int64_t query_dim = latent.query_dim(), nope = latent.nope_dim;
  for_each_token(
      exec, "kvzap::latent::queries", queries.extent(0), heads * latent.rope_dim,
      KOKKOS_LAMBDA(std::int64_t token) {
        for (std::int64_t h = 0; h < heads; ++h) {
          const float* const from = &queries(token, h * query_dim + nope);
          float* const to = &target(token, h * parts.dim);
          for (std::int64_t i = 0; i < parts.turning; ++i) {
            to[i] = from[i];
            to[parts.half + i] = from[parts.turning + i];
          }
        }
      });
}

// Writes the row's key: its latent (rank), which is normed, and RoPE's key behind it.
void place_keys(const ExecutionSpace& exec, const LatentConfig& latent, const RowParts& parts,
                const Matrix& rows, const Matrix& target) {
  const std::int64_t rank = latent.rank;
  for_each_token(
      exec, "kvzap::latent::keys", rows.extent(0), parts.dim, KOKKOS_LAMBDA(std::int64_t token) {
        const float* const from = &rows(token, 0);
        float* const to = &target(token, 0);
        const std::int64_t first = parts.half - parts.turning;  // of the latent
        for (std::int64_t i = 0; i < parts.turning; ++i) {
          to[i] = from[rank + i];
          to[parts.half + i] = from[rank + parts.turning + i];
        }
        for (std::int64_t i = 0; i < first; ++i) {
          to[parts.turning + i] = from[i];
          to[parts.half + parts.turning + i] = from[first + i];
        }
      });
}

void norm(const ExecutionSpace& exec, const LatentConfig& latent, const linalg::Vector& weight,
          const Matrix& rows) {
  add_and_norm(exec, rows, Matrix(), {weight, static_cast<float>(latent.norm_eps)}, rows,
               linalg::RoundedRows());
}

}  // namespace

void LatentMaps::reserve(const Step& step) {
  const LatentConfig& latent = *step.config.latent;
  const std::int64_t m = step.most_rows();
  std::int64_t heads = 0;
  for (const auto& layer : step.model.weights().layers) {
    heads = std::max(heads, static_cast<std::int64_t>(layer.latent.to_key.size()));
  }
  const auto reserve = [](linalg::Vector& buffer, std::int64_t count) {
    base::reserve_scratch(buffer, count, "kvzap::latent");
  };
  reserve(m_query_latents, m * latent.query_rank);
  reserve(m_queries, m * heads * latent.query_dim());
  reserve(m_row_latents, m * (latent.rank + latent.rope_dim));
  reserve(m_values, m * heads * latent.value_dim);
  if (latent.gates_heads) reserve(m_head_gates, m * heads);
}

void LatentMaps::release() {
  m_query_latents = {};
  m_queries = {};
  m_row_latents = {};
  m_values = {};
  m_head_gates = {};
}

void LatentMaps::project(Step& step, int layer, const Matrix& x, const Matrix& computed) {
  const LatentConfig& latent = *step.config.latent;
  const auto& weights = step.weights(layer).latent;
  const RowParts parts = RowParts::of(step.config);
  const std::int64_t m = x.extent(0), dim = step.config.head_dim;
  const auto heads = static_cast<std::int64_t>(weights.to_key.size());
  const Matrix queries(m_queries.data(), m, heads * latent.query_dim());
  const Matrix latents(m_query_latents.data(), m, latent.query_rank);
  const Matrix rows(m_row_latents.data(), m, latent.rank + latent.rope_dim);
  const bool has_row = static_cast<std::int64_t>(computed.extent(1)) > heads * dim;
  // First the products of x: the others overwrite x rounded.
  if (latent.query_rank > 0) {
    step.linear(step.exec, x, step.rounded, weights.query_in, weights.query_in_bias, latents);
  } else if (heads > 0) {
    step.linear(step.exec, x, step.rounded, weights.query, {}, queries);
  }
  if (has_row) {
    step.linear(step.exec, x, step.rounded, weights.row_in, weights.row_in_bias, rows);
  }
  if (latent.gates_heads) {
    step.linear(step.exec, x, step.rounded, weights.head_gates, {},
                Matrix(m_head_gates.data(), m, heads));
  }
  if (latent.query_rank > 0) {
    norm(step.exec, latent, weights.query_norm, latents);
    if (heads > 0) step.linear(step.exec, latents, weights.query, {}, queries);
  }
  for (std::int64_t h = 0; h < heads; ++h) {
    step.linear(step.exec, columns_of(queries, h * latent.query_dim(), latent.nope_dim),
                weights.to_key[h], {}, columns_of(computed, h * dim, dim));
  }
  place_queries(step.exec, latent, parts, heads, queries, computed);
  if (!has_row) return;
  norm(step.exec, latent, weights.row_norm, columns_of(rows, 0, latent.rank));
  place_keys(step.exec, latent, parts, rows, columns_of(computed, heads * dim, dim));
}

Matrix LatentMaps::expand(Step& step, int layer, const Matrix& attended) {
  const std::int64_t value_dim = step.config.latent->value_dim, dim = step.config.head_dim;
  const auto& maps = step.weights(layer).latent.from_value;
  const auto heads = static_cast<std::int64_t>(maps.size());
  const Matrix values(m_values.data(), attended.extent(0), heads * value_dim);
  step.locally([&] {
    for (std::int64_t h = 0; h < heads; ++h) {
      step.linear(step.exec, columns_of(attended, h * dim, dim), maps[h], {},
                  columns_of(values, h * value_dim, value_dim));
    }
    if (!step.config.latent->gates_heads) return;
    apply_gates(step.exec, Matrix(m_head_gates.data(), attended.extent(0), heads), {value_dim},
                values);
  });
  return values;
}

void LatentOutputWeights::of_head(const ExecutionSpace& exec, const Model::Weights::Layer& weights,
                                  std::int64_t head, const Matrix& y) {
  const linalg::LinearWeights& map = weights.latent.from_value[head];
  const std::int64_t value_dim = map.outputs(), dim = map.inputs(), hidden = y.extent(1);
  base::reserve_scratch(m_outputs, value_dim * hidden, "kvzap::latent::outputs");
  base::reserve_scratch(m_from_value, dim * value_dim, "kvzap::latent::from_value");
  const Matrix outputs(m_outputs.data(), value_dim, hidden);
  const Matrix from_value(m_from_value.data(), dim, value_dim);
  take_inputs(exec, weights.o, head * value_dim, outputs);
  take_inputs(exec, map, 0, from_value);
  linalg::multiply_nn(exec, 1, from_value, outputs, 0, y);
}

void LatentOutputWeights::of_all(const ExecutionSpace& exec, const Model::Weights::Layer& weights,
                                 const Matrix& y) {
  const auto heads = static_cast<std::int64_t>(weights.latent.from_value.size());
  for (std::int64_t h = 0; h < heads; ++h) {
    const std::int64_t dim = weights.latent.from_value[h].inputs();
    of_head(exec, weights, h, Kokkos::subview(y, range(h * dim, (h + 1) * dim), Kokkos::ALL));
  }
}

void clear_rotated(const ExecutionSpace& exec, const ModelConfig& config, const Matrix& rows) {
  const RowParts parts = RowParts::of(config);
  base::parallel_for(
      "kvzap::latent::clear_rotated", Range(exec, 0, rows.extent(0) * parts.turning),
      KOKKOS_LAMBDA(std::int64_t i) {
        rows(i / parts.turning, i % parts.turning) = 0;
        rows(i / parts.turning, parts.half + i % parts.turning) = 0;
      });
}

}  // namespace kvzap::engine
