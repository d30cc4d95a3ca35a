#include "model/text_model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "files/json_file.hpp"
#include "model/config_fields.hpp"
#include "model/families/family.hpp"

namespace kvzap::model {
namespace {

using nlohmann::json;

std::string text_in(const json& object, const char* field) {
  const auto found = object.find(field);
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

/// Returns the family of a text model by its model_type, or else by its class; null if it is
/// unknown.
const Family* family_of_text(const json& text) {
  const std::string type = text_in(text, "model_type"), name = class_in(text);
  for (const Family* family : families()) {
    const auto& others = family->text_types;
    if (type == family->model_type ||
        std::find(others.begin(), others.end(), type) != others.end()) {
      return family;
    }
  }
  return type.empty() ? find_family(name) : nullptr;
}

/// Returns whether a class answers by text.
bool generates(std::string_view class_name) {
  for (const std::string_view end : {"ForConditionalGeneration", "ForCausalLM", "ForVision2Seq",
                                     "ForImageTextToText", "ChatModel"}) {
    if (class_name.size() > end.size() &&
        class_name.substr(class_name.size() - end.size()) == end) {
      return true;
    }
  }
  return false;
}

}  // namespace

std::string class_in(const json& config) {
  const auto found = config.find("architectures");
  const bool is_one = found != config.end() && found->is_array() && found->size() == 1 &&
                      found->front().is_string();
  return is_one ? found->front().get<std::string>() : "";
}

const json* text_config_in(const json& config, const std::string& file, std::string& field) {
  ConfigFields fields(config, file);
  for (const char* name : {"text_config", "llm_config", "language_config"}) {
    const json* const text = fields.get(name);
    if (text == nullptr) continue;
    if (!text->is_object()) fields.fail(name, "an object", files::described(*text));
    field = name;
    return text;
  }
  return nullptr;
}

json description_of_text(const json& config, const std::string& file,
                         std::vector<std::string>& warnings) {
  const std::string class_name = class_in(config);
  if (find_family(class_name) != nullptr || !generates(class_name)) return config;
  if (!missing_parts(class_name).empty()) return config;
  std::string field;
  const json* text = text_config_in(config, file, field);
  // Older files of some classes have the text model's fields beside vision_config.
  if (text == nullptr && config.contains("vision_config")) text = &config;
  const Family* const family = text == nullptr ? nullptr : family_of_text(*text);
  if (family == nullptr) return config;
  json result = files::parse_json(family->text_defaults, "defaults");
  result.update(*text);
  for (const char* beside : {"dtype", "torch_dtype", "quantization_config", "is_encoder_decoder"}) {
    if (config.contains(beside)) result[beside] = config[beside];
  }
  // transformers ties what either of the two ties.
  constexpr const char* ties = "tie_word_embeddings";
  const bool is_tied_inside = result.contains(ties) && result[ties] == true;
  if (config.contains(ties) && !is_tied_inside) result[ties] = config[ties];
  for (const char* of_images : {"vision_config", "vision_start_token_id", "vision_end_token_id",
                                "vision_token_id", "image_token_id", "video_token_id"}) {
    result.erase(of_images);
  }
  result["architectures"] = {std::string(family->class_name)};
  result["model_type"] = std::string(family->model_type);
  warnings.push_back(
      fmt::format("{}: architectures: images are not supported; {} runs on text alone, and tensors "
                  "of images are ignored",
                  file, class_name));
  return result;
}

std::unique_ptr<WeightStore> text_of(std::unique_ptr<WeightStore> store) {
  // In the order of families, as several may end alike.
  std::vector<std::string_view> embeddings;
  for (const Family* family : families()) {
    const std::string_view name = family->tensors.embedding;
    if (std::find(embeddings.begin(), embeddings.end(), name) == embeddings.end()) {
      embeddings.push_back(name);
    }
  }
  const auto has = [&](std::string_view prefix, std::string_view name) {
    return store->has(fmt::format("{}{}.weight", prefix, name));
  };
  for (const std::string_view embedding : embeddings) {
    if (has("", embedding)) return store;
  }
  for (const std::string_view embedding : embeddings) {
    const std::string_view base = embedding.substr(0, embedding.find('.') + 1);  // "model."
    // Published checkpoints and those that transformers 5 writes have different names. Those of
    // GPT-2 lack the base.
    const std::pair<std::string_view, std::string_view> prefixes[] = {
        {"", "language_model."},
        {"", "text_model."},
        {base, "model.language_model."},
        {base, "model.text_model."},
        {base, "language_model."},
        {"", "llm."},
        {"", "model.llm."},
        {base, ""}};
    for (const auto& [from, to] : prefixes) {
      if (!has(to, embedding.substr(from.size()))) continue;
      return std::make_unique<RenamedStore>(std::move(store), [from = from,
                                                               to = to](std::string_view own) {
        return own.substr(0, from.size()) == from ? fmt::format("{}{}", to, own.substr(from.size()))
                                                  : std::string(own);
      });
    }
  }
  return store;
}

}  // namespace kvzap::model
