// What config.json of each family becomes, and that every tensor of a checkpoint is read.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <kvzap/model/model.hpp>
#include <kvzap/model/safetensors.hpp>
#include <map>
#include <string>

#include "gguf/architectures.hpp"
#include "gguf/tensor_names.hpp"
#include "golden/golden_files.hpp"
#include "model/read_weights.hpp"
#include "model/weight_store.hpp"
#include "unit/temporary_folder.hpp"

namespace {

using kvzap::ExpertsConfig;
using kvzap::ModelConfig;
using kvzap::QkNorm;
using kvzap::rope_inverse_frequencies;
using kvzap::test::expect_error;
using kvzap::test::TemporaryFolder;
namespace fs = std::filesystem;

/// config.json with the essential sizes and `extra`, a list of further fields.
ModelConfig load(const std::string& class_name, const std::string& extra = "") {
  TemporaryFolder folder;
  folder.write("config.json",
               R"({"architectures":[")" + class_name +
                   R"("],"hidden_size":64,"intermediate_size":96,"num_hidden_layers":4,)"
                   R"("num_attention_heads":8,"num_key_value_heads":2,"vocab_size":100,)"
                   R"("head_dim":16,"max_position_embeddings":512)" +
                   (extra.empty() ? "" : "," + extra) + "}");
  return ModelConfig::load(folder.path());
}

std::string layers_with_experts(const ModelConfig& config) {
  std::string marks;
  for (std::int64_t l = 0; l < config.num_hidden_layers; ++l) {
    marks += config.layer(l).has_experts ? 'e' : 'd';
  }
  return marks;
}

TEST(Families, QwenMoe) {
  const std::string sizes = R"("num_experts":16,"moe_intermediate_size":24)";
  const ModelConfig qwen3 =
      load("Qwen3MoeForCausalLM", sizes + R"(,"norm_topk_prob":true,"mlp_only_layers":[2])");
  EXPECT_EQ(qwen3.qk_norm, QkNorm::head);
  EXPECT_EQ(layers_with_experts(qwen3), "eede");
  ASSERT_TRUE(qwen3.experts);
  EXPECT_EQ(qwen3.experts->count, 16);
  EXPECT_EQ(qwen3.experts->per_token, 8);
  EXPECT_EQ(qwen3.experts->intermediate_size, 24);
  EXPECT_TRUE(qwen3.experts->normalises);
  EXPECT_EQ(qwen3.experts->shared_intermediate_size, 0);
  const ModelConfig qwen2 =
      load("Qwen2MoeForCausalLM", sizes + R"(,"decoder_sparse_step":2,"num_experts_per_tok":3)");
  EXPECT_EQ(layers_with_experts(qwen2), "dede");
  EXPECT_TRUE(qwen2.qkv_bias);
  EXPECT_FALSE(qwen2.o_bias);
  EXPECT_EQ(qwen2.experts->per_token, 3);
  EXPECT_FALSE(qwen2.experts->normalises);
  EXPECT_EQ(qwen2.experts->shared_intermediate_size, 5632);
  EXPECT_TRUE(qwen2.experts->has_shared_gate);
}

TEST(Families, ExpertsInEveryLayer) {
  const ModelConfig mixtral = load("MixtralForCausalLM", R"("num_local_experts":8)");
  EXPECT_EQ(layers_with_experts(mixtral), "eeee");
  EXPECT_EQ(mixtral.experts->per_token, 2);
  EXPECT_EQ(mixtral.experts->intermediate_size, 96);
  EXPECT_TRUE(mixtral.experts->normalises);
  EXPECT_EQ(mixtral.experts->scores, ExpertsConfig::Scores::softmax);
  const ModelConfig minimax =
      load("MiniMaxM2ForCausalLM", R"("num_local_experts":8,"rotary_dim":8)");
  EXPECT_EQ(minimax.experts->scores, ExpertsConfig::Scores::sigmoid);
  EXPECT_TRUE(minimax.experts->has_correction);
  EXPECT_EQ(minimax.qk_norm, QkNorm::row);
  EXPECT_EQ(minimax.rotated_dims(), 8);
}

TEST(Families, Glm) {
  const ModelConfig dense = load("Glm4ForCausalLM");
  EXPECT_TRUE(dense.rope_is_interleaved);
  EXPECT_EQ(dense.rotated_dims(), 8);
  EXPECT_FALSE(dense.rotates_halves());
  EXPECT_TRUE(dense.qkv_bias);
  EXPECT_FALSE(dense.o_bias);
  const auto frequencies = rope_inverse_frequencies(dense);
  ASSERT_EQ(frequencies.size(), 8u);
  EXPECT_GT(frequencies[3], 0);
  EXPECT_EQ(frequencies[4], 0);
  const ModelConfig moe =
      load("Glm4MoeForCausalLM",
           R"("n_routed_experts":16,"moe_intermediate_size":24,"n_group":4,"topk_group":2,)"
           R"("n_shared_experts":2,"routed_scaling_factor":2.5,"use_qk_norm":true)");
  EXPECT_EQ(layers_with_experts(moe), "deee");
  EXPECT_FALSE(moe.rope_is_interleaved);
  EXPECT_EQ(moe.rotated_dims(), 8);
  EXPECT_EQ(moe.qk_norm, QkNorm::head);
  EXPECT_EQ(moe.experts->groups, 4);
  EXPECT_EQ(moe.experts->groups_per_token, 2);
  EXPECT_EQ(moe.experts->scale, 2.5);
  EXPECT_EQ(moe.experts->shared_intermediate_size, 48);
}

TEST(Families, LayersWithoutRope) {
  const auto marks = [](const std::string& extra) {
    std::string layers;
    const ModelConfig config = load("SmolLM3ForCausalLM", extra);
    for (std::int64_t l = 0; l < 4; ++l) layers += config.layer(l).has_rope ? 'r' : '-';
    return layers;
  };
  EXPECT_EQ(marks(""), "rrr-");
  EXPECT_EQ(marks(R"("no_rope_layer_interval":2)"), "r-r-");
  EXPECT_EQ(marks(R"("no_rope_layers":[0,1,1,0])"), "-rr-");
  EXPECT_TRUE(load("SmolLM3ForCausalLM").tie_word_embeddings);
}

TEST(Families, FactorsOfGraniteAndMinistral) {
  const ModelConfig granite =
      load("GraniteForCausalLM", R"("embedding_multiplier":12,"attention_multiplier":0.0078125,)"
                                 R"("residual_multiplier":0.22,"logits_scaling":8)");
  EXPECT_EQ(granite.embedding_multiplier, 12);
  EXPECT_EQ(granite.attention_multiplier, 0.0078125);
  EXPECT_EQ(granite.residual_multiplier, 0.22);
  EXPECT_EQ(granite.logits_divisor, 8);
  EXPECT_TRUE(granite.warnings.empty());
  const ModelConfig ministral = load(
      "Ministral3ForCausalLM",
      R"("rope_parameters":{"rope_type":"yarn","factor":16,"original_max_position_embeddings":32,)"
      R"("llama_4_scaling_beta":0.1,"rope_theta":1000000})");
  ASSERT_TRUE(ministral.query_scaling);
  EXPECT_EQ(ministral.query_scaling->beta, 0.1);
  EXPECT_EQ(ministral.query_scaling->length, 32);
  EXPECT_EQ(load("Olmo2ForCausalLM").qk_norm, QkNorm::row);
  EXPECT_EQ(load("Phi3ForCausalLM", R"("partial_rotary_factor":0.75)").rotated_dims(), 12);
}

/// A mark for each layer: its window or chunk, and "-" if it has no RoPE.
std::string kinds(const ModelConfig& config) {
  std::string marks;
  for (const kvzap::LayerConfig& layer : config.layers) {
    marks += fmt::format("{}{} ", layer.window + layer.chunk, layer.has_rope ? "" : "-");
  }
  return marks;
}

TEST(Families, Gemma) {
  const ModelConfig gemma2 = load("Gemma2ForCausalLM", R"("query_pre_attn_scalar":64)");
  EXPECT_EQ(kinds(gemma2), "4096 0 4096 0 ");
  EXPECT_EQ(gemma2.attention_soft_cap, 50);
  EXPECT_EQ(gemma2.logits_soft_cap, 30);
  EXPECT_EQ(gemma2.attention_multiplier, 0.125);
  EXPECT_EQ(gemma2.embedding_multiplier, 8);
  EXPECT_TRUE(gemma2.tie_word_embeddings);
  EXPECT_FALSE(gemma2.window_rope_theta);
  const ModelConfig older =
      load("Gemma3ForCausalLM",
           R"("rope_theta":1000000,"rope_local_base_freq":5000,"rope_scaling":{"factor":8.0,)"
           R"("rope_type":"linear"},"sliding_window":24,"sliding_window_pattern":3)");
  EXPECT_EQ(kinds(older), "24 24 0 24 ");
  EXPECT_EQ(older.activation, kvzap::Activation::gelu_tanh);
  EXPECT_EQ(older.qk_norm, QkNorm::head);
  EXPECT_EQ(older.window_rope_theta, 5000);
  EXPECT_EQ(older.rope_scaling->factor, 8);
  EXPECT_EQ(older.longest_context(), 512);
  EXPECT_EQ(older.attention_soft_cap, 0);
  const ModelConfig current = load(
      "Gemma3ForCausalLM",
      R"("rope_parameters":{"full_attention":{"rope_type":"linear","factor":8.0,)"
      R"("rope_theta":1000000},"sliding_attention":{"rope_type":"default","rope_theta":5000}},)"
      R"("sliding_window":24,"layer_types":["sliding_attention","sliding_attention",)"
      R"("full_attention","sliding_attention"])");
  EXPECT_EQ(kinds(current), kinds(older));
  EXPECT_EQ(current.window_rope_theta, older.window_rope_theta);
  EXPECT_EQ(rope_inverse_frequencies(current), rope_inverse_frequencies(older));
  EXPECT_NE(rope_inverse_frequencies(with_window_rope(current)), rope_inverse_frequencies(current));
  EXPECT_TRUE(current.warnings.empty());
  const ModelConfig plain = load("Gemma3ForCausalLM");
  EXPECT_EQ(plain.rope_theta, 1e6);
  EXPECT_EQ(plain.window_rope_theta, 1e4);
}

TEST(Families, WindowsOfOlmoGptOssAndCohere) {
  const std::string yarn =
      R"("rope_scaling":{"rope_type":"yarn","factor":8,"original_max_position_embeddings":64})";
  const ModelConfig olmo3 = load("Olmo3ForCausalLM", R"("rope_theta":500000,)" + yarn);
  EXPECT_EQ(kinds(olmo3), "4096 4096 4096 0 ");
  EXPECT_EQ(olmo3.window_rope_theta, 500000);
  const ModelConfig kinds_of_rope = load(
      "Olmo3ForCausalLM",
      R"("rope_parameters":{"rope_theta":7,"rope_type":"default","full_attention":{"rope_theta":500000,)"
      R"("rope_type":"yarn","factor":8,"original_max_position_embeddings":64},)"
      R"("sliding_attention":{"rope_type":"default","rope_theta":400000}})");
  EXPECT_EQ(rope_inverse_frequencies(kinds_of_rope), rope_inverse_frequencies(olmo3));
  EXPECT_EQ(kinds_of_rope.window_rope_theta, 400000);
  EXPECT_TRUE(kinds_of_rope.warnings.empty());
  // Scaling that is asked for later must not reach windows either.
  EXPECT_TRUE(load("Olmo3ForCausalLM").window_rope_theta);
  const ModelConfig gpt = load("GptOssForCausalLM", R"("num_local_experts":8,)" + yarn);
  EXPECT_EQ(kinds(gpt), "128 0 128 0 ");
  EXPECT_TRUE(gpt.has_sinks && gpt.qkv_bias && gpt.o_bias);
  EXPECT_TRUE(gpt.experts->has_biases && gpt.experts->has_router_bias);
  EXPECT_EQ(gpt.experts->per_token, 4);
  EXPECT_EQ(gpt.activation, kvzap::Activation::clamped_silu);
  EXPECT_EQ(gpt.gate_limit, 7);
  const ModelConfig cohere =
      load("Cohere2ForCausalLM", R"("layer_norm_eps":1e-4,"logit_scale":0.25,"sliding_window":9)");
  EXPECT_EQ(kinds(cohere), "9 9 9 0- ");
  EXPECT_EQ(cohere.norm_type, kvzap::NormType::layer);
  EXPECT_EQ(cohere.rms_norm_eps, 1e-4);
  EXPECT_EQ(cohere.logits_divisor, 4);
  EXPECT_TRUE(cohere.is_parallel && cohere.tie_word_embeddings && cohere.rope_is_interleaved);
}

TEST(Families, Llama4) {
  const std::string sizes = R"("num_local_experts":16,"intermediate_size_mlp":80)";
  const ModelConfig config = load("Llama4ForCausalLM", sizes + R"(,"no_rope_layers":[])");
  EXPECT_EQ(kinds(config), "8192 8192 8192 0- ");
  EXPECT_EQ(layers_with_experts(config), "eeee");
  EXPECT_EQ(config.intermediate_size, 80);
  EXPECT_EQ(config.experts->intermediate_size, 96);
  EXPECT_EQ(config.experts->shared_intermediate_size, 96);
  EXPECT_EQ(config.experts->per_token, 1);
  EXPECT_TRUE(config.experts->scales_input);
  EXPECT_EQ(config.qk_norm, QkNorm::unit);
  ASSERT_TRUE(config.query_scaling);
  EXPECT_EQ(config.query_scaling->beta, 0.1);
  EXPECT_EQ(config.query_scaling->offset, 1);
  EXPECT_FALSE(config.query_scaling->in_rope_layers);
  const ModelConfig maverick =
      load("Llama4ForCausalLM", sizes + R"(,"interleave_moe_layer_step":2,"use_qk_norm":false,)"
                                        R"("attn_temperature_tuning":0,"attention_chunk_size":32)");
  EXPECT_EQ(layers_with_experts(maverick), "dede");
  EXPECT_EQ(maverick.qk_norm, QkNorm::none);
  EXPECT_FALSE(maverick.query_scaling);
  EXPECT_EQ(kinds(maverick), "32 32 32 0- ");
}

TEST(Families, FeedForwardPartsWithoutGates) {
  using kvzap::Activation;
  const ModelConfig arcee = load("ArceeForCausalLM", R"("attention_bias":true,"mlp_bias":true)");
  EXPECT_FALSE(arcee.gates_feed_forward);
  EXPECT_EQ(arcee.activation, Activation::relu2);
  EXPECT_TRUE(arcee.qkv_bias && arcee.o_bias && arcee.mlp_bias);
  EXPECT_EQ(load("ArceeForCausalLM", R"("hidden_act":"gelu")").activation, Activation::gelu);
  const ModelConfig nemotron = load("NemotronForCausalLM", R"("norm_eps":1e-4)");
  EXPECT_FALSE(nemotron.gates_feed_forward);
  EXPECT_EQ(nemotron.activation, Activation::relu2);
  EXPECT_EQ(nemotron.norm_type, kvzap::NormType::layer);
  EXPECT_TRUE(nemotron.norm_bias);
  EXPECT_EQ(nemotron.rms_norm_eps, 1e-4);
  EXPECT_EQ(nemotron.rotated_dims(), 8);
  const ModelConfig apertus =
      load("ApertusForCausalLM", R"("rope_parameters":{"rope_type":"default"})");
  EXPECT_EQ(apertus.activation, Activation::xielu);
  EXPECT_EQ(apertus.qk_norm, QkNorm::head);
  EXPECT_EQ(apertus.rope_theta, 12e6);
  expect_error([] { load("ApertusForCausalLM"); }, {"rope_parameters", "found none"});
  expect_error([] { load("ApertusForCausalLM", R"("hidden_act":"silu")"); }, {"hidden_act"});
  expect_error([] { load("ArceeForCausalLM", R"("hidden_act":"xielu")"); },
               {"hidden_act", "relu2", "'xielu'"});
  const ModelConfig starcoder = load("Starcoder2ForCausalLM", R"("sliding_window":24)");
  EXPECT_EQ(kinds(starcoder), "24 24 24 24 ");
  EXPECT_EQ(starcoder.activation, Activation::gelu_tanh);
  EXPECT_TRUE(starcoder.qkv_bias && starcoder.o_bias && starcoder.mlp_bias);
  EXPECT_TRUE(starcoder.tie_word_embeddings);
}

TEST(Families, LayerNormsAndParallelParts) {
  const ModelConfig olmo = load("OlmoForCausalLM", R"("clip_qkv":8)");
  EXPECT_EQ(olmo.norm_type, kvzap::NormType::layer);
  EXPECT_FALSE(olmo.norm_bias);
  EXPECT_EQ(olmo.qkv_limit, 8);
  EXPECT_EQ(load("OlmoForCausalLM").qkv_limit, 0);
  expect_error([] { load("OlmoForCausalLM", R"("clip_qkv":-1)"); }, {"clip_qkv", "found -1"});
  const ModelConfig stablelm = load("StableLmForCausalLM", R"("use_qkv_bias":true)");
  EXPECT_TRUE(stablelm.qkv_bias && stablelm.gates_feed_forward && stablelm.norm_bias);
  EXPECT_FALSE(stablelm.o_bias || stablelm.is_parallel);
  EXPECT_EQ(stablelm.rotated_dims(), 4);
  const ModelConfig parallel = load("StableLmForCausalLM", R"("use_parallel_residual":true)");
  EXPECT_TRUE(parallel.is_parallel && parallel.shares_norm);
  EXPECT_EQ(load("StableLmForCausalLM", R"("qk_layernorm":true)").qk_norm, QkNorm::layer_of_head);
  EXPECT_EQ(load("PhiForCausalLM", R"("qk_layernorm":true)").qk_norm, QkNorm::layer_of_head);
  const ModelConfig phi = load("PhiForCausalLM");
  EXPECT_TRUE(phi.is_parallel && phi.shares_norm && phi.head_bias && phi.mlp_bias);
  EXPECT_EQ(phi.activation, kvzap::Activation::gelu_tanh);
  EXPECT_EQ(phi.rotated_dims(), 8);
  TemporaryFolder folder;
  folder.write("config.json",
               R"({"architectures":["GPTNeoXForCausalLM"],"model_type":"gpt_neox",)"
               R"("hidden_size":128,"intermediate_size":96,"num_hidden_layers":4,)"
               R"("num_attention_heads":8,"vocab_size":100,"max_position_embeddings":512,)"
               R"("rotary_pct":0.5,"rotary_emb_base":5000,"hidden_act":"gelu"})");
  const ModelConfig neox = ModelConfig::load(folder.path());
  EXPECT_TRUE(neox.is_parallel && !neox.shares_norm && !neox.gates_feed_forward);
  EXPECT_EQ(neox.activation, kvzap::Activation::gelu);
  EXPECT_EQ(neox.rotated_dims(), 8);
  EXPECT_EQ(neox.rope_theta, 5000);
  EXPECT_TRUE(neox.warnings.empty());
  expect_error([] { load("GPTNeoXForCausalLM"); }, {"num_key_value_heads", "8", "found 2"});
}

TEST(Families, Falcon) {
  const ModelConfig old = load("FalconForCausalLM", R"("num_kv_heads":8,"ffn_hidden_size":80)");
  EXPECT_EQ(old.num_key_value_heads, 1);
  EXPECT_EQ(old.intermediate_size, 80);
  EXPECT_TRUE(old.is_parallel && old.shares_norm && !old.gates_feed_forward && !old.qkv_bias);
  EXPECT_EQ(old.activation, kvzap::Activation::gelu);
  EXPECT_TRUE(old.warnings.empty());
  const std::string of_40b = R"("num_kv_heads":4,"new_decoder_architecture":true)";
  const ModelConfig large = load("FalconForCausalLM", of_40b);
  EXPECT_EQ(large.num_key_value_heads, 4);
  EXPECT_TRUE(large.is_parallel && !large.shares_norm);
  EXPECT_TRUE(load("FalconForCausalLM", of_40b + R"(,"num_ln_in_parallel_attn":1)").shares_norm);
  EXPECT_FALSE(load("FalconForCausalLM", R"("parallel_attn":false)").is_parallel);
  expect_error([] { load("FalconForCausalLM", R"("alibi":true)"); }, {"alibi", "found true"});
  expect_error([] { load("FalconForCausalLM", R"("num_ln_in_parallel_attn":2)"); },
               {"num_ln_in_parallel_attn", "found 2"});
}

TEST(Families, Gpt2) {
  TemporaryFolder folder;
  const auto read = [&](const std::string& extra) {
    folder.write("config.json",
                 R"({"architectures":["GPT2LMHeadModel"],"model_type":"gpt2","n_embd":64,)"
                 R"("n_layer":4,"n_head":8,"n_positions":128,"n_ctx":128,"vocab_size":100)" +
                     extra + "}");
    return ModelConfig::load(folder.path());
  };
  const ModelConfig config = read("");
  EXPECT_EQ(config.hidden_size, 64);
  EXPECT_EQ(config.intermediate_size, 256);
  EXPECT_EQ(config.num_hidden_layers, 4);
  EXPECT_EQ(config.head_dim, 8);
  EXPECT_EQ(config.longest_context(), 128);
  EXPECT_EQ(config.activation, kvzap::Activation::gelu_tanh);
  EXPECT_TRUE(config.embeds_positions && config.tie_word_embeddings && config.norm_bias);
  EXPECT_EQ(kinds(config), "0- 0- 0- 0- ");
  EXPECT_TRUE(config.warnings.empty());
  EXPECT_EQ(read(R"(,"n_inner":96)").intermediate_size, 96);
  expect_error([&] { read(R"(,"scale_attn_by_inverse_layer_idx":true)"); },
               {"scale_attn_by_inverse_layer_idx", "found true"});
}

TEST(Families, SeedOssErnieAndHelium) {
  const ModelConfig seed = load("SeedOssForCausalLM", R"("attention_out_bias":true)");
  EXPECT_TRUE(seed.qkv_bias && seed.o_bias && !seed.mlp_bias);
  const ModelConfig ernie = load("Ernie4_5ForCausalLM", R"("use_bias":true)");
  EXPECT_TRUE(ernie.qkv_bias && ernie.o_bias && ernie.mlp_bias);
  EXPECT_TRUE(ernie.rope_is_interleaved && ernie.tie_word_embeddings);
  EXPECT_EQ(ernie.rope_theta, 500000);
  const ModelConfig helium = load("HeliumForCausalLM", R"("attention_bias":true)");
  EXPECT_TRUE(helium.qkv_bias && !helium.o_bias && helium.rope_is_interleaved);
  EXPECT_EQ(helium.rms_norm_eps, 1e-8);
  EXPECT_FALSE(load("GlmForCausalLM").o_bias);
  EXPECT_EQ(load("GlmForCausalLM").rotated_dims(), 8);
  const ModelConfig gemma = load("GemmaForCausalLM", R"("hidden_act":"gelu")");
  EXPECT_EQ(gemma.activation, kvzap::Activation::gelu_tanh);
  EXPECT_EQ(gemma.embedding_multiplier, 8);
  EXPECT_FALSE(gemma.attention_multiplier);
  expect_error([] { load("GemmaForCausalLM", R"("hidden_act":"relu")"); }, {"hidden_act", "relu"});
  const ModelConfig clova = load("HyperCLOVAXForCausalLM", R"("logits_scaling":0.25)");
  EXPECT_EQ(clova.logits_divisor, 4);
  EXPECT_FALSE(clova.attention_multiplier);
  expect_error([] { load("HyperCLOVAXForCausalLM", R"("use_post_norm":false)"); },
               {"use_post_norm"});
}

TEST(Families, WindowsOfExaoneCwmAndGranite) {
  EXPECT_EQ(kinds(load("Exaone4ForCausalLM")), "4096 4096 4096 0- ");
  EXPECT_EQ(kinds(load("Exaone4ForCausalLM", R"("sliding_window":null)")), "0 0 0 0 ");
  EXPECT_EQ(kinds(load("Exaone4ForCausalLM", R"("sliding_window_pattern":2)")), "4096 0- 4096 0- ");
  expect_error([] { load("Exaone4ForCausalLM", R"("sliding_window_pattern":"LG")"); },
               {"sliding_window_pattern", "layer_types", "'LG'"});
  expect_error([] { load("CwmForCausalLM"); }, {"rope_parameters", "found none"});
  EXPECT_EQ(kinds(load("CwmForCausalLM", R"("rope_parameters":{"rope_type":"default"})")),
            "0 8192 8192 8192 ");
  EXPECT_EQ(kinds(load("MinistralForCausalLM")), "4096 4096 4096 4096 ");
  EXPECT_EQ(kinds(load("VaultGemmaForCausalLM")), "4096 0 4096 0 ");
  const ModelConfig granite =
      load("GraniteSWAForCausalLM", R"("layer_rope_theta":[0,5000,5000,0])");
  EXPECT_EQ(kinds(granite), "0- 128 128 128- ");
  EXPECT_EQ(granite.rope_theta, 5000);
  EXPECT_FALSE(granite.window_rope_theta);
  EXPECT_TRUE(granite.has_sinks && granite.tie_word_embeddings);
  const ModelConfig two = load("GraniteSWAForCausalLM", R"("layer_rope_theta":[6e4,5000,0,0])");
  EXPECT_EQ(two.rope_theta, 60000);
  EXPECT_EQ(two.window_rope_theta, 5000);
  const auto refused = [](const std::string& extra) {
    expect_error([&] { load("GraniteSWAForCausalLM", extra); }, {"layer_rope_theta"});
  };
  refused(R"("layer_rope_theta":[1,2])");
  refused(R"("layer_rope_theta":[0,5000,6000,0])");
  refused(R"("layer_rope_theta":[0,-1,6000,0])");
}

TEST(Families, ExpertsOfLaterClasses) {
  const std::string grouped = R"("moe_intermediate_size":24,"n_routed_experts":16)";
  const ModelConfig dots =
      load("Dots1ForCausalLM", grouped + R"(,"num_experts_per_tok":3,"n_shared_experts":2)");
  EXPECT_EQ(layers_with_experts(dots), "eeee");
  EXPECT_EQ(dots.experts->shared_intermediate_size, 48);
  EXPECT_FALSE(dots.experts->normalises);
  expect_error([&] { load("Dots1ForCausalLM", grouped); }, {"num_experts_per_tok", "found none"});
  EXPECT_EQ(layers_with_experts(load("SolarOpenForCausalLM", grouped)), "eeee");
  const ModelConfig exaone =
      load("ExaoneMoeForCausalLM",
           R"("num_experts":16,"mlp_layer_types":["dense","sparse","dense","sparse"])");
  EXPECT_EQ(layers_with_experts(exaone), "dede");
  EXPECT_EQ(exaone.experts->scale, 2.5);
  EXPECT_EQ(exaone.experts->intermediate_size, 1024);
  expect_error([] { load("ExaoneMoeForCausalLM", R"("num_experts":16,"mlp_layer_types":["x"])"); },
               {"mlp_layer_types", "array of 4"});
  const ModelConfig ernie =
      load("Ernie4_5_MoeForCausalLM", R"("moe_num_experts":16,"moe_k":2,"moe_layer_end_index":2)");
  EXPECT_EQ(layers_with_experts(ernie), "deed");
  EXPECT_EQ(ernie.experts->scores, ExpertsConfig::Scores::softmax);
  EXPECT_TRUE(ernie.experts->has_correction);
  EXPECT_EQ(ernie.experts->shared_intermediate_size, 3072);
  const ModelConfig afmoe = load("AfmoeForCausalLM", R"("num_experts":16,"mup_enabled":true)");
  EXPECT_EQ(layers_with_experts(afmoe), "deee");
  EXPECT_EQ(kinds(afmoe), "1024 1024 1024 0- ");
  EXPECT_TRUE(afmoe.gates_attention);
  EXPECT_EQ(afmoe.embedding_multiplier, 8);
  const ModelConfig shared =
      load("GraniteMoeSharedForCausalLM", R"("num_local_experts":8,"shared_intermediate_size":40)");
  EXPECT_EQ(shared.experts->shared_intermediate_size, 40);
  EXPECT_TRUE(shared.experts->normalises);
  EXPECT_EQ(load("OlmoeForCausalLM", R"("num_experts":8)").experts->per_token, 8);
  EXPECT_EQ(load("OlmoeForCausalLM", R"("num_experts":8,"clip_qkv":2)").qkv_limit, 2);
  EXPECT_EQ(load("FlexOlmoForCausalLM", R"("num_experts":8)").experts->per_token, 5);
  const ModelConfig mellum = load("MellumForCausalLM", R"("num_experts":16)");
  EXPECT_EQ(mellum.rope_theta, 500000);
  EXPECT_EQ(mellum.window_rope_theta, 10000);
  expect_error(
      [] { load("MellumForCausalLM", R"("num_experts":16,"rope_parameters":{"rope_theta":1})"); },
      {"rope_parameters", "full_attention"});
}

TEST(Families, HunyuanAndCohere) {
  const ModelConfig dense = load("HunYuanDenseV1ForCausalLM",
                                 R"("rope_scaling":{"type":"dynamic","alpha":16,"factor":1.0})");
  EXPECT_TRUE(dense.rotates_before_norms);
  EXPECT_EQ(dense.qk_norm, QkNorm::head);
  EXPECT_FALSE(dense.rope_scaling);
  EXPECT_NEAR(dense.rope_theta, 10000 * std::pow(16, 16.0 / 14), 1e-6);
  EXPECT_TRUE(dense.warnings.empty());
  const std::string experts = R"("num_experts":8,"moe_topk":)";
  const ModelConfig moe = load("HunYuanMoEV1ForCausalLM", experts + "[2,2,2,2]");
  EXPECT_EQ(moe.experts->per_token, 2);
  EXPECT_EQ(moe.experts->shared_intermediate_size, 96);
  expect_error([&] { load("HunYuanMoEV1ForCausalLM", experts + "[2,2,2,3]"); },
               {"moe_topk", "2 in all layers"});
  expect_error([&] { load("HunYuanMoEV1ForCausalLM", experts + "9"); }, {"moe_topk", "found 9"});
  const ModelConfig cohere = load("CohereForCausalLM");
  EXPECT_EQ(kinds(cohere), "0 0 0 0 ");
  EXPECT_EQ(cohere.logits_divisor, 16);
  EXPECT_EQ(load("CohereForCausalLM", R"("use_qk_norm":true)").qk_norm, QkNorm::layer_of_head);
  const std::string cohere_experts = R"("num_experts":8,"first_k_dense_replace":1)";
  const ModelConfig mixed = load("Cohere2MoeForCausalLM", cohere_experts);
  EXPECT_EQ(kinds(mixed), "0 4096 4096 4096 ");
  EXPECT_EQ(layers_with_experts(mixed), "deee");
  EXPECT_TRUE(mixed.experts->normalises);
  EXPECT_EQ(mixed.norm_type, kvzap::NormType::layer);
  EXPECT_EQ(load("Cohere2MoeForCausalLM", cohere_experts + R"(,"rms_norm_eps":1e-4)").norm_type,
            kvzap::NormType::rms);
  const std::string shared = cohere_experts + R"(,"num_shared_experts":1)";
  const std::string strategy = R"(,"shared_expert_combination_strategy":)";
  EXPECT_TRUE(load("Cohere2MoeForCausalLM", shared).experts->averages_shared);
  EXPECT_FALSE(
      load("Cohere2MoeForCausalLM", shared + strategy + R"("sum")").experts->averages_shared);
  expect_error([&] { load("Cohere2MoeForCausalLM", shared + strategy + R"("max")"); },
               {"shared_expert_combination_strategy", "average", "max"});
}

/// The same without head_dim and num_key_value_heads.
ModelConfig load_plain(const std::string& class_name, const std::string& extra = "") {
  TemporaryFolder folder;
  folder.write("config.json",
               R"({"architectures":[")" + class_name +
                   R"("],"hidden_size":64,"intermediate_size":96,"num_hidden_layers":4,)"
                   R"("num_attention_heads":8,"vocab_size":100,"max_position_embeddings":512)" +
                   (extra.empty() ? "" : "," + extra) + "}");
  return ModelConfig::load(folder.path());
}

TEST(Families, OperationsOfSmallFamilies) {
  const ModelConfig nanochat = load_plain("NanoChatForCausalLM");
  EXPECT_EQ(nanochat.logits_soft_cap, 15);
  EXPECT_TRUE(nanochat.rope_is_reversed && nanochat.rotates_before_norms);
  EXPECT_FALSE(nanochat.rotates_halves() || nanochat.gates_feed_forward);
  EXPECT_EQ(load_plain("NanoChatForCausalLM", R"("final_logit_softcapping":null)").logits_soft_cap,
            0);
  EXPECT_TRUE(load_plain("BitNetForCausalLM", R"("num_key_value_heads":2)").has_inner_norms);
  const std::string experts = R"("num_local_experts":8)";
  const ModelConfig phimoe = load_plain("PhimoeForCausalLM", experts);
  EXPECT_EQ(phimoe.experts->mixer_margin, 0.02);
  EXPECT_EQ(phimoe.experts->per_token, 2);
  expect_error([&] { load_plain("PhimoeForCausalLM", experts + R"(,"num_experts_per_tok":3)"); },
               {"num_experts_per_tok", "2", "3"});
  EXPECT_EQ(load_plain("OPTForCausalLM", R"("ffn_dim":64)").activation, kvzap::Activation::relu);
  expect_error([] { load_plain("OPTForCausalLM", R"("ffn_dim":64,"do_layer_norm_before":false)"); },
               {"do_layer_norm_before", "true"});
  expect_error([] { load_plain("OPTForCausalLM", R"("ffn_dim":64,"word_embed_proj_dim":8)"); },
               {"word_embed_proj_dim"});
  expect_error([] { load_plain("GPTBigCodeForCausalLM", R"("multi_query":false)"); },
               {"multi_query"});
  EXPECT_EQ(kinds(load_plain("GPTNeoForCausalLM")), "0- 256- 0- 256- ");
  EXPECT_EQ(
      kinds(load_plain("GPTNeoForCausalLM",
                       R"("attention_types":[[["local"],3],[["global"],1]],"window_size":9)")),
      "9- 9- 9- 0- ");
  for (const char* types : {R"([[["global","local"],3]])", R"([[["global"],3]])", R"([["a",4]])",
                            R"([[["all"],4]])", R"([[[],4]])", R"([[["global"],-4]])", "7"}) {
    expect_error(
        [&] { load_plain("GPTNeoForCausalLM", fmt::format(R"("attention_types":{})", types)); },
        {"attention_types", "lists of"});
  }
}

// config.json of a model of texts and images describes its text model.
TEST(Families, TextOfModelsWithImages) {
  TemporaryFolder folder;
  folder.write("config.json",
               R"({"architectures":["Gemma3ForConditionalGeneration"],"model_type":"gemma3",)"
               R"("torch_dtype":"bfloat16","vision_config":{"hidden_size":1152},"text_config":)"
               R"({"model_type":"gemma3_text","hidden_size":2560,"intermediate_size":10240,)"
               R"("num_hidden_layers":34,"sliding_window":1024,)"
               R"("rope_scaling":{"factor":8.0,"rope_type":"linear"}}})");
  const ModelConfig config = ModelConfig::load(folder.path());
  EXPECT_EQ(config.architecture, "Gemma3ForCausalLM");
  EXPECT_EQ(config.vocab_size, 262208);
  EXPECT_EQ(config.num_attention_heads, 8);
  EXPECT_EQ(config.head_dim, 256);
  EXPECT_EQ(config.dtype, kvzap::DType::bf16);
  EXPECT_EQ(config.layer(5).window, 0);
  EXPECT_EQ(config.layer(4).window, 1024);
  EXPECT_EQ(config.longest_context(), 131072);
  ASSERT_EQ(config.warnings.size(), 1u);
  EXPECT_NE(config.warnings.front().find("images are not supported"), std::string::npos);
  folder.write("config.json",
               R"({"architectures":["Llama4ForConditionalGeneration"],"text_config":3})");
  expect_error([&] { ModelConfig::load(folder.path()); }, {"text_config", "an object", "3"});
}

// One rule for all classes of texts and images: the text model's family decides.
TEST(Families, TextModelsOfAnyClass) {
  TemporaryFolder folder;
  const auto of = [&](const std::string& content) {
    folder.write("config.json", content);
    return ModelConfig::load(folder.path());
  };
  const std::string sizes =
      R"("hidden_size":64,"intermediate_size":96,"num_hidden_layers":4,"num_attention_heads":8,)"
      R"("num_key_value_heads":2,"vocab_size":100,"max_position_embeddings":512)";
  const auto of_text = [&](const std::string& name, const char* field, const std::string& text) {
    return of(R"({"architectures":[")" + name + R"("],"model_type":"any","vision_config":{},")" +
              field + R"(":{)" + text + "," + sizes + "}}");
  };
  const struct {
    const char* name;
    const char* field;
    const char* text;
    const char* expected;
  } known[] = {
      {"LlavaForConditionalGeneration", "text_config", R"("model_type":"llama")", "Llama"},
      {"Mistral3ForConditionalGeneration", "text_config", R"("model_type":"mistral")", "Mistral"},
      {"Idefics3ForConditionalGeneration", "text_config", R"("model_type":"llama")", "Llama"},
      {"Cohere2VisionForConditionalGeneration", "text_config", R"("model_type":"cohere2")",
       "Cohere2"},
      {"InternVLChatModel", "llm_config", R"("architectures":["Qwen2ForCausalLM"])", "Qwen2"},
      {"OtherForCausalLM", "language_config", R"("model_type":"qwen3")", "Qwen3"},
      {"Qwen3VLForConditionalGeneration", "text_config",
       R"("model_type":"qwen3_vl_text","rope_scaling":{"rope_type":"default",)"
       R"("mrope_section":[3,3,2],"mrope_interleaved":true})",
       "Qwen3"},
  };
  for (const auto& item : known) {
    const ModelConfig config = of_text(item.name, item.field, item.text);
    EXPECT_EQ(config.architecture, std::string(item.expected) + "ForCausalLM") << item.name;
    ASSERT_EQ(config.warnings.size(), 1u) << item.name << ": " << config.warnings.back();
    EXPECT_NE(config.warnings[0].find("images are not supported"), std::string::npos);
    EXPECT_NE(config.warnings[0].find(item.name), std::string::npos);
  }
  const ModelConfig flat =
      of(R"({"architectures":["Qwen2_5_VLForConditionalGeneration"],"model_type":"qwen2_5_vl",)"
         R"("vision_config":{"depth":3},"image_token_id":5,"rope_scaling":{"type":"mrope",)"
         R"("mrope_section":[2,1,1]},)" +
         sizes + "}");
  EXPECT_EQ(flat.architecture, "Qwen2ForCausalLM");
  EXPECT_FALSE(flat.rope_scaling);
  EXPECT_EQ(flat.warnings.size(), 1u);
  // As transformers' configuration class completes a short text_config.
  const ModelConfig short_one =
      of(R"({"architectures":["LlavaForConditionalGeneration"],"model_type":"llava",)"
         R"("text_config":{"model_type":"llama","vocab_size":32064}})");
  EXPECT_EQ(short_one.hidden_size, 4096);
  EXPECT_EQ(short_one.vocab_size, 32064);
  EXPECT_FALSE(short_one.tie_word_embeddings);
  const auto is_tied = [&](const char* outside, const char* inside) {
    return of(fmt::format(R"({{"architectures":["LlavaForConditionalGeneration"],{}"text_config":)"
                          R"({{"model_type":"qwen2"{}}}}})",
                          outside, inside))
        .tie_word_embeddings;
  };
  EXPECT_TRUE(is_tied(R"("tie_word_embeddings":false,)", R"(,"tie_word_embeddings":true)"));
  EXPECT_TRUE(is_tied(R"("tie_word_embeddings":true,)", R"(,"tie_word_embeddings":false)"));
  EXPECT_FALSE(is_tied(R"("tie_word_embeddings":false,)", ""));
  const auto refused = [&](const std::string& name, const std::string& text,
                           std::initializer_list<std::string_view> parts) {
    expect_error([&] { of_text(name, "text_config", text); }, parts);
  };
  refused("PaliGemmaForConditionalGeneration", R"("model_type":"gemma2")", {"later ones"});
  refused("MllamaForConditionalGeneration", R"("model_type":"mllama_text_model")",
          {"text_config has the model_type", "mllama_text_model", "nearest family"});
  refused("LlavaForSequenceClassification", R"("model_type":"llama")",
          {"a family that kvzap runs", "LlavaForSequenceClassification"});
  refused("LlavaForConditionalGeneration", R"("model_type":"llama","is_encoder_decoder":true)",
          {"is_encoder_decoder"});
  refused("BagelForConditionalGeneration", R"("model_type":"qwen2","qk_norm":true)", {"qk_norm"});
}

TEST(Families, TensorsOfTextModelsHaveManyPrefixes) {
  const std::string values(16, '\0');
  for (const char* prefix :
       {"model.", "language_model.model.", "model.language_model.", "model.text_model.",
        "language_model.", "llm.model.", "model.llm.model.", ""}) {
    TemporaryFolder folder;
    const std::string header = fmt::format(
        R"({{"{}embed_tokens.weight":{{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}}})",
        prefix);
    const std::uint64_t size = header.size();
    std::string file(reinterpret_cast<const char*>(&size), sizeof(size));
    folder.write("model.safetensors", file + header + values);
    EXPECT_TRUE(kvzap::model::open_weights(folder.path())->has("model.embed_tokens.weight"))
        << prefix;
  }
}

// Classes of such models tie by default, and files that transformers writes then lack the head.
TEST(Families, TextModelsWithoutAHeadAreTied) {
  const auto is_tied = [](const std::string& tensors, const std::string& extra) {
    TemporaryFolder folder;
    folder.write("config.json",
                 R"({"architectures":["InternVLForConditionalGeneration"],)" + extra +
                     R"("text_config":{"model_type":"qwen2","hidden_size":2,)"
                     R"("intermediate_size":2,"num_hidden_layers":1,"num_attention_heads":1,)"
                     R"("num_key_value_heads":1,"vocab_size":2,"max_position_embeddings":8}})");
    const std::uint64_t size = tensors.size();
    const std::string begin(reinterpret_cast<const char*>(&size), sizeof(size));
    folder.write("model.safetensors", begin + tensors + std::string(32, '\1'));
    return ModelConfig::load(folder.path()).tie_word_embeddings;
  };
  const auto tensor = [](const char* name, int begin) {
    return fmt::format(R"("{}":{{"dtype":"F32","shape":[2,2],"data_offsets":[{},{}]}})", name,
                       begin, begin + 16);
  };
  const std::string embedding = tensor("model.language_model.embed_tokens.weight", 0);
  const std::string head = tensor("lm_head.weight", 16);
  const std::string other = tensor("model.language_model.norm.weight", 16);
  EXPECT_TRUE(is_tied("{" + embedding + "," + other + "}", ""));
  EXPECT_FALSE(is_tied("{" + embedding + "," + head + "}", ""));
  EXPECT_FALSE(is_tied("{" + embedding + "," + other + "}", R"("tie_word_embeddings":false,)"));
}

TEST(Families, FieldsOfWindowsAreChecked) {
  const auto refused = [](const char* class_name, const std::string& extra,
                          std::initializer_list<std::string_view> parts) {
    expect_error([&] { load(class_name, extra); }, parts);
  };
  refused("Gemma2ForCausalLM", R"("attn_logit_softcapping":-1)", {"attn_logit_softcapping"});
  refused("Gemma3ForCausalLM", R"("hidden_activation":"relu")", {"gelu_pytorch_tanh", "relu"});
  refused("Gemma3ForCausalLM", R"("rope_parameters":{"sliding_attention":{"rope_type":"yarn"}})",
          {"rope_parameters.sliding_attention.rope_type", "default"});
  refused("GptOssForCausalLM", R"("num_local_experts":8)", {"rope_parameters", "found none"});
  refused("Cohere2ForCausalLM", R"("sliding_window_pattern":3)", {"sliding_window_pattern", "4"});
  refused("Llama4ForCausalLM", R"("num_local_experts":8,"moe_layers":1)", {"moe_layers", "array"});
  refused("Llama4ForCausalLM", R"("num_local_experts":8,"attn_temperature_tuning":"x")",
          {"attn_temperature_tuning", "true or false"});
}

TEST(Families, FieldsOfExpertsAreChecked) {
  const std::string qwen = R"("moe_intermediate_size":24,"num_experts":)";
  const auto refused = [](const char* class_name, const std::string& extra,
                          std::initializer_list<std::string_view> parts) {
    expect_error([&] { load(class_name, extra); }, parts);
  };
  refused("Qwen3MoeForCausalLM", R"("moe_intermediate_size":24)", {"num_experts", "found none"});
  refused("Qwen3MoeForCausalLM", qwen + R"(4,"num_experts_per_tok":5)",
          {"num_experts_per_tok", "at most num_experts (4)", "found 5"});
  refused("Qwen3MoeForCausalLM", qwen + "1000000", {"num_experts", "found 1000000"});
  refused("Qwen3MoeForCausalLM", qwen + R"(8,"mlp_only_layers":3)",
          {"mlp_only_layers", "an array", "found 3"});
  refused("Qwen3MoeForCausalLM", qwen + R"(8,"mlp_only_layers":["a"])", {"numbers of layers"});
  refused("Qwen3MoeForCausalLM", R"("num_experts":8)", {"moe_intermediate_size", "found none"});
  const std::string glm = R"("moe_intermediate_size":24,"n_routed_experts":16,"n_group":)";
  refused("Glm4MoeForCausalLM", glm + "3", {"n_group", "16 experts", "found 3"});
  // Their classes have no groups.
  for (const char* name : {"AfmoeForCausalLM", "HYV3ForCausalLM"}) {
    EXPECT_EQ(load(name, R"("num_experts":16,"n_group":3,"norm_topk_prob":false)").experts->groups,
              1);
  }
  refused("Glm4MoeForCausalLM", glm + "16", {"n_group", "groups of 2 or more"});
  refused("Glm4MoeForCausalLM", glm + R"(4,"topk_group":5)", {"topk_group", "found 5"});
  refused("SmolLM3ForCausalLM", R"("no_rope_layers":[1,1])", {"no_rope_layers", "array of 4"});
  refused("SmolLM3ForCausalLM", R"("no_rope_layers":[1,2,1,1])", {"no_rope_layers", "0 or 1"});
  refused("Glm4ForCausalLM", R"("partial_rotary_factor":0.05)",
          {"partial_rotary_factor", "even number", "0 of 16"});
  refused("Phi3ForCausalLM",
          R"("partial_rotary_factor":0.5,"rope_parameters":{"partial_rotary_factor":0.75})",
          {"rope_parameters.partial_rotary_factor", "0.5", "found 0.75"});
  refused("GraniteForCausalLM", R"("residual_multiplier":0)", {"residual_multiplier", "found 0"});
}

TEST(Families, ErrorsSayWhatAClassLacks) {
  expect_error([] { load("JetMoeForCausalLM"); }, {"needs experts that are heads of attention"});
  expect_error([] { load("DiffLlamaForCausalLM"); }, {"needs differential attention"});
  EXPECT_EQ(load("Ernie4_5_ForCausalLM").architecture, "Ernie4_5ForCausalLM");
  expect_error(
      [] { load("Qwen9ForCausalLM", R"("kv_lora_rank":3,"hypers":[1])"); },
      {"Qwen9ForCausalLM", "nearest family is Qwen", "it lacks the fields hypers, kv_lora_rank"});
  expect_error([] { load("Qwen9ForCausalLM", R"("hidden_act":"swosh")"); },
               {"it refuses hidden_act: expected 'silu', found 'swosh'"});
}

// All of a published checkpoint's tensors are read, in the shapes that its files have.
using Tensors = std::map<std::string, std::vector<std::int64_t>>;

/// A tensor under the name that the reader of weights asks for: without the prefix of text models
/// in models of images, and expert by expert if the reader does so.
Tensors plain_names(std::string name, const std::vector<std::int64_t>& shape,
                    const Tensors& asked_for) {
  const std::string prefix = "model.language_model.";
  if (name.rfind(prefix, 0) == 0) name = "model." + name.substr(prefix.size());
  const std::size_t end = name.find(".experts.");
  const std::string block = name.substr(0, end) + ".experts.";
  const bool is_fused = end != std::string::npos && shape.size() == 3;
  if (!is_fused || asked_for.count(block + "0.down_proj.weight") == 0) return {{name, shape}};
  Tensors result;
  for (std::int64_t e = 0; e < shape[0]; ++e) {
    const std::string expert = block + std::to_string(e);
    if (name.substr(block.size()) == "down_proj") {
      result[expert + ".down_proj.weight"] = {shape[1], shape[2]};
      continue;
    }
    for (const char* part : {".gate_proj.weight", ".up_proj.weight"}) {
      result[expert + part] = {shape[1] / 2, shape[2]};
    }
  }
  return result;
}

TEST(Families, EveryTensorIsRead) {
  int checked = 0;
  for (const auto& entry : fs::directory_iterator(kvzap::golden::golden_dir / "families")) {
    if (!fs::exists(entry.path() / "config.json")) continue;
    SCOPED_TRACE(entry.path().filename().string());
    const ModelConfig config = ModelConfig::load(entry.path());
    EXPECT_TRUE(config.warnings.empty()) << fmt::format("{}", fmt::join(config.warnings, "\n"));
    std::map<std::string, std::vector<std::int64_t>> expected, found;
    for (const auto& tensor : kvzap::model::tensors_of(config)) {
      EXPECT_TRUE(found.emplace(tensor.name, tensor.shape).second) << tensor.name;
    }
    const auto files = kvzap::SafetensorsFolder::open(entry.path());
    for (const std::string& name : files.names()) {
      // It chooses tokens of texts that kvzap refuses (attention_top_k).
      if (name.find(".indexer.") != std::string::npos) continue;
      // transformers writes maps of experts that return their input.
      const std::size_t expert = name.find(".experts.");
      if (config.experts && config.experts->identities > 0 && expert != std::string::npos &&
          std::stoll(name.substr(expert + 9)) >= config.experts->count) {
        continue;
      }
      for (auto& [plain, shape] : plain_names(name, files.find(name)->shape, found)) {
        expected[plain] = shape;
      }
    }
    EXPECT_EQ(found, expected);
    ++checked;
  }
  EXPECT_EQ(checked, 127);
}

/// Tensors without a name in GGUF would get no type when weights are quantised while they are
/// loaded: all experts of a layer in one tensor, or inputs of a delta net.
TEST(Families, EveryTensorHasANameInGguf) {
  for (const auto& entry : fs::directory_iterator(kvzap::golden::golden_dir / "families")) {
    if (!fs::exists(entry.path() / "config.json")) continue;
    SCOPED_TRACE(entry.path().filename().string());
    const ModelConfig config = ModelConfig::load(entry.path());
    const auto* architecture =
        kvzap::gguf::architecture_for_types(config.architecture, config.experts.has_value());
    const bool is_in_gguf = kvzap::gguf::architecture_of(config.architecture) != nullptr;
    for (const auto& tensor : kvzap::model::tensors_of(config)) {
      const bool has_name = kvzap::gguf::first_gguf_name(*architecture, tensor.name) != tensor.name;
      // Without an architecture in GGUF, names of matrices suffice.
      const bool is_matrix = tensor.name.find(".weight") != std::string::npos;
      // Files have no norms of heads of some families, whose matrices have names nevertheless.
      const bool is_head_norm = tensor.name.find("_layernorm.") != std::string::npos &&
                                config.qk_norm == QkNorm::layer_of_head;
      const bool is_metadata = kvzap::gguf::activation_key(*architecture, tensor.name).has_value();
      // The rates of Mamba-1, and Zamba's maps of three dimensions, stay plain.
      const bool is_of_space = config.state_space && config.state_space->is_mamba1() &&
                               tensor.name.find(".mamba.") != std::string::npos;
      // Mellum's files have experts in all layers.
      const bool is_dense = architecture->name == "mellum" &&
                            tensor.name.find(".mlp.") != std::string::npos &&
                            tensor.name.find("expert") == std::string::npos;
      EXPECT_TRUE(has_name || is_head_norm || is_metadata || is_of_space || is_dense ||
                  (!is_in_gguf && (is_matrix || tensor.shape.size() != 2)))
          << tensor.name;
    }
  }
}

}  // namespace
