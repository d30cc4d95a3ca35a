// Lists of kept pairs and gathered rows against loops over plain vectors.
#include <gtest/gtest.h>

#include <kvzap/core/compact.hpp>
#include <kvzap/core/keep_list.hpp>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace kvzap {
namespace {

constexpr float nan = std::numeric_limits<float>::quiet_NaN();
constexpr float infinity = std::numeric_limits<float>::infinity();

using Matrix = std::vector<std::vector<float>>;  // (head, token)

struct Case {
  Matrix scores;
  EvictionRule rule;
  std::int64_t window = 0;
  std::int64_t first = 0;
};

/// Copies into a view that the execution space reaches, through a mirror.
template <class View, class Function>
void fill(const View& view, Function&& function) {
  auto host = Kokkos::create_mirror_view(view);
  function(host);
  Kokkos::deep_copy(view, host);
}

template <class View>
auto on_host(const View& view) {
  return Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, view);
}

template <class Layout>
KeepList<> list_of(const Case& c, std::size_t tokens) {
  Kokkos::View<float**, Layout, MemorySpace> scores("scores", c.scores.size(), tokens);
  fill(scores, [&](const auto& host) {
    for (std::size_t h = 0; h < c.scores.size(); ++h) {
      for (std::size_t t = 0; t < tokens; ++t) host(h, t) = c.scores[h][t];
    }
  });
  const Kokkos::View<const float**, Layout, MemorySpace> read_only = scores;
  SelectRule rule;
  static_cast<EvictionRule&>(rule) = c.rule;
  rule.window = c.window;
  rule.first = c.first;
  return select(ExecutionSpace{}, read_only, rule);
}

template <class Layout>
void expect_reference(const Case& c) {
  const std::size_t tokens = c.scores.empty() ? 0 : c.scores[0].size();
  std::vector<std::int64_t> offsets = {0}, kept;
  std::int64_t judged = 0, non_finite = 0;
  for (const auto& head : c.scores) {
    for (std::size_t t = 0; t < tokens; ++t) {
      const auto token = static_cast<std::int64_t>(t);
      const bool is_judged =
          c.rule.judges() && token + c.window < static_cast<std::int64_t>(tokens);
      const bool evicted = is_judged && c.first + token >= c.rule.sink && std::isfinite(head[t]) &&
                           head[t] < c.rule.threshold;
      judged += is_judged;
      non_finite += is_judged && !std::isfinite(head[t]);
      if (!evicted) kept.push_back(token);
    }
    offsets.push_back(static_cast<std::int64_t>(kept.size()));
  }
  const KeepList<> list = list_of<Layout>(c, tokens);
  EXPECT_EQ(list.rows, static_cast<std::int64_t>(kept.size()));
  EXPECT_EQ(list.judged, judged);
  EXPECT_EQ(list.non_finite, non_finite);
  const auto list_offsets = on_host(list.offsets);
  const auto list_tokens = on_host(list.tokens);
  const auto list_heads = on_host(list.heads);
  ASSERT_EQ(list_offsets.extent(0), offsets.size());
  ASSERT_EQ(list_tokens.extent(0), kept.size());
  ASSERT_EQ(list_heads.extent(0), kept.size());
  for (std::size_t h = 0; h < offsets.size(); ++h) EXPECT_EQ(list_offsets(h), offsets[h]);
  for (std::size_t h = 0; h + 1 < offsets.size(); ++h) {
    for (std::int64_t row = offsets[h]; row < offsets[h + 1]; ++row) {
      EXPECT_EQ(list_tokens(row), kept[row]);
      EXPECT_EQ(list_heads(row), static_cast<std::int32_t>(h));
    }
  }
}

void expect_reference_in_all_layouts(const Case& c) {
  expect_reference<Kokkos::LayoutRight>(c);
  expect_reference<Kokkos::LayoutLeft>(c);
}

Matrix random_scores(std::size_t heads, std::size_t tokens, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(-4, 2);
  Matrix scores(heads, std::vector<float>(tokens));
  for (auto& head : scores) {
    for (float& score : head) score = normal(random);
  }
  return scores;
}

constexpr EvictionRule judged(float threshold, std::int64_t sink = 0) {
  EvictionRule rule;
  rule.threshold = threshold;
  rule.sink = sink;
  return rule;
}

TEST(EvictionRule, JudgesByItsThresholdAlone) {
  EvictionRule rule;
  EXPECT_FALSE(rule.judges());
  EXPECT_TRUE(rule.keeps(-1e30f, 0));
  rule.threshold = -4;
  EXPECT_TRUE(rule.judges());
  EXPECT_TRUE(rule.keeps(-4.0f, 0));
  EXPECT_FALSE(rule.keeps(-4.1f, 0));
  rule.sink = 1;
  EXPECT_TRUE(rule.keeps(-4.1f, 0));
  EXPECT_FALSE(rule.keeps(-4.1f, 1));
  for (const float score : {nan, infinity, -infinity}) EXPECT_TRUE(rule.keeps(score, 1));
  EXPECT_TRUE(EvictionRule{-infinity}.judges());
  EXPECT_TRUE(EvictionRule{-infinity}.keeps(-1e30f, 0));
  EXPECT_FALSE(EvictionRule{infinity}.keeps(1e30f, 0));
  rule.judge = false;
  EXPECT_FALSE(rule.judges());
  EXPECT_TRUE(rule.keeps(-9.0f, 1));
}

TEST(KeepList, NothingToJudge) {
  expect_reference_in_all_layouts({{}, judged(0)});
  expect_reference_in_all_layouts({Matrix(3), judged(0)});
}

TEST(KeepList, RandomScores) {
  for (const std::size_t tokens : {1u, 2u, 63u, 64u, 65u, 1000u}) {
    for (const std::int64_t window : {0, 1, 64, 5000}) {
      expect_reference_in_all_layouts({random_scores(5, tokens, tokens), judged(-4), window});
      expect_reference_in_all_layouts({random_scores(5, tokens, tokens), judged(-3, 4), window, 2});
    }
  }
}

TEST(KeepList, AllKeptAndAllDropped) {
  const Matrix scores = random_scores(4, 300, 1);
  expect_reference_in_all_layouts({scores, judged(-infinity)});
  expect_reference_in_all_layouts({scores, EvictionRule::keep_all()});
  expect_reference_in_all_layouts({scores, judged(infinity)});
  EXPECT_EQ(list_of<Kokkos::LayoutRight>({scores, judged(infinity)}, 300).rows, 0);
  EXPECT_EQ(list_of<Kokkos::LayoutRight>({scores, judged(infinity), 7}, 300).rows, 4 * 7);
}

TEST(KeepList, SkewedHeads) {
  Matrix scores(6, std::vector<float>(2000, -9.0f));
  for (float& score : scores[3]) score = 0;  // one head keeps all, the others nearly nothing
  scores[0][1999] = scores[5][0] = 0;
  expect_reference_in_all_layouts({scores, judged(-4)});
}

TEST(KeepList, ScoresThatAreNotNumbersKeepTheirPairs) {
  Matrix scores(2, std::vector<float>(40, -9.0f));
  scores[0][3] = nan;
  scores[1][0] = infinity;
  scores[1][39] = -infinity;
  expect_reference_in_all_layouts({scores, judged(-4)});
  expect_reference_in_all_layouts({scores, judged(-4), 1});  // the last is in the window
}

TEST(KeepList, BadArguments) {
  const Case c{random_scores(1, 4, 1), judged(0)};
  EXPECT_THROW(list_of<Kokkos::LayoutRight>({c.scores, c.rule, -1}, 4), Error);
  EXPECT_THROW(list_of<Kokkos::LayoutRight>({c.scores, c.rule, 0, -1}, 4), Error);
}

template <class Value, class RowsLayout, class KeptLayout>
void expect_gathered() {
  constexpr int heads = 3, tokens = 130, dim = 24;
  const KeepList<> list =
      list_of<Kokkos::LayoutRight>({random_scores(heads, tokens, 7), judged(-4), 8}, tokens);
  const auto value = [](std::int64_t t, std::int64_t h, std::int64_t d) {
    return Value(static_cast<float>((t * 7 + h * 31 + d) % 199));
  };
  Kokkos::View<Value***, RowsLayout, MemorySpace> rows("rows", tokens, heads, dim);
  fill(rows, [&](const auto& host) {
    for (int t = 0; t < tokens; ++t) {
      for (int h = 0; h < heads; ++h) {
        for (int d = 0; d < dim; ++d) host(t, h, d) = value(t, h, d);
      }
    }
  });
  Kokkos::View<Value**, KeptLayout, MemorySpace> kept("kept", list.rows, dim);
  gather_kept(ExecutionSpace{}, list, rows, kept);
  const auto result = on_host(kept);
  const auto list_tokens = on_host(list.tokens);
  const auto list_heads = on_host(list.heads);
  ASSERT_GT(list.rows, 0);
  ASSERT_LT(list.rows, heads * tokens);
  for (std::int64_t row = 0; row < list.rows; ++row) {
    for (int d = 0; d < dim; ++d) {
      EXPECT_EQ(static_cast<float>(result(row, d)),
                static_cast<float>(value(list_tokens(row), list_heads(row), d)));
    }
  }
}

template <class Value>
void expect_gathered_in_all_layouts() {
  expect_gathered<Value, Kokkos::LayoutRight, Kokkos::LayoutRight>();
  expect_gathered<Value, Kokkos::LayoutLeft, Kokkos::LayoutRight>();
  expect_gathered<Value, Kokkos::LayoutRight, Kokkos::LayoutLeft>();
}

TEST(GatherKept, EveryValueTypeAndLayout) {
  expect_gathered_in_all_layouts<float>();
  expect_gathered_in_all_layouts<half>();
  expect_gathered_in_all_layouts<bfloat16>();
  expect_gathered_in_all_layouts<double>();
}

TEST(GatherKept, StridedViews) {
  // One layer's keys and values as an engine may have them: (token, layer, key or value, head,
  // dim).
  constexpr int heads = 2, tokens = 20, dim = 8;
  Kokkos::View<float*****, Kokkos::LayoutRight, MemorySpace> all("all", tokens, 3, 2, heads, dim);
  fill(all, [&](const auto& host) {
    for (int t = 0; t < tokens; ++t) {
      for (int h = 0; h < heads; ++h) {
        for (int d = 0; d < dim; ++d)
          host(t, 1, 1, h, d) = static_cast<float>(100 * t + 10 * h + d);
      }
    }
  });
  const auto rows = Kokkos::subview(all, Kokkos::ALL, 1, 1, Kokkos::ALL, Kokkos::ALL);
  const KeepList<> list =
      list_of<Kokkos::LayoutRight>({random_scores(heads, tokens, 3), judged(-4)}, tokens);
  Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace> target("target", list.rows, 2, dim);
  const auto kept = Kokkos::subview(target, Kokkos::ALL, 1, Kokkos::ALL);
  gather_kept(ExecutionSpace{}, list, rows, kept);
  const auto result = on_host(target);
  const auto list_tokens = on_host(list.tokens);
  const auto list_heads = on_host(list.heads);
  for (std::int64_t row = 0; row < list.rows; ++row) {
    for (int d = 0; d < dim; ++d) {
      EXPECT_EQ(result(row, 1, d),
                static_cast<float>(100 * list_tokens(row) + 10 * list_heads(row) + d));
      EXPECT_EQ(result(row, 0, d), 0.0f);  // what lies between is not touched
    }
  }
}

TEST(GatherKept, NothingKept) {
  const KeepList<> list =
      list_of<Kokkos::LayoutRight>({random_scores(2, 10, 3), judged(infinity)}, 10);
  const Kokkos::View<float***, MemorySpace> rows("rows", 10, 2, 4);
  gather_kept(ExecutionSpace{}, list, rows, Kokkos::View<float**, MemorySpace>("kept", 0, 4));
}

TEST(GatherKept, ExtentsThatDoNotFit) {
  const ExecutionSpace exec;
  const KeepList<> list =
      list_of<Kokkos::LayoutRight>({random_scores(2, 10, 3), EvictionRule::keep_all()}, 10);
  const Kokkos::View<float***, MemorySpace> rows("rows", 10, 2, 4);
  const auto kept = [](int n, int dim) {
    return Kokkos::View<float**, MemorySpace>("kept", n, dim);
  };
  gather_kept(exec, list, rows, kept(20, 4));
  EXPECT_THROW(gather_kept(exec, list, rows, kept(19, 4)), Error);
  EXPECT_THROW(gather_kept(exec, list, rows, kept(20, 5)), Error);
  const Kokkos::View<float***, MemorySpace> other("rows", 10, 3, 4);
  EXPECT_THROW(gather_kept(exec, list, other, kept(20, 4)), Error);
  const Kokkos::View<float***, MemorySpace> shorter("rows", 9, 2, 4);
  EXPECT_THROW(gather_kept(exec, list, shorter, kept(20, 4)), Error);
}

std::set<std::string> kernels;

TEST(KeepListLabels, EveryKernelIsNamed) {
  namespace tools = Kokkos::Tools::Experimental;
  kernels.clear();
  const auto note = [](const char* label, const std::uint32_t, std::uint64_t*) {
    kernels.insert(label);
  };
  tools::set_begin_parallel_for_callback(note);
  tools::set_begin_parallel_reduce_callback(note);
  tools::set_begin_parallel_scan_callback(note);
  const Kokkos::View<const float**, MemorySpace> scores =
      Kokkos::View<float**, MemorySpace>("scores", 2, 9);
  const auto list = select(ExecutionSpace{}, scores, SelectRule());
  const Kokkos::View<float***, MemorySpace> rows("rows", 9, 2, 4);
  gather_kept(ExecutionSpace{}, list, rows, Kokkos::View<float**, MemorySpace>("kept", 18, 4));
  tools::set_begin_parallel_for_callback(nullptr);
  tools::set_begin_parallel_reduce_callback(nullptr);
  tools::set_begin_parallel_scan_callback(nullptr);
  for (const char* name : {"kvzap::select::flag", "kvzap::list_flagged::count",
                           "kvzap::list_flagged::fill", "kvzap::gather_kept::copy"}) {
    EXPECT_EQ(kernels.count(name), 1u) << name;
  }
}

}  // namespace
}  // namespace kvzap
