#include <fmt/format.h>

#include "base/kokkos_compat.hpp"

#include <algorithm>
#include <cmath>
#include <kvzap/engine/synthetic.hpp>
#include <numeric>

namespace kvzap {
namespace {

constexpr std::int64_t chunk_tokens = 1024;
// Chunks start at multiples of this number of values, so that rows stay aligned for vector loads.
constexpr std::int64_t place_values = 16;
constexpr std::int64_t places = 4096;

/// Finalizer of splitmix64 (Steele, Lea, Flood 2014): neighbouring inputs give unrelated outputs.
KOKKOS_INLINE_FUNCTION std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

/// Maps bits to (0, 1], exactly in float.
KOKKOS_INLINE_FUNCTION float uniform(std::uint64_t bits) {
  return static_cast<float>((bits >> 40) + 1) * 0x1p-24f;
}

std::uint64_t head_key(std::uint64_t seed, int layer, int kv_head) {
  return mix(mix(mix(seed) + static_cast<std::uint64_t>(layer)) +
             static_cast<std::uint64_t>(kv_head));
}

/// Returns `count` values of a type, in bytes.
Kokkos::View<char*, MemorySpace> normal_values(DType dtype, std::int64_t count,
                                               std::uint64_t seed) {
  Kokkos::View<char*, MemorySpace> values(
      Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::fill_random::values"),
      count * size_of(dtype));
  const auto host = Kokkos::create_mirror_view(values);
  with_value_type(dtype, [&](auto zero) {
    using Value = decltype(zero);
    auto* const target = reinterpret_cast<Value*>(host.data());
    // Box and Muller's method gives two numbers at a time
    for (std::int64_t i = 0; i < count; i += 2) {
      const float radius = std::sqrt(-2.0f * std::log(uniform(mix(seed + i))));
      const float angle = 6.2831853f * uniform(mix(seed + i + 1));
      target[i] = Value(radius * std::cos(angle));
      if (i + 1 < count) target[i + 1] = Value(radius * std::sin(angle));
    }
  });
  Kokkos::deep_copy(values, host);
  return values;
}

void fill_positions(const ExecutionSpace& exec, std::int64_t first, std::int64_t count,
                    const Kokkos::View<std::int64_t*, MemorySpace>& positions) {
  Kokkos::parallel_for(
      "kvzap::fill_random::positions",
      Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>(exec, 0, count),
      KOKKOS_LAMBDA(std::int64_t i) { positions(i) = first + i; });
}

}  // namespace

std::vector<double> head_keep_ratios(int n_heads, double evict_ratio, double skew) {
  if (n_heads < 1 || !(evict_ratio >= 0 && evict_ratio <= 1) ||
      !(skew >= 1 && std::isfinite(skew))) {
    throw Error(
        fmt::format("head keep ratios: {} heads, evict ratio {}, skew {}; expected at least 1 "
                    "head, an evict ratio from 0 to 1 and a finite skew of at least 1",
                    n_heads, evict_ratio, skew));
  }
  std::vector<double> ratios(n_heads, 1.0);
  for (int h = 0; h < n_heads; ++h) {
    ratios[h] = n_heads == 1 ? 1.0 : std::pow(skew, static_cast<double>(h) / (n_heads - 1));
  }
  // Heads whose ratio would exceed 1 keep everything, beginning with the longest. The remaining
  // rows are distributed over the other heads.
  double left = n_heads * (1 - evict_ratio);
  for (int below = n_heads; below > 0; --below) {
    const double sum = std::accumulate(ratios.begin(), ratios.begin() + below, 0.0);
    const double scale = left / sum;
    if (ratios[below - 1] * scale <= 1) {
      for (int h = 0; h < below; ++h) ratios[h] *= scale;
      break;
    }
    ratios[below - 1] = 1;
    left -= 1;
  }
  return ratios;
}

RandomScorer::RandomScorer(const HeadPartition& partition, int rank, double evict_ratio,
                           double skew, std::uint64_t seed)
    : m_partition(partition), m_rank(rank) {
  if (rank < 0 || rank >= partition.n_ranks()) {
    throw Error(
        fmt::format("random scorer: rank {} of a partition of {}", rank, partition.n_ranks()));
  }
  const int n_layers = partition.n_layers();
  const int n_heads = partition.n_kv_heads();
  std::size_t most_local = 0;
  for (int l = 0; l < n_layers; ++l) {
    std::vector<double> ratios = head_keep_ratios(n_heads, evict_ratio, skew);
    // Fisher and Yates' shuffle, written out because std::shuffle differs between libraries.
    for (int h = n_heads - 1; h > 0; --h) {
      const std::uint64_t pick = head_key(~seed, l, h) % static_cast<std::uint64_t>(h + 1);
      std::swap(ratios[h], ratios[pick]);
    }
    m_keep.push_back(std::move(ratios));
    most_local = std::max(most_local, partition.heads(l, rank).size());
  }
  m_local_keep =
      decltype(m_local_keep)("kvzap::random_scorer::keep", std::size_t(n_layers), most_local);
  m_local_keys =
      decltype(m_local_keys)("kvzap::random_scorer::keys", std::size_t(n_layers), most_local);
  const auto keep = Kokkos::create_mirror_view(m_local_keep);
  const auto keys = Kokkos::create_mirror_view(m_local_keys);
  for (int l = 0; l < n_layers; ++l) {
    const std::vector<int>& heads = partition.heads(l, rank);
    for (std::size_t h = 0; h < heads.size(); ++h) {
      keep(l, h) = static_cast<float>(m_keep[l][heads[h]]);
      keys(l, h) = head_key(seed, l, heads[h]);
    }
  }
  Kokkos::deep_copy(m_local_keep, keep);
  Kokkos::deep_copy(m_local_keys, keys);
}

void RandomScorer::score(const ExecutionSpace& exec, int layer, const PositionView& positions,
                         const InputView& hidden, const ScoreView& scores) {
  if (layer < 0 || layer >= m_partition.n_layers()) {
    throw Error(
        fmt::format("random scorer: no layer {}; it has {}", layer, m_partition.n_layers()));
  }
  const std::size_t heads = m_partition.heads(layer, m_rank).size();
  const std::size_t tokens = hidden.extent(0);
  if (positions.extent(0) != tokens) {
    throw Error(fmt::format("random scorer: {} positions for {} tokens; expected one for each",
                            positions.extent(0), tokens));
  }
  if (scores.extent(0) != heads || scores.extent(1) != tokens) {
    throw Error(
        fmt::format("random scorer: scores are ({}, {}); expected ({}, {}) = (KV head on "
                    "this rank, token)",
                    scores.extent(0), scores.extent(1), heads, tokens));
  }
  const auto keep = m_local_keep;
  const auto keys = m_local_keys;
  const std::int64_t count = tokens;
  Kokkos::parallel_for(
      "kvzap::random_scorer::score",
      Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>(
          exec, 0, static_cast<std::int64_t>(heads) * count),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t head = i / count;
        const std::int64_t token = i % count;
        const std::uint64_t position = static_cast<std::uint64_t>(positions(token));
        // Negative, hence evicted at threshold 0, with probability 1 - keep.
        scores(head, token) = keep(layer, head) - uniform(mix(keys(layer, head) + position));
      });
}

double RandomScorer::keep_ratio(int layer, int kv_head) const {
  if (layer < 0 || layer >= m_partition.n_layers() || kv_head < 0 ||
      kv_head >= m_partition.n_kv_heads()) {
    throw Error(
        fmt::format("random scorer: no KV head {} in layer {}; there are {} layers of {} heads",
                    kv_head, layer, m_partition.n_layers(), m_partition.n_kv_heads()));
  }
  return m_keep[layer][kv_head];
}

void fill_random(KVCache& cache, SequenceId sequence, std::int64_t tokens, Scorer* scorer,
                 std::int64_t hidden_size, const EvictionRule& rule, std::uint64_t seed) {
  if (tokens < 0 || hidden_size < 0) {
    throw Error(fmt::format("fill_random: {} tokens, hidden size {}; expected 0 or more", tokens,
                            hidden_size));
  }
  const CacheShape& shape = cache.shape();
  const std::int64_t chunk = std::min(tokens, chunk_tokens);
  const std::int64_t most_heads = *std::max_element(shape.heads.begin(), shape.heads.end());
  std::int64_t most_values = 0;  // of a token
  for (int l = 0; l < static_cast<int>(shape.heads.size()); ++l) {
    most_values = std::max(most_values, std::int64_t{shape.heads[l]} * shape.dim(l));
  }
  // One half holds keys and one holds values.
  const std::int64_t half_pool = chunk * most_values + places * place_values;
  const auto pool = normal_values(cache.dtype(), 2 * half_pool, mix(seed));

  Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> hidden;
  if (scorer) hidden = decltype(hidden)("kvzap::fill_random::hidden", chunk, hidden_size);
  Kokkos::View<float*, MemorySpace> scores("kvzap::fill_random::scores",
                                           scorer ? most_heads * chunk : 0);
  Kokkos::View<std::int64_t*, MemorySpace> positions("kvzap::fill_random::positions",
                                                     scorer ? chunk : 0);
  const ExecutionSpace exec;
  using Range = std::pair<std::int64_t, std::int64_t>;
  // Proceeds chunk by chunk, not layer by layer, because a scorer may expect tokens in order.
  for (std::int64_t done = 0; done < tokens; done += chunk) {
    const std::int64_t count = std::min(chunk, tokens - done);
    for (std::size_t l = 0; l < shape.heads.size(); ++l) {
      const int layer = static_cast<int>(l);
      // Its state stays as it is.
      if (shape.has_state(layer) || !shape.keeps_rows(layer)) {
        cache.count_tokens(sequence, layer, count);
      }
      if (!shape.keeps_rows(layer)) continue;
      const std::int64_t heads = shape.heads[l], dim = shape.dim(layer);
      const std::int64_t first = cache.tokens(sequence, layer);
      const std::uint64_t place = head_key(seed, layer, -1) + static_cast<std::uint64_t>(first);
      const auto rows_at = [&](std::uint64_t value) {
        return ConstArrayView(pool.data() + value * size_of(cache.dtype()), cache.dtype(),
                              {count, heads, dim}, {heads * dim, dim, 1});
      };
      const ConstArrayView keys = rows_at(mix(place) % places * place_values);
      const ConstArrayView values = rows_at(half_pool + mix(~place) % places * place_values);
      Scorer::ScoreView judged;
      if (scorer && shape.has_pages(layer)) {  // as the decoder does
        judged = Scorer::ScoreView(scores.data(), Kokkos::LayoutStride(heads, count, count, 1));
        fill_positions(exec, first, count, positions);
        scorer->score(exec, layer, Kokkos::subview(positions, Range(0, count)),
                      Kokkos::subview(hidden, Range(0, count), Kokkos::ALL), judged);
      }
      cache.append(exec, sequence, layer, keys, values, judged, rule);
    }
  }
  base::fence(exec, "kvzap::fill_random: the rows it appended from go");
}

}  // namespace kvzap
