// GPT-Neo: learned embeddings of positions, attention without a scale, and a window in every other
// layer.
#include <fmt/format.h>

#include "model/families/families.hpp"

namespace kvzap::model {
namespace {

void rename_gpt_neo(ConfigContent& content) {
  rename_field(content, "num_layers", "num_hidden_layers");
  rename_field(content, "num_heads", "num_attention_heads");
  default_width(content);
}

/// attention_types has pairs: a list of kinds, and how often it is repeated.
std::vector<bool> read_local_layers(ConfigFields& fields, const ModelConfig& config) {
  constexpr const char* field = "attention_types";
  const auto layers = static_cast<std::size_t>(config.num_hidden_layers);
  const nlohmann::json* const types = fields.get(field);
  std::vector<bool> are_local;
  const auto fail = [&] {
    fields.fail(field, fmt::format("lists of \"global\" and \"local\" for {} layers", layers),
                files::described(*types));
  };
  if (types == nullptr) {
    for (std::size_t l = 0; l < layers; ++l) are_local.push_back(l % 2 == 1);
    return are_local;
  }
  if (!types->is_array()) fail();
  for (const nlohmann::json& pair : *types) {
    if (!pair.is_array() || pair.size() != 2 || !pair[0].is_array() || pair[0].empty() ||
        !pair[1].is_number_unsigned() || pair[1] > layers) {
      fail();
    }
    for (std::size_t i = 0; i < pair[1].get<std::size_t>(); ++i) {
      for (const nlohmann::json& kind : pair[0]) {
        if ((kind != "global" && kind != "local") || are_local.size() == layers) fail();
        are_local.push_back(kind == "local");
      }
    }
  }
  if (are_local.size() != layers) fail();
  return are_local;
}

}  // namespace

const Family gpt_neo = [] {
  Family family;
  family.class_name = "GPTNeoForCausalLM";
  family.model_type = "gpt_neo";
  family.tested = family_tests;
  family.default_norm_eps = 1e-5;
  family.norm_eps_field = "layer_norm_epsilon";
  family.ties_by_default = true;
  family.rename = rename_gpt_neo;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    constexpr std::int64_t default_window = 256;
    set_layer_norms(config);
    config.embeds_positions = true;
    config.attention_multiplier = 1;
    config.gates_feed_forward = false;
    config.activation = read_activation(fields, "activation_function", Activation::gelu_tanh);
    config.o_bias = config.mlp_bias = true;
    require_own_kv_heads(fields, config);
    require_heads_of_hidden_size(fields, config);
    if (config.rope_scaling) fields.require_none("rope_scaling");
    const std::int64_t window = sliding_window_or(fields, default_window, "window_size");
    const std::vector<bool> are_local = read_local_layers(fields, config);
    for (std::size_t l = 0; l < config.layers.size(); ++l) {
      config.layers[l].has_rope = false;
      if (are_local[l]) config.layers[l].window = window;
    }
    for (const char* field :
         {"num_layers", "num_heads", "attention_layers", "embed_dropout", "resid_dropout",
          "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
          "summary_first_dropout"}) {
      fields.get(field);
    }
  };
  family.tensors.layers = "transformer.h.";
  family.tensors.embedding = "transformer.wte";
  family.tensors.positions = "transformer.wpe";
  family.tensors.final_norm = "transformer.ln_f";
  family.tensors.attention_in = "ln_1";
  family.tensors.feed_forward_in = "ln_2";
  family.tensors.query = "attn.attention.q_proj";
  family.tensors.key = "attn.attention.k_proj";
  family.tensors.value = "attn.attention.v_proj";
  family.tensors.output = "attn.attention.out_proj";
  family.tensors.up = "c_fc";
  family.tensors.down = "c_proj";
  return family;
}();

}  // namespace kvzap::model
