// Prunes a KV cache in views of the caller, of any layout in any memory space: Kokkos Kernels' GEMM
// scores tokens, a scan compacts rows, and attention reads the rows that stay. One process runs it
// in three layouts on every execution space of this Kokkos.
#include <Kokkos_Core.hpp>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <kvzap/core.hpp>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using Value = kvzap::bfloat16;
enum Array : std::uint32_t { keys_, values_, queries_, hidden_, weight_, bias_ };

constexpr int tokens = 600, kv_heads = 4, group = 2, dim = 32, hidden_size = 48;
constexpr int window = 32, sink = 4, budget = 150;  // of 600 rows, each head keeps 150 on average

// The engine's data: a number in [-1, 1) for each place of each array.
KOKKOS_INLINE_FUNCTION float number(Array array, std::int64_t i, std::int64_t j, std::int64_t k) {
  auto bits = static_cast<std::uint32_t>(((array * 1000 + i) * 1000 + j) * 1000 + k);
  bits = (bits ^ (bits >> 16)) * 0x7feb352du;
  bits = (bits ^ (bits >> 15)) * 0x846ca68bu;
  bits ^= bits >> 16;
  return Value(static_cast<float>(bits >> 8) * 0x1p-23f - 1.0f);
}

template <class Layout, class Exec>
using View = Kokkos::View<Value***, Layout, typename Exec::memory_space>;

// Allocates an array as the engine may have it. LayoutStride: keys and values side by side in
// (token, key or value, head, dim).
template <class Layout, class Exec>
View<Layout, Exec> engine_array(const Exec& exec, Array array, std::int64_t n0, std::int64_t n1,
                                std::int64_t n2) {
  View<Layout, Exec> view;
  if constexpr (std::is_same_v<Layout, Kokkos::LayoutStride>) {
    const Kokkos::View<Value****, Kokkos::LayoutRight, typename Exec::memory_space> both("both", n0,
                                                                                         2, n1, n2);
    view = Kokkos::subview(both, Kokkos::ALL, 1, Kokkos::ALL, Kokkos::ALL);
  } else {
    view = View<Layout, Exec>("array", n0, n1, n2);
  }
  Kokkos::parallel_for(
      "fill", Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(exec, 0, n0 * n1 * n2),
      KOKKOS_LAMBDA(std::int64_t at) {
        const std::int64_t i = at / n2 / n1, j = at / n2 % n1, k = at % n2;
        view(i, j, k) = Value(number(array, i, j, k));
      });
  return view;
}

struct Expected {
  std::vector<std::int64_t> rows;  // (KV head)
  std::vector<double> output;      // (query head, dim)
};

// The same by plain loops on the host.
Expected plain_loops() {
  std::vector<std::pair<double, int>> order;  // -score, head * tokens + token
  for (int head = 0; head < kv_heads; ++head) {
    for (int token = 0; token < tokens; ++token) {
      double score = number(bias_, 0, 0, head);
      for (int i = 0; i < hidden_size; ++i) {
        score += double{number(weight_, head, 0, i)} * number(hidden_, token, 0, i);
      }
      const bool exempt = token < sink || token >= tokens - window;
      order.emplace_back(exempt ? -INFINITY : -score, head * tokens + token);
    }
  }
  std::sort(order.begin(), order.end());
  order.resize(budget * kv_heads);

  Expected expected{std::vector<std::int64_t>(kv_heads),
                    std::vector<double>(kv_heads * group * dim)};
  std::vector<double> totals(kv_heads * group);
  for (const auto& entry : order) {
    const int head = entry.second / tokens, token = entry.second % tokens;
    ++expected.rows[head];
    for (int q = head * group; q < (head + 1) * group; ++q) {
      double dot = 0;
      for (int d = 0; d < dim; ++d) {
        dot += double{number(queries_, 0, q, d)} * number(keys_, token, head, d);
      }
      const double weight = std::exp(dot / std::sqrt(double{dim}));
      totals[q] += weight;
      for (int d = 0; d < dim; ++d) {
        expected.output[q * dim + d] += weight * number(values_, token, head, d);
      }
    }
  }
  for (int i = 0; i < kv_heads * group * dim; ++i) expected.output[i] /= totals[i / dim];
  return expected;
}

template <class Layout, class Exec>
bool run(const Expected& expected, const char* layout) {
  const Exec exec;
  using Space = typename Exec::memory_space;
  const auto keys = engine_array<Layout>(exec, keys_, tokens, kv_heads, dim);
  const auto values = engine_array<Layout>(exec, values_, tokens, kv_heads, dim);
  const auto queries = engine_array<Layout>(exec, queries_, 1, kv_heads * group, dim);
  const auto hidden = Kokkos::subview(engine_array<Layout>(exec, hidden_, tokens, 1, hidden_size),
                                      Kokkos::ALL, 0, Kokkos::ALL);
  const auto weight = Kokkos::subview(engine_array<Layout>(exec, weight_, kv_heads, 1, hidden_size),
                                      Kokkos::ALL, 0, Kokkos::ALL);
  const auto bias =
      Kokkos::subview(engine_array<Layout>(exec, bias_, 1, 1, kv_heads), 0, 0, Kokkos::ALL);
  const Kokkos::View<float***, Kokkos::LayoutRight, Space> output("output", 1, kv_heads * group,
                                                                  dim);

  // [views]
  // Scores, (KV head, token): the predicted log importance of each pair.
  const Kokkos::View<float**, Space> scores("scores", kv_heads, tokens);
  kvzap::score(exec, hidden, kvzap::LinearSurrogate{weight, bias}, scores);

  // The pairs that stay: the best of all heads together, the first 4 and the last 32 tokens.
  kvzap::SelectRule rule;  // or rule.threshold = -4
  rule.budget = budget;
  rule.pooled = true;
  rule.sink = sink;
  rule.window = window;
  const auto list = kvzap::select(exec, scores, rule);

  // Moves the rows that stay to the front of each head, in place. Heads have different lengths.
  const auto lengths = kvzap::compact(exec, list, keys, values);

  // A decode step's attention over them.
  kvzap::attend(exec, queries, kvzap::RaggedRows{keys, values, lengths}, output);
  exec.fence();
  // [views]

  const auto rows = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, lengths);
  const auto result = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, output);
  bool good = list.rows == budget * kv_heads;
  for (int head = 0; head < kv_heads; ++head) good = good && rows(head) == expected.rows[head];
  double worst = 0;
  for (int i = 0; i < kv_heads * group * dim; ++i) {
    worst = std::max(worst, std::fabs(expected.output[i] - result(0, i / dim, i % dim)));
  }
  good = good && worst < 1e-5;
  std::printf(
      "%s, %s: heads keep %lld, %lld, %lld, %lld of %d rows; difference from loops %.1e, %s\n",
      Exec::name(), layout, static_cast<long long>(rows(0)), static_cast<long long>(rows(1)),
      static_cast<long long>(rows(2)), static_cast<long long>(rows(3)), tokens, worst,
      good ? "right" : "WRONG");
  return good;
}

template <class Exec>
bool run_layouts(const Expected& expected) {
  const bool right = run<Kokkos::LayoutRight, Exec>(expected, "LayoutRight");
  const bool left = run<Kokkos::LayoutLeft, Exec>(expected, "LayoutLeft");
  const bool strided = run<Kokkos::LayoutStride, Exec>(expected, "LayoutStride");
  return right && left && strided;
}

// Kokkos has Serial, at most one of OpenMP, Threads and HPX, and at most one kind of device.
bool run_spaces() {
  const Expected expected = plain_loops();
  bool good = true;
#if defined(KOKKOS_ENABLE_SERIAL)
  good = run_layouts<Kokkos::Serial>(expected) && good;
#endif
#if defined(KOKKOS_ENABLE_OPENMP)
  good = run_layouts<Kokkos::OpenMP>(expected) && good;
#endif
#if defined(KOKKOS_ENABLE_THREADS)
  good = run_layouts<Kokkos::Threads>(expected) && good;
#endif
#if defined(KOKKOS_ENABLE_CUDA)
  good = run_layouts<Kokkos::Cuda>(expected) && good;
#endif
  return good;
}

}  // namespace

int main(int argc, char** argv) {
  const Kokkos::ScopeGuard kokkos(argc, argv);
  try {
    return run_spaces() ? 0 : 1;
  } catch (const kvzap::Error& error) {
    std::fprintf(stderr, "your_views: %s\n", error.what());
    return 1;
  }
}
