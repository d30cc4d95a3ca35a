#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <kvzap/core/head_partition.hpp>
#include <numeric>
#include <random>
#include <vector>

#include "unit/temporary_folder.hpp"

namespace {

using kvzap::even_range;
using kvzap::HeadPartition;
using kvzap::test::expect_error;
using Kept = std::vector<std::vector<std::int64_t>>;

void expect_valid(const HeadPartition& partition, int layers, int heads, int ranks) {
  ASSERT_EQ(partition.n_layers(), layers);
  ASSERT_EQ(partition.n_kv_heads(), heads);
  ASSERT_EQ(partition.n_ranks(), ranks);
  std::vector<int> every(heads);
  std::iota(every.begin(), every.end(), 0);
  for (int layer = 0; layer < layers; ++layer) {
    std::vector<int> seen;
    for (int rank = 0; rank < ranks; ++rank) {
      const auto& own = partition.heads(layer, rank);
      EXPECT_TRUE(!own.empty() || ranks > heads) << "layer " << layer << " rank " << rank;
      EXPECT_TRUE(own.size() <= 1 || ranks <= heads) << "layer " << layer << " rank " << rank;
      EXPECT_TRUE(std::is_sorted(own.begin(), own.end()));
      seen.insert(seen.end(), own.begin(), own.end());
    }
    std::sort(seen.begin(), seen.end());
    EXPECT_EQ(seen, every) << "layer " << layer;
  }
}

std::int64_t longest_rank(const HeadPartition& partition, const Kept& kept, int layer) {
  std::int64_t longest = 0;
  for (int rank = 0; rank < partition.n_ranks(); ++rank) {
    std::int64_t load = 0;
    for (int head : partition.heads(layer, rank)) load += kept[layer][head];
    longest = std::max(longest, load);
  }
  return longest;
}

/// The longest rank of the best deal, by trying all of them.
std::int64_t best_deal(const std::vector<std::int64_t>& heads, std::vector<std::int64_t>& load,
                       std::size_t next) {
  if (next == heads.size()) return *std::max_element(load.begin(), load.end());
  std::int64_t best = INT64_MAX;
  for (auto& rank : load) {
    rank += heads[next];
    best = std::min(best, best_deal(heads, load, next + 1));
    rank -= heads[next];
  }
  return best;
}

TEST(HeadPartition, EvenRangesTileTheTotal) {
  for (std::int64_t total : {0, 1, 7, 8, 100}) {
    for (int parts : {1, 2, 3, 8, 13}) {
      std::int64_t next = 0;
      for (int part = 0; part < parts; ++part) {
        const auto [begin, end] = even_range(total, parts, part);
        EXPECT_EQ(begin, next);
        EXPECT_GE(end - begin, total / parts);
        EXPECT_LE(end - begin, (total + parts - 1) / parts);
        next = end;
      }
      EXPECT_EQ(next, total);
    }
  }
}

TEST(HeadPartition, EvenDealsContiguousRuns) {
  for (int heads : {1, 2, 5, 8}) {
    for (int ranks = 1; ranks <= heads; ++ranks) {
      const auto partition = HeadPartition::even(3, heads, ranks);
      expect_valid(partition, 3, heads, ranks);
      for (int rank = 0; rank < ranks; ++rank) {
        const auto& own = partition.heads(1, rank);
        EXPECT_EQ(own.back() - own.front() + 1, static_cast<int>(own.size()));
      }
    }
  }
  // Uneven: the first ranks have one more.
  const auto partition = HeadPartition::even(1, 5, 3);
  EXPECT_EQ(partition.heads(0, 0), (std::vector<int>{0, 1}));
  EXPECT_EQ(partition.heads(0, 1), (std::vector<int>{2, 3}));
  EXPECT_EQ(partition.heads(0, 2), (std::vector<int>{4}));
}

// With more ranks than heads, every rank has its share of the outputs of q, k and v and of the
// inputs of o; with fewer these follow the heads.
TEST(HeadPartition, RanksSharePartsOfHeads) {
  for (const int heads : {1, 2, 5}) {
    for (const int ranks : {1, 2, 3, 8, 13, 64}) {
      for (const std::int64_t dim : {64, 80}) {
        const std::int64_t group = 3;
        for (const auto& partition :
             {HeadPartition::even(2, heads, ranks),
              HeadPartition::balanced(Kept(2, std::vector<std::int64_t>(heads, 7)), ranks)}) {
          expect_valid(partition, 2, heads, ranks);
          EXPECT_EQ(partition.deals_projections(), ranks > heads);
          const auto expect_shares = [&](std::int64_t total, const auto& ranges_of) {
            std::vector<int> owners(static_cast<std::size_t>(total), 0);
            std::int64_t least = total, most = 0;
            for (int r = 0; r < ranks; ++r) {
              std::int64_t own = 0, before = 0;
              for (const auto& [begin, end] : ranges_of(r)) {
                ASSERT_LE(before, begin);
                ASSERT_LE(begin, end);
                ASSERT_LE(end, total);
                for (std::int64_t i = begin; i < end; ++i) ++owners[static_cast<std::size_t>(i)];
                own += end - begin;
                before = end;
              }
              least = std::min(least, own);
              most = std::max(most, own);
            }
            EXPECT_EQ(owners, std::vector<int>(static_cast<std::size_t>(total), 1));
            EXPECT_TRUE(most - least <= 32 || ranks <= heads);
          };
          expect_shares((group + 2) * heads * dim,
                        [&](int r) { return partition.projected(1, r, group, dim); });
          expect_shares(group * heads * dim,
                        [&](int r) { return partition.attended(1, r, group, dim); });
        }
      }
    }
  }
  // Owners are spread.
  const auto spread = HeadPartition::even(1, 2, 8);
  EXPECT_EQ(spread.heads(0, 0), std::vector<int>{0});
  EXPECT_EQ(spread.heads(0, 4), std::vector<int>{1});
}

TEST(HeadPartition, BalancedByHand) {
  // 9 | 7 | 5 4: longest first to the shortest rank; equal loads go to the lower rank.
  const auto partition = HeadPartition::balanced({{4, 9, 5, 7}, {0, 0, 0, 0}}, 3);
  EXPECT_EQ(partition.heads(0, 0), (std::vector<int>{1}));
  EXPECT_EQ(partition.heads(0, 1), (std::vector<int>{3}));
  EXPECT_EQ(partition.heads(0, 2), (std::vector<int>{0, 2}));
  EXPECT_EQ(partition.heads(1, 0), (std::vector<int>{0, 3}));
}

// Longest-first is within 4/3 - 1/(3 ranks) of the best deal (Graham 1969); the one row that each
// head counts for on top adds at most its number of heads.
TEST(HeadPartition, BalancedIsNearTheBestDeal) {
  std::mt19937 random(2);
  for (int trial = 0; trial < 60; ++trial) {
    const int heads = 1 + static_cast<int>(random() % 8);
    const int ranks = 1 + static_cast<int>(random() % std::min(heads, 4));
    Kept kept(2, std::vector<std::int64_t>(heads));
    for (auto& layer : kept) {
      // Skewed as pruned heads are: some keep almost everything, some nothing.
      for (auto& rows : layer) rows = random() % 3 == 0 ? 0 : random() % (1u << (random() % 17));
    }
    const auto partition = HeadPartition::balanced(kept, ranks);
    expect_valid(partition, 2, heads, ranks);
    const auto again = HeadPartition::balanced(kept, ranks);
    for (int layer = 0; layer < 2; ++layer) {
      for (int rank = 0; rank < ranks; ++rank) {
        EXPECT_EQ(partition.heads(layer, rank), again.heads(layer, rank));
      }
      std::vector<std::int64_t> load(ranks, 0);
      const double best = static_cast<double>(best_deal(kept[layer], load, 0));
      EXPECT_LE(longest_rank(partition, kept, layer),
                (4.0 / 3 - 1.0 / (3 * ranks)) * (best + heads))
          << "trial " << trial << " layer " << layer;
    }
  }
}

TEST(HeadPartition, BalancedBeatsContiguousRunsOnSkewedHeads) {
  const Kept kept = {{1000, 900, 800, 700, 10, 10, 10, 10}};
  EXPECT_EQ(longest_rank(HeadPartition::even(1, 8, 2), kept, 0), 3400);
  EXPECT_LE(longest_rank(HeadPartition::balanced(kept, 2), kept, 0), 1720);
}

TEST(HeadPartition, ErrorsNameBothSides) {
  expect_error(
      [] {
        HeadPartition::balanced({{1, 2, 3}, {1, 2}}, 1);
      },
      {"layer 1 has 2", "layer 0 has 3"});
  expect_error([] { HeadPartition::balanced({{1, 2}, {1, -7}}, 1); }, {"layer 1 head 1", "-7"});
  expect_error([] { HeadPartition::balanced({}, 1); }, {"0 layers"});
  expect_error([] { HeadPartition::even(1, 4, 0); }, {"0 ranks"});
}

}  // namespace
