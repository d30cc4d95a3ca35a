#include "model/families/families.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace kvzap::model {

namespace {

constexpr const Family* all_families[] = {
    &qwen3,
    &qwen2,
    &llama,
    &mistral,
    &qwen3_moe,
    &qwen2_moe,
    &mixtral,
    &ministral3,
    &minimax_m2,
    &smollm3,
    &olmo2,
    &phi3,
    &granite,
    &glm4,
    &glm4_moe,
    &gemma4,
    &gemma4_unified,
    &gemma3n,
    &gemma3,
    &gemma2,
    &olmo3,
    &gpt_oss,
    &llama4,
    &cohere2,
    &qwen3_next,
    &qwen3_5,
    &qwen3_5_moe,
    &arcee,
    &nemotron,
    &apertus,
    &starcoder2,
    &stablelm,
    &olmo,
    &phi,
    &gpt_neox,
    &falcon,
    &gpt2,
    &seed_oss,
    &ernie4_5,
    &exaone4,
    &glm,
    &gemma,
    &vaultgemma,
    &cwm,
    &helium,
    &granite_swa,
    &hunyuan_v1_dense,
    &cohere,
    &ministral,
    &hyperclovax,
    &ernie4_5_moe,
    &exaone_moe,
    &granitemoe,
    &granitemoeshared,
    &granitemoe_swa,
    &olmoe,
    &flex_olmo,
    &hunyuan_v1_moe,
    &dots1,
    &cohere2_moe,
    &solar_open,
    &afmoe,
    &mellum,
    &hy_v3,
    &flint,
    &deepseek_v2,
    &deepseek_v3,
    &sarvam_mla,
    &deepseek_v32,
    &glm4_moe_lite,
    &glm_moe_dsa,
    &axk1,
    &youtu,
    &minicpm3,
    &longcat_flash,
    &mistral4,
    &kimi_linear,
    &bailing_hybrid,
    &lfm2,
    &lfm2_moe,
    &bamba,
    &granitemoehybrid,
    &nemotron_h,
    &falcon_h1,
    &olmo_hybrid,
    &minimax,
    &jamba,
    &lfm3,
    &zamba,
    &zamba2,
    &jais2,
    &nanochat,
    &bitnet,
    &phimoe,
    &kolibri1,
    &opt,
    &biogpt,
    &persimmon,
    &gpt_bigcode,
    &gptj,
    &gpt_neo,
    &aria_text,
    &exaone,
    &internlm3,
    &iquestcoder,
    &sarvam_moe,
    &emu3,
    &mimo_v2_flash,
    &laguna,
    &step3p5,
    &codegen,
    &dbrx,
    &phi4_multimodal,
    &phi4mm,
    &modernbert_decoder,
    &xglm,
    &gpt_neox_japanese,
};

}  // namespace

const std::vector<const Family*>& families() {
  static const std::vector<const Family*> all(std::begin(all_families), std::end(all_families));
  return all;
}

const Family* find_family(std::string_view class_name, std::string_view model_type) {
  const Family* found = nullptr;
  for (const Family* family : families()) {
    const auto& others = family->other_classes;
    if (family->class_name != class_name &&
        std::find(others.begin(), others.end(), class_name) == others.end()) {
      continue;
    }
    if (family->model_type == model_type) return family;
    if (found == nullptr) found = family;
  }
  return found;
}

const Family& family_of(std::string_view class_name) {
  if (const Family* const family = find_family(class_name)) return *family;
  throw Error(
      fmt::format("architecture: expected one of supported_models(), found '{}'", class_name));
}

const Family& family_of(const ModelConfig& config) { return family_of(config.architecture); }

std::string_view missing_parts(std::string_view class_name) {
  constexpr std::string_view of_qwen4 =
      "residual streams with hyper-connections, embeddings of n-grams, and an indexer of tokens";
  constexpr std::pair<std::string_view, std::string_view> known[] = {
      {"Qwen4ExpForCausalLM", of_qwen4},
      {"Qwen4ExpForConditionalGeneration", of_qwen4},
      {"RecurrentGemmaForCausalLM", "layers with gated linear recurrent units"},
      {"JetMoeForCausalLM", "experts that are heads of attention"},
      {"ZayaForCausalLM", "attention whose queries and keys pass convolutions"},
      {"DiffLlamaForCausalLM", "differential attention, whose values are those of two KV heads"},
      {"PaliGemmaForConditionalGeneration", "attention of a prompt's tokens to later ones"}};
  for (const auto& [name, parts] : known) {
    if (name == class_name) return parts;
  }
  return "";
}

}  // namespace kvzap::model
