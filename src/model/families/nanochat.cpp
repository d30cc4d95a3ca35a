// nanochat: norms without weights, one of them after the embedding, RoPE that turns backwards
// before the norms of heads, and feed-forward parts without a gate.
#include "model/families/families.hpp"

namespace kvzap::model {

const Family nanochat = [] {
  Family family;
  family.class_name = "NanoChatForCausalLM";
  family.model_type = "nanochat";
  family.tested = family_tests;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    constexpr double largest_cap = 1e6;
    config.qk_norm = QkNorm::unit;
    config.rotates_before_norms = config.rope_is_reversed = true;
    config.gates_feed_forward = false;
    config.activation = read_activation(fields, "hidden_act", Activation::relu2);
    config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
    const char* const cap = "final_logit_softcapping";
    const double absent = fields.has_key(cap) ? 0 : 15;
    config.logits_soft_cap = fields.find_number(cap, 1 / largest_cap, largest_cap).value_or(absent);
  };
  family.tensors.embedding_norm = "model.norm";
  family.tensors.norms_have_weights = false;
  family.tensors.up = "fc1";
  family.tensors.down = "fc2";
  return family;
}();

}  // namespace kvzap::model
