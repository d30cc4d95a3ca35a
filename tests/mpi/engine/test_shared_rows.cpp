// Layers that read the rows of earlier ones: the ranks give what one rank gives, wherever pages
// lie, sequences of a step give what they give alone, and evictions show in the next step.
#include <gtest/gtest.h>

#include <cmath>
#include <kvzap/engine/synthetic.hpp>
#include <random>
#include <vector>

#include "engine/decoder.hpp"
#include "model/cache_layers.hpp"
#include "steps.hpp"

namespace kvzap {
namespace {

constexpr int own_layers = 3, sharing_layers = 6, words = 101, window = 8;

/// Three layers with rows of their own, and three that read those of the last two.
ModelConfig sharing_config(int kv_heads, int factor) {
  ModelConfig config{};
  config.architecture = "Gemma4ForCausalLM";
  config.hidden_size = 48;
  config.intermediate_size = 80;
  config.num_hidden_layers = sharing_layers;
  config.num_attention_heads = 4 * kv_heads;
  config.num_key_value_heads = kv_heads;
  config.head_dim = 24;
  config.vocab_size = words;
  config.max_position_embeddings = 4096;
  config.rms_norm_eps = 1e-6;
  config.rope_theta = 10000;
  config.window_rope_theta = 1000;
  config.turning_part = 0.5;
  config.tie_word_embeddings = true;
  config.qk_norm = QkNorm::head;
  config.norms_values = true;
  config.attention_multiplier = 0.3;
  config.scales_layers = true;
  config.layer_inputs = LayerInputsConfig{6, words};
  config.layers.resize(sharing_layers);
  const int owners[] = {-1, -1, -1, 1, 2, 2};
  for (int l = 0; l < sharing_layers; ++l) {
    LayerConfig& layer = config.layers[l];
    layer.rows_of = owners[l];
    if (config.rows_of(l) != 1) continue;
    layer.window = 20;
    layer.keeps_window = true;
    layer.head_dim = 16;
    layer.kv_heads_factor = factor;
  }
  return config;
}

std::vector<TokenId> some_tokens(std::mt19937& random, int count) {
  std::vector<TokenId> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back(static_cast<TokenId>(random() % words));
  return tokens;
}

double relative_distance(const std::vector<float>& a, const std::vector<float>& b) {
  double largest = 0, worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    largest = std::max<double>(largest, std::fabs(a[i]));
    worst = std::max<double>(worst, std::fabs(a[i] - b.at(i)));
  }
  return worst / largest;
}

StepRule evicting_rule() {
  StepRule rule;
  rule.score = true;
  rule.eviction = {0.0f, 2, true};
  return rule;
}

/// A model on some ranks, with a scorer that evicts 60 %.
struct Sharing {
  Sharing(int kv_heads, int factor, const Communicator& comm, const PageFormat& format = {})
      : model(Model::load("", sharing_config(kv_heads, factor), DType::f32,
                          HeadPartition::even(sharing_layers, kv_heads, comm.size()), comm.rank(),
                          {5})),
        scorer(model.partition(), comm.rank(), 0.6, 6, 3),
        decoder(model, &scorer, comm, window, 4, nullptr, {format}) {}

  std::vector<float> logits(const StepBatch& batch, std::size_t span = 0) {
    return decoder.step(batch).at(span).logits;
  }

  Model model;
  RandomScorer scorer;
  Decoder decoder;
};

struct SharingShape {
  const char* name;
  int kv_heads, factor;
};
void PrintTo(const SharingShape& shape, std::ostream* stream) { *stream << shape.name; }

class SharedRows : public ::testing::TestWithParam<SharingShape> {
 protected:
  void SetUp() override {
    if (comm.size() > GetParam().kv_heads && GetParam().factor > 1) GTEST_SKIP() << "is refused";
  }
  const Communicator comm = Communicator::world();
};

TEST_P(SharedRows, RanksGiveWhatOneRankGives) {
  const auto [name, kv_heads, factor] = GetParam();
  for (const PageFormat format : {PageFormat{}, PageFormat{RowType::q8, RowType::q8}}) {
    Sharing shared(kv_heads, factor, comm, format);
    Sharing whole(kv_heads, factor, Communicator::self(), format);
    const StepRule rule = evicting_rule();
    std::mt19937 random(11);
    std::vector<SequenceId> ids;
    for (int i = 0; i < 2; ++i) {
      ids.push_back(shared.decoder.cache().add_sequence());
      ASSERT_EQ(whole.decoder.cache().add_sequence(), ids.back());
    }
    const auto compare = [&](const StepBatch& batch) {
      const auto a = shared.decoder.step(batch), b = whole.decoder.step(batch);
      for (std::size_t i = 0; comm.is_root() && i < a.size(); ++i) {
        EXPECT_LT(relative_distance(b[i].logits, a[i].logits), format.quantised() ? 1e-3 : 5e-5);
      }
    };
    constexpr std::int64_t no_limit = std::int64_t{1} << 40;
    for (const int count : {90, 60}) {
      compare(StepBatch(ids[0], some_tokens(random, count), rule, StepOutput::logits));
      shared.decoder.placement().balance({ids[0]}, 0.02, no_limit);
    }
    StepBatch mixed(ids[0], some_tokens(random, 7), rule, StepOutput::logits);
    mixed.add(ids[1], some_tokens(random, 70), rule, StepOutput::logits);
    compare(mixed);
    for (int step = 0; step < 8; ++step) {
      if (step % 4 == 1) shared.decoder.placement().balance(ids, 0.02, 4000);
      compare(test::single_tokens(ids, some_tokens(random, 2), rule, StepOutput::logits));
    }
    EXPECT_EQ(shared.decoder.placement().pages_moved() > 0, comm.size() > 1);
    shared.decoder.placement().recall(ids[0]);
    const KVCache& cache = shared.decoder.cache();
    for (int l = own_layers; l < sharing_layers; ++l) {
      EXPECT_EQ(cache.tokens(ids[0], l), cache.tokens(ids[0], 0));
      for (int h = 0; h < cache.shape().heads[l]; ++h) EXPECT_EQ(cache.rows(ids[0], l, h), 0);
    }
  }
}

TEST_P(SharedRows, SequencesOfAStepAreIndependent) {
  const auto [name, kv_heads, factor] = GetParam();
  Sharing together(kv_heads, factor, comm), alone(kv_heads, factor, comm);
  std::mt19937 random(7);
  const auto a = together.decoder.cache().add_sequence();
  const auto b = together.decoder.cache().add_sequence();
  alone.decoder.cache().add_sequence();
  alone.decoder.cache().add_sequence();
  const StepRule rule = evicting_rule();
  for (const auto& [first, second] : std::vector<std::pair<int, int>>{{50, 3}, {1, 600}, {1, 1}}) {
    const auto of_a = some_tokens(random, first), of_b = some_tokens(random, second);
    StepBatch batch(a, of_a, rule, StepOutput::logits);
    batch.add(b, of_b, rule, StepOutput::all_logits);
    const auto found = together.decoder.step(batch);
    const auto expected_a = alone.logits(StepBatch(a, of_a, rule, StepOutput::logits));
    const auto expected_b = alone.logits(StepBatch(b, of_b, rule, StepOutput::all_logits));
    if (!comm.is_root()) continue;
    EXPECT_LT(relative_distance(expected_a, found[0].logits), 5e-5);
    EXPECT_LT(relative_distance(expected_b, found[1].logits), 5e-5);
  }
}

TEST_P(SharedRows, EvictionsShowInTheNextStep) {
  const auto [name, kv_heads, factor] = GetParam();
  Sharing model(kv_heads, factor, comm);
  std::mt19937 random(3);
  const auto prompt = some_tokens(random, 120);
  KVCache& cache = model.decoder.cache();
  const SequenceId full = cache.add_sequence(), pruned = cache.add_sequence();
  const auto expected = model.logits(StepBatch(full, prompt, {}, StepOutput::logits));
  const auto found = model.logits(StepBatch(pruned, prompt, evicting_rule(), StepOutput::logits));
  const SequenceId copy = cache.fork(pruned);
  const auto next = [&](SequenceId id) {
    return model.logits(StepBatch(id, {5}, {}, StepOutput::logits));
  };
  const auto of_full = next(full), of_pruned = next(pruned), of_copy = next(copy);
  if (!comm.is_root()) return;
  EXPECT_EQ(found, expected);  // bit for bit: all layers see the step's rows whole
  EXPECT_GT(relative_distance(of_full, of_pruned), 1e-3);
  EXPECT_EQ(of_pruned, of_copy);
}

INSTANTIATE_TEST_SUITE_P(Shapes, SharedRows,
                         ::testing::Values(SharingShape{"one_head", 1, 1},
                                           SharingShape{"two_heads", 2, 1},
                                           SharingShape{"pairs_in_windows", 4, 2}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(SharedRowsErrors, NameTheCause) {
  const ModelConfig config = sharing_config(2, 2);
  const auto message_of = [](const auto& work) -> std::string {
    try {
      work();
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  const auto load = [&](const HeadPartition& partition) {
    return message_of([&] { Model::load("", config, DType::f32, partition, 0, {5}); });
  };
  EXPECT_NE(load(HeadPartition::even(sharing_layers, 2, 3)).find("the KV heads of full layers"),
            std::string::npos);
  std::vector<std::vector<std::int64_t>> kept(sharing_layers, {1, 9});
  kept[1] = {9, 1};
  EXPECT_NE(load(HeadPartition::balanced(kept, 2)).find("layer 3 reads"), std::string::npos);
  const Communicator self = Communicator::self();
  const Model outside =
      Model::without_weights(config, DType::f32, HeadPartition::even(sharing_layers, 2, 1));
  Decoder decoder(outside, nullptr, self, window, 4);
  const SequenceId id = decoder.cache().add_sequence();
  EXPECT_NE(message_of([&] {
              decoder.begin_step(StepBatch(id, {1}, {}, StepOutput::none));
            }).find("expected an external model whose layers all have their own"),
            std::string::npos);
}

}  // namespace
}  // namespace kvzap
