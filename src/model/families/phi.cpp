// Phi-3, Phi-3.5-mini, Phi-4 and Phi-4-mini.
#include "model/families/families.hpp"

namespace kvzap::model {

const Family phi3 = [] {
  Family family;
  family.class_name = "Phi3ForCausalLM";
  family.model_type = "phi3";
  family.tested = family_tests;
  family.default_norm_eps = 1e-5;
  family.rope.default_rotary_factor = 1;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    ignore_bias(fields, "attention_bias", config);
    ignore_bias(fields, "mlp_bias", config);
    set_window(fields, sliding_window_or(fields, 0), config);
  };
  family.tensors.qkv = "self_attn.qkv_proj";
  family.tensors.gate_up = "mlp.gate_up_proj";
  return family;
}();

}  // namespace kvzap::model
