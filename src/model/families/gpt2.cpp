// GPT-2: learned embeddings of positions instead of RoPE, LayerNorms, biases everywhere, and maps
// stored as (inputs, outputs).
#include "model/families/families.hpp"

namespace kvzap::model {
namespace {

void rename_gpt2(nlohmann::json& content) {
  rename_field(content, "n_embd", "hidden_size");
  rename_field(content, "n_layer", "num_hidden_layers");
  rename_field(content, "n_head", "num_attention_heads");
  rename_field(content, "n_positions", "max_position_embeddings");
  rename_field(content, "n_inner", "intermediate_size");
  if (!content.contains("intermediate_size") && content.contains("hidden_size") &&
      content["hidden_size"].is_number_unsigned() && content["hidden_size"] < max_size) {
    content["intermediate_size"] = 4 * content["hidden_size"].get<std::int64_t>();
  }
}

}  // namespace

const Family gpt2 = [] {
  Family family;
  family.class_name = "GPT2LMHeadModel";
  family.model_type = "gpt2";
  family.tested = family_tests;
  family.default_norm_eps = 1e-5;
  family.norm_eps_field = "layer_norm_epsilon";
  family.ties_by_default = true;
  family.rename = rename_gpt2;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    set_layer_norms(config);
    config.embeds_positions = true;
    for (LayerConfig& layer : config.layers) layer.has_rope = false;
    config.gates_feed_forward = false;
    config.activation = read_activation(fields, "activation_function", Activation::gelu_tanh);
    config.qkv_bias = config.o_bias = config.mlp_bias = true;
    if (config.num_key_value_heads != config.num_attention_heads) {
      fields.require("num_key_value_heads", config.num_attention_heads);
    }
    if (config.head_dim * config.num_attention_heads != config.hidden_size) {
      fields.require("head_dim", config.hidden_size / config.num_attention_heads);
    }
    fields.require("scale_attn_weights", true);
    fields.require("scale_attn_by_inverse_layer_idx", false);
    if (config.rope_scaling) fields.require_none("rope_scaling");
    for (const char* field :
         {"n_embd", "n_layer", "n_head", "n_positions", "n_inner", "n_ctx", "attn_pdrop",
          "reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation",
          "summary_proj_to_labels", "summary_first_dropout"}) {
      fields.get(field);
    }
  };
  family.tensors.layers = "transformer.h.";
  family.tensors.embedding = "transformer.wte";
  family.tensors.positions = "transformer.wpe";
  family.tensors.final_norm = "transformer.ln_f";
  family.tensors.attention_in = "ln_1";
  family.tensors.feed_forward_in = "ln_2";
  family.tensors.qkv = "attn.c_attn";
  family.tensors.output = "attn.c_proj";
  family.tensors.up = "c_fc";
  family.tensors.down = "c_proj";
  family.tensors.maps_are_transposed = true;
  return family;
}();

}  // namespace kvzap::model
