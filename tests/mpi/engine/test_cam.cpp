// What cuts leave of kept values with +cam while a model generates, on any number of ranks: against
// attention and sums computed row by row.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <kvzap/engine/engine.hpp>
#include <map>
#include <string>
#include <vector>

#include "cam_reference.hpp"

namespace kvzap {
namespace {

using test::CamRows;
using test::CamRule;

constexpr int cam_layers = 3;
constexpr int cam_heads = 5;
constexpr int cam_dim = 16;
constexpr int cam_group = 2;

ModelConfig cam_config() {
  ModelConfig config{};
  config.architecture = "LlamaForCausalLM";
  config.hidden_size = 40;
  config.intermediate_size = 32;
  config.num_hidden_layers = cam_layers;
  config.num_attention_heads = cam_heads * cam_group;
  config.num_key_value_heads = cam_heads;
  config.head_dim = cam_dim;
  config.vocab_size = 61;
  config.max_position_embeddings = 4096;
  config.rms_norm_eps = 1e-6;
  config.rope_theta = 10000;
  config.attention_multiplier = 40;  // so that rows differ in attention
  return config;
}

std::vector<TokenId> cam_tokens(int count, int seed) {
  std::vector<TokenId> tokens;
  std::uint32_t state = 5U + static_cast<std::uint32_t>(seed);
  for (int i = 0; i < count; ++i) {
    state = state * 1664525U + 1013904223U;
    tokens.push_back(static_cast<TokenId>((state >> 10) % 61));
  }
  return tokens;
}

/// The heads of one sequence, as a policy has seen them.
struct Watched {
  struct Head {
    CamRows rows;                              // at the newest step
    std::map<std::int64_t, double> attention;  // position: sum so far
  };
  std::map<std::pair<int, int>, Head> heads;  // (layer, head of the model)
  bool is_in_decode = false;
  int fails_at = -1;  // layer
};

template <class View>
auto taken(PolicyLayer& layer, const View& view) {
  layer.exec().fence();
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), view);
  return std::vector(host.data(), host.data() + host.size());
}

auto copied(const TokenBlock::QueryView& queries) {
  const Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace> packed(
      "queries", queries.extent(0), queries.extent(1), queries.extent(2));
  Kokkos::deep_copy(packed, queries);
  return Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), packed);
}

/// Scores by a number that depends on the place of a row alone. Notes all rows, and the
/// probabilities that the last token of each step after the context gives them.
class Watching final : public Policy {
 public:
  explicit Watching(Watched* const* watched) : m_watched(watched) {}
  PolicyNeeds needs() const override {
    PolicyNeeds needs;
    needs.blocks = needs.every_step = true;
    return needs;
  }
  void observe(PolicyLayer& layer, const TokenBlock& block) override {
    Watched& seen = **m_watched;
    if (block.first + block.count < layer.extents().tokens) return;
    if (seen.fails_at == layer.layer()) throw Error("a test");
    if (!seen.is_in_decode) return;
    const auto queries = copied(block.queries);
    for (int h = 0; h < layer.heads(); ++h) {
      const auto keys = taken(layer, layer.keys(h));
      const auto positions = taken(layer, layer.positions(h));
      auto& sums = m_new[{layer.layer(), layer.extents().heads[h]}];
      for (int member = 0; member < cam_group; ++member) {
        std::vector<double> weights;
        double all = 0;
        for (std::size_t row = 0; row < positions.size(); ++row) {
          double score = 0;
          for (int d = 0; d < cam_dim; ++d) {
            score += static_cast<double>(queries(block.count - 1, h * cam_group + member, d)) *
                     keys[row * cam_dim + d];
          }
          weights.push_back(score / std::sqrt(cam_dim));
        }
        const double largest = *std::max_element(weights.begin(), weights.end());
        for (double& weight : weights) all += weight = std::exp(weight - largest);
        for (std::size_t row = 0; row < positions.size(); ++row) {
          sums[positions[row]] += weights[row] / all;
        }
      }
    }
  }
  void score(PolicyLayer& layer, const ScoreView& scores) override {
    const auto out = Kokkos::create_mirror_view(scores);
    for (int h = 0; h < layer.heads(); ++h) {
      const int number = layer.extents().heads[h];
      Watched::Head& head = (*m_watched)->heads[{layer.layer(), number}];
      CamRows& rows = head.rows;
      rows.layer = layer.layer();
      rows.head = number;
      rows.dim = cam_dim;
      rows.positions = taken(layer, layer.positions(h));
      rows.values = taken(layer, layer.values(h));
      for (const auto& [position, sum] : m_new[{layer.layer(), number}]) {
        head.attention[position] += sum;
      }
      m_new.erase({layer.layer(), number});
      rows.scores.clear();
      rows.attention.clear();
      for (std::size_t i = 0; i < rows.positions.size(); ++i) {
        auto x = static_cast<std::uint32_t>(rows.positions[i] * 64 + number * 8 + layer.layer());
        x = (x ^ (x >> 7)) * 0x9e3779b9U;
        rows.scores.push_back(static_cast<float>((x ^ (x >> 13)) % 50));
        rows.attention.push_back(head.attention[rows.positions[i]]);
        out(h, i) = rows.scores.back();
      }
    }
    Kokkos::deep_copy(scores, out);
  }

 private:
  Watched* const* m_watched;
  std::map<std::pair<int, int>, std::map<std::int64_t, double>> m_new;  // of this step
};

class CacheMerging : public testing::Test {
 protected:
  CacheMerging()
      : comm(Communicator::world()),
        partition(HeadPartition::even(cam_layers, cam_heads, comm.size())),
        model(std::make_shared<const Model>(
            Model::load("", config, DType::f32, partition, comm.rank(), {3}))) {
    options.pruning.mode = PruneMode::prefill;
    options.pruning.window = 8;
    options.page_rows = 4;
    options.pruning.decode.every = 4;
    options.pruning.decode.keep = 20;
    options.policy = watching("cam:window=5,seed=9");
  }

  std::shared_ptr<PolicyChoice> watching(const std::string& modifier,
                                         Budget::Pool pool = Budget::Pool::head) {
    static const PolicyInfo info = [] {
      PolicyInfo made;
      made.name = "watching";
      return made;
    }();
    Budget budget;
    budget.amount = Budget::Amount::evict_ratio;
    budget.evict_ratio = 0.5;
    const PolicySetup setup{config, partition, DType::f32, {}, comm};
    auto choice = std::make_shared<PolicyChoice>(
        make_policy(parse_policy("knorm+" + modifier), budget, {}, setup));
    choice->info = &info;
    choice->name = "watching";
    choice->budget.pool = pool;
    choice->budget.safeguard = 0;
    choice->make = [this] { return std::make_unique<Watching>(&watched); };
    return choice;
  }

  /// A sequence and what is expected of it.
  struct Text {
    SequenceId id = -1;
    Watched watched;
    int steps = 0;  // since the context or the last cut
    int cuts = 0;
  };

  static StepRule rule(Engine& engine, Text& text, StepPart part) {
    text.watched.is_in_decode = part != StepPart::context;
    return engine.rule(text.id, part);
  }
  Text begin(Engine& engine, int tokens, int seed) {
    Text text;
    text.id = engine.add_sequence();
    watched = &text.watched;
    engine.step(StepBatch(text.id, cam_tokens(tokens, seed), rule(engine, text, StepPart::context),
                          StepOutput::none));
    engine.end_context(text.id);
    return text;
  }

  /// A step, and a look at what the last cut has left of the rows before it.
  void step(Engine& engine, Text& text, int count, int seed) {
    const auto before = text.watched.heads;
    watched = &text.watched;
    engine.step(StepBatch(text.id, cam_tokens(count, seed),
                          rule(engine, text, count > 1 ? StepPart::question : StepPart::generated),
                          StepOutput::none));
    follow(text, before);
  }
  void follow(Text& text, const std::map<std::pair<int, int>, Watched::Head>& before) {
    if (text.steps == cut_every()) {
      text.steps = 0;
      ++text.cuts;
      for (const auto& [place, head] : before) {
        expect_cut(head.rows, text.watched.heads.at(place).rows);
      }
    }
    ++text.steps;
  }
  int cut_every() const { return static_cast<int>(options.pruning.decode.every); }

  void expect_cut(CamRows old, const CamRows& now) {
    SCOPED_TRACE(std::to_string(old.layer) + ", " + std::to_string(old.head));
    old.steps = cut_every();
    for (const std::int64_t position : old.positions) {
      old.keep.push_back(std::binary_search(now.positions.begin(), now.positions.end(), position));
    }
    const test::CamResult expected = test::cam_rows(old, cam_rule);
    drawn += expected.drawn;
    refused += expected.refused;
    if (expected.is_uncertain) return;
    std::size_t kept = 0;
    for (std::size_t row = 0; row < old.keep.size(); ++row) {
      if (!old.keep[row]) continue;
      ASSERT_EQ(now.positions.at(kept), old.positions[row]);
      for (int d = 0; d < cam_dim; ++d) {
        EXPECT_NEAR(now.values[kept * cam_dim + d], expected.values[row * cam_dim + d], rounding)
            << row;
      }
      ++kept;
    }
  }
  /// On all ranks together.
  void expect_drawn(std::int64_t least) const {
    EXPECT_GE(comm.all_reduce_sum(drawn), least);
    EXPECT_GE(comm.all_reduce_sum(refused), least / 10);
  }

  Communicator comm;
  ModelConfig config = cam_config();
  HeadPartition partition;
  std::shared_ptr<const Model> model;
  CacheOptions options;
  Watched* watched = nullptr;
  CamRule cam_rule = {5, 9};
  double rounding = 2e-5;
  std::int64_t drawn = 0, refused = 0;
};

TEST_F(CacheMerging, AtEachCutWhileGenerating) {
  for (const Budget::Pool pool : {Budget::Pool::head, Budget::Pool::layer, Budget::Pool::model}) {
    SCOPED_TRACE(static_cast<int>(pool));
    drawn = refused = 0;
    options.policy = watching("cam:window=5,seed=9", pool);
    const auto engine = Engine::create(model, nullptr, options, comm);
    Text text = begin(*engine, 70, 1);
    step(*engine, text, 6, 2);
    for (int i = 0; i < 40; ++i) step(*engine, text, 1, i);
    EXPECT_EQ(text.cuts, 10);
    expect_drawn(100);
  }
}

TEST_F(CacheMerging, BySharesOfTheTokens) {
  options.pruning.decode.keep = {};
  options.pruning.decode.evict_ratio = 0.6;
  options.pruning.decode.every = 1;
  const auto engine = Engine::create(model, nullptr, options, comm);
  Text text = begin(*engine, 50, 3);
  for (int i = 0; i < 60; ++i) step(*engine, text, 1, i);
  expect_drawn(100);
}

// Two sequences share their steps, and a fork takes its own way.
TEST_F(CacheMerging, OfSeveralSequencesAndForks) {
  const auto engine = Engine::create(model, nullptr, options, comm);
  Text a = begin(*engine, 60, 4);
  for (int i = 0; i < 6; ++i) step(*engine, a, 1, i);
  Text b = a;
  b.id = engine->fork(a.id);
  const auto taken = engine->checkpoint(a.id);
  for (int i = 0; i < 11; ++i) {
    step(*engine, a, 1, 100 + i);
    step(*engine, b, 1, 200 + i);
  }
  engine->free_sequence(b.id);
  // Cuts make a checkpoint void.
  EXPECT_THROW(engine->restore(a.id, *taken), Error);
  const auto later = engine->checkpoint(a.id);
  Text again = a;
  step(*engine, a, 1, 300);
  engine->restore(a.id, *later);
  for (int i = 0; i < 9; ++i) step(*engine, again, 1, 400 + i);
  expect_drawn(20);
}

TEST_F(CacheMerging, InOneStepOfTwo) {
  const auto engine = Engine::create(model, nullptr, options, comm);
  Text one = begin(*engine, 40, 5);
  Text other = begin(*engine, 40, 5);
  const SequenceId alone = engine->fork(one.id);
  std::vector<TokenId> tokens;
  for (int i = 0; i < 12; ++i) {
    StepBatch batch;
    watched = &one.watched;
    batch.add(one.id, cam_tokens(1, i), rule(*engine, one, StepPart::generated),
              StepOutput::argmax);
    batch.add(other.id, cam_tokens(1, i), rule(*engine, other, StepPart::generated),
              StepOutput::argmax);
    const auto results = engine->step(batch);
    EXPECT_EQ(results[0].argmax, results[1].argmax);
    tokens.push_back(results[0].argmax);
  }
  for (int i = 0; i < 12; ++i) {
    Text text;
    text.id = alone;
    watched = &text.watched;
    const auto results = engine->step(StepBatch(
        alone, cam_tokens(1, i), rule(*engine, text, StepPart::generated), StepOutput::argmax));
    EXPECT_EQ(results[0].argmax, tokens[static_cast<std::size_t>(i)]);
  }
}

TEST_F(CacheMerging, OfRowsOfEachType) {
  for (const RowType type : {RowType::q8, RowType::q4}) {
    SCOPED_TRACE(static_cast<int>(type));
    drawn = refused = 0;
    options.page_format.keys = options.page_format.values = type;
    // Packed rows are packed anew, and draws depend on sums of rounded keys alone.
    rounding = type == RowType::q8 ? 0.05 : 0.7;
    const auto engine = Engine::create(model, nullptr, options, comm);
    Text text = begin(*engine, 60, 6);
    for (int i = 0; i < 20; ++i) step(*engine, text, 1, i);
    expect_drawn(40);
  }
}

TEST_F(CacheMerging, IsNotChangedByAFailedStep) {
  if (comm.size() > 1) GTEST_SKIP() << "a policy that throws ends the program on several ranks";
  const auto engine = Engine::create(model, nullptr, options, comm);
  Text text = begin(*engine, 60, 7);
  for (int i = 0; i < 24; ++i) {
    if (i % 3 != 0) {
      text.watched.fails_at = i % 3;
      Text lost = text;
      watched = &lost.watched;
      EXPECT_THROW(
          engine->step(StepBatch(text.id, cam_tokens(2, i), rule(*engine, lost, StepPart::question),
                                 StepOutput::none)),
          Error);
      text.watched.fails_at = -1;
    }
    step(*engine, text, 1, i);
  }
  expect_drawn(40);
}

TEST_F(CacheMerging, HasNoPlaceInASnapshot) {
  const auto engine = Engine::create(model, nullptr, options, comm);
  Text text = begin(*engine, 30, 8);
  SnapshotInfo info;
  SnapshotOptions how;
  const auto file =
      std::filesystem::temp_directory_path() / ("kvzap_cam_" + std::to_string(comm.size()) + ".h5");
  engine->write_snapshot(file, info, how, text.id);
  comm.barrier();
  if (comm.is_root()) std::filesystem::remove(file);
  step(*engine, text, 1, 1);
  try {
    engine->write_snapshot(file, info, how, text.id);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("sums the attention of answers"), std::string::npos)
        << error.what();
  }
}

TEST_F(CacheMerging, NeedsCutsWhileGenerating) {
  options.pruning.decode = {};
  try {
    Engine::create(model, nullptr, options, comm);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("cam needs decode_every N"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace kvzap
