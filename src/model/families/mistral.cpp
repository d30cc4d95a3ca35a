// Mistral 7B to Small, Ministral 3, and Mixtral's experts.
#include "model/families/families.hpp"

namespace kvzap::model {
namespace {

constexpr std::int64_t mistral_window = 4096;
constexpr std::int64_t mistral_kv_heads = 8;

void read_mistral_window(ConfigFields& fields, std::int64_t absent, ModelConfig& config) {
  ignore_bias(fields, "attention_bias", config);
  ignore_bias(fields, "mlp_bias", config);
  set_window(fields, sliding_window_or(fields, absent), config);
}

}  // namespace

const Family mistral = [] {
  Family family;
  family.class_name = "MistralForCausalLM";
  family.model_type = "mistral";
  family.text_defaults =
      R"({"vocab_size":32000,"hidden_size":4096,"intermediate_size":14336,"num_hidden_layers":32,)"
      R"("num_attention_heads":32,"max_position_embeddings":131072})";
  family.tested = "its config.json and its sliding window; it computes as Llama does";
  family.default_key_value_heads = mistral_kv_heads;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_mistral_window(fields, mistral_window, config);
  };
  return family;
}();

const Family ministral3 = [] {
  Family family;
  family.class_name = "Ministral3ForCausalLM";
  family.model_type = "ministral3";
  family.tested = family_tests;
  family.default_key_value_heads = mistral_kv_heads;
  family.default_head_dim = 128;
  family.default_norm_eps = 1e-5;
  family.rope.scales_queries = true;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_mistral_window(fields, 0, config);
  };
  return family;
}();

const Family ministral = [] {
  Family family;
  family.class_name = "MinistralForCausalLM";
  family.model_type = "ministral";
  family.tested = family_tests;
  family.default_key_value_heads = mistral_kv_heads;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    ignore_bias(fields, "attention_bias", config);
    ignore_bias(fields, "mlp_bias", config);
    const std::vector<bool> all(config.layers.size(), true);
    read_windows(fields, sliding_window_or(fields, mistral_window), all, config);
  };
  return family;
}();

const Family mixtral = [] {
  Family family;
  family.class_name = "MixtralForCausalLM";
  family.model_type = "mixtral";
  family.tested = family_tests;
  family.default_key_value_heads = mistral_kv_heads;
  family.default_norm_eps = 1e-5;
  family.rope.default_theta = 1e6;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_mistral_window(fields, 0, config);
    read_experts_everywhere(fields, 2, config);
  };
  family.tensors.router = "block_sparse_moe.gate";
  family.tensors.expert_gate = "block_sparse_moe.experts.{}.w1";
  family.tensors.expert_up = "block_sparse_moe.experts.{}.w3";
  family.tensors.expert_down = "block_sparse_moe.experts.{}.w2";
  return family;
}();

}  // namespace kvzap::model
