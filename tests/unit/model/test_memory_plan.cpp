#include <gtest/gtest.h>

#include <cstdint>
#include <kvzap/model/memory_plan.hpp>
#include <limits>
#include <string>

#include "source_dir.hpp"
#include "unit/temporary_folder.hpp"

namespace {

using kvzap::DType;
using kvzap::MemoryPlan;
using kvzap::ModelConfig;
using kvzap::plan_memory;
using kvzap::test::expect_error;

ModelConfig load_repository(const std::string& name) {
  return ModelConfig::load(kvzap::test::source_dir().string() + "/inputs/configs/" + name);
}

/// 2 layers, 6 query and 3 KV heads of 4, hidden 8, intermediate 10, vocabulary 7.
ModelConfig tiny() {
  ModelConfig config{};
  config.architecture = "LlamaForCausalLM";
  config.hidden_size = 8;
  config.intermediate_size = 10;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 6;
  config.num_key_value_heads = 3;
  config.head_dim = 4;
  config.vocab_size = 7;
  return config;
}

TEST(MemoryPlan, Llama65BNeeds335GB) {
  const MemoryPlan plan =
      plan_memory(load_repository("Llama-65B"), {DType::bf16, 128000, 0.75, 8, 128});
  EXPECT_EQ(plan.kv_full, 335'544'320'000);
  EXPECT_EQ(plan.kv_kept, 335'544'320'000 / 4);
  EXPECT_EQ(plan.dense_layer, 335'544'320'000 / 80);
  ASSERT_EQ(plan.ranks.size(), 8u);
  for (const MemoryPlan::Rank& rank : plan.ranks) {
    EXPECT_EQ(rank.kv_full, 335'544'320'000 / 8);
    EXPECT_EQ(rank.kv_kept, 335'544'320'000 / 32);
  }
}

TEST(MemoryPlan, TakesNoTimeForTheChannelsOfALargeStateSpace) {
  kvzap::test::TemporaryFolder folder;
  folder.write("config.json",
               R"({"architectures":["ZambaForCausalLM"],"hidden_size":67108864,"vocab_size":1,)"
               R"("intermediate_size":1,"num_hidden_layers":4,"num_attention_heads":4096,)"
               R"("attention_head_dim":2,"num_key_value_heads":1,"max_position_embeddings":16,)"
               R"("mamba_d_state":1,"mamba_dt_rank":1,"n_mamba_heads":1,"mamba_proj_bias":true})");
  const ModelConfig config = ModelConfig::load(folder.path());
  const std::int64_t hidden = config.hidden_size, inner = config.state_space->inner_size();
  const std::int64_t weights = plan_memory(config, {DType::bf16, 10, 0, 1, 0}).weights;
  EXPECT_GT(weights, 4 * 2 * 3 * inner * hidden);  // the first map has 2 inner rows
  EXPECT_LT(weights, 4 * 2 * 4 * inner * hidden);
}

TEST(MemoryPlan, WeightsOnOneRankAreTheParameterCount) {
  // 65,285,660,672 parameters, of which (2 * 80 + 1) * 8192 are norms.
  const std::int64_t norms = (2 * 80 + 1) * std::int64_t{8192};
  const MemoryPlan plan = plan_memory(load_repository("Llama-65B"), {DType::bf16, 0, 0, 1, 0});
  EXPECT_EQ(plan.weights, (65'285'660'672 - norms) * 2 + norms * 4);
  // Qwen3-0.6B: tied, q and k norms; 596,049,920 parameters.
  const std::int64_t qwen_norms = 28 * (2 * 1024 + 2 * 128) + 1024;
  EXPECT_EQ(plan_memory(load_repository("Qwen3-0.6B"), {DType::f32, 0, 0, 1, 0}).weights,
            std::int64_t{596'049'920} * 4);
  EXPECT_EQ(plan_memory(load_repository("Qwen3-0.6B"), {DType::f16, 0, 0, 1, 0}).weights,
            (596'049'920 - qwen_norms) * std::int64_t{2} + qwen_norms * 4);
}

TEST(MemoryPlan, WeightsAreThoseOfTheLayersInUse) {
  for (const char* name :
       {"Qwen3-30B-A3B", "Llama-4-Scout-17B-16E", "Qwen3-Next-80B-A3B-Instruct"}) {
    ModelConfig config = load_repository(name);
    const std::int64_t all = config.num_hidden_layers;
    std::int64_t before = 0;
    for (const std::int64_t layers : {std::int64_t{1}, std::int64_t{3}, all - 1, all}) {
      config.num_hidden_layers = layers;  // as --layers does
      ModelConfig alone = config;
      alone.layers.resize(static_cast<std::size_t>(layers));
      const std::int64_t weights = plan_memory(config, {DType::bf16, 0, 0, 1, 0}).weights;
      EXPECT_EQ(weights, plan_memory(alone, {DType::bf16, 0, 0, 1, 0}).weights) << name << layers;
      EXPECT_GT(weights, before) << name << layers;
      before = weights;
    }
  }
}

TEST(MemoryPlan, RemaindersGoToTheFirstRanks) {
  const MemoryPlan plan = plan_memory(tiny(), {DType::f16, 10, 0, 2, 0});
  ASSERT_EQ(plan.ranks.size(), 2u);
  // KV heads 2 and 1; 2 layers, keys and values, 4 dimensions, 2 bytes, 10 tokens.
  EXPECT_EQ(plan.ranks[0].kv_full, 2 * 2 * 2 * 10 * 4 * 2);
  EXPECT_EQ(plan.ranks[1].kv_full, 2 * 2 * 1 * 10 * 4 * 2);
  // A layer: q 8x16 and o 16x8, k and v 8x8, three 8x5; tables 4x8 twice; 5 norms of 8 in f32.
  EXPECT_EQ(plan.ranks[0].weights,
            (2 * (2 * 8 * 16 + 2 * 8 * 8 + 3 * 8 * 5) + 2 * 4 * 8) * 2 + 5 * 8 * 4);
  // q 8x8 and o 8x8, k and v 8x4, three 8x5; tables 3x8 twice.
  EXPECT_EQ(plan.ranks[1].weights,
            (2 * (2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 5) + 2 * 3 * 8) * 2 + 5 * 8 * 4);
  EXPECT_EQ(plan.weights, plan.ranks[0].weights + plan.ranks[1].weights);
  EXPECT_EQ(plan.kv_full, plan.ranks[0].kv_full + plan.ranks[1].kv_full);
}

TEST(MemoryPlan, BiasesAndNorms) {
  const std::int64_t plain = plan_memory(tiny(), {DType::bf16, 0, 0, 3, 0}).ranks[0].weights;
  const auto added = [&](auto&& change) {
    ModelConfig config = tiny();
    change(config);
    return (plan_memory(config, {DType::bf16, 0, 0, 3, 0}).ranks[0].weights - plain) / 4;
  };
  // Per rank: one KV head, two query heads, 4 of 10 intermediate dimensions; 2 layers.
  EXPECT_EQ(added([](ModelConfig& config) { config.qkv_bias = true; }), 2 * (8 + 4 + 4));
  EXPECT_EQ(added([](ModelConfig& config) { config.o_bias = true; }), 2 * 8);
  EXPECT_EQ(added([](ModelConfig& config) { config.mlp_bias = true; }), 2 * (4 + 4 + 8));
  EXPECT_EQ(added([](ModelConfig& config) { config.qk_norm = kvzap::QkNorm::head; }), 2 * (4 + 4));
  EXPECT_EQ(added([](ModelConfig& config) { config.norm_bias = true; }), 5 * 8);
  // Gates of 4 times 8 weights in bf16. Three of seven vocabulary rows.
  EXPECT_EQ(added([](ModelConfig& config) { config.gates_feed_forward = false; }), -2 * 4 * 8 / 2);
  EXPECT_EQ(added([](ModelConfig& config) { config.head_bias = true; }), 3);
  // Three of seven vocabulary rows of 8 in bf16.
  EXPECT_EQ(added([](ModelConfig& config) { config.tie_word_embeddings = true; }), -3 * 8 * 2 / 4);
}

TEST(MemoryPlan, OutputBiasesAreOnTheFirstRank) {
  ModelConfig config = tiny();
  const std::int64_t plain = plan_memory(config, {DType::bf16, 0, 0, 3, 0}).ranks[1].weights;
  config.o_bias = true;
  EXPECT_EQ(plan_memory(config, {DType::bf16, 0, 0, 3, 0}).ranks[1].weights, plain);
}

// What exists for a step's tokens alone shrinks with a sparse prefill's chunk.
TEST(MemoryPlan, StepsLimitActivationsAndDenseRows) {
  const MemoryPlan whole = plan_memory(tiny(), {DType::f16, 100, 0, 2, 0});
  const MemoryPlan chunks = plan_memory(tiny(), {DType::f16, 100, 0, 2, 0, 25});
  const MemoryPlan large = plan_memory(tiny(), {DType::f16, 100, 0, 2, 0, 1000});
  // Residual stream of 8 and angles of 4 floats per token, whole on both ranks.
  EXPECT_EQ(whole.ranks[1].activations, 100 * (8 + 4) * 4);
  EXPECT_EQ(whole.activations, 2 * whole.ranks[1].activations);
  EXPECT_EQ(chunks.activations, whole.activations / 4);
  EXPECT_EQ(chunks.dense_layer, whole.dense_layer / 4);
  EXPECT_EQ(chunks.kv_full, whole.kv_full);
  EXPECT_EQ(large.activations, whole.activations);
  expect_error(
      [] {
        plan_memory(tiny(), {DType::f32, 1, 0, 1, 0, -1});
      },
      {"step_tokens", "found -1"});
}

TEST(MemoryPlan, WindowStays) {
  const auto kept_rows = [](std::int64_t tokens, double ratio, int window) {
    const MemoryPlan plan = plan_memory(tiny(), {DType::f32, tokens, ratio, 1, window});
    return plan.kv_kept / (2 * 2 * 3 * 4 * 4);
  };
  EXPECT_EQ(kept_rows(1000, 0.0, 128), 1000);
  EXPECT_EQ(kept_rows(1000, 0.5, 128), 500);
  EXPECT_EQ(kept_rows(1000, 0.95, 128), 128);
  EXPECT_EQ(kept_rows(1000, 0.95, 0), 50);
  EXPECT_EQ(kept_rows(100, 0.95, 128), 100);
  EXPECT_EQ(kept_rows(3, 0.5, 0), 2);
  EXPECT_EQ(kept_rows(0, 0.5, 128), 0);
}

TEST(MemoryPlan, MoreRanksThanKvHeads) {
  // Matrices are shared evenly; rows count where they arrive.
  const ModelConfig config = load_repository("Qwen3-0.6B");
  const MemoryPlan one = plan_memory(config, {DType::bf16, 1000, 0, 1, 0});
  const MemoryPlan many = plan_memory(config, {DType::bf16, 1000, 0, 64, 0});
  EXPECT_EQ(many.kv_full, one.kv_full);
  EXPECT_EQ(many.ranks[0].kv_full, one.kv_full / 8);
  EXPECT_EQ(many.ranks[1].kv_full, 0);
  for (const MemoryPlan::Rank& rank : many.ranks) {
    EXPECT_NEAR(static_cast<double>(rank.weights), static_cast<double>(one.weights) / 64,
                0.05 * static_cast<double>(one.weights) / 64);
  }
  expect_error([] { plan_memory(tiny(), {DType::f32, 1, 0, 0, 0}); }, {"ranks", "found 0"});
}

// 28 layers, 8 KV heads of 128: 512, 260, 196 and 132 bytes a pair.
TEST(MemoryPlan, ChoosesTypesOfRowsForBudgets) {
  const ModelConfig config = load_repository("Qwen3-0.6B");
  constexpr std::int64_t tokens = 10000, rows = 28 * 8 * tokens;
  const auto choice = [&](std::int64_t bytes) {
    return name_of(kvzap::choose_page_format(config, DType::bf16, bytes, tokens), DType::bf16);
  };
  EXPECT_EQ(choice(rows * 512), "bf16");
  EXPECT_EQ(choice(rows * 512 - 1), "q8");
  EXPECT_EQ(choice(rows * 260), "q8");
  EXPECT_EQ(choice(rows * 260 - 1), "q8,q4");
  EXPECT_EQ(choice(rows * 196), "q8,q4");
  EXPECT_EQ(choice(rows * 196 - 1), "q4");
  EXPECT_EQ(choice(1), "q4");
  EXPECT_EQ(name_of(kvzap::choose_page_format(config, DType::f32, rows * 1024, tokens), DType::f32),
            "f32");
}

TEST(MemoryPlan, RatioOutOfRange) {
  for (const double ratio : {-0.1, 1.0, 2.0, std::numeric_limits<double>::infinity(),
                             std::numeric_limits<double>::quiet_NaN()}) {
    expect_error(
        [&] {
          plan_memory(tiny(), {DType::f32, 1, ratio, 1, 0});
        },
        {"evict_ratio", "expected a number in [0, 1)", "found "});
  }
}

TEST(MemoryPlan, NegativeCounts) {
  expect_error([] { plan_memory(tiny(), {DType::f32, -1, 0, 1, 0}); }, {"tokens", "found -1"});
  expect_error([] { plan_memory(tiny(), {DType::f32, 1, 0, 1, -2}); }, {"window", "found -2"});
}

TEST(MemoryPlan, Overflow) {
  expect_error(
      [] {
        plan_memory(tiny(), {DType::f32, std::numeric_limits<std::int64_t>::max(), 0, 1, 0});
      },
      {"below 2^63"});
  ModelConfig config = tiny();
  config.hidden_size = 2147483647;
  config.intermediate_size = 2147483647;
  expect_error([&] { plan_memory(config, {DType::f32, 1, 0, 1, 0}); }, {"below 2^63"});
  config = tiny();
  config.num_hidden_layers = 65536;
  expect_error(
      [&] {
        plan_memory(config, {DType::f32, std::int64_t{1} << 50, 0, 1, 0});
      },
      {"below 2^63"});
}

}  // namespace
