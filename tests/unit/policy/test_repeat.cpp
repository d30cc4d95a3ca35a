#include <gtest/gtest.h>

#include <kvzap/engine/repeat_prompt.hpp>
#include <numeric>
#include <string>
#include <vector>

namespace {

using kvzap::Error;
using kvzap::longest_repeat;
using kvzap::repeat_steps;
using kvzap::RepeatPrompt;
using kvzap::RepeatStep;
using Ids = std::vector<kvzap::TokenId>;

/// 0, 1, 2, …
Ids context_of(int tokens) {
  Ids ids(tokens);
  std::iota(ids.begin(), ids.end(), 0);
  return ids;
}

RepeatPrompt small_prompt(std::int64_t chunk) {
  RepeatPrompt prompt;
  prompt.first = {901, 902};
  prompt.later = {911, 912, 913};
  prompt.suffix = {921};
  prompt.prefix = 3;
  prompt.chunk = chunk;
  prompt.overlap = 2;
  return prompt;
}

TEST(RepeatSteps, OneForAContextOfAChunk) {
  const auto steps = repeat_steps(context_of(8), small_prompt(5));
  ASSERT_EQ(steps.size(), 1u);
  EXPECT_EQ(steps[0].tokens, (Ids{901, 902, 921, 3, 4, 5, 6, 7}));
  EXPECT_EQ(steps[0].begin, 3);
  EXPECT_EQ(steps[0].end, 8);
  EXPECT_EQ(longest_repeat(8, small_prompt(5)), 8);
}

TEST(RepeatSteps, LaterOnesShowTheEndOfTheChunkBefore) {
  const auto steps = repeat_steps(context_of(14), small_prompt(5));
  ASSERT_EQ(steps.size(), 3u);
  EXPECT_EQ(steps[0].tokens, (Ids{901, 902, 921, 3, 4, 5, 6, 7}));
  EXPECT_EQ(steps[1].tokens, (Ids{911, 912, 913, 6, 7, 921, 8, 9, 10, 11, 12}));
  EXPECT_EQ(steps[2].tokens, (Ids{911, 912, 913, 11, 12, 921, 13}));
  EXPECT_EQ(steps[2].begin, 13);
  EXPECT_EQ(steps[2].end, 14);
  EXPECT_EQ(longest_repeat(14, small_prompt(5)), 11);
}

TEST(RepeatSteps, ChunksShorterThanTheirOverlap) {
  RepeatPrompt prompt = small_prompt(1);
  prompt.prefix = 0;
  const auto steps = repeat_steps(context_of(3), prompt);
  ASSERT_EQ(steps.size(), 3u);
  EXPECT_EQ(steps[0].tokens, (Ids{901, 902, 921, 0}));
  EXPECT_EQ(steps[2].tokens, (Ids{911, 912, 913, 1, 921, 2}));
  EXPECT_EQ(longest_repeat(3, prompt), 6);
}

TEST(RepeatSteps, CoverEveryTokenBehindThePrefixOnce) {
  for (int tokens = 4; tokens < 40; ++tokens) {
    for (std::int64_t chunk : {1, 4, 7, 100}) {
      const RepeatPrompt prompt = small_prompt(chunk);
      std::int64_t next = prompt.prefix;
      std::int64_t longest = 0;
      for (const RepeatStep& step : repeat_steps(context_of(tokens), prompt)) {
        EXPECT_EQ(step.begin, next);
        EXPECT_LE(step.end - step.begin, chunk);
        next = step.end;
        longest = std::max(longest, static_cast<std::int64_t>(step.tokens.size()));
      }
      EXPECT_EQ(next, tokens);
      EXPECT_GE(longest_repeat(tokens, prompt), longest);
    }
  }
}

TEST(RepeatSteps, RefuseWhatCannotBeRepeated) {
  const auto message_of = [](int tokens, const RepeatPrompt& prompt) -> std::string {
    try {
      repeat_steps(context_of(tokens), prompt);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(message_of(3, small_prompt(5)).find("nothing to repeat"), std::string::npos);
  EXPECT_NE(message_of(0, small_prompt(5)).find("0 tokens"), std::string::npos);
  EXPECT_NE(message_of(9, small_prompt(0)).find("chunks of 0 tokens"), std::string::npos);
  RepeatPrompt negative = small_prompt(5);
  negative.prefix = -1;
  EXPECT_NE(message_of(9, negative).find("prefix of -1"), std::string::npos);
}

}  // namespace
