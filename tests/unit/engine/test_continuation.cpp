// When an answer ends, and which token it draws.
#include <gtest/gtest.h>

#include <cmath>
#include <kvzap/engine/continuation.hpp>
#include <limits>
#include <vector>

namespace kvzap {
namespace {

using Floats = std::vector<float>;

TEST(Continuation, EndsByTheFirstRuleThatHolds) {
  const StopRules rules{3, {7, 9}, 10};
  Continuation said(SamplingOptions(), rules);
  EXPECT_EQ(said.end(10), std::nullopt);  // the last position that fits still gets a successor
  said.append(1);
  EXPECT_EQ(said.end(9), std::nullopt);
  EXPECT_EQ(said.end(10), StopReason::context_full);
  said.append(2);
  said.append(3);
  EXPECT_EQ(said.end(10), StopReason::max_new_tokens);
  said.append(9);
  EXPECT_EQ(said.end(10), StopReason::stop_id);
  EXPECT_EQ(said.tokens(), (std::vector<TokenId>{1, 2, 3, 9}));
  EXPECT_EQ(Continuation(SamplingOptions(), {0, {}, 0}).end(1), StopReason::max_new_tokens);
}

TEST(Continuation, DrawsWhatItsOptionsSay) {
  Continuation plain{SamplingOptions(), StopRules()};
  EXPECT_EQ(plain.output(), StepOutput::argmax);
  EXPECT_EQ(plain.draw({4, {}, {}}), 4);
  EXPECT_EQ(plain.draw({-1, Floats{0, 2, 1}, {}}), 1);  // another rank has asked for the logits
  EXPECT_EQ(plain.draw({-1, {}, {}}), -1);

  SamplingOptions penalty;
  penalty.repetition_penalty = 4;
  Continuation changed(penalty, StopRules());
  EXPECT_EQ(changed.output(), StepOutput::logits);
  changed.append_prompt({1});
  EXPECT_EQ(changed.draw({-1, Floats{0, 2, 1}, {}}), 2);
  changed.append(2);
  EXPECT_EQ(changed.draw({-1, Floats{0.4F, 2, 1}, {}}), 1);
}

TEST(Continuation, ContinuesItsRandomNumbers) {
  SamplingOptions sampling;
  sampling.temperature = 1;
  sampling.seed = 3;
  const StepResult even{-1, Floats(50, 0.0F), {}};
  Continuation first(sampling, StopRules());
  for (int i = 0; i < 5; ++i) first.draw(even);
  Continuation second(sampling, StopRules());
  second.set_random_state(first.random_state());
  for (int i = 0; i < 5; ++i) EXPECT_EQ(first.draw(even), second.draw(even));
}

TEST(LogNormalizer, SumsProbabilitiesOfAnySize) {
  const Floats small = {0, std::log(3.0F)};
  EXPECT_NEAR(log_normalizer(small.data(), 2), std::log(4.0), 1e-7);
  const Floats large = {1e30F, 1e30F, -std::numeric_limits<float>::infinity()};
  EXPECT_EQ(log_normalizer(large.data(), 3), static_cast<double>(1e30F));  // log 2 is lost
  const Floats none = {0, std::numeric_limits<float>::quiet_NaN()};
  EXPECT_TRUE(std::isnan(log_normalizer(none.data(), 2)));
}

}  // namespace
}  // namespace kvzap
