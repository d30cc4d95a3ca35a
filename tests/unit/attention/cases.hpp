// What the tests of attention share: arrays, value types and instruction sets, batches of spans and
// their double-precision reference.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <kvzap/core/attention.hpp>
#include <kvzap/core/cache.hpp>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/kokkos_compat.hpp"
#include "base/machine.hpp"
#include "base/simd.hpp"
#include "base/team.hpp"
#include "unit/attention/reference.hpp"

namespace kvzap::test::attention {

inline float uniform(std::mt19937& random) {
  return static_cast<float>(random() >> 8) * 0x1p-23f - 1.0f;
}

/// A rank-3 array on the device and the host, in one of three layouts.
enum class Arrangement { right, left, strided };

template <class T>
struct Array {
  Kokkos::View<T*, MemorySpace> storage;
  base::HostMirror<Kokkos::View<T*, MemorySpace>> host;
  std::size_t extents[3];
  std::size_t strides[3];
  std::size_t offset = 0;

  Array(std::size_t a, std::size_t b, std::size_t c, Arrangement arrangement)
      : extents{a, b, c}, strides{b * c, c, 1} {
    if (arrangement == Arrangement::left) {
      strides[0] = 1;
      strides[1] = a;
      strides[2] = a * b;
    } else if (arrangement == Arrangement::strided) {
      strides[2] = 2;
      strides[1] = 2 * c + 3;
      strides[0] = strides[1] * b + 1;
      offset = 5;
    }
    std::size_t size = offset + 1;
    for (int i = 0; i < 3; ++i) size += extents[i] * strides[i];
    storage = Kokkos::View<T*, MemorySpace>("array", size);
    host = Kokkos::create_mirror_view(storage);
  }
  T& at(std::size_t i, std::size_t j, std::size_t k) const {
    // Not by host's operator, which costs ten times as much where Kokkos checks bounds: the address
    // sanitizer sees what lies outside.
    return host.data()[offset + i * strides[0] + j * strides[1] + k * strides[2]];
  }
  template <class Element>
  Kokkos::View<Element***, Kokkos::LayoutStride, MemorySpace> view() const {
    return Kokkos::View<Element***, Kokkos::LayoutStride, MemorySpace>(
        storage.data() + offset, Kokkos::LayoutStride(extents[0], strides[0], extents[1],
                                                      strides[1], extents[2], strides[2]));
  }
  void upload() const { Kokkos::deep_copy(storage, host); }
  void download() const { Kokkos::deep_copy(host, storage); }
};

using Values = ::testing::Types<float, half, bfloat16>;

using kvzap::base::SimdLevel;

/// Relative to the largest |value|: a softmax is a mean of values, its weights good to a few units
/// in the last place of scores of order 1.
inline constexpr double tolerance = 1e-5;
/// Where queries and weights are rounded to bfloat16: 2^-8 for the weights, and as much again for
/// scores of order 1, whose terms' errors are independent.
inline constexpr double pair_tolerance = 0x1p-7;

/// Where they are rounded to half, and where they are the sums of two bfloat16.
inline constexpr double half_tolerance = pair_tolerance / 4;
inline constexpr double split_tolerance = 0x1p-15;

/// What a path may differ by from exact arithmetic at the level in use.
template <class Value>
double tolerance_of(AttentionPath path) {
  if (path == AttentionPath::portable || path == AttentionPath::split_kv) return tolerance;
  const bool panels = path == AttentionPath::panels ||
                      (path != AttentionPath::rows && kvzap::base::machine().on_device());
  if (panels && std::is_same_v<Value, half>) return half_tolerance;
  const SimdLevel level = kvzap::base::machine().simd();
  if (std::is_same_v<Value, half> && level >= SimdLevel::amx_bf16_emulated) {
    const bool has_half = level == SimdLevel::amx_emulated || level == SimdLevel::amx_fp16;
    return has_half ? half_tolerance : split_tolerance;
  }
  const bool rounds = panels || level >= SimdLevel::avx512_bf16 || level == SimdLevel::neon_bf16;
  return rounds && std::is_same_v<Value, bfloat16> ? pair_tolerance : tolerance;
}

/// The level, or where the processor lacks it the one that emulates it.
inline SimdLevel or_emulated(SimdLevel level) {
  if (kvzap::base::processor_has(level)) return level;
  return level == SimdLevel::amx_bf16   ? SimdLevel::amx_bf16_emulated
         : level == SimdLevel::amx_fp16 ? SimdLevel::amx_emulated
                                        : level;
}

/// All that the processor has and rows of this type tell apart. AMX is emulated where it has none.
/// Kernels in their form for devices have one level.
template <class Value>
std::vector<SimdLevel> simd_levels() {
  if (kvzap::base::machine().on_device()) return {kvzap::base::machine().simd()};
  std::vector<SimdLevel> levels;
  for (SimdLevel level :
       {or_emulated(SimdLevel::amx_fp16), or_emulated(SimdLevel::amx_bf16), SimdLevel::avx512_bf16,
        SimdLevel::avx512, SimdLevel::avx2, SimdLevel::neon_bf16, SimdLevel::baseline}) {
    const bool differs = std::is_same_v<Value, half> || level != or_emulated(SimdLevel::amx_bf16);
    if (differs && kvzap::base::processor_has(level)) levels.push_back(level);
  }
  return levels;
}

/// Uses a level until the end of the scope.
class LevelInUse {
 public:
  explicit LevelInUse(SimdLevel level) : m_before(kvzap::base::machine().simd()) {
    kvzap::base::machine().set_simd(level);
  }
  ~LevelInUse() { kvzap::base::machine().set_simd(m_before); }
  LevelInUse(const LevelInUse&) = delete;
  LevelInUse& operator=(const LevelInUse&) = delete;

 private:
  SimdLevel m_before;
};

/// Uses teams of a shape until the end of the scope.
class TeamsInUse {
 public:
  explicit TeamsInUse(kvzap::base::TeamShape shape) { kvzap::base::set_team_shape(shape); }
  ~TeamsInUse() { kvzap::base::set_team_shape({0, 0}); }
  TeamsInUse(const TeamsInUse&) = delete;
  TeamsInUse& operator=(const TeamsInUse&) = delete;
};

inline const char* name_of(AttentionPath path) {
  switch (path) {
    case AttentionPath::automatic:
      return "automatic";
    case AttentionPath::rows:
      return "rows";
    case AttentionPath::flash_prefill:
      return "flash_prefill";
    case AttentionPath::split_kv:
      return "split_kv";
    case AttentionPath::panels:
      return "panels";
    case AttentionPath::portable:
      return "portable";
  }
  return "";
}

/// Whether a test of so many queries leaves out a path. The portable one is slow, does the same for
/// each query and knows no tiles: chunks of a few queries show all of its code.
inline bool left_out(AttentionPath path, int queries) {
  return path == AttentionPath::portable && queries > 100;
}

/// Whether a path has a form for each instruction set.
inline bool has_levels(AttentionPath path) {
  return path != AttentionPath::portable && path != AttentionPath::split_kv &&
         path != AttentionPath::panels;
}

template <class T>
void fill_random(const Array<T>& array, int integers, std::mt19937& random) {
  for (std::size_t i = 0; i < array.extents[0]; ++i) {
    for (std::size_t j = 0; j < array.extents[1]; ++j) {
      for (std::size_t k = 0; k < array.extents[2]; ++k) {
        const float x = uniform(random);
        array.at(i, j, k) = T(integers ? std::nearbyint(x * integers) : x);
      }
    }
  }
  array.upload();
}

/// A random sequence with exactly the wanted rows, retained ones per KV head: scores decide which
/// pairs are kept. integers: as in fill_random, for keys.
inline void fill_cache(KVCache& cache, int sequence, int dim, const std::vector<int>& retained,
                       int ring_rows, int integers, std::mt19937& random) {
  const int kv_heads = static_cast<int>(retained.size());
  const int most = *std::max_element(retained.begin(), retained.end());
  // Half as many again, so that retained rows are scattered among evicted ones.
  const int exits = most + most / 2;
  const int tokens = exits + ring_rows;
  if (tokens == 0) return;
  kvzap::with_value_type(cache.dtype(), [&](auto zero) {
    using Value = decltype(zero);
    Array<Value> keys(tokens, kv_heads, dim, Arrangement::right);
    Array<Value> values(tokens, kv_heads, dim, Arrangement::right);
    fill_random(keys, integers, random);
    fill_random(values, 0, random);
    Kokkos::View<float**, MemorySpace> scores("scores", kv_heads, tokens);
    const auto host_scores = Kokkos::create_mirror_view(scores);
    for (int h = 0; h < kv_heads; ++h) {
      int wanted = retained[h];
      for (int t = 0; t < tokens; ++t) {
        const int left = exits - t;
        const bool keep = left > 0 && static_cast<int>(random() % left) < wanted;
        host_scores(h, t) = keep ? 1.0f : -1.0f;
        if (keep) --wanted;
      }
    }
    Kokkos::deep_copy(scores, host_scores);
    const ExecutionSpace exec;
    cache.append(exec, sequence, 0, keys.template view<const Value>(),
                 values.template view<const Value>(), scores, EvictionRule{0.0f, 0, true});
    exec.fence();
  });
}

/// One span of a batch: what its sequence has in the cache, and its tokens.
struct SpanCase {
  /// Rows in pages, per KV head.
  std::vector<int> retained;
  /// Rows in the ring; fewer than the window only if nothing was admitted.
  int ring_rows = 0;
  int queries = 1;
  int new_rows = 1;
  int window = 0;
};

/// A call of attention over several spans, with rows between them that belong to none, and what
/// exact arithmetic makes of it.
template <class Value>
struct Batch {
  int dim, kv_heads, group, heads;
  float soft_cap = 0;
  KVCache cache;
  std::vector<AttentionSpan> spans;
  std::vector<int> sequences;
  Array<float> queries{0, 0, 0, Arrangement::right};
  Array<Value> new_keys{0, 0, 0, Arrangement::right};
  Array<Value> new_values{0, 0, 0, Arrangement::right};
  /// (query row, query head, dim) and (query row, query head); after `solve`.
  std::vector<double> output, lse;
  /// By span and KV head, each (row in order of position): sum and largest of the probabilities.
  std::vector<std::vector<std::vector<double>>> mass_sum, mass_max;
  /// (query row) and (query head, row): what a mass weighs probabilities with; 1 where empty.
  std::vector<double> query_factors;
  std::vector<std::vector<double>> row_factors;

  Batch(int head_dim, int group_size, int window, int page_rows, const std::vector<SpanCase>& cases,
        unsigned seed, Arrangement arrangement = Arrangement::right, const PageFormat& format = {})
      : dim(head_dim),
        kv_heads(static_cast<int>(cases.front().retained.size())),
        group(group_size),
        heads(kv_heads * group),
        cache(kvzap::DTypeOf<Value>::value,
              CacheShape{{kv_heads}, head_dim, window, page_rows, {}, {}, format}) {
    std::mt19937 random(seed);
    std::int64_t n_queries = 1, n_new = 2;
    std::vector<std::pair<std::int64_t, std::int64_t>> places;
    for (const SpanCase& c : cases) {
      sequences.push_back(cache.add_sequence());
      fill_cache(cache, sequences.back(), dim, c.retained, c.ring_rows, 0, random);
      places.emplace_back(n_queries, n_new);
      n_queries += c.queries + 1;
      n_new += c.new_rows + 2;
    }
    for (std::size_t s = 0; s < cases.size(); ++s) {
      spans.push_back({cache.layer(sequences[s], 0), places[s].first, cases[s].queries,
                       places[s].second, cases[s].new_rows, cases[s].window});
    }
    queries = Array<float>(n_queries, heads, dim, arrangement);
    new_keys = Array<Value>(n_new, kv_heads, dim, arrangement);
    new_values = Array<Value>(n_new, kv_heads, dim, arrangement);
    fill_random(queries, 0, random);
    fill_random(new_keys, 0, random);
    fill_random(new_values, 0, random);
  }

  /// Softmax attention in double precision, with the meaning of NaN and infinity that Attention
  /// documents.
  void solve() {
    output.assign(queries.extents[0] * heads * dim, 0);
    lse.assign(queries.extents[0] * heads, 0);
    mass_sum.assign(spans.size(), {});
    for (std::size_t s = 0; s < spans.size(); ++s) {
      for (int h = 0; h < kv_heads; ++h) {
        const auto rows = cache.host_rows(sequences[s], 0, h);
        mass_sum[s].emplace_back(rows.positions.size() + spans[s].new_rows, 0.0);
      }
    }
    mass_max = mass_sum;
    for (std::size_t s = 0; s < spans.size(); ++s) {
      for (int h = 0; h < kv_heads; ++h) solve_head(s, h);
    }
  }

  struct Result {
    Array<float> output;
    Array<float> lse;  // (query row, query head, 1)
  };
  static constexpr float untouched = -777.0f;
  Result attend(Attention& attention, const std::vector<AttentionSpan>& some, AttentionPath path,
                bool wants_lse = true) const {
    Result result{Array<float>(queries.extents[0], heads, dim, Arrangement::right),
                  Array<float>(queries.extents[0], heads, 1, Arrangement::right)};
    Kokkos::deep_copy(result.output.storage, untouched);
    Kokkos::deep_copy(result.lse.storage, untouched);
    const ExecutionSpace exec;
    attention(exec, some, queries.template view<const float>(),
              new_keys.template view<const Value>(), new_values.template view<const Value>(),
              result.output.template view<float>(),
              {path, wants_lse ? lse_view(result.lse) : kvzap::LogSumExpView(), soft_cap});
    exec.fence();
    result.output.download();
    result.lse.download();
    return result;
  }
  static kvzap::LogSumExpView lse_view(const Array<float>& lse) {
    return Kokkos::subview(lse.template view<float>(), Kokkos::ALL, Kokkos::ALL, 0);
  }

 private:
  void solve_head(std::size_t s, int h) {
    const auto& span = spans[s];
    const auto cached = cache.host_rows(sequences[s], 0, h);
    const std::size_t n = cached.positions.size();
    std::vector<double> keys, values;
    for (std::size_t i = 0; i < n * dim; ++i) {
      keys.push_back(cached.keys[i]);
      values.push_back(cached.values[i]);
    }
    for (int r = 0; r < span.new_rows; ++r) {
      for (int d = 0; d < dim; ++d) {
        keys.push_back(new_keys.at(span.first_new + r, h, d));
        values.push_back(new_values.at(span.first_new + r, h, d));
      }
    }
    std::vector<double> query(dim), result, weights;
    for (int t = 0; t < span.queries; ++t) {
      const std::size_t visible = n + span.seen_new_rows(t);
      const std::size_t token = span.first_query + t;
      for (int g = 0; g < group; ++g) {
        const int head = h * group + g;
        for (int d = 0; d < dim; ++d) query[d] = queries.at(token, head, d);
        const std::size_t own = span.window;
        const std::size_t hidden = own > 0 && visible > own ? visible - own : 0;
        lse[token * heads + head] =
            solve_query(query.data(), keys.data() + hidden * dim, values.data() + hidden * dim,
                        visible - hidden, dim, result, weights, soft_cap);
        std::copy(result.begin(), result.end(), &output[(token * heads + head) * dim]);
        if (lse[token * heads + head] == -INFINITY) continue;
        double* const sums = mass_sum[s][h].data();
        double* const most = mass_max[s][h].data();
        for (std::size_t r = 0; r < weights.size(); ++r) {
          const double p = weights[r] * (query_factors.empty() ? 1 : query_factors[token]) *
                           (row_factors.empty() ? 1 : row_factors[head][r]);
          sums[r] += p;
          if (p > most[r] || std::isnan(p)) most[r] = p;
        }
      }
    }
  }
};

}  // namespace kvzap::test::attention
