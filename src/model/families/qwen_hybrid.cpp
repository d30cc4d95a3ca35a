// Qwen3-Next and Qwen3.5: gated delta nets in most layers, gated attention in the others.
#include <fmt/format.h>

#include "model/families/families.hpp"

namespace kvzap::model {
namespace {

void read_delta_nets(ConfigFields& fields, ModelConfig& config) {
  config.delta_net = read_delta_net(fields, {});
  fields.get("mamba_ssm_dtype");  // of other programs' states; here they are float

  const std::int64_t interval = fields.find_size("full_attention_interval", max_size).value_or(4);
  const auto stated = read_layer_types(fields, "linear_attention", config);
  for (std::size_t l = 0; l < config.layers.size(); ++l) {
    const bool is_full =
        stated ? !(*stated)[l] : (static_cast<std::int64_t>(l) + 1) % interval == 0;
    config.layers[l].mixing = is_full ? TokenMixing::attention : TokenMixing::delta_net;
  }
}

void read_hybrid(ConfigFields& fields, ModelConfig& config) {
  config.qk_norm = QkNorm::head;
  fields.require("attn_output_gate", true);
  config.gates_attention = true;
  config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
  ignore_bias(fields, "mlp_bias", config);
  // Further layers that predict later tokens. Nothing here uses them.
  for (const char* field : {"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}) {
    fields.get(field);
  }
  read_delta_nets(fields, config);
}

/// Experts beside one that serves all tokens, in every layer.
void read_hybrid_experts(ConfigFields& fields, std::int64_t default_per_token,
                         ModelConfig& config) {
  ExpertsConfig experts = read_experts(fields, "num_experts", default_per_token, config);
  experts.intermediate_size = fields.find_size("moe_intermediate_size", max_size).value_or(512);
  experts.shared_intermediate_size =
      fields.find_size("shared_expert_intermediate_size", max_size).value_or(512);
  experts.has_shared_gate = true;
  experts.normalises = true;
  config.experts = experts;
  for (LayerConfig& layer : config.layers) layer.has_experts = true;
}

Family hybrid_family() {
  Family family;
  family.tested = family_tests;
  family.default_head_dim = 256;
  family.rope.default_rotary_factor = 0.25;
  family.tensors.norms_add_one = true;
  family.tensors.shared = "mlp.shared_expert";
  return family;
}

}  // namespace

DeltaNetConfig read_delta_net(ConfigFields& fields, const DeltaNetDefaults& absent) {
  constexpr std::int64_t most = 65536;
  const auto size = [&](const char* field, std::int64_t otherwise) {
    return fields.find_size(field, most).value_or(otherwise);
  };
  DeltaNetConfig net;
  net.key_heads = size("linear_num_key_heads", absent.key_heads);
  net.value_heads = size("linear_num_value_heads", absent.value_heads);
  if (net.value_heads % net.key_heads != 0) {
    fields.fail("linear_num_value_heads",
                fmt::format("a multiple of linear_num_key_heads ({})", net.key_heads),
                fmt::format("{}", net.value_heads));
  }
  net.key_dim = size("linear_key_head_dim", absent.key_dim);
  net.value_dim = size("linear_value_head_dim", absent.value_dim);
  if (net.value_heads > max_size / (net.key_dim * net.value_dim)) {
    fields.fail("linear_num_value_heads",
                fmt::format("states of at most {} values in a layer", max_size),
                fmt::format("{} of {} x {}", net.value_heads, net.key_dim, net.value_dim));
  }
  net.kernel = fields.find_size("linear_conv_kernel_dim", DeltaNetConfig::max_kernel).value_or(4);
  return net;
}

const Family qwen3_next = [] {
  Family family = hybrid_family();
  family.class_name = "Qwen3NextForCausalLM";
  family.model_type = "qwen3_next";
  family.default_key_value_heads = 2;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_hybrid(fields, config);
    fields.require("use_sliding_window", false);
    read_hybrid_experts(fields, 10, config);
    config.experts->normalises = fields.flag("norm_topk_prob", true);
    read_sparse_layers(fields, config);
  };
  family.tensors.delta_qkvz = "linear_attn.in_proj_qkvz";
  family.tensors.delta_ba = "linear_attn.in_proj_ba";
  return family;
}();

const Family qwen3_5 = [] {
  Family family = hybrid_family();
  family.class_name = "Qwen3_5ForCausalLM";
  family.model_type = "qwen3_5_text";
  family.default_key_value_heads = 4;
  family.rope.has_image_sections = true;
  family.read = read_hybrid;
  return family;
}();

const Family qwen3_5_moe = [] {
  Family family = hybrid_family();
  family.class_name = "Qwen3_5MoeForCausalLM";
  family.model_type = "qwen3_5_moe_text";
  family.default_key_value_heads = 2;
  family.width_field = "moe_intermediate_size";
  family.rope.has_image_sections = true;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_hybrid(fields, config);
    fields.require("mlp_only_layers", nlohmann::json::array());
    read_hybrid_experts(fields, 8, config);
  };
  return family;
}();

}  // namespace kvzap::model
