// Thresholds from scores that are spread over ranks, and from texts that ranks run together.
#include <gtest/gtest.h>

#include <kvzap/engine/surrogate.hpp>
#include <kvzap/lab/calibrate_thresholds.hpp>
#include <random>
#include <utility>
#include <vector>

#include "source_dir.hpp"

namespace kvzap {
namespace {

const std::string inputs = test::source_dir().string() + "/inputs/models/";

TEST(EvictRatioCurves, RanksHaveTheScoresOfTheirHeads) {
  const Communicator comm = Communicator::world();
  const HeadPartition partition = HeadPartition::even(2, 3, comm.size());
  const HeadPartition one = HeadPartition::even(2, 3, 1);
  // With and without scores that are left out.
  EvictRatioCurves whole(6, Communicator::self(), 70);
  EvictRatioCurves spread(6, comm, 70);
  std::mt19937 random(3);
  std::normal_distribution<float> normal(-4, 1);
  for (int t = 0; t < 4; ++t) {
    EvictRatioCurves::ScoresOfHeads all(6), mine;
    for (int i = 0; i < 6; ++i) {
      for (int s = 0; s < 50 + 10 * t; ++s) all[i].push_back(normal(random) - i % 3);
    }
    for (int l = 0; l < 2; ++l) {
      for (const int head : partition.heads(l, comm.rank())) mine.push_back(all[l * 3 + head]);
    }
    whole.add_text(100, all);
    spread.add_text(100, mine);
  }
  for (const double ratio : {0.1, 0.3, 0.6}) {
    EXPECT_EQ(spread.row(ratio).threshold, whole.row(ratio).threshold);
    EXPECT_EQ(spread.row(ratio).mean, whole.row(ratio).mean);
    EXPECT_EQ(spread.row(ratio).deviation, whole.row(ratio).deviation);
    const auto threshold = static_cast<float>(whole.row(ratio).threshold);
    const auto kept = spread.kept_rows(partition, threshold);
    EXPECT_EQ(kept, whole.kept_rows(one, threshold));
    std::int64_t rows = 0;
    for (const auto& layer : kept) {
      for (const std::int64_t head : layer) rows += head;
      EXPECT_GT(layer[0], layer[2]);
    }
    EXPECT_NEAR(static_cast<double>(rows), (1 - whole.mean(threshold)) * 6 * 400, 1e-6);
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
  const auto model = std::make_shared<const Model>(Model::load(
      inputs + "recall-4m", config, DType::f32, partition, comm.rank(), {std::nullopt}));
  const auto scorer = std::make_shared<Surrogate>(Surrogate::load(
      inputs + "kvzap-mlp-recall-4m", config, partition, comm.rank(), DType::f32, comm));
  std::vector<std::vector<TokenId>> texts(3);
  std::mt19937 random(5);
  for (std::size_t t = 0; t < texts.size(); ++t) {
    texts[t].resize(40 + 30 * t);
    for (TokenId& id : texts[t]) id = static_cast<TokenId>(random() % 1000);
  }
  const JudgedPairs judged{{16, 3}, 2};
  const ScoredTexts scored = score_texts(model, scorer, texts, judged, comm);
  EXPECT_EQ(scored.non_finite_scores, 0);
  ASSERT_EQ(scored.curves.size(), 2u);

  for (const auto& [w, ratio] :
       std::vector<std::pair<std::size_t, double>>{{0, 0.2}, {0, 0.5}, {1, 0.5}, {1, 0.9}}) {
    const EvictRatioCurves& curves = scored.curves[w];
    EXPECT_EQ(curves.tokens(), 210);
    const ThresholdTable::Row row = curves.row(ratio);
    EXPECT_NEAR(row.mean, ratio, 0.01);
    const auto threshold = static_cast<float>(row.threshold);
    const std::vector<double> expected = curves.evict_ratios(threshold);
    CacheOptions options;
    options.pruning.mode = PruneMode::prefill;
    options.pruning.amount.threshold = threshold;
    options.pruning.window = judged.windows[w];
    options.pruning.sink = judged.sink;
    const auto engine = Engine::create(model, scorer, options, comm);
    for (std::size_t t = 0; t < texts.size(); ++t) {
      const SequenceId sequence = engine->add_sequence();
      engine->step(
          StepBatch(sequence, texts[t], engine->rule(StepPart::context), StepOutput::none));
      EXPECT_NEAR(engine->report(sequence).evict_ratio(), expected[t], 1e-12);
      engine->free_sequence(sequence);
    }
  }
  // A window as long as the texts leaves nothing to judge.
  const ScoredTexts nothing = score_texts(model, scorer, texts, {{100}, 0}, comm);
  EXPECT_EQ(nothing.curves.front().largest(), 0);
}

}  // namespace
}  // namespace kvzap
