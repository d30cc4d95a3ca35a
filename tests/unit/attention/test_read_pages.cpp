// Attention that reads some of the pages: the choice, and the bounds that the cache keeps for it.
#include <gtest/gtest.h>

#include <kvzap/core/cache.hpp>
#include <numeric>
#include <string>

#include "allocations.hpp"
#include "linalg/host/rotated_rows.hpp"
#include "unit/attention/cases.hpp"
#include "unit/temporary_folder.hpp"

namespace {

using kvzap::Attention;
using kvzap::AttentionPath;
using kvzap::AttentionSpan;
using kvzap::bfloat16;
using kvzap::CachedLayer;
using kvzap::CacheShape;
using kvzap::Cutoff;
using kvzap::DType;
using kvzap::EvictionRule;
using kvzap::ExecutionSpace;
using kvzap::KVCache;
using kvzap::MemorySpace;
using kvzap::PageFormat;
using kvzap::QuantisedRows;
using kvzap::ReadPages;
using kvzap::RowType;
using kvzap::SequenceId;
using namespace kvzap::test::attention;

constexpr int kv_heads = 3;

/// Rows of one layer for a cache, and one step that reads them.
template <class Value>
struct Rows {
  Array<Value> keys, values;
  Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> scores;

  /// Keys of some runs of rows are longer, so that pages differ. Scores depend on the head, so that
  /// a threshold of 0 leaves lengths that differ.
  Rows(std::int64_t count, int dim, std::mt19937& random)
      : keys(count, kv_heads, dim, Arrangement::right),
        values(count, kv_heads, dim, Arrangement::right),
        scores("scores", kv_heads, count) {
    fill_random(keys, 0, random);
    fill_random(values, 0, random);
    for (std::int64_t t = 0; t < count; ++t) {
      const float length = 0.5F + 0.1F * static_cast<float>(t / 5 % 13);
      for (int h = 0; h < kv_heads; ++h) {
        scores(h, t) = uniform(random) + 0.6F - 0.4F * static_cast<float>(h);
        for (int d = 0; d < dim; ++d) {
          keys.at(t, h, d) = Value(length * static_cast<float>(keys.at(t, h, d)));
        }
      }
    }
    keys.upload();
    values.upload();
  }
};

template <class Value>
void append(KVCache& cache, SequenceId id, std::int64_t count, const EvictionRule& rule,
            std::mt19937& random) {
  const Rows<Value> rows(count, cache.shape().head_dim, random);
  for (int l = 0; l < static_cast<int>(cache.shape().heads.size()); ++l) {
    cache.append(ExecutionSpace(), id, l, rows.keys.template view<const Value>(),
                 rows.values.template view<const Value>(), rows.scores, rule);
  }
}

EvictionRule evicting() {
  EvictionRule rule;
  rule.threshold = 0;
  return rule;
}

/// Returns the keys of a head's rows as attention sees them: rotated if they are quantised.
template <class Value>
std::vector<float> attended_keys(const CachedLayer& layer, int head, std::int64_t page) {
  std::vector<float> keys;
  for (int row = 0; row < layer.page_rows; ++row) {
    for (int d = 0; d < layer.head_dim; ++d) {
      if (layer.format.quantised()) {
        const QuantisedRows own = layer.quantised(head, page, false);
        keys.push_back(static_cast<float>(own.scales[row]) *
                       static_cast<float>(own.level_at(row, d)));
      } else {
        const auto* const own =
            reinterpret_cast<const Value*>(layer.addresses(layer.page_table(head, page)));
        keys.push_back(static_cast<float>(own[std::int64_t{row} * layer.head_dim + d]));
      }
    }
  }
  return keys;
}

/// Returns the largest values of a page's keys, then the smallest ones, by plain loops.
template <class Value>
std::vector<float> bounds_of(const CachedLayer& layer, int head, std::int64_t page) {
  const std::vector<float> keys = attended_keys<Value>(layer, head, page);
  const int dim = layer.head_dim;
  std::vector<float> bounds(keys.begin(), keys.begin() + dim);
  bounds.insert(bounds.end(), keys.begin(), keys.begin() + dim);
  for (int row = 1; row < layer.page_rows; ++row) {
    for (int d = 0; d < dim; ++d) {
      bounds[d] = std::max(bounds[d], keys[row * dim + d]);
      bounds[dim + d] = std::min(bounds[dim + d], keys[row * dim + d]);
    }
  }
  if (layer.format.quantised()) {
    for (float& bound : bounds) bound = static_cast<float>(bfloat16(bound));
  }
  return bounds;
}

/// Fails unless all full pages of a sequence have their bounds.
template <class Value>
void expect_bounds(KVCache& cache, SequenceId id) {
  for (int l = 0; l < static_cast<int>(cache.shape().heads.size()); ++l) {
    const CachedLayer layer = cache.layer(id, l);
    ASSERT_EQ(layer.has_bounds, l >= 1);
    for (int h = 0; layer.has_bounds && h < layer.heads; ++h) {
      for (std::int64_t p = 0; p < layer.retained(h) / layer.page_rows; ++p) {
        const std::vector<float> expected = bounds_of<Value>(layer, h, p);
        for (std::size_t d = 0; d < expected.size(); ++d) {
          const float found = layer.format.quantised()
                                  ? static_cast<float>(layer.page_bounds<bfloat16>(h, p)[d])
                                  : static_cast<float>(layer.page_bounds<Value>(h, p)[d]);
          ASSERT_EQ(found, expected[d]) << "layer " << l << " head " << h << " page " << p;
        }
      }
    }
  }
}

CacheShape shape_of(int layers, int dim, int window, int page_rows, const PageFormat& format) {
  CacheShape shape;
  shape.heads.assign(layers, kv_heads);
  shape.head_dim = dim;
  shape.window = window;
  shape.page_rows = page_rows;
  shape.format = format;
  shape.bounds_from = layers == 1 ? 0 : 1;
  return shape;
}

template <class Parameter>
class ReadPagesOf : public ::testing::Test {
 protected:
  using Value = Parameter;
  using Result = std::vector<float>;  // (query head, dim)

  struct Case {
    int dim, group, page_rows;
    std::int64_t tokens;
    PageFormat format;
  };

  ReadPagesOf() : m_attention(kvzap::DTypeOf<Value>::value) {}

  void make(const Case& of, bool evicts, unsigned seed) {
    m_random.seed(seed);
    m_case = of;
    m_cache = std::make_unique<KVCache>(kvzap::DTypeOf<Value>::value,
                                        shape_of(1, of.dim, 8, of.page_rows, of.format));
    m_id = m_cache->add_sequence();
    append<Value>(*m_cache, m_id, of.tokens, evicts ? evicting() : EvictionRule(), m_random);
    m_queries = std::make_unique<Array<float>>(1, kv_heads * of.group, of.dim, Arrangement::right);
    m_new = std::make_unique<Rows<Value>>(1, of.dim, m_random);
    fill_random(*m_queries, 0, m_random);
    m_queries->upload();
  }

  Result attend(SequenceId id, const ReadPages& read,
                AttentionPath path = AttentionPath::automatic) {
    Array<float> output(1, kv_heads * m_case.group, m_case.dim, Arrangement::right);
    AttentionSpan span{m_cache->layer(id, 0)};
    span.read_pages = read;
    kvzap::AttentionOptions options;
    options.path = path;
    m_attention(ExecutionSpace(), {span}, m_queries->template view<const float>(),
                m_new->keys.template view<const Value>(),
                m_new->values.template view<const Value>(), output.template view<float>(), options);
    ExecutionSpace().fence();
    output.download();
    Result result;
    for (int h = 0; h < kv_heads * m_case.group; ++h) {
      for (int d = 0; d < m_case.dim; ++d) result.push_back(output.at(0, h, d));
    }
    return result;
  }

  /// Returns the full pages of a head that are read, by plain loops: ascending.
  std::vector<std::int64_t> chosen(const CachedLayer& layer, int head, const ReadPages& read) {
    const std::int64_t full = layer.retained(head) / layer.page_rows;
    std::vector<std::vector<float>> queries;
    for (int q = head * m_case.group; q < (head + 1) * m_case.group; ++q) {
      std::vector<float>& query = queries.emplace_back();
      for (int d = 0; d < m_case.dim; ++d) query.push_back(m_queries->at(0, q, d));
      if (layer.format.quantised()) kvzap::linalg::rotate_row(query.data(), m_case.dim);
    }
    std::vector<double> best(full, -INFINITY);
    for (std::int64_t p = 0; p < full; ++p) {
      const std::vector<float> bounds = bounds_of<Value>(layer, head, p);
      for (const std::vector<float>& query : queries) {
        double sum = 0;
        for (int d = 0; d < m_case.dim; ++d) {
          const double x = query[d];
          sum += std::max(x * bounds[d], x * bounds[m_case.dim + d]);
        }
        best[p] = std::max(best[p], sum);
      }
    }
    std::vector<std::int64_t> pages(full);
    std::iota(pages.begin(), pages.end(), 0);
    std::sort(pages.begin(), pages.end(),
              [&](std::int64_t a, std::int64_t b) { return best[a] > best[b]; });
    pages.resize(read.of(full));
    std::sort(pages.begin(), pages.end());
    return pages;
  }

  /// Attention over chosen pages by plain loops in double precision.
  Result expected(SequenceId id, const ReadPages& read) {
    const CachedLayer layer = m_cache->layer(id, 0);
    const int dim = m_case.dim;
    Result result;
    for (int h = 0; h < kv_heads; ++h) {
      const auto rows = m_cache->host_rows(id, 0, h);
      const auto take = [&](std::vector<double>& to, const std::vector<float>& from,
                            std::int64_t row) {
        for (int d = 0; d < dim; ++d) to.push_back(from[row * dim + d]);
      };
      std::vector<double> keys, values;
      for (const std::int64_t page : chosen(layer, h, read)) {
        for (std::int64_t r = page * layer.page_rows; r < (page + 1) * layer.page_rows; ++r) {
          take(keys, rows.keys, r);
          take(values, rows.values, r);
        }
      }
      const std::int64_t rest = layer.retained(h) / layer.page_rows * layer.page_rows;
      for (std::int64_t r = rest; r < static_cast<std::int64_t>(rows.positions.size()); ++r) {
        take(keys, rows.keys, r);
        take(values, rows.values, r);
      }
      for (int d = 0; d < dim; ++d) {
        keys.push_back(static_cast<float>(m_new->keys.at(0, h, d)));
        values.push_back(static_cast<float>(m_new->values.at(0, h, d)));
      }
      for (int q = h * m_case.group; q < (h + 1) * m_case.group; ++q) {
        std::vector<double> query(dim), output, weights;
        for (int d = 0; d < dim; ++d) query[d] = m_queries->at(0, q, d);
        solve_query(query.data(), keys.data(), values.data(), keys.size() / dim, dim, output,
                    weights);
        result.insert(result.end(), output.begin(), output.end());
      }
    }
    return result;
  }

  double within() const {
    const double of_rows = !m_case.format.quantised()     ? 0
                           : std::is_same_v<Value, float> ? 2e-4
                                                          : 1.5e-2;
    return of_rows + 2 * tolerance_of<Value>(AttentionPath::automatic);
  }

  void expect_equal(const Result& found, const Result& wanted, double most) {
    double error = 0;
    for (std::size_t i = 0; i < found.size(); ++i) {
      error = std::max(error, std::fabs(static_cast<double>(found[i]) - wanted[i]));
    }
    EXPECT_LE(error, most);
  }

  Attention m_attention;
  std::mt19937 m_random;
  Case m_case{};
  std::unique_ptr<KVCache> m_cache;
  SequenceId m_id = -1;
  std::unique_ptr<Array<float>> m_queries;
  std::unique_ptr<Rows<Value>> m_new;
};
TYPED_TEST_SUITE(ReadPagesOf, Values);

constexpr PageFormat formats[] = {{},
                                  {RowType::q8, RowType::q8},
                                  {RowType::q4, RowType::q4},
                                  {RowType::q8, RowType::q4},
                                  {RowType::q3, RowType::q2}};

TYPED_TEST(ReadPagesOf, AgreeWithPlainLoops) {
  if (!kvzap::base::runs_on_host) GTEST_SKIP() << "plain loops read the pages";
  using Value = TypeParam;
  const ReadPages reads[] = {{3, 1}, {0, 0.25}, {1, 1}, {0, 0.5}, {0, 0.125}};
  const int groups[] = {1, 2, 3, 4, 7, 8}, dims[] = {64, 128, 80, 33, 96, 16},
            pages[] = {16, 64, 5, 7, 1, 32};
  for (int i = 0; i < 12; ++i) {
    const bool evicts = i % 2 == 1;
    this->make(
        {dims[i % 6], groups[(i + i / 6) % 6], pages[i % 6], evicts ? 700 : 400, formats[i % 5]},
        evicts, 900 + i);
    for (const ReadPages& read : {reads[i % 5], reads[(i + 1) % 5]}) {
      const auto expected = this->expected(this->m_id, read);
      for (const SimdLevel level : simd_levels<Value>()) {
        const LevelInUse in_use(level);
        SCOPED_TRACE("case " + std::to_string(i) + " " + kvzap::base::name_of(level) + " pages " +
                     std::to_string(read.pages) + " share " + std::to_string(read.share));
        this->expect_equal(this->attend(this->m_id, read), expected, this->within());
      }
      SCOPED_TRACE("split_kv, case " + std::to_string(i));
      this->expect_equal(this->attend(this->m_id, read, AttentionPath::split_kv), expected,
                         this->within());
    }
  }
}

// The time of a choice grows with the pages, not with their square.
TYPED_TEST(ReadPagesOf, ChooseAmongManyPages) {
  if (!kvzap::base::runs_on_host) GTEST_SKIP() << "plain loops read the pages";
  constexpr std::int64_t pages = std::int64_t{1} << 17;
  this->make({8, 2, 1, pages, {}}, false, 77);
  for (const ReadPages& read : {ReadPages{5, 1}, ReadPages{0, 0.5}}) {
    this->expect_equal(this->attend(this->m_id, read, AttentionPath::split_kv),
                       this->expected(this->m_id, read), this->within());
  }
}

TYPED_TEST(ReadPagesOf, AllPagesChangeNoBit) {
  for (int i = 0; i < 5; ++i) {
    this->make({64, 2, 16, 1500, formats[i]}, i % 2 == 1, 40 + i);
    const auto all = this->attend(this->m_id, {});
    std::int64_t most = 0;
    for (int h = 0; h < kv_heads; ++h) most = std::max(most, this->m_cache->rows(this->m_id, 0, h));
    EXPECT_EQ(this->attend(this->m_id, {most / 16 + 1, 1}), all);
    EXPECT_EQ(this->attend(this->m_id, {0, 0.9999999}), all);
    EXPECT_NE(this->attend(this->m_id, {1, 1}), all);
    const auto on_device = this->attend(this->m_id, {}, AttentionPath::split_kv);
    EXPECT_EQ(this->attend(this->m_id, {most / 16 + 1, 1}, AttentionPath::split_kv), on_device);
    EXPECT_EQ(this->attend(this->m_id, {0, 0.9999999}, AttentionPath::split_kv), on_device);
    EXPECT_NE(this->attend(this->m_id, {1, 1}, AttentionPath::split_kv), on_device);
  }
}

TYPED_TEST(ReadPagesOf, ForksChooseAlone) {
  if (!kvzap::base::runs_on_host) GTEST_SKIP() << "plain loops read the pages";
  using Value = TypeParam;
  this->make({32, 2, 8, 300, {}}, false, 77);
  const ReadPages read{4, 1};
  const auto before = this->attend(this->m_id, read);
  const SequenceId fork = this->m_cache->fork(ExecutionSpace(), this->m_id);
  EXPECT_EQ(this->attend(fork, read), before);
  append<Value>(*this->m_cache, fork, 50, {}, this->m_random);
  this->expect_equal(this->attend(fork, read), this->expected(fork, read), this->within());
  EXPECT_EQ(this->attend(this->m_id, read), before);
  const SequenceId beginning = this->m_cache->fork_beginning(ExecutionSpace(), this->m_id, 101);
  this->expect_equal(this->attend(beginning, read), this->expected(beginning, read),
                     this->within());
  EXPECT_EQ(this->attend(this->m_id, read), before);
}

TYPED_TEST(ReadPagesOf, PagesWithoutABoundAreRead) {
  if (!kvzap::base::runs_on_host) GTEST_SKIP() << "plain loops read the pages";
  this->make({16, 1, 4, 60, {}}, false, 5);
  const auto before = this->attend(this->m_id, {2, 1});
  // A key that is not a number, in the page that is read last.
  const CachedLayer layer = this->m_cache->layer(this->m_id, 0);
  const auto pages = this->chosen(layer, 0, {1, 1});
  const std::int64_t other = pages.front() == 3 ? 4 : 3;
  auto* const key = const_cast<TypeParam*>(
      reinterpret_cast<const TypeParam*>(layer.addresses(layer.page_table(0, other))));
  auto* const bounds = const_cast<TypeParam*>(layer.template page_bounds<TypeParam>(0, other));
  key[1] = bounds[1] = TypeParam(NAN);
  const auto found = this->attend(this->m_id, {2, 1});
  EXPECT_TRUE(std::isnan(found[0]));
  EXPECT_EQ(found.back(), before.back());  // of another head
  EXPECT_TRUE(std::isnan(this->attend(this->m_id, {2, 1}, AttentionPath::split_kv)[0]));
}

TYPED_TEST(ReadPagesOf, CallsAllocateNothingAfterReserve) {
  this->make({64, 3, 16, 900, {}}, true, 8);
  kvzap::AttentionExtents extents;
  extents.kv_heads = kv_heads;
  extents.group = 3;
  extents.head_dim = 64;
  extents.spans = extents.tokens = 1;
  for (int h = 0; h < kv_heads; ++h) {
    const std::int64_t rows = this->m_cache->rows(this->m_id, 0, h) + 1;
    extents.single_rows += rows;
    extents.longest_single = std::max(extents.longest_single, rows);
  }
  extents.chosen_page_rows = 16;
  this->m_attention.reserve(extents);
  const std::size_t bytes = Attention::scratch_bytes(kvzap::DTypeOf<TypeParam>::value, extents);
  extents.chosen_page_rows = 0;
  EXPECT_GT(bytes, Attention::scratch_bytes(kvzap::DTypeOf<TypeParam>::value, extents));
  const auto news_of_a_call = [&] {
    const std::size_t before = kvzap::test::n_news;
    this->attend(this->m_id, {0, 0.5});
    return kvzap::test::n_news - before;
  };
  this->m_cache->layer(this->m_id, 0);  // computes bounds
  const std::size_t first = news_of_a_call();
  // (The test and names of kernels take some in every call.)
  EXPECT_LE(first, news_of_a_call());
}

TYPED_TEST(ReadPagesOf, OtherPathsRefuse) {
  this->make({16, 1, 4, 60, {}}, false, 6);
  for (const AttentionPath path : {AttentionPath::panels, AttentionPath::portable}) {
    kvzap::test::expect_error(
        [&] {
          this->attend(this->m_id, {2, 1}, path);
        },
        {"reads some of its pages"});
  }
}

/// Random operations of one sequence and its forks, after each of which some bounds are missing.
template <class Value>
void operate(KVCache& cache, std::mt19937& random) {
  std::vector<SequenceId> ids{cache.add_sequence()};
  const ExecutionSpace exec;
  for (int n = 0; n < 60; ++n) {
    const std::size_t i = random() % ids.size();
    const SequenceId id = ids[i];
    const int layers = static_cast<int>(cache.shape().heads.size());
    switch (random() % 12) {
      case 0:
        ids.push_back(cache.fork(exec, id));
        break;
      case 1: {
        const auto taken = cache.checkpoint(exec, id);
        append<Value>(cache, id, 1 + random() % 30, {}, random);
        if (random() % 2 == 0) cache.layer(id, layers - 1);
        cache.restore(exec, id, taken);
        break;
      }
      case 2:
        for (int l = 0; l < layers; ++l) {
          cache.evict(exec, id, l, std::vector<Cutoff>(kv_heads, {0.3F, 0}));
        }
        break;
      case 3: {
        cache.begin_step(exec, {{id, 5}});
        append<Value>(cache, id, 5, {}, random);
        if (random() % 2 == 0) cache.layer(id, layers - 1);
        cache.cancel_step();
        break;
      }
      case 4: {
        cache.begin_step(exec, {{id, 5}});
        append<Value>(cache, id, 5, evicting(), random);
        cache.end_step();
        if (random() % 2 == 0) cache.layer(id, layers - 1);
        cache.take_back(exec, id, 3);
        break;
      }
      case 5: {  // other rows in the same places: lengths do not show it
        cache.begin_step(exec, {{id, 5}});
        append<Value>(cache, id, 5, {}, random);
        cache.end_step();
        for (int l = 0; l < layers; ++l) cache.layer(id, l);
        cache.take_back(exec, id, 5);
        append<Value>(cache, id, 5, {}, random);
        expect_bounds<Value>(cache, id);
        break;
      }
      case 6: {  // lengths of which the host has upper bounds alone
        for (int step = 0; step < 6; ++step) {
          const Rows<Value> rows(1, cache.shape().head_dim, random);
          for (int l = 0; l < layers; ++l) {
            cache.append_deferred(exec, id, l, rows.keys.template view<const Value>(),
                                  rows.values.template view<const Value>(), rows.scores,
                                  evicting());
          }
          expect_bounds<Value>(cache, id);
        }
        cache.collect({id});
        expect_bounds<Value>(cache, id);
        break;
      }
      case 7: {  // as 5, by the host
        const auto taken = cache.checkpoint(exec, id);
        append<Value>(cache, id, 7, {}, random);
        for (int l = 0; l < layers; ++l) cache.layer(id, l);
        cache.restore(exec, id, taken);
        append<Value>(cache, id, 7, {}, random);
        expect_bounds<Value>(cache, id);
        break;
      }
      default:
        append<Value>(cache, id, 1 + random() % 40, random() % 2 == 0 ? EvictionRule() : evicting(),
                      random);
    }
    if (ids.size() > 4) {
      cache.free_sequence(exec, ids.front());
      ids.erase(ids.begin());
    }
    if (random() % 3 == 0) expect_bounds<Value>(cache, ids[random() % ids.size()]);
    if (::testing::Test::HasFatalFailure()) return;
  }
  for (const SequenceId id : ids) expect_bounds<Value>(cache, id);
}

TYPED_TEST(ReadPagesOf, BoundsFollowRows) {
  if (!kvzap::base::runs_on_host) GTEST_SKIP() << "plain loops read the pages";
  using Value = TypeParam;
  for (int i = 0; i < 5; ++i) {
    SCOPED_TRACE("seed " + std::to_string(i));
    std::mt19937 random(static_cast<unsigned>(i));
    KVCache cache(kvzap::DTypeOf<Value>::value, shape_of(3, 16, 6, 4, formats[i % 5]));
    operate<Value>(cache, random);
    if (this->HasFatalFailure()) return;
  }
}

TYPED_TEST(ReadPagesOf, BoundsFollowNewPositions) {
  if (!kvzap::base::runs_on_host) GTEST_SKIP() << "plain loops read the pages";
  using Value = TypeParam;
  std::mt19937 random(3);
  KVCache cache(kvzap::DTypeOf<Value>::value, shape_of(2, 16, 6, 4, {}));
  const SequenceId id = cache.add_sequence();
  append<Value>(cache, id, 40, {}, random);
  for (int l = 0; l < 2; ++l) {
    const Kokkos::View<std::uint8_t**, Kokkos::LayoutStride, MemorySpace> keep(
        Kokkos::View<std::uint8_t**, Kokkos::LayoutRight, MemorySpace>("keep", kv_heads, 40));
    for (int h = 0; h < kv_heads; ++h) {
      for (int r = 0; r < 40; ++r) keep(h, r) = r % 4 != h ? 1 : 0;
    }
    expect_bounds<Value>(cache, id);
    cache.evict(ExecutionSpace(), id, l, keep, true);
  }
  expect_bounds<Value>(cache, id);
  const Kokkos::View<float*, MemorySpace> frequencies("frequencies", 8);
  for (int i = 0; i < 8; ++i) frequencies(i) = 1.0F / static_cast<float>(i + 1);
  cache.compact_positions(ExecutionSpace(), id, frequencies);
  expect_bounds<Value>(cache, id);
}

TEST(ReadPages, CountsPages) {
  EXPECT_TRUE(ReadPages().all());
  EXPECT_EQ(ReadPages().of(7), 7);
  EXPECT_EQ((ReadPages{3, 1}.of(7)), 3);
  EXPECT_EQ((ReadPages{3, 1}.of(2)), 2);
  EXPECT_EQ((ReadPages{0, 0.25}.of(7)), 2);
  EXPECT_EQ((ReadPages{0, 0.25}.of(0)), 0);
}

// Pages have room for bounds only if the shape asks for them.
TEST(ReadPages, BoundsTakeMemoryOnlyIfKept) {
  CacheShape shape = shape_of(2, 128, 8, 64, {});
  const KVCache with(DType::bf16, shape);
  shape.bounds_from.reset();
  const KVCache without(DType::bf16, shape);
  EXPECT_EQ(with.pool().page_bytes() - without.pool().page_bytes(), 2 * 128 * sizeof(bfloat16));
  EXPECT_EQ(kvzap::page_bounds_bytes(128, 2), 2 * 128 * sizeof(bfloat16));
}

}  // namespace
