// A session's answers are those of the golden runs, however its context is read.
#include <gtest/gtest.h>

#include <fstream>
#include <kvzap/engine/session.hpp>
#include <nlohmann/json.hpp>
#include <string>

#include "mpi/ranks.hpp"
#include "source_dir.hpp"

namespace kvzap {
namespace {

const std::string source = test::source_dir().string();
const std::string model = source + "/inputs/models/recall-4m";
const std::string surrogate = source + "/inputs/models/kvzap-mlp-recall-4m";

class SessionTest : public ::testing::Test {
 protected:
  SessionTest() : comm(Communicator::world()) {
    std::ifstream stream(source + "/tests/golden/recall-4m.json");
    golden = nlohmann::json::parse(stream)[0];
    context = golden["context"];
    question = golden["question"];
    options.dtype = DType::f32;
    ask.max_new_tokens = golden["max_new_tokens"];
  }
  std::string expected(const std::string& run) const {
    return comm.is_root() ? golden["runs"][run]["text"].get<std::string>() : "";
  }
  Session open(const Pruning& pruning) const { return {model, pruning, comm, options}; }
  static Pruning pruned() { return Pruning::kvzap(surrogate).threshold(-4.3); }
  static constexpr const char* pruned_run = "kvzap-mlp.tau-4.3.w128.prefill";

  Communicator comm;
  nlohmann::json golden;
  std::string context, question;
  SessionOptions options;
  AskOptions ask;
};

TEST_F(SessionTest, AnswersAsTheGoldenRuns) {
  Session full = open(Pruning::none());
  full.read(context);
  EXPECT_EQ(full.ask(question, ask), expected("full"));
  EXPECT_EQ(full.report().cache.evict_ratio(), 0);
  Session session = open(pruned());
  session.read(context);
  for (int repeat = 0; repeat < 2; ++repeat) {
    EXPECT_EQ(session.ask(question, ask), expected(pruned_run));
  }
  EXPECT_GT(session.report().cache.evict_ratio(), 0);
  EXPECT_NE(session.report().text().find("evicted"), std::string::npos);
}

TEST_F(SessionTest, ReadsInPartsAndMessages) {
  const std::size_t half = context.find(". ") + 1;
  Session parts = open(Pruning::none());
  parts.read(context.substr(0, half));
  parts.ask(question, ask);
  parts.read(context.substr(half));
  EXPECT_EQ(parts.ask(question, ask), expected("full"));
  Session messages = open(Pruning::none());
  messages.read(std::vector<ChatMessage>{{ChatRole::user, context}});
  EXPECT_EQ(messages.report().context_tokens, golden["n_context"].get<std::int64_t>());
  EXPECT_EQ(messages.ask(question, ask), expected("full"));
}

TEST_F(SessionTest, StreamsAndStops) {
  Session session = open(Pruning::none());
  session.read(context);
  std::string streamed;
  AskOptions streams = ask;
  streams.on_text = [&](std::string_view piece) {
    streamed += piece;
    return true;
  };
  EXPECT_EQ(session.ask(question, streams), expected("full"));
  EXPECT_EQ(streamed, expected("full"));
  streams.on_text = [](std::string_view) { return false; };
  session.ask(question, streams);
  EXPECT_EQ(session.answer().size(), 1U);
  streams.on_text = [](std::string_view) -> bool { throw std::runtime_error("no paper"); };
  EXPECT_THROW(session.ask(question, streams), AgreedError);
  EXPECT_EQ(session.ask(question, ask), expected("full"));
}

TEST_F(SessionTest, ShareAModel) {
  Session first = open(pruned());
  first.read(context);
  Session second = first.another();
  EXPECT_THROW(second.ask(question), AgreedError);
  second.read(std::vector<TokenId>{1, 2, 3});
  EXPECT_EQ(first.ask(question, ask), expected(pruned_run));
  Session third = second.another();
  third.read(context);
  EXPECT_EQ(third.ask(question, ask), expected(pruned_run));
  EXPECT_EQ(second.report().context_tokens, 3);
  const auto [read, asked] = first.prompt(context, question);
  EXPECT_EQ(static_cast<std::int64_t>(read.size()), golden["n_context"].get<std::int64_t>());
  EXPECT_EQ(first.ask(question, ask), expected(pruned_run));
  EXPECT_EQ(asked, first.generator().question());
  EXPECT_EQ(first.decode(first.encode("a magic number")), comm.is_root() ? "a magic number" : "");
  AskOptions sampled = ask;
  sampled.sampling = SamplingOptions();
  sampled.sampling->temperature = 100;
  const auto greedy = first.answer();
  first.ask(question, sampled);
  EXPECT_NE(first.answer(), greedy);
}

TEST_F(SessionTest, ProgressEndsAReading) {
  bool stops = false;
  options.progress = [&](std::string_view, std::int64_t done, std::int64_t) {
    if (stops && done > 1) throw std::runtime_error("enough");
  };
  Session session = open(pruned());
  stops = true;
  EXPECT_ANY_THROW(session.read(context));  // AgreedError on several ranks
  stops = false;
  session.read(context);
  EXPECT_EQ(session.ask(question, ask), expected(pruned_run));
}

TEST_F(SessionTest, RefusesBadInput) {
  EXPECT_THROW(Session(model + "-none", Pruning::none(), comm, options), AgreedError);
  EXPECT_THROW(open(Pruning::kvzap(surrogate)), AgreedError);  // no amount
  SessionOptions few = options;
  few.max_context = 8;
  Session session(model, Pruning::none(), comm, few);
  EXPECT_THROW(session.ask(question), AgreedError);
  EXPECT_THROW(session.read(""), AgreedError);
  EXPECT_THROW(session.read(context), AgreedError);
  EXPECT_THROW(session.read(std::vector<TokenId>{-1}), AgreedError);
}

// The policies that depend on the question, and those that have the model repeat the context.
TEST_F(SessionTest, PrunesByTheQuestionAndByARepeat) {
  for (const char* text : {"snapkv@evict-ratio=0.25@prune-after=question",
                           "finch@evict-ratio=0.25@prune-after=question",
                           "finch@evict-ratio=0.25@prune-after=question@prefill=sparse@chunk=16",
                           "kvzip@evict-ratio=0.25", "kvzip-plus@evict-ratio=0.25"}) {
    Session session = open(Pruning::parse(text));
    session.read(context);
    const std::string answer = session.ask(question, ask);
    EXPECT_EQ(session.ask(question, ask), answer) << text;
    EXPECT_NEAR(session.report().cache.evict_ratio(), 0.25, 0.1) << text;
    EXPECT_EQ(session.report().context_tokens, golden["n_context"].get<std::int64_t>());
  }
}

TEST_F(SessionTest, GoesOnFromAFile) {
  if (!has_snapshots) GTEST_SKIP() << "built without HDF5";
  const test::SharedFolder folder;
  const auto file = folder / "session.h5";
  {
    Session session = open(pruned());
    EXPECT_THROW(session.save(file), AgreedError);
    session.read(context);
    session.ask(question, ask);
    session.save(file);
  }
  Session session = Session::resume(file, comm);
  EXPECT_EQ(session.ask(question, ask), expected(pruned_run));
  Session again = open(pruned());
  again.read(std::vector<TokenId>{1, 2, 3});
  again.load(file);
  EXPECT_EQ(again.ask(question, ask), expected(pruned_run));
  EXPECT_THROW(open(Pruning::none()).load(file), AgreedError);
  EXPECT_THROW(Session::resume(folder / "none.h5", comm), AgreedError);
}

// A file tells the state of the cache after its context, also with an answer behind it.
TEST_F(SessionTest, SavesTheStateAfterTheContext) {
  if (!has_snapshots) GTEST_SKIP() << "built without HDF5";
  const test::SharedFolder folder;
  const auto file = folder / "session.h5";
  for (const char* text :
       {"snapkv@evict-ratio=0.5", "snapkv@evict-ratio=0.5@prune-after=question"}) {
    Session session = open(Pruning::parse(text));
    session.read(context);
    session.ask(question, ask);
    session.save(file);
    const SnapshotReader reader(file);
    const auto state = nlohmann::json::parse(reader.header().info.run_state);
    const std::int64_t expected_tokens =
        golden["n_context"].get<std::int64_t>() +
        (session.pruning().moment == PruneMoment::question
             ? static_cast<std::int64_t>(session.generator().question().size())
             : 0);
    EXPECT_EQ(state["context"]["tokens"], expected_tokens) << text;
    EXPECT_EQ(state["answers"].size(), 1U);
    // The answer goes from file to file.
    Session resumed = Session::resume(file, comm);
    resumed.save(file);
    const SnapshotReader again(file);
    EXPECT_EQ(nlohmann::json::parse(again.header().info.run_state), state) << text;
  }
}

// Files in which a session had attributes of its own.
TEST_F(SessionTest, GoesOnFromAnOlderFile) {
  if (!has_snapshots) GTEST_SKIP() << "built without HDF5";
  const test::SharedFolder folder;
  const auto file = folder / "session.h5";
  SnapshotInfo info;
  info.model = model;
  info.further["session_pruning"] = pruned().text();
  info.further["session_surrogate_hash"] = std::string();
  info.further["session_chat_template"] = std::int64_t{1};
  info.further["session_thinking"] = std::int64_t{0};
  Session session = open(pruned());
  session.read(context);
  session.generator().write_snapshot(file, info, {});
  EXPECT_EQ(Session::resume(file, comm).ask(question, ask), expected(pruned_run));
  Session again = open(pruned());
  again.load(file);
  EXPECT_EQ(again.ask(question, ask), expected(pruned_run));
  info.further["session_surrogate_hash"] = std::string("0123456789abcdef");
  session.generator().write_snapshot(file, info, {});
  EXPECT_THROW(Session::resume(file, comm), AgreedError);
}

// A session saved in a trial of the model's first layers goes on with these.
TEST_F(SessionTest, GoesOnWithItsLayersAndWeights) {
  if (!has_snapshots) GTEST_SKIP() << "built without HDF5";
  const test::SharedFolder folder;
  const auto file = folder / "session.h5";
  options.layers = 2;
  options.random_weights = 7;
  options.rope_scaling = "linear";
  options.rope_scale = 4;
  ask.max_new_tokens = 4;
  Session session = open(Pruning::parse("snapkv:window=8@evict-ratio=0.5@window=16"));
  session.read(context);
  session.save(file);
  const std::string answer = session.ask(question, ask);
  Session resumed = Session::resume(file, comm);
  EXPECT_EQ(resumed.options().layers, options.layers);
  EXPECT_EQ(resumed.options().random_weights, options.random_weights);
  EXPECT_EQ(resumed.max_context(), session.max_context());
  EXPECT_EQ(resumed.ask(question, ask), answer);
  options.layers = 3;
  EXPECT_THROW(open(session.pruning()).load(file), AgreedError);
}

}  // namespace
}  // namespace kvzap
