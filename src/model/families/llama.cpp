// Llama 1 to 3.3, and models with its classes, such as SmolLM2. Models that transformers runs as
// Llama, whose files have a type and defaults of their own: EXAONE 3, InternLM3, IQuest-Coder,
// Emu3.
#include "model/families/families.hpp"

namespace kvzap::model {
namespace {

void read_llama(ConfigFields& fields, ModelConfig& config) {
  config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
  config.mlp_bias = fields.flag("mlp_bias", false);
  read_layer_types(fields, "", config);
}

}  // namespace

const Family llama = [] {
  Family family;
  family.class_name = "LlamaForCausalLM";
  family.model_type = "llama";
  family.text_defaults =
      R"({"vocab_size":32000,"hidden_size":4096,"intermediate_size":11008,"num_hidden_layers":32,)"
      R"("num_attention_heads":32,"max_position_embeddings":2048})";
  family.tested =
      "as Qwen2ForCausalLM; answers of SmolLM2-135M-Instruct equal a reference in numpy";
  family.read = read_llama;
  return family;
}();

const Family exaone = [] {
  Family family;
  family.class_name = "ExaoneForCausalLM";
  family.other_classes = {"LlamaForCausalLM"};
  family.model_type = "exaone";
  family.tested = family_tests;
  family.default_key_value_heads = 8;
  family.default_norm_eps = 1e-5;
  family.rope.default_theta = 5e5;
  family.rename = [](ConfigContent& content) {
    rename_field(content, "num_layers", "num_hidden_layers");
    rename_field(content, "layer_norm_epsilon", "rms_norm_eps");
    rename_field(content, "activation_function", "hidden_act");
  };
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_llama(fields, config);
    for (const char* field : {"num_layers", "layer_norm_epsilon", "embed_dropout"}) {
      fields.get(field);
    }
  };
  family.tensors.layers = "transformer.h.";
  family.tensors.embedding = "transformer.wte";
  family.tensors.final_norm = "transformer.ln_f";
  family.tensors.attention_in = "ln_1";
  family.tensors.feed_forward_in = "ln_2";
  family.tensors.query = "attn.attention.q_proj";
  family.tensors.key = "attn.attention.k_proj";
  family.tensors.value = "attn.attention.v_proj";
  family.tensors.output = "attn.attention.out_proj";
  family.tensors.gate = "c_fc_0";
  family.tensors.up = "c_fc_1";
  family.tensors.down = "c_proj";
  return family;
}();

const Family internlm3 = [] {
  Family family;
  family.class_name = "InternLM3ForCausalLM";
  family.other_classes = {"LlamaForCausalLM"};
  family.model_type = "internlm3";
  family.tested = family_tests;
  family.default_key_value_heads = 2;
  family.default_head_dim = 128;
  family.default_norm_eps = 1e-5;
  family.rename = [](ConfigContent& content) {
    rename_field(content, "qkv_bias", "attention_bias");
    rename_field(content, "bias", "mlp_bias");
  };
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_llama(fields, config);
    if (config.mlp_bias != config.o_bias) fields.require("mlp_bias", config.o_bias);
    for (const char* field : {"qkv_bias", "bias"}) fields.get(field);
  };
  return family;
}();

const Family iquestcoder = [] {
  Family family;
  family.class_name = "IQuestCoderForCausalLM";
  family.other_classes = {"LlamaForCausalLM"};
  family.model_type = "iquestcoder";
  family.tested = family_tests;
  family.default_key_value_heads = 8;
  family.default_head_dim = 128;
  family.default_norm_eps = 1e-5;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_llama(fields, config);
    fields.require_none("clip_qkv");
    fields.require("use_sliding_window", false);
    fields.get("sliding_window");  // which use_sliding_window turns off
  };
  return family;
}();

const Family emu3 = [] {
  Family family;
  family.class_name = "Emu3ForCausalLM";
  family.model_type = "emu3_text_model";
  family.text_defaults =
      R"({"vocab_size":184622,"hidden_size":4096,"intermediate_size":14336,)"
      R"("num_hidden_layers":32,"num_attention_heads":32,"max_position_embeddings":9216})";
  family.tested = family_tests;
  family.default_key_value_heads = 8;
  family.default_norm_eps = 1e-5;
  family.rope.default_theta = 1e6;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    ignore_bias(fields, "attention_bias", config);
    ignore_bias(fields, "mlp_bias", config);
  };
  return family;
}();

}  // namespace kvzap::model
