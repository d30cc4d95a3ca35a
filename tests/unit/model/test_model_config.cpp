#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <kvzap/model/model_config.hpp>
#include <string>
#include <utility>
#include <vector>

#include "source_dir.hpp"
#include "unit/temporary_folder.hpp"

namespace {

using kvzap::GenerationConfig;
using kvzap::load_stop_ids;
using kvzap::ModelConfig;
using kvzap::rope_inverse_frequencies;
using kvzap::TokenId;
using kvzap::test::expect_error;
using kvzap::test::TemporaryFolder;

/// config.json with the essential sizes and `extra`, a list of further fields.
std::string config_text(const std::string& architecture, const std::string& extra) {
  return R"({"architectures":[")" + architecture +
         R"("],"hidden_size":64,"intermediate_size":96,"num_hidden_layers":2,)"
         R"("num_attention_heads":4,"num_key_value_heads":2,"vocab_size":100,)"
         R"("max_position_embeddings":512)" +
         (extra.empty() ? "" : "," + extra) + "}";
}

ModelConfig load_text(const std::string& text) {
  TemporaryFolder folder;
  folder.write("config.json", text);
  return ModelConfig::load(folder.path());
}

ModelConfig load(const std::string& architecture, const std::string& extra = "") {
  return load_text(config_text(architecture, extra));
}

void expect_load_error(const std::string& architecture, const std::string& extra,
                       std::initializer_list<std::string_view> parts) {
  const auto call = [&] { load(architecture, extra); };
  expect_error(call, {"config.json", "expected", "found"});
  expect_error(call, parts);
}

ModelConfig load_repository(const std::string& name) {
  return ModelConfig::load(kvzap::test::source_dir().string() + "/inputs/configs/" + name);
}

constexpr const char* llama = "LlamaForCausalLM";
constexpr const char* mistral = "MistralForCausalLM";
constexpr const char* qwen2 = "Qwen2ForCausalLM";
constexpr const char* qwen3 = "Qwen3ForCausalLM";

TEST(ModelConfig, AcceptsQuantisedWeights) {
  for (const char* quantisation :
       {R"({"quant_method":"fp8","fmt":"e4m3","activation_scheme":"dynamic",)"
        R"("weight_block_size":[128,128]})",
        R"({"quant_method":"fbgemm_fp8","modules_to_not_convert":["lm_head"]})",
        R"({"quant_method":"compressed-tensors","format":"float-quantized","ignore":["lm_head"],)"
        R"("config_groups":{"group_0":{"targets":["Linear"],"weights":{"num_bits":8,)"
        R"("type":"float","strategy":"channel"}}}})",
        R"({"quant_method":"mxfp4","modules_to_not_convert":["model.embed_tokens"]})",
        R"({"quant_method":"awq","bits":4,"group_size":128,"version":"GEMM","zero_point":true})",
        R"({"quant_method":"gptq","bits":4,"group_size":-1,"desc_act":true,"sym":false})"}) {
    const ModelConfig config = load(llama, std::string(R"("quantization_config":)") + quantisation);
    EXPECT_TRUE(config.warnings.empty()) << quantisation;
  }
  const ModelConfig config =
      load(llama, R"("quantization_config":{"quant_method":"mxfp4","rotation":"x"})");
  ASSERT_EQ(config.warnings.size(), 1u);
  EXPECT_NE(config.warnings[0].find("quantization_config.rotation"), std::string::npos);
}

TEST(ModelConfig, ReadsPublishedConfigs) {
  const ModelConfig small = load_repository("Qwen3-0.6B");
  EXPECT_EQ(small.architecture, qwen3);
  EXPECT_EQ(small.hidden_size, 1024);
  EXPECT_EQ(small.head_dim, 128);
  EXPECT_EQ(small.query_group(), 2);
  EXPECT_EQ(small.rope_theta, 1e6);
  EXPECT_EQ(small.rms_norm_eps, 1e-6);
  EXPECT_EQ(small.dtype, kvzap::DType::bf16);
  EXPECT_TRUE(small.tie_word_embeddings);
  EXPECT_EQ(small.qk_norm, kvzap::QkNorm::head);
  EXPECT_FALSE(small.qkv_bias);
  EXPECT_FALSE(small.rope_scaling);

  const ModelConfig large = load_repository("Llama-65B");
  EXPECT_EQ(large.head_dim, 128);
  EXPECT_EQ(large.query_group(), 1);
  EXPECT_FALSE(large.tie_word_embeddings);
  EXPECT_EQ(large.qk_norm, kvzap::QkNorm::none);

  const ModelConfig scaled = load_repository("Llama-3.1-8B-Instruct");
  ASSERT_TRUE(scaled.rope_scaling);
  EXPECT_EQ(scaled.rope_scaling->factor, 8);
  EXPECT_EQ(scaled.rope_scaling->low_freq_factor, 1);
  EXPECT_EQ(scaled.rope_scaling->high_freq_factor, 4);
  EXPECT_EQ(scaled.rope_scaling->original_max_position_embeddings, 8192);

  for (const char* name :
       {"Qwen3-0.6B", "Qwen3-8B", "Qwen3-32B", "Llama-65B", "Llama-3.1-8B-Instruct"}) {
    EXPECT_TRUE(load_repository(name).warnings.empty()) << load_repository(name).warnings.front();
  }
}

TEST(ModelConfig, DefaultsAreThoseOfTransformers) {
  const ModelConfig config =
      load_text(R"({"architectures":["LlamaForCausalLM"],"hidden_size":64,"intermediate_size":96,)"
                R"("num_hidden_layers":2,"num_attention_heads":4,"vocab_size":100,)"
                R"("max_position_embeddings":512})");
  EXPECT_EQ(config.num_key_value_heads, 4);
  EXPECT_EQ(config.head_dim, 16);
  EXPECT_EQ(config.rms_norm_eps, 1e-6);
  EXPECT_EQ(config.rope_theta, 10000.0);
  EXPECT_FALSE(config.tie_word_embeddings);
  EXPECT_FALSE(config.dtype);
}

TEST(ModelConfig, NullMeansDerivedSizes) {
  const ModelConfig config = load(qwen3, R"("head_dim":null)");
  EXPECT_EQ(config.head_dim, 16);
  EXPECT_EQ(load(qwen3).head_dim, 128);
}

TEST(ModelConfig, BiasesByArchitecture) {
  const auto biases = [](const ModelConfig& config) {
    return std::vector<bool>{config.qkv_bias, config.o_bias, config.mlp_bias};
  };
  const std::string both = R"("attention_bias":true,"mlp_bias":true)";
  EXPECT_EQ(biases(load(llama, both)), (std::vector<bool>{true, true, true}));
  EXPECT_EQ(biases(load(llama)), (std::vector<bool>{false, false, false}));
  EXPECT_EQ(biases(load(qwen3, R"("attention_bias":true)")),
            (std::vector<bool>{true, true, false}));
  EXPECT_EQ(biases(load(qwen2)), (std::vector<bool>{true, false, false}));
  EXPECT_EQ(biases(load(mistral, R"("sliding_window":null)")),
            (std::vector<bool>{false, false, false}));
  const ModelConfig ignored = load(mistral, R"("sliding_window":null,)" + both);
  EXPECT_EQ(biases(ignored), (std::vector<bool>{false, false, false}));
  EXPECT_EQ(ignored.warnings.size(), 2u);
}

TEST(ModelConfig, BothRopeDialectsAgree) {
  const std::string values = R"("factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,)"
                             R"("original_max_position_embeddings":64)";
  const ModelConfig older =
      load(llama, R"("rope_theta":500000.0,"rope_scaling":{"rope_type":"llama3",)" + values + "}");
  const ModelConfig oldest =
      load(llama, R"("rope_theta":500000,"rope_scaling":{"type":"llama3",)" + values + "}");
  const ModelConfig current = load(
      llama, R"("rope_parameters":{"rope_theta":500000.0,"rope_type":"llama3",)" + values + "}");
  for (const ModelConfig& config : {older, oldest, current}) {
    EXPECT_EQ(config.rope_theta, 500000.0);
    ASSERT_TRUE(config.rope_scaling);
    EXPECT_EQ(config.rope_scaling->original_max_position_embeddings, 64);
    EXPECT_TRUE(config.warnings.empty());
  }
  EXPECT_EQ(rope_inverse_frequencies(older), rope_inverse_frequencies(current));
  const ModelConfig plain =
      load(llama, R"("rope_parameters":{"rope_theta":77.0,"rope_type":"default"})");
  EXPECT_EQ(plain.rope_theta, 77.0);
  EXPECT_FALSE(plain.rope_scaling);
}

TEST(ModelConfig, UnknownFieldsAreWarnings) {
  const ModelConfig config =
      load(llama, R"("use_cache":true,"bos_token_id":1,"flux_capacitance":1.21,"unset":null)");
  ASSERT_EQ(config.warnings.size(), 1u);
  EXPECT_NE(config.warnings[0].find("config.json: flux_capacitance"), std::string::npos);
  EXPECT_NE(config.warnings[0].find("1.21"), std::string::npos);
}

// The names are a stranger's, too.
TEST(ModelConfig, WarningsStayShortAndPlain) {
  std::string extra = R"("a\u001b[31m)" + std::string(1000000, 'x') + R"(":1)";
  for (int i = 0; i < 1000; ++i) extra += fmt::format(R"(,"b{}":1)", i);
  const ModelConfig config = load(llama, extra);
  ASSERT_EQ(config.warnings.size(), 21u);
  EXPECT_LT(config.warnings[0].size(), 300u);
  EXPECT_NE(config.warnings[0].find(R"(a\x1b[31mxxx)"), std::string::npos) << config.warnings[0];
  EXPECT_NE(config.warnings[20].find("981 further unknown fields"), std::string::npos)
      << config.warnings[20];
}

// transformers and llama.cpp's converters write these.
TEST(ModelConfig, FieldsWithoutEffectGetNoWarning) {
  const ModelConfig config =
      load(llama, R"("_name_or_path":"a","_model_name_or_path":"a","unk_token_id":0,)"
                  R"("pad_token_id":null,"is_llama_config":true,"rope_interleaved":false)");
  EXPECT_TRUE(config.warnings.empty());
}

TEST(ModelConfig, NeutralValuesOfUnsupportedFieldsAreAccepted) {
  const ModelConfig config =
      load(qwen2, R"("partial_rotary_factor":1.0,"logits_scaling":1,"num_experts":0,)"
                  R"("quantization_config":null,"sliding_window":4096,"use_sliding_window":false,)"
                  R"("layer_types":["full_attention","full_attention"],"model_type":"qwen2")");
  EXPECT_TRUE(config.warnings.empty());
}

struct Refusal {
  const char* architecture;
  const char* extra;
  const char* field;
  const char* expected;
  const char* found;
};

class Refused : public testing::TestWithParam<Refusal> {};

TEST_P(Refused, NamesFieldExpectedAndFound) {
  const Refusal& refusal = GetParam();
  expect_load_error(refusal.architecture, refusal.extra,
                    {std::string(": ") + refusal.field + ": expected", refusal.expected,
                     std::string("found ") + refusal.found});
}

INSTANTIATE_TEST_SUITE_P(
    ModelConfig, Refused,
    testing::Values(
        Refusal{"BloomForCausalLM", "", "architectures", "a family that kvzap runs",
                "[\"BloomForCausalLM\"]"},
        Refusal{llama, R"("model_type":"granite")", "model_type", "'llama'", "'granite'"},
        Refusal{llama, R"("hidden_act":"gelu")", "hidden_act", "'silu'", "'gelu'"},
        Refusal{llama, R"("rope_scaling":{"rope_type":"yran","factor":4.0})",
                "rope_scaling.rope_type", "default, linear, dynamic, yarn, longrope or llama3",
                "'yran'"},
        Refusal{llama, R"("rope_scaling":{"type":"su","factor":4.0})", "rope_scaling.type",
                "longrope", "'su'"},
        Refusal{llama, R"("rope_scaling":{"factor":4.0})", "rope_scaling.rope_type", "linear",
                "none"},
        Refusal{llama, R"("rope_scaling":{"rope_type":"llama3"})", "rope_scaling.factor",
                "a number above 0", "none"},
        Refusal{llama,
                R"("rope_scaling":{"rope_type":"llama3","factor":8,"low_freq_factor":4,)"
                R"("high_freq_factor":3,"original_max_position_embeddings":64})",
                "rope_scaling.high_freq_factor", "at least low_freq_factor (4)", "3"},
        Refusal{llama, R"("rope_scaling":[1])", "rope_scaling", "an object", "[1]"},
        Refusal{llama, R"("rope_parameters":{"full_attention":{"rope_type":"default"}})",
                "rope_parameters.full_attention", "all layers", "{"},
        Refusal{llama, R"("rope_theta":5.0,"rope_parameters":{"rope_theta":6.0})", "rope_theta",
                "6", "5"},
        Refusal{llama,
                R"("rope_scaling":{"rope_type":"default"},"rope_parameters":{"rope_type":"llama3",)"
                R"("factor":8,"low_freq_factor":1,"high_freq_factor":4,)"
                R"("original_max_position_embeddings":64})",
                "rope_parameters", "the same as rope_scaling", "{"},
        Refusal{llama, R"("rope_theta":0)", "rope_theta", "a number above 0", "0"},
        Refusal{llama, R"("partial_rotary_factor":0.5)", "partial_rotary_factor", "1", "0.5"},
        Refusal{llama, R"("rope_parameters":{"partial_rotary_factor":0.25})",
                "rope_parameters.partial_rotary_factor", "1", "0.25"},
        Refusal{mistral, R"("sliding_window":0)", "sliding_window", "a whole number from 1", "0"},
        Refusal{mistral, R"("sliding_window":1)", "sliding_window", "at least 2 tokens", "1"},
        Refusal{llama, R"("rms_norm_eps":1e300)", "rms_norm_eps", "a number from 1e-30 to 1e+30",
                "1e+300"},
        Refusal{llama, R"("rms_norm_eps":1e-40)", "rms_norm_eps", "a number from 1e-30", "1e-40"},
        Refusal{llama,
                R"("rope_scaling":{"rope_type":"llama3","factor":1e300,"low_freq_factor":1,)"
                R"("high_freq_factor":4,"original_max_position_embeddings":64})",
                "rope_scaling.factor", "a number from", "1e+300"},
        Refusal{qwen3, R"("layer_types":["full_attention","sliding_attention"])", "layer_types",
                "full_attention", "'sliding_attention'"},
        Refusal{qwen3, R"("layer_types":["full_attention"])", "layer_types", "array of 2", "["},
        Refusal{llama, R"("quantization_config":[4])", "quantization_config", "an object", "[4]"},
        Refusal{llama, R"("quantization_config":{"bits":4})", "quantization_config.quant_method",
                "fp8, fbgemm_fp8, compressed-tensors, mxfp4, awq or gptq", "none"},
        Refusal{llama, R"("quantization_config":{"quant_method":"bitsandbytes"})",
                "quantization_config.quant_method", "awq or gptq", "'bitsandbytes'"},
        Refusal{llama, R"("quantization_config":{"quant_method":"fp8","fmt":"e5m2"})",
                "quantization_config.fmt", "e4m3", "'e5m2'"},
        Refusal{llama, R"("quantization_config":{"quant_method":"fp8","weight_block_size":[128]})",
                "quantization_config.weight_block_size", "two whole numbers", "[128]"},
        Refusal{llama,
                R"("quantization_config":{"quant_method":"fp8","weight_block_size":[0,128]})",
                "quantization_config.weight_block_size", "two whole numbers", "[0,128]"},
        Refusal{llama, R"("quantization_config":{"quant_method":"awq","bits":8,"group_size":128})",
                "quantization_config.bits", "4", "8"},
        Refusal{llama, R"("quantization_config":{"quant_method":"awq","bits":4})",
                "quantization_config.group_size", "-1 or a whole number above 0", "none"},
        Refusal{llama, R"("quantization_config":{"quant_method":"awq","bits":4,"group_size":0})",
                "quantization_config.group_size", "a whole number from 1", "0"},
        Refusal{
            llama,
            R"("quantization_config":{"quant_method":"awq","bits":4,"group_size":64,"version":"gemv"})",
            "quantization_config.version", "gemm", "'gemv'"},
        Refusal{llama, R"("quantization_config":{"quant_method":"gptq","bits":3,"group_size":64})",
                "quantization_config.bits", "4", "3"},
        Refusal{
            llama,
            R"("quantization_config":{"quant_method":"gptq","bits":4,"group_size":64,"checkpoint_format":"marlin"})",
            "quantization_config.checkpoint_format", "gptq or gptq_v2", "'marlin'"},
        Refusal{
            llama,
            R"("quantization_config":{"quant_method":"gptq","bits":4,"group_size":64,"dynamic":{"x":{}}})",
            "quantization_config.dynamic", "none", "{"},
        Refusal{
            llama,
            R"("quantization_config":{"quant_method":"compressed-tensors","format":"pack-quantized"})",
            "quantization_config.format", "float-quantized", "'pack-quantized'"},
        Refusal{llama, R"("quantization_config":{"quant_method":"compressed-tensors"})",
                "quantization_config.config_groups", "at least one group", "none"},
        Refusal{
            llama,
            R"("quantization_config":{"quant_method":"compressed-tensors","config_groups":{"a":{"weights":{"type":"int"}}}})",
            "quantization_config.config_groups.a.weights.type", "float", "'int'"},
        Refusal{llama, R"("attn_logit_softcapping":50.0)", "attn_logit_softcapping", "none", "50"},
        Refusal{llama, R"("final_logit_softcapping":30.0)", "final_logit_softcapping", "none",
                "30"},
        Refusal{llama, R"("embedding_multiplier":12.0)", "embedding_multiplier", "1", "12"},
        Refusal{llama, R"("logits_scaling":8.0)", "logits_scaling", "1", "8"},
        Refusal{llama, R"("residual_multiplier":0.22)", "residual_multiplier", "1", "0.22"},
        Refusal{llama, R"("attention_multiplier":0.015)", "attention_multiplier", "1", "0.015"},
        Refusal{llama, R"("logit_scale":0.5)", "logit_scale", "1", "0.5"},
        Refusal{qwen3, R"("num_experts":128)", "num_experts", "0", "128"},
        Refusal{mistral, R"("sliding_window":null,"num_local_experts":8)", "num_local_experts", "0",
                "8"},
        Refusal{llama, R"("head_dim":15)", "head_dim", "an even number", "15"},
        Refusal{llama, R"("head_dim":0)", "head_dim", "a whole number from 1", "0"},
        Refusal{llama, R"("head_dim":1000000)", "head_dim", "a whole number from 1", "1000000"},
        Refusal{llama, R"("rms_norm_eps":-1e-6)", "rms_norm_eps", "a number above 0", "-1e-06"},
        Refusal{llama, R"("rms_norm_eps":"small")", "rms_norm_eps", "a number above 0", "'small'"},
        Refusal{llama, R"("tie_word_embeddings":"yes")", "tie_word_embeddings", "true or false",
                "'yes'"},
        Refusal{llama, R"("attention_bias":1)", "attention_bias", "true or false", "1"},
        Refusal{llama, R"("torch_dtype":"float64")", "torch_dtype", "bfloat16", "'float64'"},
        Refusal{llama, R"("dtype":16)", "dtype", "a string", "16"}));

TEST(ModelConfig, EssentialSizesAreRequiredAndBounded) {
  for (const char* field : {"hidden_size", "intermediate_size", "num_hidden_layers",
                            "num_attention_heads", "vocab_size", "max_position_embeddings"}) {
    const std::string text = config_text(llama, "");
    const std::string key = "\"" + std::string(field) + "\":";
    const std::size_t begin = text.find(key) + key.size();
    const std::size_t end = text.find_first_of(",}", begin);
    for (const auto& [value, found] :
         std::vector<std::pair<std::string, std::string>>{{"null", "none"},
                                                          {"0", "0"},
                                                          {"-5", "-5"},
                                                          {"2.5", "2.5"},
                                                          {"\"8\"", "'8'"},
                                                          {"99999999999", "99999999999"},
                                                          {"1e300", "1e+300"},
                                                          {"[1]", "[1]"}}) {
      std::string changed = text;
      changed.replace(begin, end - begin, value);
      expect_error([&] { load_text(changed); },
                   {"config.json: " + std::string(field) + ": expected a whole number from 1",
                    "found " + found});
    }
  }
}

TEST(ModelConfig, KvHeadsMustDivideHeads) {
  std::string text = config_text(llama, "");
  const std::string key = "\"num_key_value_heads\":2";
  text.replace(text.find(key), key.size(), "\"num_key_value_heads\":3");
  expect_error([&] { load_text(text); },
               {"config.json: num_key_value_heads: expected a divisor of num_attention_heads (4)",
                "found 3"});
}

TEST(ModelConfig, DimensionsOfAllHeadsAreBounded) {
  const auto load_heads = [](const std::string& heads, const std::string& head_dim) {
    std::string text = config_text(llama, "\"head_dim\":" + head_dim);
    const std::string key = "\"num_attention_heads\":4";
    text.replace(text.find(key), key.size(), "\"num_attention_heads\":" + heads);
    load_text(text);
  };
  EXPECT_NO_THROW(load_heads("65536", "64"));
  expect_error([&] { load_heads("65536", "66"); },
               {"config.json: num_attention_heads: expected heads of at most 4194304 dimensions",
                "found 65536 of 66"});
}

TEST(ModelConfig, HiddenSizeMustDivideWithoutHeadDim) {
  std::string text = config_text(llama, "");
  const std::string key = "\"hidden_size\":64";
  text.replace(text.find(key), key.size(), "\"hidden_size\":66");
  expect_error([&] { load_text(text); },
               {"hidden_size: expected a multiple of", "(4)", "found 66"});
}

TEST(ModelConfig, MissingFile) {
  TemporaryFolder folder;
  expect_error([&] { ModelConfig::load(folder.path()); },
               {(folder.path() / "config.json").string(), "no such file"});
}

TEST(ModelConfig, NotJson) {
  expect_error([] { load_text("{\"hidden_size\": }"); }, {"config.json", "not valid JSON"});
  expect_error([] { load_text(""); }, {"config.json", "not valid JSON"});
  expect_error([] { load_text("{\"rope_theta\": 1e999}"); }, {"config.json", "not valid JSON"});
}

TEST(ModelConfig, NotAnObject) {
  expect_error([] { load_text("[]"); }, {"config.json", "expected a JSON object", "found array"});
}

TEST(ModelConfig, DeepNesting) {
  expect_error([] { load_text("{\"a\":" + std::string(1000000, '[')); },
               {"config.json", "nested too deeply"});
}

TEST(ModelConfig, RepeatedKey) {
  expect_error([] { load(llama, R"("hidden_size":65)"); },
               {"config.json", "'hidden_size'", "more than once"});
}

TEST(ModelConfig, ArchitecturesOfWrongForm) {
  for (const char* value : {"\"LlamaForCausalLM\"", "[]", "[1]",
                            "[\"LlamaForCausalLM\",\"MistralForCausalLM\"]", "null"}) {
    const auto call = [&] { load_text("{\"architectures\":" + std::string(value) + "}"); };
    expect_error(call, {"config.json: architectures: expected a", "found "});
  }
}

// As transformers' classes find the window: Mistral's 4096 where there is no field, Qwen's for
// layers from max_window_layers on, if at all.
TEST(ModelConfig, SlidingWindows) {
  const auto window = [](const char* architecture, const std::string& extra) {
    return load(architecture, extra).layers.back().window;
  };
  EXPECT_EQ(window(mistral, ""), 4096);
  EXPECT_EQ(window(mistral, R"("sliding_window":null)"), 0);
  EXPECT_EQ(window(mistral, R"("sliding_window":64)"), 64);
  EXPECT_EQ(window(qwen2, R"("sliding_window":64)"), 0);
  EXPECT_EQ(window(qwen2, R"("use_sliding_window":true,"sliding_window":64)"), 0);  // from layer 28
  const std::string slides = R"("use_sliding_window":true,"sliding_window":64,)";
  EXPECT_EQ(window(qwen2, slides + R"("max_window_layers":1)"), 64);
  EXPECT_EQ(window(qwen3, slides + R"("max_window_layers":2)"), 0);
  EXPECT_EQ(window(qwen3, R"("use_sliding_window":true,"max_window_layers":0)"), 4096);
  EXPECT_EQ(window(qwen3, slides + R"("layer_types":["full_attention","sliding_attention"])"), 64);
  EXPECT_EQ(window(qwen3, slides + R"("layer_types":["full_attention","full_attention"])"), 0);
  EXPECT_EQ(load(qwen3, slides + R"("max_window_layers":1)").layers.front().window, 0);
  EXPECT_EQ(load(mistral, R"("sliding_window":64)").longest_context(), 512);
}

TEST(ModelConfig, WhatIsNoFolderOfAModel) {
  TemporaryFolder folder;
  const auto load = [](const std::filesystem::path& path) {
    return [path] { ModelConfig::load(path); };
  };
  expect_error(load("Nobody/No-Model"), {"Nobody/No-Model: no such folder",
                                         "hf download Nobody/No-Model "
                                         "--local-dir No-Model (pip install "
                                         "huggingface_hub), then give No-Model"});
  expect_error(load("a/b/c"), {"a/b/c/config.json: no such file"});
  expect_error(load("../x"), {"../x/config.json: no such file"});
  expect_error(load("models/x.Q4_K.gguf"), {"x.Q4_K.gguf: no such file; expected a GGUF file"});
  folder.write("config.json", "{}");
  expect_error(load(folder.path() / "config.json"), {"is a file; expected a model's folder"});
}

TEST(StopIds, GenerationConfigComesFirst) {
  TemporaryFolder folder;
  folder.write("config.json", R"({"eos_token_id":3})");
  EXPECT_EQ(load_stop_ids(folder.path(), 10), std::vector<TokenId>{3});
  folder.write("generation_config.json", R"({"eos_token_id":[9,0,9]})");
  EXPECT_EQ(load_stop_ids(folder.path(), 10), (std::vector<TokenId>{9, 0}));
  folder.write("generation_config.json", R"({"eos_token_id":null})");
  EXPECT_EQ(load_stop_ids(folder.path(), 10), std::vector<TokenId>{3});
}

TEST(StopIds, NoneIsEmpty) {
  TemporaryFolder folder;
  EXPECT_TRUE(load_stop_ids(folder.path(), 10).empty());
  folder.write("config.json", "{}");
  EXPECT_TRUE(load_stop_ids(folder.path(), 10).empty());
}

TEST(StopIds, BadIdsAreRefused) {
  for (const char* value : {"10", "-1", "2.0", "\"</s>\"", "[1,10]", "[[1]]", "true"}) {
    TemporaryFolder folder;
    folder.write("generation_config.json", "{\"eos_token_id\":" + std::string(value) + "}");
    expect_error(
        [&] { load_stop_ids(folder.path(), 10); },
        {"generation_config.json: eos_token_id: expected a whole number from 0 to 9", "found "});
  }
  TemporaryFolder folder;
  expect_error([&] { load_stop_ids(folder.path(), 0); }, {"vocab_size", "found 0"});
}

constexpr const char* longrope =
    R"("type":"longrope","original_max_position_embeddings":64,)"
    R"("short_factor":[1,1,1,1,1,1,1,1.5],"long_factor":[1,2,3,4,5,6,7,8])";

// Every field of RoPE scaling with values that make no sense; the rest of the object is good.
TEST(Rope, RefusesHostileScalings) {
  const struct {
    const char* good;
    const char* field;
    std::vector<const char*> values;
    const char* expected;
  } refusals[] = {
      {R"("type":"linear")",
       "factor",
       {"null", "0", "0.5", "-4", "1e7", "\"4\"", "[4]", "true"},
       "a number from 1 to 1000000"},
      {R"("type":"dynamic")",
       "factor",
       {"null", "0", "0.99", "1e300"},
       "a number from 1 to 1000000"},
      {R"("type":"yarn")", "factor", {"0", "0.5", "-1", "1e9", "\"x\"", "{}"}, ""},
      {R"("type":"yarn","factor":4)",
       "original_max_position_embeddings",
       {"0", "1", "-5", "2.5", "1e300", "\"64\""},
       "a whole number"},
      {R"("type":"yarn","factor":4)",
       "attention_factor",
       {"0", "-1", "1e9", "\"1\""},
       "a number from 0.001 to 1000"},
      {R"("type":"yarn","factor":4)", "beta_fast", {"0", "-2", "1e300", "0.5", "[]"}, ""},
      {R"("type":"yarn","factor":4)", "beta_slow", {"0", "-2", "33"}, ""},
      {R"("type":"yarn","factor":4)",
       "mscale",
       {"-1", "1e300", "\"1\""},
       "a number from 0 to 1000"},
      {R"("type":"yarn","factor":4)",
       "mscale_all_dim",
       {"-1", "1e300", "false"},
       "a number from 0 to 1000"},
      {R"("type":"yarn","factor":4)", "truncate", {"null", "1", "\"no\""}, "true or false"},
      {longrope, "factor", {"0", "0.5", "1e300"}, "a number from 1 to 1000000"},
      {longrope, "attention_factor", {"0", "-1", "1e300"}, "a number from 0.001 to 1000"},
      {R"("type":"longrope","short_factor":[1,1,1,1,1,1,1,1])",
       "long_factor",
       {"null", "[]", "[1,2,3]", "[1,2,3,4,5,6,7]", "[1,2,3,4,5,6,7,8,9]", "8", "[1,2,3,4,5,6,7,0]",
        "[1,2,3,4,5,6,7,-8]", "[1,2,3,4,5,6,7,1e300]", "[1,2,3,4,5,6,7,null]",
        "[1,2,3,4,5,6,7,\"8\"]"},
       "an array of 8 numbers above 0"},
      {R"("type":"longrope","long_factor":[1,1,1,1,1,1,1,1])",
       "short_factor",
       {"null", "[[1]]", "[1,2,3,4,5,6,7]", "[1,2,3,4,5,6,7,1e-300]"},
       "an array of 8 numbers above 0"},
  };
  for (const auto& refusal : refusals) {
    for (const char* value : refusal.values) {
      const std::string text = fmt::format("\"{}\":{}", refusal.field, value);
      SCOPED_TRACE(std::string(refusal.good) + "," + text);
      const bool crosses = std::string(value) == "33" || std::string(value) == "0.5";
      const std::string field =
          crosses && std::string(refusal.field) == "beta_slow" ? "beta_fast" : refusal.field;
      for (const char* key : {"rope_scaling", "rope_parameters"}) {
        expect_load_error(llama, fmt::format("\"{}\":{{{},{}}}", key, refusal.good, text),
                          {fmt::format("{}.{}: expected", key, field), refusal.expected});
      }
    }
  }
  // A factor may be null, which means derived, but not be left out.
  expect_load_error(llama, R"("rope_scaling":{"type":"yarn"})", {"rope_scaling.factor", "none"});
  expect_load_error(
      llama,
      R"("rope_scaling":{"type":"yarn","factor":null,"original_max_position_embeddings":1024})",
      {"rope_scaling.original_max_position_embeddings", "max_position_embeddings (512)", "1024"});
  expect_load_error(llama, R"("rope_theta":1,"rope_scaling":{"type":"yarn","factor":4})",
                    {"rope_theta: expected a number above 1"});
  expect_load_error(llama, R"("head_dim":2,"rope_scaling":{"type":"dynamic","factor":4})",
                    {"head_dim: expected at least 4"});
  expect_load_error(llama, R"("rope_theta":1e300)", {"rope_theta: expected", "1e+30"});
  expect_error([] { load(llama, R"("rope_scaling":{"type":"linear","factor":NaN})"); },
               {"config.json", "not valid JSON"});
  expect_error([] { load(llama, R"("rope_scaling":{"type":"linear","factor":1e999})"); },
               {"config.json", "not valid JSON"});
  expect_load_error(llama,
                    R"("rope_scaling":{"type":"linear","factor":4},)"
                    R"("rope_parameters":{"rope_type":"dynamic","factor":4})",
                    {"rope_parameters: expected the same as rope_scaling"});
}

TEST(Rope, TheLongestContextFollowsTheScaling) {
  const auto longest = [](const std::string& scaling) {
    return load(llama, "\"rope_scaling\":{" + scaling + "}").longest_context();
  };
  EXPECT_EQ(load(llama).longest_context(), 512);
  EXPECT_EQ(longest(R"("type":"linear","factor":2.5)"), 1280);
  EXPECT_EQ(longest(R"("type":"dynamic","factor":3)"), 1536);
  EXPECT_EQ(longest(R"("type":"yarn","factor":4)"), 2048);
  // As DeepSeek has it: max_position_embeddings is what the scaling makes possible.
  EXPECT_EQ(longest(R"("type":"yarn","factor":4,"original_max_position_embeddings":128)"), 512);
  EXPECT_EQ(longest(R"("type":"yarn","factor":3,"original_max_position_embeddings":400)"), 1200);
  EXPECT_EQ(longest(longrope), 512);
  EXPECT_EQ(longest(std::string(longrope) + R"(,"factor":16)"), 1024);
  EXPECT_EQ(longest(R"("type":"llama3","factor":8,"low_freq_factor":1,"high_freq_factor":4,)"
                    R"("original_max_position_embeddings":64)"),
            512);
  // Positions are numbers of 32 bits.
  ModelConfig huge = load(llama, R"("rope_scaling":{"type":"linear","factor":1e6})");
  huge.rope_scaling->original_max_position_embeddings = 1000000;
  EXPECT_EQ(huge.longest_context(), 2147483647);
}

TEST(Rope, WhatDependsOnTheLength) {
  const ModelConfig linear = load(llama, R"("rope_scaling":{"type":"linear","factor":2})");
  const ModelConfig dynamic = load(llama, R"("rope_scaling":{"type":"dynamic","factor":2})");
  const ModelConfig factors = load(llama, "\"rope_scaling\":{" + std::string(longrope) + "}");
  EXPECT_FALSE(load(llama).rope_depends_on_length());
  EXPECT_FALSE(linear.rope_depends_on_length());
  EXPECT_EQ(rope_inverse_frequencies(linear), rope_inverse_frequencies(linear, 5000));
  const struct {
    const ModelConfig& config;
    std::int64_t original;
  } cases[] = {{dynamic, 512}, {factors, 64}};
  for (const auto& [config, original] : cases) {
    EXPECT_TRUE(config.rope_depends_on_length());
    EXPECT_EQ(rope_inverse_frequencies(config), rope_inverse_frequencies(config, original));
    EXPECT_NE(rope_inverse_frequencies(config), rope_inverse_frequencies(config, original + 1));
  }
  EXPECT_NE(rope_inverse_frequencies(dynamic, 600), rope_inverse_frequencies(dynamic, 601));
  EXPECT_EQ(rope_inverse_frequencies(factors, 600), rope_inverse_frequencies(factors, 601));
}

// Phi-3's original_max_position_embeddings stands beside the RoPE parameters, and wins.
TEST(Rope, TheOriginalLengthBesideTheParametersWins) {
  const std::string inside = R"("rope_scaling":{"type":"yarn","factor":4,)"
                             R"("original_max_position_embeddings":256})";
  const ModelConfig both = load(llama, inside + R"(,"original_max_position_embeddings":128)");
  EXPECT_EQ(both.rope_scaling->original_max_position_embeddings, 128);
  ASSERT_EQ(both.warnings.size(), 1u);
  EXPECT_NE(both.warnings.front().find("128"), std::string::npos);
  EXPECT_EQ(load(llama, inside).rope_scaling->original_max_position_embeddings, 256);
  const ModelConfig plain = load(llama, R"("original_max_position_embeddings":128)");
  EXPECT_FALSE(plain.rope_scaling);
}

TEST(Rope, ScalingByAFactorIsThatOfTheFile) {
  for (const char* type : {"linear", "dynamic", "yarn"}) {
    const ModelConfig config =
        load(llama, fmt::format(R"("rope_scaling":{{"type":"{}","factor":4}})", type));
    const kvzap::RopeType kind = config.rope_scaling->type;
    EXPECT_EQ(name_of(kind), type);
    EXPECT_EQ(kvzap::rope_scaling_by_factor(load(llama), kind, 4), *config.rope_scaling);
    for (const double factor : {0.0, 0.5, -1.0, 1e7, std::nan(""), HUGE_VAL}) {
      expect_error([&] { kvzap::rope_scaling_by_factor(load(llama), kind, factor); },
                   {type, "factor: expected a number from 1 to 1000000, found"});
    }
  }
  expect_error([] { kvzap::rope_scaling_by_factor(load(llama), kvzap::RopeType::longrope, 4); },
               {"longrope", "more than a factor"});
}

void expect_near_relative(float found, double expected) {
  EXPECT_NEAR(found / expected, 1.0, 1e-6) << found << " instead of " << expected;
}

TEST(Rope, PlainFrequencies) {
  const ModelConfig config = load(llama, R"("rope_theta":100)");
  const std::vector<float> found = rope_inverse_frequencies(config);
  const std::vector<double> expected = {
      1.0, 0.5623413251903491,  0.31622776601683794, 0.1778279410038923,
      0.1, 0.05623413251903491, 0.03162277660168379, 0.01778279410038923};
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) expect_near_relative(found[i], expected[i]);
}

// The expected values of both tests come from a double precision evaluation of the formula in a
// separate program. They cover all three branches: kept, interpolated, divided.
TEST(Rope, Llama3FrequenciesOfASmallModel) {
  const ModelConfig config =
      load(llama, R"("rope_parameters":{"rope_theta":500000.0,"rope_type":"llama3","factor":8.0,)"
                  R"("low_freq_factor":1.0,"high_freq_factor":4.0,)"
                  R"("original_max_position_embeddings":512})");
  const std::vector<float> found = rope_inverse_frequencies(config);
  const std::vector<double> expected = {1.0,
                                        0.19392274474868576,
                                        0.0273441373147213,
                                        0.0009115830921521387,
                                        0.00017677669529663688,
                                        3.428102195952591e-05,
                                        6.647869871181235e-06,
                                        1.2891731721515574e-06};
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) expect_near_relative(found[i], expected[i]);
}

TEST(Rope, Llama3FrequenciesOfLlama31) {
  const std::vector<float> found =
      rope_inverse_frequencies(load_repository("Llama-3.1-8B-Instruct"));
  ASSERT_EQ(found.size(), 64u);
  const std::vector<std::pair<std::size_t, double>> expected = {{0, 1},
                                                                {1, 0.814617234},
                                                                {20, 0.0165604401},
                                                                {28, 0.00321144599},
                                                                {29, 0.00216657076},
                                                                {30, 0.00137189357},
                                                                {31, 0.000856751413},
                                                                {32, 0.000524846161},
                                                                {33, 0.00031269375},
                                                                {34, 0.000178507813},
                                                                {35, 9.55621235e-05},
                                                                {36, 7.78465527e-05},
                                                                {63, 3.06892599e-07}};
  for (const auto& [index, value] : expected) expect_near_relative(found[index], value);
}

/// With generation_config.json of these fields.
GenerationConfig load_generation(const std::string& fields) {
  TemporaryFolder folder;
  folder.write("config.json", R"({"repetition_penalty":3})");
  folder.write("generation_config.json", "{" + fields + "}");
  return GenerationConfig::load(folder.path(), 10);
}

TEST(GenerationConfig, ReadsWhatIsFollowed) {
  const GenerationConfig config = load_generation(
      R"("eos_token_id":[9,8],"repetition_penalty":1.05,"suppress_tokens":[1,2],)"
      R"("bad_words_ids":[[3],[9],[4,9]],"do_sample":true,"temperature":0.6,"top_k":20,)"
      R"("max_new_tokens":7,"no_repeat_ngram_size":0,"num_beams":1,"guidance_scale":1.0,)"
      R"("forced_bos_token_id":null,"begin_suppress_tokens":[],"token_healing":false,"odd":1)");
  EXPECT_EQ(config.stop_ids, (std::vector<TokenId>{9, 8}));
  EXPECT_EQ(config.repetition_penalty, 1.05);
  EXPECT_EQ(config.suppress_tokens, (std::vector<TokenId>{1, 2}));
  EXPECT_EQ(config.bad_words, (std::vector<std::vector<TokenId>>{{3}, {4, 9}}));
  EXPECT_TRUE(config.changes_logits());
  ASSERT_EQ(config.warnings.size(), 1u);
  EXPECT_NE(config.warnings[0].find("generation_config.json: odd: unknown"), std::string::npos);
}

// As transformers' from_pretrained: config.json counts where there is no other file.
TEST(GenerationConfig, ConfigCountsWhereItIsAlone) {
  EXPECT_FALSE(load_generation("").changes_logits());
  TemporaryFolder folder;
  EXPECT_FALSE(GenerationConfig::load(folder.path(), 10).changes_logits());
  folder.write("config.json", R"({"repetition_penalty":3,"hidden_size":4})");
  const GenerationConfig config = GenerationConfig::load(folder.path(), 10);
  EXPECT_EQ(config.repetition_penalty, 3);
  EXPECT_TRUE(config.warnings.empty());
}

TEST(GenerationConfig, EverythingElseThatWouldChangeAnswersIsRefused) {
  for (const auto& [field, value] : std::vector<std::pair<std::string, std::string>>{
           {"no_repeat_ngram_size", "3"},
           {"encoder_no_repeat_ngram_size", "3"},
           {"encoder_repetition_penalty", "1.5"},
           {"min_length", "5"},
           {"min_new_tokens", "5"},
           {"num_beams", "4"},
           {"penalty_alpha", "0.6"},
           {"guidance_scale", "1.5"},
           {"begin_suppress_tokens", "[1]"},
           {"forced_bos_token_id", "0"},
           {"forced_eos_token_id", "9"},
           {"sequence_bias", "[[[1],2.0]]"},
           {"exponential_decay_length_penalty", "[1,1.5]"},
           {"force_words_ids", "[[1]]"},
           {"stop_strings", "[\"a\"]"},
           {"watermarking_config", "{\"bias\":2}"},
           {"dola_layers", "3"},
           {"token_healing", "true"}}) {
    expect_error(
        [&, key = field, text = value] { load_generation("\"" + key + "\":" + text); },
        {"generation_config.json: " + field + ": expected", "not supported", "found " + value});
  }
}

TEST(GenerationConfig, MalformedFieldsAreRefused) {
  for (const auto& [field, value] :
       std::vector<std::pair<std::string, std::string>>{{"repetition_penalty", "0"},
                                                        {"repetition_penalty", "\"1.1\""},
                                                        {"repetition_penalty", "1e300"},
                                                        {"suppress_tokens", "3"},
                                                        {"suppress_tokens", "[10]"},
                                                        {"suppress_tokens", "[-1]"},
                                                        {"bad_words_ids", "[3]"},
                                                        {"bad_words_ids", "[[]]"},
                                                        {"bad_words_ids", "[[1,2.5]]"}}) {
    expect_error([&, key = field, text = value] { load_generation("\"" + key + "\":" + text); },
                 {"generation_config.json: " + field + ": expected", "found "});
  }
}

}  // namespace
