#include "engine/delta_net.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/host_threads.hpp"
#include "base/kokkos_compat.hpp"
#include "base/launch.hpp"
#include "base/machine.hpp"
#include "base/softplus.hpp"
#include "linalg/host/delta_rule.hpp"
#include "linalg/host/row_kernels.hpp"

namespace kvzap::engine {
namespace {

using DeltaRange = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;

constexpr float length_eps = 1e-6f;  // of the lengths of queries and keys

KOKKOS_INLINE_FUNCTION float sigmoid(float x) { return 1.0f / (1.0f + base::math::exp(-x)); }

/// The decay g of DeltaNetConfig, for a projection that has its shift.
KOKKOS_INLINE_FUNCTION float decay_of(float x, float rate, float bound) {
  if (bound < 0) return base::math::exp(bound * sigmoid(rate * x));
  return base::math::exp(-rate * base::softplus(x));
}

/// SiLU of the channels, lengths of queries and keys, strengths and decays: of a key head's part of
/// each token.
struct Preparation {
  linalg::Matrix rows, rates;
  linalg::ConstVector decay_rates, shifts;
  bool has_rates = true;  // else there are neither lengths, strengths nor decays
  std::int64_t channels_of_head = 0, key_dim = 0, key_heads = 0, group = 1, decays = 1;
  float strength = 1, bound = 0, scale = 1;

  std::int64_t parts() const { return static_cast<std::int64_t>(rows.extent(0)) * key_heads; }

  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const std::int64_t token = i / key_heads, key_head = i % key_heads;
    float* const row = &rows(token, key_head * channels_of_head);
    float lengths[2] = {};
    for (std::int64_t c = 0; c < channels_of_head; ++c) {
      row[c] *= sigmoid(row[c]);
      if (c < 2 * key_dim) lengths[c / key_dim] += row[c] * row[c];
    }
    if (!has_rates) return;
    for (std::int64_t c = 0; c < 2 * key_dim; ++c) {
      row[c] *= (c < key_dim ? scale : 1.0f) / base::math::sqrt(lengths[c / key_dim] + length_eps);
    }
    const std::int64_t value_heads = key_heads * group;
    for (std::int64_t head = key_head * group; head < (key_head + 1) * group; ++head) {
      rates(token, head) = strength * sigmoid(rates(token, head));
      for (std::int64_t d = head * decays; d < (head + 1) * decays; ++d) {
        float& decay = rates(token, value_heads + d);
        decay = decay_of(decay + shifts(d), decay_rates(head), bound);
      }
    }
  }

  /// The form for hosts.
  void on_host(std::int64_t i) const {
    const std::int64_t token = i / key_heads, key_head = i % key_heads;
    float* const query = &rows(token, key_head * channels_of_head);
    linalg::silu(query, channels_of_head);
    if (!has_rates) return;
    // x / sqrt(sum + eps) = RMS norm of x with eps / dim, times 1 / sqrt(dim)
    const float eps = length_eps / static_cast<float>(key_dim);
    linalg::rms_norm(query, nullptr, eps, query, key_dim);
    linalg::rms_norm(query + key_dim, nullptr, eps, query + key_dim, key_dim);
    linalg::scale(query, key_dim, scale * scale);
    linalg::scale(query + key_dim, key_dim, scale);
    float* const strengths = &rates(token, 0);
    for (std::int64_t head = key_head * group; head < (key_head + 1) * group; ++head) {
      strengths[head] = strength * sigmoid(strengths[head]);
      float* const of_head = strengths + key_heads * group + head * decays;
      const float* const own_shifts = shifts.data() + head * decays;
      if (bound < 0) {
        linalg::bounded_decays(of_head, own_shifts, decay_rates(head), bound, decays);
      } else {
        linalg::softplus_decays(of_head, own_shifts, decay_rates(head), decays);
      }
    }
  }
};

void prepare(const ExecutionSpace& exec, const DeltaNet& net, const DeltaWeights& weights,
             const linalg::Matrix& rows, const linalg::Matrix& rates) {
  const DeltaNetConfig& config = net.config;
  Preparation work{rows, rates, weights.decay_rates, weights.decay_shifts};
  work.has_rates = net.has_rates();
  work.channels_of_head = config.channels();
  work.key_dim = config.key_dim;
  work.key_heads = net.key_heads;
  work.group = config.group();
  work.decays = config.decays();
  work.strength = static_cast<float>(config.strength_multiplier);
  work.bound = static_cast<float>(config.least_log_decay);
  work.scale = 1.0f / std::sqrt(static_cast<float>(config.key_dim));
  if (base::machine().on_host()) {
    return base::host_for("kvzap::delta_net::prepare", work.parts(), 4 * work.channels_of_head,
                          [=](std::int64_t i) { work.on_host(i); });
  }
  base::parallel_for("kvzap::delta_net::prepare", DeltaRange(exec, 0, work.parts()), work);
}

/// The form of linalg::delta_rule for devices: one column of a value head's state.
struct DeltaColumn {
  linalg::Matrix rows, rates, outputs;
  linalg::ConstVector fixed_decays;  // or empty
  DeltaState before, after;
  std::int64_t channels_of_head = 0, key_dim = 0, value_dim = 0, group = 1, value_heads = 0;
  std::int64_t decays = 1;  // of a head

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
      const bool is_fixed = decays == 0;
      const float* const of_head =
          is_fixed ? &fixed_decays(head) : &rates(t, value_heads + head * decays);
      const std::int64_t step = decays > 1 ? 1 : 0;
      float change = value, sum = 0;
      if (!is_fixed) {
        for (std::int64_t d = 0; d < key_dim; ++d) {
          sum += of_head[d * step] * cells[d * value_dim] * key[d];
        }
        change = rates(t, head) * (value - sum);
      }
      sum = 0;
      for (std::int64_t d = 0; d < key_dim; ++d) {
        float& cell = cells[d * value_dim];
        cell = of_head[d * step] * cell + key[d] * change;
        sum += query[d] * cell;
      }
      outputs(t, head * value_dim + column) = sum;
    }
  }
};

void update_states(const ExecutionSpace& exec, const DeltaNet& net, const DeltaWeights& weights,
                   const DeltaTokens& block, const DeltaState& before, const DeltaState& after) {
  const DeltaNetConfig& config = net.config;
  const linalg::Matrix rows = block.rows, rates = block.rates, outputs = block.outputs;
  const std::int64_t key_dim = config.key_dim, value_dim = config.value_dim;
  const std::int64_t group = config.group(), value_heads = net.value_heads();
  const std::int64_t decays = config.decays();
  const linalg::ConstVector fixed_decays = weights.decay_rates;
  const auto tokens = static_cast<std::int64_t>(rows.extent(0));
  if (!base::machine().on_host()) {
    const DeltaColumn work{rows,      rates, outputs,           fixed_decays,
                           before,    after, config.channels(), key_dim,
                           value_dim, group, value_heads,       decays};
    return base::parallel_for("kvzap::delta_net::update",
                              DeltaRange(exec, 0, value_heads * value_dim), work);
  }
  constexpr std::int64_t at_once = linalg::delta_columns;
  const std::int64_t blocks = (value_dim + at_once - 1) / at_once;
  base::host_for("kvzap::delta_net::update", value_heads * blocks, tokens * key_dim * at_once,
                 [=](std::int64_t i) {
                   thread_local std::vector<float> room;
                   room.resize(static_cast<std::size_t>(key_dim * (at_once + 1)));
                   const std::int64_t head = i / blocks, first = i % blocks * at_once;
                   const std::int64_t key_head = head / group, own = head % group;
                   linalg::DeltaRows of_head;
                   of_head.queries = &rows(0, key_head * config.channels());
                   of_head.keys = of_head.queries + key_dim;
                   of_head.values = of_head.keys + key_dim + own * value_dim;
                   of_head.stride = static_cast<std::int64_t>(rows.stride(0));
                   if (decays == 0) {
                     of_head.decays = &fixed_decays(head);
                   } else {
                     of_head.strengths = &rates(0, head);
                     of_head.decays = &rates(0, value_heads + head * decays);
                     of_head.rate_stride = static_cast<std::int64_t>(rates.stride(0));
                     of_head.decay_step = decays > 1 ? 1 : 0;
                   }
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

/// outputs = norm(outputs of each value head) * silu(gates), or sigmoid(gates)
void finish(const ExecutionSpace& exec, const DeltaNet& net, const DeltaWeights& weights,
            const linalg::Matrix& rows, const linalg::Matrix& outputs) {
  const linalg::ConstVector norm = weights.norm;
  const float eps = weights.norm_eps;
  const bool has_sigmoids = net.config.kind == DeltaNetConfig::Kind::kimi;
  const std::int64_t heads = net.value_heads(), dim = net.config.value_dim, gates = net.gates();
  const std::int64_t parts = static_cast<std::int64_t>(rows.extent(0)) * heads;
  if (base::machine().on_host()) {
    return base::host_for("kvzap::delta_net::finish", parts, 2 * dim, [=](std::int64_t i) {
      const std::int64_t token = i / heads, first = i % heads * dim;
      float* const out = &outputs(token, first);
      linalg::rms_norm(out, norm.data(), eps, out, dim);
      (has_sigmoids ? linalg::sigmoid_times : linalg::silu_times)(&rows(token, gates + first), out,
                                                                  out, dim);
    });
  }
  base::parallel_for(
      "kvzap::delta_net::finish", DeltaRange(exec, 0, parts), KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t token = i / heads, first = i % heads * dim;
        float sum = 0;
        for (std::int64_t d = 0; d < dim; ++d) {
          sum += outputs(token, first + d) * outputs(token, first + d);
        }
        const float factor = 1.0f / base::math::sqrt(sum / static_cast<float>(dim) + eps);
        for (std::int64_t d = 0; d < dim; ++d) {
          const float gate = rows(token, gates + first + d);
          outputs(token, first + d) *=
              factor * norm(d) * (has_sigmoids ? 1.0f : gate) * sigmoid(gate);
        }
      });
}

}  // namespace

void pass_delta_net(const ExecutionSpace& exec, const DeltaNet& net, const DeltaWeights& weights,
                    const DeltaTokens& tokens, const DeltaState& before, const DeltaState& after) {
  if (tokens.rows.extent(0) == 0 || net.key_heads == 0) return;
  const DeltaNetConfig& config = net.config;
  const bool is_lightning = config.kind == DeltaNetConfig::Kind::lightning;
  if (!is_lightning) {
    ConvolvedRuns runs;
    runs.runs = net.key_heads;
    runs.channels = runs.token_stride = config.channels();
    runs.offset = config.group() * config.key_dim * config.value_dim;
    convolve(exec, {weights.convolution, {}, config.kernel, net.channels()}, runs, tokens.rows,
             before, after);
  }
  prepare(exec, net, weights, tokens.rows, tokens.rates);
  update_states(exec, net, weights, tokens, before, after);
  if (!is_lightning) finish(exec, net, weights, tokens.rows, tokens.outputs);
}

}  // namespace kvzap::engine
