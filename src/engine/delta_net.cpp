#include "engine/delta_net.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/host_threads.hpp"
#include "base/kokkos_compat.hpp"
#include "base/machine.hpp"
#include "linalg/host/delta_rule.hpp"
#include "linalg/host/row_kernels.hpp"

namespace kvzap::engine {
namespace {

using DeltaRange = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;

constexpr float length_eps = 1e-6f;  // of the lengths of queries and keys

KOKKOS_INLINE_FUNCTION float sigmoid(float x) { return 1.0f / (1.0f + base::math::exp(-x)); }

/// SiLU of the channels, lengths of queries and keys, strengths and decays: of a key head's part of
/// each token.
void prepare(const ExecutionSpace& exec, const DeltaNet& net, const DeltaWeights& weights,
             const linalg::Matrix& rows, const linalg::Matrix& rates) {
  const std::int64_t of_head = net.config.channels(), dim = net.config.key_dim;
  const std::int64_t key_heads = net.key_heads, value_heads = net.value_heads();
  const std::int64_t group = net.config.group();
  const linalg::ConstVector decay_rates = weights.decay_rates, shifts = weights.decay_shifts;
  const auto strength = static_cast<float>(net.config.strength_multiplier);
  const auto fill_rates = KOKKOS_LAMBDA(std::int64_t token, std::int64_t key_head) {
    for (std::int64_t head = key_head * group; head < (key_head + 1) * group; ++head) {
      rates(token, head) = strength * sigmoid(rates(token, head));
      const float x = rates(token, value_heads + head) + shifts(head);
      // softplus(x), without an overflow of the exponential
      const float step = x > 20.0f ? x : base::math::log1p(base::math::exp(x));
      rates(token, value_heads + head) = base::math::exp(-decay_rates(head) * step);
    }
  };
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  const std::int64_t parts = static_cast<std::int64_t>(rows.extent(0)) * key_heads;
  if (base::machine().on_host()) {
    return base::host_for("kvzap::delta_net::prepare", parts, 4 * of_head, [=](std::int64_t i) {
      const std::int64_t token = i / key_heads, head = i % key_heads;
      float* const query = &rows(token, head * of_head);
      linalg::silu(query, of_head);
      // x / sqrt(sum + eps) = RMS norm of x with eps / dim, times 1 / sqrt(dim)
      const float eps = length_eps / static_cast<float>(dim);
      linalg::rms_norm(query, nullptr, eps, query, dim);
      linalg::rms_norm(query + dim, nullptr, eps, query + dim, dim);
      linalg::scale(query, dim, scale * scale);
      linalg::scale(query + dim, dim, scale);
      fill_rates(token, head);
    });
  }
  Kokkos::parallel_for(
      "kvzap::delta_net::prepare", DeltaRange(exec, 0, parts), KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t token = i / key_heads, head = i % key_heads;
        float* const row = &rows(token, head * of_head);
        float lengths[2] = {};
        for (std::int64_t c = 0; c < of_head; ++c) {
          row[c] *= sigmoid(row[c]);
          if (c < 2 * dim) lengths[c / dim] += row[c] * row[c];
        }
        for (std::int64_t c = 0; c < 2 * dim; ++c) {
          row[c] *= (c < dim ? scale : 1.0f) / base::math::sqrt(lengths[c / dim] + length_eps);
        }
        fill_rates(token, head);
      });
}

/// The form of linalg::delta_rule for devices: one column of a value head's state.
struct DeltaColumn {
  linalg::Matrix rows, rates, outputs;
  DeltaState before, after;
  std::int64_t channels_of_head = 0, key_dim = 0, value_dim = 0, group = 1, value_heads = 0;

  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const std::int64_t head = i / value_dim, column = i % value_dim;
    const std::int64_t key_head = head / group, own = head % group;
    const std::int64_t first = own * key_dim * value_dim + column;
    float* const cells = &after(key_head, first);
    for (std::int64_t d = 0; d < key_dim; ++d) {
      cells[d * value_dim] = before(key_head, first + d * value_dim);
    }
    for (std::int64_t t = 0; t < static_cast<std::int64_t>(rows.extent(0)); ++t) {
      const float* const query = &rows(t, key_head * channels_of_head);
      const float* const key = query + key_dim;
      const float value = key[key_dim + own * value_dim + column];
      const float decay = rates(t, value_heads + head);
      float sum = 0;
      for (std::int64_t d = 0; d < key_dim; ++d) sum += cells[d * value_dim] * key[d];
      const float change = rates(t, head) * (value - decay * sum);
      sum = 0;
      for (std::int64_t d = 0; d < key_dim; ++d) {
        float& cell = cells[d * value_dim];
        cell = decay * cell + key[d] * change;
        sum += query[d] * cell;
      }
      outputs(t, head * value_dim + column) = sum;
    }
  }
};

void update_states(const ExecutionSpace& exec, const DeltaNet& net, const DeltaTokens& block,
                   const DeltaState& before, const DeltaState& after) {
  const DeltaNetConfig& config = net.config;
  const linalg::Matrix rows = block.rows, rates = block.rates, outputs = block.outputs;
  const std::int64_t key_dim = config.key_dim, value_dim = config.value_dim;
  const std::int64_t group = config.group(), value_heads = net.value_heads();
  const auto tokens = static_cast<std::int64_t>(rows.extent(0));
  if (!base::machine().on_host()) {
    const DeltaColumn work{rows,    rates,     outputs, before,     after, config.channels(),
                           key_dim, value_dim, group,   value_heads};
    return Kokkos::parallel_for("kvzap::delta_net::update",
                                DeltaRange(exec, 0, value_heads * value_dim), work);
  }
  constexpr std::int64_t at_once = linalg::delta_columns;
  const std::int64_t blocks = (value_dim + at_once - 1) / at_once;
  base::host_for("kvzap::delta_net::update", value_heads * blocks, tokens * key_dim * at_once,
                 [=](std::int64_t i) {
                   thread_local std::vector<float> room;
                   room.resize(static_cast<std::size_t>(key_dim * at_once));
                   const std::int64_t head = i / blocks, first = i % blocks * at_once;
                   const std::int64_t key_head = head / group, own = head % group;
                   linalg::DeltaRows of_head;
                   of_head.queries = &rows(0, key_head * config.channels());
                   of_head.keys = of_head.queries + key_dim;
                   of_head.values = of_head.keys + key_dim + own * value_dim;
                   of_head.stride = static_cast<std::int64_t>(rows.stride(0));
                   of_head.strengths = &rates(0, head);
                   of_head.decays = &rates(0, value_heads + head);
                   of_head.rate_stride = static_cast<std::int64_t>(rates.stride(0));
                   of_head.outputs = &outputs(0, head * value_dim);
                   of_head.output_stride = static_cast<std::int64_t>(outputs.stride(0));
                   of_head.tokens = tokens;
                   of_head.key_dim = static_cast<int>(key_dim);
                   of_head.value_dim = static_cast<int>(value_dim);
                   const std::int64_t cells = own * key_dim * value_dim;
                   linalg::delta_rule(&before(key_head, cells), &after(key_head, cells), of_head,
                                      static_cast<int>(first),
                                      static_cast<int>(std::min(at_once, value_dim - first)),
                                      room.data());
                 });
}

/// outputs = norm(outputs of each value head) * silu(gates)
void finish(const ExecutionSpace& exec, const DeltaNet& net, const DeltaWeights& weights,
            const linalg::Matrix& rows, const linalg::Matrix& outputs) {
  const linalg::ConstVector norm = weights.norm;
  const float eps = weights.norm_eps;
  const std::int64_t heads = net.value_heads(), dim = net.config.value_dim, gates = net.gates();
  const std::int64_t parts = static_cast<std::int64_t>(rows.extent(0)) * heads;
  if (base::machine().on_host()) {
    return base::host_for("kvzap::delta_net::finish", parts, 2 * dim, [=](std::int64_t i) {
      const std::int64_t token = i / heads, first = i % heads * dim;
      float* const out = &outputs(token, first);
      linalg::rms_norm(out, norm.data(), eps, out, dim);
      linalg::silu_times(&rows(token, gates + first), out, out, dim);
    });
  }
  Kokkos::parallel_for(
      "kvzap::delta_net::finish", DeltaRange(exec, 0, parts), KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t token = i / heads, first = i % heads * dim;
        float sum = 0;
        for (std::int64_t d = 0; d < dim; ++d) {
          sum += outputs(token, first + d) * outputs(token, first + d);
        }
        const float factor = 1.0f / base::math::sqrt(sum / static_cast<float>(dim) + eps);
        for (std::int64_t d = 0; d < dim; ++d) {
          const float gate = rows(token, gates + first + d);
          outputs(token, first + d) *= factor * norm(d) * gate * sigmoid(gate);
        }
      });
}

}  // namespace

void pass_delta_net(const ExecutionSpace& exec, const DeltaNet& net, const DeltaWeights& weights,
                    const DeltaTokens& tokens, const DeltaState& before, const DeltaState& after) {
  if (tokens.rows.extent(0) == 0 || net.key_heads == 0) return;
  const DeltaNetConfig& config = net.config;
  ConvolvedRuns runs;
  runs.runs = net.key_heads;
  runs.channels = runs.token_stride = config.channels();
  runs.offset = config.group() * config.key_dim * config.value_dim;
  convolve(exec, {weights.convolution, {}, config.kernel, net.channels()}, runs, tokens.rows,
           before, after);
  prepare(exec, net, weights, tokens.rows, tokens.rates);
  update_states(exec, net, tokens, before, after);
  finish(exec, net, weights, tokens.rows, tokens.outputs);
}

void apply_gates(const ExecutionSpace& exec, const linalg::ConstMatrix& gates,
                 const linalg::Matrix& y) {
  const std::int64_t columns = y.extent(1);
  if (base::machine().on_host()) {
    return base::host_for("kvzap::step::gates", y.extent(0), columns, [=](std::int64_t i) {
      linalg::sigmoid_times(&gates(i, 0), &y(i, 0), &y(i, 0), columns);
    });
  }
  Kokkos::parallel_for(
      "kvzap::step::gates", DeltaRange(exec, 0, y.extent(0) * columns),
      KOKKOS_LAMBDA(std::int64_t i) {
        y(i / columns, i % columns) *= sigmoid(gates(i / columns, i % columns));
      });
}

}  // namespace kvzap::engine
