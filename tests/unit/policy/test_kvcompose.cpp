// KVCompose against kvpress' KVComposePress, and its budget against sorting.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <kvzap/engine/policies.hpp>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/machine.hpp"
#include "budget_reference.hpp"
#include "policy/composite.hpp"
#include "source_dir.hpp"
#include "unit/policy/fake_layer.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap {
namespace {

using nlohmann::json;
using test::FakeLayer;
using test::LayerData;
using test::ScoredHead;
using test::Verdicts;

PolicyChoice make_choice(const std::string& text, const Budget& budget) {
  const ModelConfig config{};
  const HeadPartition partition = HeadPartition::even(1, 1, 1);
  return make_policy(parse_policy(text), budget, std::nullopt,
                     {config, partition, DType::f32, {}, Communicator::self()});
}

Budget ratio_budget(double ratio) {
  Budget budget;
  budget.amount = Budget::Amount::evict_ratio;
  budget.evict_ratio = ratio;
  return budget;
}

void append(const json& numbers, std::vector<float>& values) {
  constexpr float unit = 64;
  for (const json& number : numbers) {
    if (number.is_array()) {
      append(number, values);
    } else {
      values.push_back(number.get<float>() / unit);
    }
  }
}

/// A layer as the repetition sees it.
LayerData layer_of(const json& one, std::size_t l) {
  const json& keys = one.at("keys")[l];
  LayerData data;
  data.layer = static_cast<int>(l);
  data.layers = static_cast<int>(one.at("keys").size());
  data.kv_heads = static_cast<int>(keys.size());
  data.group = one.at("group");
  data.tokens = static_cast<std::int64_t>(keys[0].size());
  data.new_tokens = data.tokens / 2;
  data.head_dim = static_cast<int>(keys[0][0].size());
  data.repeats_end = data.new_tokens;
  for (const json& head : keys) {
    data.positions.emplace_back(static_cast<std::size_t>(data.tokens));
    std::iota(data.positions.back().begin(), data.positions.back().end(), 0);
    data.keys.emplace_back();
    append(head, data.keys.back());
  }
  data.values = data.keys;
  data.cached_scores.resize(keys.size());
  // Those of the context are never asked for.
  data.queries.resize(
      static_cast<std::size_t>(data.new_tokens * data.query_heads() * data.head_dim));
  append(one.at("queries")[l], data.queries);
  data.hidden.resize(static_cast<std::size_t>(data.tokens));
  return data;
}

/// Both forms of the kernels.
class KvCompose : public ::testing::TestWithParam<bool> {
 protected:
  KvCompose() : m_device(base::machine().on_device()) { base::machine().set_device(GetParam()); }
  ~KvCompose() override { base::machine().set_device(m_device); }

 private:
  bool m_device;
};

INSTANTIATE_TEST_SUITE_P(Kernels, KvCompose, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "Device" : "Host"; });

TEST_P(KvCompose, ScoresAndKeepsAsKvpress) {
  std::ifstream file(test::source_dir() / "tests/golden/composite.json");
  const json cases = json::parse(file);
  ASSERT_EQ(cases.size(), 6U);
  for (const json& one : cases) {
    const double ratio = one.at("evict_ratio");
    SCOPED_TRACE(ratio);
    const std::string mean = one.at("head_mean").get<bool>() ? "on" : "off";
    const PolicyChoice choice = make_choice("kvcompose:head-mean=" + mean, ratio_budget(ratio));
    const PolicyChoice freely =
        make_choice("kvcompose:structured=off,head-mean=" + mean, ratio_budget(ratio));
    const auto policy = choice.make();
    const std::size_t layers = one.at("keys").size();
    for (std::size_t l = 0; l < layers; ++l) FakeLayer(layer_of(one, l)).observe(*policy, 7);
    std::vector<ScoredHead> heads;
    Verdicts expected, expected_freely;
    for (std::size_t l = 0; l < layers; ++l) {
      const auto scores = Kokkos::create_mirror_view_and_copy(
          Kokkos::HostSpace(),
          policy->context_scores(ExecutionSpace(), Communicator::self(), static_cast<int>(l)));
      const json& golden = one.at("scores")[l];
      ASSERT_EQ(scores.extent(0), golden.size());
      for (std::size_t h = 0; h < golden.size(); ++h) {
        ASSERT_EQ(scores.extent(1), golden[h].size());
        ScoredHead head{static_cast<int>(l), static_cast<int>(h), {}};
        for (std::size_t row = 0; row < golden[h].size(); ++row) {
          EXPECT_NEAR(scores(h, row), golden[h][row].get<double>(),
                      2e-5 * golden[h][row].get<double>());
          head.scores.push_back(scores(h, row));
        }
        for (auto* verdicts : {&expected, &expected_freely}) {
          verdicts->emplace_back(head.scores.size(), false);
          const char* const key = verdicts == &expected ? "kept" : "kept_freely";
          for (const std::size_t row : one.at(key)[l][h]) verdicts->back()[row] = true;
        }
        heads.push_back(std::move(head));
      }
    }
    const auto tokens = static_cast<std::int64_t>(heads[0].scores.size());
    const Budget::Model model = {static_cast<int>(layers), static_cast<int>(heads.size() / layers),
                                 64};
    EXPECT_EQ(test::choose(choice.budget, model, tokens, heads), expected);
    const double pool = static_cast<double>(heads.size()) * static_cast<double>(tokens);
    if (pool - std::floor(pool * ratio) == std::floor(pool * (1 - ratio))) {
      EXPECT_EQ(test::choose(freely.budget, model, tokens, heads), expected_freely);
    }
  }
}

TEST_P(KvCompose, ScoresOfStepsAreThoseOfTheDefinition) {
  // Two steps of a repetition: the maximum over both, head by head of the group.
  constexpr std::int64_t context = 40;
  std::vector<LayerData> steps;
  for (const std::int64_t begin : {0, 25}) {
    test::LayerShape shape;
    shape.kv_heads = 2;
    shape.group = 3;
    shape.stays = 2;
    shape.head_dim = 16;
    shape.new_tokens = begin == 0 ? 25 : 15;
    shape.tokens = context + shape.new_tokens;
    LayerData data = test::random_layer(shape, static_cast<unsigned>(3 + begin));
    for (std::size_t h = 0; h < 2 && !steps.empty(); ++h) {
      std::copy_n(steps[0].keys[h].begin(), context * 16, data.keys[h].begin());
    }
    data.repeats_begin = begin;
    data.repeats_end = begin + shape.new_tokens;
    steps.push_back(std::move(data));
  }
  std::vector<std::vector<double>> expected(2, std::vector<double>(context, 0));
  for (std::size_t q = 0; q < 6; ++q) {
    for (std::int64_t row = 0; row < context; ++row) {
      double most = 0;
      for (const LayerData& data : steps) {
        for (std::int64_t token = context; token < data.tokens; ++token) {
          most = std::max(most, std::exp(data.attention_score(token, static_cast<int>(q), row) -
                                         data.log_sum_exp(token, static_cast<int>(q))));
        }
      }
      expected[q / 3][static_cast<std::size_t>(row)] += most / 3;
    }
  }
  const auto policy = make_choice("kvcompose", ratio_budget(0.5)).make();
  for (const LayerData& data : steps) FakeLayer(data).observe(*policy, 9);
  const auto scores = Kokkos::create_mirror_view_and_copy(
      Kokkos::HostSpace(), policy->context_scores(ExecutionSpace(), Communicator::self(), 0));
  for (std::size_t row = 0; row < context; ++row) {
    const double mean = (expected[0][row] + expected[1][row]) / 2;
    for (std::size_t h = 0; h < 2; ++h) {
      EXPECT_NEAR(scores(h, row), expected[h][row] + mean, 1e-4);
    }
  }
}

TEST_P(KvCompose, HeadsOfALayerKeepTheSameNumberOfTheirBest) {
  const Budget::Model model = {4, 3, 64};
  for (const double ratio : {0.0, 0.3, 0.9}) {
    for (const bool ties : {false, true}) {
      const auto heads = test::make_heads(4, 3, 101, false, ties);
      const Budget budget = make_choice("kvcompose", ratio_budget(ratio)).budget;
      const Verdicts found = test::choose(budget, model, 101, heads);
      std::vector<std::int64_t> rows;
      for (std::size_t i = 0; i < heads.size(); ++i) {
        const auto count = std::count(found[i].begin(), found[i].end(), true);
        if (i % 3 == 0) rows.push_back(count);
        EXPECT_EQ(count, rows.back());
      }
      EXPECT_EQ(*std::max_element(rows.begin(), rows.end()), rows[0]);
      EXPECT_EQ(found, test::keep_by_sorting(Budget::Pool::head, heads, rows, 0));
      EXPECT_EQ(test::count(found), 3 * static_cast<std::int64_t>(4 * 101 * (1 - ratio)));
    }
  }
}

TEST_P(KvCompose, OtherAmountsAreExact) {
  const auto heads = test::make_heads(4, 3, 101);
  const Budget::Model model = {4, 3, 64};
  Budget budget = make_choice("kvcompose", ratio_budget(0.5)).budget;
  budget.amount = Budget::Amount::keep_tokens;
  budget.keep_tokens = 20;
  EXPECT_EQ(test::count(test::choose(budget, model, 101, heads)), 4 * 3 * 20);
  budget.keep_tokens = 1;  // every layer keeps one
  EXPECT_EQ(test::count(test::choose(budget, model, 101, heads)), 4 * 3);
  budget.amount = Budget::Amount::bytes;
  budget.bytes = 64 * 3 * 77 + 100;
  EXPECT_EQ(test::count(test::choose(budget, model, 101, heads)), 3 * 77);
  // Rows without a finite score stay, and rows that are gone do not count.
  const auto broken = test::make_heads(4, 3, 101, true, true, true);
  const Verdicts found = test::choose(budget, model, 101, broken);
  for (std::size_t i = 0; i < broken.size(); ++i) {
    for (std::size_t row = 0; row < broken[i].scores.size(); ++row) {
      EXPECT_TRUE(std::isfinite(broken[i].scores[row]) || found[i][row]);
    }
  }
}

TEST(CompositeRows, FollowTheMergedOrder) {
  const auto rows = [](std::vector<policy::CompositeScores> layers, std::int64_t keep,
                       bool is_exact = false) {
    return policy::composite_rows(std::move(layers), keep, is_exact);
  };
  using Counts = std::vector<std::int64_t>;
  // The first layer gets the largest at each place: 9, 5, 3.
  EXPECT_EQ(rows({{1, 1, 1}, {9, 2, 1}, {6, 5, 3}}, 4), Counts({2, 1, 1}));
  EXPECT_EQ(rows({{1, 1, 1}, {9, 2, 1}, {6, 5, 3}}, 9), Counts({3, 3, 3}));
  EXPECT_EQ(rows({{1, 1, 1}, {9, 2, 1}, {6, 5, 3}}, 100), Counts({3, 3, 3}));
  // At least one of each, beyond `keep` or within it.
  EXPECT_EQ(rows({{9, 8, 7}, {1, 1, 1}, {1, 1, 1}}, 3), Counts({3, 1, 1}));
  EXPECT_EQ(rows({{9, 8, 7}, {1, 1, 1}, {1, 1, 1}}, 3, true), Counts({1, 1, 1}));
  EXPECT_EQ(rows({{9, 8, 7}, {1, 1, 1}, {1, 1, 1}}, 4, true), Counts({2, 1, 1}));
  // Equal scores: earlier layers first. Layers without rows keep none.
  EXPECT_EQ(rows({{2, 2}, {2, 2}, {}}, 3), Counts({2, 1, 0}));
  EXPECT_EQ(rows({}, 3), Counts());
}

TEST(KvComposePolicy, TakesABudgetAndNoModifiers) {
  const PolicyChoice choice = make_choice("kvcompose:chunk=9", ratio_budget(0.5));
  EXPECT_TRUE(choice.budget.is_composite);
  EXPECT_EQ(choice.budget.pool, Budget::Pool::model);
  EXPECT_FALSE(choice.budget.by_layer());
  EXPECT_EQ(choice.repeat.chunk, 9);
  EXPECT_TRUE(choice.repeat.is_bare);
  const PolicyChoice freely = make_choice("kvcompose:structured=off", ratio_budget(0.5));
  EXPECT_FALSE(freely.budget.is_composite);
  EXPECT_TRUE(freely.budget.counts_pools);
  test::expect_error([] { make_choice("kvcompose", {}); }, {"kvcompose", "no threshold"});
  test::expect_error([] { make_choice("kvcompose+ada", ratio_budget(0.5)); },
                     {"cannot have the modifier ada"});
  test::expect_error([] { make_choice("kvcompose:structured=yes", ratio_budget(0.5)); },
                     {"structured is \"yes\"; expected on or off"});
  Budget head = choice.budget;
  head.pool = Budget::Pool::head;
  const auto heads = test::make_heads(1, 1, 4);
  test::expect_error([&] { test::choose(head, {1, 1, 64}, 4, heads); }, {"composite tokens"});
}

TEST(KvComposePolicy, ReadsTheContextAloneAgain) {
  const std::vector<TokenId> context = {5, 6, 7, 8, 9};
  RepeatPrompt prompt;
  prompt.first = prompt.later = {1, 2};
  prompt.suffix = {3};
  prompt.prefix = 2;
  prompt.chunk = 3;
  prompt.is_bare = true;
  const auto steps = repeat_steps(context, prompt);
  ASSERT_EQ(steps.size(), 2U);
  EXPECT_EQ(steps[0].tokens, (std::vector<TokenId>{5, 6, 7}));
  EXPECT_EQ(steps[1].tokens, (std::vector<TokenId>{8, 9}));
  EXPECT_EQ(steps[1].begin, 3);
  EXPECT_EQ(longest_repeat(5, prompt), 3);
  EXPECT_EQ(longest_repeat(2, prompt), 2);
}

}  // namespace
}  // namespace kvzap
