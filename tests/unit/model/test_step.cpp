// Step-3.5-Flash: config.json as published and as transformers writes it.
#include <gtest/gtest.h>

#include <cmath>
#include <initializer_list>
#include <kvzap/model/model_config.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "unit/temporary_folder.hpp"

namespace {

using kvzap::LayerConfig;
using kvzap::ModelConfig;
using kvzap::test::expect_error;
using kvzap::test::TemporaryFolder;

const std::string sizes =
    R"("hidden_size":96,"intermediate_size":80,"num_hidden_layers":5,"num_attention_heads":8,)"
    R"("head_dim":32,"vocab_size":100,"max_position_embeddings":4096,"sliding_window":24,)"
    R"("moe_intermediate_size":24,"share_expert_dim":40,"moe_router_scaling_factor":3.0)";
const std::string scaling =
    R"("rope_type":"llama3","factor":2.0,"original_max_position_embeddings":2048,)"
    R"("low_freq_factor":1.0,"high_freq_factor":32.0)";

ModelConfig load_file(const std::string& content) {
  TemporaryFolder folder;
  folder.write("config.json", content);
  return ModelConfig::load(folder.path());
}

ModelConfig load(const std::string& fields) {
  return load_file(R"({"architectures":["Step3p5ForCausalLM"],"model_type":"step3p5",)" + fields +
                   "}");
}

/// Fields of published files, whose lists go on with two layers that predict further tokens.
std::string published() {
  return sizes +
         R"(,"num_attention_groups":4,"moe_num_experts":16,"moe_top_k":3,)"
         R"("num_nextn_predict_layers":2,"max_seq_len":4096,"use_moe":true,)"
         R"("layer_types":["full_attention","sliding_attention","sliding_attention",)"
         R"("full_attention","sliding_attention","sliding_attention","full_attention"],)"
         R"("rope_theta":[5000000.0,20000.0,20000.0,5000000.0,20000.0,7.0,8.0],)"
         R"("partial_rotary_factors":[0.5,1.0,1.0,0.5,1.0,0.1,0.1],"rope_scaling":{)" +
         scaling +
         R"(},"yarn_only_types":["full_attention"],"use_rope_layers":[],"sink":false,)"
         R"("attention_other_setting":{"attention_type":"sliding_attention",)"
         R"("num_attention_heads":12,"num_attention_groups":4,"head_dim":32,"true_head_dim":32},)"
         R"("moe_layers_enum":"2,3,4,5","moe_every_n_layer":1,"moe_layer_offset":0,)"
         R"("swiglu_limits":[0.0,0.0,7,null,0.5,0.0,9.0],)"
         R"("swiglu_limits_shared":[0.0,16.0,0.0,0.0,2.5,0.0,0.0],"use_qk_norm":true,)"
         R"("norm_expert_weight":true,"moe_router_activation":"sigmoid","att_impl_type":"GQA",)"
         R"("use_head_wise_attn_gate":true,"use_moe_router_bias":true,"need_fp32_gate":true,)"
         R"("zero_centered":true,"torch_dtype":"bfloat16")";
}

void expect_published(const ModelConfig& config) {
  EXPECT_EQ(config.architecture, "Step3p5ForCausalLM");
  EXPECT_EQ(config.num_key_value_heads, 4);
  EXPECT_EQ(config.rms_norm_eps, 1e-5);
  EXPECT_EQ(config.rotated_dims(), 16);
  EXPECT_EQ(config.window_rotary_dim, 32);
  EXPECT_EQ(config.rope_theta, 5e6);
  EXPECT_EQ(config.window_rope_theta, 2e4);
  ASSERT_TRUE(config.rope_scaling);
  EXPECT_EQ(config.rope_scaling->factor, 2);
  EXPECT_FALSE(config.attention_multiplier);
  EXPECT_TRUE(config.gates_attention && config.gates_heads && !config.has_softplus_gates);
  ASSERT_TRUE(config.experts);
  EXPECT_EQ(config.experts->count, 16);
  EXPECT_EQ(config.experts->per_token, 3);
  EXPECT_EQ(config.experts->intermediate_size, 24);
  EXPECT_EQ(config.experts->shared_intermediate_size, 40);
  EXPECT_EQ(config.experts->scale, 3);
  const std::vector<double> of_experts = {0, 0, 7, 0, 0.5}, of_dense = {0, 16, 0, 0, 2.5};
  ASSERT_EQ(config.layers.size(), 5u);
  for (std::size_t l = 0; l < 5; ++l) {
    const LayerConfig& layer = config.layers[l];
    const bool is_full = l == 0 || l == 3;
    EXPECT_EQ(layer.window, is_full ? 0 : 24) << l;
    EXPECT_EQ(layer.keeps_window, !is_full) << l;
    EXPECT_EQ(config.query_heads_of(static_cast<std::int64_t>(l)), is_full ? 8 : 12) << l;
    EXPECT_EQ(layer.has_experts, l >= 2) << l;
    EXPECT_EQ(layer.experts_limit, of_experts[l]) << l;
    EXPECT_EQ(layer.dense_limit, of_dense[l]) << l;
  }
}

/// Fields as transformers writes them.
std::string written() {
  return sizes +
         R"(,"num_key_value_heads":4,"n_routed_experts":16,"num_experts_per_tok":3,)"
         R"("num_nextn_predict_layers":2,"mtp_layer_types":["full_attention"],)"
         R"("mtp_mlp_layer_types":["dense"],"query_pre_attn_scalar":32,"mlp_bias":false,)"
         R"("layer_types":["full_attention","sliding_attention","sliding_attention",)"
         R"("full_attention","sliding_attention"],"num_sliding_attention_heads":12,)"
         R"("per_layer_config":{"1":{"num_attention_heads":12},)"
         R"("2":{"num_attention_heads":12},"4":{"num_attention_heads":12}},)"
         R"("mlp_layer_types":["dense","dense","sparse","sparse","sparse"],)"
         R"("swiglu_limits":[0,0,7,null,0.5],"swiglu_limits_shared":[0,16,0,0,2.5],)"
         R"("rope_parameters":{"full_attention":{"rope_theta":5000000.0,)"
         R"("partial_rotary_factor":0.5,)" +
         scaling +
         R"(},"sliding_attention":{"rope_type":"default","rope_theta":20000.0,)"
         R"("partial_rotary_factor":1.0}})";
}

TEST(Step, PublishedFiles) {
  const ModelConfig config = load(published());
  EXPECT_TRUE(config.warnings.empty()) << config.warnings.front();
  expect_published(config);
}

TEST(Step, FilesOfTransformers) {
  const ModelConfig config = load(written());
  EXPECT_TRUE(config.warnings.empty()) << config.warnings.front();
  expect_published(config);
}

TEST(Step, TextModelOfStep37) {
  for (const std::string& fields : {published(), written()}) {
    const ModelConfig config =
        load_file(R"({"architectures":["Step3p7ForConditionalGeneration"],"model_type":"step3p7",)"
                  R"("vision_config":{"width":32},"image_token_id":7,"text_config":{)"
                  R"("architectures":["Step3p5ForCausalLM"],"model_type":"step3p5",)" +
                  fields + "}}");
    ASSERT_EQ(config.warnings.size(), 1u);
    EXPECT_NE(config.warnings.front().find("images are not supported"), std::string::npos);
    expect_published(config);
  }
}

TEST(Step, AbsentFields) {
  const ModelConfig config = load(sizes + R"(,"n_routed_experts":16,"query_pre_attn_scalar":64)");
  EXPECT_EQ(config.num_key_value_heads, 8);
  EXPECT_EQ(config.experts->per_token, 8);
  EXPECT_EQ(config.rope_theta, 1e4);
  EXPECT_EQ(config.rotated_dims(), 32);
  EXPECT_EQ(config.attention_multiplier, 0.125);
  for (std::int64_t l = 0; l < 5; ++l) {
    EXPECT_TRUE(config.is_full(l));
    EXPECT_EQ(config.layer(l).has_experts, l >= 3);
    EXPECT_EQ(config.layer(l).dense_limit, 0);
  }
  // One base for all layers, and numbers in a list.
  const ModelConfig other =
      load(sizes + R"(,"n_routed_experts":16,"rope_theta":30000.0,"moe_layers_enum":[0,4],)"
                   R"("layer_types":["full_attention","sliding_attention","sliding_attention",)"
                   R"("full_attention","sliding_attention"],"swiglu_limits":[])");
  EXPECT_EQ(other.rope_theta, 3e4);
  EXPECT_EQ(other.window_rope_theta, 3e4);
  EXPECT_EQ(other.query_heads_of(1), 8);
  EXPECT_FALSE(other.layer(1).keeps_window);
  EXPECT_TRUE(other.layer(0).has_experts && other.layer(4).has_experts);
  EXPECT_FALSE(other.layer(3).has_experts);
}

/// Replaces a field of `fields`, which has `old`.
std::string replaced(std::string fields, const std::string& old, const std::string& other) {
  const std::size_t at = fields.find(old);
  EXPECT_NE(at, std::string::npos) << old;
  return at == std::string::npos ? fields : fields.replace(at, old.size(), other);
}

TEST(Step, WrongFieldsOfPublishedFiles) {
  const auto refused = [](const std::string& old, const std::string& other,
                          std::initializer_list<std::string_view> parts) {
    expect_error([&] { load(replaced(published(), old, other)); }, parts);
  };
  refused(R"("rope_theta":[5000000.0,)", R"("rope_theta":[4000000.0,)",
          {"full_attention.rope_theta", "found [4000000.0,5000000.0]"});
  refused(R"(0.5,1.0,1.0,0.5,1.0,0.1,0.1])", R"(0.5,1.0,1.0,0.5,0.25,0.1,0.1])",
          {"sliding_attention.partial_rotary_factor", "[1.0,0.25]"});
  refused(R"(0.5,1.0,1.0,0.5,1.0,0.1,0.1])", "0.5,1.0]", {"partial_rotary_factor", "[0.5,1.0]"});
  refused(R"("num_nextn_predict_layers":2)", R"("num_nextn_predict_layers":3)",
          {"layer_types", "array of 5"});
  refused(R"("num_nextn_predict_layers":2)", R"("num_nextn_predict_layers":-2)", {"layer_types"});
  refused(R"(,"num_attention_groups":4,)", R"(,"num_attention_groups":3,)",
          {"num_attention_groups", "found 3"});
  refused(R"("num_attention_heads":12)", R"("num_attention_heads":10)",
          {"num_sliding_attention_heads", "multiples of num_key_value_heads (4)", "found 10"});
  refused(R"("num_attention_heads":12)", R"("num_attention_heads":0)",
          {"attention_other_setting.num_attention_heads"});
  refused(R"("true_head_dim":32)", R"("true_head_dim":16)",
          {"attention_other_setting.true_head_dim", "expected 32", "found 16"});
  refused(R"("moe_layers_enum":"2,3,4,5")", R"("moe_layers_enum":"2,x")",
          {"moe_layers_enum", "numbers of layers", "2,x"});
  refused(R"("moe_layers_enum":"2,3,4,5")", R"("moe_layers_enum":[2,-1])",
          {"moe_layers_enum", "numbers of layers"});
  refused(R"("moe_layers_enum":"2,3,4,5")", R"("moe_layers_enum":7)",
          {"moe_layers_enum", "found 7"});
  refused(R"("swiglu_limits":[0.0,0.0,7,null,0.5,0.0,9.0])", R"("swiglu_limits":[7])",
          {"swiglu_limits", "array of 5 numbers"});
  refused(R"(0.0,0.0,7,null)", R"(0.0,0.0,-7,null)", {"swiglu_limits", "found -7"});
  refused(R"(0.0,16.0)", R"(0.0,"16")", {"swiglu_limits_shared", "found '16'"});
  for (const char* field : {"use_qk_norm", "use_moe", "use_head_wise_attn_gate",
                            "use_moe_router_bias", "norm_expert_weight", "zero_centered"}) {
    const std::string name = '"' + std::string(field) + "\":";
    refused(name + "true", name + "false", {field, "expected true", "found false"});
  }
  refused(R"("sink":false)", R"("sink":true)", {"sink", "expected false"});
  refused(R"("moe_router_activation":"sigmoid")", R"("moe_router_activation":"softmax")",
          {"moe_router_activation", "'sigmoid'", "'softmax'"});
  refused(R"("use_rope_layers":[])", R"("use_rope_layers":[1,0])", {"use_rope_layers"});
  refused(R"("yarn_only_types":["full_attention"])", R"("yarn_only_types":[])",
          {"yarn_only_types", "full_attention"});
  refused(R"("rope_type":"llama3")", R"("rope_type":"ntk")", {"rope_type", "found 'ntk'"});
}

TEST(Step, WrongFieldsOfTransformers) {
  const auto refused = [](const std::string& old, const std::string& other,
                          std::initializer_list<std::string_view> parts) {
    expect_error([&] { load(replaced(written(), old, other)); }, parts);
  };
  refused(R"("4":{"num_attention_heads":12})", R"("5":{"num_attention_heads":12})",
          {"per_layer_config", "numbers of layers from 0 to 4"});
  refused(R"("4":{"num_attention_heads":12})", R"("4":{"head_dim":16})",
          {"per_layer_config", "num_attention_heads", "head_dim"});
  refused(R"("4":{"num_attention_heads":12})", R"("4":3)", {"per_layer_config", "found 3"});
  refused(R"("4":{"num_attention_heads":12})", R"("3":{"num_attention_heads":12})",
          {"per_layer_config", "same number in all full layers (8)", "found 12"});
  refused(R"("4":{"num_attention_heads":12})", R"("4":{"num_attention_heads":-12})",
          {"per_layer_config", "multiples of", "found -12"});
  refused(R"("mlp_bias":false)", R"("mlp_bias":true)", {"mlp_bias", "expected false"});
  refused(R"("mlp_bias":false)", R"("gating":"per-element")", {"gating", "'per-element'"});
  refused(R"("mlp_bias":false)", R"("sparse_attention_config":{})", {"sparse_attention_config"});
  refused(R"("query_pre_attn_scalar":32)", R"("query_pre_attn_scalar":0)",
          {"query_pre_attn_scalar"});
}

}  // namespace
