// Gemma 1 to 3: norms by 1 + weight. Gemma 2 and 3 have them before and after each part, and layers
// with windows between full ones.
#include <cmath>

#include "model/families/families.hpp"

namespace kvzap::model {
namespace {

constexpr std::int64_t gemma_window = 4096;
constexpr double default_query_scalar = 256;
constexpr double largest_scalar = 1e9;

/// What all models have.
void read_common(ConfigFields& fields, ModelConfig& config) {
  fields.require("use_bidirectional_attention", false);
  config.activation = Activation::gelu_tanh;
  config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
  config.embedding_multiplier = std::sqrt(static_cast<double>(config.hidden_size));
  config.rounds_embedding_multiplier = true;
}

void read_gemma(ConfigFields& fields, std::int64_t pattern, ModelConfig& config) {
  fields.get("hidden_act");  // transformers reads hidden_activation
  fields.require("hidden_activation", "gelu_pytorch_tanh");
  read_common(fields, config);
  config.attention_multiplier =
      1 / std::sqrt(fields.find_number("query_pre_attn_scalar", 1 / largest_scalar, largest_scalar)
                        .value_or(default_query_scalar));
  read_pattern_of_windows(fields, sliding_window_or(fields, gemma_window), pattern, config);
}

void read_gemma2(ConfigFields& fields, ModelConfig& config) {
  fields.get("sliding_window_size");  // another name of sliding_window
  read_gemma(fields, 2, config);
  config.attention_soft_cap = read_soft_cap(fields, "attn_logit_softcapping", 50);
  config.logits_soft_cap = read_soft_cap(fields, "final_logit_softcapping", 30);
}

Family gemma_family() {
  Family family;
  family.tested = family_tests;
  family.default_key_value_heads = 4;
  family.default_head_dim = 256;
  family.ties_by_default = true;
  family.tensors.attention_out = "post_attention_layernorm";
  family.tensors.feed_forward_in = "pre_feedforward_layernorm";
  family.tensors.feed_forward_out = "post_feedforward_layernorm";
  family.tensors.norms_add_one = true;
  return family;
}

}  // namespace

const Family gemma2 = [] {
  Family family = gemma_family();
  family.class_name = "Gemma2ForCausalLM";
  family.model_type = "gemma2";
  family.text_defaults =
      R"({"vocab_size":256000,"hidden_size":2304,"intermediate_size":9216,"num_hidden_layers":26,)"
      R"("num_attention_heads":8,"max_position_embeddings":8192})";
  family.read = read_gemma2;
  return family;
}();

// Gemma 2 without norms after the parts.
const Family vaultgemma = [] {
  Family family = gemma_family();
  family.class_name = "VaultGemmaForCausalLM";
  family.model_type = "vaultgemma";
  family.read = read_gemma2;
  family.tensors.attention_out = "";
  family.tensors.feed_forward_out = "";
  return family;
}();

// The first Gemma.
const Family gemma = [] {
  Family family;
  family.class_name = "GemmaForCausalLM";
  family.model_type = "gemma";
  family.text_defaults =
      R"({"vocab_size":256000,"hidden_size":3072,"intermediate_size":24576,"num_hidden_layers":28,)"
      R"("num_attention_heads":16,"max_position_embeddings":8192})";
  family.tested = family_tests;
  family.default_key_value_heads = 16;
  family.default_head_dim = 256;
  family.ties_by_default = true;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    // The approximation with tanh is meant by both names, as in transformers.
    if (fields.find_text("hidden_act") != "gelu") fields.require("hidden_act", "gelu_pytorch_tanh");
    fields.get("hidden_activation");  // of other programs
    read_common(fields, config);
  };
  family.tensors.norms_add_one = true;
  return family;
}();

const Family gemma3 = [] {
  Family family = gemma_family();
  family.class_name = "Gemma3ForCausalLM";
  family.model_type = "gemma3_text";
  family.text_defaults =
      R"({"vocab_size":262208,"num_attention_heads":8,"max_position_embeddings":131072})";
  family.rope.default_theta = 1e6;
  family.rope.default_window_theta = 1e4;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    const std::int64_t pattern = fields.find_size("sliding_window_pattern", max_size).value_or(6);
    fields.get("_sliding_window_pattern");  // transformers writes it, and layer_types
    read_gemma(fields, pattern, config);
    config.qk_norm = QkNorm::head;
    // transformers' attention of this class has no cap, whatever attn_logit_softcapping says.
    fields.require_none("attn_logit_softcapping");
    config.logits_soft_cap = read_soft_cap(fields, "final_logit_softcapping", 0);
    // max_position_embeddings is the length after RoPE has been scaled.
    if (config.rope_scaling && config.rope_scaling->type == RopeType::linear) {
      config.rope_scaling->original_max_position_embeddings = static_cast<std::int64_t>(
          static_cast<double>(config.max_position_embeddings) / config.rope_scaling->factor);
    }
  };
  return family;
}();

}  // namespace kvzap::model
