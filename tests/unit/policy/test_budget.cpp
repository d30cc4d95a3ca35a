#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <kvzap/engine/budget.hpp>
#include <nlohmann/json.hpp>
#include <string>

#include "base/machine.hpp"
#include "budget_reference.hpp"
#include "source_dir.hpp"

namespace kvzap {
namespace {

using test::ScoredHead;
using test::Verdicts;

const Budget::Model small = {4, 3, 64};

Budget ratio_budget(double ratio, Budget::Pool pool = Budget::Pool::head) {
  Budget budget;
  budget.amount = Budget::Amount::evict_ratio;
  budget.evict_ratio = ratio;
  budget.pool = pool;
  return budget;
}

Budget keep_budget(std::int64_t tokens) {
  Budget budget;
  budget.amount = Budget::Amount::keep_tokens;
  budget.keep_tokens = tokens;
  return budget;
}

Budget bytes_budget(std::int64_t bytes) {
  Budget budget;
  budget.amount = Budget::Amount::bytes;
  budget.bytes = bytes;
  return budget;
}

std::string message_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

/// Both forms of the kernels.
class BudgetKernels : public ::testing::TestWithParam<bool> {
 protected:
  BudgetKernels() : m_device(base::machine().on_device()) {
    base::machine().set_device(GetParam());
  }
  ~BudgetKernels() override { base::machine().set_device(m_device); }

 private:
  bool m_device;
};

INSTANTIATE_TEST_SUITE_P(Kernels, BudgetKernels, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "Device" : "Host"; });

TEST(BudgetCounts, AreThoseOfKvpress) {
  // max(1, int(n * (1 - ratio))), with what rounding does to it: 1 - 0.9 is less than 0.1.
  EXPECT_EQ(ratio_budget(0.5).rows_per_head(small, 0, 1001), 500);
  EXPECT_EQ(ratio_budget(0.9).rows_per_head(small, 0, 1000), 99);
  EXPECT_EQ(ratio_budget(0.1).rows_per_head(small, 0, 10), 9);
  EXPECT_EQ(ratio_budget(0.99).rows_per_head(small, 0, 7), 1);
  EXPECT_EQ(ratio_budget(0).rows_per_head(small, 0, 7), 7);
  EXPECT_EQ(ratio_budget(0.5).rows_per_head(small, 0, 0), 0);
}

TEST(BudgetCounts, TokensAndBytes) {
  EXPECT_EQ(keep_budget(100).rows_per_head(small, 0, 1000), 100);
  EXPECT_EQ(keep_budget(100).rows_per_head(small, 0, 30), 30);
  // 12 heads of rows of 64 bytes.
  EXPECT_EQ(bytes_budget(12 * 64 * 5 + 63).rows_per_head(small, 0, 1000), 5);
  EXPECT_EQ(bytes_budget(12 * 64).rows_per_head(small, 0, 1000), 1);
  EXPECT_EQ(bytes_budget(12 * 64 * 5).rows_per_head(small, 0, 3), 3);
  const std::string message =
      message_of([] { bytes_budget(12 * 64 - 1).rows_per_head(small, 0, 1000); });
  EXPECT_NE(message.find("minimum, 768"), std::string::npos) << message;
}

TEST(BudgetCounts, PyramidIsThatOfKvpress) {
  // PyramidKVPress.get_layer_budget of kvpress 0.5.5.
  struct Case {
    std::int64_t tokens;
    double ratio;
    std::int64_t window;
    double beta;
    std::vector<std::int64_t> rows;
  };
  const std::vector<Case> cases = {
      {1000, 0.5, 64, 20, {936, 811, 687, 562, 438, 313, 189, 64}},
      {1000, 0.9, 64, 20, {100, 100, 100, 100, 100, 100, 100, 100}},
      {777, 0.3, 16, 3, {761, 652, 544, 435, 327}},
      {101, 0.5, 64, 20, {50, 50, 50, 50}},
      {1001, 0.5, 1, 2, {751}},
      {50, 0.99, 4, 20, {1, 1, 1, 1}},
      {333, 0.5, 0, 1, {166, 166, 166, 166, 166, 166}},
      {4096, 0.75, 8, 5, {1843, 1783, 1722, 1661, 1600, 1540, 1479, 1418, 1358, 1297,
                          1236, 1176, 1115, 1054, 994,  933,  872,  812,  751,  690,
                          630,  569,  508,  448,  387,  326,  265,  205}}};
  for (const Case& c : cases) {
    Budget budget = ratio_budget(c.ratio);
    budget.pyramid = true;
    budget.pyramid_window = c.window;
    budget.pyramid_beta = c.beta;
    const Budget::Model model = {static_cast<int>(c.rows.size()), 2, 64};
    for (std::size_t l = 0; l < c.rows.size(); ++l) {
      EXPECT_EQ(budget.rows_per_head(model, static_cast<int>(l), c.tokens), c.rows[l])
          << c.tokens << " tokens, layer " << l;
    }
  }
}

TEST(BudgetCounts, PyramidStaysWithinBytes) {
  for (const std::int64_t rows : {20, 101, 350, 777}) {
    Budget budget = bytes_budget(rows * 7 * 2 * 64);
    budget.pyramid = true;
    budget.pyramid_window = 8;
    budget.pyramid_beta = 3;
    const Budget::Model model = {7, 2, 64};
    std::int64_t sum = 0;
    for (int l = 0; l < model.layers; ++l) sum += budget.rows_per_head(model, l, 1000);
    EXPECT_LE(sum, rows * 7);
    EXPECT_GT(sum, rows * 7 - 8);
  }
}

TEST(BudgetCounts, LayersWithRatiosOfTheirOwn) {
  Budget budget = ratio_budget(0.5);
  budget.layer_ratios = {0, 0.25, 0.5, 0.9};
  const std::vector<std::int64_t> expected = {100, 75, 50, 9};
  for (int l = 0; l < 4; ++l) {
    EXPECT_EQ(budget.rows_per_head(small, l, 100), expected[static_cast<std::size_t>(l)]);
  }
}

TEST(BudgetCounts, Parts) {
  Budget budget = ratio_budget(0.5);
  budget.chunk = 7;
  // 7, 7, 7, 1: 3 + 3 + 3 + 1.
  EXPECT_EQ(budget.rows_per_head(small, 0, 22), 10);
  EXPECT_EQ(budget.rows_of_part(small, 0, 22, 22, 21, 22), 1);
  // Of tokens: even shares that add up.
  budget = keep_budget(10);
  budget.chunk = 7;
  std::int64_t sum = 0;
  for (std::int64_t begin = 0; begin < 22; begin += 7) {
    sum += budget.rows_of_part(small, 0, 22, 22, begin, std::min<std::int64_t>(22, begin + 7));
  }
  EXPECT_EQ(sum, 10);
}

TEST(BudgetCounts, Groups) {
  Budget budget = ratio_budget(0.5);
  budget.group = 20;
  EXPECT_EQ(budget.rows_per_head(small, 0, 210), 100);  // 5 of 11
  EXPECT_EQ(budget.rows_per_head(small, 0, 19), 9);     // no whole one
  budget = keep_budget(59);
  budget.group = 20;
  EXPECT_EQ(budget.rows_per_head(small, 0, 210), 40);
  budget.keep_tokens = 19;
  const std::string message = message_of([&] { budget.rows_per_head(small, 0, 210); });
  EXPECT_NE(message.find("minimum, 20"), std::string::npos) << message;
  budget.keep_tokens = 500;
  EXPECT_EQ(budget.rows_per_head(small, 0, 210), 210);
}

TEST_P(BudgetKernels, EveryHeadByItself) {
  for (const bool ties : {false, true}) {
    for (const bool broken : {false, true}) {
      for (const double ratio : {0.0, 0.3, 0.5, 0.97}) {
        const auto heads = test::make_heads(4, 3, 203, false, ties, broken);
        const Budget budget = ratio_budget(ratio);
        const Verdicts found = test::choose(budget, small, 203, heads);
        const std::int64_t rows =
            std::max<std::int64_t>(1, static_cast<std::int64_t>(203 * (1 - ratio)));
        EXPECT_EQ(found, test::keep_by_sorting(Budget::Pool::head, heads,
                                               std::vector<std::int64_t>(4, rows), 0));
        if (!broken) {
          EXPECT_EQ(test::count(found), 12 * rows);
        }
      }
    }
  }
}

TEST_P(BudgetKernels, HeadsOfALayerCompete) {
  for (const bool uneven : {false, true}) {
    for (const bool ties : {false, true}) {
      for (const bool broken : {false, true}) {
        for (const double alpha : {0.0, 0.2, 1.0}) {
          const auto heads = test::make_heads(4, 3, 203, uneven, ties, broken);
          Budget budget = ratio_budget(0.7, Budget::Pool::layer);
          budget.safeguard = alpha;
          const std::int64_t rows = 60,
                             safe = alpha > 0 ? static_cast<std::int64_t>(60 * alpha) : 0;
          EXPECT_EQ(budget.safe_rows(rows), safe);
          const Verdicts found = test::choose(budget, small, 203, heads);
          EXPECT_EQ(found, test::keep_by_sorting(Budget::Pool::layer, heads,
                                                 std::vector<std::int64_t>(4, rows), safe));
          if (!uneven && !broken) {
            EXPECT_EQ(test::count(found), 4 * 3 * rows);
          }
        }
      }
    }
  }
}

TEST_P(BudgetKernels, SafeRowsComeBeforeTheLargestScores) {
  // Head 0 has nothing but large scores; head 1's best are safe all the same.
  std::vector<ScoredHead> heads = {{0, 0, std::vector<float>(10, 3e38f)},
                                   {0, 1, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}}};
  Budget budget = ratio_budget(0.5, Budget::Pool::layer);
  budget.safeguard = 0.4;
  const Verdicts found = test::choose(budget, {1, 2, 64}, 10, heads);
  EXPECT_EQ(std::count(found[0].begin(), found[0].end(), true), 8);
  EXPECT_EQ(found[1], std::vector<bool>({0, 0, 0, 0, 0, 0, 0, 0, 1, 1}));
  // Of a share of less than one row there is one, unless the share is 0.
  budget.safeguard = 0.01;
  EXPECT_TRUE(test::choose(budget, {1, 2, 64}, 10, heads)[1][9]);
  budget.safeguard = 0;
  EXPECT_FALSE(test::choose(budget, {1, 2, 64}, 10, heads)[1][9]);
}

TEST_P(BudgetKernels, AllLayersCompete) {
  for (const bool uneven : {false, true}) {
    for (const double alpha : {0.0, 0.5}) {
      const auto heads = test::make_heads(4, 3, 203, uneven, true, true);
      Budget budget = ratio_budget(0.7, Budget::Pool::model);
      budget.safeguard = alpha;
      const Verdicts found = test::choose(budget, small, 203, heads);
      EXPECT_EQ(found, test::keep_by_sorting(Budget::Pool::model, heads,
                                             std::vector<std::int64_t>(4, 60), alpha > 0 ? 30 : 0));
    }
  }
}

TEST_P(BudgetKernels, PoolsThatCountTheirOwnRows) {
  const auto heads = test::make_heads(4, 3, 203);
  Budget budget = ratio_budget(0.3, Budget::Pool::model);
  budget.safeguard = 0;
  budget.counts_pools = true;
  // kvpress: int(numel * ratio) go.
  EXPECT_EQ(test::count(test::choose(budget, small, 203, heads)), 2436 - 730);
  budget.pool = Budget::Pool::layer;
  EXPECT_EQ(test::count(test::choose(budget, small, 203, heads)), 4 * (609 - 182));
  budget = bytes_budget(64 * 1234 + 5);
  budget.pool = Budget::Pool::model;
  budget.safeguard = 0;
  EXPECT_EQ(test::count(test::choose(budget, small, 203, heads)), 1234);
}

TEST_P(BudgetKernels, FewerRowsThanTheBudgetStayAll) {
  const auto heads = test::make_heads(4, 3, 203, true);
  for (const Budget::Pool pool : {Budget::Pool::head, Budget::Pool::layer, Budget::Pool::model}) {
    Budget budget = keep_budget(203);
    budget.pool = pool;
    std::int64_t rows = 0;
    for (const ScoredHead& head : heads) rows += static_cast<std::int64_t>(head.scores.size());
    EXPECT_EQ(test::count(test::choose(budget, small, 1000, heads)), rows);
  }
}

TEST_P(BudgetKernels, PartsHaveBudgetsOfTheirOwn) {
  const auto heads = test::make_heads(2, 2, 100, false, true, true);
  Budget budget = ratio_budget(0.6);
  budget.chunk = 32;
  const Verdicts found = test::choose(budget, {2, 2, 64}, 100, heads);
  for (std::size_t i = 0; i < heads.size(); ++i) {
    for (std::size_t begin = 0; begin < 100; begin += 32) {
      const std::size_t end = std::min<std::size_t>(100, begin + 32);
      const std::vector<ScoredHead> part = {
          {0,
           0,
           {heads[i].scores.begin() + static_cast<std::ptrdiff_t>(begin),
            heads[i].scores.begin() + static_cast<std::ptrdiff_t>(end)}}};
      const Verdicts expected =
          test::keep_by_sorting(Budget::Pool::head, part, {end - begin == 32 ? 12 : 1}, 0);
      EXPECT_EQ(std::vector<bool>(found[i].begin() + static_cast<std::ptrdiff_t>(begin),
                                  found[i].begin() + static_cast<std::ptrdiff_t>(end)),
                expected[0]);
    }
  }
}

TEST_P(BudgetKernels, GroupsStayOrGoTogether) {
  const auto heads = test::make_heads(2, 3, 70);
  for (const double ratio : {0.0, 0.5, 0.9}) {
    Budget budget = ratio_budget(ratio);
    budget.group = 16;
    const Verdicts found = test::choose(budget, {2, 3, 64}, 70, heads);
    for (std::size_t l = 0; l < 2; ++l) {
      std::vector<std::pair<double, std::size_t>> groups;  // negative mean, number
      for (std::size_t g = 0; g < 5; ++g) {
        double sum = 0;
        const std::size_t end = std::min<std::size_t>(70, 16 * g + 16);
        for (std::size_t h = 0; h < 3; ++h) {
          for (std::size_t row = 16 * g; row < end; ++row) sum += heads[3 * l + h].scores[row];
        }
        groups.emplace_back(-sum / static_cast<double>(end - 16 * g), g);
      }
      std::sort(groups.begin(), groups.end());
      groups.resize(std::max<std::size_t>(1, static_cast<std::size_t>(5 * (1 - ratio))));
      std::vector<bool> expected(70, false);
      for (const auto& group : groups) {
        for (std::size_t row = 16 * group.second; row < 70 && row < 16 * group.second + 16; ++row) {
          expected[row] = true;
        }
      }
      for (std::size_t h = 0; h < 3; ++h) EXPECT_EQ(found[3 * l + h], expected) << ratio;
    }
  }
  // No whole group: row by row.
  Budget budget = ratio_budget(0.5);
  budget.group = 71;
  EXPECT_EQ(test::choose(budget, {2, 3, 64}, 70, heads),
            test::choose(ratio_budget(0.5), {2, 3, 64}, 70, heads));
}

TEST_P(BudgetKernels, SpikyGroupsAreDividedAsByKvpress) {
  std::ifstream file(test::source_dir() / "tests/golden/divided_groups.json");
  const auto cases = nlohmann::json::parse(file);
  ASSERT_EQ(cases.size(), 8U);
  constexpr float unit = 4096;
  for (const auto& one : cases) {
    std::vector<ScoredHead> heads;
    for (const auto& scores : one.at("scores")) {
      ScoredHead head;
      head.layer = 0;
      head.head = static_cast<int>(heads.size());
      for (const auto& score : scores) head.scores.push_back(score.get<float>() / unit);
      heads.push_back(head);
    }
    const std::size_t rows = heads[0].scores.size();
    SCOPED_TRACE(rows);
    Budget budget = ratio_budget(one.at("evict_ratio"));
    budget.group = one.at("length");
    budget.spiky = one.at("spiky");
    std::vector<bool> expected(rows, false);
    for (const std::size_t row : one.at("kept").get<std::vector<std::size_t>>())
      expected[row] = true;
    const Budget::Model model = {1, static_cast<int>(heads.size()), 64};
    const auto tokens = static_cast<std::int64_t>(rows);
    for (const auto& found : test::choose(budget, model, tokens, heads)) EXPECT_EQ(found, expected);
    EXPECT_EQ(budget.rows_per_head(model, 0, tokens),
              std::count(expected.begin(), expected.end(), true));
    // A row without a finite score stays beside the others.
    const auto gone = static_cast<std::size_t>(std::find(expected.begin(), expected.end(), false) -
                                               expected.begin());
    heads[0].scores[gone] = std::nanf("");
    EXPECT_TRUE(test::choose(budget, model, tokens, heads)[0][gone]);
  }
}

TEST_P(BudgetKernels, AGroupWithAScoreThatIsNoNumberStays) {
  auto heads = test::make_heads(1, 2, 64);
  heads[1].scores[20] = std::nanf("");
  Budget budget = ratio_budget(0.5);
  budget.group = 16;
  const Verdicts found = test::choose(budget, {1, 2, 64}, 64, heads);
  EXPECT_TRUE(found[0][16] && found[0][31] && found[1][20]);
  EXPECT_EQ(test::count(found), 2 * 2 * 16);
}

TEST_P(BudgetKernels, AHigherRatioKeepsASubset) {
  const auto heads = test::make_heads(4, 3, 97, false, true, true);
  std::vector<Budget> budgets(6, ratio_budget(0));
  budgets[1].pool = budgets[2].pool = Budget::Pool::layer;
  budgets[1].safeguard = 0;
  budgets[3].pool = budgets[4].pool = Budget::Pool::model;
  budgets[3].safeguard = 0;
  budgets[3].counts_pools = true;
  budgets[5].chunk = 16;
  for (std::size_t b = 0; b < budgets.size(); ++b) {
    Verdicts before;
    for (int percent = 0; percent < 100; percent += 3) {
      budgets[b].evict_ratio = percent / 100.0;
      Verdicts now = test::choose(budgets[b], small, 97, heads);
      for (std::size_t i = 0; percent > 0 && i < heads.size(); ++i) {
        for (std::size_t row = 0; row < now[i].size(); ++row) {
          EXPECT_TRUE(before[i][row] || !now[i][row]) << "budget " << b << ", " << percent << " %";
        }
      }
      before = std::move(now);
    }
  }
}

TEST(Budget, Contradictions) {
  const auto heads = test::make_heads(4, 3, 20);
  const auto expect_error = [&](const Budget& budget, const char* text) {
    const std::string message = message_of([&] { test::choose(budget, small, 20, heads); });
    EXPECT_NE(message.find(text), std::string::npos) << message;
  };
  expect_error(Budget(), "no amount");
  Budget budget = ratio_budget(0.5, Budget::Pool::layer);
  budget.chunk = 5;
  expect_error(budget, "heads cannot compete");
  budget = ratio_budget(0.5, Budget::Pool::model);
  budget.pyramid = true;
  expect_error(budget, "layers that compete");
  budget = ratio_budget(0.5);
  budget.chunk = budget.group = 5;
  expect_error(budget, "groups cannot compete");
}

TEST(Budget, ViewsThatDoNotFit) {
  Budget budget = ratio_budget(0.5);
  ScoredLayer layer;
  layer.heads = {0};
  layer.rows = {5};
  layer.scores = Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>("scores", 1, 5);
  layer.keep = decltype(layer.keep)("keep", 1, 4);
  const std::string message = message_of([&] {
    budget.choose(ExecutionSpace(), Communicator::self(), {1, 1, 64}, 5, {layer});
  });
  EXPECT_NE(message.find("verdicts (1, 4)"), std::string::npos) << message;
}

}  // namespace
}  // namespace kvzap
