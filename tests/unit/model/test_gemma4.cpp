// What config.json of Gemma 3n and 4 becomes, and the memory that such models take.
#include <gtest/gtest.h>

#include <cmath>
#include <kvzap/core/head_partition.hpp>
#include <kvzap/model/memory_plan.hpp>
#include <kvzap/model/model.hpp>
#include <nlohmann/json.hpp>
#include <string>

#include "files/json_file.hpp"
#include "model/cache_layers.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap {
namespace {

using test::expect_error;
using test::TemporaryFolder;

/// config.json with six layers, every third of which is full, and `extra`, further fields or others
/// of the same names.
ModelConfig load_gemma(const std::string& class_name, const std::string& extra = "") {
  nlohmann::json config = files::parse_json(
      R"({"hidden_size":64,"intermediate_size":96,"num_hidden_layers":6,"num_attention_heads":8,)"
      R"("num_key_value_heads":4,"vocab_size":100,"head_dim":16,"max_position_embeddings":512,)"
      R"("sliding_window":32,"layer_types":["sliding_attention","sliding_attention",)"
      R"("full_attention","sliding_attention","sliding_attention","full_attention"]})",
      "config");
  config["architectures"] = {class_name};
  config.update(files::parse_json("{" + extra + "}", "extra"));
  TemporaryFolder folder;
  folder.write("config.json", config.dump());
  return ModelConfig::load(folder.path());
}
ModelConfig load_gemma4(const std::string& extra = "") {
  return load_gemma("Gemma4ForCausalLM", extra);
}

TEST(Gemma4, HeadsOfFullLayers) {
  const ModelConfig config =
      load_gemma4(R"("attention_k_eq_v":true,"num_global_key_value_heads":2,"global_head_dim":24)");
  EXPECT_EQ(config.head_dim, 24);
  EXPECT_EQ(config.num_key_value_heads, 2);
  EXPECT_EQ(config.head_dim_of(0), 16);
  EXPECT_EQ(config.kv_heads_of(0), 4);
  EXPECT_EQ(config.query_group_of(0), 2);
  EXPECT_EQ(config.head_dim_of(2), 24);
  EXPECT_EQ(config.query_group_of(2), 4);
  EXPECT_FALSE(config.layer(0).values_are_keys);
  EXPECT_TRUE(config.layer(2).values_are_keys);
  EXPECT_EQ(model::full_layers(config), 2);
  const auto partition = HeadPartition::even(6, 2, 2);
  const CacheShape shape = model::cache_shape(config, partition, 0, 8, 16);
  EXPECT_EQ(shape.heads, (std::vector<int>{2, 2, 1, 2, 2, 1}));
  EXPECT_EQ(shape.dim(0), 16);
  EXPECT_EQ(shape.dim(2), 24);
  EXPECT_EQ(shape.ring_rows(0), 31);
  // The number of global heads counts only where keys are values, as in transformers.
  EXPECT_EQ(load_gemma4(R"("num_global_key_value_heads":2)").num_key_value_heads, 4);
  EXPECT_EQ(load_gemma4().head_dim, 512);
  const std::string own = R"({"head_dim":24,"num_key_value_heads":2})";
  const ModelConfig written =
      load_gemma4(R"("per_layer_config":{"2":)" + own + R"(,"5":)" + own + "}");
  EXPECT_EQ(written.head_dim, 24);
  EXPECT_EQ(written.num_key_value_heads, 2);
  EXPECT_EQ(written.layer(0).kv_heads_factor, 2);
}

TEST(Gemma4, Rope) {
  const ModelConfig config = load_gemma4(R"("global_head_dim":32)");
  EXPECT_EQ(config.rope_theta, 1e6);
  EXPECT_EQ(config.window_rope_theta, 1e4);
  const auto frequencies = rope_inverse_frequencies(config);
  ASSERT_EQ(frequencies.size(), 16U);
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    const float expected = i < 4 ? std::pow(1e6F, -static_cast<float>(2 * i) / 32) : 0;
    EXPECT_NEAR(frequencies[i], expected, 1e-6F * expected) << i;
  }
  const auto of_windows = rope_inverse_frequencies(with_window_rope(config));
  ASSERT_EQ(of_windows.size(), 8U);
  EXPECT_GT(of_windows.back(), 0);
  const std::string type = R"("rope_parameters":{"full_attention":{"rope_type":")";
  EXPECT_EQ(load_gemma4(type + R"(default"}})").turning_part, 1);
  EXPECT_EQ(load_gemma4(type + R"(proportional","partial_rotary_factor":0.5}})").turning_part, 0.5);
}

TEST(Gemma4, SharedRows) {
  const ModelConfig config =
      load_gemma4(R"("num_kv_shared_layers":3,"use_double_wide_mlp":true,"global_head_dim":16)");
  for (std::int64_t l = 0; l < 6; ++l) {
    EXPECT_EQ(config.rows_of(l), l < 3 ? l : l == 5 ? 2 : 1) << l;
    EXPECT_EQ(config.is_full(l), l == 2) << l;
    EXPECT_EQ(config.layer(l).intermediate_size, l < 3 ? 0 : 192) << l;
  }
  const CacheShape shape = model::cache_shape(config, HeadPartition::even(6, 4, 1), 0, 8, 16);
  for (int l = 0; l < 6; ++l) EXPECT_EQ(shape.keeps_rows(l), l < 3) << l;
  // A window stays one in short contexts.
  const ModelConfig wide = load_gemma4(R"("max_position_embeddings":16)");
  EXPECT_EQ(model::full_layers(wide), 2);
}

TEST(Gemma4, PlanCountsAllLayers) {
  for (const char* extra :
       {R"("num_kv_shared_layers":3,"use_double_wide_mlp":true,"global_head_dim":24)",
        R"("attention_k_eq_v":true,"num_global_key_value_heads":2,"enable_moe_block":true,)"
        R"("num_experts":4,"top_k_experts":2,"moe_intermediate_size":24)"}) {
    const ModelConfig config = load_gemma4(extra);
    for (const int ranks : {1, 2}) {
      MemoryDemand demand;
      demand.dtype = DType::bf16;
      demand.tokens = 100;
      demand.ranks = ranks;
      const MemoryPlan plan = plan_memory(config, demand);
      const auto exact = weight_bytes({}, config, DType::bf16, ranks, 0, WeightStorage::unpacked);
      for (int rank = 0; rank < ranks; ++rank) EXPECT_EQ(plan.ranks[rank].weights, exact[rank]);
    }
  }
}

TEST(Gemma4, FieldsAreChecked) {
  const auto refused = [](const std::string& extra, std::initializer_list<std::string_view> parts) {
    expect_error([&] { load_gemma4(extra); }, parts);
  };
  refused(R"("num_kv_shared_layers":4)",
          {"num_kv_shared_layers", "each of the layer_types", "found 4"});
  refused(R"("attention_k_eq_v":true,"num_global_key_value_heads":3)",
          {"num_global_key_value_heads", "a divisor of num_key_value_heads (4)", "found 3"});
  refused(R"("global_head_dim":15)", {"global_head_dim", "even"});
  refused(R"("use_bidirectional_attention":"all")", {"use_bidirectional_attention", "'all'"});
  refused(R"("hidden_size_per_layer_input":2147483647)",
          {"hidden_size_per_layer_input", "at most"});
  refused(R"("enable_moe_block":true)", {"num_experts", "found none"});
  refused(R"("per_layer_config":{"1":{"head_dim":24}})", {"per_layer_config.1", "full layers"});
  refused(R"("rope_parameters":{"full_attention":{"rope_type":"proportional","factor":2}})",
          {"rope_parameters.full_attention.factor", "found 2"});
  const ModelConfig last = load_gemma4(R"("num_hidden_layers":2,"layer_types":[)"
                                       R"("full_attention","sliding_attention"])");
  EXPECT_EQ(last.layer(1).window, 0);
  ASSERT_EQ(last.warnings.size(), 1U);
}

TEST(Gemma4, Unified) {
  const ModelConfig config =
      load_gemma("Gemma4UnifiedForCausalLM",
                 R"("use_bidirectional_attention":"vision","model_type":"gemma4_unified_text")");
  EXPECT_FALSE(config.layer_inputs);
  EXPECT_TRUE(config.warnings.empty());
  TemporaryFolder folder;
  folder.write("config.json",
               R"({"architectures":["Gemma4ForConditionalGeneration"],"text_config":{)"
               R"("model_type":"gemma4_text","num_hidden_layers":6}})");
  const ModelConfig text = ModelConfig::load(folder.path());
  EXPECT_EQ(text.architecture, "Gemma4ForCausalLM");
  EXPECT_EQ(text.layer_inputs->size, 256);
}

TEST(Gemma3n, Fields) {
  const std::string shared = R"("num_kv_shared_layers":0)";
  const auto load = [&](const std::string& extra) {
    return load_gemma("Gemma3nForCausalLM", shared + extra);
  };
  const ModelConfig config = load(R"(,"activation_sparsity_pattern":[0.95,0,0,0,0,0])");
  EXPECT_NEAR(*config.layer(0).gate_cutoff, 1.6448536, 1e-5);
  EXPECT_FALSE(config.layer(1).gate_cutoff);
  EXPECT_EQ(config.alt_up->streams, 4);
  EXPECT_EQ(config.logits_soft_cap, 30);
  const ModelConfig widths = load(R"(,"intermediate_size":[8,8,8,8,8,12])");
  EXPECT_EQ(widths.layer(5).intermediate_size, 12);
  expect_error([&] { load(R"(,"intermediate_size":[8,8])"); }, {"intermediate_size", "6 layers"});
  expect_error([&] { load(R"(,"activation_sparsity_pattern":[1,0,0,0,0,0])"); },
               {"activation_sparsity_pattern", "below 1"});
  expect_error([&] { load(R"(,"altup_num_inputs":17)"); }, {"altup_num_inputs", "16"});
  expect_error([&] { load(R"(,"altup_active_idx":4)"); }, {"altup_active_idx", "3"});
}

}  // namespace
}  // namespace kvzap
