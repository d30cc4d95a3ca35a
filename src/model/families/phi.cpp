// Phi-1, Phi-1.5 and Phi-2: attention and feed-forward part side by side, LayerNorms and biases
// everywhere. Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini, and Phi-4-multimodal on text.
#include "model/families/families.hpp"

namespace kvzap::model {

const Family phi = [] {
  Family family;
  family.class_name = "PhiForCausalLM";
  family.model_type = "phi";
  family.tested = family_tests;
  family.default_norm_eps = 1e-5;
  family.norm_eps_field = "layer_norm_eps";
  family.rope.default_rotary_factor = 0.5;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    set_layer_norms(config);
    config.is_parallel = config.shares_norm = true;
    config.gates_feed_forward = false;
    config.activation = read_activation(fields, "hidden_act", Activation::gelu_tanh);
    config.qkv_bias = config.o_bias = config.mlp_bias = config.head_bias = true;
    if (fields.flag("qk_layernorm", false)) config.qk_norm = QkNorm::layer_of_head;
  };
  family.tensors.q_norm = "self_attn.q_layernorm";
  family.tensors.k_norm = "self_attn.k_layernorm";
  family.tensors.head_norms_have_biases = true;
  family.tensors.final_norm = "model.final_layernorm";
  family.tensors.output = "self_attn.dense";
  family.tensors.up = "fc1";
  family.tensors.down = "fc2";
  return family;
}();

namespace {

Family phi3_family() {
  Family family;
  family.tested = family_tests;
  family.default_norm_eps = 1e-5;
  family.rope.default_rotary_factor = 1;
  family.tensors.qkv = "self_attn.qkv_proj";
  family.tensors.gate_up = "mlp.gate_up_proj";
  return family;
}

void read_phi3(ConfigFields& fields, ModelConfig& config) {
  ignore_bias(fields, "attention_bias", config);
  ignore_bias(fields, "mlp_bias", config);
  set_window(fields, sliding_window_or(fields, 0), config);
}

/// Phi-4-multimodal on text alone: what it has for images and speech is ignored.
Family multimodal_family() {
  Family family = phi3_family();
  family.tested = "its config.json and names of tensors; on text it computes as Phi3ForCausalLM";
  family.rename = [](ConfigContent& content) {
    for (const char* key : {"rope_scaling", "rope_parameters"}) {
      const auto rope = content.find(key);
      if (rope == content.end() || !rope->is_object()) continue;
      for (const char* field : {"rope_type", "type"}) {
        const auto type = rope->find(field);
        if (type != rope->end() && (*type == "su" || *type == "yarn")) *type = "longrope";
      }
    }
  };
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_phi3(fields, config);
    fields.require("lm_head_bias", false);
    for (const char* field : {"vision_config", "audio_config", "audio_processor", "embd_layer",
                              "img_processor", "speech_lora", "vision_lora", "full_attn_mod",
                              "auto_map", "num_logits_to_keep", "interpolate_factor"}) {
      fields.get(field);
    }
    config.warnings.push_back(
        fields.file() + ": images and speech are not supported; the model runs on text alone");
  };
  return family;
}

}  // namespace

const Family phi3 = [] {
  Family family = phi3_family();
  family.class_name = "Phi3ForCausalLM";
  family.model_type = "phi3";
  family.text_defaults =
      R"({"vocab_size":32064,"hidden_size":3072,"intermediate_size":8192,"num_hidden_layers":32,)"
      R"("num_attention_heads":32,"max_position_embeddings":4096})";
  family.read = read_phi3;
  return family;
}();

const Family phi4_multimodal = [] {
  Family family = multimodal_family();
  family.class_name = "Phi4MultimodalForCausalLM";
  family.model_type = "phi4_multimodal";
  return family;
}();

const Family phi4mm = [] {
  Family family = multimodal_family();
  family.class_name = "Phi4MMForCausalLM";
  family.model_type = "phi4mm";
  // Adapters of images and speech lie beside these; they do not act on text.
  family.tensors.qkv = "self_attn.qkv_proj.base_layer";
  family.tensors.output = "self_attn.o_proj.base_layer";
  family.tensors.gate_up = "mlp.gate_up_proj.base_layer";
  family.tensors.down = "down_proj.base_layer";
  return family;
}();

}  // namespace kvzap::model
