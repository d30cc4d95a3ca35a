// Apertus: norms of queries and keys, and feed-forward parts without a gate whose activation has
// parameters of each layer.
#include "model/families/families.hpp"

namespace kvzap::model {

const Family apertus = [] {
  Family family;
  family.class_name = "ApertusForCausalLM";
  family.other_classes = {"Apertus1p5TextForCausalLM"};
  family.model_type = "apertus";
  family.text_types = {"apertus1p5_text"};
  family.tested = family_tests;
  family.default_norm_eps = 1e-5;
  family.rope.default_theta = 12000000;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    fields.require("hidden_act", "xielu");
    // Without these fields, transformers scales RoPE by numbers of its own.
    if (fields.get("rope_parameters") == nullptr && fields.get("rope_scaling") == nullptr) {
      fields.fail("rope_parameters", "an object", "none");
    }
    config.gates_feed_forward = false;
    config.activation = Activation::xielu;
    config.qk_norm = QkNorm::head;
    config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
    ignore_bias(fields, "mlp_bias", config);
    // Apertus 1.5 may have a head for a part of the vocabulary.
    if (fields.get("output_vocab_size") != nullptr) {
      fields.require("output_vocab_size", config.vocab_size);
    }
    // Fields of the program that trained the models.
    fields.require("post_norm", false);
    fields.require("qk_norm", true);
  };
  family.tensors.attention_in = "attention_layernorm";
  family.tensors.feed_forward_in = "feedforward_layernorm";
  return family;
}();

}  // namespace kvzap::model
