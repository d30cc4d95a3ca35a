// What a server's scheduler makes of many requests, against a generator of its own for each.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <kvzap/engine/generate.hpp>
#include <kvzap/engine/policies.hpp>
#include <kvzap/server/request_policies.hpp>
#include <kvzap/server/scheduler.hpp>
#include <map>
#include <numeric>
#include <random>
#include <thread>

#include "mpi/ranks.hpp"
#include "unit/policy/retention_gates.hpp"

namespace kvzap::server {
namespace {

constexpr int served_layers = 3;
constexpr int served_heads = 4;
constexpr int served_words = 97;
constexpr int served_hidden = 40;

ModelConfig served_config() {
  ModelConfig config{};
  config.architecture = "LlamaForCausalLM";
  config.hidden_size = served_hidden;
  config.intermediate_size = 48;
  config.num_hidden_layers = served_layers;
  config.num_attention_heads = served_heads * 2;
  config.num_key_value_heads = served_heads;
  config.head_dim = 16;
  config.vocab_size = served_words;
  config.max_position_embeddings = 4096;
  config.rms_norm_eps = 1e-6;
  config.rope_theta = 10000;
  return config;
}

/// Scores that depend on the hidden state, so that they show whatever a token has seen.
class HiddenScorer final : public Scorer {
 public:
  HiddenScorer(const HeadPartition& partition, int rank) : m_partition(partition), m_rank(rank) {}
  void score(const ExecutionSpace& exec, int layer, const PositionView&, const InputView& hidden,
             const ScoreView& scores) override {
    exec.fence();
    const auto rows = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), hidden);
    const auto& heads = m_partition.heads(layer, m_rank);
    Kokkos::View<float**, Kokkos::LayoutRight, Kokkos::HostSpace> host("scores", heads.size(),
                                                                       hidden.extent(0));
    for (std::size_t h = 0; h < heads.size(); ++h) {
      for (std::size_t t = 0; t < hidden.extent(0); ++t) {
        float sum = 0;
        for (int k = 0; k < served_hidden; ++k) {
          sum += rows(t, k) * std::sin(0.7F * static_cast<float>(k * (heads[h] + 2) + layer));
        }
        host(h, t) = sum;
      }
    }
    const auto device = Kokkos::create_mirror_view_and_copy(MemorySpace(), host);
    Kokkos::deep_copy(exec, scores, device);
    exec.fence();
  }
  std::string kind() const override { return "hidden"; }

 private:
  HeadPartition m_partition;
  int m_rank;
};

/// What a listener has heard.
struct Heard final : Listener {
  std::map<int, std::vector<TokenId>> tokens;
  std::map<int, std::vector<float>> logprobs;
  std::map<int, Ending> endings;
  std::vector<TokenId> prompt;
  std::vector<std::optional<TokenLogprobs>> of_prompt;
  std::vector<PromptProgress> progress;
  std::vector<float> vector;
  std::string error;
  std::int64_t stops_after = -1;

  void on_progress(int choice, const PromptProgress& made) override {
    EXPECT_EQ(choice, 0);
    EXPECT_TRUE(tokens.empty());
    progress.push_back(made);
  }

  bool on_token(int choice, TokenId token, const TokenLogprobs* of_token) override {
    tokens[choice].push_back(token);
    if (of_token) logprobs[choice].push_back(of_token->logprob);
    return static_cast<std::int64_t>(tokens[choice].size()) != stops_after;
  }
  void on_prompt(const std::vector<TokenId>& some,
                 const std::vector<std::optional<TokenLogprobs>>& of_some) override {
    prompt.insert(prompt.end(), some.begin(), some.end());
    of_prompt.insert(of_prompt.end(), of_some.begin(), of_some.end());
  }
  void on_embedding(std::vector<float> pooled) override { vector = std::move(pooled); }
  void on_end(int choice, const Ending& ending) override { endings[choice] = ending; }
  void on_error(const RequestError& of) override { error = of.what; }
};

struct Asked {
  std::vector<TokenId> context, question;
  std::int64_t new_tokens = 0;
};

class SchedulerTest : public ::testing::Test {
 protected:
  SchedulerTest()
      : comm(Communicator::world()),
        partition(HeadPartition::even(served_layers, served_heads, comm.size())),
        model(std::make_shared<const Model>(
            Model::load("", served_config(), DType::f32, partition, comm.rank(), {3}))),
        scorer(std::make_shared<HiddenScorer>(partition, comm.rank())) {
    options.pruning.window = 8;
    options.page_rows = 4;
    options.pruning.chunk = 16;
    options.pruning.sink = 2;
    options.pruning.amount.threshold = 0.1F;
    scheduling.max_batch_tokens = 24;
  }

  std::vector<TokenId> some(std::int64_t count) {
    std::vector<TokenId> tokens(static_cast<std::size_t>(count));
    for (TokenId& token : tokens) token = static_cast<TokenId>(random() % served_words);
    return tokens;
  }
  /// (Ranks that wait for one another take long on a busy machine.)
  bool is_crowded() const { return comm.size() > 2; }
  std::vector<Asked> some_asked(int count) {
    std::vector<Asked> all;
    if (is_crowded()) count = count / 3;
    for (int i = 0; i < count; ++i) {
      all.push_back({some(1 + static_cast<std::int64_t>(random() % 90)),
                     some(static_cast<std::int64_t>(random() % 14)),
                     1 + static_cast<std::int64_t>(random() % 20)});
    }
    return all;
  }
  GenerationRequest request_of(const Asked& asked) const {
    GenerationRequest request;
    request.prompt = {{Segment::Kind::context, asked.context, {}},
                      {Segment::Kind::question, asked.question, {}}};
    request.max_new_tokens = asked.new_tokens;
    return request;
  }
  std::unique_ptr<Engine> engine() const {
    return Engine::create(model, options.mode() == PruneMode::none ? nullptr : scorer, options,
                          comm);
  }
  /// What a generator answers, on all ranks.
  Answer answer_of(const Asked& asked, const SamplingOptions& sampling = {}) const {
    Generator generator(engine());
    generator.prefill(asked.context, false);
    AnswerOptions wanted;
    wanted.max_new_tokens = asked.new_tokens;
    wanted.sampling = sampling;
    return generator.answer(asked.question, wanted);
  }
  std::vector<Answer> answers_of(const std::vector<Asked>& all) const {
    std::vector<Answer> answers;
    answers.reserve(all.size());
    for (const Asked& asked : all) answers.push_back(answer_of(asked));
    return answers;
  }

  /// work(scheduler) on rank 0, while the others follow. Nothing is left in the cache afterwards.
  template <class Work>
  void serve(const Work& work) {
    const auto served = engine();
    Executor executor(*served, {}, [&](const Pruning&) {
      return Executor::Traits{holds, holds, {}, true, true};
    });
    if (comm.is_root()) {
      Scheduler scheduler(executor, scheduling);
      work(scheduler);
      while (scheduler.step()) {
      }
      const SchedulerCounts counts = scheduler.counts();
      EXPECT_EQ(counts.running, 0);
      EXPECT_EQ(counts.waiting, 0);
      scheduler.drain();
      scheduler.run();
    } else {
      executor.follow();
    }
    EXPECT_EQ(executor.size(), 0);
    EXPECT_EQ(served->bytes().live, 0U);
  }

  void expect_answers(const std::vector<Asked>& all, const std::vector<Answer>& expected) {
    serve([&](Scheduler& scheduler) {
      std::vector<std::shared_ptr<Heard>> heard;
      std::vector<std::shared_ptr<Scheduler::Ticket>> tickets;
      std::mt19937 own(5);
      for (std::size_t i = 0; i < all.size(); ++i) {
        heard.push_back(std::make_shared<Heard>());
        tickets.push_back(scheduler.submit(request_of(all[i]), heard.back()));
        // Others that come and go.
        const auto ticket =
            scheduler.submit(request_of(all[own() % all.size()]), std::make_shared<Heard>());
        for (unsigned steps = own() % 4; steps > 0; --steps) scheduler.step();
        ticket->cancel();
      }
      while (scheduler.step()) {
      }
      for (std::size_t i = 0; i < all.size(); ++i) {
        SCOPED_TRACE(i);
        EXPECT_EQ(heard[i]->error, "");
        EXPECT_EQ(heard[i]->tokens[0], expected[i].tokens);
        ASSERT_EQ(heard[i]->endings.count(0), 1U);
        const Ending& ending = heard[i]->endings[0];
        EXPECT_EQ(ending.reason, EndReason::max_new_tokens);
        EXPECT_EQ(ending.prompt_tokens,
                  static_cast<std::int64_t>(all[i].context.size() + all[i].question.size()));
        EXPECT_EQ(ending.new_tokens, all[i].new_tokens);
        EXPECT_DOUBLE_EQ(ending.evict_ratio, expected[i].cache.evict_ratio());
        EXPECT_EQ(ending.full_kv_bytes, expected[i].cache.full_bytes);
      }
      last = scheduler.counts();
    });
  }

  Communicator comm;
  HeadPartition partition;
  std::shared_ptr<const Model> model;
  std::shared_ptr<Scorer> scorer;
  CacheOptions options;
  SchedulerOptions scheduling;
  bool holds = true;
  SchedulerCounts last;
  std::mt19937 random{11};
};

TEST_F(SchedulerTest, AnswersAreThoseOfGenerators) {
  const std::vector<Asked> all = some_asked(14);
  for (const PruneMode prune : {PruneMode::none, PruneMode::prefill, PruneMode::always}) {
    for (const PrefillMode prefill : {PrefillMode::dense, PrefillMode::sparse}) {
      options.pruning.mode = prune;
      options.pruning.prefill = prefill;
      SCOPED_TRACE(std::string(name_of(prune)) + " " + std::string(name_of(prefill)));
      expect_answers(all, answers_of(all));
    }
  }
}

TEST_F(SchedulerTest, DraftsChangeNoAnswer) {
  std::vector<Asked> all = some_asked(9);
  for (Asked& asked : all) {
    // What follows occurs before.
    const std::vector<TokenId> part = some(7);
    for (int i = 0; i < 4; ++i) {
      asked.context.insert(asked.context.end(), part.begin(), part.end());
    }
    asked.question.assign(part.begin(), part.begin() + 3);
    asked.new_tokens += 20;
  }
  scheduling.lookup = 24;
  for (const PruneMode prune : {PruneMode::none, PruneMode::prefill, PruneMode::always}) {
    options.pruning.mode = prune;
    SCOPED_TRACE(std::string(name_of(prune)));
    const std::vector<Answer> expected = answers_of(all);
    expect_answers(all, expected);
    // With one sequence after the other drafts are longest.
    serve([&](Scheduler& scheduler) {
      for (std::size_t i = 0; i < all.size(); ++i) {
        const auto heard = std::make_shared<Heard>();
        scheduler.submit(request_of(all[i]), heard);
        while (scheduler.step()) {
        }
        EXPECT_EQ(heard->tokens[0], expected[i].tokens);
        EXPECT_DOUBLE_EQ(heard->endings[0].evict_ratio, expected[i].cache.evict_ratio());
        EXPECT_EQ(heard->endings[0].full_kv_bytes, expected[i].cache.full_bytes);
      }
      const SchedulerCounts counts = scheduler.counts();
      EXPECT_GT(counts.accepted_tokens, 0);
      EXPECT_GT(counts.drafted_tokens, counts.accepted_tokens);
    });
  }
}

TEST_F(SchedulerTest, AnswersWithDraftsEndWhereOthersDo) {
  options.pruning.mode = PruneMode::none;
  Asked asked = {some(30), some(4), 40};
  const std::vector<TokenId> whole = answer_of(asked).tokens;
  scheduling.lookup = 8;
  for (const std::int64_t count : {1, 17, 30, 31, 32, 33}) {
    serve([&](Scheduler& scheduler) {
      const std::vector<TokenId> begin(whole.begin(), whole.begin() + count);
      const auto by_listener = std::make_shared<Heard>(), by_length = std::make_shared<Heard>();
      by_listener->stops_after = count;
      scheduler.submit(request_of(asked), by_listener);
      GenerationRequest request = request_of(asked);
      request.max_new_tokens = count;
      scheduler.submit(request, by_length);
      while (scheduler.step()) {
      }
      EXPECT_EQ(by_listener->tokens[0], begin);
      EXPECT_EQ(by_length->tokens[0], begin);
      for (const auto& heard : {by_listener, by_length}) {
        EXPECT_EQ(heard->endings[0].new_tokens, count);
      }
      // The next turn continues from the cache of the answer.
      Asked next = asked;
      const auto heard = std::make_shared<Heard>();
      GenerationRequest turn = request_of(asked);
      turn.prompt.push_back({Segment::Kind::generated, begin, {}});
      turn.prompt.push_back({Segment::Kind::question, {1, 2, 3}, {}});
      turn.max_new_tokens = 12;
      scheduler.submit(turn, heard);
      while (scheduler.step()) {
      }
      next.question.insert(next.question.end(), begin.begin(), begin.end());
      next.question.insert(next.question.end(), {1, 2, 3});
      next.new_tokens = 12;
      const auto again = std::make_shared<Heard>();
      scheduler.forget_prefixes();
      scheduler.submit(request_of(next), again);
      while (scheduler.step()) {
      }
      EXPECT_EQ(heard->tokens[0], again->tokens[0]);
    });
  }
}

TEST_F(SchedulerTest, PromptsReportTheirProgressAndTheRowsThatStay) {
  const Asked asked{some(100), some(10), 9};
  scheduling.max_kept_tokens = 110;
  for (const PruneMode prune : {PruneMode::none, PruneMode::prefill}) {
    options.pruning.mode = prune;
    serve([&](Scheduler& scheduler) {
      GenerationRequest request = request_of(asked);
      request.choices = 2;
      request.returns_kept = true;
      for (int turn = 0; turn < 2; ++turn) {
        const auto heard = std::make_shared<Heard>();
        scheduler.submit(request, heard);
        while (scheduler.step()) {
        }
        ASSERT_EQ(heard->error, "");
        ASSERT_FALSE(heard->progress.empty());
        const std::int64_t cached = heard->endings[0].cached_tokens;
        EXPECT_EQ(cached > 0, turn > 0);
        std::int64_t before = cached;
        for (const PromptProgress& made : heard->progress) {
          EXPECT_EQ(made.total, 110);
          EXPECT_EQ(made.cached, cached);
          EXPECT_GE(made.processed, before);
          EXPECT_GE(made.seconds, 0);
          before = made.processed;
        }
        EXPECT_EQ(heard->progress.front().processed, cached);
        EXPECT_EQ(before, 110);
        if (turn == 0) {
          EXPECT_GE(heard->progress.size(), 1 + 110U / 24);
        }

        EXPECT_EQ(heard->endings[1].kept, nullptr);
        const auto kept = heard->endings[0].kept;
        ASSERT_NE(kept, nullptr);
        std::vector<TokenId> tokens = asked.context;
        tokens.insert(tokens.end(), asked.question.begin(), asked.question.end());
        EXPECT_EQ(kept->tokens, tokens);
        ASSERT_EQ(kept->rows.size(), tokens.size());
        EXPECT_EQ(kept->full, served_layers * served_heads);
        // Nothing of the answer is evicted; its last token has not run.
        std::int64_t sum = kept->full * (asked.new_tokens - 1);
        for (const std::int64_t rows : kept->rows) sum += rows;
        const auto all = static_cast<double>(kept->full * (110 + asked.new_tokens - 1));
        EXPECT_NEAR(1 - static_cast<double>(sum) / all, heard->endings[0].evict_ratio, 1e-12);
        EXPECT_EQ(sum < static_cast<std::int64_t>(all), prune == PruneMode::prefill);
      }
      // Not asked for, and too long.
      for (const bool asks : {false, true}) {
        request.returns_kept = asks;
        if (asks) request.prompt[0].tokens.push_back(1);
        const auto heard = std::make_shared<Heard>();
        scheduler.submit(request, heard);
        while (scheduler.step()) {
        }
        EXPECT_EQ(heard->endings[0].kept, nullptr);
        EXPECT_EQ(heard->endings[0].new_tokens, asked.new_tokens);
      }
    });
  }
}

TEST_F(SchedulerTest, LittleMemoryDelaysAndChangesNothing) {
  const std::vector<Asked> all = some_asked(10);
  for (const PruneMode prune : {PruneMode::prefill, PruneMode::always}) {
    options.pruning.mode = prune;
    options.kv_limit = 0;
    const auto expected = answers_of(all);
    // Of each rank: about three of the longest prompts, had none been evicted.
    const auto measured = engine();
    options.kv_limit = 3 * (measured->bytes_per_token() * 130 + measured->bytes_per_sequence());
    expect_answers(all, expected);
    if (comm.is_root() && !is_crowded()) {
      EXPECT_GT(last.preempted + last.prefixes_evicted, 0);
    }
  }
}

TEST_F(SchedulerTest, MemoryThatRunsOutInTheMiddlePreemptsTheNewest) {
  // Short prompts are all admitted, and then grow.
  std::vector<Asked> all;
  for (int i = 0; i < 6; ++i) all.push_back({some(6 + i), some(3), 150});
  for (const PruneMode prune : {PruneMode::none, PruneMode::always}) {
    if (is_crowded() && prune == PruneMode::always) continue;
    options.pruning.mode = prune;
    options.pruning.amount.threshold = -1000;  // all stay, each judged by itself
    options.kv_limit = 0;
    const auto expected = answers_of(all);
    const auto measured = engine();
    options.kv_limit = 3 * (measured->bytes_per_token() * 190 + measured->bytes_per_sequence());
    scheduling.keeps_prefixes = false;
    expect_answers(all, expected);
    if (comm.is_root()) {
      EXPECT_GT(last.preempted, 0);
    }
  }
}

TEST_F(SchedulerTest, PromptsHaveLogProbabilities) {
  // Dense prefill judges a context after its tokens have run, so pruning does not change them.
  std::vector<Asked> all;
  for (int i = 0; i < 6; ++i) all.push_back({some(40 + 9 * i), {}, i % 2 == 0 ? 0 : 60});
  all.push_back({some(1), {}, 1});
  std::vector<std::vector<float>> logits;
  const auto full = engine();
  for (const Asked& asked : all) {
    const SequenceId sequence = full->add_sequence();
    logits.push_back(
        full->step(StepBatch(sequence, asked.context, StepRule(), StepOutput::all_logits))[0]
            .logits);
    full->free_sequence(sequence);
  }
  options.kv_limit = 2 * (full->bytes_per_token() * 150 + full->bytes_per_sequence());
  serve([&](Scheduler& scheduler) {
    std::vector<std::shared_ptr<Heard>> heard;
    for (const Asked& asked : all) {
      heard.push_back(std::make_shared<Heard>());
      GenerationRequest request = request_of(asked);
      request.prompt_logprobs = true;
      request.top_logprobs = 2;
      request.choices = 2;
      scheduler.submit(request, heard.back());
    }
    while (scheduler.step()) {
    }
    for (std::size_t i = 0; i < all.size(); ++i) {
      SCOPED_TRACE(i);
      EXPECT_EQ(heard[i]->error, "");
      EXPECT_EQ(heard[i]->prompt, all[i].context);
      EXPECT_FALSE(heard[i]->of_prompt[0]);
      for (std::size_t t = 1; t < all[i].context.size(); ++t) {
        const float* const row = logits[i].data() + (t - 1) * served_words;
        const double total = log_normalizer(row, served_words);
        const TokenLogprobs& found = *heard[i]->of_prompt[t];
        EXPECT_NEAR(found.logprob, row[all[i].context[t]] - total, 2e-4);
        EXPECT_EQ(found.top.size(), 2U);
        EXPECT_NEAR(found.top[0].second, *std::max_element(row, row + served_words) - total, 2e-4);
      }
      for (int choice = 0; choice < 2; ++choice) {
        EXPECT_EQ(heard[i]->endings[choice].new_tokens, all[i].new_tokens);
      }
    }
  });
}

TEST_F(SchedulerTest, PromptsHaveVectors) {
  std::vector<Asked> all;
  for (int i = 0; i < 4; ++i) all.push_back({some(3 + 26 * i), {}, 0});
  std::vector<std::vector<float>> states;  // (token, hidden)
  const auto full = engine();
  for (const Asked& asked : all) {
    const SequenceId sequence = full->add_sequence();
    states.push_back(
        full->step(StepBatch(sequence, asked.context, StepRule(), StepOutput::all_hidden))[0]
            .hidden);
    full->free_sequence(sequence);
  }
  const std::size_t roomy = options.kv_limit;
  const std::size_t tight = 2 * (full->bytes_per_token() * 150 + full->bytes_per_sequence());
  for (const std::size_t limit : {roomy, tight}) {
    options.kv_limit = limit;
    serve([&](Scheduler& scheduler) {
      std::vector<std::shared_ptr<Heard>> heard, others;
      for (const Asked& asked : all) {
        for (const Pooling pooling : {Pooling::last, Pooling::mean}) {
          heard.push_back(std::make_shared<Heard>());
          GenerationRequest request = request_of(asked);
          request.pooling = pooling;
          Pruning none;
          none.mode = PruneMode::none;
          request.pruning = none;
          scheduler.submit(request, heard.back());
          // Answers beside them.
          others.push_back(std::make_shared<Heard>());
          scheduler.submit(request_of({asked.context, some(3), 12}), others.back());
          scheduler.step();
        }
      }
      while (scheduler.step()) {
      }
      for (std::size_t i = 0; i < heard.size(); ++i) {
        SCOPED_TRACE(i);
        const std::vector<float>& of_tokens = states[i / 2];
        const std::size_t tokens = all[i / 2].context.size();
        EXPECT_EQ(heard[i]->error, "");
        EXPECT_TRUE(heard[i]->tokens.empty());
        ASSERT_EQ(heard[i]->vector.size(), static_cast<std::size_t>(served_hidden));
        for (std::size_t k = 0; k < served_hidden; ++k) {
          double sum = 0;
          for (std::size_t t = 0; t < tokens; ++t) sum += of_tokens[t * served_hidden + k];
          const double expected = i % 2 == 0 ? of_tokens[(tokens - 1) * served_hidden + k]
                                             : sum / static_cast<double>(tokens);
          EXPECT_NEAR(heard[i]->vector[k], expected, 2e-4) << k;
        }
        const Ending& ending = heard[i]->endings.at(0);
        EXPECT_EQ(ending.prompt_tokens, static_cast<std::int64_t>(tokens));
        EXPECT_EQ(ending.cached_tokens, 0);
        EXPECT_EQ(ending.new_tokens, 0);
        EXPECT_EQ(ending.evict_ratio, 0);
        EXPECT_EQ(others[i]->tokens[0].size(), 12U);
        EXPECT_TRUE(others[i]->vector.empty());
      }
      GenerationRequest wrong = request_of({some(3), {}, 5});
      wrong.pooling = Pooling::last;
      EXPECT_THROW(scheduler.submit(wrong, std::make_shared<Heard>()), Error);
    });
  }
}

TEST_F(SchedulerTest, WhatCanNeverFitFailsAlone) {
  options.pruning.mode = PruneMode::none;
  const Asked small = {some(20), some(3), 5};
  const Answer expected = answer_of(small);
  const auto measured = engine();
  options.kv_limit = measured->bytes_per_token() * 160 + 2 * measured->bytes_per_sequence();
  serve([&](Scheduler& scheduler) {
    const auto large = std::make_shared<Heard>(), other = std::make_shared<Heard>();
    scheduler.submit(request_of({some(300), {}, 5}), large);
    scheduler.submit(request_of(small), other);
    while (scheduler.step()) {
    }
    EXPECT_NE(large->error, "");
    EXPECT_EQ(other->error, "");
    EXPECT_EQ(other->tokens[0], expected.tokens);
    EXPECT_EQ(scheduler.counts().failed, 1);
  });
}

TEST_F(SchedulerTest, PromptsThatBeginAlikeGoOnFromThere) {
  for (const PrefillMode prefill : {PrefillMode::dense, PrefillMode::sparse}) {
    for (const PruneMode prune : {PruneMode::prefill, PruneMode::always}) {
      if (is_crowded() && prune == PruneMode::always) continue;
      options.pruning.prefill = prefill;
      options.pruning.mode = prune;
      const std::vector<TokenId> document = some(100);
      std::vector<Asked> all;
      for (int i = 0; i < 5; ++i) all.push_back({document, some(4 + i), 6});
      const auto expected = answers_of(all);
      expect_answers(all, expected);
      if (comm.is_root()) {
        EXPECT_GE(last.cached_tokens, 100);
      }
      scheduling.keeps_prefixes = false;
      expect_answers(all, expected);
      if (comm.is_root()) {
        EXPECT_EQ(last.cached_tokens, 0);
      }
      scheduling.keeps_prefixes = true;
    }
  }
}

TEST_F(SchedulerTest, KeptStatesAreFreedBeyondTheirMemory) {
  std::vector<Asked> all;
  for (int i = 0; i < 6; ++i) all.push_back({some(60), some(4), 6});
  const auto expected = answers_of(all);
  scheduling.max_prefix_bytes = 1;
  expect_answers(all, expected);
  if (comm.is_root()) {
    EXPECT_GE(last.prefixes_evicted, 6);
  }
  scheduling.max_prefix_bytes = std::size_t{1} << 40;
  expect_answers(all, expected);
  if (comm.is_root()) {
    EXPECT_EQ(last.prefixes_evicted, 0);
  }
}

TEST_F(SchedulerTest, ADocumentIsRunOnceForAllWhoAskAboutIt) {
  for (const PrefillMode prefill : {PrefillMode::dense, PrefillMode::sparse}) {
    options.pruning.prefill = prefill;
    options.pruning.mode = PruneMode::prefill;
    const std::vector<TokenId> document = some(100);
    std::vector<Asked> all;
    std::int64_t questions = 0;
    for (int i = 0; i < 5; ++i) {
      all.push_back({document, some(4 + i), 6});
      questions += 4 + i;
    }
    all.push_back({some(30), some(3), 2});  // which does not wait for them
    const auto expected = answers_of(all);
    // The first one goes away in the middle of the document, and another one runs it.
    for (const bool is_cancelled : {false, true}) {
      serve([&](Scheduler& scheduler) {
        std::vector<std::shared_ptr<Heard>> heard;
        std::vector<std::shared_ptr<Scheduler::Ticket>> tickets;
        for (const Asked& asked : all) {
          heard.push_back(std::make_shared<Heard>());
          tickets.push_back(scheduler.submit(request_of(asked), heard.back()));
        }
        scheduler.step();
        if (is_cancelled) tickets.front()->cancel();
        while (scheduler.step()) {
        }
        for (std::size_t i = is_cancelled ? 1 : 0; i < all.size(); ++i) {
          EXPECT_EQ(heard[i]->tokens[0], expected[i].tokens);
          EXPECT_DOUBLE_EQ(heard[i]->endings[0].evict_ratio, expected[i].cache.evict_ratio());
        }
        const SchedulerCounts counts = scheduler.counts();
        EXPECT_EQ(counts.cached_tokens, is_cancelled ? 300 : 400);
        if (!is_cancelled) {
          EXPECT_EQ(counts.prompt_tokens, 100 + questions + 33);
        }
      });
    }
  }
}

TEST_F(SchedulerTest, SparsePrefillSharesTheBeginningOfAContext) {
  options.pruning.prefill = PrefillMode::sparse;
  options.pruning.mode = PruneMode::prefill;
  options.pruning.chunk = 1024;
  std::vector<TokenId> begin = some(4200);
  const Asked first = {begin, some(3), 2};
  Asked second = {begin, some(3), 2};
  for (std::size_t i = 4150; i < begin.size(); ++i) second.context[i] = 5;
  const std::vector<Answer> expected = answers_of({first, second});
  serve([&](Scheduler& scheduler) {
    for (const int i : {0, 1}) {
      const auto heard = std::make_shared<Heard>();
      scheduler.submit(request_of(i == 0 ? first : second), heard);
      while (scheduler.step()) {
      }
      EXPECT_EQ(heard->tokens[0], expected[i].tokens);
      EXPECT_DOUBLE_EQ(heard->endings[0].evict_ratio, expected[i].cache.evict_ratio());
      EXPECT_EQ(heard->endings[0].cached_tokens, i == 0 ? 0 : 4096);
    }
  });
}

TEST_F(SchedulerTest, BeginningsWithinAContextAreCutFromWholeStates) {
  for (const PruneMode prune : {PruneMode::none, PruneMode::prefill, PruneMode::always}) {
    SCOPED_TRACE(name_of(prune));
    options.pruning.mode = prune;
    const std::vector<TokenId> document = some(150);
    std::vector<Asked> all;
    std::int64_t after = 0;  // tokens after the document
    for (int i = 0; i < 3; ++i) {
      all.push_back({document, some(3), 5});
      std::vector<TokenId> question = some(1 + 12 * i);
      question.front() = i;  // unlike the others
      all.back().context.insert(all.back().context.end(), question.begin(), question.end());
      after += static_cast<std::int64_t>(question.size()) + 3;
    }
    const auto expected = answers_of(all);
    const auto expect_answer = [&](Heard& heard, std::size_t i, std::int64_t cached) {
      EXPECT_EQ(heard.error, "");
      EXPECT_EQ(heard.tokens[0], expected[i].tokens);
      EXPECT_DOUBLE_EQ(heard.endings[0].evict_ratio, expected[i].cache.evict_ratio());
      EXPECT_EQ(heard.endings[0].cached_tokens, cached);
    };
    for (const bool branches : {true, false}) {
      const auto ask = [&](Scheduler& scheduler, std::size_t i) {
        const auto heard = std::make_shared<Heard>();
        GenerationRequest request = request_of(all[i]);
        request.prompt.front().branches = branches;
        scheduler.submit(request, heard);
        return heard;
      };
      const std::int64_t shared = branches || prune == PruneMode::none ? 150 : 0;
      serve([&](Scheduler& scheduler) {  // one after the other
        for (std::size_t i = 0; i < all.size(); ++i) {
          const auto heard = ask(scheduler, i);
          while (scheduler.step()) {
          }
          expect_answer(*heard, i, i == 0 ? 0 : shared);
        }
      });
      serve([&](Scheduler& scheduler) {  // all at once: the first one runs the document
        std::vector<std::shared_ptr<Heard>> heard;
        for (std::size_t i = 0; i < all.size(); ++i) heard.push_back(ask(scheduler, i));
        while (scheduler.step()) {
        }
        for (std::size_t i = 0; i < all.size(); ++i) {
          expect_answer(*heard[i], i, i == 0 ? 0 : shared);
        }
        const std::int64_t documents = shared > 0 ? 1 : 3;
        EXPECT_EQ(scheduler.counts().prompt_tokens, 150 * documents + after);
      });
    }
  }
}

TEST_F(SchedulerTest, AnswersDoNotDependOnTheStatesThatPromptsAreCutFrom) {
  // Each prompt begins as an earlier one, up to any place.
  std::vector<Asked> all;
  for (int i = 0; i < (is_crowded() ? 3 : 5); ++i) {
    std::vector<TokenId> context = some(200);
    if (i > 0) {
      const std::vector<TokenId>& other = all[random() % all.size()].context;
      const std::size_t common = other.size() - random() % (other.size() - 100);
      context.resize(common + random() % 50);
      std::copy_n(other.begin(), common, context.begin());
    }
    all.push_back({context, some(static_cast<std::int64_t>(random() % 9)), 3});
  }
  for (const PruneMode prune : {PruneMode::none, PruneMode::prefill, PruneMode::always}) {
    SCOPED_TRACE(name_of(prune));
    options.pruning.mode = prune;
    options.kv_limit = 0;
    const auto expected = answers_of(all);
    const auto measured = engine();
    // Without a limit, and with memory for about two prompts.
    const std::size_t little =
        400 * measured->bytes_per_token() + 3 * measured->bytes_per_sequence();
    for (const std::size_t limit : {std::size_t{0}, little}) {
      options.kv_limit = limit;
      serve([&](Scheduler& scheduler) {
        for (int round = 0; round < 2; ++round) {
          std::vector<std::shared_ptr<Heard>> heard;
          for (const Asked& asked : all) {
            heard.push_back(std::make_shared<Heard>());
            GenerationRequest request = request_of(asked);
            request.prompt.front().branches = true;
            scheduler.submit(request, heard.back());
            for (int steps = round * 8; steps > 0; --steps) scheduler.step();
          }
          while (scheduler.step()) {
          }
          for (std::size_t i = 0; i < all.size(); ++i) {
            EXPECT_EQ(heard[i]->error, "");
            EXPECT_EQ(heard[i]->tokens[0], expected[i].tokens) << i;
            EXPECT_DOUBLE_EQ(heard[i]->endings[0].evict_ratio, expected[i].cache.evict_ratio());
          }
        }
        if (limit == 0) {
          EXPECT_GT(scheduler.counts().cached_tokens, is_crowded() ? 100 : 500);
        } else {
          EXPECT_GT(scheduler.counts().prefixes_evicted, 0);
        }
      });
    }
  }
}

TEST_F(SchedulerTest, WithoutMemoryForASpareStateAContextIsJudgedInPlace) {
  options.pruning.mode = PruneMode::prefill;
  Asked first = {some(200), some(3), 4}, second = first;
  second.context.resize(180);
  const std::vector<Answer> expected = answers_of({first, second});
  const auto measured = engine();
  for (const bool has_memory : {true, false}) {
    // Room for the rows of one context and a few more.
    const std::size_t tokens = has_memory ? 500 : 210;
    options.kv_limit = tokens * measured->bytes_per_token() + 3 * measured->bytes_per_sequence();
    serve([&](Scheduler& scheduler) {
      for (const int i : {0, 1}) {
        const auto heard = std::make_shared<Heard>();
        GenerationRequest request = request_of(i == 0 ? first : second);
        request.prompt.front().branches = true;
        scheduler.submit(request, heard);
        while (scheduler.step()) {
        }
        EXPECT_EQ(heard->error, "");
        EXPECT_EQ(heard->tokens[0], expected[i].tokens);
        EXPECT_EQ(heard->endings[0].cached_tokens, i == 1 && has_memory ? 179 : 0);
        if (i == 0) {
          EXPECT_EQ(scheduler.counts().prefixes_evicted, 0);
          EXPECT_EQ(scheduler.counts().preempted, 0);
        }
      }
    });
  }
}

TEST_F(SchedulerTest, ContextsShareWhatTheyAreExpectedToBeginWith) {
  for (const PruneMode prune : {PruneMode::prefill, PruneMode::always}) {
    options.pruning.mode = prune;
    const std::vector<TokenId> system = some(40);
    std::vector<Asked> all;
    for (int i = 0; i < 4; ++i) {
      all.push_back({system, some(3), 7});
      const std::vector<TokenId> user = some(20 + 9 * i);
      all.back().context.insert(all.back().context.end(), user.begin(), user.end());
    }
    const auto expected = answers_of(all);
    serve([&](Scheduler& scheduler) {
      for (std::size_t i = 0; i < all.size(); ++i) {
        const auto heard = std::make_shared<Heard>();
        GenerationRequest request = request_of(all[i]);
        request.prompt.front().cuts = {40};
        scheduler.submit(request, heard);
        while (scheduler.step()) {
        }
        EXPECT_EQ(heard->tokens[0], expected[i].tokens);
        EXPECT_DOUBLE_EQ(heard->endings[0].evict_ratio, expected[i].cache.evict_ratio());
        EXPECT_EQ(heard->endings[0].cached_tokens, i == 0 ? 0 : 40);
      }
    });
  }
}

TEST_F(SchedulerTest, AConversationGoesOnFromItsOwnCache) {
  for (const PruneMode prune : {PruneMode::none, PruneMode::prefill, PruneMode::always}) {
    options.pruning.mode = prune;
    const std::vector<TokenId> context = some(60), question = some(5), between = some(2),
                               more = some(7);
    // The same by a generator: what is said between messages is a question's.
    Generator generator(engine());
    generator.prefill(context, false);
    AnswerOptions wanted;
    wanted.max_new_tokens = 12;
    const Answer one = generator.answer(question, wanted);
    generator.keep_answer(between);
    const Answer two = generator.answer(more, wanted);
    serve([&](Scheduler& scheduler) {
      const auto first = std::make_shared<Heard>(), second = std::make_shared<Heard>();
      GenerationRequest request = request_of({context, question, 12});
      scheduler.submit(request, first);
      while (scheduler.step()) {
      }
      ASSERT_EQ(first->tokens[0], one.tokens);
      std::vector<TokenId> said = first->tokens[0];
      std::vector<TokenId> last_and_between = {said.back()};
      said.pop_back();
      last_and_between.insert(last_and_between.end(), between.begin(), between.end());
      request.prompt.push_back({Segment::Kind::generated, said, {}});
      request.prompt.push_back({Segment::Kind::question, last_and_between, {}});
      request.prompt.push_back({Segment::Kind::question, more, {}});
      scheduler.submit(request, second);
      while (scheduler.step()) {
      }
      EXPECT_EQ(second->tokens[0], two.tokens);
      EXPECT_EQ(second->endings[0].cached_tokens,
                static_cast<std::int64_t>(context.size() + question.size() + said.size()));
      EXPECT_DOUBLE_EQ(second->endings[0].evict_ratio, two.cache.evict_ratio());
    });
  }
}

TEST_F(SchedulerTest, ChoicesDrawWithSeedsOfTheirOwn) {
  options.pruning.mode = PruneMode::prefill;
  const Asked asked = {some(50), some(4), 15};
  SamplingOptions sampling;
  sampling.temperature = 0.8;
  sampling.top_p = 0.9;
  sampling.repetition_penalty = 1.1;
  std::vector<std::vector<TokenId>> expected;
  for (std::uint64_t seed = 7; seed < 10; ++seed) {
    sampling.seed = seed;
    expected.push_back(answer_of(asked, sampling).tokens);
  }
  sampling.seed = 7;
  for (const std::int64_t rows : {24, 2, 23}) {
    scheduling.max_batch_tokens = rows;
    scheduling.lookup = rows == 23 ? 12 : 0;
    serve([&](Scheduler& scheduler) {
      const auto heard = std::make_shared<Heard>();
      GenerationRequest request = request_of(asked);
      request.sampling = sampling;
      request.choices = 3;
      request.top_logprobs = 2;
      scheduler.submit(request, heard);
      while (scheduler.step()) {
      }
      for (int choice = 0; choice < 3; ++choice) {
        EXPECT_EQ(heard->tokens[choice], expected[choice]) << choice;
        EXPECT_EQ(heard->logprobs[choice].size(), 15U);
        for (const float logprob : heard->logprobs[choice]) EXPECT_LE(logprob, 0);
      }
    });
  }
}

TEST_F(SchedulerTest, DrawsDoNotDependOnOtherRequests) {
  options.pruning.mode = PruneMode::prefill;
  const Asked asked = {some(50), some(4), 15};
  std::vector<SamplingOptions> samplings(5);
  for (std::size_t i = 1; i < samplings.size(); ++i) {
    samplings[i].temperature = 0.6 + 0.2 * static_cast<double>(i);
    samplings[i].seed = i;
  }
  samplings[1].top_p = 0.9;
  samplings[2].top_k = 12;
  samplings[3].min_p = 0.02;
  samplings[4].presence_penalty = 0.5;
  std::vector<std::vector<TokenId>> expected;
  for (const SamplingOptions& sampling : samplings) {
    expected.push_back(answer_of(asked, sampling).tokens);
  }
  SamplingOptions of_choice = samplings[3];
  ++of_choice.seed;
  const std::vector<TokenId> other = answer_of(asked, of_choice).tokens;
  for (const std::int64_t rows : {80, 5}) {
    scheduling.max_batch_tokens = rows;
    scheduling.lookup = rows == 80 ? 12 : 0;
    serve([&](Scheduler& scheduler) {
      std::vector<std::shared_ptr<Heard>> heard;
      for (std::size_t i = 0; i < samplings.size(); ++i) {
        GenerationRequest request = request_of(asked);
        request.sampling = samplings[i];
        request.choices = i == 3 ? 2 : 1;
        if (i == 2) request.top_logprobs = 1;
        heard.push_back(std::make_shared<Heard>());
        scheduler.submit(request, heard.back());
      }
      while (scheduler.step()) {
      }
      for (std::size_t i = 0; i < samplings.size(); ++i) {
        EXPECT_EQ(heard[i]->error, "");
        EXPECT_EQ(heard[i]->tokens[0], expected[i]) << i;
      }
      EXPECT_EQ(heard[3]->tokens[1], other);
    });
  }
}

TEST_F(SchedulerTest, RequestsMayHaveSettingsOfTheirOwn) {
  options.pruning.mode = PruneMode::prefill;
  const Asked asked = {some(80), some(4), 8};
  std::map<float, Answer> expected;
  for (const float threshold : {-0.4F, 0.1F, 0.6F}) {
    options.pruning.amount.threshold = threshold;
    expected[threshold] = answer_of(asked);
  }
  options.pruning.amount.threshold = 0.1F;
  serve([&](Scheduler& scheduler) {
    for (const auto& [threshold, answer] : expected) {
      const auto heard = std::make_shared<Heard>();
      GenerationRequest request = request_of(asked);
      request.pruning = options.pruning;
      request.pruning->threshold(threshold);
      scheduler.submit(request, heard);
      while (scheduler.step()) {
      }
      EXPECT_EQ(heard->error, "");
      EXPECT_EQ(heard->tokens[0], answer.tokens);
      EXPECT_DOUBLE_EQ(heard->endings[0].evict_ratio, answer.cache.evict_ratio());
      EXPECT_EQ(heard->endings[0].cached_tokens, 0);
    }
  });
}

TEST_F(SchedulerTest, RequestsMayHavePoliciesOfTheirOwn) {
  options.pruning.mode = PruneMode::prefill;
  const ModelConfig config = served_config();
  const PolicySetup setup{config, partition, DType::f32, "", comm};
  RepeatPrompt repeat;
  repeat.first = {5, 6, 7};
  repeat.later = {5, 6, 8};
  repeat.suffix = {9};
  struct Case {
    PruneWish wish;
    std::vector<Asked> asked;
    std::vector<Answer> expected;
  };
  std::vector<Case> cases;
  const auto add = [&](const std::string& policy, std::optional<double> ratio,
                       std::optional<std::int64_t> rows = {}) {
    Case one;
    if (!policy.empty()) one.wish.policy = policy;
    one.wish.evict_ratio = ratio;
    one.wish.keep_tokens = rows;
    one.asked = {{some(70), some(4), 5}, {some(33), some(2), 4}};
    cases.push_back(one);
  };
  add("", {});
  add("snapkv:window=4,kernel=3", 0.5);
  add("keydiff+ada", {}, 20);
  add("knorm+rerotate", 0.3);
  add("h2o", 0.5);           // in parts, by the sums of earlier ones
  add("h2o+critical", 0.5);  // as a whole
  add("kvzip", 0.4);
  add("simlayerkv:recent=12,initial=2", {});
  add("none", {});
  const CacheOptions server = options;
  const auto served = engine();
  const RequestPolicies policies(*served, setup, repeat);
  const auto pruning_of = [&](const PruneWish& wish) {
    return wish.policy ? policies.pruning_of(wish) : server.pruning;
  };
  for (Case& one : cases) {
    const LoadedPruning own = policies.load(pruning_of(one.wish));
    static_cast<LoadedPruning&>(options) = own;
    one.expected = answers_of(one.asked);
    options = server;
  }
  Executor executor(*served, [&](const Pruning& pruning) { return policies.load(pruning); });
  if (!comm.is_root()) return executor.follow();
  Scheduler scheduler(executor, scheduling);
  for (int round = 0; round < 2; ++round) {  // with and without states of the first
    std::vector<std::shared_ptr<Heard>> heard;
    for (const Case& one : cases) {
      for (const Asked& asked : one.asked) {
        heard.push_back(std::make_shared<Heard>());
        GenerationRequest request = request_of(asked);
        request.pruning = pruning_of(one.wish);
        scheduler.submit(request, heard.back());
      }
    }
    while (scheduler.step()) {
    }
    for (std::size_t i = 0; i < heard.size(); ++i) {
      const Answer& expected = cases[i / 2].expected[i % 2];
      SCOPED_TRACE(cases[i / 2].wish.policy.value_or("the server's"));
      EXPECT_EQ(heard[i]->error, "");
      EXPECT_EQ(heard[i]->tokens[0], expected.tokens);
      EXPECT_DOUBLE_EQ(heard[i]->endings[0].evict_ratio, expected.cache.evict_ratio());
    }
  }
  // The model repeats one context; a second one is an error of this request alone.
  const auto two = std::make_shared<Heard>(), other = std::make_shared<Heard>();
  GenerationRequest request = request_of(cases[0].asked[0]);
  scheduler.submit(request, other);
  request.prompt.push_back({Segment::Kind::context, some(5), {}});
  PruneWish wish;
  wish.policy = "kvzip";
  wish.evict_ratio = 0.5;
  request.pruning = policies.pruning_of(wish);
  scheduler.submit(request, two);
  while (scheduler.step()) {
  }
  EXPECT_NE(two->error.find("takes one context, but the prompt has 2"), std::string::npos)
      << two->error;
  EXPECT_EQ(other->tokens[0], cases[0].expected[0].tokens);
  scheduler.drain();
  scheduler.run();
  EXPECT_EQ(executor.size(), 0);
}

/// Scores that fail.
struct Broken final : Policy {
  void score(PolicyLayer&, const ScoreView&) override { throw AgreedError("broken scores"); }
};

// A policy's error ends its own request. Others that shared the step run again.
TEST_F(SchedulerTest, APolicyFailsAlone) {
  const std::vector<Asked> all = {
      {some(70), some(4), 30}, {some(9), some(3), 6}, {some(8), some(2), 12}};
  options.pruning = Pruning::parse("none", options.pruning);
  const std::vector<Answer> expected = answers_of(all);
  const auto served = engine();
  const PolicySetup setup{served->config(), partition, DType::f32, "", comm};
  const RequestPolicies policies(*served, setup, {});
  Executor executor(*served, [&](const Pruning& pruning) {
    LoadedPruning loaded = policies.load(pruning);
    if (!loaded.policy) return loaded;
    auto broken = std::make_shared<PolicyChoice>(*loaded.policy);
    broken->make = [] { return std::make_unique<Broken>(); };
    loaded.policy = broken;
    return loaded;
  });
  if (!comm.is_root()) return executor.follow();
  Scheduler scheduler(executor, scheduling);
  PruneWish wish;
  wish.policy = "knorm";
  wish.evict_ratio = 0.5;
  std::vector<std::shared_ptr<Heard>> heard, failed;
  const auto submit = [&](const Asked& asked, bool fails) {
    auto& list = fails ? failed : heard;
    list.push_back(std::make_shared<Heard>());
    GenerationRequest request = request_of(asked);
    if (fails) request.pruning = policies.pruning_of(wish);
    scheduler.submit(request, list.back());
  };
  submit(all[0], false);
  for (int step = 0; step < 6; ++step) scheduler.step();
  EXPECT_GT(heard[0]->tokens[0].size(), 0U);  // it decodes
  for (const bool fails : {true, false, true}) submit(all[1], fails);
  submit(all[2], false);
  while (scheduler.step()) {
  }
  EXPECT_GT(scheduler.counts().preempted, 0);
  for (const auto& one : failed) EXPECT_NE(one->error.find("broken scores"), std::string::npos);
  for (std::size_t i = 0; i < heard.size(); ++i) {
    EXPECT_EQ(heard[i]->error, "") << i;
    EXPECT_EQ(heard[i]->tokens[0], expected[i].tokens) << i;
  }
  scheduler.drain();
  scheduler.run();
  EXPECT_EQ(executor.size(), 0);
}

// Answers of earlier turns lose rows when the next message is judged, as messages do.
TEST_F(SchedulerTest, ALaterContextJudgesAnswersToo) {
  const test::SharedFolder folder;
  const auto file = folder / "gates.safetensors";
  comm.agree_on_root([&] {
    test::write_safetensors(
        file, test::retention_gates(false, served_layers, served_heads, served_hidden));
  });
  const ModelConfig config = served_config();
  Budget budget;
  budget.amount = Budget::Amount::evict_ratio;
  budget.evict_ratio = options.pruning.amount.evict_ratio.emplace(0.5);
  options.pruning.amount.threshold.reset();
  options.pruning.mode = PruneMode::prefill;
  options.pruning.policy = "trim-kv:gates=" + file.string();
  options.policy = std::make_shared<PolicyChoice>(
      make_policy(parse_policy(options.pruning.policy), budget, std::nullopt,
                  {config, partition, DType::f32, {}, comm}));
  const auto served = engine();
  Executor executor(*served);
  if (!comm.is_root()) return executor.follow();
  scheduling.max_kept_tokens = 1000;
  Scheduler scheduler(executor, scheduling);
  GenerationRequest request = request_of({some(60), some(5), 4});
  request.prompt.push_back({Segment::Kind::generated, some(40), {}});
  request.prompt.push_back({Segment::Kind::question, some(3), {}});
  request.prompt.push_back({Segment::Kind::context, some(20), {}});
  request.prompt.push_back({Segment::Kind::question, some(3), {}});
  request.returns_kept = true;
  const auto heard = std::make_shared<Heard>();
  scheduler.submit(request, heard);
  while (scheduler.step()) {
  }
  EXPECT_EQ(heard->error, "");
  const auto kept = heard->endings[0].kept;
  ASSERT_NE(kept, nullptr);
  const auto rows_of = [&](std::ptrdiff_t begin, std::ptrdiff_t end) {
    return std::accumulate(kept->rows.begin() + begin, kept->rows.begin() + end, std::int64_t{0});
  };
  EXPECT_EQ(rows_of(0, 128), 64 * kept->full);
  EXPECT_LT(rows_of(65, 105), 40 * kept->full);
  EXPECT_EQ(rows_of(128, 131), 3 * kept->full);
  scheduler.drain();
  scheduler.run();
}

TEST_F(SchedulerTest, TypesOfRowsShareOneLimit) {
  const std::vector<PageFormat> formats = {
      {}, {RowType::q8, RowType::q8}, {RowType::q8, RowType::q4}};
  const std::vector<TokenId> document = some(60);
  std::vector<Asked> all = some_asked(9);
  for (int i = 0; i < 6; ++i) all.push_back({document, some(2 + i), 5});
  const auto format_of = [&](std::size_t i) { return formats[i % formats.size()]; };
  // Later parts of a prompt would see quantised rows, which a generator packs after the whole
  // prompt.
  scheduling.max_batch_tokens = 4096;
  for (const PruneMode prune : {PruneMode::prefill, PruneMode::always}) {
    if (is_crowded() && prune == PruneMode::always) continue;
    options.pruning.mode = prune;
    std::vector<Answer> expected;
    options.kv_limit = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      options.page_format = format_of(i);
      expected.push_back(answer_of(all[i]));
    }
    options.page_format = {};
    const auto measured = engine();
    const std::size_t one = measured->bytes_per_token() * 130 + measured->bytes_per_sequence();
    for (const std::size_t limit : {std::size_t{0}, 3 * one}) {
      SCOPED_TRACE(limit);
      options.kv_limit = limit;
      const auto served = engine();
      Executor executor(*served, {}, {}, [&](const PageFormat& format) {
        CacheOptions of_other = options;
        of_other.page_format = format;
        return Engine::create(model, scorer, of_other, comm);
      });
      if (comm.is_root()) {
        Scheduler scheduler(executor, scheduling);
        std::vector<std::shared_ptr<Heard>> heard;
        for (std::size_t i = 0; i < all.size(); ++i) {
          heard.push_back(std::make_shared<Heard>());
          GenerationRequest request = request_of(all[i]);
          if (i % formats.size() != 0) request.page_format = format_of(i);
          scheduler.submit(request, heard.back());
        }
        while (scheduler.step()) {
          if (limit > 0) {
            ASSERT_LE(executor.engines().allocated_bytes(), limit);
          }
          scheduler.sequences();  // reports come from all engines
        }
        for (std::size_t i = 0; i < all.size(); ++i) {
          SCOPED_TRACE(i);
          EXPECT_EQ(heard[i]->error, "");
          EXPECT_EQ(heard[i]->tokens[0], expected[i].tokens);
          EXPECT_DOUBLE_EQ(heard[i]->endings[0].evict_ratio, expected[i].cache.evict_ratio());
          EXPECT_EQ(heard[i]->endings[0].kv_bytes, expected[i].cache.own_bytes);
        }
        // States of prompts are those of one type each.
        EXPECT_GE(scheduler.counts().cached_tokens, is_crowded() ? 0 : 60);
        scheduler.drain();
        scheduler.run();
      } else {
        executor.follow();
      }
      EXPECT_EQ(executor.size(), 0);
      ASSERT_EQ(executor.engines().all().size(), formats.size());
      for (Engine* const engine : executor.engines().all()) EXPECT_EQ(engine->bytes().live, 0U);
    }
  }
}

TEST_F(SchedulerTest, OneEngineHasOneTypeOfRows) {
  serve([&](Scheduler& scheduler) {
    GenerationRequest request = request_of({some(5), {}, 3});
    request.page_format = PageFormat{RowType::q8, RowType::q8};
    EXPECT_THROW(scheduler.submit(request, std::make_shared<Heard>()), Error);
  });
}

TEST_F(SchedulerTest, RefusesWhatCannotBeAnswered) {
  scheduling.max_queue = 1;  // beside the requests for which there are places
  scheduling.max_sequences = 1;
  scheduling.max_tokens = 30;
  serve([&](Scheduler& scheduler) {
    const auto refused = [&](const GenerationRequest& request) {
      try {
        scheduler.submit(request, std::make_shared<Heard>());
      } catch (const Error& error) {
        return std::string(error.what());
      }
      return std::string("accepted");
    };
    GenerationRequest request = request_of({some(5), {}, 3});
    EXPECT_EQ(refused(request_of({{}, {}, 3})), "the prompt has no tokens");
    EXPECT_NE(refused(request_of({some(31), {}, 3})).find("at most 30"), std::string::npos);
    EXPECT_NE(refused(request_of({{1, 97}, {}, 3})).find("token id 97"), std::string::npos);
    EXPECT_NE(refused(request_of({some(5), {}, -1})).find("-1 new tokens"), std::string::npos);
    request.choices = 0;
    EXPECT_NE(refused(request).find("0 answers"), std::string::npos);
    request.choices = 1;
    request.sampling.temperature = -1;
    EXPECT_NE(refused(request).find("-1"), std::string::npos);
    // A full context ends an answer; a stop text too, and a stop id.
    const auto heard = std::make_shared<Heard>(), cut = std::make_shared<Heard>();
    scheduler.submit(request_of({some(25), {}, 100}), heard);
    cut->stops_after = 2;
    scheduler.submit(request_of({some(5), {}, 9}), cut);
    EXPECT_EQ(refused(request_of({some(5), {}, 3})), "the queue is full with 2 requests");
    // Several requests wait together or not at all.
    const auto all_refused = [&](const std::vector<GenerationRequest>& requests) {
      std::vector<Scheduler::Submission> submissions;
      for (const auto& one : requests) submissions.push_back({one, std::make_shared<Heard>()});
      try {
        scheduler.submit(submissions);
      } catch (const Error& error) {
        return std::string(error.what());
      }
      return std::string("accepted");
    };
    const GenerationRequest good = request_of({some(5), {}, 3});
    EXPECT_EQ(all_refused({good, good}), "the queue has 2 requests and no room for 2 more");
    EXPECT_EQ(all_refused({good, request_of({{}, {}, 3})}), "prompt[1]: the prompt has no tokens");
    while (scheduler.step()) {
    }
    EXPECT_EQ(heard->endings[0].reason, EndReason::context_full);
    EXPECT_EQ(heard->tokens[0].size(), 6U);
    EXPECT_EQ(cut->endings[0].reason, EndReason::cut);
    EXPECT_EQ(cut->tokens[0].size(), 2U);
    GenerationRequest stopped = request_of({some(5), {}, 9});
    stopped.stop_ids.resize(served_words);
    for (int i = 0; i < served_words; ++i) stopped.stop_ids[i] = i;
    const auto at_once = std::make_shared<Heard>();
    scheduler.submit(stopped, at_once);
    while (scheduler.step()) {
    }
    EXPECT_EQ(at_once->endings[0].reason, EndReason::stop_id);
    EXPECT_EQ(at_once->tokens[0].size(), 1U);
  });
}

TEST_F(SchedulerTest, ServesFromOtherThreads) {
  options.pruning.mode = PruneMode::always;
  const std::vector<Asked> all = some_asked(8);
  const auto expected = answers_of(all);
  const auto served = engine();
  Executor executor(*served);
  if (!comm.is_root()) {
    executor.follow();
    return;
  }
  Scheduler scheduler(executor, scheduling);
  std::vector<std::shared_ptr<Heard>> heard;
  for (std::size_t i = 0; i < all.size(); ++i) heard.push_back(std::make_shared<Heard>());
  std::thread client([&] {
    std::vector<std::thread> clients;
    for (std::size_t i = 0; i < all.size(); ++i) {
      clients.emplace_back([&, i] {
        std::this_thread::sleep_for(std::chrono::milliseconds(7 * i));
        scheduler.submit(request_of(all[i]), heard[i]);
        scheduler.submit(request_of(all[i]), std::make_shared<Heard>())->cancel();
        scheduler.sequences();
      });
    }
    for (std::thread& one : clients) one.join();
    scheduler.drain();
  });
  scheduler.run();
  client.join();
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(heard[i]->tokens[0], expected[i].tokens) << i;
  }
  EXPECT_THROW(scheduler.submit(request_of(all[0]), std::make_shared<Heard>()), QueueFull);
  EXPECT_EQ(executor.size(), 0);
}

}  // namespace
}  // namespace kvzap::server
