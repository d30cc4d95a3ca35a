// Llama 1 to 3.3, and models with its classes, such as SmolLM2.
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

}  // namespace kvzap::model
