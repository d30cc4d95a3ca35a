#include "engine/page_plan.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

namespace {

using kvzap::engine::HeadPages;
using kvzap::engine::LayerPlan;
using kvzap::engine::note_move;
using kvzap::engine::PageMove;
using kvzap::engine::PagesAway;

constexpr std::int64_t page_rows = 4;

HeadPages head_of(int owner, std::int64_t rows) {
  HeadPages head;
  head.owner = owner;
  head.rows = rows;
  head.full = head.available = rows / page_rows;
  return head;
}

std::int64_t sum(const std::vector<std::int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), std::int64_t{0});
}

std::int64_t rows_of(const HeadPages& head) {
  std::int64_t rows = head.rows;
  for (const PagesAway& run : head.away) rows += run.pages * page_rows;
  return rows;
}

/// Plans until nothing is left to do. Every move keeps all rows.
int balance(LayerPlan& plan, double tolerance) {
  std::vector<std::int64_t> rows;
  for (const HeadPages& head : plan.heads()) rows.push_back(rows_of(head));
  int moves = 0;
  while (const auto move = plan.next(tolerance, 1000)) {
    EXPECT_GT(move->pages, 0);
    EXPECT_NE(move->from, move->to);
    plan.apply(*move);
    EXPECT_EQ(sum(plan.loads()), sum(rows));
    for (std::size_t h = 0; h < rows.size(); ++h) {
      EXPECT_EQ(rows_of(plan.heads()[h]), rows[h]);
      EXPECT_GE(plan.heads()[h].full, 0);
    }
    if (++moves > 100000) {
      ADD_FAILURE() << "the plan does not end";
      break;
    }
  }
  return moves;
}

TEST(LayerPlan, KeepsRowsAndBalances) {
  std::mt19937_64 random(3);
  for (const int ranks : {2, 3, 8, 64}) {
    std::vector<HeadPages> heads;
    for (int h = 0; h < 24; ++h) {
      const int owner = h % std::min(ranks, 5);
      heads.push_back(head_of(owner, static_cast<std::int64_t>(random() % 4000) / (1 + owner)));
    }
    LayerPlan plan(ranks, page_rows, heads);
    const double before = plan.skew();
    EXPECT_GT(balance(plan, 0.05), 0);
    EXPECT_LT(plan.skew(), before);
    const double mean = static_cast<double>(sum(plan.loads())) / ranks;
    const auto largest = *std::max_element(plan.loads().begin(), plan.loads().end());
    // An owner keeps the rows of partly filled pages.
    EXPECT_LE(static_cast<double>(largest), 1.05 * mean + 2 * page_rows + 24 * page_rows / 5.0);
  }
}

TEST(LayerPlan, MovesNothingWhereNothingHelps) {
  LayerPlan one(1, page_rows, {head_of(0, 100)});
  EXPECT_FALSE(one.next(0, 1000));
  LayerPlan none(4, page_rows, {head_of(0, 0)});
  EXPECT_EQ(none.skew(), 1);
  EXPECT_FALSE(none.next(0, 1000));
  LayerPlan close(2, page_rows, {head_of(0, 103), head_of(1, 100)});
  EXPECT_FALSE(close.next(0, 1000));
  LayerPlan tolerated(2, page_rows, {head_of(0, 120), head_of(1, 100)});
  EXPECT_FALSE(tolerated.next(0.1, 1000));
  EXPECT_TRUE(tolerated.next(0.05, 1000));
  EXPECT_FALSE(tolerated.next(0.05, 0));
  // Rows of rings and shared pages stay.
  HeadPages fixed = head_of(0, 400);
  fixed.available = 0;
  EXPECT_FALSE(LayerPlan(2, page_rows, {fixed}).next(0, 1000));
}

TEST(LayerPlan, ReturnsPagesToTheirOwnerFirst) {
  HeadPages away = head_of(0, 40);
  away.away = {{1, 10, 50}};
  LayerPlan plan(2, page_rows, {away, head_of(1, 400)});
  const auto move = plan.next(0, 1000);
  ASSERT_TRUE(move);
  EXPECT_EQ(move->head, 0u);
  EXPECT_EQ(move->to, 0);
  EXPECT_EQ(move->first, 10);
  plan.apply(*move);
  EXPECT_EQ(plan.heads()[0].full, 10 + move->pages);
  away.remote_pages_may_move = false;
  const auto other = LayerPlan(2, page_rows, {away, head_of(1, 400)}).next(0, 1000);
  ASSERT_TRUE(other);
  EXPECT_EQ(other->head, 1u);
}

TEST(LayerPlan, NotesRuns) {
  std::vector<PagesAway> away;
  note_move(away, 0, {0, 0, 1, 8, 2});
  note_move(away, 0, {0, 0, 2, 5, 3});
  note_move(away, 0, {0, 2, 1, 5, 1});
  ASSERT_EQ(away.size(), 3u);
  EXPECT_EQ(away[1].pages, 2);
  EXPECT_EQ(away[2].rank, 1);
  note_move(away, 0, {0, 1, 0, 5, 1});
  note_move(away, 0, {0, 2, 0, 5, 2});
  ASSERT_EQ(away.size(), 1u);
  EXPECT_EQ(away[0].first, 8);
}

}  // namespace
