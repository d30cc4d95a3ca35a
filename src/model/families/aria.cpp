// The text model of Aria: Llama with experts in all layers.
#include "model/families/families.hpp"

namespace kvzap::model {

const Family aria_text = [] {
  Family family;
  family.class_name = "AriaTextForCausalLM";
  family.model_type = "aria_text";
  family.tested = family_tests;
  family.text_defaults =
      R"({"vocab_size":32000,"hidden_size":4096,"intermediate_size":4096,"num_hidden_layers":32,)"
      R"("num_attention_heads":32,"max_position_embeddings":2048,"moe_num_experts":8})";
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
    fields.require("mlp_bias", false);
    ExpertsConfig experts = read_experts(fields, "moe_num_experts", 2, config, "moe_topk");
    experts.normalises = true;
    read_shared_width(fields, "moe_num_shared_experts", 2, experts);
    config.experts = experts;
    for (LayerConfig& layer : config.layers) layer.has_experts = true;
  };
  family.tensors.router = "mlp.router";
  family.tensors.experts_gate_up = "mlp.experts.fc1.weight";
  family.tensors.experts_down = "mlp.experts.fc2.weight";
  return family;
}();

}  // namespace kvzap::model
