// Runs that are written to files while they go on, and go on from these files: the same ids, and on
// the same ranks the same bits of the cache, from every phase of a run and under every kind of
// pruning.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <kvzap/engine/generate.hpp>
#include <kvzap/engine/synthetic.hpp>
#include <optional>
#include <string>
#include <vector>

#include "mpi/ranks.hpp"

namespace kvzap {
namespace {

namespace fs = std::filesystem;
using test::FirstRanks;
using test::SharedFolder;

constexpr int resumed_layers = 3;
constexpr int resumed_heads = 5;
constexpr int resumed_words = 97;  // of the vocabulary

ModelConfig resumed_config() {
  ModelConfig config{};
  config.architecture = "LlamaForCausalLM";
  config.hidden_size = 40;
  config.intermediate_size = 48;
  config.num_hidden_layers = resumed_layers;
  config.num_attention_heads = resumed_heads * 2;
  config.num_key_value_heads = resumed_heads;
  config.head_dim = 16;
  config.vocab_size = resumed_words;
  config.max_position_embeddings = 4096;
  config.rms_norm_eps = 1e-6;
  config.rope_theta = 10000;
  return config;
}

std::vector<TokenId> resumed_tokens(int count, std::uint32_t seed) {
  std::vector<TokenId> tokens(static_cast<std::size_t>(count));
  std::uint32_t state = 17U + seed;
  for (TokenId& token : tokens) {
    state = state * 1664525U + 1013904223U;
    token = static_cast<TokenId>((state >> 10) % resumed_words);
  }
  return tokens;
}

/// How a run is pruned, and how it answers.
struct Kind {
  std::string policy;  // empty: none, or RandomScorer
  std::optional<double> evict_ratio;
  std::optional<double> threshold;
  PruneMode prune = PruneMode::prefill;
  PrefillMode prefill = PrefillMode::dense;
  PruneMoment moment = PruneMoment::context;
  std::int64_t decode_every = 0;
  double temperature = 0;
  bool reusable = true;

  std::string label() const {
    return (policy.empty() ? "scorer" : policy) + " " + std::string(name_of(prune)) + " " +
           std::string(name_of(prefill)) + " every " + std::to_string(decode_every) +
           (moment == PruneMoment::question ? " question" : "") + (reusable ? " reusable" : "") +
           " t=" + std::to_string(temperature);
  }
};

constexpr auto always = PruneMode::always;
constexpr auto prefill_only = PruneMode::prefill;
constexpr auto sparse = PrefillMode::sparse;
constexpr auto dense = PrefillMode::dense;
constexpr auto after_context = PruneMoment::context;
constexpr auto after_question = PruneMoment::question;

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all = {
      {"", {}, {}, PruneMode::none, dense, after_context, 0, 0.9, true},
      {"", {}, {}, PruneMode::none, sparse, after_context, 0, 0, false},
      {"", {}, 0.0, prefill_only, sparse, after_context, 0, 0, true},
      {"", {}, 0.0, always, sparse, after_context, 0, 0.8, true},
      {"", {}, 0.0, always, dense, after_context, 0, 0, false},
      {"knorm+dms", {}, -0.55, always, sparse, after_context, 0, 0, true},
      {"snapkv+dms:threshold=0.01", {}, {}, prefill_only, sparse, after_context, 0, 0, true},
      {"knorm+global", 0.5, {}, prefill_only, dense, after_context, 0, 0, true},
      {"snapkv:window=5+pyramid", 0.5, {}, prefill_only, dense, after_context, 0, 1.1, true},
      {"snapkv:window=5+ada", 0.5, {}, prefill_only, sparse, after_context, 0, 0, true},
      {"h2o", 0.5, {}, prefill_only, sparse, after_context, 4, 0, true},
      {"h2o", 0.5, {}, prefill_only, sparse, after_context, 4, 0.7, false},
      {"tova", 0.5, {}, prefill_only, sparse, after_context, 3, 0, false},
      {"snapkv:window=5", 0.5, {}, prefill_only, dense, after_context, 5, 0, false},
      {"compactor", 0.5, {}, prefill_only, sparse, after_context, 3, 0, false},
      {"kvzip:chunk=40", 0.5, {}, prefill_only, dense, after_context, 0, 0, true},
      {"keydiff+rerotate", 0.5, {}, prefill_only, sparse, after_context, 0, 0, true},
      {"keydiff+rerotate", 0.5, {}, prefill_only, dense, after_context, 0, 0.6, false},
      {"snapkv:window=5", 0.5, {}, prefill_only, dense, after_question, 0, 0, true},
      {"simlayerkv:lazy-threshold=0.2,recent=24",
       {},
       {},
       prefill_only,
       dense,
       after_context,
       0,
       0,
       true},
      {"snapkv:window=5+rerotate", 0.5, {}, prefill_only, sparse, after_context, 0, 0, true},
      {"snapkv:window=5+rerotate", 0.5, {}, prefill_only, dense, after_context, 5, 0, false},
      {"snapkv:window=5", 0.5, {}, prefill_only, dense, after_question, 5, 0, true},
      {"kvzip+fit", 0.5, {}, prefill_only, dense, after_context, 0, 0, true},
  };
  return all;
}

struct Interrupted {};

class Resume : public testing::Test {
 protected:
  template <class Value = float>
  std::unique_ptr<Generator> generator(const Kind& kind, const Communicator& comm,
                                       int page_rows = 4, std::size_t kv_limit = 0) const {
    const auto partition = HeadPartition::even(resumed_layers, resumed_heads, comm.size());
    const ModelConfig config = resumed_config();
    CacheOptions options;
    options.balance = 0;  // where pages lie decides the order of sums
    options.pruning.mode = kind.prune;
    options.pruning.prefill = kind.prefill;
    options.pruning.moment = kind.moment;
    options.pruning.chunk = 20;
    options.pruning.window = 8;
    options.pruning.sink = 1;
    options.page_rows = page_rows;
    options.kv_limit = kv_limit;
    options.pruning.decode.every = kind.decode_every;
    if (kind.decode_every > 0) options.pruning.decode.evict_ratio = 0.5;
    std::shared_ptr<Scorer> scorer;
    if (!kind.policy.empty()) {
      Budget budget;
      if (kind.evict_ratio) {
        budget.amount = Budget::Amount::evict_ratio;
        budget.evict_ratio = *kind.evict_ratio;
      }
      const PolicySetup setup{config, partition, DType::f32, {}, comm};
      auto choice = std::make_shared<PolicyChoice>(
          make_policy(parse_policy(kind.policy), budget, kind.threshold, setup));
      choice->repeat.first = {1, 2, 3};
      choice->repeat.later = {4, 5, 6, 7};
      choice->repeat.suffix = {8};
      choice->repeat.prefix = 2;
      options.policy = choice;
      scorer = choice->scorer;
    } else if (kind.prune != PruneMode::none) {
      scorer = std::make_shared<RandomScorer>(partition, comm.rank(), 0.5, 2, 7);
    }
    auto model = std::make_shared<const Model>(
        Model::load("", config, DTypeOf<Value>::value, partition, comm.rank(), {3}));
    return Generator::create(model, scorer, options, comm);
  }

  std::size_t questions(const Kind& kind) const { return kind.reusable ? asked.size() : 1; }

  AnswerOptions how(const Kind& kind, std::size_t question) const {
    AnswerOptions options;
    options.max_new_tokens = 7;
    options.sampling.temperature = kind.temperature;
    options.sampling.seed = 5 + question;
    return options;
  }

  /// `at(q)` is called wherever a run can be written, with the question that would be next or is
  /// being answered.
  using At = std::function<void(std::size_t)>;

  /// All answers from `first` on.
  std::vector<std::vector<TokenId>> go_on(Generator& run, const Kind& kind, std::size_t first,
                                          const At& at) const {
    run.prefill_rest({}, [&] { at(0); });
    std::vector<std::vector<TokenId>> ids(questions(kind));
    for (std::size_t q = first; q < ids.size(); ++q) {
      AnswerOptions options = how(kind, q);
      const std::vector<TokenId> before = run.answered();
      std::vector<TokenId> told;
      const bool resumes = run.is_answering();
      options.on_token = [&](TokenId token) {
        told.push_back(token);
        at(q);
      };
      const Answer answer = resumes ? run.resume_answer(options) : run.answer(asked[q], options);
      EXPECT_EQ(answer.question_tokens, static_cast<std::int64_t>(asked[q].size()));
      EXPECT_EQ(answer.stop_reason, StopReason::max_new_tokens);
      if (resumes) told.insert(told.begin(), before.begin(), before.end());
      EXPECT_EQ(told, answer.tokens);
      ids[q] = answer.tokens;
      at(q + 1);
    }
    return ids;
  }

  static SnapshotInfo info() {
    SnapshotInfo info;
    info.model = "random";
    info.created = "2026-11-22T00:00:00Z";
    return info;
  }

  /// Everything that a file has of the cache and the engine; on rank 0.
  std::string bits(Generator& run, const Communicator& comm) const {
    const fs::path file = folder / "bits.h5";
    run.engine().write_snapshot(file, info(), {}, run.sequence());
    std::string content;
    if (comm.is_root()) {
      std::ifstream stream(file, std::ios::binary);
      content.assign(std::istreambuf_iterator<char>(stream), {});
      EXPECT_FALSE(content.empty());
    }
    return content;
  }

  /// A file that a run has written on its way.
  struct Point {
    fs::path file;
    std::size_t question;
    std::unique_ptr<SnapshotWriting> writing;
  };

  /// Whether the same ranks find the same bits. A budget for all heads of the model takes rows out
  /// of the rings of some ranks alone; a file has the rings of a layer as all ranks have them, or
  /// none, so that these rows may lie in pages afterwards and sums have another order.
  bool has_same_bits(const Kind& kind) const {
    return world.size() == 1 || kind.policy != "knorm+global";
  }

  /// Runs from the start, beginning to write at every `stride`-th place and ending at the next one.
  std::vector<std::vector<TokenId>> run_through(Generator& run, const Kind& kind, int stride,
                                                int offset, const std::string& name,
                                                std::vector<Point>& points) const {
    int place = 0;
    const At at = [&](std::size_t question) {
      if (!points.empty() && points.back().writing) {
        if (place % 2 == 0 || points.back().writing->advance()) {
          points.back().writing->finish();
          EXPECT_GT(points.back().writing->file_bytes(), 0);
          points.back().writing.reset();
        }
      }
      if (place++ % stride != offset % stride) return;
      if (!points.empty() && points.back().writing) points.back().writing->finish();
      Point& point = points.emplace_back();
      point.file = folder / (name + std::to_string(points.size()) + ".h5");
      point.question = question;
      point.writing = run.begin_snapshot(point.file, info(), {});
    };
    run.prefill(context, kind.reusable, {}, [&] { at(0); });
    at(0);
    auto ids = go_on(run, kind, 0, at);
    for (Point& point : points) {
      if (point.writing) point.writing->finish();
      point.writing.reset();
    }
    return ids;
  }

  void expect_same(const std::vector<std::vector<TokenId>>& got,
                   const std::vector<std::vector<TokenId>>& wanted, std::size_t first) const {
    ASSERT_EQ(got.size(), wanted.size());
    for (std::size_t q = first; q < got.size(); ++q) EXPECT_EQ(got[q], wanted[q]) << "answer " << q;
  }

  /// Writes on r ranks and goes on on s of them, for all r and s; `check(points, ids, s)` on those.
  template <class Check>
  void across_ranks(const Kind& kind, int stride, const Check& check) const {
    for (int r = 1; r <= world.size(); ++r) {
      std::vector<Point> points;
      std::vector<std::vector<TokenId>> ids;
      const std::string name = "ranks" + std::to_string(r) + "-";
      {
        const FirstRanks ranks(r);
        if (ranks.has_this_rank()) {
          const auto run = generator(kind, ranks.communicator());
          ids = run_through(*run, kind, stride, 1, name, points);
        }
        world.barrier();
      }
      // What rank 0 knows.
      for (int s = 1; s <= world.size(); ++s) {
        const FirstRanks ranks(s);
        std::int64_t count = static_cast<std::int64_t>(points.size());
        world.broadcast(&count, sizeof(count), 0);
        if (ranks.has_this_rank()) {
          for (std::int64_t p = 0; p < count; ++p) {
            std::int64_t question =
                world.is_root() ? static_cast<std::int64_t>(points[p].question) : 0;
            const Communicator comm = ranks.communicator();
            comm.broadcast(&question, sizeof(question), 0);
            SCOPED_TRACE(kind.label() + ", " + std::to_string(r) + " to " + std::to_string(s) +
                         " ranks, point " + std::to_string(p));
            check(folder / (name + std::to_string(p + 1) + ".h5"),
                  static_cast<std::size_t>(question), ids, comm, r == s);
          }
        }
        world.barrier();
      }
    }
  }

  Communicator world = Communicator::world();
  SharedFolder folder;
  std::vector<TokenId> context = resumed_tokens(70, 0);
  std::vector<std::vector<TokenId>> asked = {resumed_tokens(5, 1), {}, resumed_tokens(9, 2)};
};

TEST_F(Resume, GoesOnToTheSameIdsAndBits) {
  int number = 0;
  for (const Kind& kind : kinds()) {
    ++number;
    std::vector<Point> points;
    const auto run = generator(kind, world);
    const auto ids = run_through(*run, kind, kind.reusable ? 5 : 2, number, "run", points);
    const std::string wanted = bits(*run, world);
    ASSERT_GE(points.size(), 4u) << kind.label();
    for (std::size_t p = 0; p < points.size(); ++p) {
      SCOPED_TRACE(kind.label() + ", point " + std::to_string(p) + ", question " +
                   std::to_string(points[p].question));
      const SnapshotReader reader(points[p].file);
      const auto again = generator(kind, world);
      again->resume(reader, kind.reusable);
      const std::size_t first = points[p].question;
      if (first == questions(kind)) {
        EXPECT_FALSE(again->is_answering());
        if (kind.decode_every == 0 || !kind.reusable) {
          EXPECT_EQ(again->answered(), ids.back());
          EXPECT_TRUE(bits(*again, world) == wanted);
        }
        continue;
      }
      expect_same(go_on(*again, kind, first, [](std::size_t) {}), ids, first);
      if (has_same_bits(kind)) {
        EXPECT_TRUE(bits(*again, world) == wanted);
      }
    }
  }
}

// Thrown by a callback on all ranks: the same generator goes on, and so does one from a file that
// is written after that.
TEST_F(Resume, GoesOnAfterExceptions) {
  for (const std::size_t k : {0, 3, 9, 12, 15, 16, 18}) {
    const Kind& kind = kinds()[k];
    const auto undisturbed = generator(kind, world);
    undisturbed->prefill(context, kind.reusable);
    const auto ids = go_on(*undisturbed, kind, 0, [](std::size_t) {});
    const std::string wanted = bits(*undisturbed, world);
    for (const int last : {0, 1, 4, 7, 12}) {
      SCOPED_TRACE(kind.label() + ", interrupted at " + std::to_string(last));
      const auto run = generator(kind, world);
      int place = 0;
      std::size_t next = 0;
      const At interrupts = [&](std::size_t question) {
        next = question;
        if (place++ == last) throw Interrupted();
      };
      std::vector<std::vector<TokenId>> got;
      try {
        run->prefill(context, kind.reusable, {}, [&] { interrupts(0); });
        got = go_on(*run, kind, 0, interrupts);
      } catch (const Interrupted&) {
      }
      EXPECT_TRUE(got.empty() || !kind.reusable);
      const fs::path file = folder / "interrupted.h5";
      run->write_snapshot(file, info(), {});
      const auto again = generator(kind, world);
      again->resume(SnapshotReader(file), kind.reusable);
      EXPECT_EQ(again->context_run(), run->context_run());
      EXPECT_EQ(again->is_context_done(), run->is_context_done());
      if (next < questions(kind)) {
        expect_same(go_on(*again, kind, next, [](std::size_t) {}), ids, next);
        EXPECT_TRUE(bits(*again, world) == wanted);
        expect_same(go_on(*run, kind, next, [](std::size_t) {}), ids, next);
        EXPECT_TRUE(bits(*run, world) == wanted);
      }
    }
  }
}

// On other ranks, with other pages; ids are the same.
TEST_F(Resume, GoesOnOnOtherRanks) {
  for (const std::size_t k : {3, 9, 11}) {
    const Kind& kind = kinds()[k];
    across_ranks(
        kind, 7,
        [&](const fs::path& file, std::size_t first, const std::vector<std::vector<TokenId>>& ids,
            const Communicator& comm, bool is_same) {
          const auto run = is_same ? generator(kind, comm) : generator(kind, comm, 7);
          run->resume(SnapshotReader(file), kind.reusable);
          auto got = go_on(*run, kind, first, [](std::size_t) {});
          // Rank 0 has taken part in every run.
          if (comm.is_root()) expect_same(got, ids, first);
        });
  }
}

TEST_F(Resume, KeepsAndConvertsTypes) {
  const Kind& kind = kinds()[9];
  const auto through = [&](auto value, const std::string& name) {
    using Value = decltype(value);
    std::vector<Point> points;
    const auto run = generator<Value>(kind, world);
    const auto ids = run_through(*run, kind, 6, 1, name, points);
    const std::string wanted = bits(*run, world);
    for (const Point& point : points) {
      SCOPED_TRACE(point.file.string());
      const auto again = generator<Value>(kind, world);
      again->resume(SnapshotReader(point.file), kind.reusable);
      if (point.question == questions(kind)) continue;
      expect_same(go_on(*again, kind, point.question, [](std::size_t) {}), ids, point.question);
      EXPECT_TRUE(bits(*again, world) == wanted);
    }
  };
  through(half(), "half");
  through(bfloat16(), "bfloat16");
  through(0.0F, "float");
  // A rounded cache goes on, with ids of its own.
  const auto rounded = generator<bfloat16>(kind, world);
  rounded->resume(SnapshotReader(folder / "float2.h5"), true);
  rounded->prefill_rest();
  const Answer answer = rounded->answer(asked[0], how(kind, 0));
  EXPECT_EQ(answer.tokens.size(), 7u);
}

// A context that grows is a longer one, if chunks begin where they would have.
TEST_F(Resume, AppendsToTheContext) {
  const std::vector<TokenId> first(context.begin(), context.begin() + 40);
  const std::vector<TokenId> more(context.begin() + 40, context.end());
  for (const std::size_t k : {1, 2, 3, 5, 6, 9, 10, 12, 14}) {
    Kind kind = kinds()[k];
    SCOPED_TRACE(kind.label());
    const auto whole = generator(kind, world);
    whole->prefill(context, kind.reusable);
    const auto ids = go_on(*whole, kind, 0, [](std::size_t) {});
    const std::string wanted = bits(*whole, world);
    const auto expect_whole = [&](Generator& run) {
      run.append_context(more);
      EXPECT_FALSE(run.is_context_done());
      expect_same(go_on(run, kind, 0, [](std::size_t) {}), ids, 0);
      EXPECT_TRUE(bits(run, world) == wanted);
    };
    const fs::path ready = folder / "ready.h5", answering = folder / "answering.h5",
                   chunk = folder / "chunk.h5";
    const auto run = generator(kind, world);
    int chunks = 0;
    run->prefill(first, kind.reusable, {}, [&] {
      if (++chunks == 1) run->write_snapshot(chunk, info(), {});
    });
    run->write_snapshot(ready, info(), {});
    if (kind.reusable) {  // the answer is given up
      AnswerOptions options = how(kind, 0);
      options.on_token = [&](TokenId) {
        if (run->answered().size() == 3) run->write_snapshot(answering, info(), {});
      };
      run->answer(asked[2], options);
    }
    expect_whole(*run);
    for (const fs::path& file : {chunk, ready, answering}) {
      if (file == answering && !kind.reusable) continue;
      const auto again = generator(kind, world);
      again->resume(SnapshotReader(file), kind.reusable);
      expect_whole(*again);
    }
  }
  // With every question the context runs anew.
  const Kind& kind = kinds()[18];
  const auto whole = generator(kind, world), run = generator(kind, world);
  whole->prefill(context, true);
  run->prefill(first, true);
  run->answer(asked[0], how(kind, 0));
  run->append_context(more);
  expect_same(go_on(*run, kind, 0, [](std::size_t) {}), go_on(*whole, kind, 0, [](std::size_t) {}),
              0);
}

template <class Call>
void expect_refused(const Call& call, const std::vector<std::string>& parts) {
  try {
    call();
    ADD_FAILURE() << "nothing was refused; expected: " << parts.front();
  } catch (const Error& error) {
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  }
}

TEST_F(Resume, RefusesWhatCannotGoOn) {
  // Nothing is added to contexts that policies look at as a whole, have closed up, or would see too
  // little of.
  for (const auto& [k, why] :
       std::vector<std::pair<std::size_t, std::string>>{{15, "run the context again"},
                                                        {16, "positions"},
                                                        {19, "score again"},
                                                        {8, "3 are new"}}) {
    const auto run = generator(kinds()[k], world);
    run->prefill(context, true);
    expect_refused([&] { run->append_context({1, 2, 3}); }, {why});
    EXPECT_TRUE(run->is_context_done());
    EXPECT_EQ(run->answer(asked[0], how(kinds()[k], 0)).tokens.size(), 7u);
  }

  const Kind& kind = kinds()[1];  // no state to go back to
  const auto run = generator(kind, world);
  expect_refused([&] { run->write_snapshot(folder / "none.h5", info(), {}); }, {"no context"});
  expect_refused([&] { run->prefill_rest(); }, {"no context"});
  expect_refused([&] { run->append_context({1}); }, {"no context"});
  expect_refused([&] { run->resume_answer(how(kind, 0)); }, {"no answer"});
  const fs::path middle = folder / "middle.h5", cache_alone = folder / "cache.h5",
                 chunk = folder / "chunk.h5";
  AnswerOptions options = how(kind, 0);
  options.on_token = [&](TokenId) {
    if (run->answered().size() == 3) run->write_snapshot(middle, info(), {});
  };
  run->prefill(context, false, {}, [&] {
    if (run->context_run() == 20) run->write_snapshot(chunk, info(), {});
  });
  run->engine().write_snapshot(cache_alone, "random", run->sequence());
  run->answer(asked[0], options);

  const auto again = generator(kind, world);
  const auto resume = [&](Generator& one, const fs::path& file) {
    return [&one, file] { one.resume(SnapshotReader(file), true); };
  };
  expect_refused(resume(*again, cache_alone), {"cache.h5", "/state lacks phase"});
  again->resume(SnapshotReader(middle), true);
  EXPECT_TRUE(again->is_answering());
  EXPECT_EQ(again->question(), asked[0]);
  EXPECT_EQ(again->answered().size(), 3u);
  // Another one takes its place, unless it is refused.
  again->resume(SnapshotReader(middle), true);
  expect_refused(resume(*again, cache_alone), {"cache.h5", "/state lacks phase"});
  EXPECT_TRUE(again->is_answering());
  EXPECT_EQ(again->answered().size(), 3u);
  expect_refused([&] { again->answer(asked[2], how(kind, 0)); }, {"state has not been kept"});
  expect_refused([&] { again->append_context({1}); }, {"state has not been kept"});
  EXPECT_EQ(again->resume_answer(how(kind, 0)).tokens.size(), 7u);
  // One that has ended ends at once, and goes on if it may.
  EXPECT_EQ(again->resume_answer(how(kind, 0)).tokens.size(), 7u);
  AnswerOptions longer = how(kind, 0);
  longer.max_new_tokens = 9;
  EXPECT_EQ(again->resume_answer(longer).tokens.size(), 9u);

  const auto in_chunks = generator(kind, world);
  in_chunks->resume(SnapshotReader(chunk), true);
  expect_refused([&] { in_chunks->answer({1}, how(kind, 0)); }, {"20 of 70 tokens"});

  // Written under other options.
  const auto by_question = generator(kinds()[18], world);
  expect_refused(resume(*by_question, middle), {"middle.h5", "prune_after question"});
  const auto by_queries = generator(kinds()[9], world);
  expect_refused(resume(*by_queries, chunk), {"chunk.h5", "newest queries", "another"});
  EXPECT_EQ(by_queries->report().live_bytes, 0);
  by_queries->prefill(context, false);  // nothing is left of it
  EXPECT_EQ(by_queries->answer({1}, how(kind, 0)).tokens.size(), 7u);
}

// A conversation: each answer becomes a part of the context of the next.
TEST_F(Resume, KeepsAnswers) {
  const std::vector<TokenId> between = {7, 8, 9};
  // Full caches first: there a conversation is what a fresh run of all of it is.
  for (const std::size_t k : {0, 1}) {
    const Kind& kind = kinds()[k];
    SCOPED_TRACE(kind.label());
    const auto run = generator(kind, world);
    run->prefill(context, kind.reusable);
    std::vector<TokenId> said = context;
    for (std::size_t q = 0; q < asked.size(); ++q) {
      const auto fresh = generator(kind, world);
      fresh->prefill(said, false);
      const Answer answer = run->answer(asked[q], how(kind, q));
      EXPECT_EQ(fresh->answer(asked[q], how(kind, q)).tokens, answer.tokens);
      const bool with_last = q != 1;
      run->keep_answer(between, with_last);
      said.insert(said.end(), asked[q].begin(), asked[q].end());
      said.insert(said.end(), answer.tokens.begin(), answer.tokens.end() - (with_last ? 0 : 1));
      said.insert(said.end(), between.begin(), between.end());
      EXPECT_EQ(run->context(), said);
      EXPECT_EQ(run->context_run(), static_cast<std::int64_t>(said.size()));
    }
  }
  // Pruned ones: written and read on the way, again and again, interrupted or not.
  for (const std::size_t k : {3, 4, 5, 9, 10, 12}) {
    const Kind& kind = kinds()[k];
    SCOPED_TRACE(kind.label());
    const auto run = generator(kind, world), other = generator(kind, world);
    run->prefill(context, kind.reusable);
    AnswerOptions options = how(kind, 0);
    options.on_token = [&](TokenId) {
      if (run->answered().size() == 3) throw Interrupted{};
    };
    EXPECT_THROW(run->answer(asked[0], options), Interrupted);
    run->keep_answer(between);
    EXPECT_TRUE(run->is_context_done());
    EXPECT_EQ(run->context().size(), context.size() + asked[0].size() + 3 + between.size());
    run->write_snapshot(folder / "kept.h5", info(), {});
    other->resume(SnapshotReader(folder / "kept.h5"), kind.reusable);
    const Answer answer = run->answer(asked[2], how(kind, 1));
    EXPECT_EQ(other->answer(asked[2], how(kind, 1)).tokens, answer.tokens);
    EXPECT_EQ(other->report().kept, run->report().kept);
    if (kind.reusable) {
      // From the same place once more.
      EXPECT_EQ(run->answer(asked[2], how(kind, 1)).tokens, answer.tokens);
    }
    run->keep_answer(between);
    // From the beginning.
    run->reset();
    EXPECT_EQ(run->report().live_bytes, 0);
    run->prefill(context, kind.reusable);
    other->reset();
    other->prefill(context, kind.reusable);
    EXPECT_EQ(run->answer(asked[0], how(kind, 0)).tokens,
              other->answer(asked[0], how(kind, 0)).tokens);
  }
  const auto run = generator(kinds()[1], world);
  expect_refused([&] { run->keep_answer(between); }, {"no answer"});
  run->prefill(context, false);
  expect_refused([&] { run->keep_answer(between); }, {"no answer"});
  run->answer(asked[0], how(kinds()[1], 0));
  expect_refused([&] { run->keep_answer({}); }, {"at least one token"});
  run->keep_answer(between);
  const auto whole = generator(kinds()[18], world);
  whole->prefill(context, false);
  whole->answer(asked[0], how(kinds()[18], 0));
  expect_refused([&] { whole->keep_answer(between); }, {"anew with each question"});
}

// The fork that is written is there no longer than anyone reads it.
TEST_F(Resume, FreesWhatItHasWritten) {
  const Kind& kind = kinds()[3];
  const auto run = generator(kind, world);
  run->prefill(context, true);
  const std::int64_t bytes = run->report().live_bytes;
  const auto forked = [&] { return run->report().live_bytes > bytes; };
  {
    const auto writing = run->begin_snapshot(folder / "a.h5", info(), {});
    EXPECT_TRUE(forked());
    writing->finish();
    EXPECT_FALSE(forked());
    EXPECT_GT(writing->file_bytes(), 0);
    EXPECT_TRUE(writing->advance());
  }
  { const auto given_up = run->begin_snapshot(folder / "b.h5", info(), {}); }
  EXPECT_FALSE(forked());
  EXPECT_FALSE(fs::exists(folder / "b.h5"));
  EXPECT_THROW(run->begin_snapshot(folder / "no" / "c.h5", info(), {}), AgreedError);
  EXPECT_FALSE(forked());
  run->write_snapshot(folder / "d.h5", info(), {});
  EXPECT_FALSE(forked());

  // No memory for a fork: the run goes on.
  const auto wanted = go_on(*run, kind, 0, [](std::size_t) {});
  const auto plain = generator(kind, world);
  plain->prefill(context, false);
  const std::int64_t heads = (resumed_heads + world.size() - 1) / world.size();  // of rank 0
  const std::int64_t bytes_of_rank = plain->report().allocated_bytes * heads / resumed_heads;
  const auto tight = generator(kind, world, 4, static_cast<std::size_t>(3 * bytes_of_rank));
  tight->prefill(context, true);
  std::vector<std::unique_ptr<SnapshotWriting>> writings;
  bool is_out_of_memory = false;
  for (int i = 0; i < 60 && !is_out_of_memory; ++i) {
    try {
      writings.push_back(tight->begin_snapshot(folder / ("tight" + std::to_string(i)), info(), {}));
    } catch (const AgreedOutOfMemory&) {
      is_out_of_memory = true;
    }
  }
  EXPECT_TRUE(is_out_of_memory);
  tight->write_snapshot(folder / "tight.h5", info(), {});  // needs none
  writings.clear();
  expect_same(go_on(*tight, kind, 0, [](std::size_t) {}), wanted, 0);
}

}  // namespace
}  // namespace kvzap
