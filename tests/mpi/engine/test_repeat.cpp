// Policies that let the model repeat the context: what the repeat leaves in a sequence (nothing but
// scores), in which steps it runs, and what becomes of it without memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <kvzap/engine/generate.hpp>
#include <numeric>
#include <optional>
#include <string>

#include "allocations.hpp"

namespace kvzap {
namespace {

constexpr int n_layers = 3;
constexpr int n_heads = 5;
constexpr int words = 61;  // of the vocabulary

ModelConfig tiny_config() {
  ModelConfig config{};
  config.architecture = "LlamaForCausalLM";
  config.hidden_size = 40;
  config.intermediate_size = 32;
  config.num_hidden_layers = n_layers;
  config.num_attention_heads = n_heads * 2;
  config.num_key_value_heads = n_heads;
  config.head_dim = 16;
  config.vocab_size = words;
  config.max_position_embeddings = 4096;
  config.rms_norm_eps = 1e-6;
  config.rope_theta = 10000;
  return config;
}

std::vector<TokenId> made_up_tokens(int count) {
  std::vector<TokenId> tokens(count);
  for (int i = 0; i < count; ++i) tokens[i] = (7 * i + i * i / 3) % words;
  return tokens;
}

Budget share(double ratio) {
  Budget budget;
  budget.amount = Budget::Amount::evict_ratio;
  budget.evict_ratio = ratio;
  return budget;
}

/// Scores of whole layers, as observers get them: [layer][head on this rank * tokens + position].
class Recorder final : public StepObserver {
 public:
  std::vector<std::vector<float>> of_layer{n_layers};
  int calls = 0;

  void scores(SequenceId /*sequence*/, int layer, std::int64_t first,
              const ScoresView& scores) override {
    EXPECT_EQ(first, 0);
    ++calls;
    const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> packed(
        "kvzap::test::packed", scores.extent(0), scores.extent(1));
    Kokkos::deep_copy(packed, scores);
    const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), packed);
    of_layer[layer].assign(host.data(), host.data() + host.size());
  }
};

class Repeat : public ::testing::Test {
 protected:
  Repeat()
      : comm(Communicator::world()),
        partition(HeadPartition::even(n_layers, n_heads, comm.size())) {
    options.pruning.mode = PruneMode::prefill;
    options.pruning.window = 8;
    options.page_rows = 4;
  }

  std::shared_ptr<PolicyChoice> choice(const std::string& text, double ratio,
                                       DType dtype = DType::f32) const {
    const PolicySetup setup{config, partition, dtype, {}, comm};
    auto made = std::make_shared<PolicyChoice>(
        make_policy(parse_policy(text), share(ratio), std::nullopt, setup));
    made->repeat.first = {1, 2, 3};
    made->repeat.later = {4, 5, 6, 7};
    made->repeat.suffix = {8};
    made->repeat.prefix = 2;
    return made;
  }
  template <class Value>
  std::shared_ptr<const Model> model() const {
    return std::make_shared<const Model>(
        Model::load("", config, DTypeOf<Value>::value, partition, comm.rank(), {3}));
  }
  template <class Value>
  std::unique_ptr<Engine> engine(std::shared_ptr<const PolicyChoice> policy) {
    CacheOptions with = options;
    if (!policy) with.pruning.mode = PruneMode::none;
    with.policy = std::move(policy);
    return Engine::create(model<Value>(), nullptr, with, comm);
  }

  static std::vector<float> context_and_question(Engine& engine, SequenceId sequence,
                                                 const std::vector<TokenId>& context) {
    engine.step(StepBatch(sequence, context, engine.rule(StepPart::context), StepOutput::none));
    engine.end_context(sequence);
    return engine
        .step(StepBatch(sequence, {9, 8, 7}, engine.rule(StepPart::question), StepOutput::logits))
        .front()
        .logits;
  }

  /// Keeping everything, a policy changes nothing to the last bit.
  template <class Value>
  void expect_nothing_left(const std::string& text, DType dtype) {
    const auto context = made_up_tokens(150);
    const auto plain = engine<Value>(nullptr);
    const auto repeating = engine<Value>(choice(text, 0, dtype));
    const SequenceId a = plain->add_sequence(), b = repeating->add_sequence();
    EXPECT_EQ(context_and_question(*repeating, b, context),
              context_and_question(*plain, a, context))
        << text;
    EXPECT_EQ(repeating->tokens(b), 153);
    const CacheReport report = repeating->report(b);
    EXPECT_EQ(report.evict_ratio(), 0);
    EXPECT_EQ(report.live_bytes, plain->report(a).live_bytes);
    EXPECT_EQ(report.non_finite_scores, 0);
    EXPECT_GT(report.score_seconds, 0);
  }

  Communicator comm;
  ModelConfig config = tiny_config();
  HeadPartition partition;
  CacheOptions options;
};

// Rings shorter than the repeat, and longer than everything; all value types.
TEST_F(Repeat, LeavesNothingInTheSequence) {
  for (const int window : {8, 1000}) {
    options.pruning.window = window;
    expect_nothing_left<float>("kvzip:chunk=40", DType::f32);
    expect_nothing_left<bfloat16>("kvzip-plus:chunk=64", DType::bf16);
    expect_nothing_left<half>("kvzip-plus", DType::f16);
    expect_nothing_left<float>("kvcompose", DType::f32);
    expect_nothing_left<bfloat16>("kvcompose:chunk=64,structured=off", DType::bf16);
  }
}

TEST_F(Repeat, KeepsWhatScoresMost) {
  const auto context = made_up_tokens(90);
  for (const std::string text : {"kvzip:chunk=40", "kvzip-plus:chunk=40,layerwise=on"}) {
    const auto pruning = engine<float>(choice(text, 0.65));
    Recorder recorder;
    pruning->set_observer(&recorder);
    const SequenceId sequence = pruning->add_sequence();
    context_and_question(*pruning, sequence, context);
    EXPECT_EQ(recorder.calls, n_layers);
    const bool by_layer = text.find("layerwise") != std::string::npos;
    const CacheReport report = pruning->report(sequence);
    std::int64_t kept = 0;
    for (const auto& heads : report.kept) {
      const std::int64_t of_layer = std::accumulate(heads.begin(), heads.end(), std::int64_t{0});
      if (by_layer) {
        EXPECT_EQ(of_layer, 5 * 93 - static_cast<std::int64_t>(5 * 90 * 0.65));
      }
      kept += of_layer;
    }
    const std::int64_t pairs = std::int64_t{n_layers} * n_heads * 90;
    if (!by_layer) {
      EXPECT_EQ(kept, pairs + n_layers * n_heads * 3 - static_cast<std::int64_t>(pairs * 0.65));
    }
    pruning->gather_pages(sequence);
    // On each rank: what is gone scores no more than what stays.
    std::vector<double> least(n_layers, 1e30), most(n_layers, -1);
    for (int l = 0; l < n_layers; ++l) {
      const int heads = static_cast<int>(partition.heads(l, comm.rank()).size());
      for (int h = 0; h < heads; ++h) {
        const auto positions = pruning->positions(sequence, l, h);
        for (std::int64_t p = 0; p < 90; ++p) {
          const double score = recorder.of_layer[l][h * 90 + p];
          if (std::binary_search(positions.begin(), positions.end(), p)) {
            least[l] = std::min(least[l], score);
          } else {
            most[l] = std::max(most[l], score);
            EXPECT_GE(p, 4);
          }
        }
      }
    }
    if (!by_layer) {
      std::fill(least.begin(), least.end(), *std::min_element(least.begin(), least.end()));
      std::fill(most.begin(), most.end(), *std::max_element(most.begin(), most.end()));
    }
    for (int l = 0; l < n_layers; ++l) EXPECT_GE(least[l], most[l]) << text;
  }
}

// The heads of a layer, on whatever rank, keep the same number of their best rows.
TEST_F(Repeat, ComposesTokensOfAllHeads) {
  constexpr int tokens = 90;
  const auto context = made_up_tokens(tokens);
  const auto pruning = engine<float>(choice("kvcompose", 0.65));
  Recorder recorder;
  pruning->set_observer(&recorder);
  const SequenceId sequence = pruning->add_sequence();
  context_and_question(*pruning, sequence, context);
  EXPECT_EQ(recorder.calls, n_layers);
  const CacheReport report = pruning->report(sequence);
  EXPECT_EQ(report.non_finite_scores, 0);
  std::int64_t composed = 0;
  for (const auto& heads : report.kept) {
    ASSERT_EQ(heads.size(), static_cast<std::size_t>(n_heads));
    for (const std::int64_t rows : heads) EXPECT_EQ(rows, heads[0]);
    EXPECT_LE(heads[0], report.kept[0][0]);
    composed += heads[0] - 3;
  }
  EXPECT_EQ(composed, static_cast<std::int64_t>(n_layers * tokens * (1 - 0.65)));
  pruning->gather_pages(sequence);
  for (int l = 0; l < n_layers; ++l) {
    const int heads = static_cast<int>(partition.heads(l, comm.rank()).size());
    for (int h = 0; h < heads; ++h) {
      const auto positions = pruning->positions(sequence, l, h);
      double least = 1e30, most = -1;
      for (std::int64_t p = 0; p < tokens; ++p) {
        const double score = recorder.of_layer[l][h * tokens + p];
        if (std::binary_search(positions.begin(), positions.end(), p)) {
          least = std::min(least, score);
        } else {
          most = std::max(most, score);
        }
      }
      EXPECT_GE(least, most);
    }
  }
}

// One rank alone finds the same rows as all together.
TEST_F(Repeat, ComposesAlikeOnAnyNumberOfRanks) {
  const auto context = made_up_tokens(90);
  const auto whole = HeadPartition::even(n_layers, n_heads, 1);
  for (const std::string text : {"kvcompose", "kvcompose:chunk=40,structured=off"}) {
    const auto together = engine<float>(choice(text, 0.5));
    CacheOptions with = options;
    with.policy = choice(text, 0.5);
    const auto alone = Engine::create(
        std::make_shared<const Model>(Model::load("", config, DType::f32, whole, 0, {3})), nullptr,
        with, Communicator::self());
    const SequenceId a = together->add_sequence(), b = alone->add_sequence();
    context_and_question(*together, a, context);
    context_and_question(*alone, b, context);
    EXPECT_EQ(together->report(a).kept, alone->report(b).kept) << text;
  }
}

// As a server may do it; and sequences beside it are none of its business.
TEST_F(Repeat, TakesAContextThatCameInSteps) {
  const auto context = made_up_tokens(120);
  const auto run = engine<float>(choice("kvzip:chunk=50", 0.5));
  Recorder in_one, in_steps;
  const SequenceId one = run->add_sequence(), two = run->add_sequence();
  run->set_observer(&in_one);
  context_and_question(*run, one, context);
  run->set_observer(&in_steps);
  run->step(StepBatch(two, {context.begin(), context.begin() + 33}, run->rule(StepPart::context),
                      StepOutput::none));
  const SequenceId fork = run->fork(two);
  for (const SequenceId sequence : {two, fork}) {
    run->step(StepBatch(sequence, {context.begin() + 33, context.end()},
                        run->rule(StepPart::context), StepOutput::none));
    run->end_context(sequence);
    for (int l = 0; l < n_layers; ++l) {
      ASSERT_EQ(in_steps.of_layer[l].size(), in_one.of_layer[l].size());
      for (std::size_t i = 0; i < in_one.of_layer[l].size(); ++i) {
        EXPECT_NEAR(in_steps.of_layer[l][i], in_one.of_layer[l][i], 1e-4 * in_one.of_layer[l][i]);
      }
    }
    EXPECT_EQ(run->tokens(sequence), 120);
    EXPECT_NEAR(run->report(sequence).evict_ratio(), 0.5, 1e-3);
  }
  EXPECT_EQ(run->tokens(one), 123);
}

TEST_F(Repeat, ReportsProgress) {
  const auto run = engine<float>(choice("kvzip:chunk=50", 0.5));
  const SequenceId sequence = run->add_sequence();
  run->step(
      StepBatch(sequence, made_up_tokens(120), run->rule(StepPart::context), StepOutput::none));
  std::int64_t before = 0, last = 0, all = -1;
  run->end_context(sequence, [&](std::string_view what, std::int64_t done, std::int64_t total) {
    EXPECT_EQ(what, "repeat");
    EXPECT_GE(done, before);
    before = last = done;
    all = total;
  });
  EXPECT_EQ(last, all);
}

// What the repeat does not find memory for leaves the context as it was.
TEST_F(Repeat, LeavesTheContextWithoutMemory) {
  const auto pages = [&](std::int64_t rows) {
    std::size_t heads = 0;
    for (int l = 0; l < n_layers; ++l) heads += partition.heads(l, comm.rank()).size();
    const std::size_t ring = options.pruning.window * (2 * 16 + 1) * sizeof(float);
    return heads * (3 * ring + (rows + 8) * (2 * 16 + 2) * sizeof(float));
  };
  options.kv_limit = pages(100);
  const auto run = engine<float>(choice("kvzip:chunk=90", 0.5));
  const SequenceId sequence = run->add_sequence();
  run->step(
      StepBatch(sequence, made_up_tokens(90), run->rule(StepPart::context), StepOutput::none));
  for (int tried = 0; tried < 2; ++tried) {
    EXPECT_THROW(run->end_context(sequence), StepOutOfMemory);
    EXPECT_EQ(run->tokens(sequence), 90);
    EXPECT_EQ(run->report(sequence).evict_ratio(), 0);
  }
}

TEST_F(Repeat, FailsAsAWhole) {
  const auto alone = Communicator::self();
  const auto whole = HeadPartition::even(n_layers, n_heads, 1);
  const PolicySetup setup{config, whole, DType::f32, {}, alone};
  auto made = std::make_shared<PolicyChoice>(
      make_policy(parse_policy("kvzip-plus:chunk=40"), share(0.5), std::nullopt, setup));
  made->repeat.first = made->repeat.later = {1, 2};
  options.policy = made;
  const auto run = Engine::create(
      std::make_shared<const Model>(Model::load("", config, DType::f32, whole, 0, {3})), nullptr,
      options, alone);
  const auto begin = [&] {
    const SequenceId sequence = run->add_sequence();
    run->step(
        StepBatch(sequence, made_up_tokens(70), run->rule(StepPart::context), StepOutput::none));
    return sequence;
  };
  const SequenceId undisturbed = begin();
  run->end_context(undisturbed);
  SequenceId own = begin();
  int failures = 0;
  for (std::int64_t n = 0;; ++n) {
    bool done = false;
    try {
      const test::FailingAllocation failing(n);
      run->end_context(own);
      done = true;
    } catch (const Error&) {
      ++failures;
    } catch (const std::exception&) {  // bad_alloc, or what Kokkos makes of it
      ++failures;
    }
    if (done) break;
    ASSERT_EQ(run->tokens(own), 70) << n;
    // Once layers are being cut it is to be freed.
    if (run->report(own).evict_ratio() == 0) continue;
    run->free_sequence(own);
    own = begin();
    ASSERT_LT(n, 5000);
  }
  EXPECT_GT(failures, 20);
  for (int l = 0; l < n_layers; ++l) {
    for (int h = 0; h < n_heads; ++h) {
      EXPECT_EQ(run->positions(own, l, h), run->positions(undisturbed, l, h));
    }
  }
}

TEST_F(Repeat, IsRefusedWhereItHasNoMeaning) {
  const auto message_of = [&](const auto& work) -> std::string {
    try {
      work();
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  const auto refused = [&] { return message_of([&] { engine<float>(choice("kvzip", 0.5)); }); };
  EXPECT_EQ(refused(), "");
  options.pruning.mode = PruneMode::always;
  EXPECT_NE(refused().find("prune always"), std::string::npos);
  options.pruning.mode = PruneMode::prefill;
  options.pruning.moment = PruneMoment::question;
  EXPECT_NE(refused().find("prune_after question"), std::string::npos);
  options.pruning.moment = PruneMoment::context;
  options.pruning.prefill = PrefillMode::sparse;
  EXPECT_NE(refused().find("prefill sparse"), std::string::npos);
  options.pruning.prefill = PrefillMode::dense;
  options.pruning.decode = {4, 20, {}};
  EXPECT_NE(refused().find("decode_every"), std::string::npos);
  options.pruning.decode = {};
  const auto silent = choice("kvzip", 0.5);
  silent->repeat.first.clear();
  EXPECT_NE(message_of([&] { engine<float>(silent); }).find("nothing asks"), std::string::npos);
  // A context that is all prefix.
  const auto run = engine<float>(choice("kvzip", 0.5));
  const SequenceId sequence = run->add_sequence();
  run->step(StepBatch(sequence, {1, 2}, run->rule(StepPart::context), StepOutput::none));
  EXPECT_NE(message_of([&] { run->end_context(sequence); }).find("nothing to repeat"),
            std::string::npos);
  // Twice.
  const SequenceId other = run->add_sequence();
  context_and_question(*run, other, made_up_tokens(20));
  EXPECT_NE(message_of([&] { run->end_context(other); }).find("nothing to repeat"),
            std::string::npos);
}

}  // namespace
}  // namespace kvzap
