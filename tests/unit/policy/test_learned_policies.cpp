// Policies whose scores come from files: kvzap, fastkvzip, trim-kv, duo-attention.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <kvzap/engine/pruning.hpp>
#include <kvzap/engine/surrogate.hpp>
#include <string>
#include <vector>

#include "base/machine.hpp"
#include "policy/registry.hpp"
#include "safetensors_writer.hpp"
#include "unit/policy/fake_layer.hpp"
#include "unit/policy/retention_gates.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap {
namespace {

using test::FakeLayer;
using test::gate_tensor;
using test::LayerData;
using test::retention_gate;
using test::retentions;
using Scores = std::vector<std::vector<float>>;  // (head, row)

/// Values that kvpress' run shares.
std::vector<float> waves(std::size_t count, double phase, double scale = 1, double base = 0) {
  std::vector<float> values;
  for (std::size_t i = 0; i < count; ++i) {
    values.push_back(
        static_cast<float>(base + scale * std::sin(0.7 * static_cast<double>(i) + phase)));
  }
  return values;
}

constexpr int layers = 2;
constexpr int kv_heads = 2;
constexpr int hidden_size = 8;

class LearnedPolicies : public ::testing::Test {
 protected:
  LearnedPolicies() : m_partition(HeadPartition::even(layers, kv_heads, 1)) {
    m_config.num_hidden_layers = layers;
    m_config.num_key_value_heads = kv_heads;
    m_config.hidden_size = hidden_size;
  }

  PolicySetup setup() const {
    return {m_config, m_partition, DType::f32, {}, Communicator::self()};
  }
  std::string file(const char* name) const { return (m_folder.path() / name).string(); }

  std::unique_ptr<Policy> make(const PolicyInfo& info,
                               std::map<std::string, std::string> values) const {
    for (const PolicyParameter& parameter : info.parameters) {
      values.emplace(parameter.name, parameter.standard);
    }
    return info.make(PolicyArguments(values), setup())();
  }

  /// Of layer 0, all tokens new.
  static LayerData make_layer(std::int64_t tokens) {
    LayerData data;
    data.layers = layers;
    data.kv_heads = kv_heads;
    data.hidden_size = hidden_size;
    data.tokens = data.new_tokens = tokens;
    data.keep = tokens;
    for (int h = 0; h < kv_heads; ++h) {
      data.positions.emplace_back();
      for (std::int64_t t = 0; t < tokens; ++t) data.positions.back().push_back(t);
    }
    data.cached_scores.resize(kv_heads);
    data.hidden = waves(static_cast<std::size_t>(tokens * hidden_size), 0.5);
    data.queries.resize(static_cast<std::size_t>(tokens) * kv_heads);
    return data;
  }

  void write_gates(int n_layers = layers) const {
    constexpr int group = 3, dim = 4, sink = 5;
    const auto tensor = [](std::vector<std::int64_t> shape, double phase, double scale = 1,
                           double base = 0) {
      std::int64_t count = 1;
      for (const std::int64_t extent : shape) count *= extent;
      return test::stored_tensor("F32", shape,
                                 waves(static_cast<std::size_t>(count), phase, scale, base));
    };
    std::map<std::string, test::StoredTensor> tensors;
    for (int l = 0; l < n_layers; ++l) {
      const std::string name = std::to_string(l) + ".";
      tensors[name + "q_proj.weight"] = tensor({kv_heads * group * dim, hidden_size}, 1);
      tensors[name + "q_proj.bias"] = tensor({kv_heads * group * dim}, 2);
      tensors[name + "k_proj.weight"] = tensor({kv_heads * dim, hidden_size}, 3);
      tensors[name + "q_norm.weight"] = tensor({dim}, 4, 0.3, 1);
      tensors[name + "k_norm.weight"] = tensor({dim}, 5, 0.3, 1);
      tensors[name + "k_base"] = tensor({kv_heads, 1, sink, dim}, 6);
      tensors[name + "b"] = tensor({kv_heads, 1, group}, 7);
    }
    test::write_safetensors(m_folder.path() / "gates.safetensors", tensors);
  }

  static std::map<std::string, test::StoredTensor> retention_gates(bool is_deep,
                                                                   int n_layers = layers) {
    return test::retention_gates(is_deep, n_layers, kv_heads, hidden_size);
  }
  void write_retention_gates(const std::map<std::string, test::StoredTensor>& tensors) const {
    test::write_safetensors(m_folder.path() / "gates.safetensors", tensors);
  }

  ModelConfig m_config;
  HeadPartition m_partition;
  test::TemporaryFolder m_folder;
};

/// The policy rounds log retentions to 16 bits.
void expect_retentions(const Scores& found, const std::vector<std::vector<double>>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t h = 0; h < found.size(); ++h) {
    ASSERT_EQ(found[h].size(), expected[h].size());
    for (std::size_t row = 0; row < found[h].size(); ++row) {
      EXPECT_NEAR(found[h][row], expected[h][row], 2e-5 * std::fabs(expected[h][row]))
          << "head " << h << ", row " << row;
    }
  }
}

// FastKVzipGate of kvpress 0.5.5.
const Scores gate_scores = {{0.2986591f, 0.2739298f, 0.243663f, 0.2772845f, 0.3301834f, 0.3285809f,
                             0.2675532f, 0.256503f, 0.2857954f, 0.2994921f},
                            {0.164704f, 0.1322674f, 0.1306466f, 0.1846038f, 0.2076854f, 0.1867503f,
                             0.1719479f, 0.1830102f, 0.1953594f, 0.1720237f}};

void expect_near(const Scores& found, const Scores& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t h = 0; h < found.size(); ++h) {
    ASSERT_EQ(found[h].size(), expected[h].size());
    for (std::size_t row = 0; row < found[h].size(); ++row) {
      EXPECT_NEAR(found[h][row], expected[h][row], 2e-6) << "head " << h << ", row " << row;
    }
  }
}

TEST_F(LearnedPolicies, FastKvzipIsThatOfKvpress) {
  write_gates();
  for (const std::int64_t block : {0, 3}) {
    // The newest row and no first ones are protected.
    const auto policy =
        make(policy::fastkvzip(), {{"gates", file("gates.safetensors")}, {"sink", "0"}});
    FakeLayer layer(make_layer(10));
    Scores expected = gate_scores;
    for (auto& head : expected) head[9] = 1;
    expect_near(layer.run(*policy, block), expected);
  }
  const auto policy =
      make(policy::fastkvzip(), {{"gates", file("gates.safetensors")}, {"window-ratio", "0.3"}});
  FakeLayer layer(make_layer(10));
  Scores expected = gate_scores;
  for (auto& head : expected) {
    for (const std::size_t row : {0, 1, 2, 3, 7, 8, 9}) head[row] = 1;
  }
  expect_near(layer.run(*policy), expected);
}

TEST_F(LearnedPolicies, FastKvzipOfSomeHeads) {
  write_gates();
  // The longest head goes to rank 0.
  m_partition = HeadPartition::balanced({{1, 5}, {1, 5}}, 2);
  const auto policy =
      make(policy::fastkvzip(), {{"gates", file("gates.safetensors")}, {"sink", "0"}});
  FakeLayer layer(make_layer(10), {1}, Communicator::self());
  Scores expected = {gate_scores[1]};
  expected[0][9] = 1;
  expect_near(layer.run(*policy, 4), expected);
}

TEST_F(LearnedPolicies, FastKvzipRemembersWhatItProtected) {
  write_gates();
  const auto policy =
      make(policy::fastkvzip(),
           {{"gates", file("gates.safetensors")}, {"sink", "1"}, {"window-ratio", "0.4"}});
  FakeLayer first(make_layer(5));
  const Scores before = first.run(*policy);
  EXPECT_EQ(before[0][3], 1.0f);
  // Five more; of head 1 the second row went.
  LayerData data = make_layer(10);
  data.new_tokens = 5;
  data.cached_scores[0] = before[0];
  data.positions[1].erase(data.positions[1].begin() + 1);
  data.cached_scores[1] = before[1];
  data.cached_scores[1].erase(data.cached_scores[1].begin() + 1);
  FakeLayer second(data);
  Scores expected = gate_scores;
  for (auto& head : expected) {
    for (const std::size_t row : {0, 6, 7, 8, 9}) head[row] = 1;
  }
  expected[1].erase(expected[1].begin() + 1);
  expect_near(second.run(*policy), expected);
  // The step once more, as after one that failed in a later layer, or from a checkpoint.
  expect_near(second.run(*policy), expected);
  // And token by token, of which one at a time is the newest fourth to first.
  for (std::int64_t tokens = 6; tokens <= 10; ++tokens) {
    LayerData one = make_layer(tokens);
    one.new_tokens = 1;
    one.cached_scores = tokens == 6 ? before : one.cached_scores;
    for (auto& head : one.cached_scores) head.resize(static_cast<std::size_t>(tokens - 1), 1.0f);
    const Scores found = FakeLayer(one).run(*policy);
    const auto newest =
        std::max<std::int64_t>(1, static_cast<std::int64_t>(static_cast<double>(tokens) * 0.4));
    for (std::size_t h = 0; h < 2; ++h) {
      for (std::int64_t t = 3; t < tokens; ++t) {
        EXPECT_NEAR(found[h][t], t >= tokens - newest ? 1 : gate_scores[h][t], 2e-6)
            << tokens << " tokens, position " << t;
      }
    }
  }
}

TEST_F(LearnedPolicies, FastKvzipHasABudgetOverAllLayers) {
  write_gates();
  const PolicyInfo info = policy::fastkvzip();
  for (const std::string layerwise : {"off", "on"}) {
    std::map<std::string, std::string> values = {{"gates", file("gates.safetensors")},
                                                 {"layerwise", layerwise}};
    for (const PolicyParameter& parameter : info.parameters) {
      values.emplace(parameter.name, parameter.standard);
    }
    PolicyChoice choice;
    choice.info = &info;
    choice.budget.amount = Budget::Amount::evict_ratio;
    choice.budget.evict_ratio = 0.3;
    info.set_up(choice, PolicyArguments(values), setup());
    EXPECT_TRUE(choice.make);
    EXPECT_EQ(choice.budget.pool, layerwise == "on" ? Budget::Pool::layer : Budget::Pool::model);
    EXPECT_TRUE(choice.budget.counts_pools);
    EXPECT_EQ(choice.budget.safeguard, 0);
  }
}

TEST_F(LearnedPolicies, GatesOfAnotherModel) {
  const auto expect = [&](const char* text) {
    test::expect_error(
        [&] {
          make(policy::fastkvzip(), {{"gates", file("gates.safetensors")}});
        },
        {"gates.safetensors", text});
  };
  write_gates(3);
  expect("gates of 3 layers, but the model's num_hidden_layers is 2");
  write_gates();
  m_config.num_key_value_heads = 4;
  expect("gates of 2 KV heads, but the model's num_key_value_heads is 4");
  test::write_safetensors(m_folder.path() / "gates.safetensors",
                          {{"weights", test::stored_tensor("F32", {1}, {1})}});
  expect("no tensor 0.k_base");
}

TEST_F(LearnedPolicies, TrimKvScoresFallWithAge) {
  for (const bool is_deep : {false, true}) {
    SCOPED_TRACE(is_deep ? "DBTrimKV" : "TRIM-KV");
    write_retention_gates(retention_gates(is_deep));
    for (const bool device : {false, true}) {
      base::machine().set_device(device);
      const auto policy = make(policy::trim_kv(), {{"gates", file("gates.safetensors")}});
      for (int l = 0; l < layers; ++l) {
        LayerData data = make_layer(23);
        data.layer = l;
        for (const std::int64_t block : {0, 7}) {
          expect_retentions(FakeLayer(data).run(*policy, block), retentions(data, is_deep));
        }
      }
    }
    base::machine().set_device(false);
  }
}

// At two ratios the rows that stay are those of the formula, and the order changes with time.
TEST_F(LearnedPolicies, TrimKvCutsAreThoseOfTheFormula) {
  write_retention_gates(retention_gates(false));
  const auto policy = make(policy::trim_kv(), {{"gates", file("gates.safetensors")}});
  const auto kept = [](const auto& scores, double ratio) {
    std::vector<std::size_t> rows(scores.size());
    for (std::size_t r = 0; r < rows.size(); ++r) rows[r] = r;
    std::stable_sort(rows.begin(), rows.end(),
                     [&](std::size_t a, std::size_t b) { return scores[a] > scores[b]; });
    rows.resize(static_cast<std::size_t>(static_cast<double>(rows.size()) * (1 - ratio)));
    std::sort(rows.begin(), rows.end());
    return rows;
  };
  LayerData data = make_layer(40);
  const Scores found = FakeLayer(data).run(*policy);
  const auto expected = retentions(data, false);
  for (const double ratio : {0.5, 0.8}) {
    for (std::size_t h = 0; h < kv_heads; ++h) {
      EXPECT_EQ(kept(found[h], ratio), kept(expected[h], ratio)) << ratio << ", head " << h;
    }
  }
}

TEST_F(LearnedPolicies, TrimKvOfSomeHeads) {
  write_retention_gates(retention_gates(true));
  m_partition = HeadPartition::balanced({{1, 5}, {1, 5}}, 2);
  const auto policy = make(policy::trim_kv(), {{"gates", file("gates.safetensors")}});
  const LayerData data = make_layer(10);
  FakeLayer layer(data, {1}, Communicator::self());
  expect_retentions(layer.run(*policy, 4), {retentions(data, true)[1]});
}

/// Returns the number with 16 significant bits that is nearest to `value`.
float with_16_bits(double value) {
  int exponent = 0;
  const double fraction = std::frexp(value, &exponent);
  return static_cast<float>(std::ldexp(std::nearbyint(std::ldexp(fraction, 16)), exponent - 16));
}

// Whatever the later steps are, a row's score is its first one at another age, to the last bit.
// Products of one token and of many may round a gate otherwise, by its last bit.
TEST_F(LearnedPolicies, TrimKvRecoversGatesFromScores) {
  write_retention_gates(retention_gates(false));
  const Scores at_once = FakeLayer(make_layer(400))
                             .run(*make(policy::trim_kv(), {{"gates", file("gates.safetensors")}}));
  Scores scores(kv_heads), gates(kv_heads);
  for (std::int64_t tokens = 7; tokens <= 400; tokens += tokens < 300 ? 293 : 1) {
    LayerData data = make_layer(tokens);
    data.new_tokens = tokens - static_cast<std::int64_t>(scores[0].size());
    data.cached_scores = scores;
    // A new object for each step, as after a checkpoint.
    const auto policy = make(policy::trim_kv(), {{"gates", file("gates.safetensors")}});
    scores = FakeLayer(data).run(*policy, 64);
    for (int h = 0; h < kv_heads; ++h) {
      for (auto p = static_cast<std::int64_t>(gates[h].size()); p < tokens; ++p) {
        gates[h].push_back(
            with_16_bits(double{scores[h][p]} / static_cast<double>(tokens + 1 - p)));
      }
    }
    if (tokens == 7) {
      EXPECT_GT(scores[0][0] / 8, at_once[0][0] / 400 - 1);
    }
  }
  for (int h = 0; h < kv_heads; ++h) {
    for (std::int64_t p = 0; p < 400; ++p) {
      const auto age = static_cast<float>(400 + 1 - p);
      EXPECT_EQ(scores[h][p], gates[h][p] * age) << "head " << h << " position " << p;
      EXPECT_NEAR(scores[h][p], at_once[h][p], 0x1p-15F * std::fabs(at_once[h][p]));
    }
  }
}

TEST_F(LearnedPolicies, TrimKvGatesThatDoNotFit) {
  const auto expect = [&](const std::map<std::string, test::StoredTensor>& tensors,
                          const char* text) {
    write_retention_gates(tensors);
    test::expect_error(
        [&] {
          make(policy::trim_kv(), {{"gates", file("gates.safetensors")}});
        },
        {"gates.safetensors", text});
  };
  const std::string first = retention_gate(0), second = retention_gate(1);
  expect(retention_gates(false, 3), "gates of 3 layers, but the model's num_hidden_layers is 2");
  expect(retention_gates(true, 1), "gates of 1 layers, but the model's num_hidden_layers is 2");
  expect({{"weights", test::stored_tensor("F32", {1}, {1})}}, "linear1.weight");
  auto tensors = retention_gates(false);
  tensors[first + "linear1.weight"] = gate_tensor({5, hidden_size + 1}, 1);
  expect(tensors, "gates of 9 inputs, but the model's hidden_size is 8");
  tensors[first + "linear1.weight"] = gate_tensor({0, hidden_size}, 1);
  expect(tensors, "no matrix");
  tensors[first + "linear1.weight"] = gate_tensor({5}, 1);
  expect(tensors, "no matrix");
  tensors = retention_gates(false);
  tensors[first + "bias"] = gate_tensor({kv_heads + 1}, 1);
  expect(tensors, "gates of 3 KV heads, but the model's num_key_value_heads is 2");
  tensors = retention_gates(false);
  tensors[second + "linear2.weight"] = gate_tensor({kv_heads, 4}, 1);
  expect(tensors, "layers.1.self_attn.retention_gate.linear2.weight");
  tensors = retention_gates(true);
  tensors.erase(second + "linear2.bias");
  expect(tensors, "layers.1.self_attn.retention_gate.linear2.bias");
  tensors = retention_gates(false);
  tensors[second + "bias"] = test::stored_tensor("F32", {2}, {1, std::nanf("")});
  expect(tensors, "value 1 is nan; expected finite numbers");
  tensors = retention_gates(false);
  tensors["lm_head.weight"] = gate_tensor({2}, 1);
  expect(tensors, "9 tensors; expected the 8");
  tensors = retention_gates(false);
  tensors[second + "bias"] = {"I64", {2}, std::string(16, 0)};
  expect(tensors, "I64");
  m_config.activation = Activation::gelu;
  write_retention_gates(retention_gates(false));
  test::expect_error(
      [&] {
        make(policy::trim_kv(), {{"gates", file("gates.safetensors")}});
      },
      {"only SiLU is known"});
}

TEST_F(LearnedPolicies, TrimKvNeedsThePositionsOfTheText) {
  write_retention_gates(retention_gates(false));
  Budget half;
  half.amount = Budget::Amount::evict_ratio;
  half.evict_ratio = 0.5;
  const std::string text = "trim-kv:gates=" + file("gates.safetensors");
  for (const char* more : {"", "+ada", "+global"}) {
    EXPECT_EQ(make_policy(parse_policy(text + more), half, {}, setup()).why_once, "") << more;
  }
  for (const char* more : {"+rerotate", "+critical"}) {
    Pruning pruning = Pruning::parse(text + more).evict_ratio(0.5);
    EXPECT_TRUE(load(pruning, setup()).policy) << more;  // one cut
    pruning.decode = {8, 16, {}};
    test::expect_error([&] { load(pruning, setup()); }, {"decode_every", "trim-kv", "it "});
  }
}

TEST_F(LearnedPolicies, KvzapIsItsSurrogate) {
  m_folder.write("config.json",
                 R"({"input_dim": 8, "output_dim": 2, "hidden_dim": null, "n_modules": 2})");
  std::map<std::string, test::StoredTensor> tensors;
  for (int l = 0; l < layers; ++l) {
    const std::string name = "layers." + std::to_string(l) + ".";
    tensors[name + "weight"] = test::stored_tensor("F32", {2, 8}, waves(16, l));
    tensors[name + "bias"] = test::stored_tensor("F32", {2}, {0.5f, -1});
  }
  test::write_safetensors(m_folder.path() / "model.safetensors", tensors);
  LayerData data = make_layer(11);
  const auto expected_score = [&](std::size_t head, std::int64_t token) {
    const std::vector<float> weights = waves(16, 0);
    double sum = head == 0 ? 0.5 : -1;
    for (std::size_t i = 0; i < 8; ++i) {
      sum += static_cast<double>(weights[8 * head + i]) *
             data.hidden[static_cast<std::size_t>(token) * 8 + i];
    }
    return static_cast<float>(sum);
  };
  const auto policy = make(policy::kvzap(), {{"surrogate", m_folder.path().string()}});
  Scores expected(2);
  for (std::size_t h = 0; h < 2; ++h) {
    for (std::int64_t t = 0; t < 11; ++t) expected[h].push_back(expected_score(h, t));
  }
  FakeLayer whole(data);
  expect_near(whole.run(*policy), expected);
  expect_near(whole.run(*policy, 4), expected);
  // Cached rows keep the scores they have.
  data.new_tokens = 2;
  data.positions[0] = {0, 5, 9, 10};
  data.cached_scores[0] = {7, 8};
  data.positions[1] = {3, 9, 10};
  data.cached_scores[1] = {-3};
  FakeLayer later(data);
  expect_near(later.run(*policy, 1),
              {{7, 8, expected[0][9], expected[0][10]}, {-3, expected[1][9], expected[1][10]}});
}

TEST_F(LearnedPolicies, DuoAttentionHasRetrievalAndStreamingHeads) {
  m_folder.write("config.json", R"({"sink_size": 2, "recent_size": 3})");
  m_folder.write("full_attention_heads.tsv", "0.9\t0.1\n-2\t1.7\n");
  const Scores streaming = {{1, 1, 0, 0, 0, 0, 0, 1, 1, 1}};
  const std::vector<float> all(10, 1.0f);
  // Of four heads: none, the lowest, the two lowest, all.
  const std::vector<std::pair<const char*, std::vector<std::vector<bool>>>> cases = {
      {"0", {{0, 0}, {0, 0}}},
      {"0.25", {{0, 0}, {1, 0}}},
      {"0.375", {{0, 1}, {1, 0}}},  // 1.5 is rounded to even
      {"0.5", {{0, 1}, {1, 0}}},
      {"1", {{1, 1}, {1, 1}}}};
  for (const auto& [ratio, is_streaming] : cases) {
    const auto policy = make(policy::duo_attention(),
                             {{"pattern", m_folder.path().string()}, {"head-evict-ratio", ratio}});
    for (int l = 0; l < layers; ++l) {
      LayerData data = make_layer(10);
      data.layer = l;
      FakeLayer layer(data);
      const Scores found = layer.run(*policy);
      for (std::size_t h = 0; h < 2; ++h) {
        EXPECT_EQ(found[h], is_streaming[static_cast<std::size_t>(l)][h] ? streaming[0] : all)
            << ratio << ", layer " << l << ", head " << h;
      }
    }
  }
}

TEST_F(LearnedPolicies, PatternsThatDoNotFit) {
  const auto expect = [&](const char* text) {
    test::expect_error(
        [&] {
          make(policy::duo_attention(), {{"pattern", m_folder.path().string()}});
        },
        {text});
  };
  m_folder.write("full_attention_heads.tsv", "0.9\t0.1\n0.2\t0.7\n");
  m_folder.write("config.json", R"({"sink_size": 2})");
  expect("config.json: recent_size: expected a whole number from 0, found none");
  m_folder.write("config.json", R"({"sink_size": 2, "recent_size": 3})");
  m_folder.write("full_attention_heads.tsv", "0.9\t0.1\n");
  expect("1 layers, but the model's num_hidden_layers is 2");
  m_folder.write("full_attention_heads.tsv", "0.9\n0.1\n");
  expect("1 heads, but the model's num_key_value_heads is 2");
  m_folder.write("full_attention_heads.tsv", "0.9\tx\n0.1\t0.2\n");
  expect("line 1 has \"x\"");
}

}  // namespace
}  // namespace kvzap
