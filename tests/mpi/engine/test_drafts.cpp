// Answers with drafts of prompt lookup are the answers without them, and leave the same cache.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <kvzap/config.hpp>
#include <kvzap/engine/generate.hpp>
#include <kvzap/engine/policies.hpp>
#include <kvzap/engine/synthetic.hpp>
#include <random>
#include <string>
#include <vector>

namespace kvzap {
namespace {

constexpr int layers = 4, heads = 4, words = 23, window = 8;

ModelConfig make_config() {
  ModelConfig config{};
  config.architecture = "LlamaForCausalLM";
  config.hidden_size = 32;
  config.intermediate_size = 48;
  config.num_hidden_layers = layers;
  config.num_attention_heads = heads * 2;
  config.num_key_value_heads = heads;
  config.head_dim = 32;
  config.vocab_size = words;
  config.max_position_embeddings = 4096;
  config.rms_norm_eps = 1e-6;
  config.rope_theta = 10000;
  return config;
}

/// Two layers whose tokens see the last 9 tokens, or those of their chunk of 12.
ModelConfig config_of_rings() {
  ModelConfig config = make_config();
  config.layers.resize(layers);
  config.layers[0].window = 9;
  config.layers[0].keeps_window = true;
  config.layers[2].chunk = 12;
  return config;
}

/// A layer that reads the rows of another one.
ModelConfig config_of_shared_rows() {
  ModelConfig config = make_config();
  config.layers.resize(layers);
  for (LayerConfig& layer : config.layers) layer.rows_of = -1;
  config.layers[3].rows_of = 2;
  return config;
}

/// A text with many n-grams that occur again, of which few continue alike.
std::vector<TokenId> some_text(int count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<TokenId> tokens;
  while (static_cast<int>(tokens.size()) < count) {
    const bool repeats = tokens.size() > 12 && random() % 3 > 0;
    const std::size_t first = repeats ? random() % (tokens.size() - 6) : 0;
    for (std::size_t i = 0; i < 6; ++i) {
      tokens.push_back(repeats ? tokens[first + i] : static_cast<TokenId>(random() % words));
    }
  }
  return tokens;
}

struct Setting {
  const char* name;
  ModelConfig (*config)();
  PruneMode mode;
  const char* policy = "";
  PageFormat format = {};
  double temperature = 0;
  double balance = default_balance;
  double penalty = 0.2;  // of frequent tokens, where tokens are drawn
};
void PrintTo(const Setting& setting, std::ostream* stream) { *stream << setting.name; }

/// An answer with its logits, and the rows that it leaves: positions and scores of each head.
struct Outcome {
  Answer answer;
  std::vector<std::vector<float>> logits;
  std::vector<std::vector<std::int64_t>> positions;
  std::vector<std::vector<float>> scores;
};

class Lookup : public ::testing::TestWithParam<Setting> {
 protected:
  std::unique_ptr<Generator> generator() const {
    const ModelConfig config = GetParam().config();
    const auto partition = HeadPartition::even(layers, heads, comm.size());
    const auto model = std::make_shared<const Model>(
        Model::load("", config, DType::f32, partition, comm.rank(), {5}));
    CacheOptions options;
    options.pruning.window = window;
    options.pruning.sink = 2;
    options.pruning.mode = GetParam().mode;
    options.page_rows = 4;
    options.page_format = GetParam().format;
    options.balance = GetParam().balance;
    std::shared_ptr<Scorer> scorer;
    if (GetParam().mode != PruneMode::none) {
      const std::string policy = GetParam().policy;
      if (policy.empty()) {
        scorer = std::make_shared<RandomScorer>(partition, comm.rank(), 0.6, 4, 3);
        options.pruning.amount.threshold = 0;
      } else {
        Budget budget;
        budget.amount = Budget::Amount::evict_ratio;
        budget.evict_ratio = 0.4;
        const PolicySetup setup{config, partition, DType::f32, {}, comm};
        options.policy = std::make_shared<const PolicyChoice>(
            make_policy(parse_policy(policy), budget, {}, setup));
      }
    }
    return Generator::create(model, scorer, options, comm);
  }

  Outcome run(std::int64_t lookup, unsigned seed, bool has_logits = false,
              const std::function<void(Generator&, int)>& on_token = {}) const {
    const auto generator = this->generator();
    generator->prefill(some_text(61, seed), true);
    Outcome outcome;
    AnswerOptions options;
    options.max_new_tokens = 75;
    options.lookup = lookup;
    options.sampling.temperature = GetParam().temperature;
    options.sampling.seed = seed;
    options.sampling.frequency_penalty = GetParam().temperature > 0 ? GetParam().penalty : 0;
    if (has_logits) {
      options.on_logits = [&](const std::vector<float>& logits) {
        outcome.logits.push_back(logits);
      };
    }
    int count = 0;
    options.on_token = [&](TokenId) {
      if (on_token) on_token(*generator, ++count);
    };
    outcome.answer = generator->answer(some_text(14, seed + 100), options);
    generator->gather_pages();
    for (int l = 0; l < layers; ++l) {
      if (GetParam().config().rows_of(l) != l) continue;
      const auto scores = generator->scores(l);
      outcome.scores.insert(outcome.scores.end(), scores.begin(), scores.end());
      for (std::size_t h = 0; h < scores.size(); ++h) {
        outcome.positions.push_back(generator->positions(l, static_cast<int>(h)));
      }
    }
    return outcome;
  }

  static void expect_equal(const Outcome& found, const Outcome& expected) {
    EXPECT_EQ(found.answer.tokens, expected.answer.tokens);
    EXPECT_EQ(found.answer.cache.kept, expected.answer.cache.kept);
    EXPECT_EQ(found.answer.cache.tokens, expected.answer.cache.tokens);
    EXPECT_EQ(found.answer.cache.own_bytes, expected.answer.cache.own_bytes);
    EXPECT_EQ(found.positions, expected.positions);
    ASSERT_EQ(found.scores.size(), expected.scores.size());
    for (std::size_t h = 0; h < found.scores.size(); ++h) {
      ASSERT_EQ(found.scores[h].size(), expected.scores[h].size());
      for (std::size_t r = 0; r < found.scores[h].size(); ++r) {
        const float a = found.scores[h][r], b = expected.scores[h][r];
        EXPECT_TRUE((std::isnan(a) && std::isnan(b)) || std::fabs(a - b) < 1e-3F) << a << ' ' << b;
      }
    }
    ASSERT_EQ(found.logits.size(), expected.logits.size());
    for (std::size_t i = 0; i < found.logits.size(); ++i) {
      for (std::size_t t = 0; t < found.logits[i].size(); ++t) {
        ASSERT_NEAR(found.logits[i][t], expected.logits[i][t], 2e-3) << "token " << i;
      }
    }
  }

  const Communicator comm = Communicator::world();
};

TEST_P(Lookup, AnswersAreThoseWithoutIt) {
  DraftCounts drafts;
  for (unsigned seed = 1; seed < 3; ++seed) {
    SCOPED_TRACE(seed);
    EXPECT_EQ(run(0, seed, false).answer.tokens, run(0, seed, true).answer.tokens);
    for (const bool has_logits : {false, true}) {
      const Outcome expected = run(0, seed, has_logits);
      EXPECT_EQ(expected.answer.drafts.drafted, 0);
      const Outcome found = run(5, seed, has_logits);
      expect_equal(found, expected);
      drafts.drafted += found.answer.drafts.drafted;
      drafts.accepted += found.answer.drafts.accepted;
    }
  }
  // Random models seldom draw a guess.
  if (GetParam().temperature == 0) {
    EXPECT_GT(drafts.accepted, 0);
  }
  EXPECT_GT(drafts.drafted, drafts.accepted);
}

TEST_P(Lookup, SnapshotsWithinADraftHaveTheTokensSoFar) {
  if (!GetParam().config().layers.empty()) GTEST_SKIP() << "one family is enough";
  if (!KVZAP_HAVE_HDF5) GTEST_SKIP() << "built without HDF5";
  const std::string file =
      (std::filesystem::temp_directory_path() / ("kvzap_lookup_" + std::string(GetParam().name)))
          .string();
  std::vector<TokenId> expected = run(0, 2).answer.tokens;
  for (const int at : {9, 11, 12}) {
    SCOPED_TRACE(at);
    const Outcome found = run(5, 2, false, [&](Generator& generator, int count) {
      if (count == at) generator.write_snapshot(file, "model");
    });
    EXPECT_EQ(found.answer.tokens, expected);
    const auto resumed = generator();
    resumed->resume(SnapshotReader(file), true);
    EXPECT_EQ(resumed->answered(), std::vector<TokenId>(expected.begin(), expected.begin() + at));
    AnswerOptions options;
    options.max_new_tokens = 75;
    options.lookup = 5;
    options.sampling.temperature = GetParam().temperature;
    options.sampling.seed = 2;
    options.sampling.frequency_penalty = GetParam().temperature > 0 ? GetParam().penalty : 0;
    EXPECT_EQ(resumed->resume_answer(options).tokens, expected);
    comm.barrier();
    if (comm.is_root()) std::filesystem::remove(file);
  }
}

TEST_P(Lookup, AnInterruptedAnswerContinues) {
  struct Stop {};
  const std::vector<TokenId> expected = run(0, 3).answer.tokens;
  const auto generator = this->generator();
  generator->prefill(some_text(61, 3), true);
  AnswerOptions options;
  options.max_new_tokens = 75;
  options.lookup = 5;
  options.sampling.temperature = GetParam().temperature;
  options.sampling.seed = 3;
  options.sampling.frequency_penalty = GetParam().temperature > 0 ? GetParam().penalty : 0;
  int count = 0;
  options.on_token = [&](TokenId) {
    if (++count % 7 == 0) throw Stop();
  };
  const auto goes_on = [&](const auto& work) {
    try {
      work();
      return false;
    } catch (const Stop&) {
      return true;
    }
  };
  bool stopped = goes_on([&] { generator->answer(some_text(14, 103), options); });
  while (stopped) stopped = goes_on([&] { generator->resume_answer(options); });
  EXPECT_EQ(generator->answered(), expected);
}

constexpr PageFormat quantised{RowType::q8, RowType::q4};

INSTANTIATE_TEST_SUITE_P(
    Settings, Lookup,
    ::testing::Values(
        Setting{"none", make_config, PruneMode::none},
        Setting{"none_sampled", make_config, PruneMode::none, "", {}, 0.7},
        Setting{"none_drawn", make_config, PruneMode::none, "", {}, 0.7, default_balance, 0},
        Setting{"always_drawn", make_config, PruneMode::always, "", {}, 1.1, default_balance, 0},
        Setting{"none_quantised", make_config, PruneMode::none, "", quantised},
        Setting{"prefill", make_config, PruneMode::prefill},
        Setting{"prefill_moves_pages", make_config, PruneMode::prefill, "", {}, 0, 1e-6},
        Setting{"always", make_config, PruneMode::always},
        Setting{"always_sampled", make_config, PruneMode::always, "", {}, 0.7},
        Setting{"always_quantised", make_config, PruneMode::always, "", quantised},
        Setting{"always_moves_pages", make_config, PruneMode::always, "", {}, 0, 1e-6},
        Setting{"budget", make_config, PruneMode::prefill, "snapkv:window=5"},
        Setting{"budget_rerotated", make_config, PruneMode::prefill, "knorm+rerotate"},
        Setting{"rings", config_of_rings, PruneMode::none},
        Setting{"rings_always", config_of_rings, PruneMode::always, "", quantised},
        Setting{"shared", config_of_shared_rows, PruneMode::none},
        Setting{"shared_prefill", config_of_shared_rows, PruneMode::prefill}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace kvzap
