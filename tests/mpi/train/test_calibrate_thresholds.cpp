// Thresholds from scores that are spread over ranks, and from texts that ranks run together.
#include <gtest/gtest.h>

#include <kvzap/engine/surrogate.hpp>
#include <kvzap/lab/calibrate_thresholds.hpp>
#include <random>
#include <vector>

namespace kvzap {
namespace {

const std::string inputs = KVZAP_SOURCE_DIR "/inputs/models/";

TEST(EvictRatioCurves, RanksHaveTheScoresOfTheirHeads) {
  const Communicator comm = Communicator::world();
  EvictRatioCurves whole(6, Communicator::self());
  EvictRatioCurves spread(6, comm);
  std::mt19937 random(3);
  std::normal_distribution<float> normal(-4, 1);
  for (int t = 0; t < 4; ++t) {
    std::vector<float> all, mine;
    for (int i = 0; i < 6 * 90; ++i) {
      all.push_back(normal(random));
      if (i % comm.size() == comm.rank()) mine.push_back(all.back());
    }
    whole.add_text(100, all);
    spread.add_text(100, mine);
  }
  for (const double ratio : {0.1, 0.5, 0.85}) {
    EXPECT_EQ(spread.row(ratio).threshold, whole.row(ratio).threshold);
    EXPECT_EQ(spread.row(ratio).mean, whole.row(ratio).mean);
    EXPECT_EQ(spread.row(ratio).deviation, whole.row(ratio).deviation);
  }
  EXPECT_THROW(spread.row(0.95), AgreedError);
}

// What a run evicts at a threshold is what its curve says.
TEST(ScoreTexts, CurvesAreThoseOfRuns) {
  const Communicator comm = Communicator::world();
  const ModelConfig config = ModelConfig::load(inputs + "recall-4m");
  const HeadPartition partition =
      HeadPartition::even(static_cast<int>(config.num_hidden_layers),
                          static_cast<int>(config.num_key_value_heads), comm.size());
  const auto model = std::make_shared<const Model<float>>(
      Model<float>::load(inputs + "recall-4m", config, partition, comm.rank(), std::nullopt));
  const auto scorer = std::make_shared<Surrogate>(Surrogate::load(
      inputs + "kvzap-mlp-recall-4m", config, partition, comm.rank(), DType::f32, comm));
  std::vector<std::vector<TokenId>> texts(3);
  std::mt19937 random(5);
  for (std::size_t t = 0; t < texts.size(); ++t) {
    texts[t].resize(40 + 30 * t);
    for (TokenId& id : texts[t]) id = static_cast<TokenId>(random() % 1000);
  }
  const JudgedPairs judged{16, 2};
  const ScoredTexts scored = score_texts<float>(model, scorer, texts, judged, comm);
  EXPECT_EQ(scored.non_finite_scores, 0);
  EXPECT_EQ(scored.curves.tokens(), 210);

  for (const double ratio : {0.2, 0.5}) {
    const ThresholdTable::Row row = scored.curves.row(ratio);
    EXPECT_NEAR(row.mean, ratio, 0.01);
    const auto threshold = static_cast<float>(row.threshold);
    const std::vector<double> expected = scored.curves.evict_ratios(threshold);
    CacheOptions options;
    options.pruning.mode = PruneMode::prefill;
    options.pruning.amount.threshold = threshold;
    options.pruning.window = judged.window;
    options.pruning.sink = judged.sink;
    const auto engine = Engine::create<float>(model, scorer, options, comm);
    for (std::size_t t = 0; t < texts.size(); ++t) {
      const SequenceId sequence = engine->add_sequence();
      engine->step(
          StepBatch(sequence, texts[t], engine->rule(StepPart::context), StepOutput::none));
      EXPECT_NEAR(engine->report(sequence).evict_ratio(), expected[t], 1e-12);
      engine->free_sequence(sequence);
    }
  }
  // A window as long as the texts leaves nothing to judge.
  const ScoredTexts nothing = score_texts<float>(model, scorer, texts, {100, 0}, comm);
  EXPECT_EQ(nothing.curves.largest(), 0);
}

}  // namespace
}  // namespace kvzap
