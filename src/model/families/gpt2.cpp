// GPT-2: learned embeddings of positions instead of RoPE, LayerNorms, biases everywhere, and maps
// stored as (inputs, outputs). GPT-BigCode (StarCoder): the same with one KV head and usual maps.
// GPT-J: RoPE, and parallel parts that share a norm. CodeGen: GPT-J with one tensor for queries,
// values and keys, in shards.
#include <fmt/format.h>

#include "model/families/families.hpp"

namespace kvzap::model {
namespace {

void rename_gpt2(ConfigContent& content) {
  rename_field(content, "n_embd", "hidden_size");
  rename_field(content, "n_layer", "num_hidden_layers");
  rename_field(content, "n_head", "num_attention_heads");
  rename_field(content, "n_positions", "max_position_embeddings");
  rename_field(content, "n_inner", "intermediate_size");
  default_width(content);
}

Family gpt2_family() {
  Family family;
  family.tested = family_tests;
  family.default_norm_eps = 1e-5;
  family.norm_eps_field = "layer_norm_epsilon";
  family.rename = rename_gpt2;
  family.tensors.layers = "transformer.h.";
  family.tensors.embedding = "transformer.wte";
  family.tensors.final_norm = "transformer.ln_f";
  family.tensors.attention_in = "ln_1";
  family.tensors.feed_forward_in = "ln_2";
  return family;
}

/// What the configuration of GPT-J has too.
void read_gpt2_names(ConfigFields& fields, ModelConfig& config) {
  set_layer_norms(config);
  config.gates_feed_forward = false;
  require_heads_of_hidden_size(fields, config);
  if (config.rope_scaling) fields.require_none("rope_scaling");
  fields.require("scale_attn_weights", true);
  for (const char* field : {"n_embd", "n_layer", "n_head", "n_positions", "n_inner", "n_ctx",
                            "attn_pdrop", "summary_type", "summary_use_proj", "summary_activation",
                            "summary_proj_to_labels", "summary_first_dropout"}) {
    fields.get(field);
  }
}

Family embedding_family() {
  Family family = gpt2_family();
  family.ties_by_default = true;
  family.tensors.positions = "transformer.wpe";
  family.tensors.qkv = "attn.c_attn";
  family.tensors.output = "attn.c_proj";
  family.tensors.up = "c_fc";
  family.tensors.down = "c_proj";
  return family;
}

void read_gpt2(ConfigFields& fields, std::int64_t kv_heads, ModelConfig& config) {
  read_gpt2_names(fields, config);
  config.embeds_positions = true;
  for (LayerConfig& layer : config.layers) layer.has_rope = false;
  config.activation = read_activation(fields, "activation_function", Activation::gelu_tanh);
  config.qkv_bias = config.o_bias = config.mlp_bias = true;
  if (config.num_key_value_heads != kv_heads) fields.require("num_key_value_heads", kv_heads);
}

/// GPT-J and CodeGen.
Family rotary_family() {
  Family family = gpt2_family();
  family.rename = [](ConfigContent& content) {
    rename_gpt2(content);
    if (!content.contains("rotary_dim")) content["rotary_dim"] = 64;
  };
  family.rope.default_rotary_factor = 1;
  family.rope.is_interleaved = true;
  family.tensors.feed_forward_in = "";
  family.tensors.output = "attn.out_proj";
  family.tensors.up = "fc_in";
  family.tensors.down = "fc_out";
  return family;
}

void read_rotary(ConfigFields& fields, ModelConfig& config) {
  read_gpt2_names(fields, config);
  config.is_parallel = config.shares_norm = true;
  config.activation = read_activation(fields, "activation_function", Activation::gelu_tanh);
  config.mlp_bias = config.head_bias = true;
  require_own_kv_heads(fields, config);
  for (const char* field : {"rotary", "scale_attn_by_inverse_layer_idx"}) fields.get(field);
}

}  // namespace

const Family gpt2 = [] {
  Family family = embedding_family();
  family.class_name = "GPT2LMHeadModel";
  family.model_type = "gpt2";
  family.text_types = {"gpt-sw3"};
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_gpt2(fields, config.num_attention_heads, config);
    fields.require("scale_attn_by_inverse_layer_idx", false);
    fields.get("reorder_and_upcast_attn");
  };
  family.tensors.maps_are_transposed = true;
  return family;
}();

const Family gpt_bigcode = [] {
  Family family = embedding_family();
  family.class_name = "GPTBigCodeForCausalLM";
  family.model_type = "gpt_bigcode";
  family.rename = [](ConfigContent& content) {
    rename_gpt2(content);
    content["num_key_value_heads"] = 1;
  };
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_gpt2(fields, 1, config);
    fields.require("multi_query", true);
    for (const char* field : {"attention_softmax_in_fp32", "scale_attention_softmax_in_fp32",
                              "inference_runner", "max_batch_size", "max_sequence_length",
                              "pad_key_length", "pre_allocate_kv_cache", "validate_runner_input"}) {
      fields.get(field);
    }
  };
  return family;
}();

const Family gptj = [] {
  Family family = rotary_family();
  family.class_name = "GPTJForCausalLM";
  family.model_type = "gptj";
  family.read = read_rotary;
  family.tensors.query = "attn.q_proj";
  family.tensors.key = "attn.k_proj";
  family.tensors.value = "attn.v_proj";
  return family;
}();

const Family codegen = [] {
  static constexpr int shards = 4;
  Family family = rotary_family();
  family.class_name = "CodeGenForCausalLM";
  family.model_type = "codegen";
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_rotary(fields, config);
    if (fields.get("rotary_dim") == nullptr) fields.fail("rotary_dim", "a number", "null");
    if (config.hidden_size % shards == 0) return;
    fields.fail("n_embd", fmt::format("a multiple of {}, the shards of q, k and v", shards),
                fmt::format("{}", config.hidden_size));
  };
  family.tensors.qkv = "attn.qkv_proj";
  family.tensors.qkv_shards = shards;
  return family;
}();

}  // namespace kvzap::model
