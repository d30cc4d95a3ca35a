#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <kvzap/core/cache.hpp>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "allocations.hpp"
#include "base/machine.hpp"
#include "cache/row_copy.hpp"
#include "unit/temporary_folder.hpp"
#include "watched.hpp"

namespace {

using kvzap::AppendCounts;
using kvzap::bfloat16;
using kvzap::CacheShape;
using kvzap::CompactCounts;
using kvzap::ConstArrayView;
using kvzap::DType;
using kvzap::DTypeOf;
using kvzap::EvictionRule;
using kvzap::ExecutionSpace;
using kvzap::half;
using kvzap::KVCache;
using kvzap::MemoryMeter;
using kvzap::MemorySpace;
using kvzap::PageId;
using kvzap::SequenceId;
using kvzap::test::expect_error;

constexpr float nan_score = std::numeric_limits<float>::quiet_NaN();
constexpr float infinity = std::numeric_limits<float>::infinity();

// ---------------------------------------------------------------------------------------------
// Content: every value of every pair is a bit pattern made from the pair's number, so that the
// naive model stores numbers only and any mixed-up row, dimension, key or value shows.

std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

/// Any pattern but a signalling NaN, which some processors quieten when they move it.
template <class Value>
Value content(std::uint64_t pair, int dim, bool is_value) {
  const std::uint64_t bits =
      mix(pair * 1000003 + dim * 2 + (is_value ? 1 : 0) + 0x9e3779b97f4a7c15ull);
  Value value;
  if constexpr (sizeof(Value) == 4) {
    auto word = static_cast<std::uint32_t>(bits);
    if ((word & 0x7f800000u) == 0x7f800000u) word |= 0x00400000u;
    std::memcpy(&value, &word, sizeof(word));
  } else {
    value.bits = static_cast<std::uint16_t>(bits);
  }
  return value;
}

template <class Value>
bool same_bits(const Value& a, const Value& b) {
  return std::memcmp(&a, &b, sizeof(Value)) == 0;
}

// ---------------------------------------------------------------------------------------------
// Views of the caller, in layouts that differ in every stride.

enum class Arrangement { right, left, strided };

template <class Value>
struct Rows {
  using View = Kokkos::View<const Value***, Kokkos::LayoutStride, MemorySpace>;
  Kokkos::View<Value*, MemorySpace> storage;
  View view;
};

/// (token, head, dim) view of pairs numbers[token][head].
template <class Value>
Rows<Value> make_rows(const std::vector<std::vector<std::uint64_t>>& numbers, int heads, int dim,
                      bool is_value, Arrangement arrangement) {
  const std::size_t tokens = numbers.size();
  std::size_t strides[3] = {std::size_t(heads) * dim, std::size_t(dim), 1};
  std::size_t offset = 0;
  if (arrangement == Arrangement::left) {
    strides[0] = 1;
    strides[1] = tokens;
    strides[2] = tokens * heads;
  } else if (arrangement == Arrangement::strided) {
    // Part of a fused (token, query-key-value, dim) buffer, every third dimension of it.
    strides[2] = 3;
    strides[1] = std::size_t(dim) * 3 + 5;
    strides[0] = strides[1] * heads + 11;
    offset = 7;
  }
  std::size_t size = offset + 1;
  const std::size_t extents[3] = {tokens, std::size_t(heads), std::size_t(dim)};
  for (int i = 0; i < 3; ++i) size += extents[i] * strides[i];
  Rows<Value> rows;
  rows.storage = Kokkos::View<Value*, MemorySpace>("rows", size);
  const auto host = Kokkos::create_mirror_view(rows.storage);
  for (std::size_t t = 0; t < tokens; ++t) {
    for (int h = 0; h < heads; ++h) {
      for (int d = 0; d < dim; ++d) {
        host(offset + t * strides[0] + h * strides[1] + d * strides[2]) =
            content<Value>(numbers[t][h], d, is_value);
      }
    }
  }
  Kokkos::deep_copy(rows.storage, host);
  rows.view = typename Rows<Value>::View(
      rows.storage.data() + offset,
      Kokkos::LayoutStride(tokens, strides[0], heads, strides[1], dim, strides[2]));
  return rows;
}

struct Scores {
  using View = Kokkos::View<const float**, Kokkos::LayoutStride, MemorySpace>;
  Kokkos::View<float*, MemorySpace> storage;
  View view;
};

/// (head, token) view of scores[head][token].
Scores make_scores(const std::vector<std::vector<float>>& scores, Arrangement arrangement) {
  if (scores.empty() || scores[0].empty()) return {};
  const std::size_t heads = scores.size();
  const std::size_t tokens = scores[0].size();
  std::size_t strides[2] = {tokens, 1};
  if (arrangement == Arrangement::left) {
    strides[0] = 1;
    strides[1] = heads;
  } else if (arrangement == Arrangement::strided) {
    strides[0] = tokens * 2 + 3;
    strides[1] = 2;
  }
  Scores result;
  result.storage =
      Kokkos::View<float*, MemorySpace>("scores", heads * strides[0] + tokens * strides[1] + 1);
  const auto host = Kokkos::create_mirror_view(result.storage);
  for (std::size_t h = 0; h < heads; ++h) {
    for (std::size_t t = 0; t < tokens; ++t) host(h * strides[0] + t * strides[1]) = scores[h][t];
  }
  Kokkos::deep_copy(result.storage, host);
  result.view = Scores::View(result.storage.data(),
                             Kokkos::LayoutStride(heads, strides[0], tokens, strides[1]));
  return result;
}

// ---------------------------------------------------------------------------------------------
// The naive model: what the cache promises, token by token, without pages or rings.

struct ModelPair {
  std::int64_t position;
  std::uint64_t number;
  float score;
};

struct ModelHead {
  std::vector<ModelPair> retained;
  std::deque<ModelPair> recent;
};

struct ModelLayer {
  std::int64_t tokens = 0;
  std::vector<ModelHead> heads;
};

using ModelSequence = std::vector<ModelLayer>;

AppendCounts append_to_model(ModelLayer& layer, int window,
                             const std::vector<std::vector<std::uint64_t>>& numbers,
                             const std::vector<std::vector<float>>& scores,
                             const EvictionRule& rule) {
  AppendCounts counts;
  for (std::size_t t = 0; t < numbers.size(); ++t) {
    for (std::size_t h = 0; h < layer.heads.size(); ++h) {
      ModelHead& head = layer.heads[h];
      head.recent.push_back(
          {layer.tokens, numbers[t][h], scores.empty() ? nan_score : scores[h][t]});
      if (head.recent.size() <= static_cast<std::size_t>(window)) continue;
      const ModelPair pair = head.recent.front();
      head.recent.pop_front();
      bool evict = false;
      if (rule.judges()) {
        ++counts.judged;
        if (!std::isfinite(pair.score)) {
          ++counts.non_finite;
        } else if (pair.position >= rule.sink && pair.score < rule.threshold) {
          evict = true;
          ++counts.evicted;
        }
      }
      if (!evict) head.retained.push_back(pair);
    }
    ++layer.tokens;
  }
  return counts;
}

// ---------------------------------------------------------------------------------------------
// One cache beside the model.

template <class Value>
class Checked {
 public:
  using Cache = KVCache;

  explicit Checked(const CacheShape& shape) : m_cache(DTypeOf<Value>::value, shape, &m_meter) {}

  Cache& cache() { return m_cache; }
  std::map<SequenceId, std::vector<KVCache::Checkpoint>>& checkpoints() { return m_checkpoints; }

  void trim() {
    m_returned += m_cache.trim();
    // What is left idle is idle only because its slab has a page in use.
    if (m_cache.pool().pages_in_use() == 0) {
      EXPECT_EQ(m_cache.pool().allocated_bytes(), 0u);
    }
  }

  void verify(const std::map<SequenceId, ModelSequence>& model, bool forks) {
    const CacheShape& shape = m_cache.shape();
    std::map<PageId, int> holders;
    std::size_t list_lengths = 0;
    std::size_t live = 0;
    std::vector<SequenceId> ids;
    for (const auto& [id, layers] : model) {
      ids.push_back(id);
      for (std::size_t l = 0; l < layers.size(); ++l) {
        const int layer = static_cast<int>(l);
        ASSERT_EQ(m_cache.tokens(id, layer), layers[l].tokens);
        for (std::size_t h = 0; h < layers[l].heads.size(); ++h) {
          const ModelHead& head = layers[l].heads[h];
          const auto& list = m_cache.page_list(id, layer, static_cast<int>(h));
          ASSERT_EQ(list.size(), (head.retained.size() + shape.page_rows - 1) / shape.page_rows);
          for (PageId page : list) ++holders[page];
          list_lengths += list.size();
          live += (head.retained.size() + head.recent.size()) * 2 * sizeof(Value) * shape.head_dim;
          ASSERT_NO_FATAL_FAILURE(verify_content(id, layer, static_cast<int>(h), head));
        }
      }
    }
    ASSERT_EQ(m_cache.sequences(), ids);
    ASSERT_EQ(holders.size(), m_cache.pool().pages_in_use());
    if (!forks) {
      ASSERT_EQ(holders.size(), list_lengths);
    }
    for (const auto& [page, count] : holders) {
      ASSERT_EQ(m_cache.pool().reference_count(page), count) << "page " << page;
    }
    std::size_t heads = 0;
    for (int n : shape.heads) heads += n;
    const std::size_t ring_bytes =
        heads * shape.window * (2 * sizeof(Value) * shape.head_dim + sizeof(float));
    std::size_t checkpoints = 0;
    for (const auto& [id, list] : m_checkpoints) checkpoints += list.size();
    const auto bytes = m_cache.bytes();
    ASSERT_EQ(bytes.live, live);
    ASSERT_EQ(bytes.allocated, m_cache.pool().allocated_bytes() + ids.size() * ring_bytes);
    ASSERT_EQ(bytes.returned, m_returned);
    ASSERT_EQ(m_meter.current(), bytes.allocated + checkpoints * ring_bytes);
    ASSERT_GE(m_meter.peak(), m_meter.current());
  }

 private:
  void verify_content(SequenceId id, int layer, int head, const ModelHead& model) {
    const int dim = m_cache.shape().head_dim;
    const std::size_t rows = model.retained.size() + model.recent.size();
    ASSERT_EQ(m_cache.rows(id, layer, head), static_cast<std::int64_t>(rows));
    const auto found = m_cache.host_rows(id, layer, head);
    ASSERT_EQ(found.positions.size(), rows);
    ASSERT_EQ(found.keys.size(), rows * dim);
    ASSERT_EQ(found.values.size(), rows * dim);
    ASSERT_EQ(found.scores.size(), rows);
    for (std::size_t r = 0; r < rows; ++r) {
      const ModelPair& pair =
          r < model.retained.size() ? model.retained[r] : model.recent[r - model.retained.size()];
      ASSERT_EQ(found.positions[r], pair.position) << "row " << r;
      ASSERT_TRUE(found.scores[r] == pair.score ||
                  (std::isnan(found.scores[r]) && std::isnan(pair.score)))
          << "row " << r << ": " << found.scores[r] << " instead of " << pair.score;
      const float* const expected = content_of(pair.number);
      const std::size_t bytes = dim * sizeof(float);
      if (std::memcmp(&found.keys[r * dim], expected, bytes) == 0 &&
          std::memcmp(&found.values[r * dim], expected + dim, bytes) == 0) {
        continue;
      }
      for (int d = 0; d < dim; ++d) {
        ASSERT_TRUE(
            same_bits(found.keys[r * dim + d], float(content<Value>(pair.number, d, false))) &&
            same_bits(found.values[r * dim + d], float(content<Value>(pair.number, d, true))))
            << "sequence " << id << " layer " << layer << " head " << head << " row " << r
            << " position " << pair.position << " dim " << d;
      }
    }
  }

  /// A pair's key and then its value. Made once: all rows are looked at after each operation.
  const float* content_of(std::uint64_t number) {
    if (m_contents.size() <= number) m_contents.resize(2 * number + 1);
    std::vector<float>& row = m_contents[number];
    const int dim = m_cache.shape().head_dim;
    if (row.empty()) {
      row.resize(2 * static_cast<std::size_t>(dim));
      for (int d = 0; d < dim; ++d) {
        row[d] = content<Value>(number, d, false);
        row[dim + d] = content<Value>(number, d, true);
      }
    }
    return row.data();
  }

  MemoryMeter m_meter;
  Cache m_cache;
  std::map<SequenceId, std::vector<KVCache::Checkpoint>> m_checkpoints;
  std::vector<std::vector<float>> m_contents;  // [number]
  std::size_t m_returned = 0;
};

struct RandomRun {
  std::vector<int> heads;
  int head_dim;
  int window;
  int page_rows;
  int operations;
  bool forks;
  unsigned seed;
};

/// Random operations on the model and on a cache, which must agree after each of them.
template <class Value>
class Run {
 public:
  explicit Run(const RandomRun& run)
      : m_run(run),
        m_random(run.seed),
        m_checked(CacheShape{run.heads, run.head_dim, run.window, run.page_rows}) {}

  ~Run() { kvzap::cache::set_row_path(kvzap::cache::RowPath::automatic); }

  void run() {
    for (int step = 0; step < m_run.operations; ++step) {
      std::string what;
      ASSERT_NO_FATAL_FAILURE(what = operate());
      SCOPED_TRACE("after step " + std::to_string(step) + ", " + what);
      ASSERT_NO_FATAL_FAILURE(m_checked.verify(m_model, m_run.forks));
    }
    // The run must have met what it is about.
    EXPECT_GT(m_seen.evicted, 0);
    EXPECT_GT(m_seen.judged, m_seen.evicted);
    EXPECT_GT(m_seen.non_finite, 0);
    EXPECT_GT(m_restores, 0);
    EXPECT_GT(m_deferred, 0);
    EXPECT_GT(m_kept_appends, 0);
    EXPECT_GT(m_compacted.evicted, 0);
    EXPECT_GT(m_compacted.moved, 0);
    EXPECT_EQ(m_forks > 0, m_run.forks);
  }

 private:
  int below(int bound) { return static_cast<int>(m_random() % static_cast<unsigned>(bound)); }

  std::string operate() {
    if (m_model.empty()) return add_sequence();
    auto it = m_model.begin();
    std::advance(it, below(static_cast<int>(m_model.size())));
    const SequenceId id = it->first;
    const int choice = below(100);
    if (choice < 3 && m_model.size() < 5) return add_sequence();
    if (choice < 11 && m_run.forks && m_model.size() < 6) return fork(id);
    if (choice < 16 || tokens(id) > 12 * m_run.window + 200) return free_sequence(id);
    if (choice < 22) return checkpoint(id);
    if (choice < 28 && !m_model_checkpoints[id].empty()) return restore(id);
    if (choice < 35) return compact(id);
    if (choice < 40) {
      m_checked.trim();
      return "trim";
    }
    return append(id);
  }

  std::int64_t tokens(SequenceId id) const {
    std::int64_t most = 0;
    for (const auto& layer : m_model.at(id)) most = std::max(most, layer.tokens);
    return most;
  }

  std::string add_sequence() {
    const SequenceId id = m_checked.cache().add_sequence();
    ModelSequence sequence;
    for (int heads : m_run.heads) sequence.push_back({0, std::vector<ModelHead>(heads)});
    EXPECT_TRUE(m_model.emplace(id, std::move(sequence)).second);
    return "add sequence " + std::to_string(id);
  }

  std::string fork(SequenceId source) {
    ++m_forks;
    const SequenceId id = m_checked.cache().fork(source);
    EXPECT_TRUE(m_model.emplace(id, m_model.at(source)).second);
    return "fork of " + std::to_string(source);
  }

  std::string free_sequence(SequenceId id) {
    m_checked.cache().free_sequence(id);
    m_checked.checkpoints().erase(id);
    m_model.erase(id);
    m_model_checkpoints.erase(id);
    return "free of " + std::to_string(id);
  }

  std::string checkpoint(SequenceId id) {
    m_checked.checkpoints()[id].push_back(m_checked.cache().checkpoint(id));
    m_model_checkpoints[id].push_back(m_model.at(id));
    return "checkpoint of " + std::to_string(id);
  }

  // To any earlier state; the checkpoint stays good for another time, later ones do not.
  std::string restore(SequenceId id) {
    ++m_restores;
    auto& saved = m_model_checkpoints[id];
    const std::size_t index = below(static_cast<int>(saved.size()));
    m_checked.cache().restore(id, m_checked.checkpoints()[id][index]);
    m_model.at(id) = saved[index];
    while (saved.size() > index + 1) {
      saved.pop_back();
      m_checked.checkpoints()[id].pop_back();
    }
    return "restore of " + std::to_string(id);
  }

  /// Every way to move rows must give the same cache.
  void choose_path() {
    using kvzap::cache::RowPath;
    kvzap::cache::set_row_path(std::vector<RowPath>{
        RowPath::automatic, RowPath::portable, RowPath::ordinary, RowPath::streaming}[below(4)]);
  }

  /// Of the retained rows, or of those and the ring's.
  std::string compact(SequenceId id) {
    const int layer = below(static_cast<int>(m_run.heads.size()));
    ModelLayer& model = m_model.at(id)[layer];
    const int heads = m_run.heads[layer];
    const bool evicts = below(3) == 0;
    std::size_t longest = 0;
    for (const ModelHead& head : model.heads) {
      longest = std::max(longest, head.retained.size() + (evicts ? head.recent.size() : 0));
    }
    const std::size_t columns = longest + below(3);
    const bool transposed = below(2) == 0;
    const Kokkos::View<std::uint8_t*, MemorySpace> storage("keep", heads * columns + 1);
    const auto host = Kokkos::create_mirror_view(storage);
    const std::size_t strides[2] = {transposed ? 1 : columns, transposed ? std::size_t(heads) : 1};
    CompactCounts expected;
    std::vector<std::size_t> old_sizes;
    if (evicts) {
      for (ModelHead& head : model.heads) {
        old_sizes.push_back(head.retained.size());
        head.retained.insert(head.retained.end(), head.recent.begin(), head.recent.end());
        head.recent.clear();
      }
    }
    bool ring_goes = false;
    std::vector<std::size_t> left_of_ring(heads, 0);
    for (int h = 0; h < heads; ++h) {
      auto& retained = model.heads[h].retained;
      // Heads that keep all, none, all from some row on, or half.
      const int mode = below(5);
      const int from = below(static_cast<int>(retained.size()) + 1);
      std::vector<ModelPair> left;
      for (std::size_t i = 0; i < columns; ++i) {
        const bool keep =
            mode == 0 ||
            (mode != 1 && ((static_cast<int>(i) < from && mode == 2) || below(2) == 0));
        host(h * strides[0] + i * strides[1]) =
            keep ? static_cast<std::uint8_t>(1 + below(255)) : 0;
        if (i >= retained.size()) continue;
        ++expected.judged;
        if (!keep) ++expected.evicted;
        const bool in_ring = evicts && i >= old_sizes[h];
        if (in_ring && keep) ++left_of_ring[h];
        if (in_ring && !keep) ring_goes = true;
        if (keep && left.size() < i && !in_ring) ++expected.moved;
        if (evicts && keep && !std::isfinite(retained[i].score)) ++expected.non_finite;
        if (keep) left.push_back(retained[i]);
      }
      retained = std::move(left);
    }
    for (int h = 0; evicts && h < heads; ++h) {
      auto& [retained, recent] = model.heads[h];
      if (ring_goes) {
        expected.moved += static_cast<std::int64_t>(left_of_ring[h]);
      } else {
        recent.assign(retained.end() - static_cast<std::ptrdiff_t>(left_of_ring[h]),
                      retained.end());
        retained.resize(retained.size() - left_of_ring[h]);
      }
    }
    Kokkos::deep_copy(storage, host);
    const Kokkos::View<const std::uint8_t**, Kokkos::LayoutStride, MemorySpace> keep(
        storage.data(), Kokkos::LayoutStride(heads, strides[0], columns, strides[1]));
    m_compacted.evicted += expected.evicted;
    m_compacted.moved += expected.moved;
    const ExecutionSpace exec;
    choose_path();
    const CompactCounts found = evicts ? m_checked.cache().evict(exec, id, layer, keep)
                                       : m_checked.cache().compact(exec, id, layer, keep);
    EXPECT_EQ(found.non_finite, expected.non_finite);
    EXPECT_EQ(found.judged, expected.judged);
    EXPECT_EQ(found.evicted, expected.evicted);
    EXPECT_EQ(found.moved, expected.moved);
    for (const auto& checkpoint : m_checked.checkpoints()[id]) {
      EXPECT_THROW(m_checked.cache().restore(id, checkpoint), kvzap::Error);
    }
    m_checked.checkpoints()[id].clear();
    m_model_checkpoints[id].clear();
    return "compaction of sequence " + std::to_string(id) + " layer " + std::to_string(layer);
  }

  float random_score() {
    switch (below(20)) {
      case 0:
        return nan_score;
      case 1:
        return infinity;
      case 2:
        return -infinity;
      case 3:
        return 0;
      default:
        return static_cast<float>(m_random() >> 8) * 0x1p-23f - 1.0f;
    }
  }

  std::string append(SequenceId id) {
    const int layer = below(static_cast<int>(m_run.heads.size()));
    const int heads = m_run.heads[layer];
    const int choice = below(10);
    const int count = choice < 4   ? 1
                      : choice < 8 ? below(m_run.window + 2)
                                   : below(4 * m_run.window + 3);
    std::vector<std::vector<std::uint64_t>> numbers(count, std::vector<std::uint64_t>(heads));
    for (auto& token : numbers) {
      for (auto& number : token) number = m_next_number++;
    }
    std::vector<std::vector<float>> scores;
    if (below(6) != 0) {
      scores.assign(heads, std::vector<float>(count));
      // Some heads lose almost everything and some nothing, as trained ones do.
      for (int h = 0; h < heads; ++h) {
        for (float& score : scores[h]) score = random_score() + (h % 2 == 0 ? 0.0f : -0.5f);
      }
    }
    EvictionRule rule;
    if (below(5) != 0) {
      rule.judge = true;
      rule.threshold = std::vector<float>{-0.5f, 0.0f, 0.7f}[below(3)];
      rule.sink = below(2) == 0 ? 0 : below(8);
    }
    const auto arrangement = static_cast<Arrangement>(below(3));
    const auto keys = make_rows<Value>(numbers, heads, m_run.head_dim, false, arrangement);
    const auto values =
        make_rows<Value>(numbers, heads, m_run.head_dim, true, static_cast<Arrangement>(below(3)));
    const auto score_rows = make_scores(scores, arrangement);
    if (m_model.at(id)[layer].tokens == 0 && below(2) == 0) {
      return append_kept(id, layer, numbers, scores, keys, values, score_rows);
    }
    const AppendCounts expected =
        append_to_model(m_model.at(id)[layer], m_run.window, numbers, scores, rule);
    m_seen.judged += expected.judged;
    m_seen.evicted += expected.evicted;
    m_seen.non_finite += expected.non_finite;
    const ExecutionSpace exec;
    KVCache& cache = m_checked.cache();
    AppendCounts found;
    if (below(4) != 0) {
      choose_path();
      found = cache.append(exec, id, layer, keys.view, values.view, score_rows.view, rule);
    } else {
      // Token by token without waiting.
      for (int t = 0; t < count; ++t) {
        const auto own = std::make_pair(t, t + 1);
        Scores::View own_scores;
        if (!scores.empty()) {
          own_scores = Kokkos::subview(score_rows.view, Kokkos::ALL, own);
        }
        cache.append_deferred(
            exec, id, layer, Kokkos::subview(keys.view, own, Kokkos::ALL, Kokkos::ALL),
            Kokkos::subview(values.view, own, Kokkos::ALL, Kokkos::ALL), own_scores, rule);
        ++m_deferred;
      }
      found = cache.collect(id);
    }
    EXPECT_EQ(found.judged, expected.judged);
    EXPECT_EQ(found.evicted, expected.evicted);
    EXPECT_EQ(found.non_finite, expected.non_finite);
    exec.fence();
    return "append of " + std::to_string(count) + " to sequence " + std::to_string(id) + " layer " +
           std::to_string(layer);
  }

  /// The first rows of a layer, with flags for them.
  std::string append_kept(SequenceId id, int layer,
                          const std::vector<std::vector<std::uint64_t>>& numbers,
                          const std::vector<std::vector<float>>& scores, const Rows<Value>& keys,
                          const Rows<Value>& values, const Scores& score_rows) {
    ModelLayer& model = m_model.at(id)[layer];
    const std::size_t heads = model.heads.size();
    model.tokens = static_cast<std::int64_t>(numbers.size());
    const Kokkos::View<std::uint8_t**, Kokkos::LayoutLeft, MemorySpace> keep("keep", heads,
                                                                             numbers.size());
    const auto host = Kokkos::create_mirror_view(keep);
    AppendCounts expected;
    for (std::size_t h = 0; h < heads; ++h) {
      const int mode = below(4);
      for (std::size_t t = 0; t < numbers.size(); ++t) {
        host(h, t) = static_cast<std::uint8_t>(mode == 0 ? 0 : mode == 1 ? 1 : below(3));
        ++expected.judged;
        if (host(h, t) == 0) ++expected.evicted;
        if (host(h, t) == 0) continue;
        const float score = scores.empty() ? nan_score : scores[h][t];
        if (!scores.empty() && !std::isfinite(score)) ++expected.non_finite;
        model.heads[h].retained.push_back({static_cast<std::int64_t>(t), numbers[t][h], score});
      }
    }
    Kokkos::deep_copy(keep, host);
    choose_path();
    const AppendCounts found = m_checked.cache().append_kept(ExecutionSpace(), id, layer, keys.view,
                                                             values.view, score_rows.view, keep);
    EXPECT_EQ(found.judged, expected.judged);
    EXPECT_EQ(found.evicted, expected.evicted);
    EXPECT_EQ(found.non_finite, expected.non_finite);
    ExecutionSpace().fence();
    ++m_kept_appends;
    return "append of kept rows of " + std::to_string(numbers.size()) + " to sequence " +
           std::to_string(id) + " layer " + std::to_string(layer);
  }

  RandomRun m_run;
  std::mt19937 m_random;
  Checked<Value> m_checked;
  std::map<SequenceId, ModelSequence> m_model;
  std::map<SequenceId, std::vector<ModelSequence>> m_model_checkpoints;
  std::uint64_t m_next_number = 1;
  AppendCounts m_seen;
  CompactCounts m_compacted;
  int m_forks = 0;
  int m_restores = 0;
  int m_deferred = 0;
  int m_kept_appends = 0;
};

template <class Value>
class CacheInvariants : public ::testing::Test {};
using ValueTypes = ::testing::Types<float, half, bfloat16>;
TYPED_TEST_SUITE(CacheInvariants, ValueTypes);

TYPED_TEST(CacheInvariants, HoldThroughRandomOperations) {
  const RandomRun runs[] = {
      {{3, 1, 0, 2}, 8, 4, 3, 4000, true, 11},  // a rank may own no head of a layer
      {{2, 3}, 8, 4, 3, 3000, false, 12},      {{2, 1}, 8, 1, 1, 4000, true, 13},
      {{1, 2}, 8, 7, 16, 3000, true, 14},      {{2}, 80, 40, 16, 400, true, 15},
      {{1, 3}, 80, 5, 64, 600, true, 16},      {{2, 2}, 8, 40, 64, 1000, false, 17},
      {{2}, 16, 9, 7, 1500, true, 18},         {{2, 1}, 64, 6, 16, 500, true, 19},
      {{2}, 128, 20, 64, 300, true, 20},       {{1}, 7, 3, 7, 1500, true, 21},
  };
  for (RandomRun run : runs) {
    SCOPED_TRACE("seed " + std::to_string(run.seed));
    if (kvzap::test::watched) run.operations = std::min(run.operations, 300 + run.operations / 8);
    Run<TypeParam> checked(run);
    ASSERT_NO_FATAL_FAILURE(checked.run());
  }
}

// ---------------------------------------------------------------------------------------------
// What the operations mean, spelled out.

template <class Parameter>
class Cache : public ::testing::Test {
 protected:
  using Value = Parameter;

  /// Appends one token per score to a cache with one head; pair numbers are positions.
  AppendCounts append(KVCache& cache, SequenceId id, const std::vector<float>& scores,
                      const EvictionRule& rule) {
    std::vector<std::vector<std::uint64_t>> numbers;
    for (std::size_t i = 0; i < scores.size(); ++i) {
      numbers.push_back({static_cast<std::uint64_t>(cache.tokens(id, 0)) + i});
    }
    const int dim = cache.shape().head_dim;
    const auto keys = make_rows<Value>(numbers, 1, dim, false, Arrangement::right);
    const auto values = make_rows<Value>(numbers, 1, dim, true, Arrangement::right);
    const ExecutionSpace exec;
    const auto counts = cache.append(exec, id, 0, keys.view, values.view,
                                     make_scores({scores}, Arrangement::right).view, rule);
    exec.fence();
    return counts;
  }

  void expect_counts(const AppendCounts& counts, std::int64_t judged, std::int64_t evicted,
                     std::int64_t non_finite) {
    EXPECT_EQ(counts.judged, judged);
    EXPECT_EQ(counts.evicted, evicted);
    EXPECT_EQ(counts.non_finite, non_finite);
  }
};

using Values = ::testing::Types<float, half, bfloat16>;
TYPED_TEST_SUITE(Cache, Values);

using Positions = std::vector<std::int64_t>;

TYPED_TEST(Cache, APairIsJudgedWhenAWindowOfNewerOnesIsThere) {
  KVCache cache(DTypeOf<TypeParam>::value, CacheShape{{1}, 8, 3, 2});
  const SequenceId id = cache.add_sequence();
  const EvictionRule rule{0.0f, 0, true};
  // Positions 0, 1, 2 fill the window: nobody is judged, however low the score.
  this->expect_counts(this->append(cache, id, {-1, -1, 1}, rule), 0, 0, 0);
  EXPECT_EQ(cache.positions(id, 0, 0), (Positions{0, 1, 2}));
  EXPECT_EQ(cache.rows(id, 0, 0), 3);
  EXPECT_TRUE(cache.page_list(id, 0, 0).empty());
  // The third newer pair judges position 0.
  this->expect_counts(this->append(cache, id, {-1}, rule), 1, 1, 0);
  EXPECT_EQ(cache.positions(id, 0, 0), (Positions{1, 2, 3}));
  // Position 1 goes, 2 stays (a score at the threshold or above does), 3 is not judged yet.
  this->expect_counts(this->append(cache, id, {0, nan_score}, rule), 2, 1, 0);
  EXPECT_EQ(cache.positions(id, 0, 0), (Positions{2, 3, 4, 5}));
  EXPECT_EQ(cache.page_list(id, 0, 0).size(), 1u);
  // More than a window at once: 3 goes, 4 stays at exactly the threshold, 5 because of its NaN,
  // and of the new ones 6 goes without ever having been in the window.
  this->expect_counts(this->append(cache, id, {-5, -infinity, infinity, -1}, rule), 4, 2, 1);
  EXPECT_EQ(cache.positions(id, 0, 0), (Positions{2, 4, 5, 7, 8, 9}));
  // Infinite scores keep their pairs as well.
  this->expect_counts(this->append(cache, id, {1, 1, 1}, rule), 3, 1, 2);
  EXPECT_EQ(cache.positions(id, 0, 0), (Positions{2, 4, 5, 7, 8, 10, 11, 12}));
  EXPECT_EQ(cache.page_list(id, 0, 0).size(), 3u);
  EXPECT_EQ(cache.tokens(id, 0), 13);
}

TYPED_TEST(Cache, UnjudgedPairsAndSinksStay) {
  KVCache cache(DTypeOf<TypeParam>::value, CacheShape{{1}, 8, 2, 4});
  const SequenceId id = cache.add_sequence();
  const EvictionRule judging{0.0f, 2, true};
  // Leaving the window under a rule that does not judge is final: no later rule brings it back.
  this->expect_counts(this->append(cache, id, {-1, -1, -1, -1, -1}, EvictionRule::keep_all()), 0, 0,
                      0);
  EXPECT_EQ(cache.positions(id, 0, 0), (Positions{0, 1, 2, 3, 4}));
  this->expect_counts(this->append(cache, id, {-1, -1}, judging), 2, 2, 0);
  EXPECT_EQ(cache.positions(id, 0, 0), (Positions{0, 1, 2, 5, 6}));
  // The first two positions are sinks: judged, and kept.
  const SequenceId second = cache.add_sequence();
  this->expect_counts(this->append(cache, second, {-1, -1, -1, -1, -1}, judging), 3, 1, 0);
  EXPECT_EQ(cache.positions(second, 0, 0), (Positions{0, 1, 3, 4}));
}

TYPED_TEST(Cache, PairsWithoutScoresAreKept) {
  using Value = typename TestFixture::Value;
  KVCache cache(DTypeOf<TypeParam>::value, CacheShape{{1}, 8, 2, 4});
  const SequenceId id = cache.add_sequence();
  const auto rows = make_rows<Value>({{0}, {1}, {2}}, 1, 8, false, Arrangement::right);
  this->expect_counts(
      cache.append(ExecutionSpace{}, id, 0, rows.view, rows.view, {}, EvictionRule{0.0f, 0, true}),
      1, 0, 1);
  EXPECT_EQ(cache.rows(id, 0, 0), 3);
}

TYPED_TEST(Cache, ViewsOfAnyLayoutGiveTheSameCache) {
  using Value = typename TestFixture::Value;
  constexpr int heads = 3, dim = 80, tokens = 29;
  std::mt19937 random(5);
  std::vector<std::vector<std::uint64_t>> numbers(tokens, std::vector<std::uint64_t>(heads));
  for (auto& token : numbers) {
    for (auto& number : token) number = random();
  }
  std::vector<std::vector<float>> scores(heads, std::vector<float>(tokens));
  for (auto& head : scores) {
    for (auto& score : head) score = random() % 2 ? 1.0f : -1.0f;
  }
  KVCache cache(DTypeOf<TypeParam>::value, CacheShape{{heads}, dim, 6, 4});
  std::vector<SequenceId> ids;
  for (auto arrangement : {Arrangement::right, Arrangement::left, Arrangement::strided}) {
    ids.push_back(cache.add_sequence());
    const auto keys = make_rows<Value>(numbers, heads, dim, false, arrangement);
    const auto values = make_rows<Value>(numbers, heads, dim, true, arrangement);
    const auto score_rows = make_scores(scores, arrangement);
    const ExecutionSpace exec;
    // In two calls, so that ring rows and passing rows both come from each layout.
    const auto cut = [&](int begin, int end) {
      const auto range = std::make_pair(begin, end);
      cache.append(exec, ids.back(), 0, Kokkos::subview(keys.view, range, Kokkos::ALL, Kokkos::ALL),
                   Kokkos::subview(values.view, range, Kokkos::ALL, Kokkos::ALL),
                   Kokkos::subview(score_rows.view, Kokkos::ALL, range),
                   EvictionRule{0.0f, 1, true});
      exec.fence();
    };
    cut(0, 5);
    cut(5, tokens);
  }
  for (int head = 0; head < heads; ++head) {
    const auto expected = cache.host_rows(ids[0], 0, head);
    EXPECT_LT(expected.positions.size(), static_cast<std::size_t>(tokens));
    EXPECT_GT(expected.positions.size(), 6u);
    for (SequenceId id : {ids[1], ids[2]}) {
      const auto found = cache.host_rows(id, 0, head);
      EXPECT_EQ(found.positions, expected.positions);
      EXPECT_EQ(std::memcmp(found.keys.data(), expected.keys.data(),
                            expected.keys.size() * sizeof(Value)),
                0);
      EXPECT_EQ(std::memcmp(found.values.data(), expected.values.data(),
                            expected.values.size() * sizeof(Value)),
                0);
    }
  }
}

TYPED_TEST(Cache, FreedPagesAreReusedAndTrimmed) {
  KVCache cache(DTypeOf<TypeParam>::value, CacheShape{{1}, 8, 1, 4});
  const SequenceId first = cache.add_sequence();
  const std::vector<float> many(401, 1.0f);
  this->append(cache, first, many, EvictionRule::keep_all());
  const std::size_t allocated = cache.pool().allocated_bytes();
  EXPECT_EQ(cache.pool().pages_in_use(), 100u);
  cache.free_sequence(first);
  EXPECT_EQ(cache.pool().pages_in_use(), 0u);
  EXPECT_EQ(cache.bytes().live, 0u);
  const SequenceId second = cache.add_sequence();
  this->append(cache, second, many, EvictionRule::keep_all());
  EXPECT_EQ(cache.pool().allocated_bytes(), allocated);
  cache.free_sequence(second);
  EXPECT_EQ(cache.trim(), allocated);
  EXPECT_EQ(cache.bytes().returned, allocated);
  EXPECT_EQ(cache.bytes().allocated, 0u);
}

TYPED_TEST(Cache, ErrorsNameExpectedAndFound) {
  using Value = typename TestFixture::Value;
  KVCache cache(DTypeOf<Value>::value, CacheShape{{2, 1}, 8, 3, 2});
  const SequenceId id = cache.add_sequence();
  const ExecutionSpace exec;
  const std::vector<std::vector<std::uint64_t>> numbers(5, {1, 2, 3});
  const auto good = make_rows<Value>(numbers, 2, 8, false, Arrangement::right);
  const auto three_heads = make_rows<Value>(numbers, 3, 8, false, Arrangement::right);
  const auto narrow = make_rows<Value>(numbers, 2, 7, false, Arrangement::right);
  const auto four_tokens =
      make_rows<Value>({{1, 2}, {1, 2}, {1, 2}, {1, 2}}, 2, 8, false, Arrangement::right);
  const auto append = [&](const auto& keys, const auto& values, const Scores& scores, int layer) {
    cache.append(exec, id, layer, keys.view, values.view, scores.view, EvictionRule::keep_all());
  };
  expect_error([&] { append(three_heads, good, {}, 0); }, {"(5, 3, 8)", "(5, 2, 8)"});
  expect_error([&] { append(good, three_heads, {}, 0); }, {"(5, 3, 8)", "(5, 2, 8)"});
  expect_error([&] { append(good, good, {}, 1); }, {"(5, 2, 8)", "(5, 1, 8)"});
  expect_error([&] { append(narrow, narrow, {}, 0); }, {"(5, 2, 7)", "(5, 2, 8)"});
  expect_error([&] { append(good, four_tokens, {}, 0); }, {"(4, 2, 8)", "(5, 2, 8)"});
  const auto transposed =
      make_scores(std::vector<std::vector<float>>(5, std::vector<float>(2)), Arrangement::right);
  expect_error([&] { append(good, good, transposed, 0); }, {"(5, 2)", "(2, 5)"});
  expect_error([&] { append(good, good, {}, 2); }, {"no layer 2", "2"});
  const ConstArrayView wrong_type(good.storage.data(),
                                  std::is_same_v<Value, float> ? DType::bf16 : DType::f32,
                                  {5, 2, 8}, {16, 8, 1});
  expect_error(
      [&] { cache.append(exec, id, 0, wrong_type, good.view, {}, EvictionRule::keep_all()); },
      {"keys or values are", kvzap::name_of(DTypeOf<Value>::value)});
  expect_error([&] { append(good, good, {}, -1); }, {"no layer -1"});
  expect_error([&] { cache.free_sequence(7); }, {"no sequence 7"});
  expect_error([&] { cache.fork(-1); }, {"no sequence -1"});
  // Positions are 32-bit: 2^31 tokens (here the same one over and over) are refused.
  const ConstArrayView endless(good.storage.data(), DTypeOf<Value>::value,
                               {std::int64_t{1} << 31, 2, 8}, {0, 8, 1});
  expect_error([&] { cache.append(exec, id, 0, endless, endless, {}, EvictionRule::keep_all()); },
               {"2147483648", "2147483647"});
  EXPECT_EQ(cache.tokens(id, 0), 0);

  const auto empty = cache.checkpoint(id);
  append(good, good, {}, 0);
  const auto later = cache.checkpoint(id);
  cache.restore(id, empty);
  expect_error([&] { cache.restore(id, later); }, {"sequence 0", "cut back past this checkpoint"});
  const SequenceId other = cache.fork(id);
  expect_error([&] { cache.restore(other, empty); }, {"sequence 1", "sequence 0"});

  const Kokkos::View<std::uint8_t**, Kokkos::LayoutRight, MemorySpace> keep("keep", 2, 2);
  cache.restore(id, empty);
  append(good, good, {}, 0);
  append(good, good, {}, 0);
  expect_error([&] { cache.compact(exec, id, 0, keep); }, {"(2, 2)", "(2, at least 7)"});
  expect_error([&] { cache.compact(exec, id, 1, keep); }, {"(2, 2)", "(1, at least 0)"});
  expect_error([&] { cache.compact(exec, id, 2, keep); }, {"no layer 2"});
  cache.restore(id, empty);
  cache.compact(exec, id, 0, keep);
  expect_error([&] { cache.restore(id, empty); }, {"compacted since"});

  expect_error([] { KVCache(DTypeOf<Value>::value, CacheShape{{1}, 8, 0, 4}); }, {"window 0"});
  expect_error(
      [] {
        KVCache(DTypeOf<Value>::value, CacheShape{{1}, 8, 4, 0});
      },
      {"page of 0 rows"});
  expect_error([] { KVCache(DTypeOf<Value>::value, CacheShape{{1}, 0, 4, 4}); }, {"head_dim 0"});
  expect_error([] { KVCache(DTypeOf<Value>::value, CacheShape{{}, 8, 4, 4}); }, {"0 layers"});
  expect_error([] { KVCache(DTypeOf<Value>::value, CacheShape{{1, -2}, 8, 4, 4}); }, {"-2 heads"});
}

// The keys of a context without gaps, and what follows it.
TYPED_TEST(Cache, ClosingUpGivesNewPositionsAndTurnsKeys) {
  using Value = typename TestFixture::Value;
  constexpr int heads = 2, dim = 8, tokens = 50;
  KVCache cache(DTypeOf<TypeParam>::value, CacheShape{{heads, 0, heads}, dim, 6, 4});
  const ExecutionSpace exec;
  const SequenceId id = cache.add_sequence();
  std::mt19937 random(3);
  const auto random_rows = [&](int n, int n_heads) {
    const Kokkos::View<Value***, Kokkos::LayoutRight, MemorySpace> rows("rows", n, n_heads, dim);
    const auto host = Kokkos::create_mirror_view(rows);
    for (std::size_t i = 0; i < host.size(); ++i) {
      host.data()[i] = Value(static_cast<float>(random() >> 8) * 0x1p-23f - 1.0f);
    }
    Kokkos::deep_copy(rows, host);
    return rows;
  };
  const Kokkos::View<float*, MemorySpace> frequencies("frequencies", dim / 2);
  const auto host_frequencies = Kokkos::create_mirror_view(frequencies);
  for (int j = 0; j < dim / 2; ++j) host_frequencies(j) = std::pow(10000.0f, -2.0f * j / dim);
  Kokkos::deep_copy(frequencies, host_frequencies);
  // Every head loses ten rows, some of its own.
  const Kokkos::View<std::uint8_t**, Kokkos::LayoutRight, MemorySpace> keep("keep", heads, tokens);
  const auto flags = Kokkos::create_mirror_view(keep);
  for (int h = 0; h < heads; ++h) {
    for (int t = 0; t < tokens; ++t) flags(h, t) = t % 5 != h + 1;
  }
  Kokkos::deep_copy(keep, flags);
  for (int l : {0, 1, 2}) {
    const auto rows = random_rows(tokens, cache.shape().heads[l]);
    if (l == 1) {
      cache.append(exec, id, l, rows, rows, {}, EvictionRule::keep_all());
    } else {
      cache.append_kept(exec, id, l, rows, rows, {}, keep);
    }
  }
  const auto checkpoint = cache.checkpoint(id);
  const SequenceId other = cache.fork(id);
  expect_error([&] { cache.compact_positions(exec, id, frequencies, 41); },
               {"head 0", "40 rows", "41"});
  EXPECT_EQ(cache.compact_positions(exec, id, frequencies), 40);
  expect_error([&] { cache.restore(id, checkpoint); }, {"compacted since"});
  for (int l : {0, 1, 2}) EXPECT_EQ(cache.tokens(id, l), 40);
  for (int l : {0, 2}) {
    for (int h = 0; h < heads; ++h) {
      const auto before = cache.host_rows(other, l, h);
      const auto after = cache.host_rows(id, l, h);
      ASSERT_EQ(after.positions.size(), 40u);
      for (int r = 0; r < 40; ++r) {
        EXPECT_EQ(before.positions[r], 5 * (r / 4) + r % 4 + (r % 4 > h ? 1 : 0));
        EXPECT_EQ(after.positions[r], r);
        for (int d = 0; d < dim; ++d) {
          const int at = r * dim + d;
          EXPECT_TRUE(same_bits(after.values[at], before.values[at]));
          const int j = d % (dim / 2);
          const auto angle = static_cast<double>(r - before.positions[r]) * host_frequencies(j);
          const double x = static_cast<float>(before.keys[r * dim + j]);
          const double y = static_cast<float>(before.keys[r * dim + j + dim / 2]);
          const double turned = d < dim / 2 ? x * std::cos(angle) - y * std::sin(angle)
                                            : y * std::cos(angle) + x * std::sin(angle);
          const double error = sizeof(Value) == 4 ? 3e-7 : 0.0079 / 2;
          EXPECT_NEAR(static_cast<float>(after.keys[at]), turned, error) << l << h << r << d;
        }
      }
    }
  }
  // What comes then stands after them, in a ring that judges nobody before.
  for (int l : {0, 1, 2}) {
    const int n_heads = cache.shape().heads[l];
    const auto rows = random_rows(7, n_heads);
    const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> scores("scores", n_heads, 7);
    const auto counts = cache.append(exec, id, l, rows, rows, scores, EvictionRule{1.0f, 0, true});
    EXPECT_EQ(counts.evicted, n_heads);
  }
  const auto positions = cache.positions(id, 2, 1);
  ASSERT_EQ(positions.size(), 46u);
  EXPECT_EQ(positions[39], 39);
  EXPECT_EQ(positions[40], 41);
  expect_error([&] { cache.compact_positions(exec, id, frequencies); }, {"ring of layer 0"});
  // A rank without heads is told how many rows there are.
  KVCache none(DTypeOf<TypeParam>::value, CacheShape{{0, 0}, dim, 6, 4});
  const SequenceId empty = none.add_sequence();
  for (int l : {0, 1}) {
    const auto rows = random_rows(9, 0);
    none.append(exec, empty, l, rows, rows, {}, EvictionRule::keep_all());
  }
  expect_error([&] { none.compact_positions(exec, empty, frequencies); }, {"no heads"});
  EXPECT_EQ(none.compact_positions(exec, empty, frequencies, 5), 5);
  EXPECT_EQ(none.tokens(empty, 1), 5);
}

// A prefill that is large enough to be streamed: the same cache by every path.
TYPED_TEST(Cache, PathsAgreeOnAPrefillAndItsCompaction) {
  using Value = typename TestFixture::Value;
  using kvzap::cache::RowPath;
  constexpr int heads = 2, tokens = 1500;
  for (const int dim : {16, 64, 80, 128}) {
    std::mt19937 random(dim);
    std::vector<std::vector<std::uint64_t>> numbers(tokens, std::vector<std::uint64_t>(heads));
    std::vector<std::vector<float>> scores(heads, std::vector<float>(tokens));
    for (auto& token : numbers) {
      for (auto& number : token) number = random();
    }
    for (auto& head : scores) {
      for (auto& score : head) score = random() % 3 ? -1.0f : 1.0f;
    }
    const auto keys = make_rows<Value>(numbers, heads, dim, false, Arrangement::right);
    const auto values = make_rows<Value>(numbers, heads, dim, true, Arrangement::right);
    const auto score_rows = make_scores(scores, Arrangement::right);
    const Kokkos::View<std::uint8_t**, Kokkos::LayoutRight, MemorySpace> keep("keep", heads,
                                                                              tokens);
    const auto host_keep = Kokkos::create_mirror_view(keep);
    for (int h = 0; h < heads; ++h) {
      for (int i = 0; i < tokens; ++i) host_keep(h, i) = i < 30 || random() % 2;
    }
    Kokkos::deep_copy(keep, host_keep);
    for (const int page_rows : {1, 7, 16, 64}) {
      KVCache cache(DTypeOf<TypeParam>::value, CacheShape{{heads}, dim, 100, page_rows});
      const ExecutionSpace exec;
      std::vector<SequenceId> ids;
      for (const auto path :
           {RowPath::portable, RowPath::ordinary, RowPath::streaming, RowPath::automatic}) {
        kvzap::cache::set_row_path(path);
        ids.push_back(cache.add_sequence());
        // In two calls, so that rows also come from the ring and go after others.
        for (const auto& range : {std::make_pair(0, 333), std::make_pair(333, tokens)}) {
          cache.append(
              exec, ids.back(), 0, Kokkos::subview(keys.view, range, Kokkos::ALL, Kokkos::ALL),
              Kokkos::subview(values.view, range, Kokkos::ALL, Kokkos::ALL),
              Kokkos::subview(score_rows.view, Kokkos::ALL, range), EvictionRule{0.0f, 3, true});
        }
        cache.compact(exec, ids.back(), 0, keep);
        exec.fence();
      }
      kvzap::cache::set_row_path(RowPath::automatic);
      for (int head = 0; head < heads; ++head) {
        const auto expected = cache.host_rows(ids[0], 0, head);
        std::vector<std::int64_t> positions;
        int retained = 0;
        for (int t = 0; t < tokens; ++t) {
          if (t < tokens - 100 && t >= 3 && scores[head][t] < 0) continue;
          if (t < tokens - 100 && host_keep(head, retained++) == 0) continue;
          positions.push_back(t);
        }
        EXPECT_EQ(expected.positions, positions);
        for (std::size_t i = 1; i < ids.size(); ++i) {
          const auto found = cache.host_rows(ids[i], 0, head);
          EXPECT_EQ(found.positions, expected.positions);
          EXPECT_EQ(std::memcmp(found.keys.data(), expected.keys.data(),
                                expected.keys.size() * sizeof(Value)),
                    0);
          EXPECT_EQ(std::memcmp(found.values.data(), expected.values.data(),
                                expected.values.size() * sizeof(Value)),
                    0);
        }
      }
    }
  }
}

TYPED_TEST(Cache, CompactionFreesPagesAndLeavesForksAlone) {
  KVCache cache(DTypeOf<TypeParam>::value, CacheShape{{1}, 8, 1, 4});
  const SequenceId id = cache.add_sequence();
  this->append(cache, id, std::vector<float>(401, 1.0f), EvictionRule::keep_all());
  const SequenceId other = cache.fork(id);
  const auto before = cache.host_rows(other, 0, 0);
  const Kokkos::View<std::uint8_t**, Kokkos::LayoutRight, MemorySpace> keep("keep", 1, 400);
  const auto host = Kokkos::create_mirror_view(keep);
  // The first 10 rows stay, then every fourth.
  for (int i = 0; i < 400; ++i) host(0, i) = i < 10 || i % 4 == 0;
  Kokkos::deep_copy(keep, host);
  const CompactCounts counts = cache.compact(ExecutionSpace{}, id, 0, keep);
  EXPECT_EQ(counts.judged, 400);
  EXPECT_EQ(counts.moved, 97);
  EXPECT_EQ(counts.evicted, 400 - 107);
  EXPECT_EQ(cache.page_list(id, 0, 0).size(), 27u);
  // Pages 0 and 1 are still shared; page 2, which is written after its second row, is not.
  for (int p = 0; p < 3; ++p) {
    EXPECT_EQ(cache.page_list(id, 0, 0)[p] == cache.page_list(other, 0, 0)[p], p < 2);
  }
  EXPECT_EQ(cache.pool().pages_in_use(), 100u + 25u);
  const auto after = cache.host_rows(other, 0, 0);
  EXPECT_EQ(after.positions, before.positions);
  EXPECT_EQ(std::memcmp(after.keys.data(), before.keys.data(),
                        before.keys.size() * sizeof(typename TestFixture::Value)),
            0);
  cache.free_sequence(other);
  EXPECT_EQ(cache.pool().pages_in_use(), 27u);
  EXPECT_GT(cache.trim(), 0u);
  EXPECT_EQ(cache.positions(id, 0, 0).size(), 108u);
}

// Lengths become known when they are asked for, whether or not anyone collects; counts add up until
// someone does.
TYPED_TEST(Cache, DeferredAppendsAreSettledByThoseWhoNeedLengths) {
  using Value = typename TestFixture::Value;
  constexpr int dim = 8, window = 2;
  KVCache cache(DTypeOf<TypeParam>::value, CacheShape{{1, 1}, dim, window, 4});
  const SequenceId id = cache.add_sequence();
  const ExecutionSpace exec;
  const std::vector<std::vector<std::uint64_t>> numbers(2, std::vector<std::uint64_t>(1, 1));
  const auto two = make_rows<Value>(numbers, 1, dim, false, Arrangement::right);
  const auto row = Kokkos::subview(two.view, std::make_pair(0, 1), Kokkos::ALL, Kokkos::ALL);
  const auto step = [&](float score) {
    const auto scores = make_scores({{score}}, Arrangement::right);
    for (int layer : {0, 1}) {
      cache.append_deferred(exec, id, layer, row, row, scores.view, EvictionRule{0.0f, 0, true});
    }
  };
  for (int t = 0; t < 20; ++t) step(t % 4 == 0 ? 1.0f : (t % 4 == 1 ? nan_score : -1.0f));
  EXPECT_EQ(cache.tokens(id, 0), 20);
  EXPECT_EQ(cache.pool().pages_in_use(), 10u);  // as many as 18 rows of each layer could need
  const SequenceId other = cache.fork(id);
  EXPECT_EQ(cache.pool().pages_in_use(), 6u);  // 10 of 18 rows were kept
  EXPECT_EQ(cache.rows(id, 0, 0), 10 + window);
  EXPECT_EQ(cache.positions(other, 1, 0),
            (std::vector<std::int64_t>{0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 18, 19}));
  for (int t = 0; t < 3; ++t) step(1.0f);  // what leaves the ring now: positions 18, 19 and 20
  EXPECT_EQ(cache.positions(other, 1, 0).size(), 12u);
  EXPECT_EQ(cache.positions(id, 1, 0),
            (std::vector<std::int64_t>{0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 22}));
  const AppendCounts counts = cache.collect(id);
  EXPECT_EQ(counts.judged, 2 * 21);
  EXPECT_EQ(counts.evicted, 2 * 10);
  EXPECT_EQ(counts.non_finite, 2 * 5);
  EXPECT_EQ(cache.collect(id).judged, 0);
  expect_error([&] { cache.append_deferred(exec, id, 0, two.view, two.view, {}, {}); },
               {"2 tokens", "expected 1"});
}

// What a decode step takes from the allocators: nothing, unless a page or a slab is needed.
std::size_t n_kokkos_allocations = 0;

TYPED_TEST(Cache, DecodeStepsAllocateNothing) {
  if (kvzap::base::machine().on_device()) GTEST_SKIP() << "kernel launches may allocate";
  using Value = typename TestFixture::Value;
  constexpr int heads = 8, dim = 16, window = 32, warm_up = 240, steps = 200;
  KVCache cache(DTypeOf<TypeParam>::value, CacheShape{{heads}, dim, window, 64});
  const SequenceId id = cache.add_sequence();
  std::vector<std::vector<std::uint64_t>> numbers(1, std::vector<std::uint64_t>(heads, 1));
  const auto rows = make_rows<Value>(numbers, heads, dim, false, Arrangement::right);
  const Kokkos::View<float*, MemorySpace> scores("scores", heads);
  const ExecutionSpace exec;
  const auto step = [&](int t) {
    for (int h = 0; h < heads; ++h) scores(h) = (t + h) % 4 == 0 ? 1.0f : -1.0f;
    const Scores::View view(scores.data(), Kokkos::LayoutStride(heads, 1, 1, 1));
    cache.append(exec, id, 0, rows.view, rows.view, view, EvictionRule{0.0f, 0, true});
  };
  for (int t = 0; t < warm_up; ++t) step(t);
  std::size_t steps_with_pages = 0;
  Kokkos::Tools::Experimental::set_allocate_data_callback(
      [](Kokkos_Profiling_SpaceHandle, const char*, const void*, std::uint64_t) {
        ++n_kokkos_allocations;
      });
  for (int t = warm_up; t < warm_up + steps; ++t) {
    const std::size_t pages = cache.pool().pages_in_use();
    const std::size_t news = kvzap::test::n_news;
    const std::size_t kokkos = n_kokkos_allocations;
    step(t);
    if (cache.pool().pages_in_use() > pages) {
      ++steps_with_pages;
      continue;
    }
    EXPECT_EQ(kvzap::test::n_news, news) << "step " << t;
    EXPECT_EQ(n_kokkos_allocations, kokkos) << "step " << t;
  }
  Kokkos::Tools::Experimental::set_allocate_data_callback(nullptr);
  EXPECT_GT(kvzap::test::n_news, 0u);
  EXPECT_GT(n_kokkos_allocations, 0u);
  EXPECT_GT(steps_with_pages, 0u);
  EXPECT_LE(steps_with_pages, 8u);
}

}  // namespace
