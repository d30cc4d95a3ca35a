#include <fmt/format.h>

#include <algorithm>
#include <kvzap/core/head_partition.hpp>
#include <numeric>

namespace kvzap {

std::pair<std::int64_t, std::int64_t> even_range(std::int64_t total, int parts, int part) {
  const std::int64_t each = total / parts;
  const std::int64_t rest = total % parts;
  const std::int64_t begin = part * each + std::min<std::int64_t>(part, rest);
  return {begin, begin + each + (part < rest ? 1 : 0)};
}

HeadPartition::HeadPartition(int n_layers, int n_kv_heads, int n_ranks)
    : m_n_kv_heads(n_kv_heads), m_n_ranks(n_ranks) {
  if (n_layers < 1 || n_kv_heads < 1 || n_ranks < 1) {
    throw Error(
        fmt::format("head partition: {} layers, {} KV heads and {} ranks; expected at least "
                    "one of each",
                    n_layers, n_kv_heads, n_ranks));
  }
  m_heads.assign(n_layers, std::vector<std::vector<int>>(n_ranks));
}

HeadPartition HeadPartition::even(int n_layers, int n_kv_heads, int n_ranks) {
  HeadPartition partition(n_layers, n_kv_heads, n_ranks);
  for (auto& layer : partition.m_heads) {
    if (n_ranks > n_kv_heads) {
      for (int head = 0; head < n_kv_heads; ++head) {
        layer[even_range(n_ranks, n_kv_heads, head).first].push_back(head);
      }
      continue;
    }
    for (int rank = 0; rank < n_ranks; ++rank) {
      const auto [begin, end] = even_range(n_kv_heads, n_ranks, rank);
      layer[rank].resize(end - begin);
      std::iota(layer[rank].begin(), layer[rank].end(), static_cast<int>(begin));
    }
  }
  return partition;
}

HeadPartition HeadPartition::balanced(const std::vector<std::vector<std::int64_t>>& kept,
                                      int n_ranks) {
  const int n_heads = kept.empty() ? 0 : static_cast<int>(kept.front().size());
  HeadPartition partition(static_cast<int>(kept.size()), n_heads, n_ranks);
  for (std::size_t layer = 0; layer < kept.size(); ++layer) {
    if (static_cast<int>(kept[layer].size()) != n_heads) {
      throw Error(fmt::format("kept lengths: layer {} has {} heads, layer 0 has {}", layer,
                              kept[layer].size(), n_heads));
    }
    std::vector<int> order(n_heads);
    std::iota(order.begin(), order.end(), 0);
    for (int head : order) {
      if (kept[layer][head] < 0) {
        throw Error(fmt::format("kept lengths: layer {} head {} is {}; expected 0 or more", layer,
                                head, kept[layer][head]));
      }
    }
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return kept[layer][a] > kept[layer][b]; });
    std::vector<std::int64_t> load(n_ranks, 0);
    for (int head : order) {
      const auto rank = std::min_element(load.begin(), load.end()) - load.begin();
      // An empty head counts as one row, so that every rank gets a head while there are heads.
      load[rank] += kept[layer][head] + 1;
      partition.m_heads[layer][rank].push_back(head);
    }
    for (auto& heads : partition.m_heads[layer]) std::sort(heads.begin(), heads.end());
  }
  return partition;
}

namespace {

/// Returns part `part` of `parts` of `total` indices, cut at multiples of a power of two up to 32,
/// as blocks of quantised weights and vectors of processors lie.
IndexRanges dealt_range(std::int64_t total, int parts, int part) {
  std::int64_t unit = 32;
  while (total % unit != 0) unit /= 2;
  const auto [begin, end] = even_range(total / unit, parts, part);
  return {{begin * unit, end * unit}};
}

}  // namespace

IndexRanges HeadPartition::projected(int layer, int rank, std::int64_t group, std::int64_t head_dim,
                                     std::int64_t kv_dim) const {
  const std::int64_t n = m_n_kv_heads;
  if (deals_projections()) {
    return dealt_range((group * head_dim + 2 * kv_dim) * n, m_n_ranks, rank);
  }
  IndexRanges ranges;
  const auto append = [&](std::int64_t before, std::int64_t size) {
    for (const std::int64_t head : heads(layer, rank)) {
      ranges.emplace_back(before + head * size, before + (head + 1) * size);
    }
  };
  append(0, group * head_dim);
  if (kv_dim == 0) return ranges;
  append(n * group * head_dim, kv_dim);
  append(n * (group * head_dim + kv_dim), kv_dim);
  return ranges;
}

IndexRanges HeadPartition::state_heads(int layer, int rank, std::int64_t state_heads) const {
  if (deals_projections()) return {even_range(state_heads, m_n_ranks, rank)};
  IndexRanges ranges;
  for (const int head : heads(layer, rank)) {
    ranges.push_back(state_heads_of(state_heads, m_n_kv_heads, head));
  }
  return ranges;
}

std::int64_t HeadPartition::count_state_heads(int layer, int rank, std::int64_t of_all) const {
  std::int64_t count = 0;
  for (const auto& [begin, end] : state_heads(layer, rank, of_all)) count += end - begin;
  return count;
}

IndexRanges HeadPartition::attended(int layer, int rank, std::int64_t group,
                                    std::int64_t head_dim) const {
  const std::int64_t size = group * head_dim;
  if (deals_projections()) return dealt_range(m_n_kv_heads * size, m_n_ranks, rank);
  IndexRanges ranges;
  for (const std::int64_t head : heads(layer, rank)) {
    ranges.emplace_back(head * size, (head + 1) * size);
  }
  return ranges;
}

}  // namespace kvzap
