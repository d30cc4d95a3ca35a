#include "engine/state_space.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/host_threads.hpp"
#include "base/kokkos_compat.hpp"
#include "base/launch.hpp"
#include "base/machine.hpp"
#include "base/softplus.hpp"
#include "engine/step_kernels.hpp"
#include "linalg/host/row_kernels.hpp"
#include "linalg/host/state_space.hpp"

namespace kvzap::engine {
namespace {

using SpaceRange = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;

KOKKOS_INLINE_FUNCTION float space_silu(float x) { return x / (1.0f + base::math::exp(-x)); }

/// Runs work(i) for 0 <= i < n with the host's loops or on the device.
template <class Work>
void for_each_of_space(const char* label, const ExecutionSpace& exec, std::int64_t n,
                       std::int64_t weight, const Work& work) {
  if (base::machine().on_host()) return base::host_for(label, n, weight, work);
  base::parallel_for(label, SpaceRange(exec, 0, n), work);
}

void convolve_all(const ExecutionSpace& exec, const StateSpace& space, const SpaceWeights& weights,
                  const linalg::Matrix& rows, const LayerState& before, const LayerState& after) {
  const StateSpaceConfig& config = space.config;
  const std::int64_t kept = config.kernel - 1, of_group = 2 * config.state_dim;
  const ConvolutionWeights own{weights.convolution, weights.convolution_bias, config.kernel,
                               space.channels()};
  ConvolvedRuns heads;
  heads.runs = space.heads;
  heads.channels = heads.token_stride = config.head_dim;
  heads.offset = config.state_dim * config.head_dim;
  convolve(exec, own, heads, rows, before, after);
  if (config.is_mamba1()) return;
  ConvolvedRuns groups;
  groups.first = space.values();
  groups.runs = space.groups;
  groups.channels = groups.token_stride = of_group;
  groups.offset = heads.offset + kept * config.head_dim;
  groups.heads = weights.first_heads;
  convolve(exec, own, groups, rows, before, after);
  // The other heads of a group have the same inputs.
  const ConstIndices first_heads = weights.first_heads, group = weights.group;
  const std::int64_t first = groups.offset, values = kept * of_group;
  for_each_of_space(
      "kvzap::state_space::copy_inputs", exec, space.heads, values,
      KOKKOS_LAMBDA(std::int64_t head) {
        const std::int64_t from = first_heads(group(head));
        for (std::int64_t i = first; from != head && i < first + values; ++i) {
          after(head, i) = after(from, i);
        }
      });
}

void apply_silu(const ExecutionSpace& exec, const StateSpace& space, const linalg::Matrix& rows) {
  const std::int64_t channels = space.channels();
  const auto tokens = static_cast<std::int64_t>(rows.extent(0));
  if (base::machine().on_host()) {
    constexpr std::int64_t at_once = 512;
    const std::int64_t parts = (channels + at_once - 1) / at_once;
    base::host_for("kvzap::state_space::silu", tokens * parts, 4 * at_once, [=](std::int64_t i) {
      const std::int64_t first = i % parts * at_once;
      linalg::silu(&rows(i / parts, first), std::min(at_once, channels - first));
    });
  } else {
    base::parallel_for(
        "kvzap::state_space::silu", SpaceRange(exec, 0, tokens * channels),
        KOKKOS_LAMBDA(std::int64_t i) {
          float& value = rows(i / channels, i % channels);
          value = space_silu(value);
        });
  }
}

void prepare_steps(const ExecutionSpace& exec, const StateSpace& space, const SpaceWeights& weights,
                   const linalg::Matrix& rows, const linalg::Matrix& decays) {
  const std::int64_t heads = space.heads, values = space.values(), steps = space.steps();
  const auto tokens = static_cast<std::int64_t>(rows.extent(0));
  const linalg::ConstVector rates = weights.rates, shifts = weights.shifts;
  const auto least = static_cast<float>(space.config.least_step);
  const auto largest = static_cast<float>(space.config.largest_step);
  if (space.config.is_mamba1()) {
    return for_each_of_space(
        "kvzap::state_space::channel_steps", exec, tokens * values, 20,
        KOKKOS_LAMBDA(std::int64_t i) {
          float& step = rows(i / values, steps + i % values);
          step = base::softplus(step + shifts(i % values));
        });
  }
  for_each_of_space(
      "kvzap::state_space::steps", exec, tokens * heads, 20, KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t token = i / heads, head = i % heads;
        float step = base::softplus(rows(token, steps + head) + shifts(head));
        if (step < least) step = least;
        if (largest > 0 && step > largest) step = largest;
        rows(token, steps + head) = step;
        decays(token, head) = base::math::exp(-rates(head) * step);
      });
}

/// The form of linalg::state_space for devices: one column of a head's state.
struct SpaceColumn {
  linalg::Matrix rows, decays, outputs;
  LayerState before, after;
  linalg::ConstVector rates, skips;
  ConstIndices group;
  std::int64_t head_dim = 0, state_dim = 0, inputs = 0, steps = 0;
  bool is_mamba1 = false;

  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const std::int64_t head = i / head_dim, column = i % head_dim;
    float* const cells = &after(head, column);
    for (std::int64_t n = 0; n < state_dim; ++n) {
      cells[n * head_dim] = before(head, column + n * head_dim);
    }
    for (std::int64_t t = 0; t < static_cast<std::int64_t>(rows.extent(0)); ++t) {
      const float* const b = &rows(t, inputs + 2 * group(head) * state_dim);
      const float* const c = b + state_dim;
      const float x = rows(t, i), step = rows(t, steps + (is_mamba1 ? i : head));
      float decay = is_mamba1 ? 0.0f : decays(t, head), sum = 0;
      for (std::int64_t n = 0; n < state_dim; ++n) {
        float& cell = cells[n * head_dim];
        if (is_mamba1) {
          decay = base::math::exp(-rates((head * state_dim + n) * head_dim + column) * step);
        }
        cell = decay * cell + b[n] * (step * x);
        sum += c[n] * cell;
      }
      outputs(t, i) = sum + skips(is_mamba1 ? i : head) * x;
    }
  }
};

void update_spaces(const ExecutionSpace& exec, const StateSpace& space, const SpaceWeights& weights,
                   const SpaceTokens& block, const LayerState& before, const LayerState& after) {
  const linalg::Matrix rows = block.rows, decays = block.decays, outputs = block.outputs;
  const std::int64_t dim = space.config.head_dim, state_dim = space.config.state_dim;
  const std::int64_t inputs = space.first_input(), steps = space.steps();
  const auto tokens = static_cast<std::int64_t>(rows.extent(0));
  const linalg::ConstVector rates = weights.rates, skips = weights.skips;
  const ConstIndices group = weights.group;
  const bool is_mamba1 = space.config.is_mamba1();
  if (!base::machine().on_host()) {
    const SpaceColumn work{rows,  decays, outputs,   before, after, rates,    skips,
                           group, dim,    state_dim, inputs, steps, is_mamba1};
    return base::parallel_for("kvzap::state_space::update", SpaceRange(exec, 0, space.values()),
                              work);
  }
  // A decode step takes whole heads.
  const bool is_whole = tokens == 1 && !is_mamba1;
  const std::int64_t at_once = is_whole ? dim : linalg::space_columns;
  const std::int64_t blocks = (dim + at_once - 1) / at_once;
  base::host_for(
      "kvzap::state_space::update", space.heads * blocks, tokens * state_dim * at_once,
      [=](std::int64_t i) {
        thread_local std::vector<float> room;
        const std::int64_t head = i / blocks, first = i % blocks * at_once;
        linalg::StateSpaceRows of_head;
        of_head.x = &rows(0, head * dim);
        of_head.b = &rows(0, inputs + 2 * group(head) * state_dim);
        of_head.c = of_head.b + state_dim;
        of_head.stride = static_cast<std::int64_t>(rows.stride(0));
        of_head.steps = &rows(0, steps + head * (is_mamba1 ? dim : 1));
        of_head.step_stride = of_head.stride;
        if (is_mamba1) {
          of_head.rates = &rates(head * state_dim * dim);
          of_head.skips = &skips(head * dim);
        } else {
          of_head.decays = &decays(0, head);
          of_head.decay_stride = static_cast<std::int64_t>(decays.stride(0));
          of_head.skip = skips(head);
        }
        of_head.outputs = &outputs(0, head * dim);
        of_head.output_stride = static_cast<std::int64_t>(outputs.stride(0));
        of_head.tokens = tokens;
        of_head.state_dim = static_cast<int>(state_dim);
        of_head.head_dim = static_cast<int>(dim);
        if (is_whole) {
          room.resize(static_cast<std::size_t>(2 * dim));
          linalg::state_space_token(&before(head, 0), &after(head, 0), of_head, room.data());
          return;
        }
        room.resize(static_cast<std::size_t>(state_dim * at_once));
        linalg::state_space(&before(head, 0), &after(head, 0), of_head, static_cast<int>(first),
                            static_cast<int>(std::min(at_once, dim - first)), room.data());
      });
}

}  // namespace

void scale_projections(const ExecutionSpace& exec, const StateSpace& space,
                       const linalg::Matrix& rows) {
  const auto& [z, x, b, c, d] = space.config.in_multipliers;
  const std::int64_t dim = space.config.state_dim;
  const auto scale = [&](std::int64_t first, std::int64_t count, double factor) {
    if (factor != 1) scale_columns(exec, rows, first, first + count, static_cast<float>(factor));
  };
  scale(0, space.values(), x);
  for (std::int64_t g = 0; g < space.groups; ++g) {
    scale(space.values() + 2 * g * dim, dim, b);
    scale(space.values() + (2 * g + 1) * dim, dim, c);
  }
  scale(space.gates(), space.values(), z);
  scale(space.steps(), space.heads, d);
}

void convolve_inputs(const ExecutionSpace& exec, const StateSpace& space,
                     const SpaceWeights& weights, const SpaceTokens& tokens,
                     const LayerState& before, const LayerState& after) {
  if (tokens.rows.extent(0) == 0 || space.heads == 0) return;
  convolve_all(exec, space, weights, tokens.rows, before, after);
  apply_silu(exec, space, tokens.rows);
}

void place_inputs(const ExecutionSpace& exec, const StateSpace& space, std::int64_t group,
                  const linalg::ConstMatrix& latents, const linalg::Matrix& rows) {
  const std::int64_t count = 2 * space.config.state_dim, from = space.config.step_rank;
  const std::int64_t to = space.first_input() + group * count;
  for_each_of_space(
      "kvzap::state_space::inputs", exec, static_cast<std::int64_t>(rows.extent(0)) * count, 1,
      KOKKOS_LAMBDA(std::int64_t i) {
        rows(i / count, to + i % count) = latents(i / count, from + i % count);
      });
}

void update_state(const ExecutionSpace& exec, const StateSpace& space, const SpaceWeights& weights,
                  const SpaceTokens& tokens, const LayerState& before, const LayerState& after) {
  if (tokens.rows.extent(0) == 0 || space.heads == 0) return;
  prepare_steps(exec, space, weights, tokens.rows, tokens.decays);
  update_spaces(exec, space, weights, tokens, before, after);
}

void gate_outputs(const ExecutionSpace& exec, const StateSpace& space, const SpaceTokens& tokens) {
  const linalg::Matrix rows = tokens.rows, outputs = tokens.outputs;
  const std::int64_t heads = space.heads, dim = space.config.head_dim, gates = space.gates();
  const std::int64_t parts = static_cast<std::int64_t>(rows.extent(0)) * heads;
  if (base::machine().on_host()) {
    return base::host_for("kvzap::state_space::gate", parts, 4 * dim, [=](std::int64_t i) {
      const std::int64_t token = i / heads, first = i % heads * dim;
      float* const out = &outputs(token, first);
      linalg::silu_times(&rows(token, gates + first), out, out, dim);
    });
  }
  const std::int64_t values = space.values();
  base::parallel_for(
      "kvzap::state_space::gate", SpaceRange(exec, 0, parts * dim), KOKKOS_LAMBDA(std::int64_t i) {
        outputs(i / values, i % values) *= space_silu(rows(i / values, gates + i % values));
      });
}

void sum_groups(const ExecutionSpace& exec, const StateSpace& space, const SpaceWeights& weights,
                const SpaceTokens& tokens, const linalg::Matrix& sums) {
  const linalg::Matrix outputs = tokens.outputs;
  const ConstIndices first_heads = weights.first_heads, numbers = weights.numbers;
  const std::int64_t groups = space.groups, dim = space.config.head_dim;
  const auto count = static_cast<std::int64_t>(outputs.extent(0));
  const std::int64_t all = space.config.groups;
  for_each_of_space(
      "kvzap::state_space::clear", exec, count * all, 1,
      KOKKOS_LAMBDA(std::int64_t i) { sums(i / all, i % all) = 0; });
  for_each_of_space(
      "kvzap::state_space::squares", exec, count * groups, space.config.heads_of_group() * dim,
      KOKKOS_LAMBDA(std::int64_t i) {
        constexpr int lanes = 16;  // of the host's compilers
        const std::int64_t token = i / groups, group = i % groups;
        const std::int64_t end = first_heads(group + 1) * dim;
        float partial[lanes] = {};
        std::int64_t c = first_heads(group) * dim;
        for (; c + lanes <= end; c += lanes) {
          for (int k = 0; k < lanes; ++k)
            partial[k] += outputs(token, c + k) * outputs(token, c + k);
        }
        for (; c < end; ++c) partial[0] += outputs(token, c) * outputs(token, c);
        float sum = 0;
        for (int k = 0; k < lanes; ++k) sum += partial[k];
        sums(token, numbers(group)) = sum;
      });
}

void norm_groups(const ExecutionSpace& exec, const StateSpace& space, const SpaceWeights& weights,
                 const SpaceTokens& tokens, const linalg::ConstMatrix& sums, float eps) {
  const linalg::Matrix outputs = tokens.outputs;
  const linalg::ConstVector norm = weights.norm;
  const ConstIndices group = weights.group, numbers = weights.numbers;
  const std::int64_t heads = space.heads, dim = space.config.head_dim;
  const auto size = static_cast<float>(space.config.heads_of_group() * dim);
  for_each_of_space(
      "kvzap::state_space::norm", exec, static_cast<std::int64_t>(outputs.extent(0)) * heads,
      2 * dim, KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t token = i / heads, head = i % heads;
        const float factor =
            1.0f / base::math::sqrt(sums(token, numbers(group(head))) / size + eps);
        float* const out = &outputs(token, head * dim);
        const float* const weight = &norm(head * dim);
        for (std::int64_t c = 0; c < dim; ++c) out[c] *= factor * weight[c];
      });
}

}  // namespace kvzap::engine
