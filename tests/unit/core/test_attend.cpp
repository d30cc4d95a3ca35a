// The portable attention over the caller's ragged rows against double precision and Attention.
#include <gtest/gtest.h>

#include <cmath>
#include <kvzap/core.hpp>
#include <limits>
#include <string>
#include <vector>

#include "unit/attention/reference.hpp"
#include "unit/core/caller_views.hpp"
#include "unit/temporary_folder.hpp"

namespace {

using kvzap::AttendOptions;
using kvzap::RaggedRows;
using namespace kvzap::test;

/// Rows in head order: (row, head, dim) with unused rows, and packed as (row, dim).
struct Problem {
  std::size_t tokens, group, dim;
  std::vector<std::int64_t> lengths;
  HostArray queries, keys, values;  // keys and values: (row, head, dim)

  std::size_t heads() const { return lengths.size() * group; }
  std::vector<std::int64_t> offsets() const {
    std::vector<std::int64_t> all = {0};
    for (const std::int64_t length : lengths) all.push_back(all.back() + length);
    return all;
  }
  HostArray packed(const HostArray& rows) const {
    const auto begin = offsets();
    HostArray result(begin.back(), dim, 1);
    for (std::size_t h = 0; h < lengths.size(); ++h) {
      for (std::int64_t row = 0; row < lengths[h]; ++row) {
        for (std::size_t d = 0; d < dim; ++d) result(begin[h] + row, d) = rows(row, h, d);
      }
    }
    return result;
  }
};

template <class Value>
Problem random_problem(std::size_t tokens, std::size_t group, std::size_t dim,
                       const std::vector<std::int64_t>& lengths, std::mt19937& random) {
  Problem p{tokens, group, dim, lengths, {}, {}, {}};
  std::int64_t longest = 0;
  for (const std::int64_t length : lengths) longest = std::max(longest, length);
  p.queries = random_array<float>(tokens, p.heads(), dim, random);
  p.keys = random_array<Value>(longest + 3, lengths.size(), dim, random);
  p.values = random_array<Value>(longest + 3, lengths.size(), dim, random);
  return p;
}

template <class Space>
Kokkos::View<std::int64_t*, Space> integers(const std::vector<std::int64_t>& values) {
  HostArray array(values.size(), 1, 1);
  std::copy(values.begin(), values.end(), array.values.begin());
  return vector_of<std::int64_t, Space>(array);
}

void expect_number(double found, double expected, double tolerance) {
  if (std::isnan(expected)) {
    EXPECT_TRUE(std::isnan(found));
  } else if (std::isinf(expected)) {
    EXPECT_EQ(found, expected);
  } else {
    EXPECT_NEAR(found, expected, tolerance);
  }
}

/// As (row, head, dim) and as (row, dim), in the caller's views, with results in float and in
/// Value.
template <class CallerOf>
void expect_reference(const Problem& p, const AttendOptions& options = {}) {
  using Value = typename CallerOf::Value;
  using Layout = typename CallerOf::Layout;
  using Space = typename CallerOf::Space;
  const typename CallerOf::Exec exec;
  SCOPED_TRACE(std::to_string(p.tokens) + " tokens, group " + std::to_string(p.group) + ", dim " +
               std::to_string(p.dim) + (options.causal ? ", causal" : ""));
  const auto queries = view_of<float, Layout, Space>(p.queries);
  const auto output = view_of<float, Layout, Space>(HostArray(p.tokens, p.heads(), p.dim));
  const auto lse = matrix_of<float, Layout, Space>(HostArray(p.tokens, p.heads(), 1));
  const auto rounded = view_of<Value, Layout, Space>(HostArray(p.tokens, p.heads(), p.dim));
  kvzap::attend(exec, queries,
                RaggedRows{view_of<Value, Layout, Space>(p.keys),
                           view_of<Value, Layout, Space>(p.values), integers<Space>(p.lengths)},
                output, options, lse);
  kvzap::attend(
      exec, queries,
      RaggedRows{matrix_of<Value, Layout, Space>(p.packed(p.keys)),
                 matrix_of<Value, Layout, Space>(p.packed(p.values)), integers<Space>(p.offsets())},
      rounded, options);
  const auto found = on_host(exec, output), found_lse = on_host(exec, lse);
  const auto found_rounded = on_host(exec, rounded);
  std::vector<double> query(p.dim), result, weights;
  for (std::size_t token = 0; token < p.tokens; ++token) {
    for (std::size_t head = 0; head < p.heads(); ++head) {
      const std::size_t kv_head = head / p.group;
      const std::size_t visible = p.lengths[kv_head] - (options.causal ? p.tokens - 1 - token : 0);
      std::vector<double> keys, values;
      for (std::size_t row = 0; row < visible; ++row) {
        for (std::size_t d = 0; d < p.dim; ++d) {
          keys.push_back(p.keys(row, kv_head, d));
          values.push_back(p.values(row, kv_head, d));
        }
      }
      const double of_scale = options.scale == 0 ? 1 : options.scale * std::sqrt(double(p.dim));
      for (std::size_t d = 0; d < p.dim; ++d) query[d] = of_scale * p.queries(token, head, d);
      const double expected_lse =
          attention::solve_query(query.data(), keys.data(), values.data(), visible,
                                 static_cast<int>(p.dim), result, weights, options.soft_cap);
      expect_number(found_lse(token, head), expected_lse, 1e-5);
      for (std::size_t d = 0; d < p.dim; ++d) {
        expect_number(found(token, head, d), result[d], 1e-5);
        const float once = static_cast<float>(Value(found(token, head, d)));
        expect_number(found_rounded(token, head, d), once, 0);
      }
    }
  }
}

template <class CallerOf>
class AttendCallerViews : public ::testing::Test {};
TYPED_TEST_SUITE(AttendCallerViews, Callers);

TYPED_TEST(AttendCallerViews, AgreeWithDoublePrecision) {
  using Value = typename TypeParam::Value;
  std::mt19937 random(7);
  for (const std::size_t group : {1, 2, 3, 8}) {
    for (const std::size_t tokens : {1, 5}) {
      AttendOptions options;
      const auto p =
          random_problem<Value>(tokens, group, group == 3 ? 5 : 32, {70, 5, 129}, random);
      expect_reference<TypeParam>(p, options);
      options.causal = true;
      options.scale = 0.3f;
      expect_reference<TypeParam>(p, options);
      options.soft_cap = 2;
      expect_reference<TypeParam>(p, options);
    }
  }
  expect_reference<TypeParam>(random_problem<Value>(2, 2, 8, {0, 3}, random));
  expect_reference<TypeParam>(random_problem<Value>(0, 2, 8, {4, 3}, random));
  expect_reference<TypeParam>(random_problem<Value>(3, 2, 8, {}, random));
}

TYPED_TEST(AttendCallerViews, NonFiniteNumbersReachTheQueriesThatSeeThem) {
  using Value = typename TypeParam::Value;
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  constexpr float infinity = std::numeric_limits<float>::infinity();
  std::mt19937 random(8);
  for (const float number : {nan, infinity, -infinity}) {
    for (int place = 0; place < 3; ++place) {
      auto p = random_problem<Value>(2, 2, 4, {90, 70}, random);
      for (auto* array : {&p.queries, &p.keys}) {
        for (float& value : array->values) value = std::fabs(value) + 0.5f;
      }
      for (float& value : p.keys.values) value = static_cast<float>(Value(value));
      (place == 0   ? p.queries(1, 3, 2)
       : place == 1 ? p.keys(66, 0, 1)
                    : p.values(3, 1, 0)) = number;
      expect_reference<TypeParam>(p);
    }
  }
}

/// select, compact and attend against KVCache and Attention: the same rows, the same result.
TEST(AttendCallerViews, AgreeWithTheCacheAndAttention) {
  using Value = kvzap::bfloat16;
  using Space = kvzap::MemorySpace;
  using Right = Kokkos::LayoutRight;
  const kvzap::ExecutionSpace exec;
  std::mt19937 random(9);
  const std::size_t tokens = 300, kv_heads = 3, group = 4, dim = 16, queries = 5;
  auto scores = random_array<float>(kv_heads, tokens, 1, random);
  for (std::size_t h = 0; h < kv_heads; ++h) {
    for (std::size_t t = 0; t < tokens; ++t) scores(h, t) += 0.8f * (float(h) - 1);
  }
  const auto score_view = matrix_of<float, Right, Space>(scores);
  const auto keys =
      view_of<Value, Right, Space>(random_array<Value>(tokens, kv_heads, dim, random));
  const auto values =
      view_of<Value, Right, Space>(random_array<Value>(tokens, kv_heads, dim, random));
  const auto query_view =
      view_of<float, Right, Space>(random_array<float>(queries, kv_heads * group, dim, random));

  kvzap::SelectRule rule;
  rule.threshold = 0;
  rule.window = 16;
  kvzap::CacheShape shape;
  shape.heads = {static_cast<int>(kv_heads)};
  shape.head_dim = static_cast<int>(dim);
  shape.window = static_cast<int>(rule.window);
  kvzap::KVCache cache(kvzap::DTypeOf<Value>::value, shape);
  const auto sequence = cache.add_sequence();
  cache.append(exec, sequence, 0, keys, values, score_view, rule);
  const Kokkos::View<float***, Right, Space> expected("expected", queries, kv_heads * group, dim);
  const Kokkos::View<float***, Right, Space> output("output", queries, kv_heads * group, dim);
  const Kokkos::View<Value***, Right, Space> no_rows("none", 0, kv_heads, dim);
  kvzap::AttentionSpan span;
  span.cached = cache.layer(sequence, 0);
  span.queries = queries;
  span.new_rows = 0;
  kvzap::Attention attention(kvzap::DTypeOf<Value>::value);
  attention(exec, {span}, query_view, no_rows, no_rows, expected, {kvzap::AttentionPath::portable});

  const auto list = kvzap::select(exec, score_view, rule);
  const auto lengths = kvzap::compact(exec, list, keys, values);
  kvzap::attend(exec, query_view, RaggedRows{keys, values, lengths}, output);
  exec.fence();
  const auto of_cache = on_host(exec, expected), of_views = on_host(exec, output);
  for (std::size_t h = 0; h < kv_heads; ++h) {
    EXPECT_EQ(integers_of(lengths)[h], cache.rows(sequence, 0, static_cast<int>(h)));
  }
  for (std::size_t i = 0; i < of_cache.values.size(); ++i) {
    ASSERT_NEAR(of_views.values[i], of_cache.values[i], 1e-5);
  }
}

TEST(AttendCallerViews, ErrorsNameTheArgument) {
  using Exec = Kokkos::DefaultExecutionSpace;
  using Space = Exec::memory_space;
  using Rank3 = Kokkos::View<float***, Space>;
  const Rank3 queries("queries", 2, 4, 8), keys("keys", 10, 2, 8);
  const auto attend = [&](const Rank3& q, const Rank3& v, const std::vector<std::int64_t>& bounds,
                          const Rank3& output, bool causal = false) {
    AttendOptions options;
    options.causal = causal;
    kvzap::attend(Exec(), q, RaggedRows{keys, v, integers<Space>(bounds)}, output, options);
  };
  attend(queries, keys, {10, 2}, queries, true);
  expect_error(
      [&] {
        attend(queries, Rank3("v", 9, 2, 8), {10, 2}, queries);
      },
      {"attend: rows.values is (9, 2, 8); expected (10, 2, 8) = (row, KV head, dim)"});
  expect_error(
      [&] {
        attend(queries, keys, {10, 2, 3}, queries);
      },
      {"attend: rows.bounds is (3); expected (2) = (KV head)"});
  expect_error(
      [&] {
        attend(queries, keys, {10, 2}, Rank3("o", 2, 4, 7));
      },
      {"attend: output is (2, 4, 7); expected (2, 4, 8)"});
  expect_error(
      [&] {
        attend(Rank3("q", 2, 5, 8), keys, {10, 2}, Rank3("o", 2, 5, 8));
      },
      {"attend: queries have 5 heads; expected a multiple of the 2 KV heads"});
  expect_error(
      [&] {
        attend(queries, keys, {10, 11}, queries);
      },
      {"attend: rows.bounds of KV head 1 do not fit; expected lengths of 0 … 10 rows"});
  expect_error(
      [&] {
        attend(queries, keys, {1, 10}, queries, true);
      },
      {"attend: rows.bounds of KV head 0 do not fit; expected lengths of 2 … 10 rows"});
  // Lengths where offsets belong.
  const Kokkos::View<float**, Space> packed("packed", 20, 8);
  expect_error(
      [&] {
        kvzap::attend(Exec(), queries, RaggedRows{packed, packed, integers<Space>({7, 13})},
                      queries);
      },
      {"attend: rows.bounds of KV head 0 do not fit; expected offsets from 0 on"});
}

}  // namespace
