// What cuts leave of kept rows with +merge: every moment at which rows are chosen, on any number of
// ranks, against sums row by row.
#include <gtest/gtest.h>

#include <algorithm>
#include <kvzap/engine/engine.hpp>
#include <map>
#include <string>
#include <vector>

#include "merge_reference.hpp"

namespace kvzap {
namespace {

using test::MergeRows;
using test::MergeRule;

constexpr int merged_layers = 3;
constexpr int merged_heads = 5;
constexpr int merged_dim = 16;

ModelConfig merged_config() {
  ModelConfig config{};
  config.architecture = "LlamaForCausalLM";
  config.hidden_size = 40;
  config.intermediate_size = 32;
  config.num_hidden_layers = merged_layers;
  config.num_attention_heads = merged_heads * 2;
  config.num_key_value_heads = merged_heads;
  config.head_dim = merged_dim;
  config.vocab_size = 61;
  config.max_position_embeddings = 4096;
  config.rms_norm_eps = 1e-6;
  config.rope_theta = 10000;
  return config;
}

std::vector<TokenId> merged_tokens(int count, int seed = 0) {
  std::vector<TokenId> tokens;
  std::uint32_t state = 11U + static_cast<std::uint32_t>(seed);
  for (int i = 0; i < count; ++i) {
    state = state * 1664525U + 1013904223U;
    tokens.push_back(static_cast<TokenId>((state >> 10) % 61));
  }
  return tokens;
}

/// A head's rows when a policy scored them last.
struct SeenHead {
  std::vector<std::int64_t> positions;
  std::vector<float> keys, values;
};
using SeenHeads = std::map<std::pair<int, int>, SeenHead>;  // (layer, head of the model)

/// Scores by a number that depends on the place of a row alone, and notes the rows.
class Noting final : public Policy {
 public:
  explicit Noting(SeenHeads* seen) : m_seen(seen) {}
  void score(PolicyLayer& layer, const ScoreView& scores) override {
    const auto out = Kokkos::create_mirror_view(scores);
    for (int h = 0; h < layer.heads(); ++h) {
      const int head = layer.extents().heads[h];
      SeenHead& seen = (*m_seen)[{layer.layer(), head}];
      const auto take = [&](const auto& view) {
        layer.exec().fence();
        const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), view);
        return std::vector(host.data(), host.data() + host.size());
      };
      seen.positions = take(layer.positions(h));
      seen.keys = take(layer.keys(h));
      seen.values = take(layer.values(h));
      for (std::size_t i = 0; i < seen.positions.size(); ++i) {
        auto x = static_cast<std::uint32_t>(seen.positions[i] * 64 + head * 8 + layer.layer());
        x = (x ^ (x >> 7)) * 0x9e3779b9U;
        out(h, i) = static_cast<float>((x ^ (x >> 13)) % 1000) + static_cast<float>(head);
      }
    }
    Kokkos::deep_copy(scores, out);
  }

 private:
  SeenHeads* m_seen;
};

class MergedValues : public testing::Test {
 protected:
  MergedValues()
      : comm(Communicator::world()),
        partition(HeadPartition::even(merged_layers, merged_heads, comm.size())),
        model(std::make_shared<const Model>(
            Model::load("", config, DType::f32, partition, comm.rank(), {3}))) {
    options.pruning.mode = PruneMode::prefill;
    options.pruning.window = 8;
    options.page_rows = 4;
    // Later steps show what earlier ones have left.
    options.pruning.decode.every = 1;
    options.pruning.decode.keep = 1000;
  }

  /// A policy with +merge, whose rows go to `seen`.
  std::shared_ptr<PolicyChoice> merging(double evict_ratio, Budget::Pool pool,
                                        const std::string& modifier) {
    static const PolicyInfo info = [] {
      PolicyInfo made;
      made.name = "noting";
      return made;
    }();
    Budget budget;
    budget.amount = Budget::Amount::evict_ratio;
    budget.evict_ratio = evict_ratio;
    const PolicySetup setup{config, partition, DType::f32, {}, comm};
    auto choice = std::make_shared<PolicyChoice>(
        make_policy(parse_policy("knorm+" + modifier), budget, {}, setup));
    choice->info = &info;
    choice->name = "noting";
    choice->budget.pool = pool;
    choice->budget.safeguard = 0;
    choice->make = [this] { return std::make_unique<Noting>(&seen); };
    return choice;
  }
  void step(Engine& engine, SequenceId sequence, const std::vector<TokenId>& tokens,
            StepPart part) {
    engine.step(StepBatch(sequence, tokens, engine.rule(sequence, part), StepOutput::none));
  }

  /// Checks that the old rows that `after` shows are those of `before`, merged. Returns how many
  /// rows have another value.
  static int expect_merged(const SeenHeads& before, const SeenHeads& after, const MergeRule& rule,
                           double rounding = 2e-5) {
    int changed = 0, uncertain = 0;
    for (const auto& [place, old] : before) {
      SCOPED_TRACE(std::to_string(place.first) + ", " + std::to_string(place.second));
      const SeenHead& now = after.at(place);
      MergeRows head = {merged_dim, old.keys, old.values, {}};
      for (const std::int64_t position : old.positions) {
        head.keep.push_back(
            std::binary_search(now.positions.begin(), now.positions.end(), position));
      }
      const test::MergedRows expected = test::merged_rows(head, rule);
      std::size_t kept = 0;
      for (std::size_t row = 0; row < head.keep.size(); ++row) {
        if (!head.keep[row]) continue;
        EXPECT_EQ(now.positions.at(kept), old.positions[row]);
        changed += expected.is_merged[row] ? 1 : 0;
        uncertain += expected.is_uncertain[row] ? 1 : 0;
        for (int d = 0; d < merged_dim; ++d) {
          const std::size_t i = kept * merged_dim + d;
          EXPECT_NEAR(now.keys[i], head.key(row)[d], rounding) << row;
          if (expected.is_uncertain[row]) continue;
          EXPECT_NEAR(now.values[i], expected.values[row * merged_dim + d], rounding) << row;
        }
        ++kept;
      }
    }
    EXPECT_LE(uncertain, 2 + changed / 20);
    return changed;
  }

  Communicator comm;
  ModelConfig config = merged_config();
  HeadPartition partition;
  std::shared_ptr<const Model> model;
  CacheOptions options;
  SeenHeads seen;
};

TEST_F(MergedValues, AfterTheContext) {
  const MergeRule rule = {0.1, 0.8};
  for (const Budget::Pool pool : {Budget::Pool::head, Budget::Pool::layer, Budget::Pool::model}) {
    SCOPED_TRACE(static_cast<int>(pool));
    options.policy = merging(0.6, pool, "merge:similarity=0.1,fraction=0.8");
    const auto engine = Engine::create(model, nullptr, options, comm);
    const SequenceId a = engine->add_sequence(), b = engine->add_sequence();
    step(*engine, b, merged_tokens(33, 5), StepPart::context);
    step(*engine, a, merged_tokens(150), StepPart::context);
    const SeenHeads before = seen;
    engine->end_context(a);
    const SequenceId fork = engine->fork(a);
    step(*engine, a, merged_tokens(3, 2), StepPart::question);
    const int changed = expect_merged(before, seen, rule);
    EXPECT_TRUE(changed > 10 || before.empty());
    // A fork has the same rows, whatever its source has done since.
    engine->free_sequence(a);
    step(*engine, fork, merged_tokens(3, 2), StepPart::question);
    EXPECT_EQ(expect_merged(before, seen, rule), changed);
  }
}

TEST_F(MergedValues, AfterEachChunkAndWhileGenerating) {
  options.pruning.prefill = PrefillMode::sparse;
  options.policy = merging(0.5, Budget::Pool::layer, "merge");
  options.pruning.decode.keep = 20;
  const auto engine = Engine::create(model, nullptr, options, comm);
  const SequenceId sequence = engine->add_sequence();
  int changed = 0;
  SeenHeads before;
  const auto follow = [&](int count, StepPart part) {
    step(*engine, sequence, merged_tokens(count, count), part);
    if (!before.empty()) changed += expect_merged(before, seen, {});
    before = seen;
  };
  for (const int count : {40, 37, 9}) follow(count, StepPart::context);
  engine->end_context(sequence);
  follow(5, StepPart::question);
  // Forks take their own way, and take nothing from their source.
  const SequenceId fork = engine->fork(sequence);
  const SeenHeads at_fork = before;
  for (int i = 0; i < 20; ++i) follow(1, StepPart::generated);
  EXPECT_TRUE(changed > 50 || before.empty());
  step(*engine, fork, merged_tokens(2, 9), StepPart::generated);
  expect_merged(at_fork, seen, {});
}

TEST_F(MergedValues, OfPackedRows) {
  options.page_format.keys = options.page_format.values = RowType::q8;
  options.policy = merging(0.6, Budget::Pool::head, "merge");
  const auto engine = Engine::create(model, nullptr, options, comm);
  const SequenceId sequence = engine->add_sequence();
  step(*engine, sequence, merged_tokens(150), StepPart::context);
  const SeenHeads before = seen;
  step(*engine, sequence, merged_tokens(3, 2), StepPart::question);
  double largest = 0;
  for (const auto& [place, head] : before) {
    for (const float x : head.values) largest = std::max<double>(largest, std::abs(x));
    for (const float x : head.keys) largest = std::max<double>(largest, std::abs(x));
  }
  expect_merged(before, seen, {}, largest / 40);
}

// One reading of the context serves settings with and without merging.
TEST_F(MergedValues, OfAForkLeaveTheReadingAlone) {
  CacheOptions plain;
  plain.pruning.window = 8;
  plain.page_rows = 4;
  const auto engine = Engine::create(model, nullptr, plain, comm);
  options.pruning.decode = {};
  LoadedPruning setting = options;
  setting.policy = merging(0.5, Budget::Pool::head, "merge");
  const SequenceId dense = engine->add_sequence();
  const auto reading =
      engine->read(dense, merged_tokens(90), 0, {setting.policy}, StepOutput::none);
  const SeenHeads before = seen;
  std::vector<TokenId> argmax;
  for (int i = 0; i < 2; ++i) {
    const SequenceId pruned = engine->prune(dense, setting, reading.scores[0].get());
    const SequenceId copy = engine->fork(dense);
    StepBatch batch;
    for (const SequenceId id : {pruned, copy}) {
      batch.add(id, merged_tokens(4, 1), engine->rule(id, StepPart::question), StepOutput::argmax);
    }
    for (const StepResult& result : engine->step(batch)) argmax.push_back(result.argmax);
    engine->free_sequence(pruned);
    engine->free_sequence(copy);
  }
  EXPECT_EQ(argmax[0], argmax[2]);
  EXPECT_EQ(argmax[1], argmax[3]);
  EXPECT_EQ(seen.size(), before.size());
}

TEST_F(MergedValues, DoNotFitWhatHasNoValues) {
  LatentConfig latent;
  config.latent = latent;
  const PolicySetup setup{config, partition, DType::f32, {}, comm};
  Budget budget;
  budget.amount = Budget::Amount::evict_ratio;
  budget.evict_ratio = 0.5;
  EXPECT_THROW(make_policy(parse_policy("knorm+merge"), budget, {}, setup), Error);
}

}  // namespace
}  // namespace kvzap
