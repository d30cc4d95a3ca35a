// The kernels of state spaces and short convolutions against the formulas in double precision.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "base/machine.hpp"
#include "base/simd.hpp"
#include "engine/short_convolution_block.hpp"
#include "engine/state_space.hpp"

namespace {

using kvzap::ExecutionSpace;
using kvzap::MemorySpace;
using kvzap::StateSpaceConfig;
namespace base = kvzap::base;
namespace engine = kvzap::engine;
namespace linalg = kvzap::linalg;

using Numbers = std::vector<double>;
using Gating = StateSpaceConfig::Gating;

constexpr double norm_eps = 1e-5;

struct RandomNumbers {
  std::mt19937 random{11};
  Numbers operator()(std::int64_t count, double scale, double offset = 0) {
    std::uniform_real_distribution<float> draw(-1, 1);
    Numbers result;
    for (std::int64_t i = 0; i < count; ++i) {
      result.push_back(static_cast<float>(offset + scale * draw(random)));
    }
    return result;
  }
};

/// Some heads of a state space on one rank, its weights, and the rows of some tokens.
struct Space {
  engine::StateSpace shape;
  std::vector<int> first_heads, group, numbers;
  Numbers convolution, bias, rates, shifts, skips, norm, rows, state;
};

/// `heads`: those of all ranks that this one has.
Space random_space(const StateSpaceConfig& config, const std::vector<int>& heads,
                   std::int64_t tokens) {
  Space space;
  for (const int head : heads) {
    const int number = head / static_cast<int>(config.heads_of_group());
    if (space.numbers.empty() || space.numbers.back() != number) {
      space.first_heads.push_back(static_cast<int>(space.group.size()));
      space.numbers.push_back(number);
    }
    space.group.push_back(static_cast<int>(space.numbers.size()) - 1);
  }
  space.first_heads.push_back(static_cast<int>(heads.size()));
  space.shape = {config, static_cast<std::int64_t>(heads.size()),
                 static_cast<std::int64_t>(space.numbers.size())};
  RandomNumbers numbers;
  const std::int64_t own = space.shape.heads;
  space.convolution = numbers(config.kernel * space.shape.channels(), 0.7);
  if (config.has_convolution_bias) space.bias = numbers(space.shape.channels(), 0.5);
  space.rates = numbers(own, 0.3, 0.5);
  space.shifts = numbers(own, 1, -1);
  space.skips = numbers(own, 0.5, 1);
  space.norm = numbers(own * config.head_dim, 0.5, 1);
  space.rows = numbers(tokens * space.shape.columns(), 2);
  space.state = numbers(own * config.state_values(), 1);
  // Heads of a group have seen the same B and C.
  const std::int64_t values = config.state_values();
  const std::int64_t shared = 2 * (config.kernel - 1) * config.state_dim;
  for (std::int64_t h = 0; h < own; ++h) {
    const std::int64_t first = space.first_heads[space.group[h]];
    for (std::int64_t i = values - shared; i < values; ++i) {
      space.state[h * values + i] = space.state[first * values + i];
    }
  }
  return space;
}

double silu(double x) { return x / (1 + std::exp(-x)); }

/// The last inputs of a channel, oldest first, and its convolution.
double convolved(double* inputs, std::int64_t stride, std::int64_t kernel, double input,
                 const double* weights, std::int64_t weight_stride) {
  double sum = weights[(kernel - 1) * weight_stride] * input;
  for (std::int64_t k = 0; k + 1 < kernel; ++k)
    sum += weights[k * weight_stride] * inputs[k * stride];
  for (std::int64_t k = 0; k + 1 < kernel; ++k) {
    inputs[k * stride] = k + 2 == kernel ? input : inputs[(k + 1) * stride];
  }
  return sum;
}

/// One token after the other, as transformers' mamba2_selective_state_update, and the norm.
Numbers expected_outputs(Space& space, std::int64_t tokens) {
  const StateSpaceConfig& config = space.shape.config;
  const std::int64_t dim = config.head_dim, state_dim = config.state_dim;
  const std::int64_t channels = space.shape.channels(), values = config.state_values();
  Numbers outputs(tokens * space.shape.values());
  for (std::int64_t t = 0; t < tokens; ++t) {
    double* const row = space.rows.data() + t * space.shape.columns();
    double* const out = outputs.data() + t * space.shape.values();
    Numbers of_groups(space.shape.groups);
    for (std::int64_t h = 0; h < space.shape.heads; ++h) {
      double* const cells = space.state.data() + h * values;
      double* const x_inputs = cells + state_dim * dim;
      double* const bc_inputs = x_inputs + (config.kernel - 1) * dim;
      const auto pass = [&](double* inputs, std::int64_t stride, std::int64_t c) {
        const double bias = config.has_convolution_bias ? space.bias[c] : 0;
        return silu(bias + convolved(inputs, stride, config.kernel, row[c],
                                     space.convolution.data() + c, channels));
      };
      Numbers x, bc;
      for (std::int64_t p = 0; p < dim; ++p) x.push_back(pass(x_inputs + p, dim, h * dim + p));
      for (std::int64_t n = 0; n < 2 * state_dim; ++n) {
        bc.push_back(pass(bc_inputs + n, 2 * state_dim,
                          space.shape.values() + space.group[h] * 2 * state_dim + n));
      }
      double step = std::log1p(std::exp(row[space.shape.steps() + h] + space.shifts[h]));
      step = std::max(step, config.least_step);
      if (config.largest_step > 0) step = std::min(step, config.largest_step);
      const double decay = std::exp(-space.rates[h] * step);
      for (std::int64_t p = 0; p < dim; ++p) {
        double sum = space.skips[h] * x[p];
        for (std::int64_t n = 0; n < state_dim; ++n) {
          double& cell = cells[n * dim + p];
          cell = decay * cell + bc[n] * step * x[p];
          sum += bc[state_dim + n] * cell;
        }
        const double gate = silu(row[space.shape.gates() + h * dim + p]);
        out[h * dim + p] = config.gating == Gating::norm_before_gate ? sum : sum * gate;
        of_groups[space.group[h]] += out[h * dim + p] * out[h * dim + p];
      }
    }
    for (std::int64_t i = 0; i < space.shape.values() && config.gating != Gating::gate; ++i) {
      const std::int64_t h = i / dim;
      const double mean =
          of_groups[space.group[h]] / static_cast<double>(config.heads_of_group() * dim);
      out[i] *= space.norm[i] / std::sqrt(mean + norm_eps);
      if (config.gating == Gating::norm_before_gate) out[i] *= silu(row[space.shape.gates() + i]);
    }
  }
  return outputs;
}

template <class View, class Values>
View on_device(const Values& numbers, std::int64_t rows, std::int64_t columns) {
  View view("view", rows, columns);
  const auto host = Kokkos::create_mirror_view(view);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    host.data()[i] = static_cast<typename View::non_const_value_type>(numbers[i]);
  }
  Kokkos::deep_copy(view, host);
  return view;
}

template <class View = linalg::Vector, class Values = Numbers>
View on_device(const Values& numbers) {
  View view("view", numbers.size());
  const auto host = Kokkos::create_mirror_view(view);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    host(i) = static_cast<typename View::non_const_value_type>(numbers[i]);
  }
  Kokkos::deep_copy(view, host);
  return view;
}

template <class View>
void expect_near(const View& found, const Numbers& expected, const char* what) {
  Kokkos::fence();
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, found);
  ASSERT_EQ(host.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ASSERT_NEAR(host.data()[i], expected[i], 1e-4 * (1 + std::fabs(expected[i]))) << what << i;
  }
}

/// Runs the tokens in steps of `at_once`.
void expect_equal(const StateSpaceConfig& config, const std::vector<int>& heads,
                  std::int64_t tokens, std::int64_t at_once) {
  using Indices = Kokkos::View<int*, MemorySpace>;
  Space space = random_space(config, heads, tokens);
  const engine::SpaceWeights weights{on_device(space.convolution),
                                     on_device(space.bias),
                                     on_device(space.rates),
                                     on_device(space.shifts),
                                     on_device(space.skips),
                                     on_device(space.norm),
                                     on_device<Indices>(space.first_heads),
                                     on_device<Indices>(space.group),
                                     on_device<Indices>(space.numbers)};
  const std::int64_t own = space.shape.heads;
  const auto state = on_device<engine::LayerState>(space.state, own, config.state_values());
  const engine::LayerState after("after", own, config.state_values());
  const engine::SpaceTokens all{
      on_device<linalg::Matrix>(space.rows, tokens, space.shape.columns()),
      linalg::Matrix("decays", tokens, own),
      linalg::Matrix("outputs", tokens, space.shape.values())};
  const ExecutionSpace exec;
  for (std::int64_t t = 0; t < tokens; t += at_once) {
    const engine::SpaceTokens part = all.part(t, std::min(tokens, t + at_once));
    const auto& before = t == 0 ? state : after;
    engine::convolve_inputs(exec, space.shape, weights, part, before, after);
    engine::update_state(exec, space.shape, weights, part, before, after);
  }
  const linalg::Matrix sums("sums", tokens, config.groups);
  if (config.gating != Gating::norm_before_gate) engine::gate_outputs(exec, space.shape, all);
  if (config.gating != Gating::gate) {
    engine::sum_groups(exec, space.shape, weights, all, sums);
    engine::norm_groups(exec, space.shape, weights, all, sums, static_cast<float>(norm_eps));
  }
  if (config.gating == Gating::norm_before_gate) engine::gate_outputs(exec, space.shape, all);
  const Numbers before = space.state;
  const Numbers expected = expected_outputs(space, tokens);
  expect_near(all.outputs, expected, "output ");
  expect_near(after, space.state, "state ");
  expect_near(state, before, "state before ");
}

StateSpaceConfig sizes(std::int64_t heads, std::int64_t head_dim, std::int64_t groups,
                       std::int64_t state_dim, std::int64_t kernel) {
  StateSpaceConfig config;
  config.heads = heads;
  config.head_dim = head_dim;
  config.groups = groups;
  config.state_dim = state_dim;
  config.kernel = kernel;
  return config;
}

void expect_all_equal() {
  // Odd sizes, several blocks of columns with a rest, kernels of 1 to 16 tokens.
  expect_equal(sizes(1, 3, 1, 4, 4), {0}, 9, 9);
  expect_equal(sizes(6, 40, 2, 7, 3), {0, 1, 2, 3, 4, 5}, 20, 7);
  StateSpaceConfig config = sizes(16, 5, 16, 9, 2);
  config.has_convolution_bias = false;
  config.gating = Gating::norm_before_gate;
  config.least_step = 0.2;
  config.largest_step = 0.4;
  std::vector<int> all;
  for (int h = 0; h < 16; ++h) all.push_back(h);
  expect_equal(config, all, 6, 1);
  config = sizes(4, 16, 1, 33, 16);
  config.gating = Gating::gate;
  expect_equal(config, {1, 2}, 40, 3);
  expect_equal(sizes(2, 64, 1, 128, 4), {0, 1}, 70, 64);
  expect_equal(sizes(3, 32, 3, 16, 1), {0, 1, 2}, 5, 2);
}

template <class Test>
void on_all_machines(const Test& test) {
  const bool before = base::machine().on_device();
  const base::SimdLevel level = base::machine().simd();
  for (const bool device : {false, true}) {
    base::machine().set_device(device);
    for (const auto other :
         {base::SimdLevel::baseline, base::SimdLevel::avx2, base::SimdLevel::avx512}) {
      if (!base::processor_has(other)) continue;
      SCOPED_TRACE(std::string(base::name_of(other)) + (device ? ", device" : ", host"));
      base::machine().set_simd(other);
      test();
    }
  }
  base::machine().set_simd(level);
  base::machine().set_device(before);
}

TEST(StateSpace, EqualsTheFormula) { on_all_machines(expect_all_equal); }

/// Mamba-1, one token after the other, as transformers' mamba_selective_state_update.
Numbers expected_of_mamba1(Space& space, std::int64_t tokens) {
  const StateSpaceConfig& config = space.shape.config;
  const std::int64_t dim = config.head_dim, state_dim = config.state_dim;
  const std::int64_t channels = space.shape.values(), columns = space.shape.columns();
  Numbers outputs;
  for (std::int64_t t = 0; t < tokens; ++t) {
    const double* const row = space.rows.data() + t * columns;
    for (std::int64_t c = 0; c < channels; ++c) {
      const std::int64_t head = c / dim, column = c % dim;
      double* const cells = space.state.data() + head * config.state_values() + column;
      const double bias = config.has_convolution_bias ? space.bias[c] : 0;
      const double x = silu(bias + convolved(cells + state_dim * dim, dim, config.kernel, row[c],
                                             space.convolution.data() + c, channels));
      const double* const b = row + 2 * channels + 2 * space.group[head] * state_dim;
      const double step = std::log1p(std::exp(row[space.shape.steps() + c] + space.shifts[c]));
      double sum = space.skips[c] * x;
      for (std::int64_t n = 0; n < state_dim; ++n) {
        double& cell = cells[n * dim];
        const double rate = space.rates[(head * state_dim + n) * dim + column];
        cell = std::exp(-rate * step) * cell + b[n] * step * x;
        sum += b[state_dim + n] * cell;
      }
      outputs.push_back(sum * silu(row[channels + c]));
    }
  }
  return outputs;
}

TEST(StateSpace, OfMamba1EqualsTheFormula) {
  using Indices = Kokkos::View<int*, MemorySpace>;
  struct Case {
    StateSpaceConfig config;
    std::vector<int> heads;
    std::int64_t tokens, at_once;
  };
  const std::vector<Case> cases = {{sizes(4, 32, 1, 16, 4), {0, 1, 3}, 9, 9},
                                   {sizes(6, 30, 2, 7, 3), {0, 2, 3, 5}, 11, 4},
                                   {sizes(2, 70, 2, 5, 2), {0, 1}, 5, 1},
                                   {sizes(3, 1, 1, 3, 1), {1}, 6, 2}};
  on_all_machines([&] {
    for (Case one : cases) {
      one.config.step_rank = 2;
      one.config.gating = Gating::gate;
      Space space = random_space(one.config, one.heads, one.tokens);
      RandomNumbers numbers;
      const std::int64_t own = space.shape.heads, channels = space.shape.values();
      space.rates = numbers(channels * one.config.state_dim, 0.4, 0.5);
      space.shifts = numbers(channels, 1, -1);
      space.skips = numbers(channels, 0.5, 1);
      engine::SpaceWeights weights;
      weights.convolution = on_device(space.convolution);
      weights.convolution_bias = on_device(space.bias);
      weights.rates = on_device(space.rates);
      weights.shifts = on_device(space.shifts);
      weights.skips = on_device(space.skips);
      weights.group = on_device<Indices>(space.group);
      const auto state = on_device<engine::LayerState>(space.state, own, one.config.state_values());
      const engine::LayerState after("after", own, one.config.state_values());
      const engine::SpaceTokens all{
          on_device<linalg::Matrix>(space.rows, one.tokens, space.shape.columns()),
          linalg::Matrix("decays", one.tokens, 0), linalg::Matrix("outputs", one.tokens, channels)};
      const ExecutionSpace exec;
      for (std::int64_t t = 0; t < one.tokens; t += one.at_once) {
        const auto part = all.part(t, std::min(one.tokens, t + one.at_once));
        const auto& before = t == 0 ? state : after;
        engine::convolve_inputs(exec, space.shape, weights, part, before, after);
        engine::update_state(exec, space.shape, weights, part, before, after);
      }
      engine::gate_outputs(exec, space.shape, all);
      const Numbers expected = expected_of_mamba1(space, one.tokens);
      expect_near(all.outputs, expected, "output ");
      expect_near(after, space.state, "state ");
    }
  });
}

TEST(StateSpace, PlacesTheInputsOfAGroup) {
  StateSpaceConfig config = sizes(2, 2, 2, 3, 2);
  config.step_rank = 4;
  on_all_machines([&] {
    const engine::StateSpace space{config, 2, 2};
    const linalg::Matrix rows("rows", 2, space.columns());
    const Numbers latents = RandomNumbers()(2 * 10, 1);
    engine::place_inputs(ExecutionSpace{}, space, 1, on_device<linalg::Matrix>(latents, 2, 10),
                         rows);
    Numbers expected(2 * space.columns());
    for (std::int64_t i = 0; i < 12; ++i) {
      expected[i / 6 * space.columns() + 2 * 4 + 6 + i % 6] = latents[i / 6 * 10 + 4 + i % 6];
    }
    expect_near(rows, expected, "column ");
  });
}

// A rank's sums of squares are its part of the group's; the group's mean needs those of all.
TEST(StateSpace, SumsOfGroupsAddUpOverRanks) {
  const StateSpaceConfig config = sizes(6, 5, 3, 4, 2);
  on_all_machines([&] {
    for (const std::vector<int>& heads : {std::vector<int>{0, 3}, {1, 2, 4, 5}, {}}) {
      const Space space = random_space(config, heads, 3);
      engine::SpaceWeights weights;
      weights.first_heads = on_device<Kokkos::View<int*, MemorySpace>>(space.first_heads);
      weights.numbers = on_device<Kokkos::View<int*, MemorySpace>>(space.numbers);
      const Numbers outputs = RandomNumbers()(3 * space.shape.values(), 2);
      engine::SpaceTokens tokens;
      tokens.outputs = on_device<linalg::Matrix>(outputs, 3, space.shape.values());
      const linalg::Matrix sums("sums", 3, 3);
      Kokkos::deep_copy(sums, 7);
      engine::sum_groups(ExecutionSpace{}, space.shape, weights, tokens, sums);
      Numbers expected(9);
      for (std::size_t i = 0; i < outputs.size(); ++i) {
        const std::size_t of_token = space.shape.values(), head = i % of_token / 5;
        expected[i / of_token * 3 + heads[head] / 2] += outputs[i] * outputs[i];
      }
      expect_near(sums, expected, "sum ");
    }
  });
}

TEST(StateSpace, ARankWithoutHeadsHasNothingToDo) {
  const engine::StateSpace none{sizes(6, 5, 3, 4, 2), 0, 0};
  const linalg::Matrix empty("empty", 3, 0);
  const engine::LayerState state;
  engine::convolve_inputs(ExecutionSpace{}, none, {}, {empty, empty, empty}, state, state);
  engine::update_state(ExecutionSpace{}, none, {}, {empty, empty, empty}, state, state);
}

TEST(StateSpace, ScalesEachKindOfProjection) {
  StateSpaceConfig config = sizes(2, 2, 2, 3, 2);
  config.in_multipliers = {2, 3, 5, 7, 11};  // z, x, B, C, d
  on_all_machines([&] {
    const engine::StateSpace space{config, 2, 2};
    const linalg::Matrix rows("rows", 2, space.columns());
    Kokkos::deep_copy(rows, 1);
    engine::scale_projections(ExecutionSpace{}, space, rows);
    const Numbers one = {3, 3, 3, 3, 5, 5, 5, 7, 7, 7, 5, 5, 5, 7, 7, 7, 2, 2, 2, 2, 11, 11};
    Numbers expected = one;
    expected.insert(expected.end(), one.begin(), one.end());
    expect_near(rows, expected, "column ");
  });
}

// The state has the inputs of a channel side by side, as in a short convolution.
TEST(Convolution, StatesMayHaveTheirChannelsOutside) {
  for (const std::int64_t kernel : {2, 3, 16}) {
    for (const std::int64_t channels : {1, 33, 70}) {
      on_all_machines([&] {
        RandomNumbers random;
        const std::int64_t tokens = 11, kept = kernel - 1;
        const Numbers weights = random(kernel * channels, 1), bias = random(channels, 1);
        const Numbers rows = random(tokens * channels, 1);
        Numbers state = random(channels * kept, 1);
        const linalg::Matrix found = on_device<linalg::Matrix>(rows, tokens, channels);
        const auto after = on_device<engine::LayerState>(state, channels, kept);
        engine::ConvolvedRuns runs;
        runs.runs = 1;
        runs.channels = channels;
        runs.token_stride = 1;
        runs.channel_stride = kept;
        for (std::int64_t t = 0; t < tokens; t += 4) {
          const linalg::Matrix part =
              Kokkos::subview(found, std::make_pair(t, std::min(tokens, t + 4)), Kokkos::ALL);
          engine::convolve(ExecutionSpace{},
                           {on_device(weights), on_device(bias), kernel, channels}, runs, part,
                           after, after);
        }
        Numbers expected;
        for (std::int64_t i = 0; i < tokens * channels; ++i) {
          const std::int64_t c = i % channels;
          expected.push_back(bias[c] + convolved(state.data() + c * kept, 1, kernel, rows[i],
                                                 weights.data() + c, channels));
        }
        expect_near(found, expected, "row ");
        expect_near(after, state, "state ");
      });
    }
  }
}

TEST(Convolution, InputsAndOutputsAreMultiplied) {
  on_all_machines([&] {
    const std::int64_t n = 300;
    const Numbers projected = RandomNumbers()(2 * 3 * n, 1);
    const auto view = on_device<linalg::Matrix>(projected, 2, 3 * n);
    const linalg::Matrix y("y", 2, n);
    engine::multiply_inputs(ExecutionSpace{}, view, y);
    Numbers expected;
    for (std::int64_t i = 0; i < 2 * n; ++i) {
      const double* const row = projected.data() + i / n * 3 * n;
      expected.push_back(row[i % n] * row[2 * n + i % n]);
    }
    expect_near(y, expected, "input ");
    engine::multiply_outputs(ExecutionSpace{}, view, y);
    for (std::int64_t i = 0; i < 2 * n; ++i) {
      expected[i] *= projected[i / n * 3 * n + n + i % n];
    }
    expect_near(y, expected, "output ");
  });
}

}  // namespace
