// Hidden states after the final norm, against transformers' AutoModel.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <kvzap/engine/engine.hpp>
#include <string>

#include "golden/compare_runs.hpp"
#include "golden/golden_files.hpp"

namespace kvzap {
namespace {

class GoldenHidden : public testing::TestWithParam<const char*> {
 protected:
  struct Text {
    std::vector<TokenId> ids;
    std::vector<float> expected;  // (token, hidden)
    std::vector<float> found;
  };

  static void check(const std::string& what, const std::vector<float>& found,
                    const std::vector<float>& expected) {
    const bool is_root = Communicator::world().is_root();
    ASSERT_EQ(found.size(), is_root ? expected.size() : 0) << what;
    if (!is_root) return;
    float worst = 0, largest = 0;
    for (std::size_t i = 0; i < found.size(); ++i) {
      worst = std::max(worst, std::fabs(found[i] - expected[i]));
      largest = std::max(largest, std::fabs(expected[i]));
    }
    EXPECT_LT(worst, golden::logit_tolerance * largest) << what;
  }
};

TEST_P(GoldenHidden, StatesAreThoseOfTransformers) {
  const Communicator comm = Communicator::world();
  const std::filesystem::path folder = golden::model_dir(GetParam());
  const ModelConfig config = ModelConfig::load(folder);
  if (comm.size() > config.num_key_value_heads) GTEST_SKIP() << "more ranks than KV heads";
  const auto partition =
      HeadPartition::even(static_cast<int>(config.num_hidden_layers),
                          static_cast<int>(config.num_key_value_heads), comm.size());
  const auto model = std::make_shared<const Model>(
      Model::load(folder, config, DType::f32, partition, comm.rank()));
  CacheOptions options;
  options.page_rows = 8;
  options.pruning.window = 4;
  const auto engine = Engine::create(model, nullptr, options, comm);
  const auto file = SafetensorsFolder::open(golden::golden_dir / "embeddings" /
                                            (std::string(GetParam()) + ".safetensors"));
  std::vector<Text> texts;
  for (const std::string name : {"short", "some", "long"}) {
    texts.push_back(
        {golden::ids(file, name + ".ids"), golden::tensor<float>(file, name + ".hidden"), {}});
  }
  // Each alone: of all tokens, and of the last one.
  for (const Text& text : texts) {
    for (const auto output : {StepOutput::all_hidden, StepOutput::hidden}) {
      const SequenceId sequence = engine->add_sequence();
      const StepResult result =
          engine->step(StepBatch(sequence, text.ids, StepRule(), output)).front();
      engine->free_sequence(sequence);
      const bool is_last = output == StepOutput::hidden;
      check("alone", result.hidden,
            {is_last ? text.expected.end() - config.hidden_size : text.expected.begin(),
             text.expected.end()});
      EXPECT_TRUE(result.logits.empty());
      EXPECT_EQ(result.argmax, -1);
    }
  }
  // In the same steps, chunk by chunk, beside a sequence that decodes.
  const SequenceId other = engine->add_sequence();
  std::vector<SequenceId> sequences;
  for (std::size_t i = 0; i < texts.size(); ++i) sequences.push_back(engine->add_sequence());
  constexpr std::size_t chunk = 11;
  for (std::size_t from = 0; from < texts.back().ids.size(); from += chunk) {
    StepBatch batch(other, {1}, StepRule(), StepOutput::argmax);
    std::vector<Text*> stepped;
    for (std::size_t i = 0; i < texts.size(); ++i) {
      const auto& ids = texts[i].ids;
      if (from >= ids.size()) continue;
      const auto begin = ids.begin() + static_cast<std::ptrdiff_t>(from);
      const auto count = static_cast<std::ptrdiff_t>(std::min(chunk, ids.size() - from));
      batch.add(sequences[i], {begin, begin + count}, StepRule(), StepOutput::all_hidden);
      stepped.push_back(&texts[i]);
    }
    const std::vector<StepResult> results = engine->step(batch);
    EXPECT_GE(results.front().argmax, 0);
    for (std::size_t s = 0; s < stepped.size(); ++s) {
      const std::vector<float>& own = results[s + 1].hidden;
      stepped[s]->found.insert(stepped[s]->found.end(), own.begin(), own.end());
    }
  }
  for (const Text& text : texts) check("together", text.found, text.expected);
}

INSTANTIATE_TEST_SUITE_P(Models, GoldenHidden, testing::Values("llama-random", "qwen2-random"));

}  // namespace
}  // namespace kvzap
