#include <fmt/format.h>

#include <algorithm>

#include "engine/policy_step.hpp"

namespace kvzap::engine {
namespace {

using Queries = Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace>;

// to(slot of the block's token i, head, dim) = the token's query, from token `begin` on.
void store(const ExecutionSpace& exec, const TokenBlock& block, std::int64_t begin,
           std::int64_t capacity, int head_dim, const Queries& to) {
  const auto queries = block.queries;
  const std::int64_t first = block.first;
  const int heads = static_cast<int>(queries.extent(1));
  Kokkos::parallel_for(
      "kvzap::policy::keep_queries", Kokkos::RangePolicy<ExecutionSpace>(exec, begin, block.count),
      KOKKOS_LAMBDA(const std::int64_t i) {
        for (int h = 0; h < heads; ++h) {
          for (int d = 0; d < head_dim; ++d) to((first + i) % capacity, h, d) = queries(i, h, d);
        }
      });
}

void put_in_order(const ExecutionSpace& exec, const Queries& from, std::int64_t first,
                  std::int64_t count, int heads, int head_dim, const Queries& to) {
  const std::int64_t capacity = from.extent(0);
  Kokkos::parallel_for(
      "kvzap::policy::order_queries", Kokkos::RangePolicy<ExecutionSpace>(exec, 0, count),
      KOKKOS_LAMBDA(const std::int64_t i) {
        for (int h = 0; h < heads; ++h) {
          for (int d = 0; d < head_dim; ++d) to(i, h, d) = from((first + i) % capacity, h, d);
        }
      });
}

Queries make(const char* label, std::int64_t tokens, int heads, int head_dim) {
  return Queries(Kokkos::view_alloc(Kokkos::WithoutInitializing, std::string(label)), tokens, heads,
                 head_dim);
}

}  // namespace

RecentQueries::RecentQueries(std::int64_t tokens, const std::vector<int>& query_heads, int head_dim,
                             bool every_layer)
    : m_capacity(tokens),
      m_query_heads(query_heads),
      m_head_dim(head_dim),
      m_every_layer(every_layer) {
  const int most = *std::max_element(query_heads.begin(), query_heads.end());
  if (every_layer) {
    for (const int heads : query_heads) {
      m_taken.push_back({make("kvzap::policy::recent", tokens, heads, head_dim)});
    }
  } else {
    m_taken.push_back({make("kvzap::policy::recent", tokens, most, head_dim)});
  }
  m_ordered = make("kvzap::policy::recent_in_order", tokens, most, head_dim);
}

RecentQueries RecentQueries::clone() const {
  RecentQueries copy(m_capacity, m_query_heads, m_head_dim, m_every_layer);
  for (std::size_t l = 0; l < m_taken.size(); ++l) {
    const Queries queries = copy.m_taken[l].queries;
    Kokkos::deep_copy(queries, m_taken[l].queries);
    copy.m_taken[l] = m_taken[l];
    copy.m_taken[l].queries = queries;
  }
  return copy;
}

void RecentQueries::take(const ExecutionSpace& exec, int layer, const TokenBlock& block) {
  Taken& taken = of(layer);
  if (taken.layer != layer || block.first > taken.end) {
    taken.begin = block.first;
  } else if (block.first < taken.end) {
    // A failed step has overwritten the slots of the oldest tokens.
    taken.begin = std::min(block.first, std::max(taken.begin, taken.end - m_capacity));
  }
  taken.layer = layer;
  taken.end = block.first + block.count;
  store(exec, block, std::max<std::int64_t>(0, block.count - m_capacity), m_capacity, m_head_dim,
        taken.queries);
}

void RecentQueries::restart(std::int64_t position) {
  for (Taken& taken : m_taken) taken.begin = taken.end = position;
}

TokenBlock RecentQueries::newest(const ExecutionSpace& exec, int layer, std::int64_t tokens) {
  const Taken& taken = of(layer);
  TokenBlock block;
  // Returns at least the last token, because policies continue on other ranks if one rank failed to
  // store it.
  block.count = std::max<std::int64_t>(1, std::min(m_capacity, tokens - taken.begin));
  block.first = tokens - block.count;
  const int heads = m_query_heads[layer];
  // Uses only the layer's heads: a rank may own more heads in one layer than in another.
  const Queries ordered(m_ordered.data(), m_capacity, heads, m_head_dim);
  put_in_order(exec, taken.queries, block.first, block.count, heads, m_head_dim, ordered);
  block.queries = Kokkos::subview(ordered, std::pair<std::int64_t, std::int64_t>(0, block.count),
                                  Kokkos::ALL, Kokkos::ALL);
  return block;
}

std::vector<SnapshotQueries> RecentQueries::to_host() const {
  std::vector<SnapshotQueries> layers;
  if (!m_every_layer) return layers;
  for (std::size_t l = 0; l < m_taken.size(); ++l) {
    const Taken& taken = m_taken[l];
    const std::int64_t heads = m_query_heads[l];
    SnapshotQueries& layer = layers.emplace_back();
    layer.first = std::max(taken.begin, taken.end - m_capacity);
    layer.tokens = taken.end - layer.first;
    layer.values.resize(static_cast<std::size_t>(heads * layer.tokens * m_head_dim));
    const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), taken.queries);
    float* to = layer.values.data();
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t p = layer.first; p < taken.end; ++p) {
        for (int d = 0; d < m_head_dim; ++d) *to++ = host(p % m_capacity, h, d);
      }
    }
  }
  return layers;
}

void RecentQueries::from_host(const std::vector<SnapshotQueries>& layers) {
  if (!m_every_layer || layers.size() != m_taken.size()) {
    throw Error(fmt::format("there are newest queries of {} layers; expected {}", layers.size(),
                            m_every_layer ? m_taken.size() : 0));
  }
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const SnapshotQueries& layer = layers[l];
    const std::int64_t heads = m_query_heads[l];
    const std::int64_t values = heads * layer.tokens * m_head_dim;
    if (layer.first < 0 || layer.tokens < 0 ||
        static_cast<std::int64_t>(layer.values.size()) != values) {
      throw Error(fmt::format(
          "layer {} has {} numbers of newest queries; expected {} ({} heads, {} tokens, {} each)",
          l, layer.values.size(), values, heads, layer.tokens, m_head_dim));
    }
  }
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const SnapshotQueries& layer = layers[l];
    Taken& taken = m_taken[l];
    const std::int64_t heads = m_query_heads[l];
    taken.layer = static_cast<int>(l);
    taken.end = layer.first + layer.tokens;
    taken.begin = std::max(layer.first, taken.end - m_capacity);
    const auto host = Kokkos::create_mirror_view(Kokkos::HostSpace(), taken.queries);
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t p = taken.begin; p < taken.end; ++p) {
        const float* const from =
            layer.values.data() + (h * layer.tokens + p - layer.first) * m_head_dim;
        for (int d = 0; d < m_head_dim; ++d) host(p % m_capacity, h, d) = from[d];
      }
    }
    Kokkos::deep_copy(taken.queries, host);
  }
}

}  // namespace kvzap::engine
