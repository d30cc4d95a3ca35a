// Selected pairs and rows compacted in place against loops over plain vectors, the cache and
// select_top. Thresholds alone: unit/cache/test_keep_list.cpp.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <kvzap/core/cache.hpp>
#include <kvzap/core/compact.hpp>
#include <kvzap/core/keep_list.hpp>
#include <kvzap/core/selection.hpp>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "unit/core/caller_views.hpp"
#include "unit/temporary_folder.hpp"

namespace {

using kvzap::SelectRule;
using namespace kvzap::test;

using Kept = std::vector<std::vector<std::int64_t>>;  // (head, row): token

std::string describe(const SelectRule& rule, const HostArray& scores) {
  return std::to_string(scores.extents[0]) + " heads of " + std::to_string(scores.extents[1]) +
         ", threshold " + std::to_string(rule.threshold) + ", window " +
         std::to_string(rule.window) + ", sink " + std::to_string(rule.sink) + ", first " +
         std::to_string(rule.first) + ", budget " + std::to_string(rule.budget) +
         (rule.pooled ? ", pooled" : "");
}

/// The rule as its documentation has it, by sorting.
Kept expected_kept(const HostArray& scores, const SelectRule& rule) {
  const auto heads = static_cast<std::int64_t>(scores.extents[0]);
  const auto tokens = static_cast<std::int64_t>(scores.extents[1]);
  Kept kept(scores.extents[0]);
  const auto is_exempt = [&](std::int64_t h, std::int64_t t) {
    return t >= tokens - rule.window || rule.first + t < rule.sink || !std::isfinite(scores(h, t));
  };
  std::vector<std::vector<char>> has_place(heads, std::vector<char>(tokens, 1));
  if (rule.budget >= 0) {
    for (std::int64_t pool = 0; pool < (rule.pooled ? std::min<std::int64_t>(heads, 1) : heads);
         ++pool) {
      // (not exempt, -score, head, token): the first `places` have a place.
      std::vector<std::tuple<bool, float, std::int64_t, std::int64_t>> order;
      for (std::int64_t h = 0; h < heads; ++h) {
        if (!rule.pooled && h != pool) continue;
        for (std::int64_t t = 0; t < tokens; ++t) {
          const bool exempt = is_exempt(h, t);
          order.emplace_back(!exempt, exempt ? 0 : -scores(h, t), h, t);
        }
      }
      std::sort(order.begin(), order.end());
      const auto places = static_cast<std::size_t>(rule.budget * (rule.pooled ? heads : 1));
      for (std::size_t i = places; i < order.size(); ++i) {
        const auto& [judged, score, h, t] = order[i];
        if (judged) has_place[h][t] = 0;
      }
    }
  }
  for (std::int64_t h = 0; h < heads; ++h) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      const bool passes = has_place[h][t] && !(scores(h, t) < rule.threshold);
      if (!rule.judge || is_exempt(h, t) || passes) kept[h].push_back(t);
    }
  }
  return kept;
}

template <class Space>
Kept kept_of(const kvzap::KeepList<Space>& list) {
  const auto offsets = integers_of(list.offsets), tokens = integers_of(list.tokens);
  const auto heads = integers_of(list.heads);
  EXPECT_EQ(list.rows, offsets.back());
  EXPECT_EQ(tokens.size(), static_cast<std::size_t>(list.rows));
  Kept kept(offsets.size() - 1);
  for (std::size_t h = 0; h < kept.size(); ++h) {
    kept[h].assign(tokens.begin() + offsets[h], tokens.begin() + offsets[h + 1]);
    for (std::int64_t row = offsets[h]; row < offsets[h + 1]; ++row) {
      EXPECT_EQ(heads[row], static_cast<std::int64_t>(h));
    }
  }
  return kept;
}

/// Scores of few different values, so that there are ties, zeros of both signs, NaN and infinities.
template <class Value>
HostArray tied_scores(std::size_t heads, std::size_t tokens, std::mt19937& random) {
  auto scores = random_array<Value>(heads, tokens, 1, random);
  const bool ties = random() % 2 == 0;
  for (float& score : scores.values) {
    if (ties) score = std::nearbyint(score * 4) / 4;
    if (random() % 40 == 0) score = std::numeric_limits<float>::quiet_NaN();
    if (random() % 40 == 0) score = std::numeric_limits<float>::infinity();
    if (random() % 40 == 0) score = -std::numeric_limits<float>::infinity();
  }
  return scores;
}

template <class CallerOf>
class SelectCallerViews : public ::testing::Test {};
TYPED_TEST_SUITE(SelectCallerViews, Callers);

TYPED_TEST(SelectCallerViews, AgreeWithSorting) {
  using Value = typename TypeParam::Value;
  using Layout = typename TypeParam::Layout;
  using Space = typename TypeParam::Space;
  const typename TypeParam::Exec exec;
  std::mt19937 random(3);
  for (int round = 0; round < 150; ++round) {
    const std::size_t heads = random() % 6,
                      tokens = random() % 3 == 0 ? random() % 4 : random() % 200;
    const auto scores = tied_scores<Value>(heads, tokens, random);
    SelectRule rule;
    if (random() % 2) rule.threshold = static_cast<float>(random() % 5) * 0.25f - 0.5f;
    if (random() % 4) rule.budget = random() % (tokens + 3);
    rule.pooled = random() % 2;
    rule.window = random() % 3 == 0 ? random() % 50 : 0;
    rule.sink = random() % 3 == 0 ? random() % 9 : 0;
    rule.first = random() % 3;
    rule.judge = random() % 12 != 0;
    SCOPED_TRACE(describe(rule, scores));
    const auto list = kvzap::select(exec, matrix_of<Value, Layout, Space>(scores), rule);
    ASSERT_EQ(kept_of(list), expected_kept(scores, rule));
    EXPECT_EQ(list.extent, static_cast<std::int64_t>(tokens));
    const bool judges = rule.judge && (rule.budget >= 0 || !std::isnan(rule.threshold));
    const auto judged_tokens =
        std::max<std::int64_t>(0, static_cast<std::int64_t>(tokens) - rule.window);
    EXPECT_EQ(list.judged, judges ? static_cast<std::int64_t>(heads) * judged_tokens : 0);
    std::int64_t non_finite = 0;
    for (std::size_t h = 0; judges && h < heads; ++h) {
      for (std::int64_t t = 0; t < judged_tokens; ++t) non_finite += !std::isfinite(scores(h, t));
    }
    EXPECT_EQ(list.non_finite, non_finite);
  }
}

TYPED_TEST(SelectCallerViews, CompactRowsInPlace) {
  using Value = typename TypeParam::Value;
  using Layout = typename TypeParam::Layout;
  using Space = typename TypeParam::Space;
  const typename TypeParam::Exec exec;
  std::mt19937 random(4);
  for (const auto& [tokens, heads, dim] : std::vector<std::array<std::size_t, 3>>{
           {300, 4, 24}, {1, 1, 1}, {50, 3, 65}, {0, 2, 8}, {20, 0, 8}, {20, 3, 0}}) {
    auto flags = random_array<float>(heads, tokens, 1, random);
    for (std::size_t h = 0; h < heads; ++h) {
      // Heads keep from nearly nothing to everything.
      for (std::size_t t = 0; t < tokens; ++t) flags(h, t) = flags(h, t) * 2 < float(h) - 1.0f;
    }
    const auto list = kvzap::list_flagged(exec, matrix_of<int, Layout, Space>(flags));
    const auto keys = random_array<Value>(tokens, heads, dim, random);
    const auto values = random_array<float>(tokens, heads, dim + 2, random);
    const auto positions = random_array<float>(heads, tokens, 1, random);
    const auto key_view = view_of<Value, Layout, Space>(keys);
    const auto value_view = view_of<float, Kokkos::LayoutRight, Space>(values);
    const auto position_view = matrix_of<float, Layout, Space>(positions);
    const auto lengths =
        integers_of(kvzap::compact(exec, list, key_view, value_view, position_view));
    const auto kept = kept_of(list);
    const auto found_keys = on_host(exec, key_view), found_values = on_host(exec, value_view);
    const auto found_positions = on_host(exec, position_view);
    ASSERT_EQ(lengths.size(), heads);
    for (std::size_t h = 0; h < heads; ++h) {
      ASSERT_EQ(lengths[h], static_cast<std::int64_t>(kept[h].size()));
      for (std::size_t row = 0; row < kept[h].size(); ++row) {
        const std::size_t t = kept[h][row];
        ASSERT_EQ(found_positions(h, row), positions(h, t));
        for (std::size_t d = 0; d < dim; ++d) ASSERT_EQ(found_keys(row, h, d), keys(t, h, d));
        for (std::size_t d = 0; d < dim + 2; ++d) {
          ASSERT_EQ(found_values(row, h, d), values(t, h, d));
        }
      }
    }
  }
}

/// The same budget by the selection that ranks share.
TEST(SelectCallerViews, AgreeWithSelectTop) {
  const kvzap::ExecutionSpace exec;
  std::mt19937 random(5);
  for (int round = 0; round < 20; ++round) {
    const std::size_t heads = 1 + random() % 4, tokens = 1 + random() % 300;
    const auto scores = tied_scores<float>(heads, tokens, random);
    const auto view = matrix_of<float, Kokkos::LayoutRight, kvzap::MemorySpace>(scores);
    SelectRule rule;
    rule.budget = random() % (tokens + 1);
    rule.pooled = round % 2;
    const std::int64_t pools = rule.pooled ? 1 : heads;
    std::vector<kvzap::ScoreSegment> segments;
    for (std::size_t h = 0; h < heads; ++h) {
      segments.push_back({Kokkos::subview(view, h, Kokkos::ALL),
                          rule.pooled ? 0 : static_cast<std::int64_t>(h),
                          static_cast<std::int64_t>(h)});
    }
    const auto cutoffs = kvzap::select_top(
        exec, kvzap::Communicator::self(), segments,
        std::vector<std::int64_t>(pools, rule.budget * static_cast<std::int64_t>(heads) / pools));
    Kept expected(heads);
    for (std::size_t h = 0; h < heads; ++h) {
      std::int64_t ties = cutoffs[h].ties;
      for (std::size_t t = 0; t < tokens; ++t) {
        const float score = scores(h, t);
        const bool tie = score == cutoffs[h].score && std::isfinite(score);
        const bool stays = !std::isfinite(score) || score > cutoffs[h].score || (tie && ties > 0);
        ties -= tie;
        if (stays) expected[h].push_back(t);
      }
    }
    SCOPED_TRACE(describe(rule, scores));
    ASSERT_EQ(kept_of(kvzap::select(exec, view, rule)), expected);
  }
}

/// The same threshold by the cache that prunes itself.
TEST(SelectCallerViews, AgreeWithTheCache) {
  const kvzap::ExecutionSpace exec;
  std::mt19937 random(6);
  const std::size_t heads = 3, tokens = 400, dim = 8;
  const auto scores = tied_scores<float>(heads, tokens, random);
  const auto view = matrix_of<float, Kokkos::LayoutRight, kvzap::MemorySpace>(scores);
  const auto rows = view_of<float, Kokkos::LayoutRight, kvzap::MemorySpace>(
      random_array<float>(tokens, heads, dim, random));
  SelectRule rule;
  rule.threshold = 0.25f;
  rule.sink = 4;
  rule.window = 32;
  kvzap::CacheShape shape;
  shape.heads = {static_cast<int>(heads)};
  shape.head_dim = static_cast<int>(dim);
  shape.window = static_cast<int>(rule.window);
  kvzap::KVCache cache(kvzap::DType::f32, shape);
  const auto sequence = cache.add_sequence();
  const auto counts = cache.append(exec, sequence, 0, rows, rows, view, rule);
  const auto list = kvzap::select(exec, view, rule);
  EXPECT_EQ(counts.judged, list.judged);
  EXPECT_EQ(counts.evicted, static_cast<std::int64_t>(heads * tokens) - list.rows);
  const auto kept = kept_of(list);
  for (std::size_t h = 0; h < heads; ++h) {
    auto positions = cache.host_rows(sequence, 0, static_cast<int>(h)).positions;
    std::sort(positions.begin(), positions.end());
    EXPECT_EQ(kept[h], positions);
  }
}

TEST(SelectCallerViews, ErrorsNameTheArgument) {
  using Exec = Kokkos::DefaultExecutionSpace;
  using Space = Exec::memory_space;
  const Kokkos::View<float**, Space> scores("scores", 2, 10);
  SelectRule rule;
  rule.window = -1;
  expect_error([&] { kvzap::select(Exec(), scores, rule); },
               {"select: rule.window is -1; expected 0 or more"});
  rule = {};
  rule.first = -2;
  expect_error([&] { kvzap::select(Exec(), scores, rule); }, {"select: rule.first is -2"});
  const auto list = kvzap::select(Exec(), scores, SelectRule());
  expect_error([&] { kvzap::compact(Exec(), list, Kokkos::View<float***, Space>("k", 9, 2, 4)); },
               {"compact: an array is (9, 2, 4); expected (10, 2, 4) = (token, head, dim)"});
  expect_error([&] { kvzap::compact(Exec(), list, Kokkos::View<float**, Space>("p", 10, 2)); },
               {"compact: an array is (10, 2); expected (2, 10) = (head, token)"});
}

}  // namespace
