// Families that transformers runs by another family's class, or that are nearly another family:
// their config.json and their names of tensors.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <string>
#include <string_view>

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
               {": bias: expected", "false", "found true"});
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

TEST(SharedClasses, CodeGenIsAGptJWithShards) {
  const std::string sizes = R"("n_layer":2,"n_inner":96,"model_type":"codegen")";
  const ModelConfig config = load("CodeGenForCausalLM", sizes + R"(,"rotary_dim":8)");
  EXPECT_TRUE(config.warnings.empty());
  EXPECT_TRUE(config.is_parallel && config.shares_norm && config.head_bias && config.mlp_bias);
  EXPECT_FALSE(config.qkv_bias || config.o_bias);
  EXPECT_EQ(config.rotated_dims(), 8);
  EXPECT_TRUE(config.rope_is_interleaved);
  expect_error([&] { load("CodeGenForCausalLM", sizes + R"(,"rotary_dim":null)"); },
               {"rotary_dim", "a number", "found null"});
  expect_error(
      [&] { load("CodeGenForCausalLM", sizes + R"(,"n_embd":66,"n_head":3,"rotary_dim":8)"); },
      {"n_embd", "multiple of 4", "found 66"});
}

TEST(SharedClasses, DbrxHasObjectsForAttentionAndExperts) {
  const auto dbrx = [](const std::string& attention, const std::string& experts) {
    return load("DbrxForCausalLM", R"("n_layers":2,"model_type":"dbrx","attn_config":{)" +
                                       attention + R"(},"ffn_config":{"ffn_hidden_size":24)" +
                                       experts + "}");
  };
  const std::string four = R"(,"moe_num_experts":4)";
  const ModelConfig config =
      dbrx(R"("kv_n_heads":2,"clip_qkv":8,"rope_theta":500000)", four + R"(,"moe_top_k":3)");
  EXPECT_TRUE(config.warnings.empty());
  EXPECT_EQ(config.num_key_value_heads, 2);
  EXPECT_EQ(config.qkv_limit, 8);
  EXPECT_EQ(config.rope_theta, 5e5);
  EXPECT_EQ(config.norm_type, kvzap::NormType::layer);
  EXPECT_FALSE(config.norm_bias);
  EXPECT_EQ(config.experts->intermediate_size, 24);
  EXPECT_EQ(config.experts->per_token, 3);
  EXPECT_TRUE(config.experts->normalises);
  EXPECT_TRUE(has_tensor(config, "transformer.blocks.1.ffn.experts.mlp.v1"));
  const ModelConfig plain = dbrx("", four + R"(,"moe_normalize_expert_weights":null)");
  EXPECT_EQ(plain.num_key_value_heads, 1);
  EXPECT_EQ(plain.qkv_limit, 0);
  EXPECT_FALSE(plain.experts->normalises);
  expect_error([&] { dbrx("", four + R"(,"moe_normalize_expert_weights":2)"); },
               {"ffn_config.moe_normalize_expert_weights", "expected 1", "found 2"});
  expect_error([&] { dbrx("", four + R"(,"ffn_act_fn":{"name":"gelu"})"); },
               {"ffn_config.ffn_act_fn", "silu", "gelu"});
  expect_error([&] { dbrx(R"("clip_qkv":-1)", four); }, {"clip_qkv", "found -1"});
  expect_error([&] { dbrx(R"("kv_n_heads":3)", four); }, {"attn_config.kv_n_heads", "found 3"});
  expect_error([&] { dbrx("", R"(,"moe_num_experts":0)"); }, {"num_experts", "found 0"});
}

TEST(SharedClasses, Phi4MultimodalIsPhi3OnText) {
  const std::string sizes =
      R"("num_hidden_layers":2,"intermediate_size":96,"sliding_window":262144,)"
      R"("original_max_position_embeddings":128,"partial_rotary_factor":0.75,)"
      R"("vision_config":{},"audio_config":{},"rope_scaling":{"type":"su","short_factor":)"
      R"([1,1,1,1,1,1],"long_factor":[2,2,2,2,2,2]},"model_type":)";
  const ModelConfig config = load("Phi4MultimodalForCausalLM", sizes + R"("phi4_multimodal")");
  ASSERT_EQ(config.warnings.size(), 1U);
  EXPECT_NE(config.warnings[0].find("runs on text alone"), std::string::npos);
  ASSERT_TRUE(config.rope_scaling);
  EXPECT_EQ(config.rope_scaling->type, kvzap::RopeType::longrope);
  EXPECT_EQ(config.rotated_dims(), 12);
  EXPECT_TRUE(has_tensor(config, "model.layers.1.self_attn.qkv_proj.weight"));
  const ModelConfig published = load("Phi4MMForCausalLM", sizes + R"("phi4mm")");
  EXPECT_TRUE(has_tensor(published, "model.layers.1.self_attn.qkv_proj.base_layer.weight"));
  EXPECT_TRUE(has_tensor(published, "model.layers.1.mlp.down_proj.base_layer.weight"));
  expect_error([&] { load("Phi4MMForCausalLM", sizes + R"("phi4mm","lm_head_bias":true)"); },
               {"lm_head_bias", "expected false"});
}

TEST(SharedClasses, ModernBertHasAMapBeforeItsHead) {
  const std::string sizes =
      R"("num_hidden_layers":4,"intermediate_size":96,"model_type":"modernbert-decoder")";
  const ModelConfig config = load("ModernBertDecoderForCausalLM", sizes);
  EXPECT_TRUE(config.warnings.empty());
  EXPECT_EQ(config.norm_type, kvzap::NormType::layer);
  EXPECT_TRUE(config.tie_word_embeddings && config.head_bias);
  EXPECT_FALSE(config.norm_bias);
  EXPECT_EQ(config.rope_theta, 160000);
  EXPECT_EQ(config.window_rope_theta, 10000);
  for (std::int64_t l = 0; l < 4; ++l) EXPECT_EQ(config.layer(l).window, l % 3 == 0 ? 0 : 64) << l;
  EXPECT_FALSE(has_tensor(config, "model.layers.0.attn_norm.weight"));
  EXPECT_TRUE(has_tensor(config, "model.layers.1.attn_norm.weight"));
  EXPECT_TRUE(has_tensor(config, "lm_head.dense.weight"));
  const ModelConfig published =
      load("ModernBertDecoderForCausalLM",
           sizes + R"(,"local_attention":32,"global_attn_every_n_layers":2,)"
                   R"("global_rope_theta":50000,"local_rope_theta":40000,"norm_bias":true)");
  EXPECT_TRUE(published.warnings.empty());
  EXPECT_EQ(published.layer(1).window, 16);
  EXPECT_EQ(published.layer(2).window, 0);
  EXPECT_EQ(published.rope_theta, 50000);
  EXPECT_EQ(published.window_rope_theta, 40000);
  const auto refused = [&](const std::string& fields,
                           std::initializer_list<std::string_view> parts) {
    expect_error([&] { load("ModernBertDecoderForCausalLM", sizes + "," + fields); }, parts);
  };
  refused(R"("local_attention":3)", {"local_attention", "at least 4", "found 3"});
  refused(R"("sliding_window":128)", {"sliding_window", "expected 64", "found 128"});
  refused(R"("classifier_bias":true)", {"classifier_bias", "expected false"});
  refused(R"("classifier_activation":"silu")", {"classifier_activation", "hidden_activation"});
}

TEST(SharedClasses, XglmComputesItsPositions) {
  const std::string sizes =
      R"("d_model":128,"num_layers":2,"attention_heads":8,"ffn_dim":96,"model_type":"xglm")";
  const ModelConfig config = load("XGLMForCausalLM", sizes);
  EXPECT_TRUE(config.warnings.empty());
  EXPECT_TRUE(config.embeds_positions && config.qkv_bias && config.o_bias && config.mlp_bias);
  EXPECT_EQ(config.embedding_multiplier, std::sqrt(128.0));
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_FALSE(config.layer(0).has_rope);
  EXPECT_TRUE(has_tensor(config, "model.layers.1.self_attn.out_proj.bias"));
  EXPECT_EQ(load("XGLMForCausalLM", sizes + R"(,"scale_embedding":false)").embedding_multiplier, 1);
}

TEST(SharedClasses, GptNeoXJapaneseHasOneBias) {
  const std::string sizes = R"("num_hidden_layers":2,"model_type":"gpt_neox_japanese")";
  const ModelConfig config =
      load("GPTNeoXJapaneseForCausalLM", sizes + R"(,"rotary_pct":0.5,"rotary_emb_base":5000)");
  EXPECT_TRUE(config.warnings.empty());
  EXPECT_EQ(config.intermediate_size, 512);
  EXPECT_EQ(config.rotated_dims(), 8);
  EXPECT_EQ(config.rope_theta, 5000);
  EXPECT_FALSE(config.is_parallel || config.o_bias || config.mlp_bias || config.qkv_bias);
  EXPECT_FALSE(has_tensor(config, "gpt_neox_japanese.layers.0.attention.dense_bias"));
  EXPECT_TRUE(has_tensor(config, "gpt_neox_japanese.layers.1.attention.dense_bias"));
  const auto refused = [&](const std::string& fields,
                           std::initializer_list<std::string_view> parts) {
    expect_error([&] { load("GPTNeoXJapaneseForCausalLM", sizes + "," + fields); }, parts);
  };
  refused(R"("intermediate_multiple_size":0)", {"intermediate_multiple_size", "found 0"});
  refused(R"("intermediate_multiple_size":2.5)", {"intermediate_multiple_size", "found 2.5"});
}

TEST(SharedClasses, OtherTypesOfOneClass) {
  const std::string apertus =
      R"("num_hidden_layers":2,"intermediate_size":96,"hidden_act":"xielu","rope_parameters":)"
      R"({"rope_type":"default","rope_theta":12000000},"model_type":"apertus1p5_text")";
  EXPECT_EQ(load("Apertus1p5TextForCausalLM", apertus).architecture, "ApertusForCausalLM");
  load("Apertus1p5TextForCausalLM", apertus + R"(,"output_vocab_size":100)");
  expect_error([&] { load("Apertus1p5TextForCausalLM", apertus + R"(,"output_vocab_size":80)"); },
               {"output_vocab_size", "expected 100", "found 80"});
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
