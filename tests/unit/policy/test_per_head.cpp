// Evict ratios of heads (+per-head), against kvpress' LUKVPress.
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <kvzap/engine/policies.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/machine.hpp"
#include "budget_reference.hpp"
#include "source_dir.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap {
namespace {

using test::ScoredHead;
using test::Verdicts;
using Counts = std::vector<std::int64_t>;

/// Both forms of the kernels.
class HeadBudgets : public ::testing::TestWithParam<bool> {
 protected:
  HeadBudgets() : m_device(base::machine().on_device()) { base::machine().set_device(GetParam()); }
  ~HeadBudgets() override { base::machine().set_device(m_device); }

 private:
  bool m_device;
};

INSTANTIATE_TEST_SUITE_P(Kernels, HeadBudgets, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "Device" : "Host"; });

Budget budget_of(HeadRatios ratios, double evict_ratio = 0.5) {
  Budget budget;
  budget.amount = Budget::Amount::evict_ratio;
  budget.evict_ratio = evict_ratio;
  budget.head_ratios = std::make_shared<const HeadRatios>(std::move(ratios));
  return budget;
}

TEST_P(HeadBudgets, KeepTheRowsOfKvpress) {
  std::ifstream file(test::source_dir() / "tests/golden/head_ratios.json");
  const auto cases = nlohmann::json::parse(file);
  ASSERT_EQ(cases.size(), 9U);
  constexpr float parts = 4096, unit = 1024;
  for (const auto& one : cases) {
    const auto& scores = one.at("scores");
    HeadRatios ratios;
    ratios.layers = static_cast<int>(scores.size());
    ratios.heads = static_cast<int>(scores[0].size());
    ratios.sink = one.at("sink");
    ratios.window = one.at("window");
    for (const auto& table : one.at("curve")) {
      for (const auto& layer : table) {
        for (const auto& ratio : layer) ratios.ratios.push_back(ratio.get<float>() / parts);
      }
    }
    const Budget::Model model = {ratios.layers, ratios.heads, 64};
    const Budget budget = budget_of(ratios, one.at("evict_ratio"));
    SCOPED_TRACE(budget.evict_ratio);
    std::vector<ScoredHead> heads;
    Verdicts expected;
    for (int l = 0; l < ratios.layers; ++l) {
      Counts counts;
      for (int h = 0; h < ratios.heads; ++h) {
        ScoredHead head{l, h, {}};
        for (const auto& score : scores[l][h]) head.scores.push_back(score.get<float>() / unit);
        expected.emplace_back(head.scores.size(), false);
        for (const std::size_t row : one.at("kept")[l][h]) expected.back()[row] = true;
        counts.push_back(static_cast<std::int64_t>(one.at("kept")[l][h].size()));
        heads.push_back(std::move(head));
      }
      const auto rows = static_cast<std::int64_t>(heads[0].scores.size());
      EXPECT_EQ(budget.head_ratios->rows(budget.evict_ratio, l, rows), counts);
      EXPECT_EQ(budget.rows_per_head(model, l, rows),
                std::accumulate(counts.begin(), counts.end(), std::int64_t{0}) / ratios.heads);
    }
    const auto rows = static_cast<std::int64_t>(heads[0].scores.size());
    EXPECT_EQ(test::choose(budget, model, rows, heads), expected);
  }
}

/// By sorting: sinks and window first, then the rows with the largest scores.
Verdicts by_sorting(const std::vector<ScoredHead>& heads, const HeadRatios& ratios,
                    const std::vector<Counts>& counts) {
  Verdicts verdicts = test::no_rows(heads);
  for (std::size_t i = 0; i < heads.size(); ++i) {
    ScoredHead head = heads[i];
    const auto rows = static_cast<std::int64_t>(head.scores.size());
    for (std::int64_t row = 0; row < rows; ++row) {
      if (row < ratios.sink || row >= rows - ratios.window) {
        float& score = head.scores[static_cast<std::size_t>(row)];
        if (std::isfinite(score)) score = 1e30F;
      }
    }
    const auto layer = static_cast<std::size_t>(head.layer);
    const auto number = static_cast<std::size_t>(head.head);
    Verdicts own = {std::vector<bool>(head.scores.size(), false)};
    test::keep_best({head}, {0}, std::min(rows, counts[layer][number]),
                    {std::vector<bool>(head.scores.size(), false)}, own);
    verdicts[i] = own[0];
  }
  return verdicts;
}

TEST_P(HeadBudgets, KeepTheBestRowsOfEachHead) {
  HeadRatios ratios;
  ratios.layers = 2;
  ratios.heads = 3;
  ratios.ratios = {0.9F, 0, 0.33F, 1, 0.5F, 0.125F};
  const Budget::Model model = {2, 3, 64};
  // 100 rows: 10 + 100 + 67; 0 + 50 + 87.5, of which 138 together.
  const std::vector<Counts> counts = {{10, 100, 67}, {1, 50, 88}};
  for (const std::int64_t sink : {0, 3}) {
    for (const std::int64_t window : {0, 2}) {
      for (const int kind : {0, 1, 2}) {
        ratios.sink = sink;
        ratios.window = window;
        const auto heads = test::make_heads(2, 3, 100, kind == 1, kind == 2);
        const Budget budget = budget_of(ratios);
        EXPECT_EQ(budget.rows_per_head(model, 0, 100), 59);
        EXPECT_EQ(test::choose(budget, model, 100, heads), by_sorting(heads, ratios, counts))
            << sink << ' ' << window << ' ' << kind;
      }
    }
  }
  // Rows without a finite score stay beside the others, in the window, too.
  ratios.sink = ratios.window = 0;
  const auto broken = test::make_heads(2, 3, 100, false, true, true);
  EXPECT_EQ(test::choose(budget_of(ratios), model, 100, broken),
            by_sorting(broken, ratios, counts));
}

TEST(HeadRatios, TablesOfACurve) {
  HeadRatios curve;
  curve.layers = 1;
  curve.heads = 1;
  for (int percent = 1; percent <= 99; ++percent) {
    curve.ratios.push_back(static_cast<float>(percent) / 128);
  }
  const auto table = [&](double ratio) { return curve.of_layer(ratio, 0).at(0) * 128; };
  EXPECT_EQ(table(0), 0);
  EXPECT_EQ(table(0.001), 1);
  EXPECT_EQ(table(0.25), 25);
  EXPECT_EQ(table(0.125), 12);  // 12.5 to even
  EXPECT_EQ(table(0.135), 14);
  EXPECT_EQ(table(0.999), 99);
  const Budget budget = budget_of(curve, 0.5);
  EXPECT_FLOAT_EQ(static_cast<float>(budget.ratio_of(0)), 50.0F / 128);
  EXPECT_EQ(budget.rows_per_head({1, 1, 64}, 0, 128), 78);
  EXPECT_EQ(budget.rows_per_head({1, 1, 64}, 0, 0), 0);
  EXPECT_EQ(curve.rows(0.5, 0, 0), Counts({0}));
}

TEST(HeadRatios, RefuseAnotherModel) {
  HeadRatios ratios;
  ratios.layers = 2;
  ratios.heads = 2;
  ratios.ratios = {0, 0, 0, 0};
  const Budget budget = budget_of(ratios);
  const auto expect = [&](const Budget::Model& model, int layer, const char* text) {
    test::expect_error([&] { budget.rows_per_head(model, layer, 10); }, {text});
  };
  expect({2, 3, 64}, 0, "evict ratios of 2 heads; the model has 3");
  expect({3, 2, 64}, 2, "2 layers, none of 2");
  Budget pool = budget;
  pool.pool = Budget::Pool::layer;
  const auto heads = test::make_heads(2, 2, 10);
  test::expect_error([&] { test::choose(pool, {2, 2, 64}, 10, heads); }, {"cannot share"});
}

class PerHead : public ::testing::Test {
 protected:
  PerHead() : m_partition(HeadPartition::even(2, 3, 1)) {
    m_config.num_hidden_layers = 2;
    m_config.num_key_value_heads = 3;
    write("ratios.json", "[[0.1, 0.2, 0.3], [0.4, 0.5, 0.9]]");
    write_curve("curve.npy", 99, 0.25F);
  }
  void write(const std::string& name, const std::string& content) { m_folder.write(name, content); }
  void write_curve(const std::string& name, int tables, float last) {
    std::string text("\x93NUMPY\x01\0\x60\0", 10);
    std::string dict = "{'descr': '<f4', 'fortran_order': False, 'shape': (" +
                       std::to_string(tables) + ", 2, 3), }";
    dict.resize(0x60, ' ');
    std::vector<float> values(static_cast<std::size_t>(tables) * 6, 0.5F);
    values.back() = last;
    const auto* const bytes = reinterpret_cast<const char*>(values.data());
    write(name, text + dict + std::string(bytes, values.size() * sizeof(float)));
  }
  std::string of(const std::string& policy, const std::string& parameter, const std::string& name,
                 const std::string& more = "") const {
    return policy + "+per-head:" + parameter + "=" + (m_folder.path() / name).string() + more;
  }
  PolicyChoice make(const std::string& text, const Budget& budget = {},
                    std::optional<double> threshold = std::nullopt) const {
    return make_policy(parse_policy(text), budget, threshold,
                       {m_config, m_partition, DType::f32, {}, Communicator::self()});
  }
  static Budget half() {
    Budget budget;
    budget.amount = Budget::Amount::evict_ratio;
    budget.evict_ratio = 0.5;
    return budget;
  }
  void refuse(const std::string& text, const Budget& budget,
              std::initializer_list<std::string_view> parts,
              std::optional<double> threshold = std::nullopt) const {
    SCOPED_TRACE(text);
    test::expect_error([&] { make(text, budget, threshold); }, parts);
  }

  ModelConfig m_config;
  HeadPartition m_partition;
  test::TemporaryFolder m_folder;
};

TEST_F(PerHead, ReadsRatiosAndCurves) {
  Budget budget = make(of("snapkv", "ratios", "ratios.json")).budget;
  ASSERT_TRUE(budget.head_ratios);
  EXPECT_EQ(budget.head_ratios->ratios, (std::vector<float>{0.1F, 0.2F, 0.3F, 0.4F, 0.5F, 0.9F}));
  EXPECT_EQ(budget.head_ratios->sink, 4);
  EXPECT_EQ(budget.head_ratios->window, 1);
  EXPECT_NEAR(budget.evict_ratio, 0.4, 1e-6);
  write("layers", "[0.25, 0.75]");
  budget = make(of("knorm", "ratios", "layers", ",sink=2,window=7")).budget;
  EXPECT_EQ(budget.head_ratios->ratios,
            (std::vector<float>{0.25F, 0.25F, 0.25F, 0.75F, 0.75F, 0.75F}));
  EXPECT_EQ(budget.head_ratios->sink, 2);
  EXPECT_EQ(budget.head_ratios->window, 7);
  budget = make(of("expected-attention", "curve", "curve.npy"), half()).budget;
  EXPECT_TRUE(budget.head_ratios->is_curve());
  EXPECT_EQ(budget.evict_ratio, 0.5);
  EXPECT_EQ(budget.rows_per_head({2, 3, 64}, 1, 100), 50);
  // Wrapped, pyramidkv gives its scores alone.
  EXPECT_FALSE(make(of("pyramidkv", "curve", "curve.npy"), half()).budget.pyramid);
  // Only ratios are an amount.
  EXPECT_TRUE(parse_policy(of("knorm", "ratios", "ratios.json")).has_amount_of_modifier());
  EXPECT_FALSE(parse_policy(of("knorm", "curve", "curve.npy")).has_amount_of_modifier());
}

TEST_F(PerHead, RefusesOtherAmounts) {
  const std::string ratios = of("knorm", "ratios", "ratios.json");
  const std::string curve = of("knorm", "curve", "curve.npy");
  refuse("knorm+per-head", half(), {"per-head needs one of ratios=FILE and curve=FILE"});
  refuse(ratios + ",curve=" + (m_folder.path() / "curve.npy").string(), half(), {"needs one of"});
  refuse(ratios, half(), {"the file of ratios gives the amount"});
  refuse(ratios, {}, {"the file of ratios gives the amount"}, 1);
  refuse(curve, {}, {"an evict ratio selects"});
  refuse(curve, {}, {"an evict ratio selects"}, 1);
  Budget tokens;
  tokens.amount = Budget::Amount::keep_tokens;
  tokens.keep_tokens = 5;
  refuse(curve, tokens, {"an evict ratio selects"});
}

TEST_F(PerHead, RefusesOtherBudgets) {
  for (const char* other :
       {"+ada", "+global", "+pyramid", "+critical", "+chunk", "+chunkkv", "+rerotate", "+dms"}) {
    refuse(of("knorm", "curve", "curve.npy") + other, half(),
           {"modifier per-head", std::string_view(other).substr(1)});
  }
  refuse(of("knorm", "curve", "curve.npy") + "+dms+ada", half(),
         {"modifier per-head gives each head its own rows: it excludes modifier dms"});
  refuse(of("streaming-llm", "curve", "curve.npy"), half(),
         {"streaming-llm", "one number of rows for all heads"});
  refuse(of("h2o:local=on", "curve", "curve.npy"), half(), {"one number of rows"});
  EXPECT_TRUE(make(of("h2o", "curve", "curve.npy"), half()).budget.head_ratios);
  refuse(of("kvzip", "curve", "curve.npy"), half(), {"kvzip"});
}

TEST_F(PerHead, RefusesHostileFiles) {
  const auto expect = [&](const std::string& content,
                          std::initializer_list<std::string_view> parts) {
    write("bad", content);
    refuse(of("knorm", "ratios", "bad"), {}, parts);
  };
  expect("[[0.1, 0.2], [0.3, 0.4]]",
         {"bad: shape: expected (2, 3) for 2 layers with 3 KV heads each, found (2, 2)"});
  expect("[0.1]", {"shape: expected (2,)", "found (1,)"});
  expect("[[[0.1]]]", {"shape: expected (2, 3)", "found (1, 1, 1)"});
  expect("[[0, 0, 0], [0, 1.5, 0]]",
         {"bad: [1][1]: expected an evict ratio from 0 to 1, found 1.5"});
  expect("[[0, 0, 0], [0, 0, -1]]", {"bad: [1][2]: expected an evict ratio from 0 to 1, found -1"});
  expect("[0, 7]", {"bad: [1]: expected an evict ratio"});
  expect("0.1 0.2", {"bad"});
  refuse(of("knorm", "ratios", "curve.npy"), {}, {"shape: expected (2, 3)", "found (99, 2, 3)"});
  refuse(of("knorm", "curve", "ratios.json"), half(), {"expected (99, 2, 3)", "found (2, 3)"});
  write_curve("few.npy", 98, 0);
  refuse(of("knorm", "curve", "few.npy"), half(), {"expected (99, 2, 3)", "found (98, 2, 3)"});
  write_curve("nan.npy", 99, std::nanf(""));
  refuse(of("knorm", "curve", "nan.npy"), half(), {"nan.npy: [98][1][2]: expected", "found nan"});
  refuse(of("knorm", "curve", "no.npy"), half(), {"no such file"});
}

}  // namespace
}  // namespace kvzap
