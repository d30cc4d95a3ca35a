// OPT and BioGPT: learned embeddings of positions, whose table begins with two unused rows,
// LayerNorms, and biases everywhere. XGLM: the same with sinusoids for positions.
#include <cmath>

#include "model/families/families.hpp"

namespace kvzap::model {
namespace {

Family opt_family() {
  Family family;
  family.tested = family_tests;
  family.default_norm_eps = 1e-5;
  family.ties_by_default = true;
  family.tensors.first_position = 2;
  family.tensors.output = "self_attn.out_proj";
  family.tensors.attention_in = "self_attn_layer_norm";
  family.tensors.feed_forward_in = "final_layer_norm";
  family.tensors.feed_forward = "";
  family.tensors.up = "fc1";
  family.tensors.down = "fc2";
  return family;
}

void read_opt(ConfigFields& fields, ModelConfig& config) {
  set_layer_norms(config);
  config.embeds_positions = true;
  for (LayerConfig& layer : config.layers) layer.has_rope = false;
  config.gates_feed_forward = false;
  config.qkv_bias = config.o_bias = config.mlp_bias = true;
  require_own_kv_heads(fields, config);
  require_heads_of_hidden_size(fields, config);
  if (config.rope_scaling) fields.require_none("rope_scaling");
  for (const char* field : {"layerdrop", "activation_dropout"}) fields.get(field);
}

}  // namespace

const Family opt = [] {
  Family family = opt_family();
  family.class_name = "OPTForCausalLM";
  family.model_type = "opt";
  family.width_field = "ffn_dim";
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_opt(fields, config);
    config.activation = read_activation(fields, "activation_function", Activation::relu);
    const bool has_bias = fields.flag("enable_bias", true);
    config.qkv_bias = config.o_bias = config.mlp_bias = has_bias;
    fields.require("do_layer_norm_before", true);  // OPT-350m has norms after the residual sums
    fields.require("_remove_final_layer_norm", false);
    fields.require("word_embed_proj_dim", config.hidden_size);
    fields.require("layer_norm_elementwise_affine", true);
    for (const char* field : {"dropout", "init_std"}) fields.get(field);
  };
  family.tensors.layers = "model.decoder.layers.";
  family.tensors.embedding = "model.decoder.embed_tokens";
  family.tensors.positions = "model.decoder.embed_positions";
  family.tensors.final_norm = "model.decoder.final_layer_norm";
  return family;
}();

const Family biogpt = [] {
  Family family = opt_family();
  family.class_name = "BioGptForCausalLM";
  family.model_type = "biogpt";
  // The class has the eps of PyTorch, whatever layer_norm_eps says.
  family.norm_eps_field = "norm_eps";
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_opt(fields, config);
    config.activation = read_activation(fields, "hidden_act", Activation::gelu);
    if (fields.flag("scale_embedding", true)) {
      config.embedding_multiplier = std::sqrt(static_cast<double>(config.hidden_size));
    }
    for (const char* field :
         {"layer_norm_eps", "hidden_dropout_prob", "attention_probs_dropout_prob"}) {
      fields.get(field);
    }
  };
  family.tensors.layers = "biogpt.layers.";
  family.tensors.embedding = "biogpt.embed_tokens";
  family.tensors.positions = "biogpt.embed_positions";
  family.tensors.final_norm = "biogpt.layer_norm";
  family.tensors.head = "output_projection";
  return family;
}();

const Family xglm = [] {
  Family family = opt_family();
  family.class_name = "XGLMForCausalLM";
  family.model_type = "xglm";
  family.norm_eps_field = "norm_eps";  // the class has the eps of PyTorch
  family.rename = [](ConfigContent& content) {
    rename_field(content, "d_model", "hidden_size");
    rename_field(content, "num_layers", "num_hidden_layers");
    rename_field(content, "attention_heads", "num_attention_heads");
    rename_field(content, "ffn_dim", "intermediate_size");
  };
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_opt(fields, config);
    config.activation = read_activation(fields, "activation_function", Activation::gelu);
    if (fields.flag("scale_embedding", true)) {
      config.embedding_multiplier = std::sqrt(static_cast<double>(config.hidden_size));
    }
    if (config.hidden_size < 4) fields.fail("d_model", "at least 4", "2");
    // The class has no position at this row, which the first one precedes in published files.
    constexpr const char* padding = "pad_token_id";
    if (fields.find_number(padding, 0, max_size).value_or(0) > 1) {
      fields.fail(padding, "0, 1 or null", files::described(*fields.get(padding)));
    }
    for (const char* field :
         {"d_model", "num_layers", "attention_heads", "ffn_dim", "dropout", "init_std"}) {
      fields.get(field);
    }
  };
  family.tensors.has_sinusoids = true;
  family.tensors.final_norm = "model.layer_norm";
  return family;
}();

}  // namespace kvzap::model
