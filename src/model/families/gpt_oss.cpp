// gpt-oss of OpenAI: sinks, layers with windows between full ones, experts with biases and a
// clamped gate.
#include <fmt/format.h>

#include "model/families/families.hpp"

namespace kvzap::model {

const Family gpt_oss = [] {
  Family family;
  family.class_name = "GptOssForCausalLM";
  family.model_type = "gpt_oss";
  family.tested = family_tests;
  family.default_key_value_heads = 8;
  family.default_head_dim = 64;
  family.default_norm_eps = 1e-5;
  family.rope.default_theta = 150000;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    constexpr double largest_limit = 1e6;
    fields.require("attention_bias", true);
    config.qkv_bias = config.o_bias = true;
    config.has_sinks = true;
    config.activation = Activation::clamped_silu;
    config.gate_limit =
        fields.find_number("swiglu_limit", 1 / largest_limit, largest_limit).value_or(7);
    read_experts_everywhere(fields, 4, config);
    config.experts->has_router_bias = config.experts->has_biases = true;
    read_pattern_of_windows(fields, sliding_window_or(fields, 128), 2, config);
    // Names of other programs.
    fields.get("experts_per_token");
    fields.get("initial_context_length");
    if (!fields.has_key("rope_scaling") && !fields.has_key("rope_parameters")) {
      fields.fail("rope_parameters", "an object with RoPE's parameters", "none");
    }
  };
  family.tensors.router = "mlp.router";
  family.tensors.experts_gate_up = "mlp.experts.gate_up_proj";
  family.tensors.experts_down = "mlp.experts.down_proj";
  family.tensors.alternates = true;
  return family;
}();

}  // namespace kvzap::model
