// Steps of a model outside of the library, against dense attention in double precision.
#include <gtest/gtest.h>

#include <cmath>
#include <kvzap/engine/engine.hpp>
#include <random>
#include <vector>

namespace kvzap {
namespace {

constexpr int layers = 2, kv_heads = 2, group = 3, dim = 16, hidden_size = 24;

ModelConfig small_config() {
  ModelConfig config;
  config.architecture = "LlamaForCausalLM";
  config.hidden_size = hidden_size;
  config.intermediate_size = 8;
  config.num_hidden_layers = layers;
  config.num_attention_heads = kv_heads * group;
  config.num_key_value_heads = kv_heads;
  config.head_dim = dim;
  config.vocab_size = 4;
  config.max_position_embeddings = 4096;
  config.rms_norm_eps = 1e-6;
  config.rope_theta = 10000;
  return config;
}

/// Scores a pair by the first hidden value of its token, times 1 + its head.
class FirstValue final : public Scorer {
 public:
  void score(const ExecutionSpace& exec, int, const PositionView&, const InputView& hidden,
             const ScoreView& scores) override {
    Kokkos::parallel_for(
        "score", Kokkos::RangePolicy<ExecutionSpace>(exec, 0, hidden.extent(0)),
        KOKKOS_LAMBDA(const int token) {
          for (int head = 0; head < kv_heads; ++head) {
            scores(head, token) = hidden(token, 0) * (1 + head);
          }
        });
    exec.fence();
  }
  std::string kind() const override { return "first value"; }
};

template <class Value>
std::unique_ptr<Engine> small_engine(const LoadedPruning& pruning = {},
                                     std::shared_ptr<Scorer> scorer = nullptr) {
  CacheOptions options;
  static_cast<LoadedPruning&>(options) = pruning;
  options.page_rows = 16;
  const auto partition = HeadPartition::even(layers, kv_heads, 1);
  return Engine::create(std::make_shared<const Model>(Model::without_weights(
                            small_config(), DTypeOf<Value>::value, partition)),
                        std::move(scorer), options, Communicator::self());
}

/// Arrays (head, token, dim), as transformers lays them out, and views of them by token.
template <class Value>
struct Arrays {
  Arrays(int heads, std::int64_t tokens, std::mt19937& random)
      : data("arrays", heads, tokens + 3, dim) {  // more rows than are shown: strides matter
    const auto host = Kokkos::create_mirror_view(data);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < host.size(); ++i)
      host.data()[i] = static_cast<Value>(normal(random));
    Kokkos::deep_copy(data, host);
    view.data = data.data();
    view.dtype = DTypeOf<Value>::value;
    view.extents = {tokens, heads, dim};
    view.strides = {dim, (tokens + 3) * dim, 1};
  }

  Kokkos::View<Value***, Kokkos::LayoutRight, MemorySpace> data;
  ArrayView view;
};

/// Everything that a sequence has seen in a layer.
struct Seen {
  std::vector<std::vector<double>> keys, values;  // (head * dim) of each token
};

template <class Value>
void expect_dense_attention(const Seen& seen, const Arrays<Value>& queries,
                            const Arrays<Value>& output, double tolerance) {
  const auto host_queries = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), queries.data);
  const auto host_output = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), output.data);
  const std::int64_t count = queries.view.extents[0];
  const auto before = static_cast<std::int64_t>(seen.keys.size()) - count;
  for (std::int64_t t = 0; t<count; t += count> 50 ? 37 : 1) {
    for (int q = 0; q < kv_heads * group; ++q) {
      const int head = q / group;
      std::vector<double> weights(before + t + 1);
      double sum = 0;
      for (std::size_t row = 0; row < weights.size(); ++row) {
        double product = 0;
        for (int d = 0; d < dim; ++d) {
          product += static_cast<float>(host_queries(q, t, d)) * seen.keys[row][head * dim + d];
        }
        sum += weights[row] = std::exp(product / std::sqrt(double{dim}));
      }
      for (int d = 0; d < dim; ++d) {
        double expected = 0;
        for (std::size_t row = 0; row < weights.size(); ++row) {
          expected += weights[row] / sum * seen.values[row][head * dim + d];
        }
        ASSERT_NEAR(static_cast<float>(host_output(q, t, d)), expected, tolerance)
            << "token " << t << ", query head " << q << ", dimension " << d;
      }
    }
  }
}

template <class Value>
void run_steps(double tolerance) {
  std::mt19937 random(7);
  const auto engine = small_engine<Value>();
  const SequenceId sequences[] = {engine->add_sequence(), engine->add_sequence()};
  Seen seen[2][layers];
  // More tokens than pass through a layer at once, decode steps, and a mix.
  for (const auto& counts :
       std::vector<std::vector<std::int64_t>>{{600, 37}, {1, 1}, {5, 1}, {0, 3}}) {
    StepBatch batch;
    std::vector<int> in_batch;
    for (int s = 0; s < 2; ++s) {
      if (counts[s] == 0) continue;
      batch.add(sequences[s], std::vector<TokenId>(counts[s]), engine->rule(StepPart::question),
                StepOutput::none);
      in_batch.push_back(s);
    }
    engine->begin_step(batch);
    for (int layer = 0; layer < layers; ++layer) {
      std::vector<Arrays<Value>> queries, keys, values, outputs;
      std::vector<ExternalLayer> spans;
      for (const int s : in_batch) {
        queries.emplace_back(kv_heads * group, counts[s], random);
        keys.emplace_back(kv_heads, counts[s], random);
        values.emplace_back(kv_heads, counts[s], random);
        outputs.emplace_back(kv_heads * group, counts[s], random);
        ExternalLayer span;
        span.queries = queries.back().view;
        span.keys = keys.back().view;
        span.values = values.back().view;
        span.output = outputs.back().view;
        spans.push_back(span);
        const auto host_keys =
            Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), keys.back().data);
        const auto host_values =
            Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), values.back().data);
        for (std::int64_t t = 0; t < counts[s]; ++t) {
          std::vector<double> key, value;
          for (int i = 0; i < kv_heads * dim; ++i) {
            key.push_back(static_cast<float>(host_keys(i / dim, t, i % dim)));
            value.push_back(static_cast<float>(host_values(i / dim, t, i % dim)));
          }
          seen[s][layer].keys.push_back(key);
          seen[s][layer].values.push_back(value);
        }
      }
      engine->attend(layer, spans);
      for (std::size_t i = 0; i < in_batch.size(); ++i) {
        expect_dense_attention(seen[in_batch[i]][layer], queries[i], outputs[i], tolerance);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
    engine->end_step();
  }
  EXPECT_EQ(engine->tokens(sequences[0]), 606);
  EXPECT_EQ(engine->tokens(sequences[1]), 42);
}

TEST(ExternalSteps, AttentionIsDense) { run_steps<float>(2e-5); }
TEST(ExternalSteps, AttentionIsDenseInBfloat16) { run_steps<bfloat16>(6e-2); }
TEST(ExternalSteps, AttentionIsDenseInHalf) { run_steps<half>(1e-2); }

/// One step of `count` tokens of a sequence, with hidden states that the test chooses.
struct OneStep {
  OneStep(Engine& runs, SequenceId sequence, std::int64_t count, std::mt19937& random)
      : engine(runs),
        queries(kv_heads * group, count, random),
        keys(kv_heads, count, random),
        values(kv_heads, count, random),
        outputs(kv_heads * group, count, random),
        hidden("hidden", count, hidden_size),
        batch(sequence, std::vector<TokenId>(count), runs.rule(StepPart::context),
              StepOutput::none) {
    span.queries = queries.view;
    span.keys = keys.view;
    span.values = values.view;
    span.output = outputs.view;
    span.hidden.data = hidden.data();
    span.hidden.extents = {count, 1, hidden_size};
    span.hidden.strides = {hidden_size, 0, 1};
  }
  void run() {
    engine.begin_step(batch);
    for (int layer = 0; layer < layers; ++layer) engine.attend(layer, {span});
    engine.end_step();
  }

  Engine& engine;
  Arrays<float> queries, keys, values, outputs;
  Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> hidden;
  StepBatch batch;
  ExternalLayer span;
};

LoadedPruning by_threshold(double threshold, int window) {
  LoadedPruning pruning;
  pruning.pruning.threshold(threshold);
  pruning.pruning.mode = PruneMode::prefill;
  pruning.pruning.window = window;
  return pruning;
}

TEST(ExternalSteps, ThresholdsJudgeByHiddenStates) {
  std::mt19937 random(8);
  const int count = 700, window = 10;
  const auto engine =
      small_engine<float>(by_threshold(1.5, window), std::make_shared<FirstValue>());
  const SequenceId sequence = engine->add_sequence();
  OneStep step(*engine, sequence, count, random);
  const auto host = Kokkos::create_mirror_view(step.hidden);
  for (int t = 0; t < count; ++t) host(t, 0) = static_cast<float>(t % 3);
  Kokkos::deep_copy(step.hidden, host);
  engine->begin_step(step.batch);
  EXPECT_TRUE(engine->needs_hidden());
  engine->cancel_step();
  EXPECT_EQ(engine->tokens(sequence), 0);
  step.run();
  for (int layer = 0; layer < layers; ++layer) {
    for (int head = 0; head < kv_heads; ++head) {
      std::vector<std::int64_t> expected;
      for (int t = 0; t < count; ++t) {
        if (t >= count - window || (t % 3) * (1 + head) >= 1.5) expected.push_back(t);
      }
      EXPECT_EQ(engine->positions(sequence, layer, head), expected);
    }
  }
}

TEST(ExternalSteps, MistakesThrowAndLeaveTheSequence) {
  std::mt19937 random(9);
  const auto engine = small_engine<float>(by_threshold(0, 4), std::make_shared<FirstValue>());
  const SequenceId sequence = engine->add_sequence();
  OneStep step(*engine, sequence, 20, random);
  EXPECT_THROW(engine->attend(0, {step.span}), Error);
  EXPECT_THROW(engine->end_step(), Error);
  engine->cancel_step();  // of no step
  const auto expect_refused = [&](const auto& change) {
    ExternalLayer span = step.span;
    change(span);
    engine->begin_step(step.batch);
    EXPECT_THROW(engine->attend(0, {span}), Error);
    EXPECT_EQ(engine->tokens(sequence), 0);
    EXPECT_THROW(engine->attend(1, {step.span}), Error) << "the step has ended";
  };
  expect_refused([](ExternalLayer& span) { span.queries = {}; });
  expect_refused([](ExternalLayer& span) { span.hidden = {}; });
  expect_refused([](ExternalLayer& span) { span.keys.extents[0] = 19; });
  expect_refused([](ExternalLayer& span) { span.values.extents[1] = 3; });
  expect_refused([](ExternalLayer& span) { span.output.extents[2] = 15; });
  engine->begin_step(step.batch);
  EXPECT_THROW(engine->begin_step(step.batch), Error);
  EXPECT_THROW(engine->step(step.batch), Error);
  EXPECT_THROW(engine->attend(1, {step.span}), Error) << "layer 0 comes first";
  engine->begin_step(step.batch);
  EXPECT_THROW(engine->attend(0, {}), Error);
  step.run();
  EXPECT_EQ(engine->tokens(sequence), 20);
  const SequenceId other = engine->add_sequence();
  OneStep late(*engine, other, 3, random);
  engine->begin_step(late.batch);
  EXPECT_THROW(engine->free_sequence(other), Error);
  EXPECT_THROW(engine->set_pruning(other, by_threshold(1, 4)), Error);
  for (int layer = 0; layer < layers; ++layer) engine->attend(layer, {late.span});
  EXPECT_THROW(engine->attend(layers, {late.span}), Error) << "there is no such layer";
  EXPECT_EQ(engine->tokens(other), 0);
  StepBatch wants_logits(sequence, {0}, engine->rule(StepPart::generated), StepOutput::logits);
  EXPECT_THROW(engine->begin_step(wants_logits), Error);
  engine->begin_step(StepBatch(sequence, {0}, engine->rule(StepPart::generated), StepOutput::none));
  EXPECT_THROW(engine->end_step(), Error) << "no layer has run";
  engine->cancel_step();
  EXPECT_EQ(engine->tokens(sequence), 20);
}

}  // namespace
}  // namespace kvzap
