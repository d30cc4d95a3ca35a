// Selection over ranks: the same rows whatever rank has which head.
#include <gtest/gtest.h>

#include <cmath>
#include <kvzap/core/selection.hpp>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "selection_reference.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap {
namespace {

using test::Head;

constexpr int n_layers = 5;
constexpr int n_heads = 3;

/// Every rank makes the same. Pools: 0 has all heads, 1 … n_layers one layer each, further ones one
/// head each; which of the three `kind` says.
std::vector<Head> make_heads(int kind, bool with_ties) {
  std::mt19937 random(11);
  std::normal_distribution<float> normal(-6, 2);
  std::vector<Head> heads;
  for (int layer = 0; layer < n_layers; ++layer) {
    for (int h = 0; h < n_heads; ++h) {
      Head head{{}, 0, layer * n_heads + h};
      if (kind == 1) head.pool = 1 + layer;
      if (kind == 2) head.pool = 1 + n_layers + layer * n_heads + h;
      if (h != 1 || layer != 2) head.scores.resize(random() % 400);
      for (float& score : head.scores) {
        score = with_ties ? std::round(normal(random)) : normal(random);
        if (random() % 100 == 0) score = std::numeric_limits<float>::quiet_NaN();
      }
      heads.push_back(head);
    }
  }
  return heads;
}

std::vector<std::int64_t> keep_share(const std::vector<Head>& heads, double share) {
  std::vector<std::int64_t> keep(1 + n_layers + n_layers * n_heads, 0);
  for (const Head& head : heads) {
    keep[static_cast<std::size_t>(head.pool)] += static_cast<std::int64_t>(head.scores.size());
  }
  for (auto& k : keep) k = static_cast<std::int64_t>(share * static_cast<double>(k));
  return keep;
}

/// Rank of a head: dealt in turns, all to the last rank, or at random.
int rank_of(int placement, std::size_t head, int ranks) {
  if (placement == 0) return static_cast<int>(head) % ranks;
  if (placement == 1) return ranks - 1;
  return static_cast<int>((head * 2654435761u >> 7) % 97) % ranks;
}

TEST(SelectionOverRanks, DoesNotDependOnPlacement) {
  const auto comm = Communicator::world();
  for (const int kind : {0, 1, 2}) {
    for (const bool with_ties : {false, true}) {
      const std::vector<Head> heads = make_heads(kind, with_ties);
      for (const double share : {0.0, 0.1, 0.5, 1.0}) {
        const std::vector<std::int64_t> keep = keep_share(heads, share);
        const auto expected = test::stay_by_sorting(heads, keep);
        for (const int placement : {0, 1, 2}) {
          std::vector<std::size_t> mine;
          for (std::size_t i = heads.size(); i-- > 0;) {
            if (rank_of(placement, i, comm.size()) == comm.rank()) mine.push_back(i);
          }
          std::vector<ScoreSegment> segments;
          for (const std::size_t i : mine) segments.push_back(test::segment_of(heads[i]));
          const auto cutoffs = select_top(ExecutionSpace(), comm, segments, keep);
          ASSERT_EQ(cutoffs.size(), mine.size());
          for (std::size_t k = 0; k < mine.size(); ++k) {
            EXPECT_EQ(test::stay_by_cutoff(heads[mine[k]], cutoffs[k]), expected[mine[k]])
                << "pools " << kind << ", share " << share << ", placement " << placement
                << ", head " << mine[k];
          }
        }
      }
    }
  }
}

TEST(SelectionOverRanks, EveryRankThrowsTheSame) {
  const auto comm = Communicator::world();
  const int last = comm.size() - 1;
  const auto refuse = [&](const Head& head, const std::vector<std::int64_t>& keep,
                          std::initializer_list<std::string_view> parts) {
    try {
      select_top(ExecutionSpace(), comm, {test::segment_of(head)}, keep);
      ADD_FAILURE() << "no error was thrown";
    } catch (const AgreedError& error) {
      for (const std::string_view part : parts) {
        EXPECT_NE(std::string_view(error.what()).find(part), std::string_view::npos)
            << error.what();
      }
    }
  };
  const Head good{{1, 2, 3}, 0, comm.rank()};
  Head bad = good;
  if (comm.rank() == last) bad.pool = 3;
  refuse(bad, {1}, {"rank " + std::to_string(last), "pool 3"});
  refuse(good, {3 * comm.size() + 1}, {"pool 0", "it has " + std::to_string(3 * comm.size())});
  if (comm.size() > 1) {
    refuse(good, {comm.rank() == last ? 1 : 2}, {"rank " + std::to_string(last)});
    refuse(good, std::vector<std::int64_t>(comm.rank() == last ? 2 : 1, 0),
           {"rank " + std::to_string(last)});
    refuse({{1}, 0, 4}, {1}, {"order 4"});
  }
}

}  // namespace
}  // namespace kvzap
