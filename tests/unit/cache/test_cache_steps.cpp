// Steps over several sequences, second decisions, and what happens when memory runs out.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <functional>
#include <iterator>
#include <kvzap/core/cache.hpp>
#include <limits>
#include <map>
#include <new>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "allocations.hpp"
#include "base/machine.hpp"
#include "base/scratch.hpp"
#include "cache/instance_order.hpp"
#include "cache/row_copy.hpp"
#include "unit/temporary_folder.hpp"

namespace {

namespace base = kvzap::base;
namespace cache = kvzap::cache;
using kvzap::AppendCounts;
using kvzap::AppendSpan;
using kvzap::bfloat16;
using kvzap::CacheBytes;
using kvzap::CacheShape;
using kvzap::CompactCounts;
using kvzap::Cutoff;
using kvzap::DTypeOf;
using kvzap::EvictionRule;
using kvzap::EvictOptions;
using kvzap::ExecutionSpace;
using kvzap::KVCache;
using kvzap::MemoryMeter;
using kvzap::MemorySpace;
using kvzap::OutOfMemory;
using kvzap::page_row_bytes;
using kvzap::page_row_values;
using kvzap::PageId;
using kvzap::ring_row_bytes;
using kvzap::RowType;
using kvzap::SequenceId;
using kvzap::StepSpan;
using kvzap::cache::RowPath;
using kvzap::test::expect_error;

constexpr float nan_score = std::numeric_limits<float>::quiet_NaN();

/// Small whole numbers, which every value type holds.
float content(std::uint64_t pair, int dim, bool is_value) {
  return static_cast<float>((pair * 7 + dim * 3 + (is_value ? 101 : 0)) % 251);
}

bool same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

// ---------------------------------------------------------------------------------------------
// What the cache promises, row by row.

struct Pair {
  std::int64_t position;
  std::uint64_t number;
  float score;
  std::vector<std::int64_t> shifts = {};  // by which compact_positions has moved it
};

float frequency(int j) { return j == 0 ? 1.0f : 0.03f / static_cast<float>(j); }

/// What rows of five contents or fewer may be off by, quantised up to three times: half a scale for
/// each dimension, of a norm of up to 560, with 8 bits; less than a third of that norm with 4 bits;
/// most of it with 3 bits, and all of it with 2.
float packing_error(RowType type) {
  constexpr float by_type[] = {0, 15, 180, 400, 560};  // wide, q8, q4, q3, q2
  return by_type[static_cast<int>(type)];
}

/// A pair's key after all that compact_positions did to it.
template <class Value>
std::vector<Value> key_of(const Pair& pair, int dim) {
  std::vector<Value> key;
  for (int d = 0; d < dim; ++d) key.push_back(Value(content(pair.number, d, false)));
  for (const std::int64_t shift : pair.shifts) {
    for (int j = 0; j < dim / 2; ++j) {
      const float angle = static_cast<float>(shift) * frequency(j);
      const float x = float(key[j]), y = float(key[j + dim / 2]);
      key[j] = Value(x * std::cos(angle) - y * std::sin(angle));
      key[j + dim / 2] = Value(y * std::cos(angle) + x * std::sin(angle));
    }
  }
  return key;
}

struct ModelHead {
  std::vector<Pair> retained;
  std::deque<Pair> ring;
};

struct ModelLayer {
  std::int64_t tokens = 0;
  std::vector<ModelHead> heads;
  std::vector<float> state = {};
};

struct Model {
  std::vector<ModelLayer> layers;
  AppendCounts counts;
};

void add(AppendCounts& sum, const AppendCounts& counts) {
  sum.judged += counts.judged;
  sum.evicted += counts.evicted;
  sum.non_finite += counts.non_finite;
}

bool equal(const AppendCounts& a, const AppendCounts& b) {
  return a.judged == b.judged && a.evicted == b.evicted && a.non_finite == b.non_finite;
}

/// Rows for an append, (row, head), and their content in views.
template <class Value>
struct Batch {
  using View = Kokkos::View<Value***, Kokkos::LayoutRight, MemorySpace>;
  std::vector<std::vector<std::uint64_t>> numbers;
  std::vector<std::vector<float>> values_of_scores;
  View keys, values;
  Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> scores;  // (head, row)
};

/// One cache beside its model.
template <class Parameter>
class World {
 public:
  using Value = Parameter;
  using Cache = KVCache;

  World(CacheShape shape, unsigned seed)
      : m_cache(DTypeOf<Value>::value, shape, &m_meter), m_random(seed) {}
  ~World() {
    cache::set_row_path(RowPath::automatic);
    m_saved.clear();
  }

  Cache& cache() { return m_cache; }
  std::map<SequenceId, Model>& model() { return m_model; }
  int below(int bound) { return static_cast<int>(m_random() % static_cast<unsigned>(bound)); }
  int layers() const { return static_cast<int>(m_cache.shape().heads.size()); }

  SequenceId add_sequence() {
    const SequenceId id = m_cache.add_sequence();
    Model model;
    for (int l = 0; l < layers(); ++l) {
      model.layers.push_back({0, std::vector<ModelHead>(m_cache.shape().heads[l])});
      model.layers.back().state.resize(state_values(l), 0.0f);
    }
    m_model[id] = model;
    return id;
  }

  Batch<Value> batch(int layer, std::int64_t rows) {
    const int heads = m_cache.shape().heads[layer];
    const int dim = m_cache.shape().head_dim;
    Batch<Value> batch;
    batch.keys = typename Batch<Value>::View("keys", rows, heads, dim);
    batch.values = typename Batch<Value>::View("values", rows, heads, dim);
    batch.scores = decltype(batch.scores)("scores", heads, rows);
    const auto keys = Kokkos::create_mirror_view(batch.keys);
    const auto values = Kokkos::create_mirror_view(batch.values);
    const auto scores = Kokkos::create_mirror_view(batch.scores);
    for (std::int64_t r = 0; r < rows; ++r) {
      batch.numbers.emplace_back();
      batch.values_of_scores.emplace_back();
      for (int h = 0; h < heads; ++h) {
        batch.numbers[r].push_back(m_next_number++);
        batch.values_of_scores[r].push_back(random_score());
        scores(h, r) = batch.values_of_scores[r][h];
        for (int d = 0; d < dim; ++d) {
          keys(r, h, d) = Value(content(batch.numbers[r][h], d, false));
          values(r, h, d) = Value(content(batch.numbers[r][h], d, true));
        }
      }
    }
    Kokkos::deep_copy(batch.keys, keys);
    Kokkos::deep_copy(batch.values, values);
    Kokkos::deep_copy(batch.scores, scores);
    return batch;
  }

  /// Few values, so that ties are many.
  float random_score() {
    const int choice = below(20);
    if (choice == 0) return nan_score;
    if (choice == 1) return std::numeric_limits<float>::infinity();
    return static_cast<float>(below(6)) - 3.0f;
  }

  EvictionRule random_rule() {
    if (below(5) == 0) return EvictionRule::keep_all();
    return {static_cast<float>(below(4)) - 2.0f, below(3), true};
  }

  AppendCounts append_to_model(const AppendSpan& span, int layer_index, const Batch<Value>& batch) {
    Model& model = m_model.at(span.sequence);
    ModelLayer& layer = model.layers[layer_index];
    const std::int64_t ring_rows = m_cache.shape().ring_rows(layer_index);
    const bool restarts = m_cache.shape().own_ring(layer_index).restarts;
    AppendCounts counts;
    for (std::int64_t r = span.first_row; r < span.first_row + span.rows; ++r) {
      for (std::size_t h = 0; h < layer.heads.size(); ++h) {
        ModelHead& head = layer.heads[h];
        head.ring.push_back({layer.tokens, batch.numbers[r][h],
                             span.scored ? batch.values_of_scores[r][h] : nan_score});
        if (head.ring.size() <= static_cast<std::size_t>(ring_rows)) continue;
        const Pair pair = head.ring.front();
        head.ring.pop_front();
        if (!has_pages(layer_index)) continue;
        bool evicted = false;
        if (span.rule.judges()) {
          ++counts.judged;
          if (!std::isfinite(pair.score)) {
            ++counts.non_finite;
          } else if (pair.position >= span.rule.sink && pair.score < span.rule.threshold) {
            evicted = true;
            ++counts.evicted;
          }
        }
        if (!evicted) head.retained.push_back(pair);
      }
      ++layer.tokens;
      if (!restarts || layer.tokens % ring_rows != 0) continue;
      for (ModelHead& head : layer.heads) head.ring.clear();
    }
    add(model.counts, counts);
    return counts;
  }

  bool has_pages(int layer) const { return m_cache.shape().has_pages(layer); }
  std::size_t state_values(int layer) const {
    const CacheShape& shape = m_cache.shape();
    return shape.has_state(layer) ? shape.states[layer].heads * shape.states[layer].values : 0;
  }

  /// Sequences in random order, each at most once.
  std::vector<SequenceId> some_sequences() {
    std::vector<SequenceId> ids;
    for (const auto& entry : m_model) ids.push_back(entry.first);
    std::shuffle(ids.begin(), ids.end(), m_random);
    ids.resize(1 + below(static_cast<int>(ids.size())));
    return ids;
  }

  /// Spans with gaps between their rows.
  std::vector<AppendSpan> spans_of(const std::vector<SequenceId>& ids,
                                   const std::vector<std::int64_t>& rows, std::int64_t& total) {
    std::vector<AppendSpan> spans;
    total = 0;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      total += below(2);
      spans.push_back({ids[i], total, rows[i], random_rule(), below(4) != 0});
      total += rows[i];
    }
    return spans;
  }

  std::int64_t random_rows() {
    const int window = m_cache.shape().window;
    const int choice = below(10);
    return choice < 5 ? 1 : choice < 8 ? below(window + 2) : below(3 * window);
  }

  void choose_path() {
    cache::set_row_path(std::vector<RowPath>{RowPath::automatic, RowPath::portable,
                                             RowPath::ordinary, RowPath::streaming}[below(4)]);
  }

  void append_batch() {
    const auto ids = some_sequences();
    std::vector<std::int64_t> rows(ids.size());
    for (auto& n : rows) n = random_rows();
    append_layer(below(layers()), ids, rows);
  }

  /// Appends in one of the possible ways.
  void append_layer(int layer, std::vector<SequenceId> ids, std::vector<std::int64_t> rows) {
    if (m_cache.shape().has_state(layer) || !m_cache.shape().has_rows(layer)) {
      for (std::size_t i = 0; i < ids.size(); ++i) change_state(ids[i], layer, rows[i]);
    }
    if (!m_cache.shape().has_rows(layer)) return;
    for (std::size_t i = 0; i < ids.size();) {
      if (m_model.at(ids[i]).layers[layer].tokens > 0 || !has_pages(layer) || below(3) == 0) {
        ++i;
        continue;
      }
      append_kept(ids[i], layer, rows[i]);
      ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(i));
      rows.erase(rows.begin() + static_cast<std::ptrdiff_t>(i));
    }
    choose_path();
    const ExecutionSpace exec;
    std::int64_t total = 0;
    const auto spans = spans_of(ids, rows, total);
    const auto rows_of = batch(layer, total);
    AppendCounts expected;
    for (const auto& span : spans) add(expected, append_to_model(span, layer, rows_of));
    const bool defers = std::all_of(rows.begin(), rows.end(), [](auto n) { return n == 1; });
    if (defers && below(2) == 0) {
      m_cache.collect(ids);
      m_cache.append_deferred(exec, spans, layer, rows_of.keys, rows_of.values, rows_of.scores);
      if (below(2) == 0) return;
      EXPECT_TRUE(equal(m_cache.collect(ids), expected));
    } else {
      EXPECT_TRUE(
          equal(m_cache.append(exec, spans, layer, rows_of.keys, rows_of.values, rows_of.scores),
                expected));
    }
  }

  /// Lets a layer's state take up tokens.
  void change_state(SequenceId id, int layer_index, std::int64_t tokens) {
    const bool has_rows = m_cache.shape().has_rows(layer_index);
    ModelLayer& layer = m_model.at(id).layers[layer_index];
    // In parts, as blocks of a step pass.
    for (const std::int64_t part : {tokens / 2, tokens - tokens / 2}) {
      for (std::int64_t t = 0; t < part; ++t) {
        for (float& value : layer.state) value = 0.5f * value + static_cast<float>(below(100));
      }
      if (!layer.state.empty()) {
        const auto state = m_cache.state(ExecutionSpace(), id, layer_index).after;
        Kokkos::deep_copy(state,
                          Kokkos::View<const float**, Kokkos::LayoutRight, Kokkos::HostSpace>(
                              layer.state.data(), state.extent(0), state.extent(1)));
      }
      m_cache.count_tokens(id, layer_index, part);
    }
    m_state_changes += tokens;
    if (has_rows) return;
    layer.tokens += tokens;
    const auto rows = batch(layer_index, 1);
    expect_error(
        [&] {
          m_cache.append(ExecutionSpace(), id, layer_index, rows.keys, rows.values, rows.scores,
                         {});
        },
        {"takes no rows"});
  }

  using Flags = Kokkos::View<std::uint8_t**, Kokkos::LayoutLeft, MemorySpace>;

  /// Flags of any non-zero value, and others after a head's rows.
  Flags flags_of(const std::vector<std::vector<bool>>& keep, std::size_t columns) {
    const Flags flags("flags", keep.size(), columns);
    const auto host = Kokkos::create_mirror_view(flags);
    for (std::size_t h = 0; h < keep.size(); ++h) {
      for (std::size_t i = 0; i < columns; ++i) {
        const bool stays = i < keep[h].size() ? keep[h][i] : below(2) == 0;
        host(h, i) = stays ? static_cast<std::uint8_t>(1 + below(255)) : 0;
      }
    }
    Kokkos::deep_copy(flags, host);
    return flags;
  }

  /// Whether each of so many rows stays: all, none, or any.
  std::vector<bool> random_flags(std::size_t rows) {
    const int mode = below(5);
    std::vector<bool> keep;
    for (std::size_t i = 0; i < rows; ++i) keep.push_back(mode == 0 || (mode > 1 && below(2) == 0));
    return keep;
  }

  AppendCounts append_kept_to_model(SequenceId id, int layer_index, const Batch<Value>& batch,
                                    const std::vector<std::vector<bool>>& keep, bool scored) {
    Model& model = m_model.at(id);
    ModelLayer& layer = model.layers[layer_index];
    AppendCounts counts;
    layer.tokens = static_cast<std::int64_t>(batch.numbers.size());
    for (std::size_t h = 0; h < layer.heads.size(); ++h) {
      for (std::size_t r = 0; r < batch.numbers.size(); ++r) {
        const float score = scored ? batch.values_of_scores[r][h] : nan_score;
        ++counts.judged;
        counts.evicted += keep[h][r] ? 0 : 1;
        if (!keep[h][r]) continue;
        counts.non_finite += scored && !std::isfinite(score) ? 1 : 0;
        layer.heads[h].retained.push_back(
            {static_cast<std::int64_t>(r), batch.numbers[r][h], score});
      }
    }
    add(model.counts, counts);
    return counts;
  }

  /// Two thirds of so many rows of each head, the last one never.
  std::vector<std::vector<bool>> some_flags(int layer, std::int64_t rows) const {
    std::vector<std::vector<bool>> keep(m_cache.shape().heads[layer]);
    for (auto& head : keep) {
      for (std::int64_t r = 0; r < rows; ++r) head.push_back(r % 3 != 1 && r != rows - 1);
    }
    return keep;
  }

  void append_kept(SequenceId id, int layer, std::int64_t rows) {
    choose_path();
    const auto batch = this->batch(layer, rows);
    const bool scored = below(4) != 0;
    std::vector<std::vector<bool>> keep;
    for (int h = 0; h < m_cache.shape().heads[layer]; ++h) keep.push_back(random_flags(rows));
    const auto expected = append_kept_to_model(id, layer, batch, keep, scored);
    const AppendCounts found = m_cache.append_kept(
        ExecutionSpace(), id, layer, batch.keys, batch.values,
        scored ? typename Cache::ScoresView(batch.scores) : typename Cache::ScoresView(),
        flags_of(keep, rows));
    EXPECT_TRUE(equal(found, expected));
    if (rows == 0) return;
    ++m_kept_appends;
    if (m_cache.in_step() && rows <= m_cache.shape().window) ++m_kept_within_window;
  }

  void step(bool cancel) {
    const auto ids = some_sequences();
    const auto before = m_model;
    std::vector<std::int64_t> rows(ids.size());
    std::vector<StepSpan> spans;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      rows[i] = random_rows();
      spans.push_back({ids[i], rows[i]});
    }
    const std::size_t pages = (settle(), m_cache.pool().pages_in_use());
    m_cache.begin_step(ExecutionSpace(), spans);
    m_next_states = std::max(m_next_states, spans.size());
    const int cut = cancel ? below(layers() + 1) : layers();
    for (int l = 0; l < cut; ++l) {
      // All at once, or in two calls.
      std::vector<std::int64_t> now(rows), then(rows.size(), 0);
      if (below(3) == 0) {
        for (std::size_t i = 0; i < rows.size(); ++i) {
          then[i] = below(static_cast<int>(rows[i]) + 1);
          now[i] -= then[i];
        }
      }
      append_layer(l, ids, now);
      if (now != rows) append_layer(l, ids, then);
    }
    if (cancel) {
      m_cache.cancel_step();
      m_model = before;
      EXPECT_EQ(m_cache.pool().pages_in_use(), pages);
    } else {
      m_cache.end_step();
    }
  }

  void settle() {
    for (const auto& entry : m_model) m_cache.collect(entry.first);
  }

  void evict(SequenceId id, int layer_index) {
    ModelLayer& layer = m_model.at(id).layers[layer_index];
    if (!has_pages(layer_index)) {
      const std::vector<Cutoff> cutoffs(layer.heads.size());
      expect_error([&] { m_cache.evict(ExecutionSpace(), id, layer_index, cutoffs); },
                   {"has no pages"});
      return;
    }
    const EvictOptions options{below(3), below(4)};
    std::vector<Cutoff> cutoffs;
    CompactCounts expected;
    std::vector<std::vector<bool>> keeps;
    bool ring_goes = false;
    for (ModelHead& head : layer.heads) {
      const float score = static_cast<float>(below(6)) - 3.5f + (below(3) != 0 ? 0.5f : 0.0f);
      cutoffs.push_back({score, below(4)});
      std::int64_t ties = 0;
      std::vector<bool> keep;
      const auto judge = [&](const Pair& pair) {
        const bool tie = pair.score == score;
        const bool finite = std::isfinite(pair.score);
        keep.push_back(!finite || pair.score > score || pair.position < options.sink ||
                       pair.position >= layer.tokens - options.recent ||
                       (tie && ties < cutoffs.back().ties));
        ties += tie ? 1 : 0;
        ++expected.judged;
        expected.evicted += keep.back() ? 0 : 1;
        expected.non_finite += finite ? 0 : 1;
        return keep.back();
      };
      for (const Pair& pair : head.retained) judge(pair);
      for (const Pair& pair : head.ring) ring_goes = !judge(pair) || ring_goes;
      keeps.push_back(keep);
    }
    for (std::size_t h = 0; h < layer.heads.size(); ++h) {
      ModelHead& head = layer.heads[h];
      std::vector<Pair> left;
      for (std::size_t i = 0; i < head.retained.size(); ++i) {
        if (keeps[h][i]) left.push_back(head.retained[i]);
      }
      if (ring_goes) {
        for (std::size_t i = 0; i < head.ring.size(); ++i) {
          if (keeps[h][head.retained.size() + i]) left.push_back(head.ring[i]);
        }
        head.ring.clear();
      }
      head.retained = left;
    }
    m_rings_cut += ring_goes ? 1 : 0;
    choose_path();
    const CompactCounts found = m_cache.evict(ExecutionSpace(), id, layer_index, cutoffs, options);
    EXPECT_EQ(found.judged, expected.judged);
    EXPECT_EQ(found.evicted, expected.evicted);
    EXPECT_EQ(found.non_finite, expected.non_finite);
    m_evicted += expected.evicted;
    m_saved.erase(id);
  }

  /// Flags in place of cutoffs.
  void evict_flagged(SequenceId id, int layer_index) {
    if (!has_pages(layer_index)) {
      expect_error([&] { m_cache.evict(ExecutionSpace(), id, layer_index, flags_of({}, 0)); },
                   {"has no pages"});
      return;
    }
    std::vector<std::vector<bool>> keep;
    for (const ModelHead& head : m_model.at(id).layers[layer_index].heads) {
      keep.push_back(random_flags(head.retained.size() + head.ring.size()));
      // Often rows of pages alone go.
      if (below(2) == 0) continue;
      for (std::size_t i = head.retained.size(); i < keep.back().size(); ++i) keep.back()[i] = true;
    }
    evict_flagged(id, layer_index, keep);
  }

  void evict_flagged(SequenceId id, int layer_index, const std::vector<std::vector<bool>>& keep) {
    ModelLayer& layer = m_model.at(id).layers[layer_index];
    CompactCounts expected;
    std::size_t columns = 0;
    bool ring_goes = false;
    for (std::size_t h = 0; h < layer.heads.size(); ++h) {
      columns = std::max(columns, keep[h].size());
      for (std::size_t i = layer.heads[h].retained.size(); i < keep[h].size(); ++i) {
        ring_goes = ring_goes || !keep[h][i];
      }
    }
    for (std::size_t h = 0; h < layer.heads.size(); ++h) {
      ModelHead& head = layer.heads[h];
      std::vector<Pair> left;
      std::deque<Pair> ring;
      const std::size_t retained = head.retained.size();
      for (std::size_t i = 0; i < keep[h].size(); ++i) {
        const Pair& pair = i < retained ? head.retained[i] : head.ring[i - retained];
        ++expected.judged;
        expected.evicted += keep[h][i] ? 0 : 1;
        if (!keep[h][i]) continue;
        expected.non_finite += std::isfinite(pair.score) ? 0 : 1;
        if (i < retained || ring_goes) {
          expected.moved += i >= retained || left.size() != i ? 1 : 0;
          left.push_back(pair);
        } else {
          ring.push_back(pair);
        }
      }
      head.retained = left;
      head.ring = ring;
    }
    m_rings_cut += ring_goes ? 1 : 0;
    choose_path();
    const CompactCounts found =
        m_cache.evict(ExecutionSpace(), id, layer_index, flags_of(keep, columns + below(3)));
    EXPECT_EQ(found.judged, expected.judged);
    EXPECT_EQ(found.evicted, expected.evicted);
    EXPECT_EQ(found.moved, expected.moved);
    EXPECT_EQ(found.non_finite, expected.non_finite);
    m_saved.erase(id);
  }

  /// Leaves the same number of rows of each head, none in a ring, if there are enough.
  bool make_even(SequenceId id) {
    Model& model = m_model.at(id);
    std::size_t least = std::numeric_limits<std::size_t>::max();
    for (const ModelLayer& layer : model.layers) {
      for (const ModelHead& head : layer.heads) {
        least = std::min(least, head.retained.size() + head.ring.size());
      }
    }
    if (least == 0) return false;
    const std::size_t left = below(static_cast<int>(least));
    for (int l = 0; l < layers(); ++l) {
      std::vector<std::vector<bool>> keep;
      for (const ModelHead& head : model.layers[l].heads) {
        const std::size_t rows = head.retained.size() + head.ring.size();
        // The newest row of the first head goes, so that no ring remains.
        const std::size_t any_of = keep.empty() ? rows - 1 : rows;
        std::vector<bool> flags(any_of, false);
        std::fill_n(flags.begin(), left, true);
        std::shuffle(flags.begin(), flags.end(), m_random);
        flags.resize(rows, false);
        keep.push_back(flags);
      }
      evict_flagged(id, l, keep);
    }
    return true;
  }

  Kokkos::View<const float*, MemorySpace> frequencies() const {
    const Kokkos::View<float*, MemorySpace> view("frequencies", m_cache.shape().head_dim / 2);
    const auto host = Kokkos::create_mirror_view(view);
    for (std::size_t j = 0; j < host.extent(0); ++j) host(j) = frequency(static_cast<int>(j));
    Kokkos::deep_copy(view, host);
    return view;
  }

  void compact_positions_model(SequenceId id) {
    for (ModelLayer& layer : m_model.at(id).layers) {
      for (ModelHead& head : layer.heads) {
        ASSERT_TRUE(head.ring.empty());
        for (std::size_t i = 0; i < head.retained.size(); ++i) {
          Pair& pair = head.retained[i];
          const std::int64_t shift = static_cast<std::int64_t>(i) - pair.position;
          if (shift != 0) pair.shifts.push_back(shift);
          pair.position = static_cast<std::int64_t>(i);
        }
      }
    }
    const auto& heads = m_model.at(id).layers[0].heads;
    for (ModelLayer& layer : m_model.at(id).layers) {
      layer.tokens = static_cast<std::int64_t>(heads[0].retained.size());
    }
  }

  void compact_positions(SequenceId id) {
    if (m_cache.shape().has_layers_without_pages()) {
      expect_error([&] { m_cache.compact_positions(ExecutionSpace(), id, frequencies(), 0); },
                   {"compact_positions"});
      return;
    }
    if (m_cache.shape().head_dim % 2 != 0) {
      expect_error([&] { m_cache.compact_positions(ExecutionSpace(), id, frequencies()); },
                   {"half of head_dim"});
      return;
    }
    bool fits = true;
    const auto& layers = m_model.at(id).layers;
    for (const ModelLayer& layer : layers) {
      for (const ModelHead& head : layer.heads) {
        fits =
            fits && head.ring.empty() && head.retained.size() == layers[0].heads[0].retained.size();
      }
    }
    if (!fits) {
      expect_error([&] { m_cache.compact_positions(ExecutionSpace(), id, frequencies()); },
                   {"compact_positions"});
      if (!make_even(id)) return;
    }
    compact_positions_model(id);
    const auto rows = static_cast<std::int64_t>(layers[0].heads[0].retained.size());
    expect_error([&] { m_cache.compact_positions(ExecutionSpace(), id, frequencies(), rows + 1); },
                 {std::to_string(rows), std::to_string(rows + 1)});
    EXPECT_EQ(
        m_cache.compact_positions(ExecutionSpace(), id, frequencies(), below(2) == 0 ? rows : -1),
        rows);
    m_saved.erase(id);
    m_compacted += rows > 0 ? 1 : 0;
  }

  void set_scores(SequenceId id, int layer_index) {
    ModelLayer& layer = m_model.at(id).layers[layer_index];
    std::size_t longest = 0;
    for (const auto& head : layer.heads) {
      longest = std::max(longest, head.retained.size() + head.ring.size());
    }
    const Kokkos::View<float**, Kokkos::LayoutLeft, MemorySpace> scores(
        "scores", layer.heads.size(), longest + 2);
    const auto host = Kokkos::create_mirror_view(scores);
    for (std::size_t h = 0; h < layer.heads.size(); ++h) {
      std::size_t i = 0;
      for (Pair& pair : layer.heads[h].retained) host(h, i++) = pair.score = random_score();
      for (Pair& pair : layer.heads[h].ring) host(h, i++) = pair.score = random_score();
    }
    Kokkos::deep_copy(scores, host);
    m_cache.set_row_scores(ExecutionSpace(), id, layer_index, scores);
    m_saved.erase(id);  // whose model has the old scores
  }

  void restore(SequenceId id) {
    auto& saved = m_saved[id];
    const std::size_t index = below(static_cast<int>(saved.size()));
    m_cache.restore(ExecutionSpace(), id, saved[index].first);
    m_model.at(id) = saved[index].second;
    while (saved.size() > index + 1) saved.pop_back();
  }

  std::string operate() {
    if (m_model.empty()) return add_sequence(), "add";
    auto it = m_model.begin();
    std::advance(it, below(static_cast<int>(m_model.size())));
    const SequenceId id = it->first;
    const int layer = below(layers());
    const int choice = below(100);
    if (choice < 4 && m_model.size() < 5) return add_sequence(), "add";
    if (choice < 10 && m_model.size() < 6) {
      const SequenceId copy = m_cache.fork(id);
      const Model model = m_model.at(id);
      return m_model[copy] = model, "fork";
    }
    if (choice < 15 || it->second.layers[0].tokens > 120) {
      m_cache.free_sequence(id);
      m_saved.erase(id);
      m_model.erase(id);
      return "free";
    }
    if (choice < 22) {
      m_saved[id].emplace_back(m_cache.checkpoint(id), m_model.at(id));
      return "checkpoint";
    }
    if (choice < 28 && !m_saved[id].empty()) return restore(id), "restore";
    if (choice < 34) return evict(id, layer), "evict";
    if (choice < 38) return evict_flagged(id, layer), "evict by flags";
    if (choice < 39) return compact_positions(id), "close up";
    if (choice < 42) return set_scores(id, layer), "set scores";
    if (choice < 62) return step(false), "step";
    if (choice < 76) return step(true), "cancelled step";
    if (choice < 78) return m_next_states = 0, m_cache.trim(), "trim";
    return append_batch(), "append";
  }

  void verify() {
    const CacheShape& shape = m_cache.shape();
    std::map<PageId, int> holders;
    std::size_t live = 0;
    for (const auto& [id, model] : m_model) {
      ASSERT_TRUE(equal(m_cache.counts(id), model.counts));
      for (int l = 0; l < layers(); ++l) {
        const ModelLayer& layer = model.layers[l];
        SCOPED_TRACE("sequence " + std::to_string(id) + ", layer " + std::to_string(l));
        ASSERT_EQ(m_cache.tokens(id, l), layer.tokens);
        ASSERT_NO_FATAL_FAILURE(verify_state(id, l, layer));
        for (std::size_t h = 0; h < layer.heads.size(); ++h) {
          const ModelHead& head = layer.heads[h];
          const auto& list = m_cache.page_list(id, l, static_cast<int>(h));
          ASSERT_EQ(list.size(), (head.retained.size() + shape.page_rows - 1) / shape.page_rows);
          for (PageId page : list) ++holders[page];
          const auto found = m_cache.host_rows(id, l, static_cast<int>(h));
          std::vector<Pair> pairs(head.retained);
          pairs.insert(pairs.end(), head.ring.begin(), head.ring.end());
          live +=
              head.retained.size() * page_row_values(shape.head_dim, sizeof(Value), shape.format) +
              head.ring.size() *
                  page_row_values(shape.head_dim, sizeof(Value), shape.format.wide());
          ASSERT_EQ(found.positions.size(), pairs.size());
          ASSERT_EQ(m_cache.rows(id, l, static_cast<int>(h)), std::int64_t(pairs.size()));
          for (std::size_t r = 0; r < pairs.size(); ++r) {
            ASSERT_EQ(found.positions[r], pairs[r].position) << "row " << r;
            ASSERT_TRUE(same(found.scores[r], pairs[r].score)) << "row " << r;
            const auto key = key_of<Value>(pairs[r], shape.head_dim);
            // Another device's sines round a few of the keys that compact_positions has turned
            // otherwise.
            const float error = packing_error(shape.format.keys) + (pairs[r].shifts.empty() ? 0.0f
                                                                    : sizeof(Value) == 4    ? 1e-2f
                                                                                            : 4.0f);
            for (int d = 0; d < shape.head_dim; ++d) {
              const std::size_t at = r * shape.head_dim + d;
              ASSERT_NEAR(float(found.keys[at]), float(key[d]), error);
              // Values that an append passes count only if rows have any.
              const bool is_key = shape.format.values_are_keys;
              ASSERT_NEAR(float(found.values[at]),
                          is_key ? float(key[d]) : content(pairs[r].number, d, true),
                          is_key ? error : packing_error(shape.format.values));
            }
          }
        }
        ASSERT_NO_FATAL_FAILURE(verify_scores(id, l, layer));
      }
    }
    ASSERT_EQ(holders.size(), m_cache.pool().pages_in_use());
    for (const auto& [page, count] : holders) {
      ASSERT_EQ(m_cache.pool().reference_count(page), count) << "page " << page;
    }
    std::size_t ring_rows = 0;
    for (int l = 0; l < layers(); ++l) ring_rows += shape.heads[l] * shape.ring_rows(l);
    std::size_t rings = ring_rows * ring_row_bytes(shape.head_dim, sizeof(Value), shape.format);
    for (int l = 0; l < layers(); ++l) rings += state_values(l) * sizeof(float);
    std::size_t checkpoints = 0;
    for (const auto& [id, list] : m_saved) checkpoints += list.size();
    const CacheBytes bytes = m_cache.bytes();
    ASSERT_EQ(bytes.live, live);
    std::size_t states = 0;
    for (int l = 0; l < layers(); ++l) states += state_values(l) * sizeof(float);
    ASSERT_EQ(bytes.allocated,
              m_cache.pool().allocated_bytes() + m_model.size() * rings + m_next_states * states);
    ASSERT_EQ(m_meter.current(), bytes.allocated + checkpoints * rings);
  }

  void verify_state(SequenceId id, int layer_index, const ModelLayer& layer) {
    if (!m_cache.shape().has_state(layer_index)) {
      expect_error([&] { m_cache.state(ExecutionSpace(), id, layer_index); }, {"has no state"});
      return;
    }
    const auto state = Kokkos::create_mirror_view_and_copy(
        Kokkos::HostSpace{}, m_cache.state(ExecutionSpace(), id, layer_index).before);
    ASSERT_EQ(state.size(), layer.state.size());
    for (std::size_t i = 0; i < layer.state.size(); ++i) {
      ASSERT_EQ(state.data()[i], layer.state[i]) << "value " << i;
    }
  }

  void verify_scores(SequenceId id, int layer_index, const ModelLayer& layer) {
    std::size_t longest = 0;
    for (const auto& head : layer.heads) {
      longest = std::max(longest, head.retained.size() + head.ring.size());
    }
    if (longest == 0) return;
    const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> scores(
        "scores", layer.heads.size(), longest);
    const Kokkos::View<std::int64_t**, Kokkos::LayoutLeft, MemorySpace> positions(
        "positions", layer.heads.size(), longest);
    const ExecutionSpace exec;
    m_cache.row_scores(exec, id, layer_index, scores, positions);
    exec.fence();
    const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, scores);
    const auto at = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, positions);
    for (std::size_t h = 0; h < layer.heads.size(); ++h) {
      std::size_t i = 0;
      const auto check = [&](const Pair& pair) {
        ASSERT_TRUE(same(host(h, i), pair.score));
        ASSERT_EQ(at(h, i), pair.position);
        ++i;
      };
      for (const Pair& pair : layer.heads[h].retained) ASSERT_NO_FATAL_FAILURE(check(pair));
      for (const Pair& pair : layer.heads[h].ring) ASSERT_NO_FATAL_FAILURE(check(pair));
    }
  }

  int rings_cut() const { return m_rings_cut; }
  std::int64_t evicted() const { return m_evicted; }
  int kept_appends() const { return m_kept_appends; }
  int kept_within_window() const { return m_kept_within_window; }
  int compacted() const { return m_compacted; }
  std::int64_t state_changes() const { return m_state_changes; }
  std::map<SequenceId, std::vector<std::pair<typename Cache::Checkpoint, Model>>>& saved() {
    return m_saved;
  }

 private:
  MemoryMeter m_meter;
  Cache m_cache;
  std::mt19937 m_random;
  std::map<SequenceId, Model> m_model;
  std::map<SequenceId, std::vector<std::pair<typename Cache::Checkpoint, Model>>> m_saved;
  std::uint64_t m_next_number = 1;
  int m_rings_cut = 0;
  std::int64_t m_evicted = 0;
  int m_kept_appends = 0;
  int m_kept_within_window = 0;  // in steps
  int m_compacted = 0;
  std::int64_t m_state_changes = 0;
  std::size_t m_next_states = 0;  // that the cache has for steps
};

template <class Parameter>
class CacheSteps : public ::testing::Test {};
using Values = ::testing::Types<float, bfloat16>;
TYPED_TEST_SUITE(CacheSteps, Values);

TYPED_TEST(CacheSteps, RandomOperationsAgreeWithAModel) {
  // Layers with pages alone, then beside own rings (windows of two sizes, and chunks) and states;
  // quantised rows; rows whose values are their keys.
  const CacheShape shapes[] = {
      {{2, 0, 1}, 4, 3, 2, {}},
      {{1, 2}, 5, 5, 4, {}},
      {{3}, 4, 1, 1, {}},
      {{2, 1, 2, 1}, 4, 3, 2, {{7, false}, {}, {}, {2, false}}},
      {{1, 2, 2}, 5, 5, 4, {{6, true}, {5, false}, {}}},
      {{2, 1}, 4, 3, 2, {{1, true}, {1, false}}},
      {{2, 0, 1}, 4, 3, 2, {}, {{3, 5}, {1, 2}, {}}},
      {{1, 2, 2}, 5, 5, 4, {{}, {4, false}, {}}, {{2, 7}, {}, {}}},
      {{1, 1}, 4, 3, 2, {}, {{}, {0, 6}}},
      {{2, 1, 1}, 4, 3, 2, {}, {{3, 5, true}, {0, 0, false, true}, {1, 2}}},
      {{1, 2}, 5, 5, 4, {{}, {4, false}}, {{2, 7, true}, {}}},
      {{2, 0, 1}, 4, 3, 2, {}, {}, {RowType::q8, RowType::q8}},
      {{1, 2}, 5, 5, 4, {}, {}, {RowType::q4, RowType::q8}},
      {{3}, 4, 2, 1, {}, {}, {RowType::q8, RowType::q4}},
      {{2, 1, 2, 1}, 4, 3, 2, {{7, false}, {}, {}, {2, false}}, {}, {RowType::q8, RowType::q8}},
      {{2, 0, 1}, 4, 3, 2, {}, {}, {RowType::wide, RowType::wide, true}},
      {{1, 2, 2}, 5, 5, 4, {{6, true}, {}, {}}, {}, {RowType::wide, RowType::wide, true}},
      {{3}, 4, 2, 1, {}, {}, {RowType::q8, RowType::q8, true}},
      {{1, 2}, 5, 5, 4, {}, {}, {RowType::q4, RowType::q4, true}},
      {{2, 0, 1}, 4, 3, 2, {}, {}, {RowType::q3, RowType::q2}},
      {{1, 2}, 5, 5, 4, {}, {}, {RowType::q2, RowType::q4}},
      {{3}, 4, 2, 1, {}, {}, {RowType::q3, RowType::q3, true}}};
  unsigned seed = 40;
  for (const CacheShape& shape : shapes) {
    World<TypeParam> world(shape, ++seed);
    for (int i = 0; i < 4000; ++i) {
      std::string what;
      ASSERT_NO_THROW(what = world.operate()) << "operation " << i;
      // Not always, so that deferred appends meet operations before anyone has asked for lengths.
      if (i % 3 != 0) continue;
      SCOPED_TRACE("seed " + std::to_string(seed) + ", after operation " + std::to_string(i) +
                   ", " + what);
      ASSERT_NO_FATAL_FAILURE(world.verify());
    }
    if (!shape.states.empty()) {
      EXPECT_GT(world.state_changes(), 500);
    }
    if (shape.has_layers_without_pages()) continue;
    EXPECT_GT(world.rings_cut(), 0);
    EXPECT_GT(world.evicted(), 0);
    EXPECT_GT(world.kept_appends(), 50);
    EXPECT_GT(world.kept_within_window(), 10);
    if (shape.head_dim % 2 == 0) {
      EXPECT_GT(world.compacted(), 5);
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Memory runs out at the n-th allocation, for every n.

std::size_t allocations_until_failure = 0;

void count_down(std::size_t) {
  if (allocations_until_failure > 0 && --allocations_until_failure == 0) throw std::bad_alloc();
}

void always_fail(std::size_t) { throw std::bad_alloc(); }

/// Calls `operation` with the first, the second, … allocation failing, until none does; `verify`
/// after each failure. Returns how many there were.
int fail_everywhere(bool news, const std::function<void()>& operation,
                    const std::function<void()>& verify) {
  for (int n = 1; n < 3000; ++n) {
    bool done = false;
    base::allocation_hook = news ? nullptr : count_down;
    (news ? kvzap::test::news_until_failure : allocations_until_failure) = n;
    try {
      operation();
      done = true;
    } catch (const std::exception&) {
    }
    const bool failed = (news ? kvzap::test::news_until_failure : allocations_until_failure) == 0;
    kvzap::test::news_until_failure = 0;
    allocations_until_failure = 0;
    base::allocation_hook = nullptr;
    EXPECT_TRUE(done || failed);
    if (done && !failed) return n - 1;
    // It can have found a way around, but not have done half of it.
    if (done) {
      ADD_FAILURE() << "allocation " << n << " failed, and nobody noticed";
      return n;
    }
    SCOPED_TRACE("allocation " + std::to_string(n) + (news ? " of operator new" : ""));
    verify();
    if (::testing::Test::HasFailure()) return n;
  }
  ADD_FAILURE() << "never succeeds";
  return 0;
}

TYPED_TEST(CacheSteps, ExhaustionLeavesEverythingAsItWas) {
  // Kernel launches take memory for their labels, some after others have run.
  const bool views_alone = base::machine().on_device() || kvzap::test::freeing_allocates();
  const std::vector<bool> kinds =
      views_alone ? std::vector<bool>{false} : std::vector<bool>{false, true};
  for (const bool news : kinds) {
    World<TypeParam> world(CacheShape{{2, 1}, 4, 3, 2}, 7);
    auto& cache = world.cache();
    const ExecutionSpace exec;
    const SequenceId first = world.add_sequence();
    for (int l : {0, 1}) world.append_layer(l, {first}, {40});
    SequenceId second = cache.fork(first);
    world.model()[second] = world.model().at(first);
    cache::set_row_path(RowPath::automatic);
    const auto verify = [&] { ASSERT_NO_FATAL_FAILURE(world.verify()); };
    verify();
    int failures = 0;
    const auto append = [&](int layer, std::int64_t rows) {
      const auto batch = world.batch(layer, 2 * rows);
      const std::vector<AppendSpan> spans = {{first, 0, rows, {-1.0f, 0, true}, true},
                                             {second, rows, rows, {1.0f, 2, true}, true}};
      failures += fail_everywhere(
          news, [&] { cache.append(exec, spans, layer, batch.keys, batch.values, batch.scores); },
          verify);
      for (const auto& span : spans) world.append_to_model(span, layer, batch);
      verify();
    };
    // Rows into pages that the two share, many rows, and one.
    for (const std::int64_t rows : {30, 1, 200}) {
      for (int l : {0, 1}) append(l, rows);
    }
    // A step's memory is taken before it, and after that nothing needs any.
    const std::vector<StepSpan> step = {{first, 2}, {second, 3}};
    failures += fail_everywhere(
        news, [&] { cache.begin_step(exec, step); }, verify);
    EXPECT_TRUE(cache.in_step());
    for (int l : {0, 1}) {
      const auto batch = world.batch(l, 5);
      const std::vector<AppendSpan> spans = {{first, 0, 2, EvictionRule::keep_all(), true},
                                             {second, 2, 3, EvictionRule::keep_all(), true}};
      base::allocation_hook = always_fail;
      if (news) kvzap::test::news_until_failure = 1;
      ASSERT_NO_THROW(cache.append(exec, spans, l, batch.keys, batch.values, batch.scores));
      EXPECT_EQ(std::exchange(kvzap::test::news_until_failure, 0), news ? 1u : 0u);
      base::allocation_hook = nullptr;
      for (const auto& span : spans) world.append_to_model(span, l, batch);
    }
    cache.end_step();
    verify();

    SequenceId third = -1;
    failures += fail_everywhere(
        news, [&] { third = cache.fork(first); }, verify);
    world.model()[third] = world.model().at(first);
    verify();
    KVCache::Checkpoint checkpoint;
    failures += fail_everywhere(
        news, [&] { checkpoint = cache.checkpoint(third); }, verify);
    world.saved()[third].emplace_back(std::move(checkpoint), world.model().at(third));
    verify();
    fail_everywhere(
        news, [&] { cache.restore(third, world.saved()[third].back().first); }, verify);
    verify();

    // Pages are shared, so that every change needs others.
    std::vector<std::vector<std::size_t>> sizes;
    const Kokkos::View<std::uint8_t**, Kokkos::LayoutRight, MemorySpace> keep("keep", 2, 400);
    const auto flags = Kokkos::create_mirror_view(keep);
    for (int h : {0, 1}) {
      for (int i = 0; i < 400; ++i) flags(h, i) = i < 3 || i % 3 != 0;
    }
    Kokkos::deep_copy(keep, flags);
    failures += fail_everywhere(
        news, [&] { cache.compact(exec, third, 0, keep); }, verify);
    world.saved().clear();
    for (ModelHead& head : world.model().at(third).layers[0].heads) {
      std::vector<Pair> left;
      for (std::size_t i = 0; i < head.retained.size(); ++i) {
        if (i < 3 || i % 3 != 0) left.push_back(head.retained[i]);
      }
      head.retained = left;
    }
    verify();
    failures += fail_everywhere(
        news,
        [&] {
          cache.evict(exec, second, 0, {Cutoff{-1.5f, 0}, Cutoff{5.0f, 0}});
        },
        verify);
    auto& layer = world.model().at(second).layers[0];
    for (int h : {0, 1}) {
      ModelHead& head = layer.heads[h];
      head.retained.insert(head.retained.end(), head.ring.begin(), head.ring.end());
      head.ring.clear();
      auto& rows = head.retained;
      rows.erase(std::remove_if(rows.begin(), rows.end(),
                                [&](const Pair& pair) {
                                  return std::isfinite(pair.score) &&
                                         pair.score <= (h == 0 ? -1.5f : 5.0f);
                                }),
                 rows.end());
    }
    verify();

    // Rows that are known to stay, in a step whose pages do not suffice, and without one.
    const SequenceId fourth = world.add_sequence();
    for (const std::int64_t rows : {2, 6, 60}) {
      const SequenceId id = world.add_sequence();
      const std::size_t pages = cache.pool().pages_in_use();
      cache.begin_step(exec, {{id, rows + 4}});
      const std::size_t pages_of_step = cache.pool().pages_in_use();
      for (const bool cancel : {true, false}) {
        const auto before = world.model().at(id);
        for (int l : {0, 1}) {
          const auto batch = world.batch(l, rows);
          const auto keep = world.some_flags(l, rows);
          // (With all arguments ready, so that making them is not what fails.)
          const kvzap::ConstArrayView keys(batch.keys), values(batch.values);
          const KVCache::ScoresView scores(batch.scores);
          const KVCache::FlagsView flags(world.flags_of(keep, rows));
          const std::size_t in_use = cache.pool().pages_in_use();
          failures += fail_everywhere(
              news, [&] { cache.append_kept(exec, id, l, keys, values, scores, flags); },
              [&] {
                EXPECT_EQ(cache.tokens(id, l), 0);
                EXPECT_EQ(cache.pool().pages_in_use(), in_use);
              });
          world.append_kept_to_model(id, l, batch, keep, true);
          // What the step has for later rows is still there.
          const auto later = world.batch(l, 4);
          const AppendSpan span{id, 0, 4, EvictionRule::keep_all(), true};
          if (rows < 60) base::allocation_hook = always_fail;
          EXPECT_NO_THROW(cache.append(exec, {span}, l, later.keys, later.values, later.scores));
          base::allocation_hook = nullptr;
          world.append_to_model(span, l, later);
        }
        if (cancel) {
          EXPECT_GE(cache.pool().pages_in_use(), pages_of_step);
          cache.cancel_step();
          world.model().at(id) = before;
          EXPECT_EQ(cache.pool().pages_in_use(), pages);
          verify();
          cache.begin_step(exec, {{id, rows + 4}});
        } else {
          cache.end_step();
        }
      }
      verify();
    }
    {
      const auto batch = world.batch(0, 50);
      const auto keep = world.some_flags(0, 50);
      const auto flags = world.flags_of(keep, 50);
      failures += fail_everywhere(
          news,
          [&] {
            cache.append_kept(exec, fourth, 0, batch.keys, batch.values, batch.scores, flags);
          },
          verify);
      world.append_kept_to_model(fourth, 0, batch, keep, true);
      verify();
    }

    // Flags, and then new positions, for pages that two sequences share.
    const SequenceId fifth = cache.fork(first);
    world.model()[fifth] = world.model().at(first);
    for (int l : {0, 1}) {
      std::vector<std::vector<bool>> flags;
      std::size_t columns = 0;
      for (const ModelHead& head : world.model().at(fifth).layers[l].heads) {
        const std::size_t rows = head.retained.size() + head.ring.size();
        columns = std::max(columns, rows);
        // The first rows do not move, the next ones do.
        flags.emplace_back(rows, false);
        std::fill_n(flags.back().begin(), 5, true);
        std::fill_n(flags.back().begin() + 6, 10, true);
      }
      const auto keep_rows = world.flags_of(flags, columns);
      failures += fail_everywhere(
          news, [&] { cache.evict(exec, fifth, l, keep_rows); }, verify);
      for (std::size_t h = 0; h < flags.size(); ++h) {
        ModelHead& head = world.model().at(fifth).layers[l].heads[h];
        head.ring.clear();
        head.retained.resize(16);
        head.retained.erase(head.retained.begin() + 5);
      }
      verify();
    }
    const SequenceId sixth = cache.fork(fifth);
    world.model()[sixth] = world.model().at(fifth);
    const auto frequencies = world.frequencies();
    failures += fail_everywhere(
        news, [&] { cache.compact_positions(exec, sixth, frequencies); }, verify);
    world.compact_positions_model(sixth);
    verify();

    failures += fail_everywhere(
        news, [&] { cache.add_sequence(); }, verify);
    EXPECT_GT(failures, 50);
  }
}

TYPED_TEST(CacheSteps, ALimitHoldsAndCanBeActedOn) {
  World<TypeParam> world(CacheShape{{2}, 4, 2, 2}, 3);
  auto& cache = world.cache();
  const ExecutionSpace exec;
  const SequenceId first = world.add_sequence();
  const SequenceId second = world.add_sequence();
  for (SequenceId id : {first, second}) world.append_layer(0, {id}, {40});
  world.verify();
  const std::size_t before = cache.bytes().allocated;
  cache.set_limit(before);
  try {
    cache.begin_step(exec, {{first, 2}, {second, 2}});
    // Some pages were free.
    cache.cancel_step();
  } catch (const OutOfMemory&) {
  }
  for (int l = 0; l < 1; ++l) {
    const auto batch = world.batch(0, 100);
    const std::vector<AppendSpan> spans = {{first, 0, 100, EvictionRule::keep_all(), false}};
    try {
      cache.append(exec, spans, 0, batch.keys, batch.values, batch.scores);
      FAIL() << "beyond the limit";
    } catch (const OutOfMemory& error) {
      EXPECT_GE(error.bytes_wanted, 90 * cache.pool().page_bytes());
      EXPECT_LT(error.bytes_free, error.bytes_wanted);
    }
    world.verify();
    EXPECT_EQ(cache.bytes().allocated, before);
    EXPECT_THROW(cache.add_sequence(), OutOfMemory);
    EXPECT_THROW(cache.fork(first), OutOfMemory);
    world.verify();
    // What a caller can do: free, or raise the limit.
    cache.set_limit(2 * before + 200 * cache.pool().page_bytes());
    cache.append(exec, spans, 0, batch.keys, batch.values, batch.scores);
    world.append_to_model(spans[0], 0, batch);
    world.verify();
  }
  cache.set_limit(cache.bytes().allocated);
  EXPECT_THROW(cache.add_sequence(), OutOfMemory);
  cache.free_sequence(second);
  world.model().erase(second);
  EXPECT_NO_THROW(world.add_sequence());
  world.verify();
}

TYPED_TEST(CacheSteps, StepsRefuseWhatTheyCannotDo) {
  World<TypeParam> world(CacheShape{{2}, 4, 2, 2}, 3);
  auto& cache = world.cache();
  const ExecutionSpace exec;
  const SequenceId id = world.add_sequence();
  expect_error([&] { cache.end_step(); }, {"no step"});
  expect_error([&] { cache.cancel_step(); }, {"no step"});
  expect_error([&] { cache.begin_step(exec, {{id, 1}, {id, 1}}); }, {"sequence 0 twice"});
  expect_error([&] { cache.begin_step(exec, {{9, 1}}); }, {"no sequence 9"});
  world.saved()[id].emplace_back(cache.checkpoint(id), world.model().at(id));
  const auto& saved = world.saved()[id].front().first;
  cache.begin_step(exec, {{id, 2}});
  expect_error([&] { cache.begin_step(exec, {{id, 1}}); }, {"not been ended"});
  expect_error([&] { cache.fork(id); }, {"fork", "in a step"});
  expect_error([&] { cache.free_sequence(id); }, {"free_sequence", "in a step"});
  expect_error([&] { cache.restore(id, saved); }, {"restore", "in a step"});
  expect_error([&] { cache.checkpoint(id); }, {"checkpoint", "in a step"});
  expect_error([&] { cache.evict(exec, id, 0, {Cutoff{}, Cutoff{}}); }, {"evict", "in a step"});
  const auto batch = world.batch(0, 3);
  expect_error([&] { cache.append(exec, id, 0, batch.keys, batch.values, {}, {}); },
               {"3 tokens", "begun with 2"});
  expect_error(
      [&] {
        cache.append(exec, {{id, 2, 2, {}, false}}, 0, batch.keys, batch.values, batch.scores);
      },
      {"2 rows from row 2", "3"});
  expect_error(
      [&] {
        cache.append(exec, {{id, 0, 1, {}, false}, {id, 1, 1, {}, false}}, 0, batch.keys,
                     batch.values, batch.scores);
      },
      {"sequence 0 twice"});
  const Kokkos::View<std::uint8_t**, Kokkos::LayoutRight, MemorySpace> three("keep", 2, 3);
  const Kokkos::View<std::uint8_t**, Kokkos::LayoutRight, MemorySpace> one_head("keep", 1, 3);
  const auto frequencies = world.frequencies();
  expect_error([&] { cache.append_kept(exec, id, 0, batch.keys, batch.values, {}, three); },
               {"3 tokens", "begun with 2"});
  expect_error([&] { cache.evict(exec, id, 0, three); }, {"evict", "in a step"});
  expect_error([&] { cache.compact_positions(exec, id, frequencies); },
               {"compact_positions", "in a step"});
  cache.cancel_step();
  expect_error([&] { cache.append_kept(exec, id, 0, batch.keys, batch.values, {}, one_head); },
               {"(1, 3)", "(2, 3)"});
  expect_error([&] { cache.append_kept(exec, id, 1, batch.keys, batch.values, {}, three); },
               {"no layer 1"});
  {
    const SequenceId other = world.add_sequence();
    world.append_layer(0, {other}, {4});
    expect_error([&] { cache.append_kept(exec, other, 0, batch.keys, batch.values, {}, three); },
                 {"layer 0 of sequence 1", "4 tokens"});
    const auto more = world.batch(0, 1);
    const AppendSpan span{other, 0, 1, EvictionRule::keep_all(), true};
    cache.append(exec, {span}, 0, more.keys, more.values, more.scores);
    world.append_to_model(span, 0, more);
    expect_error([&] { cache.evict(exec, other, 0, one_head); }, {"(1, 3)", "(2, at least"});
    expect_error([&] { cache.compact_positions(exec, other, frequencies); }, {"ring of layer 0"});
    expect_error(
        [&] {
          cache.compact_positions(exec, other, Kokkos::subview(frequencies, std::make_pair(0, 1)));
        },
        {"1 frequencies", "head_dim 4"});
    world.verify();
  }
  expect_error([&] { cache.evict(exec, id, 0, {Cutoff{}}); }, {"1 cutoffs", "2 heads"});
  expect_error(
      [&] {
        cache.evict(exec, id, 0, {Cutoff{nan_score, 0}, Cutoff{}});
      },
      {"not a number"});
  world.verify();
}

// ---------------------------------------------------------------------------------------------

TYPED_TEST(CacheSteps, BatchedDecodeStepsAllocateNothing) {
  if (base::machine().on_device()) GTEST_SKIP() << "kernel launches may allocate";
  World<TypeParam> world(CacheShape{{2, 3}, 8, 4, 64}, 5);
  auto& cache = world.cache();
  const ExecutionSpace exec;
  std::vector<AppendSpan> spans;
  std::vector<StepSpan> step;
  for (int i = 0; i < 5; ++i) {
    const SequenceId id = world.add_sequence();
    for (int l : {0, 1}) world.append_layer(l, {id}, {70});
    spans.push_back({id, i, 1, {0.0f, 0, true}, true});
    step.push_back({id, 1});
  }
  cache::set_row_path(RowPath::automatic);
  world.settle();
  const Batch<TypeParam> batches[] = {world.batch(0, 5), world.batch(1, 5)};
  std::size_t quiet = 0;
  for (int t = 0; t < 40; ++t) {
    const std::size_t slabs = cache.pool().allocated_bytes();
    const std::size_t news = kvzap::test::n_news;
    cache.begin_step(exec, step);
    for (int l : {0, 1}) {
      const kvzap::ConstArrayView keys(batches[l].keys), values(batches[l].values);
      const KVCache::ScoresView scores(batches[l].scores);
      cache.append(exec, spans, l, keys, values, scores);
    }
    cache.end_step();
    // The first step takes what all share; pages need slabs now and then, and lists grow with them.
    if (t > 0 && cache.pool().allocated_bytes() == slabs && kvzap::test::n_news == news) ++quiet;
  }
  EXPECT_GE(quiet, 30u);
}

int n_step_kernels = 0;

TYPED_TEST(CacheSteps, OneKernelAppendsToAllSequences) {
  World<TypeParam> world(CacheShape{{2, 3}, 8, 4, 4}, 5);
  auto& cache = world.cache();
  std::vector<SequenceId> ids;
  std::vector<AppendSpan> spans;
  for (int i = 0; i < 16; ++i) {
    ids.push_back(world.add_sequence());
    for (int l : {0, 1}) world.append_layer(l, {ids.back()}, {i + 1});
    spans.push_back({ids.back(), 15 - i, 1, {-0.5f * i, i % 3, i != 5}, i != 6});
  }
  world.settle();
  n_step_kernels = 0;
  Kokkos::Tools::Experimental::set_begin_parallel_for_callback(
      [](const char* label, const std::uint32_t, std::uint64_t*) {
        const std::string name = label;
        n_step_kernels += name == "kvzap::append::step" || name == "kvzap::append::span_args";
      });
  const int before = cache::instance_waits;
  for (int t = 0; t < 3; ++t) {
    for (int l : {0, 1}) {
      const auto batch = world.batch(l, 16);
      for (const auto& span : spans) world.append_to_model(span, l, batch);
      cache.append_deferred(ExecutionSpace(), spans, l, batch.keys, batch.values, batch.scores);
    }
  }
  Kokkos::Tools::Experimental::set_begin_parallel_for_callback(nullptr);
  EXPECT_EQ(cache::instance_waits, before);
  // Arguments once a step, three sequences a launch, which not all layers need; one kernel a layer.
  EXPECT_LE(n_step_kernels, 3 * (2 + 2 * 6));
  world.verify();
}

// Another instance that takes over waits for the one before, whatever the two do.
/// How often work() waits if every call has an instance of its own.
int waits(const std::function<void()>& work) {
  cache::instance_waits = 0;
  cache::instances_differ = true;
  work();
  cache::instances_differ = false;
  return cache::instance_waits;
}

TYPED_TEST(CacheSteps, InstancesFollowOneAnother) {
  World<TypeParam> world(CacheShape{{2}, 4, 2, 2}, 3);
  auto& cache = world.cache();
  const ExecutionSpace exec;
  const SequenceId first = world.add_sequence();
  const SequenceId second = world.add_sequence();
  for (SequenceId id : {first, second}) world.append_layer(0, {id}, {9});
  world.settle();
  const auto deferred = [&](SequenceId id) {
    const auto batch = world.batch(0, 1);
    const AppendSpan span{id, 0, 1, {0.0f, 0, true}, true};
    world.append_to_model(span, 0, batch);
    cache.append_deferred(exec, {span}, 0, batch.keys, batch.values, batch.scores);
  };
  deferred(first);
  EXPECT_GT(waits([&] { deferred(first); }), 0);  // the first one still counts
  world.verify();
  SequenceId copy = -1;
  EXPECT_GT(waits([&] { copy = cache.fork(exec, first); }), 0);
  world.model()[copy] = world.model().at(first);
  EXPECT_GT(waits([&] {
              world.saved()[first].emplace_back(cache.checkpoint(exec, first),
                                                world.model().at(first));
            }),
            0);
  deferred(first);
  EXPECT_GT(waits([&] { world.restore(first); }), 0);
  world.verify();
  EXPECT_GT(waits([&] { cache.free_sequence(exec, copy); }), 0);
  world.model().erase(copy);
  // Its pages are not written before what reads them is done.
  cache.free_sequence(exec, first);
  world.model().erase(first);
  world.saved().clear();
  EXPECT_GT(waits([&] { deferred(second); }), 0);
  world.verify();
  // On one instance nobody waits.
  cache::instance_waits = 0;
  for (int i = 0; i < 5; ++i) deferred(second);
  copy = cache.fork(exec, second);
  cache.free_sequence(exec, copy);
  deferred(second);
  EXPECT_EQ(cache::instance_waits, 0);
  world.verify();
}

// Sequences on instances of their own still share pages, and the list of their addresses.
TYPED_TEST(CacheSteps, NewSequencesFollowThoseTheyShareMemoryWith) {
  World<TypeParam> world(CacheShape{{2}, 4, 2, 2}, 3);
  auto& cache = world.cache();
  const ExecutionSpace exec;
  const auto append = [&](SequenceId id, std::int64_t rows) {
    const auto batch = world.batch(0, rows);
    const AppendSpan span{id, 0, rows, EvictionRule::keep_all(), true};
    world.append_to_model(span, 0, batch);
    cache.append(exec, {span}, 0, batch.keys, batch.values, batch.scores);
  };
  const SequenceId first = world.add_sequence();
  append(first, 5);
  const SequenceId copy = cache.fork(exec, first);
  world.model()[copy] = world.model().at(first);
  append(copy, 1);  // into an own copy of the last page
  SequenceId added = world.add_sequence();
  EXPECT_GT(waits([&] { append(added, 1); }), 0);
  append(first, 4);  // into new pages
  added = world.add_sequence();
  EXPECT_GT(waits([&] { append(added, 3); }), 0);
  world.verify();
}

// Ranks that make the same calls have the same ids, whichever of them has no memory.
TYPED_TEST(CacheSteps, CallsThatFailUseUpIds) {
  World<TypeParam> world(CacheShape{{2}, 4, 2, 2}, 3);
  auto& cache = world.cache();
  const SequenceId first = cache.add_sequence();
  cache.set_limit(1);
  EXPECT_THROW(cache.add_sequence(), OutOfMemory);
  EXPECT_THROW(cache.fork(first), OutOfMemory);
  cache.set_limit(0);
  EXPECT_EQ(cache.add_sequence(), first + 3);
}

TYPED_TEST(CacheSteps, WhatALayerRefersToOutlivesItsSequence) {
  World<TypeParam> world(CacheShape{{2}, 4, 2, 2}, 3);
  auto& cache = world.cache();
  const SequenceId id = world.add_sequence();
  world.append_layer(0, {id}, {9});
  world.settle();
  const auto layer = cache.layer(id, 0);
  const std::int64_t rows = cache.rows(id, 0, 1) - layer.ring_rows();
  cache.free_sequence(id);
  // Held by the view itself, not by the sequence.
  EXPECT_GE(layer.bounds.use_count(), 1);
  EXPECT_EQ(layer.bounds(1), rows);
}

TYPED_TEST(CacheSteps, ScoresTakeLittle) {
  using Value = TypeParam;
  EXPECT_EQ(page_row_bytes(128, 2), 2u * 128 * 2 + 4 + 4);
  EXPECT_LT(4.0 / static_cast<double>(page_row_bytes(128, 2)), 0.01);
  KVCache cache(DTypeOf<Value>::value, CacheShape{{1}, 16, 2, 8});
  EXPECT_EQ(cache.pool().page_bytes(), (8 * page_row_bytes(16, sizeof(Value)) + 63) / 64 * 64);
}

}  // namespace
