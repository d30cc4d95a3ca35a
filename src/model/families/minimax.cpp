// MiniMax M2: experts chosen by sigmoids, norms of whole rows of queries and keys.
#include "model/families/families.hpp"

namespace kvzap::model {

const Family minimax_m2 = [] {
  Family family;
  family.class_name = "MiniMaxM2ForCausalLM";
  family.model_type = "minimax_m2";
  family.tested = family_tests;
  family.default_key_value_heads = 8;
  family.default_head_dim = 128;
  family.rope.default_rotary_factor = 1;
  family.rope.default_theta = 5e6;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    config.qk_norm = QkNorm::row;
    read_experts_everywhere(fields, 8, config);
    config.experts->scores = ExpertsConfig::Scores::sigmoid;
    config.experts->has_correction = true;
  };
  family.tensors.router = "block_sparse_moe.gate";
  family.tensors.correction = "block_sparse_moe.e_score_correction_bias";
  family.tensors.expert_gate = "block_sparse_moe.experts.{}.w1";
  family.tensors.expert_up = "block_sparse_moe.experts.{}.w3";
  family.tensors.expert_down = "block_sparse_moe.experts.{}.w2";
  return family;
}();

}  // namespace kvzap::model
