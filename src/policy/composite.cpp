#include "policy/composite.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "base/kokkos_compat.hpp"
#include "cache/agree_on_memory.hpp"
#include "policy/row_math.hpp"

namespace kvzap::policy {
namespace {

using HostScores = Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>::host_mirror_type;

/// Copies the scores of a layer, whose rows may have any stride, to the host.
HostScores host_copy(const ExecutionSpace& exec, const ScoredLayer& layer, std::int64_t columns) {
  const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> copy(
      Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::composite::scores"),
      layer.heads.size(), columns);
  const auto scores = layer.scores;
  Kokkos::parallel_for(
      "kvzap::composite::copy",
      PolicyRange(exec, 0, static_cast<std::int64_t>(layer.heads.size()) * columns),
      KOKKOS_LAMBDA(std::int64_t i) {
        copy(i / columns, i % columns) = scores(i / columns, i % columns);
      });
  const auto host = Kokkos::create_mirror_view(copy);
  Kokkos::deep_copy(exec, host, copy);
  base::fence(exec, "kvzap::composite: scores are on the host");
  return host;
}

std::size_t slot_of(std::int64_t index) { return static_cast<std::size_t>(index); }

}  // namespace

CompositeScores composite_scores(const ExecutionSpace& exec, const Communicator& comm,
                                 const ScoredLayer& layer, int kv_heads) {
  std::vector<std::int64_t> rows(slot_of(kv_heads), 0);
  std::int64_t own = 0;
  for (std::size_t h = 0; h < layer.heads.size(); ++h) {
    rows[slot_of(layer.heads[h])] = layer.rows[h];
    own = std::max(own, layer.rows[h]);
  }
  comm.all_reduce_sum(rows.data(), rows.size());
  const std::int64_t most = *std::max_element(rows.begin(), rows.end());
  std::vector<double> sorted;
  CompositeScores scores;
  cache::agree_on_memory(comm, [&] {
    sorted.assign(slot_of(kv_heads * most), 0.0);
    scores.reserve(slot_of(most));
    if (own == 0) return;
    const HostScores host = host_copy(exec, layer, own);
    for (std::size_t h = 0; h < layer.heads.size(); ++h) {
      const auto begin = sorted.begin() + layer.heads[h] * most;
      for (std::int64_t row = 0; row < layer.rows[h]; ++row) {
        const double score = host(h, row);
        begin[row] = std::isfinite(score) ? score : std::numeric_limits<double>::infinity();
      }
      std::sort(begin, begin + layer.rows[h], std::greater<>());
    }
  });
  comm.all_reduce_sum(sorted.data(), sorted.size());
  for (std::int64_t k = 0; k < most; ++k) {
    float sum = 0;  // in float, as kvpress
    int count = 0;
    for (int head = 0; head < kv_heads; ++head) {
      if (k >= rows[slot_of(head)]) continue;
      sum += static_cast<float>(sorted[slot_of(head * most + k)]);
      ++count;
    }
    scores.push_back(sum / static_cast<float>(count));
  }
  // Heads with fewer rows drop out of the mean, which may rise then.
  for (std::size_t k = 1; k < scores.size(); ++k) scores[k] = std::min(scores[k], scores[k - 1]);
  return scores;
}

std::vector<std::int64_t> composite_rows(std::vector<CompositeScores> layers, std::int64_t keep,
                                         bool is_exact) {
  struct Token {
    float score;
    std::size_t layer;
  };
  for (std::size_t l = 1; l < layers.size(); ++l) {
    for (std::size_t k = 0; k < std::min(layers[0].size(), layers[l].size()); ++k) {
      layers[0][k] = std::max(layers[0][k], layers[l][k]);
    }
  }
  std::vector<Token> tokens;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    if (is_exact && !layers[l].empty()) layers[l][0] = std::numeric_limits<float>::infinity();
    for (const float score : layers[l]) tokens.push_back({score, l});
  }
  const auto most = static_cast<std::int64_t>(tokens.size());
  const auto end = tokens.begin() + std::min(most, std::max<std::int64_t>(0, keep));
  // A layer's scores descend, so only their number counts.
  std::nth_element(tokens.begin(), end, tokens.end(), [](const Token& a, const Token& b) {
    return a.score != b.score ? a.score > b.score : a.layer < b.layer;
  });
  std::vector<std::int64_t> rows(layers.size(), 0);
  std::for_each(tokens.begin(), end, [&](const Token& token) { ++rows[token.layer]; });
  for (std::size_t l = 0; l < layers.size(); ++l) {
    if (!layers[l].empty()) rows[l] = std::max<std::int64_t>(1, rows[l]);
  }
  return rows;
}

}  // namespace kvzap::policy
