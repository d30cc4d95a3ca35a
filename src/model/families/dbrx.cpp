// DBRX of Databricks: LayerNorms without biases, clamped queries, keys and values, experts in all
// layers.
#include <fmt/format.h>

#include "model/families/families.hpp"

namespace kvzap::model {
namespace {

using nlohmann::json;

constexpr const char* attention_field = "attn_config";
constexpr const char* experts_field = "ffn_config";

/// Fields of the two objects that the file has for attention and experts.
constexpr struct {
  const char *object, *own, *name;
} inner_fields[] = {{attention_field, "kv_n_heads", "num_key_value_heads"},
                    {attention_field, "clip_qkv", "clip_qkv"},
                    {experts_field, "ffn_hidden_size", "intermediate_size"},
                    {experts_field, "moe_num_experts", "num_experts"},
                    {experts_field, "moe_top_k", "num_experts_per_tok"}};

void rename_dbrx(ConfigContent& content) {
  rename_field(content, "d_model", "hidden_size");
  rename_field(content, "n_heads", "num_attention_heads");
  rename_field(content, "n_layers", "num_hidden_layers");
  rename_field(content, "max_seq_len", "max_position_embeddings");
  for (const auto& [object, own, name] : inner_fields) {
    rename_inner_field(content, object, own, name);
  }
  // Published files have the base of RoPE here; transformers writes it beside these objects, too.
  if (!content.contains("rope_parameters")) {
    rename_inner_field(content, attention_field, "rope_theta", "rope_theta");
  }
}

/// Reads what rename_dbrx leaves in the two objects.
void read_inner(ConfigFields& fields, const char* name, ModelConfig& config) {
  const json* const object = fields.get(name);
  if (object == nullptr) return;
  if (!object->is_object()) fields.fail(name, "an object", files::described(*object));
  ConfigFields inner(*object, fields.file(), name);
  for (const auto& field : inner_fields) inner.get(field.own);
  for (const char* field :
       {"rope_theta", "attn_pdrop", "hidden_size", "moe_jitter_eps", "moe_loss_weight",
        "model_type", "architectures", "transformers_version", "dtype", "torch_dtype"}) {
    inner.get(field);
  }
  constexpr const char* power = "moe_normalize_expert_weights";
  if (inner.has_key(power)) config.experts->normalises = inner.get(power) != nullptr;
  inner.require(power, 1);
  if (const json* const activation = inner.get("ffn_act_fn")) {
    const bool is_silu = activation->is_object() && activation->value("name", json()) == "silu";
    if (!is_silu) {
      inner.fail("ffn_act_fn", "an object whose name is silu", files::described(*activation));
    }
  }
  inner.warn_unknown(
      {"id2label", "label2id", "output_attentions", "output_hidden_states", "return_dict",
       "problem_type", "chunk_size_feed_forward", "is_encoder_decoder", "_name_or_path"},
      config.warnings);
}

}  // namespace

const Family dbrx = [] {
  Family family;
  family.class_name = "DbrxForCausalLM";
  family.model_type = "dbrx";
  family.tested = family_tests;
  family.default_key_value_heads = 1;
  family.default_norm_eps = 1e-5;
  family.rename = rename_dbrx;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    config.norm_type = NormType::layer;
    if (fields.get("clip_qkv") != nullptr) config.qkv_limit = fields.positive("clip_qkv");
    require_heads_of_hidden_size(fields, config);
    fields.require("tie_word_embeddings", false);
    config.experts = read_experts(fields, "num_experts", 1, config);
    config.experts->normalises = true;
    for (LayerConfig& layer : config.layers) layer.has_experts = true;
    for (const char* object : {attention_field, experts_field}) read_inner(fields, object, config);
    for (const char* field : {"d_model", "n_heads", "n_layers", "max_seq_len", "emb_pdrop"}) {
      fields.get(field);
    }
  };
  family.tensors.layers = "transformer.blocks.";
  family.tensors.embedding = "transformer.wte";
  family.tensors.final_norm = "transformer.norm_f";
  family.tensors.attention_in = "norm_attn_norm.norm_1";
  family.tensors.feed_forward_in = "norm_attn_norm.norm_2";
  family.tensors.qkv = "norm_attn_norm.attn.Wqkv";
  family.tensors.output = "norm_attn_norm.attn.out_proj";
  family.tensors.router = "ffn.router.layer";
  family.tensors.experts_gate = "ffn.experts.mlp.w1";
  family.tensors.experts_up = "ffn.experts.mlp.v1";
  family.tensors.experts_down = "ffn.experts.mlp.w2";
  return family;
}();

}  // namespace kvzap::model
