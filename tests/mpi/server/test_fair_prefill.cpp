// Which prompts a scheduler reads first, step by step.
#include <gtest/gtest.h>

#include <kvzap/engine/generate.hpp>
#include <kvzap/server/scheduler.hpp>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace kvzap::server {
namespace {

constexpr int fair_words = 61;

ModelConfig fair_config() {
  ModelConfig config{};
  config.architecture = "LlamaForCausalLM";
  config.hidden_size = 32;
  config.intermediate_size = 32;
  config.num_hidden_layers = 1;
  config.num_attention_heads = 4;
  config.num_key_value_heads = 4;
  config.head_dim = 8;
  config.vocab_size = fair_words;
  config.max_position_embeddings = 4096;
  config.rms_norm_eps = 1e-6;
  config.rope_theta = 10000;
  return config;
}

/// What the listener of one request has heard.
struct Answered final : Listener {
  std::vector<TokenId> tokens;
  std::string error;
  bool has_ended = false;

  bool on_token(int, TokenId token, const TokenLogprobs*) override {
    tokens.push_back(token);
    return true;
  }
  void on_end(int, const Ending&) override { has_ended = true; }
  void on_error(const RequestError& of) override { error = of.what; }
};

class FairPrefill : public ::testing::Test {
 protected:
  FairPrefill()
      : comm(Communicator::world()),
        model(std::make_shared<const Model>(Model::load("", fair_config(), DType::f32,
                                                        HeadPartition::even(1, 4, comm.size()),
                                                        comm.rank(), {5}))) {
    options.pruning.mode = PruneMode::none;
    options.pruning.window = 8;
    options.page_rows = 4;
    scheduling.max_batch_tokens = 64;  // prompts of 8 tokens are short
  }

  std::unique_ptr<Engine> engine() const { return Engine::create(model, nullptr, options, comm); }

  /// work(scheduler) on rank 0, while the others follow.
  template <class Work>
  void serve(const Work& work) {
    const auto served = engine();
    Executor executor(*served, {}, [&](const Pruning&) {
      return Executor::Traits{holds, holds, {}};
    });
    if (comm.is_root()) {
      Scheduler scheduler(executor, scheduling);
      work(scheduler);
      while (scheduler.step()) {
      }
      scheduler.drain();
      scheduler.run();
    } else {
      executor.follow();
    }
    EXPECT_EQ(executor.size(), 0);
  }

  std::vector<TokenId> some(std::int64_t count) {
    std::vector<TokenId> tokens(static_cast<std::size_t>(count));
    for (TokenId& token : tokens) token = static_cast<TokenId>(random() % fair_words);
    return tokens;
  }
  std::shared_ptr<Answered> submit(Scheduler& scheduler, const std::vector<TokenId>& prompt,
                                   std::int64_t new_tokens, const std::string& client = "") {
    GenerationRequest request;
    request.prompt = {{Segment::Kind::context, prompt, {}}};
    request.max_new_tokens = new_tokens;
    request.client = client;
    auto heard = std::make_shared<Answered>();
    scheduler.submit(std::move(request), heard);
    return heard;
  }
  std::vector<std::shared_ptr<Answered>> submit_long(Scheduler& scheduler, int count,
                                                     std::int64_t new_tokens = 2,
                                                     const std::string& client = "") {
    std::vector<std::shared_ptr<Answered>> heard;
    for (int i = 0; i < count; ++i) {
      heard.push_back(submit(scheduler, some(400), new_tokens, client));
    }
    return heard;
  }
  static int steps_until(Scheduler& scheduler, const bool& is_true, int most) {
    int steps = 0;
    for (; !is_true && steps < most; ++steps) scheduler.step();
    return steps;
  }
  std::vector<TokenId> answer_of(const std::vector<TokenId>& prompt, std::int64_t count) const {
    Generator generator(engine());
    generator.prefill(prompt, false);
    AnswerOptions wanted;
    wanted.max_new_tokens = count;
    return generator.answer({}, wanted).tokens;
  }

  Communicator comm;
  std::shared_ptr<const Model> model;
  CacheOptions options;
  SchedulerOptions scheduling;
  bool holds = true;
  std::mt19937 random{3};
};

TEST_F(FairPrefill, AShortPromptIsInTheNextStepWhichEndsSoon) {
  for (const bool is_other_client : {false, true}) {
    serve([&](Scheduler& scheduler) {
      submit_long(scheduler, comm.size() > 1 ? 10 : 50, 2, "one");
      for (int steps = 0; steps < 5; ++steps) scheduler.step();
      for (int times = 0; times < 3; ++times) {
        const auto heard = submit(scheduler, some(8), 1, is_other_client ? "two" : "one");
        const std::int64_t before = scheduler.counts().prompt_tokens;
        scheduler.step();
        EXPECT_TRUE(heard->has_ended);
        EXPECT_LE(scheduler.counts().prompt_tokens - before, 16);
        // The long ones have whole steps in between.
        const std::int64_t after = scheduler.counts().prompt_tokens;
        scheduler.step();
        EXPECT_GE(scheduler.counts().prompt_tokens - after, 60);
      }
    });
  }
}

TEST_F(FairPrefill, ManyShortPromptsLeaveHalfOfTheStep) {
  serve([&](Scheduler& scheduler) {
    submit_long(scheduler, 3);
    scheduler.step();
    std::vector<std::shared_ptr<Answered>> heard;
    for (int i = 0; i < 6; ++i) heard.push_back(submit(scheduler, some(8), 1));
    scheduler.step();
    int done = 0;
    for (const auto& one : heard) done += one->has_ended ? 1 : 0;
    EXPECT_EQ(done, 4);
    EXPECT_EQ(scheduler.counts().prompt_tokens, 64 + 32 + 32);
  });
}

TEST_F(FairPrefill, ALongPromptDoesNotStarve) {
  // Shorter prompts and short ones fill all steps, but each fourth one has rows of the oldest.
  for (const std::int64_t other : {40, 8}) {
    serve([&](Scheduler& scheduler) {
      const auto heard = submit(scheduler, some(400), 1);
      const auto crowd = [&] {
        for (int i = 0; i < 2; ++i) submit(scheduler, some(other), 1);
      };
      int steps = 0;
      for (; !heard->has_ended && steps < 200; ++steps) {
        crowd();
        scheduler.step();
      }
      EXPECT_TRUE(heard->has_ended);
      EXPECT_LE(steps, other == 40 ? 4 * 7 + 1 : 400 / 8);
    });
  }
}

TEST_F(FairPrefill, ClientsGetEqualShares) {
  serve([&](Scheduler& scheduler) {
    const auto many = submit_long(scheduler, 20, 1, "many");
    for (int steps = 0; steps < 3; ++steps) scheduler.step();
    const auto one = submit(scheduler, some(400), 1, "one");
    // Alone it takes 7 steps; the other client has every other one, and the oldest prompt some.
    EXPECT_LE(steps_until(scheduler, one->has_ended, 100), 16);
    int done = 0;
    for (const auto& other : many) done += other->has_ended ? 1 : 0;
    EXPECT_LE(done, 3);
    EXPECT_GE(done, 1);
  });
}

TEST_F(FairPrefill, AShortPromptTakesThePlaceOfALongOneThatIsBeingRead) {
  const std::vector<TokenId> brief = some(7), other = some(300);
  const std::vector<TokenId> expected = answer_of(brief, 3), of_other = answer_of(other, 5);
  for (const std::int64_t places : {1, 2}) {
    scheduling.max_sequences = places;
    serve([&](Scheduler& scheduler) {
      std::vector<std::shared_ptr<Answered>> all;
      for (int i = 0; i < 3; ++i) all.push_back(submit(scheduler, other, 5));
      for (int steps = 0; steps < 2; ++steps) scheduler.step();
      const auto heard = submit(scheduler, brief, 3);
      scheduler.step();
      EXPECT_EQ(heard->tokens.size(), 1U);
      while (scheduler.step()) {
      }
      EXPECT_EQ(heard->tokens, expected);
      for (const auto& one : all) EXPECT_EQ(one->tokens, of_other);
      // The place changed hands without loss.
      EXPECT_EQ(scheduler.counts().preempted, 0);
    });
  }
}

TEST_F(FairPrefill, ShortPromptsDoNotKeepTheOnlyPlace) {
  scheduling.max_sequences = 1;
  serve([&](Scheduler& scheduler) {
    const auto heard = submit(scheduler, some(200), 1);
    int steps = 0;
    for (; !heard->has_ended && steps < 1000; ++steps) {
      submit(scheduler, some(6), 2);
      scheduler.step();
    }
    EXPECT_TRUE(heard->has_ended) << steps;
  });
}

TEST_F(FairPrefill, APromptThatWaitsForMemoryIsNotOvertakenForEver) {
  const auto measured = engine();
  options.kv_limit = measured->bytes_per_token() * 460 + 6 * measured->bytes_per_sequence();
  scheduling.keeps_prefixes = false;
  serve([&](Scheduler& scheduler) {
    for (int i = 0; i < 2; ++i) submit(scheduler, some(60), 40);
    scheduler.step();
    const auto heard = submit(scheduler, some(400), 1);
    int steps = 0;
    for (; !heard->has_ended && steps < 1000; ++steps) {
      if (steps % 10 == 0) submit(scheduler, some(30), 40);
      scheduler.step();
    }
    EXPECT_TRUE(heard->has_ended);
    EXPECT_EQ(heard->error, "");
  });
}

TEST_F(FairPrefill, AShortPromptDoesNotWaitForMemoryThatLongOnesTakeLater) {
  const auto measured = engine();
  options.kv_limit = measured->bytes_per_token() * 960 + 4 * measured->bytes_per_sequence();
  serve([&](Scheduler& scheduler) {
    const auto all = submit_long(scheduler, 3);
    for (int steps = 0; steps < 2; ++steps) scheduler.step();
    const auto heard = submit(scheduler, some(8), 2);
    scheduler.step();
    EXPECT_EQ(heard->tokens.size(), 1U);
    while (scheduler.step()) {
    }
    for (const auto& one : all) EXPECT_TRUE(one->has_ended) << one->error;
  });
}

TEST_F(FairPrefill, PromptsThatRunInOneStepLetShortOnesPass) {
  holds = false;
  options.pruning.mode = PruneMode::none;
  serve([&](Scheduler& scheduler) {
    const auto all = submit_long(scheduler, 8, 1);
    scheduler.step();
    for (int times = 0; times < 3; ++times) {
      const auto heard = submit(scheduler, some(8), 1);
      scheduler.step();
      EXPECT_TRUE(heard->has_ended);
    }
    // All steps have short ones, and yet the oldest of the others is read.
    int steps = 0;
    for (; !all.back()->has_ended && steps < 100; ++steps) {
      submit(scheduler, some(8), 1);
      scheduler.step();
    }
    EXPECT_LE(steps, 4 * 8);
  });
}

TEST_F(FairPrefill, FreePlacesCountBeforeARequestIsRefused) {
  scheduling.max_sequences = 2;
  scheduling.max_queue = 2;
  serve([&](Scheduler& scheduler) {
    const auto is_refused = [&](const std::string& client) {
      try {
        submit(scheduler, some(20), 4, client);
      } catch (const QueueFull&) {
        return true;
      }
      return false;
    };
    for (int i = 0; i < 4; ++i) EXPECT_FALSE(is_refused("one")) << i;
    EXPECT_TRUE(is_refused("one"));
    // A client without a request in the queue finds room for one.
    EXPECT_FALSE(is_refused("two"));
    EXPECT_TRUE(is_refused("two"));
    EXPECT_TRUE(is_refused("three"));
    scheduler.step();  // two begin
    EXPECT_EQ(scheduler.counts().running, 2);
    EXPECT_TRUE(is_refused("one"));
    while (scheduler.step()) {
    }
    EXPECT_EQ(scheduler.counts().finished, 5);
    EXPECT_EQ(scheduler.counts().refused, 4);
    EXPECT_FALSE(is_refused("one"));
  });
}

}  // namespace
}  // namespace kvzap::server
