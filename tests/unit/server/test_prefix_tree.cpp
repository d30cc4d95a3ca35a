// The tree of prefixes against a plain list of keys.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "server/plan.hpp"
#include "server/prefix_tree.hpp"

namespace kvzap::server {
namespace {

TEST(PrefixTree, FindsTheLongestBeginning) {
  PrefixTree tree;
  EXPECT_EQ(tree.longest({1, 2, 3}, 3).state, -1);
  EXPECT_EQ(tree.evict(), -1);
  EXPECT_EQ(tree.insert({1, 2, 3, 4}, 10), -1);
  EXPECT_EQ(tree.insert({1, 2}, 11), -1);
  EXPECT_EQ(tree.insert({1, 2, 9}, 12), -1);
  EXPECT_EQ(tree.size(), 3);
  const auto found = tree.longest({1, 2, 3, 4, 5}, 5);
  EXPECT_EQ(found.state, 10);
  EXPECT_EQ(found.length, 4);
  EXPECT_EQ(tree.longest({1, 2, 3, 4, 5}, 3).state, 11);  // within the limit
  EXPECT_EQ(tree.longest({1, 2, 3}, 3).state, 11);        // in the middle of an edge
  EXPECT_EQ(tree.longest({1, 3}, 2).state, -1);
  EXPECT_TRUE(tree.contains({1, 2, 9}));
  EXPECT_FALSE(tree.contains({1, 2, 3}));
  EXPECT_EQ(tree.insert({1, 2, 9}, 13), 12);  // replaced
  // Leaves first, the oldest of them first; {1, 2} was used later than its leaves.
  EXPECT_EQ(tree.evict(), 10);
  EXPECT_EQ(tree.evict(), 13);
  EXPECT_EQ(tree.evict(), 11);
  EXPECT_EQ(tree.evict(), -1);
  EXPECT_EQ(tree.size(), 0);
}

TEST(PrefixTree, RandomOperationsAgreeWithAList) {
  std::mt19937 random(3);
  for (int round = 0; round < 20; ++round) {
    PrefixTree tree;
    std::map<PrefixKey, int> all;
    int next = 0;
    const auto some_key = [&] {
      PrefixKey key(1 + random() % 12);
      for (auto& element : key) element = static_cast<std::int32_t>(random() % 3) - 1;
      return key;
    };
    std::map<int, std::int64_t> whole;  // of each state
    std::set<int> spares;
    for (int i = 0; i < 500; ++i) {
      const PrefixKey key = some_key();
      const auto starts_with = [&](const PrefixKey& longer, const PrefixKey& shorter) {
        return longer.size() >= shorter.size() &&
               std::equal(shorter.begin(), shorter.end(), longer.begin());
      };
      switch (random() % 5) {
        case 4: {
          const auto there = all.find(key);
          EXPECT_EQ(tree.erase(key), there == all.end() ? -1 : there->second);
          if (there != all.end()) all.erase(there);
          break;
        }
        case 0: {
          const auto before = all.find(key);
          whole[next] = static_cast<std::int64_t>(random() % (key.size() + 1));
          if (random() % 3 == 0) spares.insert(next);
          EXPECT_EQ(tree.insert(key, next, whole[next], spares.count(next) > 0),
                    before == all.end() ? -1 : before->second);
          all[key] = next++;
          break;
        }
        case 1: {
          const int state = tree.evict();
          if (all.empty()) {
            EXPECT_EQ(state, -1);
            break;
          }
          const auto gone = std::find_if(all.begin(), all.end(),
                                         [&](const auto& entry) { return entry.second == state; });
          ASSERT_NE(gone, all.end());
          for (const auto& [other, of_other] : all) {
            EXPECT_TRUE(of_other == state || spares.count(state) > 0 ||
                        !starts_with(other, gone->first));
          }
          all.erase(gone);
          break;
        }
        default: {
          const auto most = static_cast<std::int64_t>(random() % (key.size() + 1));
          PrefixTree::Found expected;
          for (const auto& [other, state] : all) {
            const auto length = static_cast<std::int64_t>(other.size());
            if (starts_with(key, other) && length <= most && length > expected.length) {
              expected = {state, length};
            }
          }
          const auto found = tree.longest(key, most);
          EXPECT_EQ(found.state, expected.state);
          EXPECT_EQ(found.length, expected.length);
          EXPECT_EQ(tree.contains(key), all.count(key) > 0);
          std::int64_t longest = 0;
          for (const auto& [other, state] : all) {
            const auto differs = std::mismatch(key.begin(), key.end(), other.begin(), other.end());
            const auto common = std::min<std::int64_t>(most, differs.first - key.begin());
            if (whole[state] <= common) longest = std::max(longest, common);
          }
          const auto cut = tree.longest_cut(key, most);
          EXPECT_EQ(cut.length, longest);
          if (longest == 0) break;
          EXPECT_TRUE(cut.is_cut);
          EXPECT_EQ(cut.whole_from, whole[cut.state]);
          const auto source = std::find_if(
              all.begin(), all.end(), [&](const auto& entry) { return entry.second == cut.state; });
          ASSERT_NE(source, all.end());
          EXPECT_TRUE(std::equal(key.begin(), key.begin() + longest, source->first.begin()));
          EXPECT_LE(cut.whole_from, longest);
        }
      }
      ASSERT_EQ(tree.size(), static_cast<std::int64_t>(all.size()));
    }
    EXPECT_EQ(tree.clear().size(), all.size());
  }
}

TEST(PrefixTree, TheLeastRecentlyUsedGoesFirst) {
  PrefixTree tree;
  for (int i = 0; i < 4; ++i) tree.insert({i, 7}, i);
  tree.longest({1, 7, 8}, 3);
  tree.longest({0, 7}, 2);
  EXPECT_EQ(tree.clear(), (std::vector<int>{2, 3, 1, 0}));
}

TEST(PrefixTree, SpareStatesAreUsedOnlyWhenTheyAreCut) {
  PrefixTree tree;
  tree.insert({1, 2, 3, 4}, 0, 1, true);
  tree.insert({1, 2, 3, 4, -2}, 1);
  tree.insert({5}, 2);
  // A longer key does not use the spare state on the way to it.
  EXPECT_EQ(tree.longest({1, 2, 3, 4, -2, 6}, 6).state, 1);
  EXPECT_EQ(tree.longest_cut({1, 7}, 2).length, 1);
  EXPECT_EQ(tree.longest_cut({1, 2, 3, 7}, 4).state, 0);
  EXPECT_EQ(tree.longest_cut({1, 2, 3, 7}, 2).length, 2);
  EXPECT_EQ(tree.longest_cut({6}, 1).state, -1);
  EXPECT_EQ(tree.longest_cut({5, 6}, 2).length, 1);
  tree.longest({1, 2, 3, 4, -2, 6}, 6);
  EXPECT_EQ(tree.evict(), 0);
  EXPECT_EQ(tree.longest_cut({1, 2, 3, 7}, 4).state, -1);
  EXPECT_EQ(tree.evict(), 2);
  EXPECT_EQ(tree.evict(), 1);
  EXPECT_EQ(tree.evict(), -1);
}

TEST(Plan, MessagesAreReadAsTheyWereWritten) {
  Plan plan;
  plan.reports = {3, 1};
  plan.frees = {4};
  plan.trims = true;
  const Pruning own = Pruning::parse("snapkv:window=32@evict-ratio=0.3@prune=always");
  const PageFormat quantised = {RowType::q8, RowType::q4};
  plan.creates = {{7, -1, own, quantised, -1}, {8, 7, {}, {}, 30}, {9, -1, {}, PageFormat(), -1}};
  plan.spans = {{7, StepPart::held, StepOutput::none, true, 9, 10, {1, 2, 3}},
                {8, StepPart::generated, StepOutput::argmax, false, -1, -1, {5}, {}, true}};
  plan.ends = true;
  const auto message = plan.encode();
  const Plan read = Plan::decode(message);
  EXPECT_EQ(read.encode(), message);
  EXPECT_EQ(read.creates[0].pruning, own);
  EXPECT_FALSE(read.creates[1].pruning);
  EXPECT_EQ(read.creates[0].page_format, quantised);
  EXPECT_FALSE(read.creates[1].page_format);
  EXPECT_EQ(read.creates[2].page_format, PageFormat());
  EXPECT_EQ(read.creates[1].tokens, 30);
  EXPECT_EQ(read.spans[0].spare_as, 10);
  EXPECT_FALSE(read.spans[0].context_follows);
  EXPECT_TRUE(read.spans[1].context_follows);
  EXPECT_EQ(read.spans[0].tokens, (std::vector<TokenId>{1, 2, 3}));
  for (std::size_t size = 0; size < message.size(); ++size) {
    EXPECT_THROW(Plan::decode(message.substr(0, size)), Error) << size;
  }
}

}  // namespace
}  // namespace kvzap::server
