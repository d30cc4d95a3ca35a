#include "gguf/architectures.hpp"

#include <algorithm>

namespace kvzap::gguf {
namespace {

using TensorList = std::vector<std::string_view>;

TensorList operator+(TensorList first, const TensorList& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

/// Lists of tensors that several architectures have.
struct TensorLists {
  const TensorList attention = {"attn_q", "attn_k", "attn_v", "attn_output"};
  const TensorList norms = {"attn_norm", "ffn_norm"};
  const TensorList post_norms = {"post_attention_norm", "post_ffw_norm"};
  const TensorList qk_norms = {"attn_q_norm", "attn_k_norm"};
  const TensorList dense = {"ffn_gate", "ffn_up", "ffn_down"};
  const TensorList fused_dense = {"ffn_up", "ffn_down"};  // gate and up in one
  const TensorList experts = {"ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"};
  const TensorList shared = {"ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"};
  const TensorList shared_with_gate = shared + TensorList{"ffn_gate_inp_shexp"};
  const TensorList llama = norms + attention + dense;
  const TensorList qwen3 = llama + qk_norms;
};

constexpr bool interleaves = true, partial = true, layer_norms = true;

std::vector<Architecture> architectures_with_full_attention(const TensorLists& lists) {
  return {
      {"llama",
       {"LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"},
       interleaves,
       !partial,
       lists.llama + lists.experts},
      {"qwen2", {"Qwen2ForCausalLM"}, !interleaves, !partial, lists.llama},
      {"qwen3", {"Qwen3ForCausalLM"}, !interleaves, !partial, lists.qwen3},
      {"qwen2moe",
       {"Qwen2MoeForCausalLM"},
       !interleaves,
       !partial,
       lists.llama + lists.experts + lists.shared_with_gate},
      {"qwen3moe", {"Qwen3MoeForCausalLM"}, !interleaves, !partial, lists.qwen3 + lists.experts},
      {"mistral3", {"Ministral3ForCausalLM"}, interleaves, !partial, lists.llama},
      {"minimax-m2",
       {"MiniMaxM2ForCausalLM"},
       !interleaves,
       partial,
       lists.norms + lists.attention + lists.qk_norms + lists.experts + TensorList{"exp_probs_b"}},
      {"smollm3", {"SmolLM3ForCausalLM"}, interleaves, !partial, lists.llama},
      {"olmo2",
       {"Olmo2ForCausalLM", "Olmo3ForCausalLM"},
       !interleaves,
       !partial,
       lists.attention + lists.qk_norms + lists.dense + lists.post_norms,
       4},
      {"phi3",
       {"Phi3ForCausalLM"},
       !interleaves,
       partial,
       lists.norms + lists.fused_dense + TensorList{"attn_qkv", "attn_output"}},
      {"granite", {"GraniteForCausalLM"}, interleaves, !partial, lists.llama},
      {"granitemoe",
       {"GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"},
       interleaves,
       !partial,
       lists.norms + lists.attention + lists.experts + lists.shared},
      {"arcee",
       {"ArceeForCausalLM"},
       interleaves,
       !partial,
       lists.norms + lists.attention + TensorList{"ffn_up", "ffn_down"}},
      {"gemma", {"GemmaForCausalLM"}, !interleaves, !partial, lists.llama},
      {"olmoe",
       {"OlmoeForCausalLM"},
       !interleaves,
       !partial,
       lists.norms + lists.attention + lists.qk_norms + lists.experts},
      {"hunyuan-dense", {"HunYuanDenseV1ForCausalLM"}, !interleaves, !partial, lists.qwen3},
      {"hunyuan-moe",
       {"HunYuanMoEV1ForCausalLM"},
       !interleaves,
       !partial,
       lists.norms + lists.attention + lists.qk_norms + lists.experts + lists.shared},
      {"dots1",
       {"Dots1ForCausalLM"},
       !interleaves,
       !partial,
       lists.qwen3 + lists.experts + lists.shared + TensorList{"exp_probs_b"}},
      {"seed_oss",
       {"SeedOssForCausalLM"},
       !interleaves,
       !partial,
       lists.attention + lists.dense + TensorList{"attn_norm", "post_attention_norm"}},
      // The published RoPE of these turns neighbours, too.
      {"ernie4_5", {"Ernie4_5ForCausalLM"}, !interleaves, !partial, lists.llama},
      {"ernie4_5-moe",
       {"Ernie4_5_MoeForCausalLM"},
       !interleaves,
       !partial,
       lists.llama + lists.experts + lists.shared + TensorList{"exp_probs_b"}},
      {"chatglm",
       {"GlmForCausalLM"},
       !interleaves,
       partial,
       lists.norms + lists.attention + lists.fused_dense},
      {"glm4",
       {"Glm4ForCausalLM"},
       !interleaves,
       partial,
       lists.norms + lists.attention + lists.fused_dense + lists.post_norms},
      {"glm4moe",
       {"Glm4MoeForCausalLM", "SolarOpenForCausalLM"},
       !interleaves,
       partial,
       lists.attention + lists.qk_norms + lists.dense + lists.experts + lists.shared +
           TensorList{"attn_norm", "post_attention_norm", "exp_probs_b"}},
  };
}

std::vector<Architecture> more_with_full_attention(const TensorLists& lists) {
  return {
      {"hy_v3",
       {"HYV3ForCausalLM"},
       !interleaves,
       !partial,
       lists.qwen3 + lists.experts + lists.shared + TensorList{"exp_probs_b"}},
      {"bitnet",
       {"BitNetForCausalLM"},
       !interleaves,
       !partial,
       lists.llama + TensorList{"attn_sub_norm", "ffn_sub_norm"}},
      {"exaone", {"ExaoneForCausalLM"}, !interleaves, !partial, lists.llama},
      // Its norms are LayerNorms, whose epsilon files call that of an RMS norm.
      {"phimoe",
       {"PhimoeForCausalLM"},
       !interleaves,
       !partial,
       lists.norms + lists.attention + lists.experts},
      {"apertus",
       {"ApertusForCausalLM"},
       !interleaves,
       !partial,
       lists.norms + lists.attention + lists.qk_norms + lists.fused_dense},
  };
}

std::vector<Architecture> architectures_with_windows(const TensorLists& lists) {
  const TensorList gemma2 = lists.llama + lists.post_norms;
  constexpr std::int64_t gemma2_layers = 46, gemma3_layers = 62;  // of 27B
  const std::vector<std::pair<std::string_view, std::string_view>> gemma_names = {
      {"post_attention_layernorm", "post_attention_norm"}};
  return {
      {"gemma2",
       {"Gemma2ForCausalLM"},
       !interleaves,
       !partial,
       gemma2,
       2,
       !layer_norms,
       gemma_names,
       gemma2_layers},
      {"gemma3",
       {"Gemma3ForCausalLM"},
       !interleaves,
       !partial,
       gemma2 + lists.qk_norms,
       6,
       !layer_norms,
       gemma_names,
       gemma3_layers},
      {"gpt-oss",
       {"GptOssForCausalLM"},
       !interleaves,
       !partial,
       lists.attention + lists.experts +
           TensorList{"attn_norm", "post_attention_norm", "attn_sinks"},
       2},
      // The published RoPE of these turns neighbours, too.
      {"cohere2",
       {"Cohere2ForCausalLM"},
       !interleaves,
       !partial,
       lists.attention + lists.dense + TensorList{"attn_norm"},
       4,
       layer_norms},
      {"command-r",
       {"CohereForCausalLM"},
       !interleaves,
       !partial,
       lists.attention + lists.qk_norms + lists.dense + TensorList{"attn_norm"},
       0,
       layer_norms},
      {"exaone4",
       {"Exaone4ForCausalLM"},
       !interleaves,
       !partial,
       lists.attention + lists.qk_norms + lists.dense + lists.post_norms,
       4},
      {"exaone-moe",
       {"ExaoneMoeForCausalLM"},
       !interleaves,
       !partial,
       lists.qwen3 + lists.experts + lists.shared + TensorList{"exp_probs_b"},
       4},
      {"afmoe",
       {"AfmoeForCausalLM"},
       !interleaves,
       !partial,
       lists.qwen3 + lists.post_norms + lists.experts + lists.shared +
           TensorList{"exp_probs_b", "attn_gate"},
       4,
       !layer_norms,
       gemma_names},
      {"mellum",
       {"MellumForCausalLM"},
       !interleaves,
       !partial,
       lists.norms + lists.attention + lists.qk_norms + lists.experts,
       4},
      {"mimo2",
       {"MiMoV2FlashForCausalLM"},
       !interleaves,
       partial,
       lists.llama + lists.experts + TensorList{"attn_sinks", "exp_probs_b"},
       1},
      {"step35",
       {"Step3p5ForCausalLM"},
       !interleaves,
       partial,
       lists.qwen3 + lists.experts + lists.shared + TensorList{"exp_probs_b", "attn_gate"},
       1},
      {"llama4",
       {"Llama4ForCausalLM"},
       !interleaves,
       !partial,
       lists.llama + lists.experts + lists.shared,
       4},
  };
}

std::vector<Architecture> hybrid_architectures(const TensorLists& lists) {
  const TensorList hybrid =
      lists.attention + lists.qk_norms + TensorList{"attn_norm",  "post_attention_norm",
                                                    "attn_qkv",   "attn_gate",
                                                    "ssm_conv1d", "ssm_dt",
                                                    "ssm_a",      "ssm_norm",
                                                    "ssm_out"};
  const TensorList gates = {"ssm_alpha", "ssm_beta"};
  return {
      {"qwen3next",
       {"Qwen3NextForCausalLM"},
       !interleaves,
       partial,
       hybrid + lists.experts + lists.shared_with_gate + TensorList{"ssm_ba", "ssm_in"}},
      {"qwen35", {"Qwen3_5ForCausalLM"}, !interleaves, partial, hybrid + lists.dense + gates},
      {"qwen35moe",
       {"Qwen3_5MoeForCausalLM"},
       !interleaves,
       partial,
       hybrid + lists.experts + lists.shared_with_gate + gates},
  };
}

std::vector<Architecture> architectures_with_layer_norms(const TensorLists& lists) {
  constexpr std::int64_t no_windows = 0;
  const TensorList plain = lists.norms + lists.attention + TensorList{"ffn_up", "ffn_down"};
  const TensorList one_map =
      lists.norms + TensorList{"attn_qkv", "attn_output", "ffn_up", "ffn_down"};
  return {
      {"nemotron", {"NemotronForCausalLM"}, !interleaves, partial, plain, no_windows, layer_norms},
      {"starcoder2",
       {"Starcoder2ForCausalLM"},
       !interleaves,
       !partial,
       plain,
       no_windows,
       layer_norms},
      {"phi2",
       {"PhiForCausalLM"},
       !interleaves,
       partial,
       lists.attention + TensorList{"attn_norm", "ffn_up", "ffn_down"},
       no_windows,
       layer_norms},
      {"gptneox", {"GPTNeoXForCausalLM"}, !interleaves, partial, one_map, no_windows, layer_norms},
      {"gpt2", {"GPT2LMHeadModel"}, !interleaves, !partial, one_map, no_windows, layer_norms},
      {"starcoder",
       {"GPTBigCodeForCausalLM"},
       !interleaves,
       !partial,
       one_map,
       no_windows,
       layer_norms},
      {"dbrx",
       {"DbrxForCausalLM"},
       !interleaves,
       !partial,
       lists.experts + TensorList{"attn_norm", "attn_output_norm", "attn_qkv", "attn_output"},
       no_windows,
       layer_norms},
      {"jais2", {"Jais2ForCausalLM"}, !interleaves, !partial, plain, no_windows, layer_norms},
      {"falcon",
       {"FalconForCausalLM"},
       !interleaves,
       !partial,
       TensorList{"attn_norm", "attn_norm_2", "attn_qkv", "attn_output", "ffn_up", "ffn_down"},
       no_windows,
       layer_norms},
      {"stablelm",
       {"StableLmForCausalLM"},
       !interleaves,
       partial,
       lists.llama,
       no_windows,
       layer_norms},
      {"olmo",
       {"OlmoForCausalLM"},
       interleaves,
       !partial,
       lists.attention + lists.dense,
       no_windows,
       layer_norms},
  };
}

std::vector<Architecture> latent_architectures(const TensorLists& lists) {
  const TensorList query = {"attn_q_a", "attn_q_a_norm", "attn_q_b"};
  const TensorList joined =
      lists.norms + lists.dense + query +
      TensorList{"attn_kv_a_mqa", "attn_kv_a_norm", "attn_kv_b", "attn_output"};
  const TensorList deepseek =
      joined + lists.experts + lists.shared +
      TensorList{"attn_q", "attn_k_b", "attn_v_b", "exp_probs_b", "ffn_gate_up_exps"};
  std::vector<Architecture> all = {
      {"deepseek2",
       {"DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM", "Glm4MoeLiteForCausalLM",
        "YoutuForCausalLM"},
       !interleaves,
       partial,
       deepseek},
      {"mistral4", {"Mistral4ForCausalLM"}, !interleaves, partial, deepseek},
      {"minicpm3", {"MiniCPM3ForCausalLM"}, !interleaves, partial, joined}};
  for (Architecture& architecture : all) architecture.has_latents = true;
  return all;
}

/// Gemma 3n and 4.
std::vector<Architecture> architectures_with_layer_inputs(const TensorLists& lists) {
  const std::vector<std::pair<std::string_view, std::string_view>> names = {
      {"post_attention_layernorm", "post_attention_norm"}};
  const std::vector<std::string_view> gemma4_classes = {"Gemma4ForCausalLM",
                                                        "Gemma4UnifiedForCausalLM"};
  const TensorList gemma =
      lists.qwen3 + lists.post_norms + TensorList{"inp_gate", "proj", "post_norm"};
  const TensorList gemma4 = gemma + TensorList{"layer_output_scale"};
  const TensorList streams = {"altup_correct_coef", "altup_correct_scale", "altup_predict_coef",
                              "altup_router",       "altup_router_norm",   "laurel_l",
                              "laurel_r",           "laurel_post_norm"};
  std::vector<Architecture> all = {
      {"gemma3n",
       {"Gemma3nForCausalLM"},
       !interleaves,
       !partial,
       gemma + streams,
       5,
       !layer_norms,
       names},
      {"gemma4", gemma4_classes, !interleaves, !partial, gemma4, 6, !layer_norms, names},
      {"gemma4", gemma4_classes, !interleaves, !partial,
       gemma4 + lists.experts +
           TensorList{"ffn_gate_up_exps", "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"},
       6, !layer_norms, names}};
  for (Architecture& architecture : all) {
    if (architecture.class_names != gemma4_classes) continue;
    architecture.has_experts = architecture.has_tensor("ffn_up_exps");
  }
  return all;
}

std::vector<Architecture> architectures_with_states(const TensorLists& lists) {
  const TensorList space = {"ssm_in", "ssm_conv1d", "ssm_dt", "ssm_a",
                            "ssm_d",  "ssm_norm",   "ssm_out"};
  const TensorList convolution = {"shortconv.in_proj", "shortconv.conv", "shortconv.out_proj"};
  const TensorList granite = lists.norms + lists.attention + space;
  const TensorList nemotron = lists.attention + space + TensorList{"attn_norm"};
  const TensorList lfm = lists.qwen3 + convolution;
  const std::vector<std::string_view> granite_class = {"GraniteMoeHybridForCausalLM"};
  const std::vector<std::string_view> nemotron_class = {"NemotronHForCausalLM"};
  std::vector<Architecture> all = {
      {"lfm2", {"Lfm2ForCausalLM"}, !interleaves, !partial, lfm},
      {"lfm2moe",
       {"Lfm2MoeForCausalLM"},
       !interleaves,
       !partial,
       lfm + lists.experts + TensorList{"exp_probs_b"}},
      {"granitehybrid", granite_class, interleaves, !partial, granite + lists.dense},
      {"granitehybrid", granite_class, interleaves, !partial,
       granite + lists.experts + lists.shared},
      {"falcon-h1", {"FalconH1ForCausalLM"}, !interleaves, !partial, lists.llama + space},
      {"jamba",
       {"JambaForCausalLM"},
       !interleaves,
       !partial,
       lists.llama + lists.experts + space +
           TensorList{"ssm_x", "ssm_dt_norm", "ssm_b_norm", "ssm_c_norm"},
       0,
       !layer_norms,
       {{"pre_ff_layernorm", "ffn_norm"}}},
      {"nemotron_h", nemotron_class, !interleaves, !partial,
       nemotron + TensorList{"ffn_up", "ffn_down"}},
      {"nemotron_h_moe", nemotron_class, !interleaves, !partial,
       nemotron + TensorList{"ffn_up", "ffn_down", "ffn_gate_inp", "ffn_up_exps", "ffn_down_exps",
                             "ffn_up_shexp", "ffn_down_shexp", "exp_probs_b"}}};
  for (Architecture& architecture : all) {
    const bool is_nemotron = architecture.class_names == nemotron_class;
    architecture.has_states = true;
    architecture.has_single_parts = is_nemotron;
    if (!is_nemotron && architecture.class_names != granite_class) continue;
    architecture.has_experts = architecture.has_tensor("ffn_up_exps");
  }
  return all;
}

std::vector<Architecture> all_architectures() {
  const TensorLists lists;
  std::vector<Architecture> all = architectures_with_full_attention(lists);
  for (const auto& more : {more_with_full_attention(lists), architectures_with_windows(lists),
                           hybrid_architectures(lists), architectures_with_layer_norms(lists),
                           latent_architectures(lists), architectures_with_states(lists),
                           architectures_with_layer_inputs(lists)}) {
    all.insert(all.end(), more.begin(), more.end());
  }
  for (Architecture& architecture : all) {
    const bool is_qwen35 = architecture.name == "qwen35" || architecture.name == "qwen35moe";
    architecture.deals_value_heads = is_qwen35;
    architecture.has_extra_blocks = is_qwen35;
    architecture.halves_full_rope = architecture.name == "step35";
    architecture.has_heads_of_kinds = architecture.halves_full_rope || architecture.name == "mimo2";
    if (architecture.has_heads_of_kinds) architecture.has_extra_blocks = true;
    for (const char* name : {"glm4moe", "deepseek2", "nemotron_h_moe", "exaone-moe", "hy_v3"}) {
      if (architecture.name == name) architecture.has_extra_blocks = true;
    }
  }
  return all;
}

}  // namespace

bool Architecture::has_tensor(std::string_view name_in_layer) const {
  return std::find(tensors.begin(), tensors.end(), name_in_layer) != tensors.end();
}

const std::vector<Architecture>& architectures() {
  static const std::vector<Architecture> all = all_architectures();
  return all;
}

const Architecture* architecture_of(std::string_view class_name, bool has_experts) {
  for (const Architecture& architecture : architectures()) {
    const auto& names = architecture.class_names;
    if (architecture.has_experts.value_or(has_experts) != has_experts) continue;
    if (std::find(names.begin(), names.end(), class_name) != names.end()) return &architecture;
  }
  return nullptr;
}

const Architecture* architecture_for_types(std::string_view class_name, bool has_experts) {
  const TensorLists lists;
  static const Architecture any = {"",
                                   {},
                                   !interleaves,
                                   !partial,
                                   lists.llama + lists.experts + lists.shared +
                                       TensorList{"attn_qkv", "attn_gate", "exp_probs_b"}};
  const Architecture* const found = architecture_of(class_name, has_experts);
  return found != nullptr ? found : &any;
}

}  // namespace kvzap::gguf
