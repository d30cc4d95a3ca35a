// Families that transformers runs by another family's class: their config.json and their names of
// tensors.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "model/read_weights.hpp"
#include "unit/temporary_folder.hpp"

namespace {

using kvzap::ModelConfig;
using kvzap::QkNorm;
using kvzap::test::expect_error;
using kvzap::test::TemporaryFolder;

ModelConfig load(const std::string& class_name, const std::string& fields) {
  TemporaryFolder folder;
  folder.write("config.json",
               R"({"architectures":[")" + class_name +
                   R"("],"hidden_size":128,"num_attention_heads":8,"vocab_size":100,)"
                   R"("max_position_embeddings":512,)" +
                   fields + "}");
  return ModelConfig::load(folder.path());
}

bool has_tensor(const ModelConfig& config, const std::string& name) {
  const auto tensors = kvzap::model::tensors_of(config);
  return std::any_of(tensors.begin(), tensors.end(),
                     [&](const auto& tensor) { return tensor.name == name; });
}

TEST(SharedClasses, ExaoneHasNamesOfItsOwn) {
  const std::string published =
      R"("model_type":"exaone","num_layers":2,"intermediate_size":96,"layer_norm_epsilon":1e-4,)"
      R"("activation_function":"silu","embed_dropout":0.0,"rope_theta":10000)";
  const ModelConfig config = load("ExaoneForCausalLM", published);
  EXPECT_TRUE(config.warnings.empty());
  EXPECT_EQ(config.num_hidden_layers, 2);
  EXPECT_EQ(config.num_key_value_heads, 8);
  EXPECT_EQ(config.head_dim, 16);
  EXPECT_EQ(config.rms_norm_eps, 1e-4);
  EXPECT_EQ(config.rope_theta, 1e4);
  EXPECT_TRUE(has_tensor(config, "transformer.h.1.attn.attention.out_proj.weight"));
  // The class that transformers writes is Llama's; the type decides.
  const std::string written =
      R"("num_hidden_layers":2,"intermediate_size":96,"rms_norm_eps":1e-4,"model_type":)";
  EXPECT_EQ(load("LlamaForCausalLM", written + R"("exaone")").architecture, "ExaoneForCausalLM");
  EXPECT_EQ(load("LlamaForCausalLM", written + R"("exaone")").rope_theta, 5e5);
  EXPECT_EQ(load("LlamaForCausalLM", written + R"("llama")").architecture, "LlamaForCausalLM");
  expect_error([&] { load("LlamaForCausalLM", written + R"("exoane")"); },
               {"model_type", "'llama'", "found 'exoane'"});
  expect_error([&] { load("ExaoneForCausalLM", written + R"("llama")"); },
               {"model_type", "'exaone'", "found 'llama'"});
  expect_error([&] { load("ExaoneForCausalLM", written + R"("exaone","hidden_act":"gelu")"); },
               {"hidden_act", "'silu'", "found 'gelu'"});
}

TEST(SharedClasses, InternLmAndIQuestCoder) {
  const std::string sizes = R"("num_hidden_layers":2,"intermediate_size":96)";
  const std::string internlm = sizes + R"(,"model_type":"internlm3")";
  const ModelConfig biased = load("InternLM3ForCausalLM", internlm + R"(,"bias":true,)"
                                                                     R"("qkv_bias":true)");
  EXPECT_TRUE(biased.warnings.empty());
  EXPECT_TRUE(biased.qkv_bias && biased.o_bias && biased.mlp_bias);
  EXPECT_EQ(biased.num_key_value_heads, 2);
  EXPECT_EQ(biased.head_dim, 128);
  EXPECT_EQ(load("InternLM3ForCausalLM", internlm + R"(,"head_dim":null)").head_dim, 16);
  expect_error([&] { load("InternLM3ForCausalLM", internlm + R"(,"bias":true)"); },
               {"mlp_bias", "expected false", "found true"});
  const std::string iquest = sizes + R"(,"model_type":"iquestcoder")";
  const ModelConfig plain = load("IQuestCoderForCausalLM", iquest);
  EXPECT_EQ(plain.num_key_value_heads, 8);
  EXPECT_EQ(plain.head_dim, 128);
  EXPECT_EQ(load("LlamaForCausalLM", iquest).architecture, "IQuestCoderForCausalLM");
  expect_error([&] { load("IQuestCoderForCausalLM", iquest + R"(,"clip_qkv":8)"); },
               {"clip_qkv", "none", "found 8"});
  expect_error([&] { load("IQuestCoderForCausalLM", iquest + R"(,"use_sliding_window":true)"); },
               {"use_sliding_window", "expected false"});
}

TEST(SharedClasses, SarvamHasOneTensorForQueriesKeysAndValues) {
  const std::string sizes =
      R"("num_hidden_layers":2,"intermediate_size":96,"model_type":"sarvam_moe","num_experts":8)";
  const ModelConfig config =
      load("SarvamMoEForCausalLM", sizes + R"(,"num_shared_experts":2,"use_qkv_bias":true,)"
                                           R"("moe_intermediate_size":24)");
  EXPECT_TRUE(config.warnings.empty());
  EXPECT_EQ(config.qk_norm, QkNorm::head);
  EXPECT_TRUE(config.qkv_bias);
  EXPECT_EQ(config.num_key_value_heads, 4);
  EXPECT_EQ(config.head_dim, 64);
  EXPECT_EQ(config.rotated_dims(), 64);
  EXPECT_EQ(config.rope_theta, 8e6);
  EXPECT_EQ(config.experts->per_token, 6);
  EXPECT_EQ(config.experts->shared_intermediate_size, 48);
  EXPECT_EQ(config.experts->scale, 2.5);
  EXPECT_FALSE(config.layer(0).has_experts);
  EXPECT_TRUE(config.layer(1).has_experts);
  EXPECT_TRUE(has_tensor(config, "model.layers.1.mlp.gate.expert_bias"));
  EXPECT_TRUE(has_tensor(config, "model.layers.0.attention.query_key_value.bias"));
  expect_error([&] { load("SarvamMoEForCausalLM", sizes + R"(,"n_group":3)"); },
               {"n_group", "8 experts", "found 3"});
  EXPECT_EQ(load("Glm4MoeForCausalLM", sizes).architecture, "SarvamMoEForCausalLM");
}

TEST(SharedClasses, OtherTypesOfOneClass) {
  const std::string gpt2 = R"("n_layer":2,"n_inner":96,"model_type":"gpt-sw3")";
  EXPECT_EQ(load("GPT2LMHeadModel", gpt2).architecture, "GPT2LMHeadModel");
  const ModelConfig emu3 = load("Emu3ForConditionalGeneration",
                                R"("model_type":"emu3","text_config":{"model_type":)"
                                R"("emu3_text_model","num_hidden_layers":2},"vq_config":{})");
  EXPECT_EQ(emu3.architecture, "Emu3ForCausalLM");
  EXPECT_EQ(emu3.vocab_size, 184622);
  EXPECT_EQ(emu3.num_key_value_heads, 8);
  EXPECT_EQ(emu3.rope_theta, 1e6);
}

}  // namespace
