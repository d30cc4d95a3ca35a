#include "gguf/architectures.hpp"

#include <algorithm>

namespace kvzap::gguf {
namespace {

using TensorList = std::vector<std::string_view>;

TensorList operator+(TensorList first, const TensorList& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

std::vector<Architecture> all_architectures() {
  const TensorList attention = {"attn_q", "attn_k", "attn_v", "attn_output"};
  const TensorList norms = {"attn_norm", "ffn_norm"};
  const TensorList post_norms = {"post_attention_norm", "post_ffw_norm"};
  const TensorList qk_norms = {"attn_q_norm", "attn_k_norm"};
  const TensorList dense = {"ffn_gate", "ffn_up", "ffn_down"};
  const TensorList fused_dense = {"ffn_up", "ffn_down"};  // gate and up in one
  const TensorList experts = {"ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"};
  const TensorList shared = {"ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"};
  const TensorList llama = norms + attention + dense;
  const TensorList qwen3 = llama + qk_norms;
  const TensorList gemma2 = llama + post_norms;
  constexpr std::int64_t gemma2_layers = 46, gemma3_layers = 62;  // of 27B
  const std::vector<std::pair<std::string_view, std::string_view>> gemma_names = {
      {"post_attention_layernorm", "post_attention_norm"}};
  const TensorList hybrid = attention + qk_norms + TensorList{"attn_norm",  "post_attention_norm",
                                                              "attn_qkv",   "attn_gate",
                                                              "ssm_conv1d", "ssm_dt",
                                                              "ssm_a",      "ssm_norm",
                                                              "ssm_out"};
  const TensorList gates = {"ssm_alpha", "ssm_beta"};
  const TensorList shared_with_gate = shared + TensorList{"ffn_gate_inp_shexp"};
  constexpr bool interleaves = true, partial = true, layer_norms = true;
  return {
      {"llama",
       {"LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"},
       "llama",
       interleaves,
       !partial,
       llama + experts},
      {"qwen2", {"Qwen2ForCausalLM"}, "qwen2", !interleaves, !partial, llama},
      {"qwen3", {"Qwen3ForCausalLM"}, "qwen3", !interleaves, !partial, qwen3},
      {"qwen2moe",
       {"Qwen2MoeForCausalLM"},
       "qwen2_moe",
       !interleaves,
       !partial,
       llama + experts + shared_with_gate},
      {"qwen3moe", {"Qwen3MoeForCausalLM"}, "qwen3_moe", !interleaves, !partial, qwen3 + experts},
      {"mistral3", {"Ministral3ForCausalLM"}, "ministral3", interleaves, !partial, llama},
      {"minimax-m2",
       {"MiniMaxM2ForCausalLM"},
       "minimax_m2",
       !interleaves,
       partial,
       norms + attention + qk_norms + experts + TensorList{"exp_probs_b"}},
      {"smollm3", {"SmolLM3ForCausalLM"}, "smollm3", interleaves, !partial, llama},
      {"olmo2",
       {"Olmo2ForCausalLM", "Olmo3ForCausalLM"},
       "olmo2",
       !interleaves,
       !partial,
       attention + qk_norms + dense + post_norms,
       4},
      {"phi3",
       {"Phi3ForCausalLM"},
       "phi3",
       !interleaves,
       partial,
       norms + fused_dense + TensorList{"attn_qkv", "attn_output"}},
      {"granite", {"GraniteForCausalLM"}, "granite", interleaves, !partial, llama},
      // Its published RoPE turns neighbours, too.
      {"glm4",
       {"Glm4ForCausalLM"},
       "glm4",
       !interleaves,
       partial,
       norms + attention + fused_dense + post_norms},
      {"glm4moe",
       {"Glm4MoeForCausalLM"},
       "glm4_moe",
       !interleaves,
       partial,
       attention + qk_norms + dense + experts + shared +
           TensorList{"attn_norm", "post_attention_norm", "exp_probs_b"}},
      {"gemma2",
       {"Gemma2ForCausalLM"},
       "gemma2",
       !interleaves,
       !partial,
       gemma2,
       2,
       !layer_norms,
       gemma_names,
       gemma2_layers},
      {"gemma3",
       {"Gemma3ForCausalLM"},
       "gemma3_text",
       !interleaves,
       !partial,
       gemma2 + qk_norms,
       6,
       !layer_norms,
       gemma_names,
       gemma3_layers},
      {"gpt-oss",
       {"GptOssForCausalLM"},
       "gpt_oss",
       !interleaves,
       !partial,
       attention + experts + TensorList{"attn_norm", "post_attention_norm", "attn_sinks"},
       2},
      // The published RoPE of these turns neighbours, too.
      {"cohere2",
       {"Cohere2ForCausalLM"},
       "cohere2",
       !interleaves,
       !partial,
       attention + dense + TensorList{"attn_norm"},
       4,
       layer_norms},
      {"llama4",
       {"Llama4ForCausalLM"},
       "llama4_text",
       !interleaves,
       !partial,
       llama + experts + shared,
       4},
      {"qwen3next",
       {"Qwen3NextForCausalLM"},
       "qwen3_next",
       !interleaves,
       partial,
       hybrid + experts + shared_with_gate + TensorList{"ssm_ba", "ssm_in"}},
      {"qwen35",
       {"Qwen3_5ForCausalLM"},
       "qwen3_5_text",
       !interleaves,
       partial,
       hybrid + dense + gates},
      {"qwen35moe",
       {"Qwen3_5MoeForCausalLM"},
       "qwen3_5_moe_text",
       !interleaves,
       partial,
       hybrid + experts + shared_with_gate + gates},
  };
}

}  // namespace

bool Architecture::has_tensor(std::string_view name_in_layer) const {
  return std::find(tensors.begin(), tensors.end(), name_in_layer) != tensors.end();
}

const std::vector<Architecture>& architectures() {
  static const std::vector<Architecture> all = [] {
    std::vector<Architecture> list = all_architectures();
    for (Architecture& architecture : list) {
      const bool is_qwen35 = architecture.name == "qwen35" || architecture.name == "qwen35moe";
      architecture.deals_value_heads = is_qwen35;
      architecture.has_extra_blocks = is_qwen35 || architecture.name == "glm4moe";
    }
    return list;
  }();
  return all;
}

const Architecture* architecture_of(std::string_view class_name) {
  for (const Architecture& architecture : architectures()) {
    const auto& names = architecture.class_names;
    if (std::find(names.begin(), names.end(), class_name) != names.end()) return &architecture;
  }
  return nullptr;
}

}  // namespace kvzap::gguf
