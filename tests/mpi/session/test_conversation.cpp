// Conversations that are stopped, written and resumed say what undisturbed ones say.
#include "session/conversation.hpp"

#include <gtest/gtest.h>

#include <kvzap/engine/synthetic.hpp>
#include <memory>
#include <string>
#include <vector>

#include "mpi/ranks.hpp"
#include "session/recorded.hpp"

namespace kvzap::session {
namespace {

using test::SharedFolder;

class Conversations : public testing::TestWithParam<PruneMoment> {
 protected:
  static constexpr int layers = 2, heads = 4;
  static constexpr std::int64_t words = 89;

  std::unique_ptr<Generator> generator() const {
    ModelConfig config{};
    config.architecture = "LlamaForCausalLM";
    config.hidden_size = 32;
    config.intermediate_size = 40;
    config.num_hidden_layers = layers;
    config.num_attention_heads = 2 * heads;
    config.num_key_value_heads = heads;
    config.head_dim = 8;
    config.vocab_size = words;
    config.max_position_embeddings = 512;
    config.rms_norm_eps = 1e-6;
    config.rope_theta = 10000;
    const auto partition = HeadPartition::even(layers, heads, comm.size());
    Budget budget;
    budget.amount = Budget::Amount::evict_ratio;
    budget.evict_ratio = 0.5;
    CacheOptions options;
    options.balance = 0;
    options.pruning.mode = PruneMode::prefill;
    options.pruning.moment = GetParam();
    options.pruning.window = 8;
    options.policy = std::make_shared<PolicyChoice>(make_policy(
        parse_policy("knorm"), budget, {}, PolicySetup{config, partition, DType::f32, {}, comm}));
    auto model = std::make_shared<const Model>(
        Model::load("", config, DType::f32, partition, comm.rank(), {3}));
    return Generator::create(model, nullptr, options, comm);
  }

  static ConversationState begin() {
    ConversationState state;
    for (std::size_t i = 0; i < asked.size(); ++i) {
      state.texts.push_back("question " + std::to_string(i));
      state.questions.push_back(asked[i]);
    }
    state.policy = "knorm";
    return state;
  }

  /// Without what depends on the process: the peak since its beginning.
  static std::string text_of(ConversationState state) {
    for (AnsweredQuestion& answered : state.answers) answered.answer.cache.peak_allocated_bytes = 0;
    if (state.context) state.context->peak_allocated_bytes = 0;
    state.generation.reset();  // of `describe`
    return to_json_text(state);
  }

  static AnswerOptions drawn() {
    AnswerOptions options;
    options.max_new_tokens = 6;
    options.sampling.temperature = 1;
    options.sampling.seed = 7;
    return options;
  }

  void read(Conversation& conversation) const {
    Generator& run = conversation.generator();
    run.prefill(context, true);
    if (GetParam() == PruneMoment::context) conversation.note_context(run.report());
  }

  void write(const Conversation& conversation, const std::filesystem::path& file) const {
    SnapshotInfo info;
    if (comm.is_root()) info = conversation.info();
    conversation.generator().write_snapshot(file, info, {});
  }

  const Communicator comm = Communicator::world();
  const SharedFolder folder;
  const std::vector<TokenId> context = [] {
    std::vector<TokenId> ids(60);
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<TokenId>(i * 37 % words);
    return ids;
  }();
  static inline const std::vector<std::vector<TokenId>> asked = {{4, 8, 15}, {16}, {23, 42}};
};

TEST_P(Conversations, GoOnFromEveryStop) {
  const auto undisturbed = generator();
  Conversation whole(*undisturbed, {}, begin());
  read(whole);
  while (whole.has_open_question()) ASSERT_EQ(whole.answer(drawn(), {}), 0);
  const std::string wanted = text_of(whole.state());
  for (int stop = 1; stop < 18; stop += 4) {
    SCOPED_TRACE(stop);
    const auto first = generator();
    Conversation stopped(*first, {}, begin());
    SnapshotInfo info;
    info.model = "random";
    info.options = "{}";
    if (comm.is_root()) stopped.describe(info, "knorm", {}, Pruning::none());
    read(stopped);
    int tokens = 0;
    AnswerOptions options = drawn();
    options.on_token = [&](TokenId) {
      if (++tokens != stop) return;
      write(stopped, folder / "stopped.h5");
      throw Stopped{15};
    };
    int reason = 0;
    while (reason == 0) reason = stopped.answer(options, {});
    EXPECT_EQ(reason, 15);
    ASSERT_TRUE(stopped.unfinished());
    EXPECT_TRUE(stopped.unfinished()->is_interrupted);
    EXPECT_EQ(stopped.unfinished()->answer.tokens, first->answered());
    EXPECT_EQ(static_cast<int>(stopped.answers().size()), (stop - 1) / 6);
    const auto recorded = open_recorded((folder / "stopped.h5").string(), comm);
    const auto second = generator();
    Conversation resumed(*second, {}, {});
    resumed.resume(recorded->reader, recorded->state, true);
    EXPECT_TRUE(resumed.goes_on());
    while (resumed.has_open_question()) ASSERT_EQ(resumed.answer(drawn(), {}), 0);
    EXPECT_EQ(text_of(resumed.state()), wanted);
  }
}

TEST_P(Conversations, ReplacedQuestionsAreAskedFromTheStart) {
  const auto run = generator();
  Conversation conversation(*run, {}, {});
  read(conversation);
  const auto ask = [&](int stop) {
    conversation.forget_questions();
    conversation.add_question("again", asked[0]);
    AnswerOptions options = drawn();
    int tokens = 0;
    options.on_token = [&](TokenId) {
      if (++tokens == stop) throw Stopped{1};
    };
    const int reason = conversation.answer(options, {});
    EXPECT_EQ(reason != 0, stop > 0);
  };
  ask(0);
  const std::vector<TokenId> whole = run->answered();
  ask(2);
  EXPECT_EQ(run->answered().size(), 2U);
  ask(0);
  EXPECT_EQ(run->answered(), whole);
  ask(3);
  conversation.end_open_question();
  ASSERT_EQ(conversation.answers().size(), 1U);
  EXPECT_TRUE(conversation.answers()[0].is_interrupted);
  EXPECT_EQ(conversation.answers()[0].answer.tokens.size(), 3U);
  EXPECT_EQ(conversation.state().questions, std::vector<std::vector<TokenId>>{asked[0]});
  conversation.forget_last();
  EXPECT_TRUE(conversation.state().questions.empty());
  EXPECT_TRUE(conversation.answers().empty());
}

INSTANTIATE_TEST_SUITE_P(Moments, Conversations,
                         testing::Values(PruneMoment::context, PruneMoment::question),
                         [](const auto& info) { return std::string(name_of(info.param)); });

}  // namespace
}  // namespace kvzap::session
