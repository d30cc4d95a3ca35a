// Modifiers that change scores and budgets, against kvpress 0.5.5 and against scores of parts.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <kvzap/engine/pruning.hpp>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "policy/registry.hpp"
#include "unit/policy/fake_layer.hpp"
#include "unit/policy/kvcrush_reference.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap {
namespace {

using test::FakeLayer;
using test::LayerData;

using Scores = std::vector<std::vector<float>>;  // (head, row)

/// Gives scores that the test has made up.
class GivenScores final : public Policy {
 public:
  explicit GivenScores(Scores scores) : m_scores(std::move(scores)) {}
  void score(PolicyLayer& layer, const ScoreView& scores) override {
    for (int h = 0; h < layer.heads(); ++h) {
      const auto rows = static_cast<std::size_t>(layer.rows(h));
      const Kokkos::View<float*, MemorySpace> device("given", rows);
      const auto host = Kokkos::create_mirror_view(device);
      for (std::size_t row = 0; row < rows; ++row) host(row) = m_scores[h][row];
      Kokkos::deep_copy(device, host);
      const auto target = Kokkos::subview(scores, h, std::make_pair(std::size_t{0}, rows));
      Kokkos::deep_copy(layer.exec(), target, device);
      layer.exec().fence();
    }
  }

 private:
  Scores m_scores;
};

/// The values that tests and kvpress' run share.
std::vector<float> waves(std::size_t count, double phase, double factor) {
  std::vector<float> values;
  for (std::size_t i = 0; i < count; ++i) {
    const auto wave = static_cast<float>(std::sin(0.7 * static_cast<double>(i) + phase));
    values.push_back(std::sin(static_cast<float>(factor) * wave));
  }
  return values;
}

constexpr int kv_heads = 2;
constexpr int group = 2;
constexpr int head_dim = 4;
constexpr int hidden_size = 6;
constexpr int tokens = 12;

LayerData make_layer(std::int64_t keep) {
  LayerData data;
  data.kv_heads = kv_heads;
  data.group = group;
  data.head_dim = head_dim;
  data.hidden_size = hidden_size;
  data.tokens = data.new_tokens = tokens;
  data.keep = keep;
  data.evict_ratio = 1 - static_cast<double>(keep) / tokens;
  const auto values = waves(kv_heads * tokens * head_dim, 1.3, 29);
  for (int h = 0; h < kv_heads; ++h) {
    data.positions.emplace_back();
    for (int t = 0; t < tokens; ++t) data.positions.back().push_back(t);
    const auto begin = values.begin() + h * tokens * head_dim;
    data.values.emplace_back(begin, begin + tokens * head_dim);
    data.keys.push_back(data.values.back());
  }
  data.cached_scores.resize(kv_heads);
  data.output_weights = waves(kv_heads * group * head_dim * hidden_size, 2.1, 31);
  data.queries.resize(tokens * kv_heads * group * head_dim);
  data.hidden.resize(tokens * hidden_size);
  return data;
}

Scores given_scores() {
  Scores scores;
  for (int h = 0; h < kv_heads; ++h) {
    scores.emplace_back();
    for (int t = 0; t < tokens; ++t) {
      const auto wave = static_cast<float>(std::sin(0.7 * (h * tokens + t) + 0.3)) + 1.1f;
      scores.back().push_back(std::sin(wave * 37) + 1.5f);
    }
  }
  return scores;
}

std::vector<std::vector<bool>> chosen(const Budget& budget, const FakeLayer& layer,
                                      const Scores& scores) {
  ScoredLayer scored;
  scored.heads = layer.extents().heads;
  scored.rows = layer.extents().rows;
  const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> device("scores", scores.size(),
                                                                       tokens);
  const auto host = Kokkos::create_mirror_view(device);
  for (std::size_t h = 0; h < scores.size(); ++h) {
    for (int t = 0; t < tokens; ++t) host(h, t) = scores[h][static_cast<std::size_t>(t)];
  }
  Kokkos::deep_copy(device, host);
  scored.scores = device;
  scored.keep = decltype(scored.keep)("keep", scores.size(), tokens);
  budget.choose(ExecutionSpace(), Communicator::self(), {1, kv_heads, 64}, tokens, {scored});
  const auto keep = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), scored.keep);
  std::vector<std::vector<bool>> result(scores.size());
  for (std::size_t h = 0; h < scores.size(); ++h) {
    for (int t = 0; t < tokens; ++t) result[h].push_back(keep(h, t) != 0);
  }
  return result;
}

class Modifiers : public ::testing::Test {
 protected:
  Modifiers() : m_partition(HeadPartition::even(1, kv_heads, 1)) {
    m_config.num_hidden_layers = 1;
    m_config.num_key_value_heads = kv_heads;
    m_info.name = "given";
    m_info.scores_parts = true;
    m_choice.info = &m_info;
    m_choice.budget.amount = Budget::Amount::evict_ratio;
    m_choice.make = [] { return std::make_unique<GivenScores>(given_scores()); };
  }

  void apply(const ModifierInfo& modifier, std::map<std::string, std::string> values = {}) {
    for (const PolicyParameter& parameter : modifier.parameters) {
      values.emplace(parameter.name, parameter.standard);
    }
    modifier.apply(m_choice, PolicyArguments(values),
                   {m_config, m_partition, DType::f32, {}, Communicator::self()});
  }

  Scores score(FakeLayer& layer) const { return layer.run(*m_choice.make()); }

  ModelConfig m_config;
  HeadPartition m_partition;
  PolicyInfo m_info;
  PolicyChoice m_choice;
};

constexpr float largest = std::numeric_limits<float>::max();

TEST_F(Modifiers, CriticalScoresAreThoseOfKvpress) {
  apply(policy::critical());
  // CriticalKVPress of kvpress 0.5.5 at ratios 0.5 and 0.75.
  const Scores half = {{largest, 8.43129f, 13.9913f, 14.8644f, 1.52146f, 3.08468f, 2.83852f,
                        largest, largest, 9.66984f, 2.42762f, 9.66836f},
                       {2.50317f, 0.787313f, 1.60699f, 1.16358f, largest, 8.99232f, 6.94507f,
                        3.61103f, largest, largest, 6.533f, 2.74413f}};
  const Scores quarter = {{10.2193f, 8.43129f, 13.9913f, 14.8644f, 1.52146f, 3.08468f, 2.83852f,
                           largest, 9.5313f, 9.66984f, 2.42762f, 9.66836f},
                          {2.50317f, 0.787313f, 1.60699f, 1.16358f, 12.2859f, 8.99232f, 6.94507f,
                           3.61103f, largest, 16.7802f, 6.533f, 2.74413f}};
  for (const std::int64_t keep : {6, 3}) {
    FakeLayer layer(make_layer(keep));
    const Scores found = score(layer);
    const Scores& expected = keep == 6 ? half : quarter;
    for (std::size_t h = 0; h < kv_heads; ++h) {
      for (std::size_t t = 0; t < tokens; ++t) {
        EXPECT_NEAR(found[h][t], expected[h][t], 1e-5 * expected[h][t]) << h << ", " << t;
      }
    }
  }
}

TEST_F(Modifiers, CriticalWithAdaKeepsWhatKvpressKeeps) {
  apply(policy::ada());
  apply(policy::critical());
  // CriticalAdaKVPress of kvpress 0.5.5.
  const std::vector<std::vector<bool>> half = {{1, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0},
                                               {0, 0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 0}};
  const std::vector<std::vector<bool>> quarter = {{0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0},
                                                  {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0}};
  for (const double ratio : {0.5, 0.75}) {
    m_choice.budget.evict_ratio = ratio;
    FakeLayer layer(make_layer(ratio == 0.5 ? 6 : 3));
    EXPECT_EQ(chosen(m_choice.budget, layer, score(layer)), ratio == 0.5 ? half : quarter);
  }
}

TEST_F(Modifiers, AdaKeepsWhatKvpressKeeps) {
  apply(policy::ada());
  // AdaKVPress of kvpress 0.5.5.
  const std::vector<std::vector<bool>> half = {{1, 0, 1, 0, 0, 0, 0, 1, 1, 1, 0, 1},
                                               {1, 0, 0, 0, 1, 1, 1, 0, 1, 1, 0, 0}};
  const std::vector<std::vector<bool>> quarter = {{1, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 1},
                                                  {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0}};
  for (const double ratio : {0.5, 0.75}) {
    m_choice.budget.evict_ratio = ratio;
    FakeLayer layer(make_layer(ratio == 0.5 ? 6 : 3));
    EXPECT_EQ(chosen(m_choice.budget, layer, score(layer)), ratio == 0.5 ? half : quarter);
  }
}

TEST_F(Modifiers, CriticalKeepsScoresThatAreNoNumbers) {
  Scores scores = given_scores();
  scores[0][5] = std::nanf("");
  m_choice.make = [scores] { return std::make_unique<GivenScores>(scores); };
  apply(policy::critical());
  FakeLayer layer(make_layer(6));
  const Scores found = score(layer);
  EXPECT_TRUE(std::isnan(found[0][5]));
  EXPECT_EQ(std::count(found[0].begin(), found[0].end(), largest), 2);
}

/// Three heads with rows of their own, and equal scores among them.
test::KvCrushCase crushed_heads(const std::string& anchor, std::int64_t keep, double share) {
  test::KvCrushCase of{{}, {}, {}, keep, share};
  for (int h = 0; h < 3; ++h) {
    of.positions.emplace_back();
    of.scores.emplace_back();
    of.anchor.push_back(anchor == "ones" || (anchor == "alternating" && h % 2 == 1));
    for (int t = 0; t < 200; ++t) {
      const int noise = (t * 7919 + h * 104729) % 1009;
      if (h > 0 && noise % (2 * h + 1) == 0) continue;
      of.positions.back().push_back(t);
      of.scores.back().push_back(static_cast<float>(noise % 40 - 20) / 8);
    }
  }
  return of;
}

LayerData layer_of(const test::KvCrushCase& of) {
  LayerData data = make_layer(of.keep);
  data.kv_heads = 3;
  data.tokens = 200;
  data.new_tokens = 1;
  data.positions = of.positions;
  data.cached_scores.resize(3);
  return data;
}

TEST_F(Modifiers, KvCrushKeepsRepresentatives) {
  for (const char* anchor : {"zeros", "ones", "alternating"}) {
    for (const std::int64_t keep : {100, 40, 7}) {
      for (const char* share : {"0.25", "1", "0.5"}) {
        SCOPED_TRACE(std::string(anchor) + ", " + std::to_string(keep) + ", " + share);
        const auto of = crushed_heads(anchor, keep, std::stod(share));
        m_choice.make = [&] { return std::make_unique<GivenScores>(of.scores); };
        apply(policy::kvcrush(), {{"anchor", anchor}, {"share", share}});
        FakeLayer layer(layer_of(of));
        const Scores found = score(layer);
        const auto expected = test::kept_by_kvcrush(of);
        for (std::size_t h = 0; h < 3; ++h) {
          std::int64_t stay = 0;
          for (std::size_t r = 0; r < found[h].size(); ++r) {
            EXPECT_EQ(found[h][r], expected[h][r] ? of.scores[h][r] : -largest)
                << "head " << h << ", row " << r;
            stay += expected[h][r] ? 1 : 0;
          }
          EXPECT_EQ(stay, keep) << "head " << h;
        }
      }
    }
  }
}

TEST_F(Modifiers, KvCrushLeavesScoresWithoutAShare) {
  const auto of = crushed_heads("zeros", 3, 0.25);  // floor(0.75) representatives
  m_choice.make = [&] { return std::make_unique<GivenScores>(of.scores); };
  apply(policy::kvcrush());
  FakeLayer layer(layer_of(of));
  EXPECT_EQ(score(layer), of.scores);
  // Heads that are short enough keep all rows.
  const auto all = crushed_heads("zeros", 200, 0.25);
  FakeLayer whole(layer_of(all));
  EXPECT_EQ(score(whole), all.scores);
}

TEST_F(Modifiers, KvCrushKeepsScoresThatAreNoNumbers) {
  auto of = crushed_heads("zeros", 40, 0.25);
  of.scores[1][5] = std::nanf("");
  m_choice.make = [&] { return std::make_unique<GivenScores>(of.scores); };
  apply(policy::kvcrush());
  FakeLayer layer(layer_of(of));
  EXPECT_TRUE(std::isnan(score(layer)[1][5]));
}

/// Scores that depend on all rows of a part: how far a row is from the end, and how many stay.
class FromTheEnd final : public Policy {
 public:
  void score(PolicyLayer& layer, const ScoreView& scores) override {
    Scores all(static_cast<std::size_t>(layer.heads()));
    for (int h = 0; h < layer.heads(); ++h) {
      const auto positions =
          Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), layer.positions(h));
      for (std::int64_t row = 0; row < layer.rows(h); ++row) {
        all[static_cast<std::size_t>(h)].push_back(
            static_cast<float>(1000 * layer.rows(h) + 100 * layer.extents().keep + positions(row)));
      }
    }
    GivenScores(all).score(layer, scores);
  }
};

TEST_F(Modifiers, ChunkScoresEachPartAlone) {
  m_choice.make = [] { return std::make_unique<FromTheEnd>(); };
  m_choice.budget.evict_ratio = 0.5;
  apply(policy::chunk(), {{"length", "5"}});
  EXPECT_EQ(m_choice.budget.chunk, 5);
  // Parts of 5, 5 and 2 rows keep 2, 2 and 1; the other head has 7 rows left.
  LayerData data = make_layer(5);
  FakeLayer whole(data);
  const Scores even = score(whole);
  for (std::size_t t = 0; t < tokens; ++t) {
    const std::size_t length = t < 10 ? 5 : 2, keep = t < 10 ? 2 : 1;
    EXPECT_EQ(even[1][t], static_cast<float>(1000 * length + 100 * keep + t));
  }
  data.new_tokens = 4;
  data.positions[1] = {1, 4, 6, 8, 9, 10, 11};
  FakeLayer layer(data);
  const Scores found = score(layer);
  EXPECT_EQ(found[0][11], even[0][11]);
  for (std::size_t row = 0; row < 7; ++row) {
    const auto length = static_cast<float>(row < 5 ? 5 : 2);
    EXPECT_EQ(std::floor(found[1][row] / 1000), length);
    EXPECT_EQ(std::fmod(found[1][row], 100.0f), static_cast<float>(data.positions[1][row]));
  }
}

TEST_F(Modifiers, PerLayerReadsLinesAndLists) {
  const test::TemporaryFolder folder;
  m_config.num_hidden_layers = 3;
  folder.write("lines", "0.5\n0.25\n 0\n");
  folder.write("list", "[0.5, 0.25, 0]");
  for (const char* name : {"lines", "list"}) {
    m_choice.budget = Budget();
    m_choice.threshold = std::nan("");
    apply(policy::per_layer(), {{"ratios", (folder.path() / name).string()}});
    EXPECT_EQ(m_choice.budget.layer_ratios, (std::vector<double>{0.5, 0.25, 0}));
    EXPECT_DOUBLE_EQ(m_choice.budget.evict_ratio, 0.25);
  }
  const auto expect_error = [&](const char* content, const char* text) {
    folder.write("bad", content);
    m_choice.budget = Budget();
    test::expect_error(
        [&] {
          apply(policy::per_layer(), {{"ratios", (folder.path() / "bad").string()}});
        },
        {text});
  };
  expect_error("0.5\n0.5\n", "2 evict ratios; the model has 3 layers");
  expect_error("0.5\n1\n0\n", "evict ratio of layer 1 is 1");
  expect_error("0.5\nmany\n0\n", "\"many\"");
  expect_error("[0.5, \"a\", 0]", "expected a number");
}

// Some modifiers replace what the next step's scores continue from.
TEST_F(Modifiers, LaterStepsContinueFromScores) {
  ModelConfig config;
  config.num_hidden_layers = 1;
  config.num_key_value_heads = kv_heads;
  config.num_attention_heads = kv_heads * group;
  config.head_dim = head_dim;
  config.hidden_size = hidden_size;
  const auto partition = HeadPartition::even(1, kv_heads, 1);
  const PolicySetup setup{config, partition, DType::f32, {}, Communicator::self()};
  const auto loads = [&](const char* name, bool cuts, bool is_sparse) {
    Pruning pruning = Pruning::parse(name).evict_ratio(0.5);
    if (cuts) pruning.decode = {8, 16, {}};
    if (is_sparse) pruning.prefill = PrefillMode::sparse;
    try {
      load(pruning, setup);
      return true;
    } catch (const PruningError&) {
      return false;
    }
  };
  for (const char* name :
       {"h2o", "h2o+ada", "h2o:normalize=off+rerotate", "knorm+rerotate", "snapkv+critical"}) {
    EXPECT_TRUE(loads(name, true, false) && loads(name, false, true)) << name;
  }
  for (const char* name : {"h2o+rerotate", "h2o+critical", "h2o:normalize=off+critical"}) {
    EXPECT_TRUE(loads(name, false, false)) << name;
    EXPECT_FALSE(loads(name, true, false)) << name;
  }
  EXPECT_FALSE(loads("h2o+critical", false, true));
  EXPECT_TRUE(loads("h2o+rerotate", false, true));  // after the last chunk
}

}  // namespace
}  // namespace kvzap
