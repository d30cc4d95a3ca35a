// A cache whose KV heads keep different numbers of rows, and attention over it in a decode step.
#include <Kokkos_Core.hpp>
#include <cmath>
#include <cstdio>
#include <kvzap/core/attention.hpp>
#include <kvzap/core/cache.hpp>
#include <random>
#include <string>
#include <vector>

namespace {

using kvzap::MemorySpace;
using Rows = Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace>;

Rows random_rows(const std::string& label, int n, int heads, int dim, std::mt19937& random) {
  Rows rows(label, n, heads, dim);
  auto host = Kokkos::create_mirror_view(rows);
  std::normal_distribution<float> normal;
  for (std::size_t i = 0; i < host.size(); ++i) host.data()[i] = normal(random);
  Kokkos::deep_copy(rows, host);
  return rows;
}

int run() {
  const kvzap::ExecutionSpace exec;
  const int tokens = 2000, heads = 4, group = 2, dim = 64;
  std::mt19937 random(1);

  // One layer. The most recent 128 tokens of a head always stay; older ones are stored in pages of
  // 64.
  kvzap::CacheShape shape;
  shape.heads = {heads};
  shape.head_dim = dim;
  kvzap::KVCache cache(kvzap::DType::f32, shape);
  const auto sequence = cache.add_sequence();

  // Scores that differ by head: head 0 keeps almost nothing, head 3 almost everything.
  Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> scores("scores", heads, tokens);
  auto host_scores = Kokkos::create_mirror_view(scores);
  std::normal_distribution<float> normal;
  for (int h = 0; h < heads; ++h) {
    for (int t = 0; t < tokens; ++t) host_scores(h, t) = normal(random) + 1.5f * (h - 1.5f);
  }
  Kokkos::deep_copy(scores, host_scores);

  // Prefill: pairs that leave the window with a score below 0 are dropped, and take no memory.
  kvzap::EvictionRule rule;
  rule.threshold = 0;
  const Rows keys = random_rows("keys", tokens, heads, dim, random);
  const Rows values = random_rows("values", tokens, heads, dim, random);
  const auto counts = cache.append(exec, sequence, 0, keys, values, scores, rule);

  // A decode step: one token's queries over the kept rows and over its own key and value.
  const Rows queries = random_rows("queries", 1, heads * group, dim, random);
  const Rows new_keys = random_rows("new keys", 1, heads, dim, random);
  const Rows new_values = random_rows("new values", 1, heads, dim, random);
  const Rows output("output", 1, heads * group, dim);
  kvzap::Attention attention(kvzap::DType::f32);
  attention(exec, cache.layer(sequence, 0), queries, new_keys, new_values, output);
  exec.fence();

  std::printf("%lld of %lld judged pairs were evicted\n", static_cast<long long>(counts.evicted),
              static_cast<long long>(counts.judged));
  for (int h = 0; h < heads; ++h) {
    std::printf("head %d: %lld of %d rows, %zu pages\n", h,
                static_cast<long long>(cache.rows(sequence, 0, h)), tokens,
                cache.page_list(sequence, 0, h).size());
  }
  std::printf("bytes: %zu live, %zu allocated; all of it would be %zu\n", cache.bytes().live,
              cache.bytes().allocated, 2 * sizeof(float) * tokens * heads * dim);

  // Checks the result against a plain softmax over the rows that the cache reports.
  const auto q = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, queries);
  const auto k = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, new_keys);
  const auto v = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, new_values);
  const auto result = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, output);
  double worst = 0;
  for (int head = 0; head < heads * group; ++head) {
    const int kv = head / group;
    auto rows = cache.host_rows(sequence, 0, kv);
    rows.keys.insert(rows.keys.end(), &k(0, kv, 0), &k(0, kv, 0) + dim);
    rows.values.insert(rows.values.end(), &v(0, kv, 0), &v(0, kv, 0) + dim);
    std::vector<double> expected(dim, 0.0);
    double sum = 0;
    for (std::size_t row = 0; row * dim < rows.keys.size(); ++row) {
      double dot = 0;
      for (int d = 0; d < dim; ++d) dot += double{q(0, head, d)} * rows.keys[row * dim + d];
      const double weight = std::exp(dot / std::sqrt(double{dim}));
      sum += weight;
      for (int d = 0; d < dim; ++d) expected[d] += weight * rows.values[row * dim + d];
    }
    for (int d = 0; d < dim; ++d) {
      worst = std::fmax(worst, std::fabs(expected[d] / sum - result(0, head, d)));
    }
  }
  const bool good = worst < 1e-5 && cache.rows(sequence, 0, 0) < cache.rows(sequence, 0, heads - 1);
  std::printf("largest difference from a plain softmax: %.1e, %s\n", worst,
              good ? "right" : "WRONG");
  return good ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  Kokkos::ScopeGuard kokkos(argc, argv);
  try {
    return run();
  } catch (const kvzap::Error& error) {
    std::fprintf(stderr, "ragged_attention: %s\n", error.what());
    return 1;
  }
}
