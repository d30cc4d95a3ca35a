// Training of surrogates: sums of ridge regression, and steps of an MLP, at the sizes of published
// models. arXiv 2601.07891 trains each layer on 1.2 M pairs (section 3).
#include <fmt/format.h>

#include <cmath>
#include <random>
#include <vector>

#include "base/kokkos_compat.hpp"
#include "common.hpp"
#include "train/mlp_step.hpp"
#include "train/normal_equations.hpp"

namespace kvzap::perf {
namespace {

constexpr double published_pairs = 1.2e6;
constexpr int published_epochs = 15;
constexpr std::int64_t heads = 8;

/// Pairs in memory, more than caches hold. Every rank has its own.
struct Pairs {
  Pairs(std::int64_t count, std::int64_t inputs)
      : hidden("kvzap::perf::hidden", count, inputs),
        scores("kvzap::perf::scores", count, heads),
        order("kvzap::perf::order", count) {
    const auto x = Kokkos::create_mirror_view(hidden);
    const auto y = Kokkos::create_mirror_view(scores);
    const auto o = Kokkos::create_mirror_view(order);
    std::mt19937 random(1);
    const auto number = [&] { return static_cast<float>(random() >> 8) / 8388608.0f - 1; };
    for (std::int64_t i = 0; i < count; ++i) {
      o(i) = i * 7919 % count;  // a prime: rows of a batch are scattered
      for (std::int64_t c = 0; c < inputs; ++c) x(i, c) = bfloat16(number());
      for (std::int64_t h = 0; h < heads; ++h) y(i, h) = number() - 8;
    }
    Kokkos::deep_copy(hidden, x);
    Kokkos::deep_copy(scores, y);
    Kokkos::deep_copy(order, o);
  }
  Kokkos::View<bfloat16**, Kokkos::LayoutRight, MemorySpace> hidden;
  linalg::Matrix scores;
  Kokkos::View<std::int64_t*, MemorySpace> order;
};

/// Adds one block of pairs to the normal equations: widening, products, sums.
void ridge(benchmark::State& state, std::int64_t inputs) {
  constexpr std::int64_t rows = train::NormalEquations::block_rows;
  const Pairs pairs(rows, inputs);
  train::NormalEquations equations(inputs, heads, std::vector<float>(inputs + heads, 0.01f));
  const ExecutionSpace exec;
  const Yardstick limit(Limit::gemm_f32);
  const double seconds = time_iterations(state, [&] {
    equations.add(exec, pairs.hidden, pairs.scores, pairs.order);
    base::fence(exec, "kvzap::perf: time");
  });
  report_flops(state, seconds, world().size() * equations.flops(rows), limit);
  state.counters["s_per_layer_1.2M"] = seconds / static_cast<double>(rows) * published_pairs;
}

/// Runs one step: gather and widen the batch, forward, backward, clip, AdamW.
void mlp(benchmark::State& state, std::int64_t inputs, std::int64_t hidden, std::int64_t batch) {
  const std::int64_t batches = 16;
  const Pairs pairs(batches * batch, inputs);
  train::MlpStep step(inputs, hidden, heads, batch);
  const ExecutionSpace exec;
  std::int64_t next = 0, t = 0;
  train::AdamStep adam{};
  adam.decay = 1 - 5e-5f;
  const Yardstick limit(Limit::gemm_f32);
  const double seconds = time_iterations(state, [&] {
    step.differentiate(exec, pairs.hidden, pairs.scores, pairs.order, next, batch);
    next = (next + batch) % (batches * batch);
    ++t;
    adam.rate = 5e-3f / (1 - std::pow(0.9f, static_cast<float>(t)));
    adam.root = 1 / std::sqrt(1 - std::pow(0.999f, static_cast<float>(t)));
    step.update(exec, 1, adam);
    base::fence(exec, "kvzap::perf: time");
  });
  // Two products with the first weights, three with the second ones.
  const double flops = 2.0 * static_cast<double>(batch) * static_cast<double>(hidden) *
                       static_cast<double>(2 * inputs + 3 * heads);
  report_flops(state, seconds, world().size() * flops, limit);
  state.counters["s_per_layer_1.2M"] =
      seconds / static_cast<double>(batch) * published_pairs * published_epochs;
}

}  // namespace

void register_benchmarks(const Options& options) {
  const int repetitions = options.quick ? 1 : 3;
  const std::vector<std::int64_t> sizes =
      options.quick ? std::vector<std::int64_t>{1024} : std::vector<std::int64_t>{1024, 2560, 4096};
  for (const std::int64_t inputs : sizes) {
    add(fmt::format("ridge/{}", inputs), 2, repetitions,
        [=](benchmark::State& state) { ridge(state, inputs); });
    add(fmt::format("mlp/{}x{}/batch:512", inputs, inputs / 8), 16, repetitions,
        [=](benchmark::State& state) { mlp(state, inputs, inputs / 8, 512); });
  }
}

}  // namespace kvzap::perf
