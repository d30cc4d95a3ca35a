// Falcon of the RefinedWeb models: attention and feed-forward part side by side, with one LayerNorm
// (7B) or two (40B and 180B), and one tensor for queries, keys and values, KV head by KV head.
#include "model/families/families.hpp"

namespace kvzap::model {
namespace {

bool is_set(const nlohmann::json& content, const char* field, bool absent) {
  const auto found = content.find(field);
  return found == content.end() || found->is_null() ? absent : *found == true;
}

/// The number of KV heads depends on the kind of decoder.
void rename_falcon(ConfigContent& content) {
  rename_field(content, "n_embed", "hidden_size");
  rename_field(content, "ffn_hidden_size", "intermediate_size");
  default_width(content);
  if (!content.contains("max_position_embeddings")) content["max_position_embeddings"] = 2048;
  if (is_set(content, "new_decoder_architecture", false)) {
    rename_field(content, "num_kv_heads", "num_key_value_heads");
  } else if (is_set(content, "multi_query", true)) {
    content["num_key_value_heads"] = 1;
  }
}

}  // namespace

const Family falcon = [] {
  Family family;
  family.class_name = "FalconForCausalLM";
  family.model_type = "falcon";
  family.tested = family_tests;
  family.default_norm_eps = 1e-5;
  family.norm_eps_field = "layer_norm_epsilon";
  family.ties_by_default = true;
  family.rename = rename_falcon;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    constexpr const char* norms_field = "num_ln_in_parallel_attn";
    const bool is_new = fields.flag("new_decoder_architecture", false);
    fields.require("alibi", false);
    set_layer_norms(config);
    config.is_parallel = fields.flag("parallel_attn", true);
    if (is_new) fields.require("parallel_attn", true);
    const std::int64_t norms = fields.find_size(norms_field, 2).value_or(is_new ? 2 : 1);
    if (!is_new) fields.require(norms_field, 1);
    config.shares_norm = norms == 1;
    config.gates_feed_forward = false;
    config.activation = read_activation(fields, "activation", Activation::gelu);
    config.qkv_bias = config.o_bias = config.mlp_bias = fields.flag("bias", false);
    for (const char* field : {"n_embed", "ffn_hidden_size", "num_kv_heads", "multi_query",
                              "hidden_dropout", "apply_residual_connection_post_layernorm"}) {
      fields.get(field);
    }
  };
  family.tensors.layers = "transformer.h.";
  family.tensors.embedding = "transformer.word_embeddings";
  family.tensors.final_norm = "transformer.ln_f";
  family.tensors.parallel_attention_in = "ln_attn";
  family.tensors.parallel_feed_forward_in = "ln_mlp";
  family.tensors.qkv = "self_attention.query_key_value";
  family.tensors.qkv_by_head = true;
  family.tensors.output = "self_attention.dense";
  family.tensors.up = "dense_h_to_4h";
  family.tensors.down = "dense_4h_to_h";
  return family;
}();

}  // namespace kvzap::model
