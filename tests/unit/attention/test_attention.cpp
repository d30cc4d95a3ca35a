#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <kvzap/core/attention.hpp>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "unit/attention/cases.hpp"
#include "unit/temporary_folder.hpp"

namespace {

using kvzap::Attention;
using kvzap::AttentionPath;
using kvzap::bfloat16;
using kvzap::CacheShape;
using kvzap::DType;
using kvzap::DTypeOf;
using kvzap::EvictionRule;
using kvzap::ExecutionSpace;
using kvzap::half;
using kvzap::KVCache;
using kvzap::MemorySpace;
using namespace kvzap::test::attention;
using kvzap::test::expect_error;

struct Problem {
  int dim = 64;
  int kv_heads = 2;
  int group = 2;
  int window = 8;
  int page_rows = 16;
  /// Rows in the ring; fewer than `window` only if nothing was admitted.
  int ring_rows = 8;
  /// Rows in pages, per KV head.
  std::vector<int> retained = {0, 0};
  int queries = 1;
  int new_rows = 1;
  /// Queries and keys are integers up to this, so that scores are exact in every path however
  /// large; 0: random numbers in [-1, 1).
  int integers = 0;
  float soft_cap = 0;
  Arrangement arrangement = Arrangement::right;
};

std::string describe(const Problem& p) {
  std::string text = "dim " + std::to_string(p.dim) + " group " + std::to_string(p.group) +
                     " pages of " + std::to_string(p.page_rows) + " ring " +
                     std::to_string(p.ring_rows) + " M " + std::to_string(p.queries) + " C " +
                     std::to_string(p.new_rows) + " retained";
  for (int n : p.retained) text += " " + std::to_string(n);
  return text;
}

template <class Parameter>
class AttentionPaths : public ::testing::Test {
 protected:
  using Value = Parameter;
  using Cache = KVCache;

  void fill(Cache& cache, int sequence, const Problem& p, std::mt19937& random) {
    fill_cache(cache, sequence, p.dim, p.retained, p.ring_rows, p.integers, random);
  }

  /// All paths against softmax attention in double precision. Agreement with it within `tolerance`
  /// is agreement with each other within twice that.
  void check(const Problem& p, unsigned seed) {
    SCOPED_TRACE(describe(p));
    std::mt19937 random(seed);
    KVCache cache(DTypeOf<Value>::value, CacheShape{{p.kv_heads}, p.dim, p.window, p.page_rows});
    const int sequence = cache.add_sequence();
    fill(cache, sequence, p, random);
    const int heads = p.kv_heads * p.group;
    Array<float> queries(p.queries, heads, p.dim, p.arrangement);
    Array<Value> new_keys(p.new_rows, p.kv_heads, p.dim, p.arrangement);
    Array<Value> new_values(p.new_rows, p.kv_heads, p.dim, p.arrangement);
    fill_random(queries, p.integers, random);
    fill_random(new_keys, p.integers, random);
    fill_random(new_values, 0, random);

    std::vector<double> expected(std::size_t(p.queries) * heads * p.dim);
    for (int kv_head = 0; kv_head < p.kv_heads; ++kv_head) {
      const auto cached = cache.host_rows(sequence, 0, kv_head);
      const std::size_t n = cached.positions.size();
      ASSERT_EQ(n, std::size_t(p.retained[kv_head]) + p.ring_rows);
      std::vector<double> keys, values;
      for (std::size_t i = 0; i < n * p.dim; ++i) {
        keys.push_back(cached.keys[i]);
        values.push_back(cached.values[i]);
      }
      for (int r = 0; r < p.new_rows; ++r) {
        for (int d = 0; d < p.dim; ++d) {
          keys.push_back(new_keys.at(r, kv_head, d));
          values.push_back(new_values.at(r, kv_head, d));
        }
      }
      std::vector<double> query(p.dim), result, weights;
      for (int token = 0; token < p.queries; ++token) {
        const std::size_t visible = n + p.new_rows - p.queries + token + 1;
        for (int g = 0; g < p.group; ++g) {
          const int head = kv_head * p.group + g;
          for (int d = 0; d < p.dim; ++d) query[d] = queries.at(token, head, d);
          solve_query(query.data(), keys.data(), values.data(), visible, p.dim, result, weights,
                      p.soft_cap);
          std::copy(result.begin(), result.end(),
                    &expected[(std::size_t(token) * heads + head) * p.dim]);
        }
      }
    }

    std::vector<std::pair<const char*, AttentionPath>> paths = {
        {"automatic", AttentionPath::automatic},
        {"tiles", AttentionPath::flash_prefill},
        {"panels", AttentionPath::panels},
        {"portable", AttentionPath::portable}};
    if (p.queries == 1) paths.push_back({"rows", AttentionPath::rows});
    if (p.queries == 1) paths.push_back({"split", AttentionPath::split_kv});
    for (const SimdLevel level : simd_levels<Value>()) {
      const LevelInUse in_use(level);
      for (const auto& [name, path] : paths) {
        const bool has_levels = path != AttentionPath::portable &&
                                path != AttentionPath::split_kv && path != AttentionPath::panels;
        if (!has_levels && level != simd_levels<Value>().front()) continue;
        if (left_out(path, p.queries)) continue;
        SCOPED_TRACE(name);
        SCOPED_TRACE(kvzap::base::name_of(level));
        constexpr float untouched = -777.0f;
        Array<float> output(p.queries, heads, p.dim, p.arrangement);
        Kokkos::deep_copy(output.storage, untouched);
        const ExecutionSpace exec;
        m_attention(exec, cache.layer(sequence, 0), queries.template view<const float>(),
                    new_keys.template view<const Value>(), new_values.template view<const Value>(),
                    output.template view<float>(), {path, {}, p.soft_cap});
        exec.fence();
        output.download();
        double largest = 0;
        bool finite = true;
        for (int token = 0; token < p.queries; ++token) {
          for (int head = 0; head < heads; ++head) {
            for (int d = 0; d < p.dim; ++d) {
              const double found = output.at(token, head, d);
              finite = finite && std::isfinite(found);
              largest = std::max(
                  largest,
                  std::fabs(found - expected[(std::size_t(token) * heads + head) * p.dim + d]));
              output.at(token, head, d) = untouched;
            }
          }
        }
        EXPECT_TRUE(finite);
        EXPECT_LT(largest, tolerance_of<Value>(path));
        // Nothing between the strides was written.
        const float* const begin = output.host.data();
        const float* const end = begin + output.host.extent(0);
        const auto is_other = [](float x) { return x != untouched; };
        const float* const other = std::find_if(begin, end, is_other);
        ASSERT_EQ(other, end) << "element " << other - begin << " outside the output is " << *other;
      }
    }
  }

  Attention m_attention{
      DTypeOf<Value>::value};  // one for all problems: its scratch space must fit each
};

TYPED_TEST_SUITE(AttentionPaths, Values);

TYPED_TEST(AttentionPaths, AgreeWithDoublePrecisionForAnyHead) {
  // (75 and 100 are no whole vectors, of any instruction set.)
  for (int dim : {16, 64, 75, 80, 100, 128, 256}) {
    for (int group : {1, 2, 3, 4, 5, 8, 16}) {
      if ((dim == 75 || dim == 100) && group > 4) continue;
      for (int queries : {1, 17}) {
        Problem p;
        p.dim = dim;
        p.group = group;
        p.retained = {37, 5};
        p.queries = queries;
        p.new_rows = queries;
        this->check(p, 100 + dim + group);
      }
    }
  }
}

TYPED_TEST(AttentionPaths, AgreeWithDoublePrecisionForAnyCache) {
  const int page_sizes[] = {1, 16, 64};
  for (int page : page_sizes) {
    // Around page boundaries, without retained rows, one row only, and heads as skewed as pruning
    // makes them; 600 rows are more than one block or tile.
    const std::vector<std::vector<int>> shapes = {
        {0, 0}, {1, 0}, {page - 1, page + 1}, {page, 2 * page}, {2 * page + 1, 0}, {600, 3}};
    for (const auto& retained : shapes) {
      for (int queries : {1, 2, 17}) {
        for (int older : {0, 1, 21}) {
          Problem p;
          p.page_rows = page;
          p.retained = retained;
          p.queries = queries;
          p.new_rows = queries + older;
          p.arrangement = static_cast<Arrangement>((queries + older) % 3);
          this->check(p, 200 + page + queries + older);
        }
      }
    }
  }
}

// Heads as uneven as pruning makes them, around the 128 rows of a part of the path split, with
// groups that it takes whole and in two.
TYPED_TEST(AttentionPaths, PartsOfUnevenHeads) {
  for (const auto& retained : std::vector<std::vector<int>>{
           {1900, 119, 0}, {118, 119, 120}, {247, 248, 0}, {0, 0, 4096}}) {
    for (int group : {4, 16}) {
      Problem p;
      p.kv_heads = 3;
      p.group = group;
      p.retained = retained;
      p.dim = 128;
      p.page_rows = 64;
      this->check(p, 350 + group);
    }
  }
}

TYPED_TEST(AttentionPaths, RingOfAnyFilling) {
  for (int ring_rows : {0, 1, 4, 5}) {
    for (int queries : {1, 2, 17}) {
      Problem p;
      p.dim = 80;
      p.window = 5;
      p.ring_rows = ring_rows;
      p.queries = queries;
      p.new_rows = queries;
      this->check(p, 300 + ring_rows);  // with no rows at all: dense causal attention
      p.new_rows = queries + 3;
      this->check(p, 310 + ring_rows);
    }
  }
  // A ring longer than a block of the row kernel and a tile of the other.
  Problem p;
  p.window = p.ring_rows = 530;
  p.retained = {3, 40};
  this->check(p, 320);
  p.queries = p.new_rows = 2;
  this->check(p, 321);
  // Pages and rings of one row.
  p.window = p.ring_rows = p.page_rows = 1;
  this->check(p, 322);
}

TYPED_TEST(AttentionPaths, LongChunksCrossTiles) {
  Problem p;
  p.queries = 700;
  p.new_rows = 700;
  p.retained = {70, 0};
  p.kv_heads = 2;
  p.group = 1;
  this->check(p, 400);
  p.group = 3;  // tiles of 170 tokens: the boundaries of query and key tiles do not meet
  p.dim = 16;
  p.new_rows = 733;
  p.arrangement = Arrangement::strided;
  this->check(p, 401);
  p.group = 1;
  for (int tokens : {511, 512, 513}) {
    p.queries = p.new_rows = tokens;
    p.retained = {tokens - 8, tokens - 9};
    this->check(p, 402);
  }
}

// Products of integers are exact in float and so are divisions by 4, 8 and 16: scores of thousands
// must neither overflow nor cost precision, and rows far below the largest weigh next to nothing.
TYPED_TEST(AttentionPaths, LargeScoresDoNotOverflow) {
  for (int dim : {16, 64, 256}) {
    for (int integers : {8, 100}) {
      for (int queries : {1, 17}) {
        Problem p;
        p.dim = dim;
        p.integers = integers;
        p.retained = {300, 20};
        p.queries = p.new_rows = queries;
        this->check(p, 500 + dim + integers);
      }
    }
  }
}

TYPED_TEST(AttentionPaths, SoftCaps) {
  for (int dim : {75, 128}) {
    for (int group : {1, 3, 8}) {
      for (int queries : {1, 5, 300}) {
        // Scores are of order 1 / 3; integers give scores of hundreds, which the cap makes equal.
        for (const auto& [cap, integers] : {std::pair{0.2f, 0}, {2.0f, 0}, {50.0f, 8}}) {
          // Tiles meet one cap for each dim.
          const float cap_of_tiles = dim == 75 ? 50.0f : 0.2f;
          if (queries == 300 && (group != 8 || cap != cap_of_tiles)) continue;
          Problem p;
          p.dim = dim;
          p.group = group;
          p.retained = {137, 5};
          p.queries = p.new_rows = queries;
          p.integers = integers;
          p.soft_cap = cap;
          this->check(p, 550 + dim + group);
        }
      }
    }
  }
}

// Equal scores weigh equally wherever the row lies: the result is the plain mean of the values.
TYPED_TEST(AttentionPaths, EqualScoresGiveTheMean) {
  Problem p;
  p.integers = 0;
  p.retained = {19, 2};
  p.dim = 16;
  std::mt19937 random(600);
  using Value = typename TestFixture::Value;
  KVCache cache(DTypeOf<TypeParam>::value, CacheShape{{p.kv_heads}, p.dim, p.window, p.page_rows});
  const int sequence = cache.add_sequence();
  this->fill(cache, sequence, p, random);
  Array<float> queries(1, 4, p.dim, Arrangement::right);  // all zero
  queries.upload();
  Array<Value> new_rows(1, p.kv_heads, p.dim, Arrangement::right);
  fill_random(new_rows, 0, random);
  for (auto path : {AttentionPath::automatic, AttentionPath::flash_prefill, AttentionPath::split_kv,
                    AttentionPath::panels, AttentionPath::portable}) {
    Array<float> output(1, 4, p.dim, Arrangement::right);
    const ExecutionSpace exec;
    this->m_attention(exec, cache.layer(sequence, 0), queries.template view<const float>(),
                      new_rows.template view<const Value>(), new_rows.template view<const Value>(),
                      output.template view<float>(), {path});
    exec.fence();
    output.download();
    for (int head = 0; head < 4; ++head) {
      const auto rows = cache.host_rows(sequence, 0, head / 2);
      for (int d = 0; d < p.dim; ++d) {
        double sum = new_rows.at(0, head / 2, d);
        const std::size_t n = rows.positions.size();
        for (std::size_t r = 0; r < n; ++r) sum += rows.values[r * p.dim + d];
        EXPECT_NEAR(output.at(0, head, d), sum / (n + 1), tolerance);  // 1 is exact in any type
      }
    }
  }
}

template <class Value>
std::vector<float> attend(int page_rows, int queries, AttentionPath path) {
  // The same rows, whatever the page size and order.
  const int dim = 80, kv_heads = 2, tokens = 333;
  std::mt19937 random(700);
  Array<Value> rows(tokens, kv_heads, dim, Arrangement::right);
  for (std::size_t i = 0; i < rows.host.extent(0); ++i) rows.host(i) = Value(uniform(random));
  rows.upload();
  Kokkos::View<float**, MemorySpace> scores("scores", kv_heads, tokens);
  const auto host_scores = Kokkos::create_mirror_view(scores);
  for (int h = 0; h < kv_heads; ++h) {
    for (int t = 0; t < tokens; ++t) host_scores(h, t) = uniform(random);
  }
  Kokkos::deep_copy(scores, host_scores);
  KVCache cache(DTypeOf<Value>::value, CacheShape{{kv_heads}, dim, 20, page_rows});
  const int sequence = cache.add_sequence();
  const ExecutionSpace exec;
  cache.append(exec, sequence, 0, rows.template view<const Value>(),
               rows.template view<const Value>(), scores, EvictionRule{-0.2f, 4, true});
  Array<float> query(queries, 3 * kv_heads, dim, Arrangement::right);
  for (std::size_t i = 0; i < query.host.extent(0); ++i) query.host(i) = uniform(random);
  query.upload();
  Array<Value> new_rows(queries, kv_heads, dim, Arrangement::right);
  for (std::size_t i = 0; i < new_rows.host.extent(0); ++i)
    new_rows.host(i) = Value(uniform(random));
  new_rows.upload();
  Array<float> output(queries, 3 * kv_heads, dim, Arrangement::right);
  Attention attention{DTypeOf<Value>::value};
  attention(exec, cache.layer(sequence, 0), query.template view<const float>(),
            new_rows.template view<const Value>(), new_rows.template view<const Value>(),
            output.template view<float>(), {path});
  exec.fence();
  output.download();
  return {output.host.data(), output.host.data() + std::size_t(queries) * 3 * kv_heads * dim};
}

template <class Value>
class AttentionStorage : public ::testing::Test {};
using ValueTypes = ::testing::Types<float, half, bfloat16>;
TYPED_TEST_SUITE(AttentionStorage, ValueTypes);

TYPED_TEST(AttentionStorage, PageSizeDoesNotMatter) {
  for (auto path : {AttentionPath::automatic, AttentionPath::flash_prefill, AttentionPath::split_kv,
                    AttentionPath::panels, AttentionPath::portable}) {
    for (int queries : {1, 5}) {
      if (path == AttentionPath::split_kv && queries > 1) continue;
      const auto expected = attend<TypeParam>(64, queries, path);
      for (int page_rows : {1, 3, 16, 64, 1000}) {
        const auto found = attend<TypeParam>(page_rows, queries, path);
        double largest = 0;
        for (std::size_t i = 0; i < expected.size(); ++i) {
          largest = std::max<double>(largest, std::fabs(found[i] - expected[i]));
          ASSERT_TRUE(std::isfinite(found[i]));
        }
        // Running maxima change at other rows, and with them what is rounded.
        EXPECT_LT(largest, tolerance_of<TypeParam>(path) / 5) << "pages of " << page_rows;
      }
    }
  }
}

// A decode step of several sequences gives each what a call of its own gives, bit for bit: in every
// path, whatever the others' lengths.
TYPED_TEST(AttentionPaths, BatchedDecodeEqualsSingleCalls) {
  using Value = typename TestFixture::Value;
  Problem p;
  p.dim = 80;
  p.group = 3;
  std::mt19937 random(800);
  KVCache cache(DTypeOf<TypeParam>::value, CacheShape{{p.kv_heads}, p.dim, p.window, p.page_rows});
  std::vector<int> sequences;
  for (const auto& retained :
       std::vector<std::vector<int>>{{0, 0}, {1500, 3}, {17, 16}, {64, 2100}}) {
    p.retained = retained;
    sequences.push_back(cache.add_sequence());
    this->fill(cache, sequences.back(), p, random);
  }
  sequences.push_back(cache.add_sequence());  // no rows but its own
  const int heads = p.kv_heads * p.group;
  const std::size_t count = sequences.size();
  Array<float> queries(count, heads, p.dim, Arrangement::strided);
  Array<Value> keys(count, p.kv_heads, p.dim, Arrangement::right);
  Array<Value> values(count, p.kv_heads, p.dim, Arrangement::right);
  fill_random(queries, 0, random);
  fill_random(keys, 0, random);
  fill_random(values, 0, random);
  std::vector<typename TestFixture::Cache::Layer> layers;
  for (int sequence : sequences) layers.push_back(cache.layer(sequence, 0));
  const AttentionPath paths[] = {AttentionPath::automatic, AttentionPath::flash_prefill,
                                 AttentionPath::rows,      AttentionPath::split_kv,
                                 AttentionPath::panels,    AttentionPath::portable};
  const ExecutionSpace exec;
  for (const SimdLevel level : simd_levels<Value>()) {
    const LevelInUse in_use(level);
    for (const AttentionPath path : paths) {
      Array<float> batched(count, heads, p.dim, Arrangement::right);
      Array<float> single(count, heads, p.dim, Arrangement::right);
      this->m_attention.decode(
          exec, layers, queries.template view<const float>(), keys.template view<const Value>(),
          values.template view<const Value>(), batched.template view<float>(), {path});
      for (std::size_t b = 0; b < count; ++b) {
        const auto own = std::make_pair(b, b + 1);
        const auto row = [&](const auto& view) {
          return Kokkos::subview(view, own, Kokkos::ALL, Kokkos::ALL);
        };
        this->m_attention(exec, layers[b], row(queries.template view<const float>()),
                          row(keys.template view<const Value>()),
                          row(values.template view<const Value>()),
                          row(single.template view<float>()), {path});
      }
      exec.fence();
      batched.download();
      single.download();
      for (std::size_t i = 0; i < count * heads * p.dim; ++i) {
        ASSERT_TRUE(std::isfinite(batched.host(i)));
        ASSERT_EQ(batched.host(i), single.host(i))
            << "element " << i << " at level " << kvzap::base::name_of(level);
      }
    }
  }
}

// A key whose score is -infinity weighs nothing; a NaN in a key reaches all queries that see its
// row, and no others.
TYPED_TEST(AttentionPaths, NonFiniteKeys) {
  using Value = typename TestFixture::Value;
  constexpr int dim = 64, tokens = 90;
  constexpr float infinity = std::numeric_limits<float>::infinity();
  std::mt19937 random(900);
  KVCache cache(DTypeOf<TypeParam>::value, CacheShape{{1}, dim, 8, 16});
  const auto layer = cache.layer(cache.add_sequence(), 0);
  const ExecutionSpace exec;
  for (const SimdLevel level : simd_levels<Value>()) {
    const LevelInUse in_use(level);
    for (const AttentionPath path :
         {AttentionPath::automatic, AttentionPath::split_kv, AttentionPath::portable}) {
      for (const bool single : {true, false}) {
        if (path == AttentionPath::split_kv && !single) continue;
        const int count = single ? 1 : tokens;
        Array<float> queries(count, 2, dim, Arrangement::right);
        Array<Value> keys(tokens, 1, dim, Arrangement::right);
        Array<Value> values(tokens, 1, dim, Arrangement::right);
        fill_random(queries, 0, random);
        fill_random(keys, 0, random);
        fill_random(values, 0, random);
        for (int t = 0; t < count; ++t) queries.at(t, 0, 0) = queries.at(t, 1, 0) = 0.5f;
        queries.upload();
        const auto attend = [&] {
          keys.upload();
          Array<float> output(count, 2, dim, Arrangement::right);
          this->m_attention(exec, layer, queries.template view<const float>(),
                            keys.template view<const Value>(), values.template view<const Value>(),
                            output.template view<float>(), {path});
          exec.fence();
          output.download();
          return output;
        };
        keys.at(50, 0, 0) = Value(-60000.0f);  // a score so low that its exponential is 0
        const Array<float> expected = attend();
        keys.at(50, 0, 0) = Value(-infinity);
        const Array<float> without = attend();
        keys.at(50, 0, 0) = Value(std::numeric_limits<float>::quiet_NaN());
        const Array<float> reached = attend();
        for (int t = 0; t < count; ++t) {
          for (int d = 0; d < dim; ++d) {
            if (t != 50) {  // for which the row may be the largest
              EXPECT_NEAR(without.at(t, 0, d), expected.at(t, 0, d), tolerance);
            }
            EXPECT_EQ(std::isnan(reached.at(t, 1, d)), single || t >= 50)
                << "token " << t << " at level " << kvzap::base::name_of(level);
          }
        }
      }
    }
  }
}

TEST(AttentionErrors, NameExpectedAndFound) {
  KVCache cache(DType::f32, CacheShape{{2}, 16, 4, 4});
  const int sequence = cache.add_sequence();
  Attention attention{DType::f32};
  const auto call = [&](int q0, int q1, int q2, int c0, int c1, int c2, int o0, int o1, int o2,
                        AttentionPath path = AttentionPath::automatic) {
    const Array<float> queries(q0, q1, q2, Arrangement::right);
    const Array<float> new_rows(c0, c1, c2, Arrangement::right);
    const Array<float> output(o0, o1, o2, Arrangement::right);
    attention(ExecutionSpace{}, cache.layer(sequence, 0), queries.view<const float>(),
              new_rows.view<const float>(), new_rows.view<const float>(), output.view<float>(),
              {path});
  };
  call(3, 4, 16, 3, 2, 16, 3, 4, 16);
  call(0, 4, 16, 0, 2, 16, 0, 4, 16);  // nothing to do
  // Fewer new rows than queries, KV heads or dimensions that are not the cache's, and query heads
  // that do not split evenly.
  expect_error([&] { call(3, 4, 16, 2, 2, 16, 3, 4, 16); }, {"(3, 4, 16)", "(2, 2, 16)"});
  expect_error([&] { call(3, 4, 16, 3, 1, 16, 3, 4, 16); }, {"(3, 1, 16)", "2, 16)"});
  expect_error([&] { call(3, 4, 16, 3, 2, 8, 3, 4, 16); }, {"(3, 2, 8)", "2, 16)"});
  expect_error([&] { call(3, 4, 8, 3, 2, 16, 3, 4, 8); }, {"(3, 4, 8)", "2, 16)"});
  expect_error([&] { call(3, 5, 16, 3, 2, 16, 3, 5, 16); }, {"(3, 5, 16)", "multiple of 2"});
  expect_error([&] { call(3, 0, 16, 3, 2, 16, 3, 0, 16); }, {"(3, 0, 16)", "multiple of 2"});
  // The output must match the queries.
  expect_error([&] { call(3, 4, 16, 3, 2, 16, 2, 4, 16); }, {"extent 0", "is 2", "expected 3"});
  expect_error([&] { call(3, 4, 16, 3, 2, 16, 3, 2, 16); }, {"extent 1", "is 2", "expected 4"});
  expect_error([&] { call(3, 4, 16, 3, 2, 16, 3, 4, 15); }, {"extent 2", "is 15", "expected 16"});
  expect_error([&] { call(3, 4, 16, 3, 2, 16, 3, 4, 16, AttentionPath::rows); },
               {"one query token", "3"});
}

TEST(AttentionErrors, BatchedDecodeNamesExpectedAndFound) {
  KVCache cache(DType::f32, CacheShape{{2}, 16, 4, 4});
  KVCache other(DType::f32, CacheShape{{1}, 16, 4, 4});
  const auto layer = cache.layer(cache.add_sequence(), 0);
  Attention attention{DType::f32};
  const auto call = [&](const auto& layers, int queries, int new_rows) {
    const Array<float> q(queries, 4, 16, Arrangement::right);
    const Array<float> c(new_rows, 2, 16, Arrangement::right);
    attention.decode(ExecutionSpace{}, layers, q.view<const float>(), c.view<const float>(),
                     c.view<const float>(), q.view<float>());
  };
  using Layers = std::vector<KVCache::Layer>;
  call(Layers{layer, layer}, 2, 2);
  call(Layers{}, 0, 0);
  expect_error([&] { call(Layers{layer, layer}, 3, 3); }, {"3 query rows", "2 sequences"});
  expect_error([&] { call(Layers{layer, layer}, 2, 1); }, {"1 new keys", "2 sequences"});
  expect_error(
      [&] {
        call(Layers{layer, other.layer(other.add_sequence(), 0)}, 2, 2);
      },
      {"span 1 has 1 heads", "expected 2"});
}

TEST(AttentionErrors, ARankWithoutHeadsHasNothingToDo) {
  KVCache cache(DType::f32, CacheShape{{0}, 16, 4, 4});
  const int sequence = cache.add_sequence();
  Attention attention{DType::f32};
  const Array<float> none(2, 0, 16, Arrangement::right);
  const auto some = Array<float>(2, 1, 16, Arrangement::right).view<const float>();
  const auto layer = cache.layer(sequence, 0);
  attention(ExecutionSpace{}, layer, none.view<const float>(), none.view<const float>(),
            none.view<const float>(), none.view<float>());
  expect_error(
      [&] {
        attention(ExecutionSpace{}, layer, some, none.view<const float>(), none.view<const float>(),
                  none.view<float>());
      },
      {"(2, 1, 16)"});
}

}  // namespace
