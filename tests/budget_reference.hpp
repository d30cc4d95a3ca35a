// What a budget keeps by sorting all scores, and heads that a test makes up, for tests of Budget.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <kvzap/engine/budget.hpp>
#include <limits>
#include <random>
#include <tuple>
#include <vector>

namespace kvzap::test {

/// One head of a layer.
struct ScoredHead {
  int layer = 0;
  int head = 0;
  std::vector<float> scores;
};

using Verdicts = std::vector<std::vector<bool>>;  // (head, row)

/// Heads of all layers; some of their rows gone if `uneven`, scores from few values if `ties`, a
/// few of them not finite if `broken`.
inline std::vector<ScoredHead> make_heads(int layers, int kv_heads, std::int64_t tokens,
                                          bool uneven = false, bool ties = false,
                                          bool broken = false, unsigned seed = 5) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(-1, 2);
  std::vector<ScoredHead> heads;
  for (int layer = 0; layer < layers; ++layer) {
    for (int h = 0; h < kv_heads; ++h) {
      std::int64_t rows = tokens;
      if (uneven) rows = static_cast<std::int64_t>(random() % static_cast<unsigned>(tokens + 1));
      ScoredHead head{layer, h, std::vector<float>(static_cast<std::size_t>(rows))};
      // Heads differ, or there is nothing to compete for.
      for (float& score : head.scores) {
        score = normal(random) + 0.3f * static_cast<float>(h) - 0.1f * static_cast<float>(layer);
        if (ties) score = std::round(score);
        if (broken && random() % 40 == 0) {
          score = random() % 2 == 0 ? std::nanf("") : -std::numeric_limits<float>::infinity();
        }
      }
      heads.push_back(std::move(head));
    }
  }
  return heads;
}

/// What Budget::choose says of the heads `mine` of this rank, in their order. Heads of a layer lie
/// together and ascending.
inline Verdicts choose(const Budget& budget, const Communicator& comm, const Budget::Model& model,
                       std::int64_t tokens, const std::vector<ScoredHead>& heads,
                       const std::vector<std::size_t>& mine) {
  const ExecutionSpace exec;
  // Every rank has all layers, also those of which it has no head.
  std::vector<ScoredLayer> layers;
  for (int l = 0; l < model.layers; ++l) {
    ScoredLayer layer;
    layer.layer = l;
    std::int64_t most = 0;
    for (const std::size_t i : mine) {
      if (heads[i].layer != l) continue;
      layer.heads.push_back(heads[i].head);
      layer.rows.push_back(static_cast<std::int64_t>(heads[i].scores.size()));
      most = std::max(most, layer.rows.back());
    }
    // Rows lie neither without gaps nor beginning with the view.
    const Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace> room(
        "scores", layer.heads.size(), most, 2);
    const auto host = Kokkos::create_mirror_view(room);
    std::size_t h = 0;
    for (const std::size_t i : mine) {
      if (heads[i].layer != l) continue;
      for (std::size_t row = 0; row < heads[i].scores.size(); ++row) {
        host(h, row, 1) = heads[i].scores[row];
      }
      for (auto row = static_cast<std::int64_t>(heads[i].scores.size()); row < most; ++row) {
        host(h, row, 1) = 1e9f;
      }
      ++h;
    }
    Kokkos::deep_copy(room, host);
    layer.scores = Kokkos::subview(room, Kokkos::ALL, Kokkos::ALL, 1);
    layer.keep = decltype(layer.keep)("keep", layer.heads.size(), most);
    layers.push_back(layer);
  }
  if (budget.by_layer()) {
    for (const ScoredLayer& layer : layers) budget.choose(exec, comm, model, tokens, {layer});
  } else {
    budget.choose(exec, comm, model, tokens, layers);
  }
  Verdicts verdicts;
  std::vector<std::size_t> next(static_cast<std::size_t>(model.layers), 0);
  for (const std::size_t i : mine) {
    const auto l = static_cast<std::size_t>(heads[i].layer);
    const auto keep = Kokkos::create_mirror_view(layers[l].keep);
    Kokkos::deep_copy(keep, layers[l].keep);
    std::vector<bool> verdict;
    for (std::size_t row = 0; row < heads[i].scores.size(); ++row) {
      verdict.push_back(keep(next[l], row) != 0);
    }
    ++next[l];
    verdicts.push_back(std::move(verdict));
  }
  return verdicts;
}

/// The same on this rank alone, which has all heads.
inline Verdicts choose(const Budget& budget, const Budget::Model& model, std::int64_t tokens,
                       const std::vector<ScoredHead>& heads) {
  std::vector<std::size_t> all;
  for (std::size_t i = 0; i < heads.size(); ++i) all.push_back(i);
  return choose(budget, Communicator::self(), model, tokens, heads, all);
}

/// The rows of `pool` in the order in which they stay: (head's index, row).
inline std::vector<std::pair<std::size_t, std::size_t>> sorted_rows(
    const std::vector<ScoredHead>& heads, const std::vector<std::size_t>& pool,
    const Verdicts& safe) {
  struct Row {
    int rank;
    float score;
    std::size_t head, row;
  };
  std::vector<Row> rows;
  for (const std::size_t i : pool) {
    for (std::size_t row = 0; row < heads[i].scores.size(); ++row) {
      const float score = heads[i].scores[row];
      const bool finite = std::isfinite(score);
      rows.push_back(
          {finite && !safe[i][row] ? 1 : 0, finite && !safe[i][row] ? score : 0, i, row});
    }
  }
  std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) {
    return std::make_tuple(a.rank, -a.score, a.head, a.row) <
           std::make_tuple(b.rank, -b.score, b.head, b.row);
  });
  std::vector<std::pair<std::size_t, std::size_t>> order;
  for (const Row& row : rows) order.emplace_back(row.head, row.row);
  return order;
}

/// Marks the first `keep` rows of the pool, and all that are not finite.
inline void keep_best(const std::vector<ScoredHead>& heads, const std::vector<std::size_t>& pool,
                      std::int64_t keep, const Verdicts& safe, Verdicts& verdicts) {
  const auto order = sorted_rows(heads, pool, safe);
  for (std::size_t k = 0; k < order.size(); ++k) {
    const auto [head, row] = order[k];
    if (static_cast<std::int64_t>(k) < keep || !std::isfinite(heads[head].scores[row])) {
      verdicts[head][row] = true;
    }
  }
}

inline Verdicts no_rows(const std::vector<ScoredHead>& heads) {
  Verdicts verdicts;
  for (const ScoredHead& head : heads) verdicts.emplace_back(head.scores.size(), false);
  return verdicts;
}

/// By sorting: every head keeps `rows` (layer), or heads of one pool compete for as many each, of
/// which `safe` stay in any case.
inline Verdicts keep_by_sorting(Budget::Pool pool, const std::vector<ScoredHead>& heads,
                                const std::vector<std::int64_t>& rows_of_layer, std::int64_t safe) {
  const Verdicts none = no_rows(heads);
  Verdicts verdicts = none, is_safe = none;
  std::vector<std::vector<std::size_t>> pools;
  std::vector<std::int64_t> keep;
  for (std::size_t i = 0; i < heads.size(); ++i) {
    const bool begins = pool == Budget::Pool::head || pools.empty() ||
                        (pool == Budget::Pool::layer && heads[i].layer != heads[i - 1].layer);
    if (begins) {
      pools.emplace_back();
      keep.push_back(0);
    }
    pools.back().push_back(i);
    keep.back() += rows_of_layer[static_cast<std::size_t>(heads[i].layer)];
    if (pool != Budget::Pool::head) keep_best(heads, {i}, safe, none, is_safe);
  }
  for (std::size_t p = 0; p < pools.size(); ++p) {
    keep_best(heads, pools[p], keep[p], is_safe, verdicts);
  }
  return verdicts;
}

inline std::int64_t count(const Verdicts& verdicts) {
  std::int64_t n = 0;
  for (const auto& head : verdicts) n += std::count(head.begin(), head.end(), true);
  return n;
}

}  // namespace kvzap::test
