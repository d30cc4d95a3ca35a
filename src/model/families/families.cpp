#include "model/families/families.hpp"

#include <fmt/format.h>

#include <utility>

namespace kvzap::model {

const std::vector<const Family*>& families() {
  static const std::vector<const Family*> all = {
      &qwen3,      &qwen2,      &llama,   &mistral, &qwen3_moe, &qwen2_moe, &mixtral,
      &ministral3, &minimax_m2, &smollm3, &olmo2,   &phi3,      &granite,   &glm4,
      &glm4_moe,   &gemma3,     &gemma2,  &olmo3,   &gpt_oss,   &llama4,    &cohere2};
  return all;
}

const Family& family_of(const ModelConfig& config) {
  for (const Family* family : families()) {
    if (family->class_name == config.architecture) return *family;
  }
  throw Error(fmt::format("architecture: expected one of supported_models(), found '{}'",
                          config.architecture));
}

std::string_view missing_parts(std::string_view class_name) {
  constexpr std::pair<std::string_view, std::string_view> known[] = {
      {"DeepseekV3ForCausalLM", "attention with latent keys and values (MLA)"},
      {"Qwen3NextForCausalLM", "layers with gated delta nets"},
      {"Qwen3_5ForCausalLM", "layers with gated delta nets"}};
  for (const auto& [name, parts] : known) {
    if (name == class_name) return parts;
  }
  return "";
}

}  // namespace kvzap::model
