// GPT-NeoX and Pythia: attention and feed-forward part side by side, each with a LayerNorm of its
// own, and one tensor for queries, keys and values, head by head. GPT-NeoX Japanese: one after the
// other, without biases but for one.
#include <fmt/format.h>

#include "model/families/families.hpp"

namespace kvzap::model {

const Family gpt_neox = [] {
  Family family;
  family.class_name = "GPTNeoXForCausalLM";
  family.model_type = "gpt_neox";
  family.tested = family_tests;
  family.default_norm_eps = 1e-5;
  family.norm_eps_field = "layer_norm_eps";
  family.rope.default_rotary_factor = 0.25;
  family.rope.has_older_names = true;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    require_own_kv_heads(fields, config);
    set_layer_norms(config);
    config.is_parallel = fields.flag("use_parallel_residual", true);
    config.gates_feed_forward = false;
    config.activation = read_activation(fields, "hidden_act", Activation::gelu);
    config.qkv_bias = config.o_bias = fields.flag("attention_bias", true);
    config.mlp_bias = true;
    fields.get("hidden_dropout");
  };
  family.tensors.layers = "gpt_neox.layers.";
  family.tensors.embedding = "gpt_neox.embed_in";
  family.tensors.final_norm = "gpt_neox.final_layer_norm";
  family.tensors.head = "embed_out";
  family.tensors.qkv = "attention.query_key_value";
  family.tensors.qkv_by_head = true;
  family.tensors.output = "attention.dense";
  family.tensors.up = "dense_h_to_4h";
  family.tensors.down = "dense_4h_to_h";
  return family;
}();

const Family gpt_neox_japanese = [] {
  static constexpr const char* width_field = "intermediate_multiple_size";
  static constexpr std::int64_t most_widths = 1024;
  Family family;
  family.class_name = "GPTNeoXJapaneseForCausalLM";
  family.model_type = "gpt_neox_japanese";
  family.tested = family_tests;
  family.default_norm_eps = 1e-5;
  family.norm_eps_field = "layer_norm_eps";
  family.ties_by_default = true;
  family.rope.default_rotary_factor = 1;
  family.rope.has_older_names = true;
  family.rename = [](ConfigContent& content) {
    const auto hidden = content.find("hidden_size");
    if (hidden == content.end() || !hidden->is_number_unsigned() || *hidden > max_size) return;
    const nlohmann::json times = content.value(width_field, nlohmann::json(4U));
    const bool is_factor = times.is_number_unsigned() && times > 0 && times <= most_widths;
    content["intermediate_size"] =  // read names a wrong field
        hidden->get<std::int64_t>() * (is_factor ? times.get<std::int64_t>() : 1);
  };
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    const std::int64_t factor = fields.find_size(width_field, most_widths).value_or(4);
    if (config.intermediate_size != factor * config.hidden_size) {
      fields.fail("intermediate_size", fmt::format("{} times hidden_size", factor),
                  fmt::format("{}", config.intermediate_size));
    }
    require_own_kv_heads(fields, config);
    set_layer_norms(config);
    config.gates_feed_forward = false;
    config.activation = read_activation(fields, "hidden_act", Activation::gelu);
    fields.get("hidden_dropout");
  };
  family.tensors.layers = "gpt_neox_japanese.layers.";
  family.tensors.embedding = "gpt_neox_japanese.embed_in";
  family.tensors.final_norm = "gpt_neox_japanese.final_layer_norm";
  family.tensors.head = "embed_out";
  family.tensors.qkv = "attention.query_key_value";
  family.tensors.qkv_by_head = true;
  family.tensors.output = "attention.dense";
  family.tensors.last_output_bias = "attention.dense_bias";
  family.tensors.up = "dense_h_to_4h";
  family.tensors.down = "dense_4h_to_h";
  return family;
}();

}  // namespace kvzap::model
