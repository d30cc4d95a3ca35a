// The kernels of gated delta nets against the formula in double precision.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "base/machine.hpp"
#include "base/simd.hpp"
#include "engine/delta_net.hpp"

namespace {

using kvzap::DeltaNetConfig;
using kvzap::ExecutionSpace;
using kvzap::MemorySpace;
namespace base = kvzap::base;
namespace engine = kvzap::engine;
namespace linalg = kvzap::linalg;

using Numbers = std::vector<double>;

constexpr double norm_eps = 1e-5;

/// A net of one rank, its weights, and the rows of some tokens.
struct Net {
  engine::DeltaNet shape;
  Numbers convolution, decay_rates, shifts, norm, rows, rates, state;
};

Net random_net(const DeltaNetConfig& config, std::int64_t key_heads, std::int64_t tokens,
               unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> draw(-1, 1);
  const auto numbers = [&](std::int64_t count, float scale, float offset) {
    Numbers result;
    for (std::int64_t i = 0; i < count; ++i) result.push_back(offset + scale * draw(random));
    return result;
  };
  Net net;
  net.shape = {config, key_heads};
  net.convolution = numbers(config.kernel * net.shape.channels(), 1, 0);
  net.decay_rates = numbers(net.shape.value_heads(), 0.3f, 0.5f);
  net.shifts = numbers(net.shape.value_heads() * config.decays(), 1, -1);
  net.norm = numbers(config.value_dim, 0.5f, 1);
  net.rows = numbers(tokens * net.shape.columns(), 2, 0);
  net.rates = numbers(tokens * net.shape.rates(), 2, 0);
  net.state = numbers(key_heads * config.state_values(), 1, 0);
  return net;
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double silu(double x) { return x * sigmoid(x); }

/// The decay of a row of a head's state, whose projection is x.
double decay_of(const Net& net, std::int64_t head, std::int64_t row, const double* decays) {
  const DeltaNetConfig& config = net.shape.config;
  const double rate = net.decay_rates[head];
  if (config.decays() == 0) return rate;
  const std::int64_t i = head * config.decays() + row % config.decays();
  const double x = decays[i] + net.shifts[i];
  if (config.least_log_decay < 0) return std::exp(config.least_log_decay * sigmoid(rate * x));
  return std::exp(-rate * std::log1p(std::exp(x)));
}

/// One token after the other, as transformers' torch_recurrent_gated_delta_rule.
Numbers expected_outputs(Net& net, std::int64_t tokens) {
  const DeltaNetConfig& config = net.shape.config;
  const std::int64_t key_dim = config.key_dim, value_dim = config.value_dim;
  const std::int64_t of_head = config.channels(), group = config.group();
  const bool is_lightning = config.kind == DeltaNetConfig::Kind::lightning;
  Numbers outputs(tokens * net.shape.values());
  for (std::int64_t t = 0; t < tokens; ++t) {
    const double* const row = net.rows.data() + t * net.shape.columns();
    const double* const rates = net.rates.data() + t * net.shape.rates();
    for (std::int64_t h = 0; h < net.shape.key_heads; ++h) {
      double* const state = net.state.data() + h * config.state_values();
      double* const inputs = state + group * key_dim * value_dim;
      Numbers x(of_head);
      for (std::int64_t c = 0; c < of_head; ++c) {
        double sum = 0;
        for (std::int64_t k = 0; k < config.kernel; ++k) {
          const bool is_own = k + 1 == config.kernel;
          const double input = is_own ? row[h * of_head + c] : inputs[k * of_head + c];
          sum += net.convolution[k * net.shape.channels() + h * of_head + c] * input;
        }
        for (std::int64_t k = 0; k + 1 < config.kernel; ++k) {
          const bool is_last = k + 2 == config.kernel;
          inputs[k * of_head + c] = is_last ? row[h * of_head + c] : inputs[(k + 1) * of_head + c];
        }
        x[c] = silu(is_lightning ? row[h * of_head + c] : sum);
      }
      for (std::int64_t part = 0; !is_lightning && part < 2; ++part) {
        double length = 1e-6;
        for (std::int64_t d = 0; d < key_dim; ++d) length += std::pow(x[part * key_dim + d], 2);
        if (part == 0) length *= static_cast<double>(key_dim);
        for (std::int64_t d = 0; d < key_dim; ++d) x[part * key_dim + d] /= std::sqrt(length);
      }
      for (std::int64_t v = 0; v < group; ++v) {
        const std::int64_t head = h * group + v;
        const double strength = is_lightning ? 1 : sigmoid(rates[head]);
        Numbers decays;
        for (std::int64_t i = 0; i < key_dim; ++i) {
          decays.push_back(
              decay_of(net, head, i, is_lightning ? nullptr : rates + net.shape.value_heads()));
        }
        double* const cells = state + v * key_dim * value_dim;
        double* const out = outputs.data() + t * net.shape.values() + head * value_dim;
        double squares = 0;
        for (std::int64_t j = 0; j < value_dim; ++j) {
          double known = 0;
          for (std::int64_t i = 0; !is_lightning && i < key_dim; ++i) {
            known += decays[i] * cells[i * value_dim + j] * x[key_dim + i];
          }
          const double change = strength * (x[2 * key_dim + v * value_dim + j] - known);
          for (std::int64_t i = 0; i < key_dim; ++i) {
            double& cell = cells[i * value_dim + j];
            cell = decays[i] * cell + x[key_dim + i] * change;
            out[j] += cell * x[i];
          }
          squares += out[j] * out[j];
        }
        if (is_lightning) continue;  // the block has the norm and the gates
        const double factor = 1 / std::sqrt(squares / static_cast<double>(value_dim) + norm_eps);
        for (std::int64_t j = 0; j < value_dim; ++j) {
          const double gate = row[net.shape.gates() + head * value_dim + j];
          const bool is_kimi = config.kind == DeltaNetConfig::Kind::kimi;
          out[j] *= factor * net.norm[j] * (is_kimi ? sigmoid(gate) : silu(gate));
        }
      }
    }
  }
  return outputs;
}

template <class View>
View on_device(const Numbers& numbers, std::int64_t rows, std::int64_t columns) {
  View view("view", rows, columns);
  const auto host = Kokkos::create_mirror_view(view);
  for (std::size_t i = 0; i < numbers.size(); ++i) host.data()[i] = static_cast<float>(numbers[i]);
  Kokkos::deep_copy(view, host);
  return view;
}

linalg::Vector on_device(const Numbers& numbers) {
  linalg::Vector view("view", numbers.size());
  const auto host = Kokkos::create_mirror_view(view);
  for (std::size_t i = 0; i < numbers.size(); ++i) host(i) = static_cast<float>(numbers[i]);
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
void expect_equal(const DeltaNetConfig& config, std::int64_t key_heads, std::int64_t tokens,
                  std::int64_t at_once) {
  Net net = random_net(config, key_heads, tokens, 11);
  const engine::DeltaWeights weights{on_device(net.convolution), on_device(net.decay_rates),
                                     on_device(net.shifts), on_device(net.norm),
                                     static_cast<float>(norm_eps)};
  const auto state = on_device<engine::DeltaState>(net.state, key_heads, config.state_values());
  const engine::DeltaTokens all{on_device<linalg::Matrix>(net.rows, tokens, net.shape.columns()),
                                on_device<linalg::Matrix>(net.rates, tokens, net.shape.rates()),
                                linalg::Matrix("outputs", tokens, net.shape.values())};
  const engine::DeltaState after("after", key_heads, config.state_values());
  for (std::int64_t t = 0; t < tokens; t += at_once) {
    engine::pass_delta_net(ExecutionSpace{}, net.shape, weights,
                           all.part(t, std::min(tokens, t + at_once)), t == 0 ? state : after,
                           after);
  }
  const Numbers before = net.state;
  const Numbers expected = expected_outputs(net, tokens);
  expect_near(all.outputs, expected, "output ");
  expect_near(after, net.state, "state ");
  expect_near(state, before, "state before ");
}

void expect_all_equal() {
  // Odd sizes, several blocks of columns with a rest, kernels of 1 to 16 tokens.
  expect_equal({1, 1, 4, 3, 4}, 1, 9, 9);
  expect_equal({2, 6, 7, 40, 3}, 2, 20, 7);
  expect_equal({6, 6, 16, 64, 1}, 3, 5, 1);
  expect_equal({4, 8, 33, 16, 16}, 2, 40, 1);
  expect_equal({4, 8, 128, 128, 4}, 1, 70, 64);
  for (const double bound : {0.0, -5.0}) {
    DeltaNetConfig kimi{2, 2, 7, 40, 3};
    kimi.kind = DeltaNetConfig::Kind::kimi;
    kimi.least_log_decay = bound;
    expect_equal(kimi, 2, 20, 7);
    kimi.key_dim = kimi.value_dim = 128;
    kimi.kernel = 4;
    expect_equal(kimi, 1, 70, 64);
  }
  DeltaNetConfig lightning{3, 3, 7, 40, 1};
  lightning.kind = DeltaNetConfig::Kind::lightning;
  expect_equal(lightning, 2, 20, 7);
  lightning.key_dim = lightning.value_dim = 128;
  expect_equal(lightning, 1, 70, 64);
}

TEST(DeltaNet, EqualsTheFormula) {
  const bool before = base::machine().on_device();
  const base::SimdLevel level = base::machine().simd();
  for (const bool device : {false, true}) {
    base::machine().set_device(device);
    for (const auto other :
         {base::SimdLevel::baseline, base::SimdLevel::avx2, base::SimdLevel::avx512}) {
      if (!base::processor_has(other)) continue;
      SCOPED_TRACE(std::string(base::name_of(other)) + (device ? ", device" : ", host"));
      base::machine().set_simd(other);
      expect_all_equal();
    }
  }
  base::machine().set_simd(level);
  base::machine().set_device(before);
}

TEST(DeltaNet, ARankWithoutHeadsHasNothingToDo) {
  const engine::DeltaNet none{{2, 4, 8, 8, 4}, 0};
  const linalg::Matrix empty("empty", 3, 0);
  engine::pass_delta_net(ExecutionSpace{}, none, {}, {empty, empty, empty}, engine::DeltaState(),
                         engine::DeltaState());
}

}  // namespace
