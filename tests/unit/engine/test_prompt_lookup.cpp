// Drafts are what followed the same tokens before, and adapt to how many tokens are accepted.
#include <gtest/gtest.h>

#include <kvzap/engine/prompt_lookup.hpp>
#include <vector>

namespace kvzap {
namespace {

using Tokens = std::vector<TokenId>;

PromptLookup after(const Tokens& tokens, std::int64_t most) {
  PromptLookup lookup(most);
  for (const TokenId token : tokens) lookup.append(token);
  return lookup;
}

TEST(PromptLookup, ContinuesTheLongestAndLatestMatch) {
  // Of three tokens, although two match later.
  EXPECT_EQ(after({1, 2, 3, 4, 5, 9, 2, 3, 6, 7, 1, 2, 3}, 2).draft(8), (Tokens{4, 5}));
  // Of two tokens: the later one.
  EXPECT_EQ(after({2, 3, 4, 5, 2, 3, 6, 7, 8, 2, 3}, 2).draft(8), (Tokens{6, 7}));
  EXPECT_EQ(after({4, 5, 6, 4}, 2).draft(8), (Tokens{5, 6}));
  // A match that overlaps the newest tokens ends with them.
  EXPECT_EQ(after({5, 5, 5}, 2).draft(8), (Tokens{5}));
  EXPECT_EQ(after({1, 2, 3, 4}, 2).draft(8), Tokens());
  EXPECT_EQ(after({1, 2, 1}, 0).draft(8), Tokens());
  EXPECT_EQ(after({1, 2, 1}, 2).draft(0), Tokens());
  EXPECT_EQ(after({1, 2, 1}, 2).draft(-3), Tokens());
  EXPECT_EQ(PromptLookup(4).draft(8), Tokens());
}

TEST(PromptLookup, GrowsWhileDraftsAreAccepted) {
  Tokens text;
  for (TokenId token = 0; token < 40; ++token) text.push_back(token);
  PromptLookup lookup = after(text, 8);
  for (TokenId token = 0; token < 3; ++token) lookup.append(token);
  TokenId next = 3;
  for (const std::size_t length : {2U, 4U, 8U, 8U}) {
    const Tokens draft = lookup.draft(100);
    ASSERT_EQ(draft.size(), length);
    lookup.judge(static_cast<std::int64_t>(length));
    for (const TokenId token : draft) {
      EXPECT_EQ(token, next++);
      lookup.append(token);
    }
    lookup.append(next++);
  }
  EXPECT_EQ(lookup.counts().drafted, 22);
  EXPECT_EQ(lookup.counts().accepted, 22);
  ASSERT_EQ(lookup.draft(3).size(), 3U);
  lookup.judge(2);
  lookup.append(next++);
  EXPECT_EQ(lookup.draft(100).size(), 2U);
}

TEST(PromptLookup, PausesLongerAfterEachFailure) {
  // Every token has occurred, and none of the drafts is right.
  PromptLookup lookup = after({1, 2, 1, 3, 1, 4}, 8);
  std::vector<int> at;
  for (int t = 0; t < 600; ++t) {
    lookup.append(t % 2 == 0 ? 1 : 10 + t);
    if (!lookup.draft(8).empty()) {
      at.push_back(t);
      lookup.judge(0);
    }
  }
  EXPECT_LE(at.size(), 14U);
  EXPECT_GE(at[1] - at[0], 4);
  EXPECT_GE(at[6] - at[5], 64);
  EXPECT_EQ(lookup.counts().accepted, 0);
  // One draft that is accepted ends the pauses.
  while (lookup.draft(8).empty()) lookup.append(1);
  lookup.judge(8);
  EXPECT_FALSE(lookup.draft(8).empty());
}

}  // namespace
}  // namespace kvzap
