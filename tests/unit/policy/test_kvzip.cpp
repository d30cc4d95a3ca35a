// KVzip and KVzip+ against their definition in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <kvzap/engine/policies.hpp>
#include <string>
#include <vector>

#include "base/machine.hpp"
#include "policy/registry.hpp"
#include "source_dir.hpp"
#include "unit/policy/fake_layer.hpp"

namespace {

using kvzap::Budget;
using kvzap::Communicator;
using kvzap::DType;
using kvzap::Error;
using kvzap::HeadPartition;
using kvzap::ModelConfig;
using kvzap::Policy;
using kvzap::PolicyChoice;
using kvzap::test::FakeLayer;
using kvzap::test::LayerData;
using kvzap::test::LayerShape;
using kvzap::test::random_layer;
/// (KV head)(position)
using Scores = std::vector<std::vector<double>>;

struct OracleShape {
  bool plus = false;
  int group = 2;
  int head_dim = 64;
  std::int64_t context = 150;
  std::int64_t prefix = 3;
  std::int64_t chunk = 64;
  std::int64_t sink = 4;
  DType dtype = DType::f32;
  std::int64_t block = 0;  // tokens that are shown at a time; 0: all
};

PolicyChoice make_choice(const std::string& text, const Budget& budget, DType dtype) {
  const ModelConfig config{};
  const HeadPartition partition = HeadPartition::even(1, 1, 1);
  return make_policy(kvzap::parse_policy(text), budget, std::nullopt,
                     {config, partition, dtype, {}, Communicator::self()});
}
Budget half() {
  Budget budget;
  budget.amount = Budget::Amount::evict_ratio;
  budget.evict_ratio = 0.5;
  return budget;
}

/// What a bf16 cache can hold.
void round_to_bf16(std::vector<float>& values) {
  for (float& x : values) x = static_cast<float>(static_cast<kvzap::bfloat16>(x));
}

/// A layer as the steps of a repeat see it: the context's rows are the same in all of them, those
/// of the repeat, its queries and hidden states are not.
std::vector<LayerData> repeats_of(const OracleShape& p, int layer) {
  LayerShape shape;
  shape.kv_heads = 2;
  shape.group = p.group;
  shape.head_dim = p.head_dim;
  shape.stays = 2;  // all
  shape.layer = layer;
  shape.layers = 2;
  std::vector<LayerData> steps;
  for (std::int64_t begin = p.prefix; begin < p.context; begin += p.chunk) {
    const std::int64_t end = std::min(p.context, begin + p.chunk);
    shape.new_tokens = end - begin + 10;
    shape.tokens = p.context + shape.new_tokens;
    LayerData data = random_layer(shape, static_cast<unsigned>(100 * layer + begin));
    for (int h = 0; h < shape.kv_heads; ++h) {
      if (p.dtype == DType::bf16) round_to_bf16(data.keys[h]);
      if (steps.empty()) continue;
      const std::int64_t context = p.context * p.head_dim;
      std::copy_n(steps[0].keys[h].begin(), context, data.keys[h].begin());
      std::copy_n(steps[0].values[h].begin(), context, data.values[h].begin());
    }
    if (p.dtype == DType::bf16) round_to_bf16(data.queries);
    if (!steps.empty()) data.output_weights = steps[0].output_weights;
    data.repeats_begin = begin;
    data.repeats_end = end;
    steps.push_back(std::move(data));
  }
  return steps;
}

double size_of_output(const LayerData& data, int query_head, std::int64_t row) {
  const float* const value = data.value(query_head / data.group, row);
  double sum = 0;
  for (std::int64_t i = 0; i < data.hidden_size; ++i) {
    double x = 0;
    for (int d = 0; d < data.head_dim; ++d) {
      x += static_cast<double>(value[d]) *
           data.output_weights[(query_head * data.head_dim + d) * data.hidden_size + i];
    }
    sum += x * x;
  }
  return std::sqrt(sum);
}

/// The largest probability that a step's queries give each pair of its chunk, by definition.
void score_chunk(const OracleShape& p, const LayerData& data, Scores& scores) {
  const std::int64_t sink = std::min(p.sink, data.repeats_begin);
  std::vector<std::vector<double>> sizes(data.query_heads());  // (query head)(row of the chunk)
  for (int q = 0; p.plus && q < data.query_heads(); ++q) {
    for (std::int64_t r = data.repeats_begin; r < data.repeats_end; ++r) {
      sizes[q].push_back(size_of_output(data, q, r));
    }
  }
  for (std::int64_t token = p.context; token < data.tokens; ++token) {
    double size = 0;
    for (std::int64_t i = 0; i < data.hidden_size; ++i) {
      const double h = data.hidden[token * data.hidden_size + i];
      size += h * h;
    }
    for (int q = 0; q < data.query_heads(); ++q) {
      std::vector<std::int64_t> rows;
      for (std::int64_t r = 0; r < sink; ++r) rows.push_back(r);
      for (std::int64_t r = data.repeats_begin; r < data.repeats_end; ++r) rows.push_back(r);
      for (std::int64_t r = p.context; r <= token; ++r) rows.push_back(r);
      double sum = 0;
      for (const std::int64_t r : rows) sum += std::exp(data.attention_score(token, q, r) - 30);
      for (std::int64_t r = data.repeats_begin; r < data.repeats_end; ++r) {
        double score = std::exp(data.attention_score(token, q, r) - 30) / sum;
        if (p.plus) score *= sizes[q][r - data.repeats_begin] / std::sqrt(size);
        double& most = scores[q / data.group][r];
        most = std::max(most, score);
      }
    }
  }
}

class KvzipScores : public ::testing::TestWithParam<OracleShape> {};

TEST_P(KvzipScores, AreThoseOfTheDefinition) {
  const OracleShape& p = GetParam();
  std::vector<std::vector<LayerData>> layers;
  std::vector<Scores> expected;
  double largest = 0;
  for (int l = 0; l < 2; ++l) {
    layers.push_back(repeats_of(p, l));
    expected.emplace_back(2, std::vector<double>(p.context, 0.0));
    for (const LayerData& data : layers.back()) score_chunk(p, data, expected.back());
    for (const auto& of_head : expected.back()) {
      largest = std::max(largest, *std::max_element(of_head.begin(), of_head.end()));
    }
  }
  const std::string text =
      std::string(p.plus ? "kvzip-plus" : "kvzip") + ":sink=" + std::to_string(p.sink);
  for (const bool device : {false, true}) {
    kvzap::base::machine().set_device(device);
    const PolicyChoice choice = make_choice(text, half(), p.dtype);
    const auto policy = choice.make();
    for (std::size_t step = 0; step < layers[0].size(); ++step) {
      for (int l = 0; l < 2; ++l) {
        const LayerData& data = layers[l][step];
        FakeLayer layer(data);
        layer.observe(*policy, p.block > 0 ? p.block : data.new_tokens);
      }
    }
    for (int l = 0; l < 2; ++l) {
      const auto scores = Kokkos::create_mirror_view_and_copy(
          Kokkos::HostSpace(),
          policy->context_scores(kvzap::ExecutionSpace(), Communicator::self(), l));
      ASSERT_EQ(scores.extent(0), 2u);
      ASSERT_EQ(static_cast<std::int64_t>(scores.extent(1)), p.context);
      for (int h = 0; h < 2; ++h) {
        for (std::int64_t r = 0; r < p.context; ++r) {
          const double should = r < p.sink ? largest + 1 : expected[l][h][r];
          ASSERT_NEAR(scores(h, r), should, 1e-4 * should)
              << "layer " << l << ", head " << h << ", position " << r << ", device kernels "
              << device;
        }
      }
    }
  }
  kvzap::base::machine().set_device(false);
}

OracleShape shape_of(bool plus, int group, int head_dim, std::int64_t block, DType dtype) {
  OracleShape shape;
  shape.plus = plus;
  shape.group = group;
  shape.head_dim = head_dim;
  shape.block = block;
  shape.dtype = dtype;
  return shape;
}
OracleShape with_sink(std::int64_t sink, std::int64_t prefix, std::int64_t chunk) {
  OracleShape shape;
  shape.plus = true;
  shape.sink = sink;
  shape.prefix = prefix;
  shape.chunk = chunk;
  return shape;
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, KvzipScores,
    ::testing::Values(shape_of(false, 2, 64, 0, DType::f32), shape_of(true, 2, 64, 0, DType::f32),
                      shape_of(true, 1, 80, 17, DType::f32), shape_of(false, 7, 80, 40, DType::f16),
                      shape_of(true, 3, 64, 40, DType::bf16),
                      shape_of(false, 2, 80, 1, DType::bf16), with_sink(0, 0, 64),
                      with_sink(9, 2, 50), with_sink(40, 0, 16), with_sink(4, 0, 1000)));

TEST(Kvzip, WhatIsNoNumberStaysNone) {
  OracleShape p;
  p.context = 40;
  std::vector<LayerData> steps = repeats_of(p, 0);
  ASSERT_EQ(steps.size(), 1u);
  steps[0].keys[1][20 * p.head_dim] = std::nanf("");
  for (const bool device : {false, true}) {
    kvzap::base::machine().set_device(device);
    const auto policy = make_choice("kvzip", half(), DType::f32).make();
    FakeLayer layer(steps[0]);
    layer.observe(*policy, 16);
    const auto scores = Kokkos::create_mirror_view_and_copy(
        Kokkos::HostSpace(),
        policy->context_scores(kvzap::ExecutionSpace(), Communicator::self(), 0));
    for (std::int64_t r = 4; r < p.context; ++r) {
      EXPECT_TRUE(std::isfinite(scores(0, r))) << r;
      EXPECT_TRUE(std::isnan(scores(1, r))) << r;
    }
    EXPECT_TRUE(std::isfinite(scores(1, 0)));
  }
  kvzap::base::machine().set_device(false);
}

std::string message_of(const std::string& text, const Budget& budget) {
  try {
    make_choice(text, budget, DType::f32);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Kvzip, TakesABudgetAndNoModifiersOfScores) {
  const PolicyChoice all = make_choice("kvzip-plus", half(), DType::f32);
  EXPECT_EQ(all.budget.pool, Budget::Pool::model);
  EXPECT_TRUE(all.budget.counts_pools);
  EXPECT_EQ(all.budget.safeguard, 0);
  EXPECT_EQ(all.repeat.chunk, 2048);
  const PolicyChoice layerwise = make_choice("kvzip:layerwise=on,chunk=7", half(), DType::f32);
  EXPECT_EQ(layerwise.budget.pool, Budget::Pool::layer);
  EXPECT_EQ(layerwise.repeat.chunk, 7);
  EXPECT_NE(message_of("kvzip", {}).find("no threshold"), std::string::npos);
  for (const auto& modifier : kvzap::modifiers()) {
    if (modifier.needs_repeat) continue;
    std::string text = "kvzip+" + modifier.name;
    if (modifier.name == "per-layer")
      text += ":ratios=" + kvzap::test::source_dir().string() + "/README.md";
    EXPECT_NE(message_of(text, half()).find("it cannot have the modifier " + modifier.name),
              std::string::npos)
        << text << ": " << message_of(text, half());
  }
}

TEST(Kvzip, IsNotAskedForScoresOfAStep) {
  OracleShape p;
  const std::vector<LayerData> steps = repeats_of(p, 0);
  const auto policy = make_choice("kvzip", half(), DType::f32).make();
  FakeLayer layer(steps[0]);
  EXPECT_THROW(layer.run(*policy), Error);
  const auto other = make_choice("knorm", half(), DType::f32).make();
  EXPECT_THROW(other->context_scores(kvzap::ExecutionSpace(), Communicator::self(), 0), Error);
}

}  // namespace
