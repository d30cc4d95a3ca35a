// What layers with a shared block need beside it, against plain loops in double precision.
#include <gtest/gtest.h>

#include <kvzap/model/memory_plan.hpp>
#include <vector>

#include "engine/adapters.hpp"
#include "engine/joined_inputs.hpp"
#include "one_step.hpp"

namespace kvzap {
namespace {

using linalg::Matrix;
using test::block_config;
using test::fill;
using test::Numbers;
using test::on_host;
using test::OneStep;
using test::product;
using test::some_numbers;

ModelConfig shared_config() {
  ModelConfig config = block_config();
  config.architecture = "Zamba2ForCausalLM";
  config.num_hidden_layers = 3;
  config.num_key_value_heads = 6;
  StateSpaceConfig space;
  space.heads = 4;
  space.head_dim = 12;
  space.state_dim = 5;
  config.state_space = space;
  config.shared_blocks = SharedBlocksConfig{3, 4};
  config.layers.resize(3);
  for (LayerConfig& layer : config.layers) layer.mixing = TokenMixing::attention_into_state_space;
  config.layers[2].weights_of = 0;
  return config;
}

void expect_near(const Matrix& found, const Numbers& expected) {
  const Numbers numbers = on_host(found);
  ASSERT_EQ(numbers.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ASSERT_NEAR(numbers[i], expected[i], 1e-4 * (1 + std::fabs(expected[i]))) << i;
  }
}

TEST(SharedBlocks, LayersReferToTheSameWeights) {
  const OneStep one(shared_config(), {2});
  const auto& first = one.step.weights(0);
  const auto& second = one.step.weights(1);
  const auto& third = one.step.weights(2);
  EXPECT_EQ(third.qkv.memory().data(), first.qkv.memory().data());
  EXPECT_EQ(third.o.memory().data(), first.o.memory().data());
  EXPECT_EQ(third.dense.down.memory().data(), first.dense.down.memory().data());
  EXPECT_EQ(third.attention_in.weight.data(), first.attention_in.weight.data());
  EXPECT_NE(second.qkv.memory().data(), first.qkv.memory().data());
  EXPECT_NE(third.qkv_adapter.in.memory().data(), first.qkv_adapter.in.memory().data());
  EXPECT_NE(third.block_out.memory().data(), first.block_out.memory().data());
  EXPECT_NE(third.space_out.memory().data(), first.space_out.memory().data());
  EXPECT_EQ(first.qkv.inputs(), 48);
  EXPECT_EQ(first.attention_in.weight.extent(0), 48u);
}

// A rank may have other heads of a layer than of the first one with the block.
TEST(SharedBlocks, OtherHeadsHaveWeightsOfTheirOwn) {
  const ModelConfig config = shared_config();
  const auto partition =
      HeadPartition::balanced({{1, 1, 1, 9, 9, 9}, {1, 1, 1, 9, 9, 9}, {9, 9, 9, 1, 1, 1}}, 2);
  const Model model = Model::load("", config, DType::f32, partition, 0, {17});
  const auto& layers = model.weights().layers;
  ASSERT_NE(partition.heads(0, 0), partition.heads(2, 0));
  EXPECT_NE(layers[2].qkv.memory().data(), layers[0].qkv.memory().data());
  EXPECT_EQ(layers[2].dense.down.memory().data(), layers[0].dense.down.memory().data());
}

TEST(SharedBlocks, MemoryCountsTheirWeightsOnce) {
  const ModelConfig config = shared_config();
  ModelConfig own = config;
  own.layers[2].weights_of = -1;
  const auto bytes_of = [](const ModelConfig& of, int ranks) {
    return weight_bytes({}, of, DType::f32, ranks, 17, WeightStorage::unpacked);
  };
  // q, k and v, o, gate and up, down, two norms
  const std::int64_t block = 144 * 48 + 24 * 48 + 40 * 24 + 24 * 20 + 48 + 24;
  EXPECT_EQ(bytes_of(own, 1)[0] - bytes_of(config, 1)[0], 4 * block);
  for (const int ranks : {1, 2, 4}) {
    const MemoryPlan plan = plan_memory(config, {DType::f32, 0, 0, ranks, 0});
    const std::vector<std::int64_t> bytes = bytes_of(config, ranks);
    for (int rank = 0; rank < ranks; ++rank) EXPECT_EQ(plan.ranks[rank].weights, bytes[rank]);
  }
  const auto loaded = [](const ModelConfig& of) {
    return Model::load("", of, DType::f32, HeadPartition::even(3, 6, 1), 0, {17}).bytes();
  };
  EXPECT_GE(loaded(own), loaded(config) + 4 * block);
}

TEST(Adapters, AddTheirMapOfEachPart) {
  OneStep one(shared_config(), {4, 3});
  const auto& weights = one.step.weights(0).qkv_adapter;
  ASSERT_EQ(weights.out.size(), 3u);
  engine::Adapters adapters;
  adapters.reserve(one.step, weights);
  const std::int64_t inputs = one.step.config.attention_inputs(), outputs = 3 * 48;
  const Matrix x("x", 7, inputs), y("y", 7, outputs);
  fill(x, some_numbers(x.size()));
  fill(y, some_numbers(y.size(), 3));
  Numbers expected = on_host(y);
  const Numbers latents = product(on_host(x), weights.in);  // (token, part, rank)
  for (std::size_t part = 0; part < 3; ++part) {
    Numbers own;
    for (std::size_t i = 0; i < 7 * 3; ++i) own.push_back(latents[i / 3 * 9 + part * 3 + i % 3]);
    const Numbers added = product(own, weights.out[part]);
    for (std::size_t i = 0; i < added.size(); ++i) {
      expected[i / 48 * outputs + part * 48 + i % 48] += added[i];
    }
  }
  adapters.add(one.step, weights, x, {}, y);
  expect_near(y, expected);
  adapters.add(one.step, {}, x, {}, y);  // nothing
  expect_near(y, expected);
}

TEST(JoinedInputs, HaveTheResidualStreamAndTheEmbedding) {
  OneStep one(shared_config(), {4, 3});
  engine::JoinedInputs joined;
  joined.reserve(one.step);
  fill(one.step.h, some_numbers(one.step.h.size()));
  const Numbers embedding = on_host(one.step.h);
  joined.take_embedding(one.step);
  fill(one.step.h, some_numbers(one.step.h.size(), 5));
  const Numbers h = on_host(one.step.h);
  const Matrix x("x", 3, 48);
  joined.join(one.step, {2, 5}, x);
  Numbers expected;
  for (std::size_t row = 2; row < 5; ++row) {
    expected.insert(expected.end(), h.begin() + row * 24, h.begin() + (row + 1) * 24);
    expected.insert(expected.end(), embedding.begin() + row * 24,
                    embedding.begin() + (row + 1) * 24);
  }
  expect_near(x, expected);
}

}  // namespace
}  // namespace kvzap
