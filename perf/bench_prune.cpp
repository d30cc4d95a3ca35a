// Speed of eviction: admission or drop of rows that leave the window, a decode step's single row,
// and compaction of retained rows. The limits are a plain copy, and a bare gather of the same
// random rows.
//
// Bytes are those of rows that move, read and written. Each rank has one layer of 8 KV heads,
// head_dim 128, bfloat16.
#include <algorithm>
#include <cstring>
#include <functional>
#include <kvzap/core/cache.hpp>
#include <kvzap/core/communicator.hpp>
#include <kvzap/core/selection.hpp>
#include <kvzap/engine/synthetic.hpp>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/huge_pages.hpp"
#include "base/kokkos_compat.hpp"
#include "base/simd.hpp"
#include "common.hpp"
#if KVZAP_X86
#include <immintrin.h>
#endif

namespace kvzap::perf {
namespace {

using Cache = KVCache;

constexpr int heads = 8;
constexpr int dim = 128;
constexpr int window = 128;
constexpr std::size_t row_bytes = dim * sizeof(bfloat16);
constexpr EvictionRule judging{0.0f, 0, true};

using Bytes = Kokkos::View<char*, MemorySpace>;
using Scores = Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>;

/// Times `work`. `bytes`: bytes that each rank reads and writes.
void time_moves(benchmark::State& state, std::size_t bytes, const std::function<void()>& work,
                const std::function<void()>& before = {}) {
  const Yardstick limit(Limit::copy);
  const double seconds = time_iterations(state, work, before);
  report_bytes(state, seconds, static_cast<double>(bytes) * world().size(), limit);
}

#if KVZAP_X86
KVZAP_TARGET_AVX512 void stream_lines(char* target, const char* source, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + i), _mm512_loadu_si512(source + i));
  }
}
void stream_pieces(char* target, const char* source, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(target + i),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i)));
  }
}
#endif

/// Copies whole cache lines past the caches, the fastest way for copies of this size. Both
/// addresses begin on a line.
void stream(char* target, const char* source, std::size_t bytes) {
#if KVZAP_X86
  if (base::machine().has(base::SimdLevel::avx512)) {
    stream_lines(target, source, bytes);
  } else {
    stream_pieces(target, source, bytes);
  }
#else
  std::memcpy(target, source, bytes);
#endif
}

/// Allocates on huge pages, as the library does for memory of this size.
template <class Value>
Kokkos::View<Value*, MemorySpace> array(const std::string& label, std::size_t count) {
  const Kokkos::View<Value*, MemorySpace> view(
      Kokkos::view_alloc(Kokkos::WithoutInitializing, label), count);
  if constexpr (base::runs_on_host) base::advise_huge_pages(view.data(), count * sizeof(Value));
  Kokkos::deep_copy(view, Value(0.0f));
  return view;
}

/// Aligns to a cache line, as the pages of a cache are.
char* aligned(const Bytes& bytes) {
  return reinterpret_cast<char*>((reinterpret_cast<std::uintptr_t>(bytes.data()) + 63) / 64 * 64);
}

/// Returns scores (head, token), of which a fraction `keep` is not negative.
Scores random_scores(std::int64_t tokens, double keep) {
  RandomScorer scorer(HeadPartition::even(1, heads, 1), 0, 1 - keep, 1, 7);
  const Scores scores("scores", heads, tokens);
  const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> hidden("hidden", tokens, 0);
  const Kokkos::View<std::int64_t*, MemorySpace> positions("positions", tokens);
  const auto host = Kokkos::create_mirror_view(positions);
  std::iota(host.data(), host.data() + tokens, 0);
  Kokkos::deep_copy(positions, host);
  scorer.score(ExecutionSpace{}, 0, positions, hidden, scores);
  return scores;
}

/// The limit of admission: gathers the rows that an append of this many tokens keeps into two
/// arrays per head, with their numbers known in advance. Its order of tokens and the distance of
/// its prefetches are the best of those tried.
void bare_gather(benchmark::State& state, std::int64_t tokens, double keep) {
  constexpr std::int64_t token_block = 256;
  constexpr std::int64_t ahead = 12;
  const auto scores = random_scores(tokens, keep);
  std::vector<std::vector<std::int32_t>> kept(heads);
  std::size_t total = 0;
  for (int h = 0; h < heads; ++h) {
    for (std::int64_t t = 0; t < tokens - window; ++t) {
      if (scores(h, t) >= 0) kept[h].push_back(static_cast<std::int32_t>(t));
    }
    total += kept[h].size();
    // After the end, the last row is prefetched again.
    kept[h].resize(kept[h].size() + ahead, kept[h].empty() ? 0 : kept[h].back());
  }
  const std::size_t token_bytes = heads * row_bytes;
  const Bytes keys = array<char>("keys", tokens * token_bytes + 64);
  const Bytes values = array<char>("values", tokens * token_bytes + 64);
  const Bytes target = array<char>("target", 2 * total * row_bytes + 64);
  const auto work = [&] {
    std::vector<std::size_t> done(heads, 0);
    std::vector<char*> ends(heads);
    char* end = aligned(target);
    for (int h = 0; h < heads; ++h) {
      ends[h] = end;
      end += 2 * (kept[h].size() - ahead) * row_bytes;
    }
    for (std::int64_t block = 0; block < tokens; block += token_block) {
      for (int h = 0; h < heads; ++h) {
        const std::int32_t* rows = kept[h].data();
        const std::size_t n = kept[h].size() - ahead;
        std::size_t next = done[h];
        while (next < n && rows[next] < block + token_block) ++next;
        char* out = ends[h];
        for (const char* source : {aligned(keys), aligned(values)}) {
          const char* head = source + h * row_bytes;
          for (std::size_t i = done[h]; i < next; ++i) {
            const char* far = head + rows[i + ahead] * token_bytes;
            for (std::size_t b = 0; b < row_bytes; b += 64) __builtin_prefetch(far + b, 0, 2);
            stream(out, head + rows[i] * token_bytes, row_bytes);
            out += row_bytes;
          }
        }
        ends[h] = out;
        done[h] = next;
      }
    }
#if KVZAP_X86
    _mm_sfence();
#endif
    benchmark::ClobberMemory();
  };
  work();
  time_moves(state, 4 * total * row_bytes, work);
}

using RowsView = Kokkos::View<const bfloat16***, Kokkos::LayoutStride, MemorySpace>;

struct Prefill {
  explicit Prefill(std::int64_t n, double keep)
      : tokens(n),
        rows(array<bfloat16>("rows", 2 * n * heads * dim)),
        scores(random_scores(n, keep)) {
    const Kokkos::LayoutStride layout(n, heads * dim, heads, dim, dim, 1);
    keys = RowsView(rows.data(), layout);
    values = RowsView(rows.data() + n * heads * dim, layout);
  }
  std::int64_t tokens;
  Kokkos::View<bfloat16*, MemorySpace> rows;
  Scores scores;
  RowsView keys;
  RowsView values;
};

std::int64_t retained(const Cache& cache, SequenceId id) {
  std::int64_t n = 0;
  for (int h = 0; h < heads; ++h) {
    n += cache.rows(id, 0, h) - std::min<std::int64_t>(cache.tokens(id, 0), window);
  }
  return n;
}

/// A prefill's rows leave the window. `fresh`: into memory that the pool must still get from the
/// system. Otherwise into pages of an earlier sequence.
void admission(benchmark::State& state, std::int64_t tokens, double keep, bool fresh) {
  const Prefill prefill(tokens, keep);
  const ExecutionSpace exec;
  Cache cache(DType::bf16, CacheShape{{heads}, dim, window, 64});
  const SequenceId id = cache.add_sequence();
  const auto empty = cache.checkpoint(id);
  const auto admit = [&] {
    cache.append(exec, id, 0, prefill.keys, prefill.values, prefill.scores, judging);
  };
  admit();
  const std::size_t bytes = 4 * row_bytes * retained(cache, id);
  time_moves(state, bytes, admit, [&] {
    cache.restore(id, empty);
    if (fresh) cache.trim();
  });
}

/// Appends one token to one layer with a full window. One in four of the rows that leave it stays.
void decode_append(benchmark::State& state) {
  constexpr int appends = 1000;
  const ExecutionSpace exec;
  Cache cache(DType::bf16, CacheShape{{heads}, dim, window, 64});
  const SequenceId id = cache.add_sequence();
  constexpr std::int64_t n = 1024;
  const Prefill prefill(n, 0.25);
  cache.append(exec, id, 0, prefill.keys, prefill.values, prefill.scores, judging);
  std::int64_t token = 0;
  const double seconds = time_iterations(state, [&] {
    for (int i = 0; i < appends; ++i) {
      // By addresses: the host must not index a device's views.
      const Kokkos::LayoutStride row(1, heads * dim, heads, dim, dim, 1);
      const RowsView keys(prefill.keys.data() + token * heads * dim, row);
      const RowsView values(prefill.values.data() + token * heads * dim, row);
      const Cache::ScoresView scores(prefill.scores.data() + token,
                                     Kokkos::LayoutStride(heads, n, 1, 1));
      cache.append(exec, id, 0, keys, values, scores, judging);
      token = (token + 1) % n;
    }
  });
  state.counters["append_ns"] = 1e9 * seconds / appends;
}

/// Evicts random retained rows from a layer that keeps all its tokens.
void compaction(benchmark::State& state, std::int64_t tokens, double keep_ratio) {
  const Prefill prefill(tokens, 1);
  const auto scores = random_scores(tokens, keep_ratio);
  const Kokkos::View<std::uint8_t**, Kokkos::LayoutRight, MemorySpace> keep("keep", heads, tokens);
  Kokkos::parallel_for(
      "keep", Kokkos::MDRangePolicy<ExecutionSpace, Kokkos::Rank<2>>({0, 0}, {heads, tokens}),
      KOKKOS_LAMBDA(int h, int t) { keep(h, t) = scores(h, t) >= 0 ? 1 : 0; });
  const ExecutionSpace exec;
  Cache cache(DType::bf16, CacheShape{{heads}, dim, window, 64});
  SequenceId id = cache.add_sequence();
  const auto refill = [&] {
    cache.free_sequence(id);
    id = cache.add_sequence();
    cache.append(exec, id, 0, prefill.keys, prefill.values, {}, EvictionRule::keep_all());
    exec.fence();
  };
  refill();
  const std::size_t bytes = 4 * row_bytes * cache.compact(exec, id, 0, keep).moved;
  time_moves(
      state, bytes, [&] { cache.compact(exec, id, 0, keep); }, refill);
}

/// Finds cutoffs that keep a quarter of 36 layers' 8 heads of `tokens` tokens, over all heads or
/// for each head alone. Compares with std::nth_element over the same number of scores.
void selection(benchmark::State& state, std::int64_t tokens, bool of_heads) {
  constexpr std::int64_t n_heads = 36 * 8;
  const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> all("scores", n_heads, tokens);
  const auto host = Kokkos::create_mirror_view(all);
  std::mt19937 random(1);
  std::normal_distribution<float> normal(-6, 2);
  std::generate_n(host.data(), n_heads * tokens, [&] { return normal(random); });
  Kokkos::deep_copy(all, host);
  std::vector<ScoreSegment> segments;
  for (int head = 0; head < n_heads; ++head) {
    segments.push_back({Kokkos::subview(all, head, Kokkos::ALL), of_heads ? head : 0, head});
  }
  const std::vector<std::int64_t> keep(of_heads ? n_heads : 1,
                                       tokens * (of_heads ? 1 : n_heads) / 4);
  const double begin = now();
  std::vector<float> copy(host.data(), host.data() + n_heads * tokens);
  std::nth_element(copy.begin(), copy.begin() + n_heads * tokens / 4, copy.end(), std::greater<>());
  const double yardstick = now() - begin;
  const double seconds = time_iterations(
      state, [&] { select_top(ExecutionSpace(), Communicator::self(), segments, keep); });
  state.counters["over_nth_element"] = seconds / max_over_ranks(yardstick);
}

}  // namespace

void register_benchmarks(const Options& options) {
  const int repetitions = options.quick ? 1 : 5;
  constexpr double keep = 1.0 / 3;
  for (const std::int64_t tokens : {4096, 8192, 32768}) {
    const std::int64_t iterations = 400 * 1024 / tokens;
    const std::string size = "/" + std::to_string(tokens) + "/3";
    if constexpr (base::runs_on_host) {
      add("bare_gather" + size, iterations, repetitions,
          [=](benchmark::State& state) { bare_gather(state, tokens, keep); });
    }
    for (const bool fresh : {false, true}) {
      add((fresh ? "admission/fresh_memory" : "admission/reused_pages") + size, iterations,
          repetitions, [=](benchmark::State& state) { admission(state, tokens, keep, fresh); });
    }
  }
  add("decode_append", 20, repetitions, decode_append);
  for (const bool of_heads : {false, true}) {
    add(std::string("select/36x8x16384/") + (of_heads ? "each_head" : "all_together"), 3,
        repetitions, [=](benchmark::State& state) { selection(state, 16384, of_heads); });
  }
  for (const int one_in : {2, 3}) {
    add("compaction/32768/" + std::to_string(one_in), 8, repetitions,
        [=](benchmark::State& state) { compaction(state, 32768, 1.0 / one_in); });
  }
}

}  // namespace kvzap::perf
