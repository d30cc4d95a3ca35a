// The mass of attention of every pair, against double precision.
#include <gtest/gtest.h>

#include <kvzap/core/attention_mass.hpp>
#include <limits>
#include <string>

#include "unit/attention/cases.hpp"
#include "unit/temporary_folder.hpp"

namespace {

using kvzap::Attention;
using kvzap::AttentionMass;
using kvzap::AttentionPath;
using kvzap::CacheShape;
using kvzap::DType;
using kvzap::DTypeOf;
using kvzap::ExecutionSpace;
using kvzap::KVCache;
using kvzap::MassFactors;
using kvzap::MassReduction;
using kvzap::MemorySpace;
using kvzap::test::expect_error;
using namespace kvzap::test::attention;

template <class Parameter>
class Mass : public ::testing::Test {
 protected:
  using Value = Parameter;
  using MassArray = Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>;

  /// Both reductions of every span of a batch on every way, in `blocks` calls each.
  void check(Batch<Value>& batch, int blocks = 1, const MassFactors& factors = {}) {
    batch.solve();
    for (const bool device : {false, true}) {
      for (const SimdLevel level : simd_levels<Value>()) {
        if (device && level != simd_levels<Value>().front()) continue;
        const LevelInUse in_use(level);
        SCOPED_TRACE(device ? "device" : kvzap::base::name_of(level));
        kvzap::base::machine().set_device(device);
        // The path whose products have the same operands.
        const auto path = device ? AttentionPath::panels : AttentionPath::flash_prefill;
        const double within = tolerance_of<Value>(path) == tolerance ? 1e-4 : 2 * pair_tolerance;
        const auto attended = batch.attend(m_attention, batch.spans, path);
        for (std::size_t s = 0; s < batch.spans.size(); ++s) {
          for (const auto reduction : {MassReduction::sum, MassReduction::max}) {
            SCOPED_TRACE("span " + std::to_string(s));
            compare(batch, s, reduction, attended, blocks, factors, within);
          }
        }
        kvzap::base::machine().set_device(false);
        if (this->HasFailure()) return;
      }
    }
  }

  void compare(const Batch<Value>& batch, std::size_t s, MassReduction reduction,
               const typename Batch<Value>::Result& attended, int blocks,
               const MassFactors& factors, double within) {
    const auto& span = batch.spans[s];
    const auto& expected = reduction == MassReduction::sum ? batch.mass_sum[s] : batch.mass_max[s];
    std::size_t longest = 0;
    for (const auto& rows : expected) longest = std::max(longest, rows.size());
    const MassArray mass("mass", batch.kv_heads, longest + 3);
    const ExecutionSpace exec;
    for (int b = 0; b < blocks; ++b) {
      auto part = span;
      const std::int64_t begin = span.queries * b / blocks;
      const std::int64_t end = span.queries * (b + 1) / blocks;
      part.first_query += begin;
      part.queries = end - begin;
      part.new_rows -= span.queries - end;
      m_mass(exec, part, batch.queries.template view<const float>(),
             batch.new_keys.template view<const Value>(), Batch<Value>::lse_view(attended.lse),
             mass, {reduction, factors, batch.soft_cap});
    }
    exec.fence();
    const auto host = Kokkos::create_mirror_view(mass);
    Kokkos::deep_copy(host, mass);
    for (int h = 0; h < batch.kv_heads; ++h) {
      for (std::size_t r = 0; r < longest + 3; ++r) {
        const double wanted = r < expected[h].size() ? expected[h][r] : 0.0;
        if (std::isnan(wanted)) {
          EXPECT_TRUE(std::isnan(host(h, r))) << "head " << h << " row " << r;
        } else {
          EXPECT_NEAR(host(h, r), wanted, within * wanted + 1e-7) << "head " << h << " row " << r;
        }
        if (this->HasFailure()) return;
      }
    }
  }

  Attention m_attention{DTypeOf<Value>::value};
  AttentionMass m_mass{DTypeOf<Value>::value};
};
TYPED_TEST_SUITE(Mass, Values);

TYPED_TEST(Mass, AgreesWithDoublePrecision) {
  using B = Batch<typename TestFixture::Value>;
  int i = 0;
  const int dims[] = {16, 64, 80, 128, 256};
  const int pages[] = {1, 7, 64};
  for (int group : {1, 2, 3, 5, 8, 16}) {
    SCOPED_TRACE("group " + std::to_string(group));
    // Spans of several queries over uneven heads; tokens of the ring in an order that is not that
    // of their slots.
    B batch(dims[i % 5], group, 8, pages[i % 3],
            {{{37, 5}, 8, 33, 40}, {{0, 0}, 0, 17, 17}, {{0, 90}, 8, 1, 5}}, 100 + i,
            static_cast<Arrangement>(i % 3));
    this->check(batch);
    ++i;
  }
}

TYPED_TEST(Mass, CrossesTilesAndAddsUpOverBlocks) {
  using B = Batch<typename TestFixture::Value>;
  B batch(16, 2, 8, 64, {{{530, 3}, 8, 600, 600}, {{0, 1030}, 8, 3, 4}}, 200);
  this->check(batch, 1);
  this->check(batch, 3);
}

TYPED_TEST(Mass, SoftCaps) {
  using B = Batch<typename TestFixture::Value>;
  for (const float cap : {0.2f, 3.0f}) {
    B batch(64, 3, 8, 16, {{{37, 5}, 8, 130, 140}, {{0, 90}, 8, 1, 5}}, 250);
    batch.soft_cap = cap;
    this->check(batch, 2);
  }
}

TYPED_TEST(Mass, FactorsOfRowsAndQueries) {
  using B = Batch<typename TestFixture::Value>;
  B batch(64, 3, 8, 16, {{{37, 5}, 8, 41, 50}}, 300);
  const std::size_t tokens = batch.queries.extents[0];
  const std::size_t rows = 37 + 8 + 50;
  const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> by_row("rows", batch.heads, rows);
  const Kokkos::View<float*, MemorySpace> by_query("queries", tokens);
  const auto host_rows = Kokkos::create_mirror_view(by_row);
  const auto host_queries = Kokkos::create_mirror_view(by_query);
  std::mt19937 random(301);
  batch.row_factors.assign(batch.heads, std::vector<double>(rows));
  for (int h = 0; h < batch.heads; ++h) {
    for (std::size_t r = 0; r < rows; ++r) {
      batch.row_factors[h][r] = host_rows(h, r) = std::fabs(uniform(random));
    }
  }
  for (std::size_t t = 0; t < tokens; ++t) {
    host_queries(t) = t % 3 == 0 ? 0.0f : 2 + uniform(random);
    batch.query_factors.push_back(host_queries(t));
  }
  Kokkos::deep_copy(by_row, host_rows);
  Kokkos::deep_copy(by_query, host_queries);
  this->check(batch, 1, MassFactors{by_row, by_query});
}

// Once `evict` has emptied the ring, its slots count from where it began anew.
TYPED_TEST(Mass, OrderOfARingThatBeganAnew) {
  using Value = typename TestFixture::Value;
  using B = Batch<Value>;
  constexpr int window = 8;
  for (const int appended : {5, 11}) {  // less than a ring, and one that wraps
    SCOPED_TRACE(std::to_string(appended) + " tokens since");
    B batch(64, 2, window, 16, {{{37, 5}, window, 9, 12}}, 500);
    const ExecutionSpace exec;
    const int sequence = batch.sequences[0];
    // Rows of the ring score -1. Of head 0's three stay, of head 1's all.
    batch.cache.evict(exec, sequence, 0, {kvzap::Cutoff{-1.0f, 3}, kvzap::Cutoff{-2.0f, 0}});
    std::mt19937 random(501);
    const Array<Value> keys(appended, 2, 64, Arrangement::right);
    const Array<Value> values(appended, 2, 64, Arrangement::right);
    fill_random(keys, 0, random);
    fill_random(values, 0, random);
    batch.cache.append(exec, sequence, 0, keys.template view<const Value>(),
                       values.template view<const Value>(), {}, kvzap::EvictionRule{});
    auto& layer = batch.spans[0].cached;
    layer = batch.cache.layer(sequence, 0);
    // Otherwise slots would be the same as in a ring that began with the sequence.
    ASSERT_NE(layer.ring_first % window, 0);
    ASSERT_EQ(layer.ring_rows(), std::min(appended, window));
    this->check(batch);
  }
}

// A query whose scores are all -infinity contributes nothing, one with a NaN makes the rows that it
// sees NaN.
TYPED_TEST(Mass, NonFinite) {
  using Value = typename TestFixture::Value;
  using B = Batch<Value>;
  for (const bool is_nan : {false, true}) {
    B batch(64, 2, 8, 16, {{{0, 0}, 0, 30, 30}, {{9, 0}, 8, 5, 5}}, 400);
    const auto& span = batch.spans[0];
    for (int t = 0; t < span.queries; ++t) {
      for (int h = 0; h < batch.heads; ++h) batch.queries.at(span.first_query + t, h, 0) = 0.5f;
    }
    if (is_nan) {
      batch.queries.at(span.first_query + 11, 3, 2) = std::numeric_limits<float>::quiet_NaN();
    } else {
      for (int r = 0; r < 10; ++r) {
        batch.new_keys.at(span.first_new + r, 1, 0) =
            Value(-std::numeric_limits<float>::infinity());
      }
    }
    batch.queries.upload();
    batch.new_keys.upload();
    this->check(batch);
  }
}

TEST(MassErrors, NameExpectedAndFound) {
  KVCache cache(DType::f32, CacheShape{{2}, 16, 4, 4});
  const auto layer = cache.layer(cache.add_sequence(), 0);
  AttentionMass attention_mass{DType::f32};
  const auto call = [&](int queries, int rows, int lse, int columns, int span_queries,
                        const MassFactors& factors = {}) {
    const Array<float> q(queries, 4, 16, Arrangement::right);
    const Array<float> k(rows, 2, 16, Arrangement::right);
    const kvzap::LogSumExpView l(Kokkos::View<float**, MemorySpace>("lse", lse, 4));
    const Kokkos::View<float**, MemorySpace> mass("mass", 2, columns);
    attention_mass(ExecutionSpace{}, {layer, 0, span_queries, 0, rows}, q.view<const float>(),
                   k.view<const float>(), l, mass, {MassReduction::sum, factors});
  };
  call(3, 4, 3, 4, 3);
  call(3, 4, 3, 4, 0);
  expect_error([&] { call(3, 4, 2, 4, 3); }, {"(2, 4)", "(3, 4)"});
  expect_error([&] { call(3, 4, 3, 3, 3); }, {"(2, 3)", "(2, 4 or more)"});
  expect_error([&] { call(3, 4, 3, 4, 4); }, {"4 query tokens"});
  expect_error([&] { call(3, 2, 3, 4, 3); }, {"3 query tokens", "2 new rows"});
  MassFactors factors;
  factors.queries = Kokkos::View<float*, MemorySpace>("factors", 2);
  expect_error([&] { call(3, 4, 3, 4, 3, factors); }, {"2 factors of queries", "expected 3"});
}

}  // namespace
