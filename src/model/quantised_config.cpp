#include "model/quantised_config.hpp"
#include "files/ascii.hpp"
#include "model/supported_names.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <initializer_list>

namespace kvzap::model {
namespace {

constexpr const char* field_name = "quantization_config";

/// Fields that describe how the weights were made, name layers or configure other programs. The
/// store finds out from the files which layers are quantised.
const std::set<std::string_view>& harmless_quantised_fields() {
  static const std::set<std::string_view> fields = {
      "activation_scale_ub",
      "activation_scheme",
      "backend",
      "batch_size",
      "block_name_to_quantize",
      "cache_block_outputs",
      "damp_auto_increment",
      "damp_percent",
      "dataset",
      "dequantize",
      "desc_act",
      "disable_exllama",
      "do_fuse",
      "exllama_config",
      "fuse_max_seq_len",
      "global_compression_ratio",
      "hub",
      "hyb_act",
      "ignore",
      "ignored_layers",
      "kv_cache_scheme",
      "lm_head",
      "max_input_length",
      "meta",
      "model_file_base_name",
      "model_name_or_path",
      "model_seqlen",
      "module_name_preceding_first_block",
      "modules_in_block_to_quantize",
      "modules_to_fuse",
      "modules_to_not_convert",
      "mse",
      "pad_token_id",
      "quantization_status",
      "quantizer",
      "static_groups",
      "tokenizer",
      "true_sequential",
      "use_cuda_fp16",
      "use_exllama",
      "version",
  };
  return fields;
}

/// The text of a field, which must be one of `allowed`. Layouts are written in either case.
std::optional<std::string> find_one_of(ConfigFields& fields, const std::string& field,
                                       const std::vector<std::string>& allowed) {
  auto text = fields.find_text(field);
  if (!text) return std::nullopt;
  const std::string lower = files::lower_case(*text);
  if (std::find(allowed.begin(), allowed.end(), lower) == allowed.end()) {
    fields.fail(field, fmt::format("{}", fmt::join(allowed, " or ")), files::in_quotes(*text));
  }
  return lower;
}

void require_bits(ConfigFields& fields, const char* field, std::int64_t bits) {
  const auto found = fields.find_size(field, max_size);
  if (!found || *found != bits) {
    fields.fail(field, fmt::format("{}", bits), found ? fmt::format("{}", *found) : "none");
  }
}

/// -1 stands for one group of all inputs.
void read_group_size(ConfigFields& fields, QuantisedConfig& config) {
  const nlohmann::json* const value = fields.get("group_size");
  if (value == nullptr) fields.fail("group_size", "-1 or a whole number above 0", "none");
  if (value->is_number_integer() && *value == -1) return;
  config.group_size = fields.size("group_size", max_size);
}

/// An array [rows, columns].
void read_block(ConfigFields& fields, const char* field, QuantisedConfig& config) {
  const nlohmann::json* const value = fields.get(field);
  if (value == nullptr) return;
  const auto is_size = [](const nlohmann::json& size) {
    return size.is_number_unsigned() && size >= 1 && size <= max_size;
  };
  if (!value->is_array() || value->size() != 2 || !is_size((*value)[0]) || !is_size((*value)[1])) {
    fields.fail(field, "an array of two whole numbers above 0", files::described(*value));
  }
  config.block_rows = (*value)[0].get<std::int64_t>();
  config.block_columns = (*value)[1].get<std::int64_t>();
}

/// The groups of compressed-tensors: all must hold weights of 8-bit floats.
void read_compressed_tensors(ConfigFields& fields, QuantisedConfig& config) {
  find_one_of(fields, "format", {"float-quantized", "naive-quantized"});
  for (const char* field : {"sparsity_config", "transform_config"}) {
    const nlohmann::json* const value = fields.get(field);
    if (value != nullptr && !value->empty()) {
      fields.fail(field, "none (it is not supported)", files::described(*value));
    }
  }
  const nlohmann::json* const groups = fields.get("config_groups");
  if (groups == nullptr || !groups->is_object() || groups->empty()) {
    fields.fail("config_groups", "an object with at least one group",
                groups ? files::described(*groups) : "none");
  }
  bool is_first = true;
  for (const auto& [name, group] : groups->items()) {
    const std::string where = fmt::format("{}.config_groups.{}", field_name, files::shown(name));
    if (!group.is_object() || !group.contains("weights") || !group["weights"].is_object()) {
      files::throw_unexpected(fmt::format("{}: {}", fields.file(), where),
                              "an object with the field weights", files::described(group));
    }
    ConfigFields weights(group["weights"], fields.file(), where + ".weights");
    find_one_of(weights, "type", {"float"});
    require_bits(weights, "num_bits", 8);
    find_one_of(weights, "strategy", {"tensor", "channel", "block"});
    QuantisedConfig own;
    read_block(weights, "block_structure", own);
    if (!is_first &&
        (own.block_rows != config.block_rows || own.block_columns != config.block_columns)) {
      weights.fail("block_structure", "the same in all groups", "another");
    }
    config.block_rows = own.block_rows;
    config.block_columns = own.block_columns;
    is_first = false;
  }
}

void read_awq(ConfigFields& fields, QuantisedConfig& config) {
  config.format = QuantisedFormat::awq;
  require_bits(fields, "bits", 4);
  read_group_size(fields, config);
  find_one_of(fields, "version", {"gemm"});
  config.may_lack_zeros = !fields.flag("zero_point", true);
}

void read_gptq(ConfigFields& fields, QuantisedConfig& config) {
  config.format = QuantisedFormat::gptq;
  require_bits(fields, "bits", 4);
  read_group_size(fields, config);
  config.may_lack_zeros = fields.flag("sym", false);
  config.zeros_less_one =
      find_one_of(fields, "checkpoint_format", {"gptq", "gptq_v2"}).value_or("gptq") == "gptq";
  fields.require("is_marlin_format", false);
  find_one_of(fields, "pack_dtype", {"int32"});
  // Settings for single layers: other numbers of bits, for example.
  const nlohmann::json* const dynamic = fields.get("dynamic");
  if (dynamic != nullptr && !dynamic->empty()) {
    fields.fail("dynamic", "none (it is not supported)", files::described(*dynamic));
  }
}

}  // namespace

const std::vector<std::string_view>& quantisation_methods() {
  static const std::vector<std::string_view> names = {"fp8",   "fbgemm_fp8", "compressed-tensors",
                                                      "mxfp4", "awq",        "gptq"};
  return names;
}

std::optional<QuantisedConfig> read_quantised_config(ConfigFields& config,
                                                     std::vector<std::string>& warnings) {
  const nlohmann::json* const object = config.get(field_name);
  if (object == nullptr) return std::nullopt;
  if (!object->is_object()) config.fail(field_name, "an object", files::described(*object));
  ConfigFields fields(*object, config.file(), field_name);
  const std::string methods = files::alternatives(quantisation_methods());
  const auto method = fields.find_text("quant_method");
  if (!method) fields.fail("quant_method", methods, "none");
  QuantisedConfig quantised;
  if (*method == "fp8") {
    find_one_of(fields, "fmt", {"e4m3"});
    read_block(fields, "weight_block_size", quantised);
  } else if (*method == "compressed-tensors") {
    read_compressed_tensors(fields, quantised);
  } else if (*method == "mxfp4") {
    quantised.format = QuantisedFormat::mxfp4;
  } else if (*method == "awq") {
    read_awq(fields, quantised);
  } else if (*method == "gptq") {
    read_gptq(fields, quantised);
  } else if (*method != "fbgemm_fp8") {
    fields.fail("quant_method", methods, files::in_quotes(*method));
  }
  fields.warn_unknown(harmless_quantised_fields(), warnings);
  return quantised;
}

}  // namespace kvzap::model
