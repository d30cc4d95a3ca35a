// ModernBERT's decoder (Ettin): LayerNorms, windows in two layers of three, and a map before the
// output head.
#include <fmt/format.h>

#include "model/families/families.hpp"

namespace kvzap::model {
namespace {

void read_local_windows(ConfigFields& fields, ModelConfig& config) {
  constexpr const char* field = "local_attention";
  const auto local = fields.find_size(field, max_size);
  // Half of it lies before a token.
  const std::int64_t window = fields.has_key(field) ? local.value_or(0) / 2 : 64;
  if (local && window < 2) fields.fail(field, "at least 4 tokens", fmt::format("{}", *local));
  const auto every = static_cast<std::size_t>(
      fields.find_size("global_attn_every_n_layers", max_size).value_or(3));
  std::vector<bool> slides;
  for (std::size_t l = 0; l < config.layers.size(); ++l) slides.push_back(l % every != 0);
  read_windows(fields, window, slides, config);
  constexpr const char* saved = "sliding_window";  // transformers' own field; -1: no window
  const nlohmann::json* const other = fields.get(saved);
  if (other != nullptr && !(window == 0 && *other == -1)) fields.require(saved, window);
}

}  // namespace

const Family modernbert_decoder = [] {
  Family family;
  family.class_name = "ModernBertDecoderForCausalLM";
  family.model_type = "modernbert-decoder";
  family.tested = family_tests;
  family.default_norm_eps = 1e-5;
  family.norm_eps_field = "norm_eps";
  family.ties_by_default = true;
  family.rope.default_theta = 160000;
  family.rope.default_window_theta = 10000;
  family.rename = [](ConfigContent& content) {
    rename_field(content, "local_rope_theta", "rope_local_base_freq");
    if (!content.contains("rope_parameters")) {
      rename_field(content, "global_rope_theta", "rope_theta");
    }
  };
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    config.norm_type = NormType::layer;
    config.norm_bias = fields.flag("norm_bias", false);
    config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
    config.mlp_bias = fields.flag("mlp_bias", false);
    config.head_bias = fields.flag("decoder_bias", true);
    config.activation = read_activation(fields, "hidden_activation", Activation::gelu);
    constexpr const char* of_output = "classifier_activation";
    if (read_activation(fields, of_output, Activation::gelu) != config.activation) {
      fields.fail(of_output, "the same as hidden_activation", "another one");
    }
    fields.require("classifier_bias", false);
    require_own_kv_heads(fields, config);
    require_heads_of_hidden_size(fields, config);
    read_local_windows(fields, config);
    for (const char* field :
         {"local_rope_theta", "global_rope_theta", "cls_token_id", "embedding_dropout",
          "mlp_dropout", "initializer_cutoff_factor", "classifier_pooling", "causal_mask",
          "deterministic_flash_attn", "gradient_checkpointing", "layer_norm_eps",
          "position_embedding_type", "reference_compile", "repad_logits_with_grad",
          "sparse_pred_ignore_index", "sparse_prediction"}) {
      fields.get(field);
    }
  };
  family.tensors.embedding = "model.embeddings.tok_embeddings";
  family.tensors.embedding_norm = "model.embeddings.norm";
  family.tensors.final_norm = "model.final_norm";
  family.tensors.output_map = "lm_head.dense";
  family.tensors.output_map_norm = "lm_head.norm";
  family.tensors.head = "decoder";
  family.tensors.attention_in = "attn_norm";
  family.tensors.first_has_attention_norm = false;
  family.tensors.feed_forward_in = "mlp_norm";
  family.tensors.query = "attn.q_proj";
  family.tensors.key = "attn.k_proj";
  family.tensors.value = "attn.v_proj";
  family.tensors.output = "attn.Wo";
  family.tensors.gate_up = "mlp.Wi";
  family.tensors.down = "Wo";
  return family;
}();

}  // namespace kvzap::model
