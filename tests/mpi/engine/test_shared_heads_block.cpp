// Attention of layers whose heads ranks share, against that of one rank, and the blocks alone.
#include <gtest/gtest.h>

#include <cmath>

#include "engine/attention_block.hpp"
#include "one_step.hpp"

namespace kvzap {
namespace {

using linalg::Matrix;
using test::Numbers;
using test::OneStep;

/// Returns attention of a step times this rank's part of W_O: (token, hidden_size).
Numbers attention(OneStep& one, engine::SharedHeadsBlock* shared) {
  const Budget::Model counted;
  engine::PolicyBlock policies(DType::f32, counted);
  policies.reserve(one.step, {});
  engine::AttentionBlock block(one.model, policies, shared);
  one.step.locally([&] {
    if (shared) shared->reserve(one.step, false);
    block.reserve(one.step);
  });
  one.step.agree_on_failure();
  block.begin(one.step);
  const Matrix x =
      one.step.matrix(engine::Step::normed, one.step.tokens(), one.step.config.hidden_size);
  test::fill(x, test::some_numbers(x.size()));
  const Matrix found = block.run(one.step, 0, {0, one.step.tokens()}, x);
  one.step.agree_on_failure();
  if (found.extent(1) == 0) return Numbers(x.size());
  return test::product(test::on_host(found), one.step.weights(0).o);
}

class SharedHeadsBlock : public ::testing::TestWithParam<QkNorm> {};

// The first sequence is long enough for teams of ranks to share its tokens.
TEST_P(SharedHeadsBlock, RanksGiveTheAttentionOfOneRank) {
  ModelConfig config = test::block_config();
  config.qk_norm = GetParam();
  if (config.qk_norm == QkNorm::row) config.architecture = "Olmo2ForCausalLM";
  const std::vector<int> lengths = {100, 3};
  OneStep whole(config, lengths, StepOutput::all_logits);
  const Numbers expected = attention(whole, nullptr);

  const Communicator comm = Communicator::world();
  OneStep part(config, lengths, HeadPartition::even(1, 2, comm.size()), comm,
               StepOutput::all_logits);
  engine::PagePlacement placement(part.model.partition(), comm, part.cache, nullptr);
  std::unique_ptr<engine::SharedHeadsBlock> shared;
  if (comm.size() > 1) shared = std::make_unique<engine::SharedHeadsBlock>(part.model, placement);
  const Numbers own = attention(part, shared.get());
  std::vector<float> sum(own.begin(), own.end());
  comm.all_reduce_sum(sum.data(), sum.size());
  ASSERT_EQ(sum.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ASSERT_NEAR(sum[i], expected[i], 1e-4 * (1 + std::fabs(expected[i]))) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Norms, SharedHeadsBlock,
                         ::testing::Values(QkNorm::none, QkNorm::head, QkNorm::row));

}  // namespace
}  // namespace kvzap
