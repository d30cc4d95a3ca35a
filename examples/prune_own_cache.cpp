// Scores and prunes a KV cache that belongs to the caller. Input: views. Output: a list of the kept
// pairs, and compacted views. kvzap allocates nothing that stays.
#include <Kokkos_Core.hpp>
#include <algorithm>
#include <cstdio>
#include <kvzap/core/compact.hpp>
#include <kvzap/core/keep_list.hpp>
#include <kvzap/engine/surrogate.hpp>
#include <random>
#include <vector>

namespace {

using kvzap::MemorySpace;

// A layer of another engine: keys and values side by side, (token, key or value, KV head, dim),
// bfloat16.
using EngineLayer = Kokkos::View<kvzap::bfloat16****, Kokkos::LayoutRight, MemorySpace>;

int run() {
  const std::string models = std::string(KVZAP_INPUTS) + "/models/";
  const kvzap::ExecutionSpace exec;
  const int layer = 2;
  const int tokens = 1000;
  const int window = 128;

  // The model's shape and the surrogate that was trained for it; one rank has all heads.
  const auto model = kvzap::ModelConfig::load(models + "recall-4m");
  const int heads = static_cast<int>(model.num_key_value_heads);
  const int dim = static_cast<int>(model.head_dim);
  const auto partition =
      kvzap::HeadPartition::even(static_cast<int>(model.num_hidden_layers), heads, 1);
  auto surrogate =
      kvzap::Surrogate::load(models + "kvzap-linear-recall-4m", model, partition, /*rank*/ 0);

  // The engine's data: hidden states that enter attention, and the layer's cache. Random numbers
  // here.
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> hidden("hidden", tokens,
                                                                 model.hidden_size);
  EngineLayer cache("cache", tokens, 2, heads, dim);
  auto host_hidden = Kokkos::create_mirror_view(hidden);
  auto host_cache = Kokkos::create_mirror_view(cache);
  for (std::size_t i = 0; i < host_hidden.size(); ++i) host_hidden.data()[i] = normal(random);
  for (std::size_t i = 0; i < host_cache.size(); ++i) {
    host_cache.data()[i] = kvzap::bfloat16(normal(random));
  }
  Kokkos::deep_copy(hidden, host_hidden);
  Kokkos::deep_copy(cache, host_cache);

  // 1. Scores, (KV head, token): the predicted log KVzip+ score of each pair.
  Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> scores("scores", heads, tokens);
  Kokkos::View<std::int64_t*, MemorySpace> positions("positions", tokens);
  Kokkos::parallel_for(
      "positions", Kokkos::RangePolicy<kvzap::ExecutionSpace>(exec, 0, tokens),
      KOKKOS_LAMBDA(std::int64_t token) { positions(token) = token; });
  surrogate.score(exec, layer, positions, hidden, scores);
  const auto host_scores = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, scores);

  // 2. The pairs that stay. The threshold evicts three quarters of these.
  std::vector<float> sorted(host_scores.data(), host_scores.data() + host_scores.size());
  const auto quantile = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() * 3 / 4);
  std::nth_element(sorted.begin(), quantile, sorted.end());
  kvzap::SelectRule rule;
  rule.threshold = *quantile;
  rule.sink = 4;
  rule.window = window;
  const auto list = kvzap::select(exec, scores, rule);

  // 3. The kept rows, consecutive and head after head, in a view of the caller.
  EngineLayer pruned("pruned", list.rows, 2, 1, dim);
  for (int part : {0, 1}) {  // keys, values
    kvzap::gather_kept(exec, list,
                       Kokkos::subview(cache, Kokkos::ALL, part, Kokkos::ALL, Kokkos::ALL),
                       Kokkos::subview(pruned, Kokkos::ALL, part, 0, Kokkos::ALL));
  }
  exec.fence();

  // Checks the result against a plain loop.
  const auto offsets = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, list.offsets);
  const auto result = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, pruned);
  std::printf("%d tokens, %d KV heads, threshold %.2f\n", tokens, heads, rule.threshold);
  std::int64_t row = 0;
  bool good = true;
  for (int h = 0; h < heads; ++h) {
    good = good && offsets(h) == row;
    for (int t = 0; t < tokens; ++t) {
      if (t < tokens - window && t >= rule.sink && host_scores(h, t) < rule.threshold) continue;
      for (int d = 0; d < dim && row < list.rows; ++d) {
        good = good && result(row, 0, 0, d).bits == host_cache(t, 0, h, d).bits &&
               result(row, 1, 0, d).bits == host_cache(t, 1, h, d).bits;
      }
      ++row;
    }
    std::printf("head %d keeps %lld rows\n", h, static_cast<long long>(row - offsets(h)));
  }
  good = good && row == list.rows;
  std::printf("cache: %zu bytes before, %zu after\n", cache.span() * sizeof(kvzap::bfloat16),
              pruned.span() * sizeof(kvzap::bfloat16));
  std::puts(good ? "right" : "WRONG");
  return good ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  Kokkos::ScopeGuard kokkos(argc, argv);
  try {
    return run();
  } catch (const kvzap::Error& error) {
    std::fprintf(stderr, "prune_own_cache: %s\n", error.what());
    return 1;
  }
}
