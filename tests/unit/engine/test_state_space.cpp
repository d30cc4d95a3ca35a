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
    engine::pass_state_space(exec, space.shape, weights, all.part(t, std::min(tokens, t + at_once)),
                             t == 0 ? state : after, after);
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
  engine::pass_state_space(ExecutionSpace{}, none, {}, {empty, empty, empty}, engine::LayerState(),
                           engine::LayerState());
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
