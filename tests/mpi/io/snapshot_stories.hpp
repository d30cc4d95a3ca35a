// Caches to be kept and brought back, at any number of ranks.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <kvzap/engine/snapshot.hpp>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvzap::test {

inline constexpr int story_layers = 2;
inline constexpr int story_heads = 5;
inline constexpr int story_dim = 6;
inline constexpr int story_window = 8;
inline constexpr int story_query_group = 2;

inline std::uint64_t story_bits(std::initializer_list<std::int64_t> parts) {
  std::uint64_t state = 0x9e3779b97f4a7c15u;
  for (std::int64_t part : parts) {
    state = (state ^ static_cast<std::uint64_t>(part)) * 0xbf58476d1ce4e5b9u;
    state ^= state >> 29;
  }
  return state;
}

inline float story_number(std::uint64_t bits) {
  if (bits % 97 == 0) return std::numeric_limits<float>::infinity();
  if (bits % 89 == 0) return std::numeric_limits<float>::quiet_NaN();
  return static_cast<float>(bits >> 40) / 8388608.0f - 1.0f;
}

/// Heads of different costs, so that ranks get different numbers of them.
inline HeadPartition story_partition(int ranks) {
  return HeadPartition::balanced({{9, 50, 3, 40, 8}, {1, 2, 30, 4, 100}}, ranks);
}

template <class Value>
std::unique_ptr<KVCache> story_cache(const HeadPartition& partition, int rank, int page_rows = 4,
                                     const PageFormat& format = {}) {
  CacheShape shape;
  for (int layer = 0; layer < story_layers; ++layer) {
    shape.heads.push_back(static_cast<int>(partition.heads(layer, rank).size()));
  }
  shape.head_dim = story_dim;
  shape.window = story_window;
  shape.page_rows = page_rows;
  shape.format = format;
  return std::make_unique<KVCache>(DTypeOf<Value>::value, shape);
}

/// Tokens from … to - 1, judged as they leave the ring.
inline void story_append(KVCache& cache, SequenceId sequence, const HeadPartition& partition,
                         int rank, std::int64_t from, std::int64_t to) {
  with_value_type(cache.dtype(), [&](auto zero) {
    using Value = decltype(zero);
    for (int layer = 0; layer < story_layers; ++layer) {
      const auto& heads = partition.heads(layer, rank);
      using Rows = Kokkos::View<Value***, Kokkos::LayoutRight, Kokkos::HostSpace>;
      const Rows keys("keys", to - from, heads.size(), story_dim);
      const Rows values("values", to - from, heads.size(), story_dim);
      const Kokkos::View<float**, Kokkos::LayoutRight, Kokkos::HostSpace> scores(
          "scores", heads.size(), to - from);
      for (std::size_t h = 0; h < heads.size(); ++h) {
        for (std::int64_t p = from; p < to; ++p) {
          // Heads keep different shares; nothing of one survives the ring.
          const bool silent = layer == 1 && heads[h] == 3;
          scores(h, p - from) = silent ? -100.0f
                                       : story_number(story_bits({1, layer, heads[h], p})) +
                                             0.3f * static_cast<float>(heads[h] - 2);
          for (int d = 0; d < story_dim; ++d) {
            keys(p - from, h, d) = Value(story_number(story_bits({2, layer, heads[h], p, d})));
            values(p - from, h, d) = Value(story_number(story_bits({3, layer, heads[h], p, d})));
          }
        }
      }
      const auto for_kernels = [](const auto& view) {
        return Kokkos::create_mirror_view_and_copy(MemorySpace{}, view);
      };
      cache.append(ExecutionSpace{}, sequence, layer, for_kernels(keys), for_kernels(values),
                   for_kernels(scores), EvictionRule{0.1f, 0, true});
    }
  });
}

/// Evicts every third row, and has what stays of the ring move into pages.
inline void story_evict(KVCache& cache, SequenceId sequence, const HeadPartition& partition,
                        int rank) {
  for (int layer = 0; layer < story_layers; ++layer) {
    const auto& heads = partition.heads(layer, rank);
    std::int64_t longest = 0;
    for (std::size_t h = 0; h < heads.size(); ++h) {
      longest = std::max(longest, cache.rows(sequence, layer, static_cast<int>(h)));
    }
    const Kokkos::View<std::uint8_t**, Kokkos::LayoutRight, Kokkos::HostSpace> keep(
        "keep", heads.size(), longest);
    for (std::size_t h = 0; h < heads.size(); ++h) {
      for (std::int64_t r = 0; r < longest; ++r) keep(h, r) = (r + heads[h]) % 3 != 0;
    }
    cache.evict(ExecutionSpace{}, sequence, layer,
                Kokkos::create_mirror_view_and_copy(MemorySpace{}, keep), true);
  }
}

/// What happened to a sequence before it is kept.
struct Story {
  const char* name;
  /// Tokens of the context; an eviction that empties the ring after them; tokens after that. A
  /// checkpoint is taken between the last two.
  std::int64_t context;
  bool evicts;
  std::int64_t tokens;
  bool with_context;
  bool with_queries;
};

inline const std::vector<Story>& stories() {
  static const std::vector<Story> all{
      {"no tokens", 0, false, 0, false, false},
      {"ring part-filled", 3, false, 2, true, true},
      {"ring full", 8, false, 0, true, false},
      {"ring wrapped", 43, false, 12, true, true},
      {"ring wrapped, no context", 43, false, 12, false, false},
      {"ring emptied", 40, true, 0, true, false},
      {"ring emptied and begun anew", 40, true, 5, true, true},
      {"ring emptied and wrapped", 40, true, 21, false, false},
  };
  return all;
}

struct ToldStory {
  std::unique_ptr<KVCache> cache;
  SequenceId sequence = -1;
  std::optional<KVCache::Checkpoint> context;
};

template <class Value>
ToldStory tell(const Story& story, const HeadPartition& partition, int rank,
               const PageFormat& format = {}) {
  ToldStory told;
  told.cache = story_cache<Value>(partition, rank, 4, format);
  told.sequence = told.cache->add_sequence();
  if (story.context > 0) {
    story_append(*told.cache, told.sequence, partition, rank, 0, story.context);
  }
  if (story.evicts) story_evict(*told.cache, told.sequence, partition, rank);
  if (story.with_context) told.context = told.cache->checkpoint(told.sequence);
  if (story.tokens > 0) {
    story_append(*told.cache, told.sequence, partition, rank, story.context,
                 story.context + story.tokens);
  }
  return told;
}

/// Of the heads of one rank; none if the story has none.
inline std::vector<SnapshotQueries> story_queries(const Story& story,
                                                  const HeadPartition& partition, int rank) {
  std::vector<SnapshotQueries> queries;
  if (!story.with_queries) return queries;
  const std::int64_t total = story.context + story.tokens;
  for (int layer = 0; layer < story_layers; ++layer) {
    SnapshotQueries of;
    of.tokens = 3;
    of.first = total - of.tokens;
    for (const int head : partition.heads(layer, rank)) {
      for (std::int64_t i = 0; i < story_query_group * of.tokens * story_dim; ++i) {
        of.values.push_back(story_number(story_bits({4, layer, head, i})));
      }
    }
    queries.push_back(of);
  }
  return queries;
}

constexpr PageFormat q8_and_q4{RowType::q8, RowType::q4};
constexpr PageFormat only_q4{RowType::q4, RowType::q4};
constexpr PageFormat q3_and_q2{RowType::q3, RowType::q2};

inline SnapshotInfo story_info(const Story& story) {
  SnapshotInfo info;
  info.model = "models/größer";
  info.model_hash = "abc";
  info.tokenizer_hash = "def";
  info.kvzap_version = "1.2.3";
  info.created = "2026-01-02T03:04:05Z";
  info.prune = "kvzap";
  info.threshold = 0.1f;
  info.sink = 4;
  info.options = R"({"chunk": "256"})";
  info.run_state = std::string(70000, 'x');
  for (std::int64_t i = 0; i < story.context + story.tokens; ++i) {
    info.token_ids.push_back(static_cast<TokenId>(7 * i));
  }
  info.context_tokens = story.context;
  info.logits = {1.5f, -2.0f, std::numeric_limits<float>::infinity()};
  info.state = {{"steps", 12}, {"phase", -1}};
  info.further = {{"seed", std::int64_t{-7}}, {"wall_s", 1.5}, {"note", std::string()}};
  return info;
}

inline std::string content_of_file(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

template <class Element>
bool same_bits(const std::vector<Element>& a, const std::vector<Element>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(Element)) == 0);
}

/// That two caches hold the same of a sequence each, whatever their pages.
inline void expect_same_cache(KVCache& a, SequenceId of_a, KVCache& b, SequenceId of_b) {
  ASSERT_EQ(a.shape().heads, b.shape().heads);
  for (int layer = 0; layer < static_cast<int>(a.shape().heads.size()); ++layer) {
    EXPECT_EQ(a.tokens(of_a, layer), b.tokens(of_b, layer)) << layer;
    EXPECT_EQ(a.ring_first(of_a, layer), b.ring_first(of_b, layer)) << layer;
    for (int head = 0; head < a.shape().heads[layer]; ++head) {
      const auto rows_a = a.host_rows(of_a, layer, head);
      const auto rows_b = b.host_rows(of_b, layer, head);
      EXPECT_EQ(rows_a.positions, rows_b.positions) << layer << " " << head;
      EXPECT_TRUE(same_bits(rows_a.scores, rows_b.scores)) << layer << " " << head;
      EXPECT_TRUE(same_bits(rows_a.keys, rows_b.keys)) << layer << " " << head;
      EXPECT_TRUE(same_bits(rows_a.values, rows_b.values)) << layer << " " << head;
    }
  }
}

}  // namespace kvzap::test
