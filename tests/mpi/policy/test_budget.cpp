// Budgets over ranks: the same rows whatever rank has which head.
#include <gtest/gtest.h>

#include <kvzap/engine/budget.hpp>

#include "budget_reference.hpp"

namespace kvzap {
namespace {

const Budget::Model model = {5, 4, 64};

/// Rank of a head: dealt in turns, all to the last rank, or at random.
int rank_of(int placement, std::size_t head, int ranks) {
  if (placement == 0) return static_cast<int>(head) % ranks;
  if (placement == 1) return ranks - 1;
  return static_cast<int>((head * 2654435761u >> 7) % 97) % ranks;
}

TEST(BudgetOverRanks, DoesNotDependOnPlacement) {
  const auto comm = Communicator::world();
  Budget half;
  half.amount = Budget::Amount::evict_ratio;
  half.evict_ratio = 0.6;
  std::vector<Budget> budgets(10, half);
  budgets[1].pool = Budget::Pool::layer;
  budgets[2].pool = Budget::Pool::model;
  budgets[2].safeguard = 0;
  budgets[2].counts_pools = true;
  budgets[3].pool = Budget::Pool::model;
  budgets[4].chunk = 40;
  budgets[5].group = 7;
  budgets[7].group = 7;
  budgets[7].spiky = 2;
  budgets[6].pyramid = true;
  budgets[6].pyramid_window = 10;
  budgets[6].pool = Budget::Pool::layer;
  HeadRatios ratios;
  ratios.layers = model.layers;
  ratios.heads = model.kv_heads;
  for (int i = 0; i < model.layers * model.kv_heads; ++i) {
    ratios.ratios.push_back(static_cast<float>(i * 37 % 101) / 101);
  }
  ratios.sink = 3;
  ratios.window = 2;
  budgets[8].head_ratios = std::make_shared<const HeadRatios>(ratios);
  budgets[9].pool = Budget::Pool::model;
  budgets[9].safeguard = 0;
  budgets[9].is_composite = true;
  for (std::size_t b = 0; b < budgets.size(); ++b) {
    for (const int kind : {0, 1, 2, 3}) {
      const auto heads =
          test::make_heads(model.layers, model.kv_heads, 131, kind == 1, kind == 2, kind == 3);
      const test::Verdicts expected = test::choose(budgets[b], model, 131, heads);
      for (const int placement : {0, 1, 2}) {
        std::vector<std::size_t> mine;
        for (std::size_t i = 0; i < heads.size(); ++i) {
          if (rank_of(placement, i, comm.size()) == comm.rank()) mine.push_back(i);
        }
        const auto found = test::choose(budgets[b], comm, model, 131, heads, mine);
        ASSERT_EQ(found.size(), mine.size());
        for (std::size_t k = 0; k < mine.size(); ++k) {
          EXPECT_EQ(found[k], expected[mine[k]])
              << "budget " << b << ", scores " << kind << ", placement " << placement << ", head "
              << mine[k];
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvzap
