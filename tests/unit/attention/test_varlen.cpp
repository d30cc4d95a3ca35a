// Calls over any mix of spans: results, log-sum-exp, independence of each other, memory.
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "allocations.hpp"
#include "unit/attention/cases.hpp"
#include "unit/temporary_folder.hpp"
#include "watched.hpp"

namespace {

using kvzap::Attention;
using kvzap::AttentionExtents;
using kvzap::AttentionPath;
using kvzap::AttentionSpan;
using kvzap::bfloat16;
using kvzap::CacheShape;
using kvzap::DType;
using kvzap::DTypeOf;
using kvzap::ExecutionSpace;
using kvzap::half;
using kvzap::KVCache;
using kvzap::MemorySpace;
using kvzap::test::expect_error;
using namespace kvzap::test::attention;

template <class Parameter>
class AttentionSpans : public ::testing::Test {
 protected:
  using Value = Parameter;
  using Spans = std::vector<AttentionSpan>;

  static constexpr AttentionPath all_paths[6] = {
      AttentionPath::automatic, AttentionPath::rows,   AttentionPath::flash_prefill,
      AttentionPath::split_kv,  AttentionPath::panels, AttentionPath::portable};

  static bool takes(AttentionPath path, const Spans& spans) {
    if (path != AttentionPath::rows && path != AttentionPath::split_kv) return true;
    return std::all_of(spans.begin(), spans.end(), [](const auto& s) { return s.queries <= 1; });
  }

  /// The spans' part of a result against the reference; nothing else is written.
  void compare(const Batch<Value>& batch, const typename Batch<Value>::Result& found,
               double within) {
    double output = 0, lse = 0;
    std::vector<bool> owned(batch.queries.extents[0], false);
    for (const auto& span : batch.spans) {
      for (int t = 0; t < span.queries; ++t) owned[span.first_query + t] = true;
    }
    for (std::size_t t = 0; t < owned.size(); ++t) {
      for (int h = 0; h < batch.heads; ++h) {
        const std::size_t i = t * batch.heads + h;
        if (!owned[t]) {
          EXPECT_EQ(found.lse.at(t, h, 0), batch.untouched);
          for (int d = 0; d < batch.dim; ++d) {
            ASSERT_EQ(found.output.at(t, h, d), batch.untouched) << "row " << t;
          }
          continue;
        }
        lse = std::max(
            lse, std::fabs(found.lse.at(t, h, 0) - batch.lse[i]) / (1 + std::fabs(batch.lse[i])));
        ASSERT_TRUE(std::isfinite(found.lse.at(t, h, 0)));
        for (int d = 0; d < batch.dim; ++d) {
          ASSERT_TRUE(std::isfinite(found.output.at(t, h, d)));
          output = std::max(output,
                            std::fabs(found.output.at(t, h, d) - batch.output[i * batch.dim + d]));
        }
      }
    }
    EXPECT_LT(output, within);
    EXPECT_LT(lse, within);
  }

  void check(int dim, int group, int window, int page_rows, const std::vector<SpanCase>& cases,
             unsigned seed, Arrangement arrangement = Arrangement::right) {
    SCOPED_TRACE("dim " + std::to_string(dim) + " group " + std::to_string(group) + " pages of " +
                 std::to_string(page_rows));
    Batch<Value> batch(dim, group, window, page_rows, cases, seed, arrangement);
    batch.soft_cap = m_soft_cap;
    batch.solve();
    Spans singles;
    for (const auto& span : batch.spans) {
      if (span.queries <= 1) singles.push_back(span);
    }
    for (const SimdLevel level : simd_levels<Value>()) {
      const LevelInUse in_use(level);
      for (const AttentionPath path : all_paths) {
        if (!has_levels(path) && level != simd_levels<Value>().front()) continue;
        SCOPED_TRACE(kvzap::base::name_of(level));
        SCOPED_TRACE(name_of(path));
        if (!takes(path, batch.spans)) {
          expect_error([&] { batch.attend(m_attention, batch.spans, path); },
                       {"one query token per span"});
          continue;
        }
        compare(batch, batch.attend(m_attention, batch.spans, path), tolerance_of<Value>(path));
      }
    }
  }

  Attention m_attention{DTypeOf<Value>::value};
  float m_soft_cap = 0;
};
TYPED_TEST_SUITE(AttentionSpans, Values);

/// Spans of one query and of several, with and without a cache, uneven heads, and a span without
/// queries.
std::vector<SpanCase> mixed(int window) {
  return {{{37, 5}, window, 1, 1},    {{0, 0}, 0, 17, 17},      {{0, 90}, window, 5, 9},
          {{1100, 3}, window, 1, 1},  {{0, 0}, 0, 1, 1},        {{8, 9}, window, 0, 2},
          {{0, 0}, window - 1, 1, 4}, {{2, 64}, window, 40, 40}};
}

TYPED_TEST(AttentionSpans, AnyMixAgreesWithDoublePrecision) {
  // (Every dim and every group, every page size; not every combination of them.)
  const int pages[] = {1, 7, 64};
  const int dims[] = {16, 64, 80, 128, 256};
  int i = 0;
  for (int group : {1, 2, 3, 5, 8, 16}) {
    this->check(dims[i % 5], group, 8, pages[i % 3], mixed(8), 100 + i,
                static_cast<Arrangement>(i % 3));
    ++i;
  }
}

// Kernels for tensor cores split the rows of such spans into parts.
TYPED_TEST(AttentionSpans, FewQueriesOverManyRows) {
  const std::vector<SpanCase> cases = {{{1100, 300}, 8, 5, 9},
                                       {{0, 1024}, 8, 2, 2},
                                       {{0, 0}, 0, 33, 540},
                                       {{0, 0}, 0, 20, 1100, 1010},
                                       {{260, 513}, 8, 16, 0}};
  this->check(128, 4, 8, 64, cases, 120);
  this->check(80, 1, 8, 7, cases, 121, Arrangement::strided);
  this->check(256, 2, 8, 64, cases, 122);
  this->m_soft_cap = 0.2f;
  this->check(64, 8, 8, 64, cases, 123);
}

// Ranks that hold a part of a head's rows attend over cached rows alone.
TYPED_TEST(AttentionSpans, WithoutNewRowsQueriesSeeCachedRows) {
  const int pages[] = {1, 7, 64};
  const int dims[] = {16, 80, 128};
  int i = 0;
  for (const int group : {1, 3, 8}) {
    this->check(dims[i], group, 8, pages[i],
                {{{37, 5}, 8, 1, 0},
                 {{1100, 3}, 8, 1, 0},
                 {{0, 90}, 8, 5, 0},
                 {{20, 150}, 8, 100, 0},
                 {{0, 0}, 0, 17, 17},
                 {{8, 9}, 8, 0, 0},
                 {{0, 0}, 3, 40, 0}},
                140 + i, static_cast<Arrangement>(i));
    ++i;
  }
  Batch<TypeParam> none(16, 3, 8, 7, {{{0, 0}, 0, 1, 0}}, 150, Arrangement::right);
  for (const AttentionPath path : TestFixture::all_paths) {
    const auto found = none.attend(this->m_attention, none.spans, path);
    const auto token = static_cast<std::size_t>(none.spans.front().first_query);
    for (int h = 0; h < none.heads; ++h) {
      EXPECT_EQ(found.lse.at(token, h, 0), -INFINITY) << name_of(path);
      for (int d = 0; d < 16; ++d) EXPECT_EQ(found.output.at(token, h, d), 0) << name_of(path);
    }
  }
}

// Windows shorter and longer than tiles of queries and of rows, and than the span; beside spans
// without.
TYPED_TEST(AttentionSpans, WindowsAgreeWithDoublePrecision) {
  const int dims[] = {16, 80, 128};
  int i = 0;
  for (const int group : {1, 3, 8}) {
    this->check(dims[i], group, 8, 7,
                {{{0, 0}, 0, 9, 9, 1},
                 {{0, 0}, 0, 40, 90, 16},
                 {{0, 0}, 0, 5, 5, 70},
                 {{37, 5}, 8, 1, 1},
                 {{0, 0}, 0, 200, 500, 130},
                 {{0, 90}, 8, 5, 9},
                 {{0, 0}, 0, 700, 700, 33}},
                500 + i);
    ++i;
  }
}

TYPED_TEST(AttentionSpans, SoftCapsAgreeWithDoublePrecision) {
  this->m_soft_cap = 0.3f;
  this->check(64, 3, 8, 16, mixed(8), 40);
  this->check(80, 1, 8, 16, {{{0, 0}, 0, 70, 90, 20}}, 41);
}

TYPED_TEST(AttentionSpans, SingleQueriesAgreeWithDoublePrecision) {
  // More spans than a kernel's arguments hold.
  std::vector<SpanCase> cases;
  for (int s = 0; s < 9; ++s)
    cases.push_back({{s * 37 % 200, s * 150}, s == 4 ? 0 : 8, 1, 1 + s % 3});
  cases[4].retained = {0, 0};
  this->check(64, 5, 8, 7, cases, 200);
  cases.resize(4);
  this->check(80, 3, 8, 64, cases, 201);
}

// What a span gets is the same, bit for bit, alone and beside others, in any order.
TYPED_TEST(AttentionSpans, AreIndependentOfEachOther) {
  using Value = typename TestFixture::Value;
  Batch<Value> batch(80, 3, 8, 7, mixed(8), 300);
  typename TestFixture::Spans singles, others;
  for (const auto& span : batch.spans) (span.queries == 1 ? singles : others).push_back(span);
  // Copies write the same rows, which kernels of hosts sum up in place.
  auto many = singles;
  for (int copies = 0; copies < 3; ++copies)
    many.insert(many.end(), singles.begin(), singles.end());
  for (const SimdLevel level : simd_levels<Value>()) {
    const LevelInUse in_use(level);
    for (const AttentionPath path : TestFixture::all_paths) {
      if (!has_levels(path) && level != simd_levels<Value>().front()) continue;
      SCOPED_TRACE(kvzap::base::name_of(level));
      SCOPED_TRACE(name_of(path));
      auto spans = TestFixture::takes(path, batch.spans) ? batch.spans
                   : has_levels(path)                    ? singles
                                                         : many;
      std::reverse(spans.begin(), spans.end());
      const auto together = batch.attend(this->m_attention, spans, path);
      for (const auto& span : spans) {
        Attention own{DTypeOf<Value>::value};
        const auto alone = batch.attend(own, {span}, path);
        const auto silent = batch.attend(own, {span}, path, false);
        for (int t = 0; t < span.queries; ++t) {
          const std::size_t row = span.first_query + t;
          for (int h = 0; h < batch.heads; ++h) {
            ASSERT_EQ(together.lse.at(row, h, 0), alone.lse.at(row, h, 0));
            ASSERT_EQ(silent.lse.at(row, h, 0), batch.untouched);
            for (int d = 0; d < batch.dim; ++d) {
              ASSERT_EQ(together.output.at(row, h, d), alone.output.at(row, h, d));
              ASSERT_EQ(silent.output.at(row, h, d), alone.output.at(row, h, d));
            }
          }
        }
      }
    }
  }
}

// Heads so long that a part of the path split_kv has several blocks of rows, beside shorter ones.
TYPED_TEST(AttentionSpans, PartsOfManyBlocks) {
  using Value = typename TestFixture::Value;
  for (int group : {2, 9}) {
    if (kvzap::test::watched && group == 2) continue;
    Batch<Value> batch(16, group, 8, 64,
                       {{{70000}, 8, 1, 1}, {{300}, 8, 1, 1}, {{131072}, 8, 1, 1}}, 400);
    batch.solve();
    this->compare(batch, batch.attend(this->m_attention, batch.spans, AttentionPath::split_kv),
                  tolerance);
  }
}

// Kernels over teams give the same with teams of any shape, within rounding: with several threads
// a missing barrier shows. (A backend takes as many threads as it can.)
TYPED_TEST(AttentionSpans, TeamsOfAnyShape) {
  using Value = typename TestFixture::Value;
  Batch<Value> batch(80, 5, 8, 7, mixed(8), 500);
  batch.solve();
  typename TestFixture::Spans spans = batch.spans;
  for (const kvzap::base::TeamShape shape :
       {kvzap::base::TeamShape{1, 4}, {2, 1}, {3, 2}, {4, 1}}) {
    const int most = ExecutionSpace().concurrency();
    if (shape.threads > most) continue;
    const TeamsInUse teams(shape);
    SCOPED_TRACE(std::to_string(shape.threads) + " threads");
    kvzap::base::machine().set_device(true);
    const auto found = batch.attend(this->m_attention, batch.spans, AttentionPath::automatic);
    kvzap::base::machine().set_device(false);
    this->compare(batch, found, pair_tolerance);
  }
}

// After `reserve` calls take no memory, whatever they bring within the extents.
TYPED_TEST(AttentionSpans, ReserveIsEnough) {
  using Value = typename TestFixture::Value;
  static std::size_t n_views;
  auto cases = mixed(8);
  // A head that is far longer than the others of its layer.
  cases.push_back({{3000, 3}, 8, 1, 1});
  Batch<Value> batch(64, 3, 8, 16, cases, 600);
  AttentionExtents extents;
  extents.kv_heads = 2;
  extents.group = 3;
  extents.head_dim = 64;
  extents.spans = static_cast<std::int64_t>(cases.size());
  for (const SpanCase& c : cases) {
    extents.tokens += c.queries;
    if (c.queries != 1) continue;
    for (int retained : c.retained) {
      const std::int64_t rows = retained + c.ring_rows + c.new_rows;
      extents.single_rows += rows;
      extents.longest_single = std::max(extents.longest_single, rows);
    }
  }
  for (const bool device : {false, true}) {
    for (const SimdLevel level : simd_levels<Value>()) {
      const LevelInUse in_use(level);
      SCOPED_TRACE(device ? "device" : kvzap::base::name_of(level));
      kvzap::base::machine().set_device(device);
      Attention attention(DTypeOf<Value>::value), watched(DTypeOf<Value>::value);
      EXPECT_GT((Attention::scratch_bytes(DTypeOf<Value>::value, extents)), 0u);
      attention.reserve(extents);
      watched.reserve(extents);
      Array<float> output(batch.queries.extents[0], batch.heads, batch.dim, Arrangement::right);
      const ExecutionSpace exec;
      const auto queries = batch.queries.template view<const float>();
      const auto keys = batch.new_keys.template view<const Value>();
      const auto values = batch.new_values.template view<const Value>();
      const auto result = output.template view<float>();
      const auto news_of_a_call = [&] {
        const std::size_t before = kvzap::test::n_news;
        attention(exec, batch.spans, queries, keys, values, result);
        return kvzap::test::n_news - before;
      };
      // (Kokkos takes memory for teams, once, when it first needs it.)
      Attention{DTypeOf<Value>::value}(exec, batch.spans, queries, keys, values, result);
      n_views = 0;
      Kokkos::Tools::Experimental::set_allocate_data_callback(
          [](Kokkos_Profiling_SpaceHandle, const char*, const void*, std::uint64_t bytes) {
            if (bytes > 0) ++n_views;  // Kokkos' CUDA backend asks for none in each team kernel
          });
      watched(exec, batch.spans, queries, keys, values, result);
      exec.fence();
      Kokkos::Tools::Experimental::set_allocate_data_callback(nullptr);
      EXPECT_EQ(n_views, 0u);
      const std::size_t first = news_of_a_call();
      // (Kokkos and libraries take some themselves in every call, for names of kernels.)
      EXPECT_LE(first, news_of_a_call());
      kvzap::base::machine().set_device(false);
    }
  }
}

// The room for parts of the path split_kv is bounded, and does not grow with every 128 rows.
TEST(SplitKVMemory, IsBoundedAndGrowsRarely) {
  AttentionExtents extents;
  extents.kv_heads = 8;
  extents.group = 4;
  extents.head_dim = 128;
  extents.spans = 4;
  extents.tokens = 4;
  extents.longest_single = 1 << 20;
  extents.single_rows = extents.spans * extents.kv_heads * extents.longest_single;
  EXPECT_LE(Attention::scratch_bytes(DType::bf16, extents, AttentionPath::split_kv),
            std::size_t{65} << 20);
  extents.spans = 256;
  EXPECT_LE(Attention::scratch_bytes(DType::bf16, extents, AttentionPath::split_kv),
            std::size_t{65} << 20);

  static std::size_t n_views;
  n_views = 0;
  KVCache cache(DType::f32, CacheShape{{1}, 16, 4, 64});
  const int sequence = cache.add_sequence();
  Attention attention{DType::f32};
  const Array<float> rows(600, 1, 16, Arrangement::right);
  const Array<float> output(1, 1, 16, Arrangement::right);
  const auto row = rows.view<const float>();
  const auto one = Kokkos::subview(row, std::make_pair(0, 1), Kokkos::ALL, Kokkos::ALL);
  const ExecutionSpace exec;
  for (int step = 0; step < 30; ++step) {
    cache.append(exec, sequence, 0, row, row, {}, kvzap::EvictionRule{});
    const auto layer = cache.layer(sequence, 0);
    Kokkos::Tools::Experimental::set_allocate_data_callback(
        [](Kokkos_Profiling_SpaceHandle, const char*, const void*, std::uint64_t bytes) {
          if (bytes > 0) ++n_views;
        });
    attention(exec, layer, one, one, one, output.view<float>(), {AttentionPath::split_kv});
    Kokkos::Tools::Experimental::set_allocate_data_callback(nullptr);
  }
  EXPECT_LE(n_views, 7u);  // 600 … 18,000 rows: 5 … 141 parts
}

TEST(AttentionSpanErrors, NameExpectedAndFound) {
  KVCache cache(DType::f32, CacheShape{{2}, 16, 4, 4});
  const auto layer = cache.layer(cache.add_sequence(), 0);
  Attention attention{DType::f32};
  using Spans = std::vector<AttentionSpan>;
  const Array<float> queries(5, 4, 16, Arrangement::right);
  const Array<float> rows(6, 2, 16, Arrangement::right);
  const Array<float> other(6, 2, 16, Arrangement::left);
  const auto call = [&](const Spans& spans, const kvzap::LogSumExpView& lse = {},
                        bool strides = true) {
    attention(ExecutionSpace{}, spans, queries.view<const float>(), rows.view<const float>(),
              (strides ? rows : other).view<const float>(), queries.view<float>(),
              {AttentionPath::automatic, lse});
  };
  call({});
  call({{layer, 0, 5, 0, 6}});
  call({{layer, 5, 0, 6, 0}, {layer, 2, 1, 5, 1}});
  expect_error(
      [&] {
        call({{layer, 0, 1, 0, 1}, {layer, 3, 3, 0, 3}});
      },
      {"span 1", "3 query tokens", "row 3", "below 5"});
  expect_error([&] { call({{layer, -1, 1, 0, 1}}); }, {"span 0", "row -1"});
  expect_error([&] { call({{layer, 0, 3, 0, 2}}); }, {"span 0", "2 new rows", "3 query tokens"});
  expect_error([&] { call({{layer, 0, 1, 5, 2}}); }, {"span 0", "row 5", "below 6"});
  expect_error(
      [&] {
        call({{layer, 0, 1, 0, 1}},
             kvzap::LogSumExpView(Kokkos::View<float**, MemorySpace>("lse", 5, 3)));
      },
      {"(5, 3)", "(5, 4)"});
  expect_error([&] { call({{layer, 0, 1, 0, 1}}, {}, false); }, {"stride 0"});
}

}  // namespace
