// What policies see of a step, when they choose, and that what they choose is what is left: with
// scores that depend on (layer, head, position) alone, so that every outcome is known beforehand.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <kvzap/engine/generate.hpp>
#include <map>
#include <numeric>
#include <optional>
#include <tuple>

#include "allocations.hpp"
#include "linalg/gemm.hpp"
#include "model/model_weights.hpp"
#include "mpi/ranks.hpp"
#include "unit/policy/retention_gates.hpp"

namespace kvzap {
namespace {

constexpr int layers = 3;
constexpr int kv_heads = 5;
constexpr int group = 2;
constexpr int dim = 16;
constexpr int vocabulary = 61;

ModelConfig make_config() {
  ModelConfig config{};
  config.architecture = "LlamaForCausalLM";
  config.hidden_size = 40;
  config.intermediate_size = 32;
  config.num_hidden_layers = layers;
  config.num_attention_heads = kv_heads * group;
  config.num_key_value_heads = kv_heads;
  config.head_dim = dim;
  config.vocab_size = vocabulary;
  config.max_position_embeddings = 4096;
  config.rms_norm_eps = 1e-6;
  config.rope_theta = 10000;
  return config;
}

std::vector<TokenId> some_tokens(int count, int seed = 0) {
  std::vector<TokenId> tokens(count);
  for (int i = 0; i < count; ++i) tokens[i] = (7 * i + i * i / 3 + 11 * seed) % vocabulary;
  return tokens;
}

float made_up_score(int layer, int head, std::int64_t position) {
  std::uint64_t x = (static_cast<std::uint64_t>(layer) << 40) ^
                    (static_cast<std::uint64_t>(head) << 32) ^ static_cast<std::uint64_t>(position);
  x = (x ^ (x >> 31)) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 27)) * 0xbf58476d1ce4e5b9u;
  return static_cast<float>((x >> 40) % 500);  // many ties
}

template <class View>
auto on_host(const View& view) {
  return Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), view);
}

/// What the policies of a test have seen.
struct Seen {
  int scored = 0;           // calls of score
  int observed_tokens = 0;  // in layer 0
  std::vector<std::int64_t> recent_first, recent_count;
  double worst_mass = 0, worst_query = 0, worst_cached = 0;
};

/// Scores by made_up_score, and checks everything else that it is shown.
class Probe final : public Policy {
 public:
  Probe(const PolicyNeeds& needs, Seen* seen) : m_needs(needs), m_seen(seen) {}
  PolicyNeeds needs() const override { return m_needs; }

  void observe(PolicyLayer& layer, const TokenBlock& block) override {
    if (layer.layer() == 0) m_seen->observed_tokens += static_cast<int>(block.count);
    EXPECT_EQ(block.hidden.extent(0), block.count);
    EXPECT_EQ(block.queries.extent(1), layer.heads() * group);
    const auto queries = on_host(block.queries);
    for (std::int64_t i = 0; i < block.count; ++i) {
      for (int q = 0; q < layer.heads() * group; ++q) {
        m_queries[{layer.layer(), block.first + i, q}] = queries(i, q, dim - 1);
      }
    }
    if (!m_needs.log_sum_exp) return;
    if (block.first == layer.extents().tokens - layer.extents().new_tokens) {
      m_mass = Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>("mass", layer.heads(),
                                                                       layer.most_rows());
    }
    layer.attention_mass(block, MassReduction::sum, m_mass);
  }

  void score(PolicyLayer& layer, const ScoreView& scores) override {
    ++m_seen->scored;
    const auto& extents = layer.extents();
    const auto out = Kokkos::create_mirror_view(scores);
    EXPECT_GE(scores.extent(1), layer.most_rows());
    for (int h = 0; h < layer.heads(); ++h) {
      const std::int64_t rows = layer.rows(h);
      const auto positions = on_host(layer.positions(h));
      const auto keys = on_host(layer.keys(h));
      const float last = on_host(layer.values(h, rows - 1, 1))(0, 3);
      const auto values = on_host(layer.values(h));
      EXPECT_EQ(last, values(rows - 1, 3));
      EXPECT_EQ(positions(rows - 1), extents.tokens - 1);
      for (std::int64_t i = 0; i < rows; ++i) {
        if (i > 0) {
          EXPECT_LT(positions(i - 1), positions(i));
        }
        out(h, i) = made_up_score(layer.layer(), extents.heads[h], positions(i));
        // A row is the same whenever it is shown.
        const auto key = std::make_tuple(layer.layer(), extents.heads[h], positions(i));
        const std::vector<float> row = {keys(i, 0), keys(i, dim - 1), values(i, 1)};
        const auto [known, is_new] = m_rows.emplace(key, row);
        if (!is_new) {
          EXPECT_EQ(known->second, row);
        }
      }
      const auto cached = on_host(layer.cached_scores(h));
      EXPECT_LE(cached.extent(0), rows - extents.new_tokens);
      for (std::size_t i = 0; i < cached.extent(0); ++i) {
        m_seen->worst_cached =
            std::max<double>(m_seen->worst_cached, std::abs(cached(i) - out(h, i)));
      }
      if (m_needs.log_sum_exp) {
        // Probabilities of a query head sum to 1.
        const auto mass = on_host(m_mass);
        double sum = 0;
        for (std::int64_t i = 0; i < rows; ++i) sum += mass(h, i);
        m_seen->worst_mass =
            std::max(m_seen->worst_mass, std::abs(sum / (group * extents.new_tokens) - 1));
      }
    }
    if (m_needs.recent > 0) {
      const TokenBlock recent = layer.recent();
      if (layer.layer() == 0) {
        m_seen->recent_first.push_back(recent.first);
        m_seen->recent_count.push_back(recent.count);
      }
      const auto queries = on_host(recent.queries);
      for (std::int64_t i = 0; i < recent.count && m_needs.blocks; ++i) {
        for (int q = 0; q < layer.heads() * group; ++q) {
          const auto known = m_queries.find({layer.layer(), recent.first + i, q});
          if (known == m_queries.end()) continue;
          m_seen->worst_query = std::max<double>(m_seen->worst_query,
                                                 std::abs(queries(i, q, dim - 1) - known->second));
        }
      }
    }
    Kokkos::deep_copy(scores, out);
  }

 private:
  PolicyNeeds m_needs;
  Seen* m_seen;
  Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> m_mass;
  std::map<std::tuple<int, std::int64_t, int>, float> m_queries;
  std::map<std::tuple<int, int, std::int64_t>, std::vector<float>> m_rows;
};

const PolicyInfo& probe_info(bool judges_tokens = true) {
  const auto make = [](bool judges) {
    PolicyInfo made;
    made.name = "probe";
    made.judges_tokens = judges;
    return made;
  };
  static const PolicyInfo judge = make(true), scorer_of_all = make(false);
  return judges_tokens ? judge : scorer_of_all;
}

std::shared_ptr<const PolicyChoice> probe(const Budget& budget, Seen* seen,
                                          const PolicyNeeds& needs = {}) {
  auto choice = std::make_shared<PolicyChoice>();
  choice->name = "probe";
  choice->info = &probe_info();
  choice->budget = budget;
  choice->make = [=] { return std::make_unique<Probe>(needs, seen); };
  return choice;
}

Budget by_ratio(double ratio, Budget::Pool pool = Budget::Pool::head) {
  Budget budget;
  budget.amount = Budget::Amount::evict_ratio;
  budget.evict_ratio = ratio;
  budget.pool = pool;
  budget.safeguard = 0;
  return budget;
}

class Policies : public testing::Test {
 protected:
  Policies()
      : comm(Communicator::world()),
        partition(HeadPartition::even(layers, kv_heads, comm.size())),
        model(std::make_shared<const Model>(
            Model::load("", config, DType::f32, partition, comm.rank(), {3}))) {
    options.pruning.mode = PruneMode::prefill;
    options.pruning.window = 8;
    options.page_rows = 4;
  }

  std::unique_ptr<Generator> generator() {
    return Generator::create(model, nullptr, options, comm);
  }

  /// Positions of this rank's heads by (layer, head of the model).
  std::map<std::pair<int, int>, std::vector<std::int64_t>> kept(Engine& engine,
                                                                SequenceId sequence) {
    std::map<std::pair<int, int>, std::vector<std::int64_t>> positions;
    engine.gather_pages(sequence);
    for (int l = 0; l < layers; ++l) {
      const auto& heads = partition.heads(l, comm.rank());
      for (std::size_t h = 0; h < heads.size(); ++h) {
        positions[{l, heads[h]}] = engine.positions(sequence, l, static_cast<int>(h));
      }
    }
    return positions;
  }
  std::map<std::pair<int, int>, std::vector<std::int64_t>> kept(Generator& from) {
    return kept(from.engine(), from.sequence());
  }

  /// The best `keep` of a pool, by (score, order, position).
  static std::map<std::pair<int, int>, std::vector<std::int64_t>> best(
      const std::map<std::pair<int, int>, std::vector<std::int64_t>>& rows, std::int64_t keep) {
    std::vector<std::tuple<float, int, int, std::int64_t>> all;
    for (const auto& [place, positions] : rows) {
      for (const std::int64_t p : positions) {
        all.emplace_back(-made_up_score(place.first, place.second, p), place.first, place.second,
                         p);
      }
    }
    std::sort(all.begin(), all.end());
    std::map<std::pair<int, int>, std::vector<std::int64_t>> result;
    for (const auto& [place, positions] : rows) result[place];
    for (std::int64_t i = 0; i < keep; ++i) {
      const auto& [score, layer, head, position] = all[i];
      result[{layer, head}].push_back(position);
    }
    for (auto& [place, positions] : result) std::sort(positions.begin(), positions.end());
    return result;
  }

  static std::vector<std::int64_t> up_to(std::int64_t tokens) {
    std::vector<std::int64_t> positions(tokens);
    std::iota(positions.begin(), positions.end(), 0);
    return positions;
  }

  /// What a budget leaves of heads that hold `rows` each, after `tokens` tokens.
  std::map<std::pair<int, int>, std::vector<std::int64_t>> chosen(
      const std::map<std::pair<int, int>, std::vector<std::int64_t>>& rows, const Budget& budget,
      std::int64_t tokens) const {
    const std::int64_t n =
        std::max<std::int64_t>(1, static_cast<std::int64_t>(tokens * (1 - budget.evict_ratio)));
    std::map<std::pair<int, int>, std::vector<std::int64_t>> result;
    if (budget.pool == Budget::Pool::model) return best(rows, n * layers * kv_heads);
    for (int l = 0; l < layers; ++l) {
      std::map<std::pair<int, int>, std::vector<std::int64_t>> of_layer;
      for (int h = 0; h < kv_heads; ++h) {
        const auto& own = rows.at({l, h});
        if (budget.pool == Budget::Pool::head) {
          result.merge(best({{{l, h}, own}},
                            std::min<std::int64_t>(n, static_cast<std::int64_t>(own.size()))));
        } else {
          of_layer[{l, h}] = own;
        }
      }
      if (budget.pool == Budget::Pool::layer) result.merge(best(of_layer, n * kv_heads));
    }
    return result;
  }

  std::map<std::pair<int, int>, std::vector<std::int64_t>> everything(std::int64_t tokens) const {
    std::map<std::pair<int, int>, std::vector<std::int64_t>> rows;
    for (int l = 0; l < layers; ++l) {
      for (int h = 0; h < kv_heads; ++h) rows[{l, h}] = up_to(tokens);
    }
    return rows;
  }

  /// This rank's part.
  std::map<std::pair<int, int>, std::vector<std::int64_t>> mine(
      const std::map<std::pair<int, int>, std::vector<std::int64_t>>& all) const {
    std::map<std::pair<int, int>, std::vector<std::int64_t>> result;
    for (int l = 0; l < layers; ++l) {
      for (const int h : partition.heads(l, comm.rank())) result[{l, h}] = all.at({l, h});
    }
    return result;
  }

  Communicator comm;
  ModelConfig config = make_config();
  HeadPartition partition;
  std::shared_ptr<const Model> model;
  CacheOptions options;
  Seen seen;
};

// More than a block of tokens, so that blocks meet; every pool; what is observed in two ways.
TEST_F(Policies, ChooseAfterTheContext) {
  const int tokens = 700;
  for (const auto pool : {Budget::Pool::head, Budget::Pool::layer, Budget::Pool::model}) {
    for (const bool observes : {true, false}) {
      const Budget budget = by_ratio(0.6, pool);
      PolicyNeeds needs;
      needs.blocks = needs.log_sum_exp = observes;
      needs.recent = 20;
      options.policy = probe(budget, &seen, needs);
      const auto run = generator();
      run->prefill(some_tokens(tokens), false);
      EXPECT_EQ(kept(*run), mine(chosen(everything(tokens), budget, tokens)));
      const CacheReport report = run->report();
      EXPECT_EQ(report.tokens, tokens);
      EXPECT_NEAR(report.evict_ratio(), 0.6, 1e-9);
      EXPECT_GE(report.score_seconds, 0);
    }
  }
  EXPECT_EQ(seen.scored, 6 * layers);
  EXPECT_EQ(seen.observed_tokens, 3 * tokens);
  EXPECT_LT(seen.worst_mass, 1e-4);
  EXPECT_EQ(seen.worst_query, 0);
  EXPECT_EQ(seen.recent_first, std::vector<std::int64_t>(6, tokens - 20));
}

// Shorter than the window: rows of the ring go too.
TEST_F(Policies, ChooseFromShortContexts) {
  const Budget budget = by_ratio(0.5);
  options.policy = probe(budget, &seen);
  for (const int tokens : {1, 2, 7}) {
    const auto run = generator();
    run->prefill(some_tokens(tokens), false);
    EXPECT_EQ(kept(*run), mine(chosen(everything(tokens), budget, tokens))) << tokens;
  }
}

// True blocks: after each chunk the pool is cut to its share of the tokens so far.
TEST_F(Policies, ChooseAfterEachChunk) {
  options.pruning.prefill = PrefillMode::sparse;
  options.pruning.chunk = 37;
  const int tokens = 150;
  for (const auto pool : {Budget::Pool::head, Budget::Pool::layer, Budget::Pool::model}) {
    const Budget budget = by_ratio(0.7, pool);
    PolicyNeeds needs;
    needs.recent = 50;
    needs.blocks = true;
    seen = Seen();
    options.policy = probe(budget, &seen, needs);
    const auto run = generator();
    run->prefill(some_tokens(tokens), false);
    auto rows = everything(0);
    for (std::int64_t begin = 0; begin < tokens; begin += options.pruning.chunk) {
      const std::int64_t end = std::min<std::int64_t>(tokens, begin + options.pruning.chunk);
      for (auto& [place, positions] : rows) {
        for (std::int64_t p = begin; p < end; ++p) positions.push_back(p);
      }
      rows = chosen(rows, budget, end);
    }
    EXPECT_EQ(kept(*run), mine(rows));
    EXPECT_EQ(seen.worst_cached, 0);
    EXPECT_EQ(seen.worst_query, 0);
    EXPECT_EQ(seen.recent_first, (std::vector<std::int64_t>{0, 24, 61, 98, 100}));
  }
}

// Every n steps after the context, of which the question is one.
TEST_F(Policies, ChooseWhileGenerating) {
  const int tokens = 60, question = 5, new_tokens = 12;
  options.pruning.decode.every = 4;
  for (const bool by_count : {true, false}) {
    options.pruning.decode.keep.reset();
    options.pruning.decode.evict_ratio.reset();
    if (by_count) {
      options.pruning.decode.keep = 20;
    } else {
      options.pruning.decode.evict_ratio = 0.75;
    }
    PolicyNeeds needs;
    needs.recent = 9;
    seen = Seen();
    options.policy = probe(by_ratio(0), &seen, needs);
    const auto run = generator();
    run->prefill(some_tokens(tokens), true);
    std::map<std::pair<int, int>, std::vector<std::int64_t>> first;
    for (int answer = 0; answer < 2; ++answer) {
      AnswerOptions how;
      how.max_new_tokens = new_tokens;
      const Answer got = run->answer(some_tokens(question, 1), how);
      auto rows = everything(tokens);
      std::int64_t now = tokens;
      // The last token is generated from, and not fed back.
      for (int step = 1; step <= new_tokens; ++step) {
        const std::int64_t end = now + (step == 1 ? question : 1);
        for (auto& [place, positions] : rows) {
          for (std::int64_t p = now; p < end; ++p) positions.push_back(p);
        }
        now = end;
        if (step % 4 != 0) continue;
        Budget budget = by_ratio(0.75);
        // By a count: as many of now.
        if (by_count) budget.evict_ratio = 1 - (20 + 0.5) / static_cast<double>(now);
        rows = chosen(rows, budget, now);
      }
      EXPECT_EQ(kept(*run), mine(rows)) << by_count << " answer " << answer;
      EXPECT_EQ(got.cache.tokens, now);
    }
    EXPECT_EQ(seen.worst_cached, 0);
  }
}

// Answers far longer than the budget: a head never has more rows than a cut leaves and the tokens
// between two cuts, and the cache stops growing.
TEST_F(Policies, KeepLongAnswersWithinTheBudget) {
  const std::int64_t keep = 24, every = 6, new_tokens = 40 * every;
  options.pruning.decode = {every, keep, {}};
  const PolicySetup setup{config, partition, DType::f32, {}, comm};
  Budget budget;
  budget.amount = Budget::Amount::keep_tokens;
  budget.keep_tokens = keep;
  for (const char* name :
       {"h2o", "tova", "snapkv:window=4", "keydiff", "r-kv:window=4", "r-kv:window=4+kvcrush",
        "lazy-eviction:window=4", "tri-attention", "dropkv:window=4"}) {
    options.policy = std::make_shared<PolicyChoice>(
        make_policy(parse_policy(name), budget, std::nullopt, setup));
    const auto engine = Engine::create(model, nullptr, options, comm);
    const SequenceId sequence = engine->add_sequence();
    engine->step(
        StepBatch(sequence, some_tokens(50), engine->rule(StepPart::context), StepOutput::none));
    std::int64_t early = 0;
    for (std::int64_t step = 1; step <= new_tokens; ++step) {
      const std::vector<TokenId> token = {static_cast<TokenId>(step * step % vocabulary)};
      engine->step(
          StepBatch(sequence, token, engine->rule(StepPart::generated), StepOutput::argmax));
      for (const auto& [place, positions] : kept(*engine, sequence)) {
        ASSERT_EQ(positions.size(), static_cast<std::size_t>(keep + step % every))
            << name << " step " << step;
        if (step % every != 0) {
          EXPECT_EQ(positions.back(), 50 + step - 1);
        }
      }
      const CacheReport report = engine->report(sequence);
      if (step == 4 * every) early = report.peak_allocated_bytes;
      if (step == new_tokens) {
        EXPECT_EQ(report.peak_allocated_bytes, early) << name;
      }
    }
    EXPECT_EQ(engine->tokens(sequence), 50 + new_tokens);
  }
}

/// Shows the scores of a policy that scores rows by their age.
class AgingScores final : public Policy {
 public:
  /// (layer, head of the model, position)
  using Shares = std::map<std::tuple<int, int, std::int64_t>, float>;

  AgingScores(std::unique_ptr<Policy> inner, Shares* shares)
      : m_inner(std::move(inner)), m_shares(shares) {}
  PolicyNeeds needs() const override { return m_inner->needs(); }
  void observe(PolicyLayer& layer, const TokenBlock& block) override {
    m_inner->observe(layer, block);
  }
  void score(PolicyLayer& layer, const ScoreView& scores) override {
    m_inner->score(layer, scores);
    const auto found = on_host(scores);
    for (int h = 0; h < layer.heads(); ++h) {
      const auto positions = on_host(layer.positions(h));
      for (std::int64_t r = 0; r < layer.rows(h); ++r) {
        const auto age = static_cast<float>(layer.extents().tokens + 1 - positions(r));
        const auto [share, is_new] = m_shares->try_emplace(
            {layer.layer(), layer.extents().heads[h], positions(r)}, found(h, r) / age);
        if (is_new) continue;
        EXPECT_NEAR(found(h, r), share->second * age, 1e-6 * std::fabs(found(h, r)));
      }
    }
  }

 private:
  std::unique_ptr<Policy> m_inner;
  Shares* m_shares;
};

// Each cut judges all rows by their age at that time, whatever the parts of the context were.
TEST_F(Policies, JudgeAgingRowsAnew) {
  const std::int64_t keep = 20, every = 5, context = 60, new_tokens = 43;
  const test::SharedFolder folder;
  const auto file = folder / "gates.safetensors";
  comm.agree_on_root([&] {
    test::write_safetensors(file,
                            test::retention_gates(false, layers, kv_heads, config.hidden_size));
  });
  options.pruning.decode = {every, keep, {}};
  const PolicySetup setup{config, partition, DType::f32, {}, comm};
  Budget budget;
  budget.amount = Budget::Amount::keep_tokens;
  budget.keep_tokens = keep;
  const auto choice = std::make_shared<PolicyChoice>(
      make_policy(parse_policy("trim-kv:gates=" + file.string()), budget, std::nullopt, setup));
  AgingScores::Shares shares;
  choice->make = [make = choice->make, &shares] {
    return std::make_unique<AgingScores>(make(), &shares);
  };
  options.policy = choice;
  for (const std::int64_t chunk : {context, std::int64_t{17}}) {
    SCOPED_TRACE(chunk);
    shares.clear();
    auto rows = mine(everything(0));
    const auto add = [&](std::int64_t begin, std::int64_t end) {
      for (auto& [place, positions] : rows) {
        for (std::int64_t p = begin; p < end; ++p) positions.push_back(p);
      }
    };
    const auto cut = [&](std::int64_t tokens) {
      for (auto& [place, positions] : rows) {
        std::stable_sort(positions.begin(), positions.end(), [&](std::int64_t a, std::int64_t b) {
          const auto score = [&](std::int64_t p) {
            return shares.at({place.first, place.second, p}) * static_cast<float>(tokens + 1 - p);
          };
          return score(a) > score(b);
        });
        positions.resize(std::min(positions.size(), static_cast<std::size_t>(keep)));
        std::sort(positions.begin(), positions.end());
      }
    };
    options.pruning.prefill = chunk < context ? PrefillMode::sparse : PrefillMode::dense;
    const auto engine = Engine::create(model, nullptr, options, comm);
    const SequenceId sequence = engine->add_sequence();
    const std::vector<TokenId> text = some_tokens(static_cast<int>(context));
    for (std::int64_t begin = 0; begin < context; begin += chunk) {
      const std::int64_t end = std::min(context, begin + chunk);
      engine->step(StepBatch(sequence, {text.begin() + begin, text.begin() + end},
                             engine->rule(StepPart::context), StepOutput::none));
      add(begin, end);
      cut(end);
      EXPECT_EQ(kept(*engine, sequence), rows) << end;
    }
    engine->end_context(sequence);
    for (std::int64_t step = 1; step <= new_tokens; ++step) {
      const std::vector<TokenId> token = {static_cast<TokenId>(step * step % vocabulary)};
      engine->step(
          StepBatch(sequence, token, engine->rule(StepPart::generated), StepOutput::argmax));
      add(context + step - 1, context + step);
      if (step % every == 0) cut(context + step);
      EXPECT_EQ(kept(*engine, sequence), rows) << context + step;
    }
  }
}

// Rows of questions and answers age too, if more context follows them.
TEST_F(Policies, JudgeAgingRowsAnewInLaterContexts) {
  const test::SharedFolder folder;
  const auto file = folder / "gates.safetensors";
  comm.agree_on_root([&] {
    test::write_safetensors(file,
                            test::retention_gates(false, layers, kv_heads, config.hidden_size));
  });
  const PolicySetup setup{config, partition, DType::f32, {}, comm};
  const auto choice = std::make_shared<PolicyChoice>(make_policy(
      parse_policy("trim-kv:gates=" + file.string()), by_ratio(0.5), std::nullopt, setup));
  AgingScores::Shares shares;
  choice->make = [make = choice->make, &shares] {
    return std::make_unique<AgingScores>(make(), &shares);
  };
  options.policy = choice;
  const auto engine = Engine::create(model, nullptr, options, comm);
  const SequenceId sequence = engine->add_sequence();
  const std::vector<TokenId> text = some_tokens(100);
  auto rows = mine(everything(0));
  std::int64_t tokens = 0;
  const auto run = [&](StepPart part, std::int64_t count, bool context_follows) {
    StepRule rule = engine->rule(part);
    rule.context_follows = context_follows;
    engine->step(StepBatch(sequence, {text.begin() + tokens, text.begin() + tokens + count}, rule,
                           StepOutput::none));
    for (auto& [place, positions] : rows) {
      for (std::int64_t p = tokens; p < tokens + count; ++p) positions.push_back(p);
    }
    tokens += count;
    if (part != StepPart::context) return;
    for (auto& [place, positions] : rows) {
      const auto score = [&, of = place](std::int64_t p) {
        return shares.at({of.first, of.second, p}) * static_cast<float>(tokens + 1 - p);
      };
      std::stable_sort(positions.begin(), positions.end(),
                       [&](std::int64_t a, std::int64_t b) { return score(a) > score(b); });
      positions.resize(static_cast<std::size_t>(tokens / 2));
      std::sort(positions.begin(), positions.end());
    }
  };
  run(StepPart::context, 40, false);
  EXPECT_EQ(kept(*engine, sequence), rows);
  run(StepPart::question, 10, true);
  run(StepPart::generated, 1, true);
  run(StepPart::generated, 19, true);
  EXPECT_EQ(kept(*engine, sequence), rows);
  engine->check_more_context(sequence, 20);
  run(StepPart::context, 20, false);
  EXPECT_EQ(kept(*engine, sequence), rows);
  // Nobody knows the scores of rows that no later context was expected to judge.
  run(StepPart::generated, 1, false);
  try {
    engine->check_more_context(sequence, 9);
    ADD_FAILURE() << "it may go on";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("scores in every step"), std::string::npos);
  }
}

// Between two cuts, a fork takes over the sums and queries that the next cut reads.
TEST_F(Policies, GiveForksWhatTheyHaveSeen) {
  const std::int64_t keep = 24, every = 6;
  options.pruning.decode = {every, keep, {}};
  const PolicySetup setup{config, partition, DType::f32, {}, comm};
  Budget budget;
  budget.amount = Budget::Amount::keep_tokens;
  budget.keep_tokens = keep;
  for (const char* name :
       {"h2o", "snapkv:window=4", "r-kv:window=4", "lazy-eviction:window=4", "tri-attention"}) {
    options.policy = std::make_shared<PolicyChoice>(
        make_policy(parse_policy(name), budget, std::nullopt, setup));
    const auto engine = Engine::create(model, nullptr, options, comm);
    std::vector<SequenceId> same = {engine->add_sequence()};
    engine->step(
        StepBatch(same[0], some_tokens(50), engine->rule(StepPart::context), StepOutput::none));
    for (std::int64_t step = 1; step <= 4 * every; ++step) {
      if (step == every + every / 2) same.push_back(engine->fork(same[0]));
      const std::vector<TokenId> token = {static_cast<TokenId>(step * step % vocabulary)};
      for (const SequenceId sequence : same) {
        engine->step(
            StepBatch(sequence, token, engine->rule(StepPart::generated), StepOutput::none));
      }
      EXPECT_EQ(kept(*engine, same.back()), kept(*engine, same[0])) << name << " step " << step;
    }
  }
}

// A threshold: rows are judged as they leave the window, those of generated tokens too.
TEST_F(Policies, JudgeByAThreshold) {
  const int tokens = 100, new_tokens = 20;
  Budget none;
  for (const bool always : {false, true}) {
    auto choice = std::make_shared<PolicyChoice>(*probe(none, &seen));
    choice->threshold = 250;
    options.policy = choice;
    options.pruning.mode = always ? PruneMode::always : PruneMode::prefill;
    const auto run = generator();
    run->prefill(some_tokens(tokens), false);
    AnswerOptions how;
    how.max_new_tokens = new_tokens;
    run->answer({}, how);
    const std::int64_t end = tokens + new_tokens - 1;
    for (const auto& [place, positions] : kept(*run)) {
      std::vector<std::int64_t> expected;
      for (std::int64_t p = 0; p < end; ++p) {
        const bool judged = p < (always ? end : tokens) - options.pruning.window;
        if (!judged || made_up_score(place.first, place.second, p) >= 250) expected.push_back(p);
      }
      EXPECT_EQ(positions, expected) << always;
    }
  }
}

// A policy that scores all rows: each is judged by the score that it has, wherever others went.
TEST_F(Policies, JudgeByAThresholdInChunks) {
  const int tokens = 150;
  options.pruning.prefill = PrefillMode::sparse;
  options.pruning.chunk = 5;
  for (const bool judges_tokens : {true, false}) {
    auto choice = std::make_shared<PolicyChoice>(*probe(Budget(), &seen));
    choice->info = &probe_info(judges_tokens);
    choice->threshold = 250;
    options.policy = choice;
    const auto run = generator();
    run->prefill(some_tokens(tokens), false);
    for (const auto& [place, positions] : kept(*run)) {
      std::vector<std::int64_t> expected;
      for (std::int64_t p = 0; p < tokens; ++p) {
        const bool judged = p < tokens - options.pruning.window;
        if (!judged || made_up_score(place.first, place.second, p) >= 250) expected.push_back(p);
      }
      EXPECT_EQ(positions, expected) << judges_tokens;
    }
  }
}

// Query-aware: context and question are one step.
TEST_F(Policies, ChooseAfterTheQuestion) {
  options.pruning.moment = PruneMoment::question;
  const Budget budget = by_ratio(0.5, Budget::Pool::layer);
  options.policy = probe(budget, &seen);
  const auto run = generator();
  run->prefill(some_tokens(50), true);
  EXPECT_EQ(run->report().tokens, 0);
  std::vector<TokenId> first;
  for (int i = 0; i < 3; ++i) {
    AnswerOptions how;
    how.max_new_tokens = 3;
    const Answer answer = run->answer(some_tokens(9, i % 2), how);
    EXPECT_EQ(answer.pruned.tokens, 59);
    EXPECT_NEAR(answer.pruned.evict_ratio(), 1 - 29.0 / 59, 1e-9);
    if (i == 0) first = answer.tokens;
    if (i == 2) {
      EXPECT_EQ(answer.tokens, first);
    }
  }
  EXPECT_EQ(seen.scored, 3 * layers);
}

// The first `sink` positions stay, and count.
TEST_F(Policies, KeepSinks) {
  options.pruning.sink = 5;
  const Budget budget = by_ratio(0.75);
  for (const bool is_sparse : {false, true}) {
    options.pruning.prefill = is_sparse ? PrefillMode::sparse : PrefillMode::dense;
    options.pruning.chunk = 30;
    options.policy = probe(budget, &seen);
    const auto run = generator();
    run->prefill(some_tokens(100), false);
    for (const auto& [place, positions] : kept(*run)) {
      ASSERT_EQ(positions.size(), 25U);
      for (int p = 0; p < 5; ++p) EXPECT_EQ(positions[p], p);
    }
  }
}

class Misbehaves final : public Policy {
 public:
  void score(PolicyLayer& layer, const ScoreView& scores) override {
    const auto out = Kokkos::create_mirror_view(scores);
    for (int h = 0; h < layer.heads(); ++h) {
      for (std::int64_t i = 0; i < layer.rows(h); ++i) {
        out(h, i) = i == 13 ? std::nanf("") : static_cast<float>(i);
      }
    }
    Kokkos::deep_copy(scores, out);
  }
};

// What has no finite score stays and is counted, at whatever moment rows are chosen.
TEST_F(Policies, CountScoresThatAreNoNumbers) {
  for (const auto pool : {Budget::Pool::head, Budget::Pool::model}) {
    auto choice = std::make_shared<PolicyChoice>(*probe(by_ratio(0.8, pool), &seen));
    choice->make = [] { return std::make_unique<Misbehaves>(); };
    options.policy = choice;
    const auto run = generator();
    run->prefill(some_tokens(100), false);
    EXPECT_EQ(run->report().non_finite_scores, layers * kv_heads);
    for (const auto& [place, positions] : kept(*run)) EXPECT_EQ(positions.front(), 13);
  }
}

// Newest rows score best, so that no cut takes any of the ring.
TEST_F(Policies, CloseUpPositionsAfterChunks) {
  options.pruning.prefill = PrefillMode::sparse;
  options.pruning.chunk = 40;
  auto choice = std::make_shared<PolicyChoice>(*probe(by_ratio(0.5), &seen));
  struct Newest final : Policy {
    void score(PolicyLayer& layer, const ScoreView& scores) override {
      const auto out = Kokkos::create_mirror_view(scores);
      for (int h = 0; h < layer.heads(); ++h) {
        for (std::int64_t i = 0; i < layer.rows(h); ++i) out(h, i) = static_cast<float>(i);
      }
      Kokkos::deep_copy(scores, out);
    }
  };
  choice->make = [] { return std::make_unique<Newest>(); };
  choice->rerotate = true;
  options.policy = choice;
  const auto run = generator();
  run->prefill(some_tokens(100), true);
  for (const auto& [place, positions] : kept(*run)) EXPECT_EQ(positions, up_to(50));
  EXPECT_EQ(run->engine().tokens(run->sequence()), 50);
  EXPECT_EQ(run->report().tokens, 100);
  AnswerOptions how;
  how.max_new_tokens = 3;
  EXPECT_EQ(run->answer(some_tokens(4, 2), how).cache.tokens, 106);
}

// Sequences of one step do not see one another, whatever becomes of each.
TEST_F(Policies, ServeSequencesSideBySide) {
  const Budget budget = by_ratio(0.6);
  options.policy = probe(budget, &seen);
  const auto engine = Engine::create(model, nullptr, options, comm);
  const SequenceId a = engine->add_sequence(), b = engine->add_sequence();
  StepBatch batch;
  batch.add(a, some_tokens(300), engine->rule(StepPart::context), StepOutput::argmax);
  batch.add(b, some_tokens(40, 5), engine->rule(StepPart::context), StepOutput::argmax);
  engine->step(batch);
  EXPECT_EQ(kept(*engine, a), mine(chosen(everything(300), budget, 300)));
  EXPECT_EQ(kept(*engine, b), mine(chosen(everything(40), budget, 40)));
  const SequenceId c = engine->fork(a);
  engine->free_sequence(a);
  engine->step(StepBatch(c, some_tokens(3), engine->rule(StepPart::question), StepOutput::none));
  EXPECT_EQ(engine->tokens(c), 303);
}

// What is called recent is so: of this layer, and without a gap.
TEST_F(Policies, KnowWhichQueriesAreRecent) {
  PolicyNeeds needs;
  needs.recent = 30;
  needs.blocks = true;
  Budget none;
  for (const bool every_layer : {false, true}) {
    options.pruning.decode = {};
    if (every_layer) options.pruning.decode = {1, 1000, {}};
    seen = Seen();
    auto choice = std::make_shared<PolicyChoice>(*probe(by_ratio(0.1), &seen, needs));
    options.policy = choice;
    const auto engine = Engine::create(model, nullptr, options, comm);
    const SequenceId sequence = engine->add_sequence();
    const auto run = [&](int count, StepPart part) {
      engine->step(StepBatch(sequence, some_tokens(count), engine->rule(part), StepOutput::none));
    };
    run(40, StepPart::context);
    run(10, StepPart::context);
    run(5, StepPart::other);
    run(7, StepPart::context);
    EXPECT_EQ(seen.worst_query, 0);
    EXPECT_EQ(seen.recent_first, every_layer ? (std::vector<std::int64_t>{10, 20, 55})
                                             : (std::vector<std::int64_t>{10, 40, 55}));
    EXPECT_EQ(seen.recent_count, every_layer ? (std::vector<std::int64_t>{30, 30, 7})
                                             : (std::vector<std::int64_t>{30, 10, 7}));
  }
}

// A limit on one rank's cache ends the step on all; it can be done again, whole or in part.
TEST_F(Policies, LeaveSequencesAsTheyWereWithoutMemory) {
  PolicyNeeds needs;
  needs.recent = 30;
  needs.blocks = needs.log_sum_exp = true;
  options.policy = probe(by_ratio(0.1), &seen, needs);
  options.pruning.decode.every = 2;
  options.pruning.decode.keep = 1000;
  const auto undisturbed = Engine::create(model, nullptr, options, comm);
  const SequenceId twin = undisturbed->add_sequence();
  const auto step = [&](Engine& engine, SequenceId sequence, int count, StepPart part) {
    return engine
        .step(StepBatch(sequence, some_tokens(count), engine.rule(part), StepOutput::argmax))
        .front()
        .argmax;
  };
  const TokenId first = step(*undisturbed, twin, 50, StepPart::context);
  // On the last rank, for each head: two rings, another sequence's pages and half of its own.
  std::size_t heads = 0;
  for (int l = 0; l < layers; ++l) heads += partition.heads(l, comm.size() - 1).size();
  const std::size_t ring = options.pruning.window * (2 * dim + 1) * sizeof(float);
  const std::size_t page = options.page_rows * (2 * dim + 2) * sizeof(float);
  if (comm.rank() == comm.size() - 1) options.kv_limit = heads * (2 * ring + (9 + 6) * page);
  const auto engine = Engine::create(model, nullptr, options, comm);
  const SequenceId other = engine->add_sequence(), own = engine->add_sequence();
  step(*engine, other, 40, StepPart::context);
  const auto before = kept(*engine, own);
  EXPECT_THROW(step(*engine, own, 50, StepPart::context), StepOutOfMemory);
  EXPECT_EQ(engine->tokens(own), 0);
  EXPECT_EQ(kept(*engine, own), before);
  engine->free_sequence(other);
  EXPECT_EQ(step(*engine, own, 50, StepPart::context), first);
  EXPECT_EQ(kept(*engine, own), kept(*undisturbed, twin));
  // A question that does not fit, then a part of it.
  EXPECT_THROW(step(*engine, own, 60, StepPart::question), StepOutOfMemory);
  EXPECT_EQ(engine->tokens(own), 50);
  EXPECT_EQ(kept(*engine, own), kept(*undisturbed, twin));
  seen.recent_count.clear();
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(step(*engine, own, 3, StepPart::question),
              step(*undisturbed, twin, 3, StepPart::question));
  }
  EXPECT_EQ(kept(*engine, own), kept(*undisturbed, twin));
  EXPECT_EQ(seen.worst_query, 0);
  EXPECT_EQ(seen.recent_count.size(), 2u);
}

/// After scoring the last layer, or before context_scores of the first one, one rank's n-th
/// allocation of at least some bytes fails.
class Exhausting final : public Policy {
 public:
  using Failing = std::optional<test::FailingAllocation>;
  struct Plan {
    std::int64_t n = -1;
    std::size_t least_bytes = 0;
    Failing failing;
  };
  explicit Exhausting(Plan* plan, std::unique_ptr<Policy> inner = {})
      : m_plan(plan), m_inner(std::move(inner)) {}
  PolicyNeeds needs() const override { return m_inner ? m_inner->needs() : PolicyNeeds(); }
  void observe(PolicyLayer& layer, const TokenBlock& block) override {
    m_inner->observe(layer, block);
  }
  void score(PolicyLayer& layer, const ScoreView& scores) override {
    Kokkos::deep_copy(scores, 1.0F);
    if (layer.layer() + 1 == layers) fail();
  }
  Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> context_scores(const ExecutionSpace& exec,
                                                                         const Communicator& ranks,
                                                                         int layer) override {
    if (layer == 0) fail();
    return m_inner->context_scores(exec, ranks, layer);
  }

 private:
  void fail() {
    if (m_plan->n >= 0) m_plan->failing.emplace(m_plan->n, m_plan->least_bytes);
  }
  Plan* m_plan;
  std::unique_ptr<Policy> m_inner;
};

// Where rows are chosen and stored, a rank that fails tells the others.
TEST_F(Policies, ChooseOnEveryRankOrOnNone) {
  Exhausting::Plan plan;
  auto choice = std::make_shared<PolicyChoice>(*probe(by_ratio(0.5), &seen));
  choice->make = [&] { return std::make_unique<Exhausting>(&plan); };
  options.policy = choice;
  const auto engine = Engine::create(model, nullptr, options, comm);
  const SequenceId sequence = engine->add_sequence();
  const StepBatch batch(sequence, some_tokens(40), engine->rule(StepPart::context),
                        StepOutput::argmax);
  int failures = 0;
  for (std::int64_t tried = 0;; ++tried, ++failures) {
    plan.n = comm.rank() == comm.size() - 1 ? tried : -1;
    bool done = true;
    try {
      engine->step(batch);
    } catch (const StepOutOfMemory&) {
      done = false;
    }
    plan.failing.reset();
    if (done) break;
    ASSERT_EQ(engine->tokens(sequence), 0);
    ASSERT_LT(tried, 500);
  }
  EXPECT_GT(failures, 5);
  for (const auto& [place, positions] : kept(*engine, sequence)) EXPECT_EQ(positions, up_to(20));
}

// The same of memory that grows with the rows, where ranks sum between allocations.
TEST_F(Policies, ChooseTogetherOnEveryRankOrOnNone) {
  const PolicySetup setup{config, partition, DType::f32, {}, comm};
  const auto ends = [&](Engine& engine, SequenceId sequence) {
    engine.step(
        StepBatch(sequence, some_tokens(400), engine.rule(StepPart::context), StepOutput::none));
    engine.end_context(sequence);
  };
  for (const char* name : {"knorm+global:alpha=0.2", "knorm+ada", "knorm+chunkkv:length=2",
                           "kvcompose", "kvcompose:structured=off"}) {
    SCOPED_TRACE(name);
    Exhausting::Plan plan;
    plan.least_bytes = 1500;
    const auto choice = std::make_shared<PolicyChoice>(
        make_policy(parse_policy(name), by_ratio(0.5), std::nullopt, setup));
    const bool repeats = choice->info->repeats_context;
    choice->make = [&plan, repeats, make = choice->make] {
      return std::make_unique<Exhausting>(&plan, repeats ? make() : nullptr);
    };
    options.policy = choice;
    const auto engine = Engine::create(model, nullptr, options, comm);
    int failures = 0;
    for (std::int64_t tried = 0;; ++tried, ++failures) {
      plan.n = comm.rank() == comm.size() - 1 ? tried : -1;
      const SequenceId sequence = engine->add_sequence();
      bool done = true;
      try {
        ends(*engine, sequence);
      } catch (const AgreedError&) {
        done = false;
      }
      plan.failing.reset();
      engine->free_sequence(sequence);
      if (done) break;
      ASSERT_LT(tried, 500);
    }
    EXPECT_GT(failures, 0);
  }
}

/// Compares output_weights with what a product with a row of the identity gives.
class WeightReader final : public Policy {
 public:
  explicit WeightReader(std::shared_ptr<const Model> model) : m_model(std::move(model)) {}
  PolicyNeeds needs() const override {
    PolicyNeeds needs;
    needs.output_weights = true;
    return needs;
  }
  void score(PolicyLayer& layer, const ScoreView& scores) override {
    Kokkos::deep_copy(scores, 1.0F);
    const linalg::LinearWeights& whole = m_model->weights().layers[layer.layer()].o;
    for (int q = 0; q < layer.heads() * group; ++q) {
      const auto found = on_host(layer.output_weights(q));
      const linalg::Matrix x("kvzap::test::identity", dim, whole.inputs());
      const auto identity = Kokkos::create_mirror_view(x);
      for (int d = 0; d < dim; ++d) identity(d, q * dim + d) = 1;
      Kokkos::deep_copy(x, identity);
      const linalg::Matrix y("kvzap::test::product", dim, whole.outputs());
      linalg::LinearMap()(layer.exec(), x, whole, linalg::ConstVector(), y);
      layer.exec().fence();
      const auto expected = on_host(y);
      for (int d = 0; d < dim; ++d) {
        for (std::int64_t i = 0; i < whole.outputs(); ++i) {
          ASSERT_EQ(found(d, i), expected(d, i)) << "query head " << q;
        }
      }
    }
  }

 private:
  std::shared_ptr<const Model> m_model;
};

template <class Value>
void read_output_weights(CacheOptions options, const ModelConfig& config,
                         const HeadPartition& partition, const Communicator& comm) {
  const auto model = std::make_shared<const Model>(
      Model::load("", config, DTypeOf<Value>::value, partition, comm.rank(), {3}));
  auto choice = std::make_shared<PolicyChoice>();
  choice->name = "probe";
  choice->info = &probe_info();
  choice->budget = by_ratio(0.5);
  choice->make = [=] { return std::make_unique<WeightReader>(model); };
  options.policy = choice;
  const auto engine = Engine::create(model, nullptr, options, comm);
  engine->step(StepBatch(engine->add_sequence(), some_tokens(9), engine->rule(StepPart::context),
                         StepOutput::none));
}

TEST_F(Policies, SeeTheOutputWeights) {
  for (const std::int64_t hidden : {40, 130}) {
    config.hidden_size = hidden;
    read_output_weights<float>(options, config, partition, comm);
    read_output_weights<half>(options, config, partition, comm);
    read_output_weights<bfloat16>(options, config, partition, comm);
  }
}

// Whichever allocation fails, those of a policy among them. (Among several ranks a policy's own
// failure ends the program.)
TEST_F(Policies, FailAsAWhole) {
  const auto alone = Communicator::self();
  const auto whole = HeadPartition::even(layers, kv_heads, 1);
  const auto small =
      std::make_shared<const Model>(Model::load("", config, DType::f32, whole, 0, {3}));
  const PolicySetup setup{config, whole, DType::f32, {}, alone};
  for (const char* name : {"h2o", "snapkv", "non-causal", "r-kv"}) {
    options.policy = std::make_shared<PolicyChoice>(
        make_policy(parse_policy(name), by_ratio(0.5), std::nullopt, setup));
    const auto engine = Engine::create(small, nullptr, options, alone);
    const auto undisturbed = Engine::create(small, nullptr, options, alone);
    const SequenceId own = engine->add_sequence(), twin = undisturbed->add_sequence();
    const auto batch = [&](SequenceId sequence) {
      return StepBatch(sequence, some_tokens(70), engine->rule(StepPart::context),
                       StepOutput::argmax);
    };
    const TokenId expected = undisturbed->step(batch(twin)).front().argmax;
    const StepBatch tried = batch(own);
    std::int64_t failures = 0;
    for (std::int64_t n = 0;; ++n) {
      std::optional<TokenId> got;
      try {
        const test::FailingAllocation failing(n);
        got = engine->step(tried).front().argmax;
      } catch (const StepOutOfMemory&) {
        ++failures;
      } catch (const std::bad_alloc&) {  // before the step has begun
      }
      if (got) {
        EXPECT_EQ(*got, expected);
        break;
      }
      ASSERT_EQ(engine->tokens(own), 0) << name << " allocation " << n;
      ASSERT_LT(n, 5000);
    }
    EXPECT_GT(failures, 20) << name;
    for (int l = 0; l < layers; ++l) {
      for (int h = 0; h < kv_heads; ++h) {
        EXPECT_EQ(engine->positions(own, l, h), undisturbed->positions(twin, l, h)) << name;
      }
    }
  }
}

TEST_F(Policies, AreRefusedWhereTheyHaveNoMeaning) {
  const auto refused = [&] {
    try {
      Engine::create(model, nullptr, options, comm);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  options.policy = probe(by_ratio(0.5), &seen);
  EXPECT_EQ(refused(), "");
  options.pruning.mode = PruneMode::always;
  EXPECT_NE(refused().find("decode_every"), std::string::npos);
  options.pruning.decode.every = 3;
  options.pruning.decode.evict_ratio = 0.5;
  EXPECT_EQ(refused(), "");
  options.policy = probe(Budget(), &seen);
  EXPECT_NE(refused().find("decode_every cuts"), std::string::npos);
  options.policy = probe(by_ratio(0.5), &seen);
  options.pruning.decode.evict_ratio = 1;
  EXPECT_NE(refused().find("less than 1"), std::string::npos);
  options.pruning.decode.evict_ratio = 0.5;
  options.pruning.prefill = PrefillMode::sparse;
  options.pruning.moment = PruneMoment::question;
  EXPECT_NE(refused().find("dense"), std::string::npos);
}

}  // namespace
}  // namespace kvzap
