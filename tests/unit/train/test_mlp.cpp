#include <gtest/gtest.h>

#include <cmath>
#include <kvzap/lab/train.hpp>
#include <limits>
#include <numeric>

#include "base/kokkos_compat.hpp"
#include "base/machine.hpp"
#include "train/host_loops.hpp"
#include "train/layer_pairs.hpp"
#include "train/mlp_step.hpp"
#include "unit/temporary_folder.hpp"
#include "unit/train/memory_pairs.hpp"

namespace kvzap {
namespace {

using test::expect_error;
using test::MemoryPairs;
using train::MlpStep;

constexpr std::int64_t inputs = 11, hidden = 6, heads = 3, rows = 20;

std::vector<double> doubles(const linalg::Vector& view) {
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), view);
  return {host.data(), host.data() + host.extent(0)};
}
void fill(const linalg::Vector& view, const std::vector<double>& values) {
  const auto host = Kokkos::create_mirror_view(view);
  for (std::size_t i = 0; i < values.size(); ++i) host(i) = static_cast<float>(values[i]);
  Kokkos::deep_copy(view, host);
}

/// The network and its loss in double, from the definition: torch's Linear, GELU and MSELoss.
double loss_of(const std::vector<double>& parameters, MemoryPairs& pairs,
               const std::vector<std::int64_t>& order) {
  const double* const weight1 = parameters.data();
  const double* const bias1 = weight1 + hidden * inputs;
  const double* const weight2 = bias1 + hidden;
  const double* const bias2 = weight2 + heads * hidden;
  double loss = 0;
  for (const std::int64_t p : order) {
    std::vector<double> activation(hidden);
    for (std::int64_t u = 0; u < hidden; ++u) {
      double x = bias1[u];
      for (std::int64_t c = 0; c < inputs; ++c)
        x += weight1[u * inputs + c] * pairs.hidden(0, p, c);
      activation[u] = 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
    }
    for (std::int64_t h = 0; h < heads; ++h) {
      double y = bias2[h];
      for (std::int64_t u = 0; u < hidden; ++u) y += weight2[h * hidden + u] * activation[u];
      const double error = y - pairs.score(0, p, static_cast<int>(h));
      loss += error * error;
    }
  }
  return loss / (static_cast<double>(order.size()) * heads);
}

class MlpKernels : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override { base::machine().set_device(GetParam()); }
  void TearDown() override { base::machine().set_device(!base::runs_on_host); }
};

template <class Value>
void check_gradient(DType dtype) {
  auto pairs = MemoryPairs::random(rows, 1, inputs, heads, dtype);
  const auto stored = train::read_layer(pairs, 0, split_pairs(pairs.info(), 0, 0));
  MlpStep step(inputs, hidden, heads, 16);
  std::mt19937 random(5);
  std::vector<double> parameters(step.size());
  for (double& p : parameters) p = static_cast<float>(static_cast<double>(random()) / 2e9 - 1);
  fill(step.parameters(), parameters);
  // Rows 2 .. of an order of 15 that are not the first ones.
  std::vector<std::int64_t> order = {3, 19, 0, 7, 8, 2, 11, 12, 13, 4, 5, 16, 17, 1, 9};
  const Kokkos::View<std::int64_t*, MemorySpace> view("order", order.size());
  const auto host = Kokkos::create_mirror_view(view);
  std::copy(order.begin(), order.end(), host.data());
  Kokkos::deep_copy(view, host);
  const ExecutionSpace exec;
  step.differentiate(exec, stored.hidden(), stored.scores, view, 2, 13);
  const std::vector<double> gradient = doubles(step.gradient());

  const std::vector<std::int64_t> batch(order.begin() + 2, order.end());
  double loss = 0;
  Kokkos::deep_copy(loss, Kokkos::subview(step.loss(), 0));
  EXPECT_NEAR(loss / (13 * heads), loss_of(parameters, pairs, batch), 1e-5 * loss);
  double largest = 0;
  for (const double g : gradient) largest = std::max(largest, std::fabs(g));
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    constexpr double h = 1e-5;
    const double middle = parameters[i];
    parameters[i] = middle + h;
    const double above = loss_of(parameters, pairs, batch);
    parameters[i] = middle - h;
    const double below = loss_of(parameters, pairs, batch);
    parameters[i] = middle;
    EXPECT_NEAR(gradient[i], (above - below) / (2 * h), 2e-6 * largest) << i;
  }
}

TEST_P(MlpKernels, GradientIsThatOfFiniteDifferencesInDouble) {
  check_gradient<float>(DType::f32);
  check_gradient<half>(DType::f16);
  check_gradient<bfloat16>(DType::bf16);
}

TEST_P(MlpKernels, UpdatesAreAdamWsAndClipTheNorm) {
  MlpStep step(inputs, hidden, heads, 16);
  const std::int64_t size = step.size();
  std::mt19937 random(7);
  const auto number = [&] { return static_cast<double>(random()) / 2147483648.0 - 1; };
  std::vector<double> parameters(size), first(size), second(size), gradient(size);
  for (double& p : parameters) p = static_cast<float>(number());
  fill(step.parameters(), parameters);
  const ExecutionSpace exec;
  for (int t = 1; t <= 7; ++t) {
    const double length = t % 2 == 0 ? 0.01 : 3;  // some below the norm that is clipped
    double norm = 0;
    for (double& g : gradient) {
      g = static_cast<float>(length * number());
      norm += g * g;
    }
    norm = std::sqrt(norm);
    fill(step.gradient(), gradient);
    const double rate = 5e-3 / t, decay = 0.01, clip = 1;
    const double c1 = 1 - std::pow(0.9, t), c2 = 1 - std::pow(0.999, t);
    train::AdamStep adam{};
    adam.decay = static_cast<float>(1 - rate * decay);
    adam.rate = static_cast<float>(rate / c1);
    adam.root = static_cast<float>(1 / std::sqrt(c2));
    step.update(exec, clip, adam);
    for (std::int64_t i = 0; i < size; ++i) {
      const double g = gradient[i] * std::min(1.0, clip / (norm + 1e-6));
      parameters[i] *= 1 - rate * decay;
      first[i] = 0.9 * first[i] + 0.1 * g;
      second[i] = 0.999 * second[i] + 0.001 * g * g;
      parameters[i] -= rate * (first[i] / c1) / (std::sqrt(second[i] / c2) + 1e-8);
    }
  }
  const auto found = doubles(step.parameters());
  for (std::int64_t i = 0; i < size; ++i) EXPECT_NEAR(found[i], parameters[i], 2e-6) << i;
}

INSTANTIATE_TEST_SUITE_P(Train, MlpKernels, ::testing::Values(false, true));

TEST(TrainKernels, GeluAndItsSlopeAreExactToFloat) {
  std::vector<float> x, activation, zero;
  for (int i = -3000; i <= 3000; ++i) x.push_back(static_cast<float>(i) / 250);
  x.insert(x.end(), {100.0f, -100.0f, 1e-20f, -0.0f});
  std::vector<float> slope = x;
  activation.resize(x.size());
  zero.resize(x.size());
  train::gelu_and_slope(slope.data(), zero.data(), activation.data(),
                        static_cast<std::int64_t>(x.size()));
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double v = x[i], phi = 0.5 * (1 + std::erf(v / std::sqrt(2.0)));
    EXPECT_NEAR(activation[i], v * phi, 3e-7 * (1 + std::fabs(v))) << v;
    EXPECT_NEAR(slope[i], phi + v * std::exp(-v * v / 2) / std::sqrt(2 * 3.14159265358979),
                4e-7 * (1 + std::fabs(v)))
        << v;
  }
}

MlpOptions quick() {
  MlpOptions options;
  options.hidden = 16;
  options.epochs = 6;
  options.batch = 32;
  options.seed = 4;
  return options;
}

TrainedLayer train(const PairSource& source, int layer, const MlpOptions& options) {
  MlpTrainer trainer(source, layer, split_pairs(source.info(), 0.1, 1), options);
  while (!trainer.is_done()) trainer.run_epoch();
  return trainer.result();
}

TEST(Mlp, LearnsWhatALinearMapCannot) {
  const auto pairs = MemoryPairs::random(3000, 1, 24, 2);
  MlpOptions options = quick();
  options.epochs = 25;
  const TrainedLayer mlp = train(pairs, 0, options);
  const auto linear = train_ridge(pairs, 0, split_pairs(pairs.info(), 0.1, 1), {});
  for (int h = 0; h < 2; ++h) {
    EXPECT_GT(mlp.report.r2[h], 0.95);
    EXPECT_GT(mlp.report.r2[h], linear->report.r2[h] + 0.1);
  }
  EXPECT_LT(mlp.report.epoch_mse.back(), 0.1 * mlp.report.epoch_mse.front());
  EXPECT_EQ(mlp.report.epoch_mse.size(), 25);
  EXPECT_EQ(mlp.report.oracle.size(), 300 * 2);
  EXPECT_EQ(mlp.report.training, 2700);
}

TEST(Mlp, IsTheSameEveryTimeAndAnotherForAnotherSeed) {
  const auto pairs = MemoryPairs::random(500, 2, 24, 2);
  const TrainedLayer one = train(pairs, 1, quick()), two = train(pairs, 1, quick());
  EXPECT_EQ(one.surrogate.weight1, two.surrogate.weight1);
  EXPECT_EQ(one.surrogate.bias2, two.surrogate.bias2);
  EXPECT_EQ(one.report.epoch_mse, two.report.epoch_mse);
  MlpOptions options = quick();
  options.seed = 5;
  EXPECT_NE(one.surrogate.weight1, train(pairs, 1, options).surrogate.weight1);
}

TEST(Mlp, GoesOnFromAnyBatchToTheSameResult) {
  const auto pairs = MemoryPairs::random(500, 1, 24, 2);
  const TrainedLayer whole = train(pairs, 0, quick());
  const PairSplit split = split_pairs(pairs.info(), 0.1, 1);
  for (const int patience : {1, 7, 15, 40}) {
    MlpTrainer::State state;
    {
      MlpTrainer trainer(pairs, 0, split, quick());
      int batches = 0;
      const auto stop = [&] { return ++batches >= patience; };
      while (trainer.run_epoch(stop) && batches < patience) {
      }
      state = trainer.state();
    }
    MlpTrainer trainer(pairs, 0, split, quick());
    trainer.restore(state);
    while (!trainer.is_done()) trainer.run_epoch();
    const TrainedLayer rest = trainer.result();
    EXPECT_EQ(whole.surrogate.weight1, rest.surrogate.weight1) << patience;
    EXPECT_EQ(whole.surrogate.weight2, rest.surrogate.weight2) << patience;
    EXPECT_EQ(whole.report.epoch_mse, rest.report.epoch_mse) << patience;
    EXPECT_EQ(whole.report.r2, rest.report.r2) << patience;
  }
}

TEST(Mlp, StartsWithinTheBoundsOfTorch) {
  const auto pairs = MemoryPairs::random(50, 1, 64, 2);
  MlpTrainer trainer(pairs, 0, split_pairs(pairs.info(), 0, 0), quick());
  const auto parameters = trainer.state().parameters;
  float largest1 = 0, largest2 = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    float& largest = i < 16 * 65 ? largest1 : largest2;
    largest = std::max(largest, std::fabs(parameters[i]));
  }
  EXPECT_LE(largest1, 1 / 8.0f);
  EXPECT_GT(largest1, 0.99f / 8);
  EXPECT_LE(largest2, 1 / 4.0f);
  EXPECT_GT(largest2, 0.8f / 4);
}

TEST(Mlp, LeavesOutPairsThatAreNotFinite) {
  auto pairs = MemoryPairs::random(200, 1, 8, 2);
  pairs.hidden(0, 10, 3) = std::numeric_limits<float>::infinity();
  pairs.score(0, 20, 1) = std::nanf("");
  const TrainedLayer trained = train(pairs, 0, quick());
  EXPECT_EQ(trained.report.dropped, 2);
  EXPECT_EQ(trained.report.training + trained.report.validation, 198);
  for (const float w : trained.surrogate.weight1) EXPECT_TRUE(std::isfinite(w));
}

TEST(Mlp, RefusesOptionsThatMakeNoSense) {
  const auto pairs = MemoryPairs::random(20, 1, 8, 2);
  const PairSplit split = split_pairs(pairs.info(), 0, 0);
  const auto with = [&](auto change) {
    MlpOptions options;
    change(options);
    return [=, &pairs] { MlpTrainer(pairs, 0, split, options); };
  };
  expect_error(with([](MlpOptions& o) { o.hidden = -1; }), {"hidden is -1"});
  expect_error(with([](MlpOptions& o) { o.epochs = 0; }), {"epochs is 0"});
  expect_error(with([](MlpOptions& o) { o.batch = 0; }), {"batch is 0"});
  expect_error(with([](MlpOptions& o) { o.learning_rate = -1; }), {"learning rate is -1"});
  MlpOptions wild = quick();
  wild.learning_rate = 1e30;
  expect_error([&] { train(pairs, 0, wild); }, {"layer 0", "diverged", "learning rate"});
  MlpTrainer trainer(pairs, 0, split, quick());
  MlpTrainer::State state = trainer.state();
  state.batch = 3;
  expect_error([&] { trainer.restore(state); }, {"layer 0", "checkpoint"});
}

}  // namespace
}  // namespace kvzap
