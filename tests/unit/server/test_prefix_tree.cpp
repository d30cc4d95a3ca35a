// The tree of prefixes against a plain list of keys.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

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
    for (int i = 0; i < 500; ++i) {
      const PrefixKey key = some_key();
      const auto starts_with = [&](const PrefixKey& longer, const PrefixKey& shorter) {
        return longer.size() >= shorter.size() &&
               std::equal(shorter.begin(), shorter.end(), longer.begin());
      };
      switch (random() % 4) {
        case 0: {
          const auto before = all.find(key);
          EXPECT_EQ(tree.insert(key, next), before == all.end() ? -1 : before->second);
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
            EXPECT_TRUE(of_other == state || !starts_with(other, gone->first));
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

TEST(Plan, MessagesAreReadAsTheyWereWritten) {
  Plan plan;
  plan.reports = {3, 1};
  plan.frees = {4};
  plan.trims = true;
  const Pruning own = Pruning::parse("snapkv:window=32@evict-ratio=0.3@prune=always");
  plan.creates = {{7, -1, own}, {8, 7, {}}};
  plan.spans = {{7, StepPart::held, StepOutput::none, true, 9, {1, 2, 3}},
                {8, StepPart::generated, StepOutput::argmax, false, -1, {5}}};
  plan.ends = true;
  const auto message = plan.encode();
  const Plan read = Plan::decode(message);
  EXPECT_EQ(read.encode(), message);
  EXPECT_EQ(read.creates[0].pruning, own);
  EXPECT_FALSE(read.creates[1].pruning);
  EXPECT_EQ(read.spans[0].tokens, (std::vector<TokenId>{1, 2, 3}));
  for (std::size_t size = 0; size < message.size(); ++size) {
    EXPECT_THROW(Plan::decode({message.begin(), message.begin() + size}), Error) << size;
  }
}

}  // namespace
}  // namespace kvzap::server
