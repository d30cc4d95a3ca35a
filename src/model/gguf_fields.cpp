#include "model/gguf_fields.hpp"

#include <fmt/format.h>

#include "gguf/model_file.hpp"
#include "gguf/tensor_names.hpp"

namespace kvzap::model {

using nlohmann::json;

namespace {

/// The model while a file is read, so that rows may name its parts. It passes checks.
const ModelConfig& no_model() {
  static const ModelConfig model = [] {
    ModelConfig config;
    config.attention_multiplier = 1;
    config.query_scaling.emplace();
    config.rope_scaling.emplace();
    config.delta_net.emplace();
    config.latent.emplace();
    config.state_space.emplace();
    config.short_convolution.emplace();
    config.layer_inputs.emplace();
    config.alt_up.emplace();
    config.experts.emplace().intermediate_size = 1;
    return config;
  }();
  return model;
}

const gguf::Metadata& no_metadata() {
  static const gguf::Metadata metadata;
  return metadata;
}

/// Returns a flag or a number as messages show it.
std::string text_of(const json& value) {
  if (value.is_boolean()) return fmt::format("{}", value.get<bool>());
  return value.is_number_float() ? fmt::format("{}", value.get<double>()) : value.dump();
}

}  // namespace

GgufFields::GgufFields(const gguf::GgufFile& file, const gguf::Architecture& of_file)
    : architecture(of_file), model(no_model()), m_file(&file), m_metadata(file.metadata()) {}

GgufFields::GgufFields(const ModelConfig& of_model, const std::filesystem::path& folder,
                       const gguf::Architecture& of_file, gguf::GgufWriter& writer)
    : architecture(of_file),
      model(of_model),
      m_metadata(no_metadata()),
      m_folder(&folder),
      m_writer(&writer) {}

void GgufFields::uniform(const char* key, const char* field, std::int64_t value,
                         std::int64_t absent) {
  const auto found = find_uniform(key);
  if (reads() && !found && absent == 0) fail_key(key, "a whole number above 0", "none");
  exchange(key, field, value, found.value_or(absent));
}

void GgufFields::number(const char* key, const char* field, double value) {
  if (const auto found = find_number(key)) config[field] = *found;
  add(key, value);
}

bool GgufFields::has_in_layers(std::string_view name) const {
  for (std::int64_t l = 0; reads() && l < layers; ++l) {
    if (tensor(gguf::name_in_layer(l, name)) != nullptr) return true;
  }
  return false;
}

std::string GgufFields::own(std::string_view key) const {
  return fmt::format("{}.{}", architecture.name, key);
}

double GgufFields::above_0(std::string_view key) {
  const auto value = find_number(key);
  if (!reads() || (value && *value > 0)) return value.value_or(1);
  fail_key(key, "a number above 0", value ? fmt::format("{}", *value) : "none");
}

double GgufFields::find_factor(std::string_view key, double absent) {
  const auto value = find_number(key);
  return value && *value != 0 ? *value : absent;
}

std::optional<std::vector<bool>> GgufFields::find_flags(std::string_view key) {
  const gguf::MetadataValue* const value = m_metadata.find(own(key));
  if (value == nullptr || value->type != gguf::ValueType::array) return std::nullopt;
  const auto count = static_cast<std::uint64_t>(blocks);
  if (value->element == gguf::ValueType::boolean) return m_metadata.find_flags(read(key), count);
  const auto numbers = m_metadata.find_integers(read(key), count, 0, 1);
  return std::vector<bool>(numbers->begin(), numbers->end());
}

std::optional<std::int64_t> GgufFields::find_uniform(std::string_view key) {
  const gguf::MetadataValue* const value = m_metadata.find(own(key));
  if (value == nullptr || value->type != gguf::ValueType::array) return find_integer(key, 1);
  const auto numbers =
      m_metadata.find_integers(read(key), static_cast<std::uint64_t>(blocks), 1, max_extent);
  for (const std::int64_t other : *numbers) {
    if (other == numbers->front()) continue;
    fail_key(key, "the same number for all layers",
             fmt::format("{} and {}", numbers->front(), other));
  }
  return numbers->front();
}

std::vector<std::int64_t> GgufFields::numbers_of_layers(std::string_view key) {
  const auto count = static_cast<std::size_t>(layers);
  const gguf::MetadataValue* const value = m_metadata.find(own(key));
  if (value == nullptr || value->type != gguf::ValueType::array) {
    return std::vector<std::int64_t>(count, whole(key, 0));
  }
  auto numbers =
      *m_metadata.find_integers(read(key), static_cast<std::uint64_t>(blocks), 0, max_extent);
  numbers.resize(count);
  return numbers;
}

std::int64_t GgufFields::common_number(std::string_view key,
                                       const std::vector<std::int64_t>& numbers) const {
  std::int64_t common = 0;
  for (const std::int64_t number : numbers) {
    if (number == 0 || number == common) continue;
    if (common != 0) {
      fail_key(key, "the same number for all layers, or 0",
               fmt::format("{} and {}", common, number));
    }
    common = number;
  }
  return common;
}

void GgufFields::require_key(std::string_view key, const json& value) {
  json found = value;
  if (value.is_boolean()) {
    found = m_metadata.find_flag(read(key)).value_or(value.get<bool>());
  } else {
    found = find_integer(key, 0).value_or(value.get<std::int64_t>());
  }
  if (found == value) return;
  fail_key(key, fmt::format("{}, as the architecture has no other", text_of(value)),
           text_of(found));
}

void GgufFields::add(std::string_view key, const json& value) {
  if (reads()) return;
  const std::string name = own(key);
  if (value.is_boolean()) m_writer->add_flag(name, value.get<bool>());
  if (value.is_number_integer()) m_writer->add_u32(name, value.get<std::uint32_t>());
  if (value.is_number_float()) m_writer->add_f32(name, value.get<float>());
  if (value.is_string()) m_writer->add_string(name, value.get_ref<const std::string&>());
  if (!value.is_array()) return;
  if (value.front().is_number_float()) {
    return m_writer->add_f32s(name, value.get<std::vector<float>>());
  }
  if (value.front().is_boolean()) return m_writer->add_flags(name, value.get<std::vector<bool>>());
  m_writer->add_i32s(name, value.get<std::vector<std::int32_t>>());
}

void GgufFields::require(bool condition, std::string_view field, std::string_view expected,
                         std::string_view found) const {
  if (reads() || condition) return;
  fail(field, fmt::format("{}, which {} in GGUF implies", expected, architecture.name), found);
}

void GgufFields::demand(std::string_view field, const json& value, const json& of_model) const {
  require(of_model == value, field, text_of(value), text_of(of_model));
}

void GgufFields::fail(std::string_view field, std::string_view expected,
                      std::string_view found) const {
  throw Error(fmt::format("{}: {}: expected {}, found {}",
                          gguf::name_of_model_file(*m_folder, "config.json"), field, expected,
                          found));
}

}  // namespace kvzap::model
