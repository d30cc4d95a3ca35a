#include "model/gguf_metadata.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "files/quote.hpp"
#include "gguf/tensor_names.hpp"
#include "model/families/family.hpp"
#include "model/gguf_fields.hpp"
#include "model/gguf_gemma.hpp"
#include "model/gguf_latent.hpp"
#include "model/gguf_rows.hpp"

namespace kvzap::model {

namespace fs = std::filesystem;
using gguf::Architecture;
using gguf::GgufFile;
using nlohmann::json;

namespace {

const Architecture& architecture_of_file(const gguf::Metadata& values) {
  constexpr const char* type_key = "general.type";
  const auto type = values.find_string(type_key);
  if (type && *type != "model") values.fail(type_key, "'model'", files::in_quotes(*type));
  constexpr const char* key = "general.architecture";
  const std::string_view name = values.string(key);
  const Architecture* found = nullptr;
  std::vector<std::string_view> names;
  const bool has_experts = values.find_number(fmt::format("{}.expert_count", name)).value_or(0) > 0;
  for (const Architecture& known : gguf::architectures()) {
    if (known.name == name && (found == nullptr || known.has_experts == has_experts)) {
      found = &known;
    }
    if (names.empty() || names.back() != known.name) names.push_back(known.name);
  }
  if (found != nullptr) return *found;
  values.fail(key, files::alternatives(names), files::in_quotes(name));
}

/// The number of layers. Blocks for the prediction of further tokens follow them.
void layers(GgufFields& f) {
  constexpr std::int64_t max_layers = 65536;
  f.blocks = f.whole("block_count", 1, max_layers);
  f.layers = f.reads() ? f.blocks : f.model.num_hidden_layers;
  if (f.architecture.has_extra_blocks) {
    f.layers -= f.find_integer("nextn_predict_layers", 0, f.blocks - 1).value_or(0);
  }
  f.config["num_hidden_layers"] = f.layers;
  f.add("block_count", f.layers);
}

/// The longest text. Without a key for windows, texts end where a window would begin to matter.
void context(GgufFields& f) {
  const bool has_windows = f.architecture.window_pattern > 0 || f.architecture.name == "phi3";
  std::int64_t longest = f.model.max_position_embeddings;
  for (const LayerConfig& layer : f.model.layers) {
    if (!has_windows && layer.window > 0) longest = std::min(longest, layer.window);
  }
  f.integer("context_length", "max_position_embeddings", longest);
  f.context = f.size("max_position_embeddings");
}

/// Widths of layers that are one part each: dense ones, or those of experts. 0: no such part.
void widths_of_layers(GgufFields& f, const char* key) {
  const std::int64_t width =
      f.model.experts ? f.model.experts->intermediate_size : f.model.intermediate_size;
  json of_model = json::array();
  for (const LayerConfig& layer : f.model.layers) {
    of_model.push_back(layer.has_feed_forward ? width : 0);
  }
  f.add(key, of_model);
  if (!f.reads()) return;
  const auto widths = f.numbers_of_layers(key);
  for (const std::int64_t of_layer : widths) f.layers_feed_forward.push_back(of_layer > 0);
  f.config["intermediate_size"] = std::max<std::int64_t>(1, f.common_number(key, widths));
}

/// Files that do not absorb the maps of latents have keys of all heads.
std::int64_t kv_heads_in_gguf(const GgufFields& f) {
  const bool has_joined_maps = f.architecture.has_latents && !f.architecture.has_tensor("attn_k_b");
  return has_joined_maps ? f.model.num_attention_heads : f.model.num_key_value_heads;
}

/// KV heads; none in layers without attention.
void kv_heads(GgufFields& f) {
  constexpr const char* key = "attention.head_count_kv";
  constexpr const char* field = "num_key_value_heads";
  const std::int64_t heads = f.size("num_attention_heads");
  if (!f.architecture.has_states) return f.uniform(key, field, kv_heads_in_gguf(f), heads);
  json of_model = json::array();
  for (const LayerConfig& layer : f.model.layers) {
    of_model.push_back(layer.has_attention() ? f.model.num_key_value_heads : 0);
  }
  f.add(key, of_model);
  if (!f.reads()) return;
  const auto numbers = f.numbers_of_layers(key);
  for (const std::int64_t number : numbers) f.layers_attend.push_back(number > 0);
  const std::int64_t common = f.common_number(key, numbers);
  f.config[field] = common > 0 ? common : heads;
}

/// The dense width. No layer of qwen35moe has a dense part, and published files lack the key.
void width(GgufFields& f) {
  constexpr const char* key = "feed_forward_length";
  if (f.architecture.has_single_parts) return widths_of_layers(f, key);
  if (f.architecture.name != "qwen35moe") {
    return f.uniform(key, "intermediate_size", f.model.intermediate_size);
  }
  f.find_uniform(key);
  f.add(key, f.model.intermediate_size);
}

/// Reads the length of a head.
void read_head(GgufFields& f) {
  constexpr const char* key = "attention.key_length";
  const std::int64_t hidden = f.size("hidden_size"), heads = f.size("num_attention_heads");
  const auto key_length = f.find_integer(key, 1);
  if (!key_length && hidden % heads != 0) {
    f.fail_key("embedding_length",
               fmt::format("a multiple of {}, as there is no {}", heads, f.own(key)),
               fmt::format("{}", hidden));
  }
  f.head_dim = f.rotary_dim = key_length.value_or(hidden / heads);
  if (f.head_dim % 2 != 0) {
    f.fail_key(key_length ? key : "embedding_length", "an even number of values in a head",
               fmt::format("{}", f.head_dim));
  }
  const auto part_of_head = [&](const char* other_key, bool is_partial) {
    const std::int64_t found = f.find_integer(other_key, 1).value_or(f.head_dim);
    if (found == f.head_dim || (is_partial && found % 2 == 0 && found < f.head_dim)) return found;
    f.fail_key(other_key,
               fmt::format("{}{}, the length of a head", is_partial ? "an even number up to " : "",
                           f.head_dim),
               fmt::format("{}", found));
  };
  const bool has_smaller_values = f.architecture.name == "mimo2";
  const std::int64_t value_dim = part_of_head("attention.value_length", has_smaller_values);
  if (has_smaller_values) f.config["v_head_dim"] = value_dim;
  f.rotary_dim = part_of_head("rope.dimension_count", f.architecture.has_partial_rope);
  if (f.architecture.halves_full_rope) f.rotary_dim /= 2;
}

void head(GgufFields& f) {
  if (f.architecture.has_latents) return latent_head(f);
  f.head_dim = f.model.head_dim;
  f.rotary_dim = f.model.rotated_dims();
  if (f.reads()) read_head(f);
  f.config["head_dim"] = f.head_dim;
  f.add("attention.key_length", f.head_dim);
  f.add("attention.value_length", f.model.value_dim > 0 ? f.model.value_dim : f.head_dim);
}

/// The number of tokens is that of the embedding table or, without one, of the tokenizer.
void vocabulary(GgufFields& f) {
  constexpr const char* key = "tokenizer.ggml.tokens";
  json& size = f.config["vocab_size"];
  if (const gguf::TensorEntry* const table = f.tensor("token_embd.weight")) {
    size = table->shape.front();
  } else if (const auto tokens = f.metadata().find_strings(key, GgufFields::max_extent)) {
    size = tokens->left();
  } else {
    size = f.whole("vocab_size", 1);
  }
  f.add("vocab_size", f.model.vocab_size);
}

/// The sizes of all layers but those of Gemma 4.
void uniform_sizes(GgufFields& f) {
  f.architecture.name == "gemma3n" ? gemma3n_widths(f) : width(f);
  if (f.architecture.has_heads_of_kinds) {
    heads_of_kinds(f);
  } else {
    f.uniform("attention.head_count", "num_attention_heads", f.model.num_attention_heads);
    kv_heads(f);
  }
  head(f);
}

/// The rows of all families.
void common_fields(GgufFields& f) {
  constexpr const char* layer_key = "attention.layer_norm_epsilon";
  constexpr const char* rms_key = "attention.layer_norm_rms_epsilon";
  const bool layer_norms = f.architecture.has_layer_norms;
  layers(f);
  context(f);
  f.integer("embedding_length", "hidden_size", f.model.hidden_size);
  const bool is_gemma4 = f.architecture.name == "gemma4";
  is_gemma4 ? gemma4_sizes(f) : uniform_sizes(f);
  const bool is_named_alike = f.architecture.has_single_parts;
  if (is_named_alike) f.add(rms_key, f.model.rms_norm_eps);
  f.positive(layer_norms || is_named_alike ? layer_key : rms_key,
             family_of(f.architecture.class_names.front()).norm_eps_field, f.model.rms_norm_eps);
  vocabulary(f);
  f.config["hidden_act"] = "silu";
  f.config["tie_word_embeddings"] = f.tensor("output.weight") == nullptr;
  is_gemma4 ? gemma4_rope(f) : rope_fields(f);
}

std::string dtype_of(const GgufFields& f) {
  const gguf::TensorEntry* weights = nullptr;
  for (std::int64_t l = 0; l < f.layers && weights == nullptr; ++l) {
    weights = f.tensor(gguf::name_in_layer(l, "attn_output.weight"));
  }
  if (weights == nullptr || weights->format == nullptr) return "bfloat16";
  if (weights->format->name == "F32") return "float32";
  return weights->format->name == "F16" ? "float16" : "bfloat16";
}

/// Settings of related models. If a file sets one that its architecture does not read, its
/// results depend on it.
void refuse_settings(GgufFields& f) {
  const auto expect = [&](double neutral, std::initializer_list<const char*> keys) {
    for (const char* key : keys) {
      const double value = f.was_read(key) ? neutral : f.find_number(key).value_or(neutral);
      if (value == neutral) continue;
      f.fail_key(key, fmt::format("{} (other values are not supported)", neutral),
                 fmt::format("{}", value));
    }
  };
  expect(0, {"expert_count", "expert_used_count", "expert_shared_count", "expert_group_count",
             "expert_group_used_count", "leading_dense_block_count", "nextn_predict_layers"});
  expect(1, {"expert_weights_scale", "logit_scale", "residual_scale", "embedding_scale"});
  expect(0, {"attention.scale", "attention.clamp_kqv", "attention.temperature_scale",
             "attention.temperature_length", "attn_logit_softcapping", "final_logit_softcapping"});
  expect(1, {"rope.scaling.attn_factor", "rope.scaling.yarn_ext_factor",
             "rope.scaling.yarn_attn_factor"});
  expect(0, {"rope.scaling.yarn_log_multiplier"});
  constexpr const char* sections = "rope.dimension_sections";
  if (!f.was_read(sections) && f.metadata().has(f.own(sections))) {
    f.fail_key(sections, "none (RoPE of several axes is not supported)", "a value");
  }
}

bool is_read_in_layer(const GgufFields& f, const gguf::NameInLayer& parts) {
  std::string_view tensor = parts.tensor;
  std::string stacked;
  if (gguf::is_of_experts(tensor) && tensor.find('.') != tensor.npos) {
    stacked = fmt::format("{}_exps", tensor.substr(0, tensor.rfind('.')));
    tensor = stacked;
  }
  if (!f.architecture.has_tensor(tensor)) return false;
  const bool is_routed = gguf::is_of_experts(tensor) || tensor == "ffn_gate_inp";
  if (is_routed && !f.has_experts) return false;
  if (parts.kind == "scale") {
    return f.architecture.name == "gemma4" &&
           (tensor == "ffn_gate_inp" || tensor == "ffn_down_exps");
  }
  const auto is_one_of = [&](std::initializer_list<std::string_view> names) {
    return std::find(names.begin(), names.end(), tensor) != names.end();
  };
  const bool is_bare_correction = f.architecture.name == "hy_v3";
  if (tensor == "exp_probs_b") return parts.kind == (is_bare_correction ? "" : "bias");
  const bool has_step_maps = f.architecture.has_tensor("ssm_x");
  if (tensor == "ssm_dt") return parts.kind == "bias" || (has_step_maps && parts.kind == "weight");
  const bool is_bare =
      is_one_of({"ssm_a", "ssm_d"}) || (tensor == "ffn_norm" && f.architecture.name == "falcon-h1");
  if (is_bare || parts.kind.empty()) return is_bare && parts.kind.empty();
  if (parts.kind == "weight") return true;
  if (is_one_of({"attn_q", "attn_k", "attn_v", "attn_qkv"})) return f.qkv_bias;
  if (tensor == "attn_output") return f.output_bias;
  if (tensor == "ssm_conv1d") return f.convolution_bias;
  if (is_one_of({"attn_norm", "attn_norm_2", "ffn_norm"})) return f.norm_bias;
  if (is_routed) return f.expert_biases;
  return is_one_of({"ffn_gate", "ffn_up", "ffn_down"}) && f.mlp_bias;
}

bool is_read(const GgufFields& f, std::string_view name) {
  for (const char* whole : {"token_embd.weight", "output.weight", "rope_freqs.weight"}) {
    if (name == whole) return true;
  }
  if (name.substr(0, 10) == "per_layer_" || name.substr(0, 6) == "altup_") {
    for (const char* whole : {"per_layer_token_embd.weight", "per_layer_model_proj.weight",
                              "per_layer_proj_norm.weight"}) {
      if (name == whole) return f.architecture.has_tensor("inp_gate");
    }
    const bool is_map = name == "altup_proj.weight" || name == "altup_unembd_proj.weight";
    return is_map && f.architecture.has_tensor("altup_router");
  }
  if (name == "output_norm.bias") return f.norm_bias;
  if (name == "output.bias") return f.head_bias;
  const bool is_lfm = f.architecture.has_tensor("shortconv.conv");
  if (name == "output_norm.weight") return !is_lfm;
  if (name == "token_embd_norm.weight") return is_lfm;
  if (name == "position_embd.weight") return f.has_positions;
  if (name == "rope_factors_long.weight" || name == "rope_factors_short.weight") {
    return has_two_rope_factors(f);
  }
  const auto parts = gguf::parse_name_in_layer(name);
  if (!parts || parts->layer >= f.blocks) return false;
  return parts->layer >= f.layers || is_read_in_layer(f, *parts);
}

/// A tensor that the architecture does not have belongs to another computation.
void refuse_tensors(const GgufFields& f, const GgufFile& file) {
  for (const auto& [name, tensor] : file.tensors()) {
    if (is_read(f, name)) continue;
    throw Error(
        fmt::format("{}: tensor {}: expected no such tensor in a model of {} layers of the "
                    "architecture {}",
                    *tensor.file, files::in_quotes(name, 200), f.layers, f.architecture.name));
  }
}

/// Returns the first family of the architecture for which `is_it` is true.
template <class IsIt>
const GgufFamily& first_family(const Architecture& architecture, const IsIt& is_it) {
  const auto& all = gguf_families();
  return *std::find_if(all.begin(), all.end(), [&](const GgufFamily& family) {
    return family.architecture == architecture.name && (family.class_name.empty() || is_it(family));
  });
}

}  // namespace

json make_config(const GgufFile& file) {
  GgufFields f(file, architecture_of_file(file.metadata()));
  common_fields(f);
  const GgufFamily& family =
      first_family(f.architecture, [&](const GgufFamily& other) { return other.is_in_file(f); });
  const std::string_view class_name =
      family.class_name.empty() ? f.architecture.class_names.front() : family.class_name;
  f.config["architectures"] = {class_name};
  f.config["model_type"] = family_of(class_name).model_type;
  f.config["torch_dtype"] = dtype_of(f);
  family.rows(f);
  refuse_settings(f);
  refuse_tensors(f, file);
  for (const char* name : {"bos", "eos"}) {
    const auto id = file.metadata().find_integer(fmt::format("tokenizer.ggml.{}_token_id", name), 0,
                                                 GgufFields::max_extent);
    if (id && *id < f.config["vocab_size"]) f.config[fmt::format("{}_token_id", name)] = *id;
  }
  return std::move(f.config);
}

std::optional<gguf::ModelFile> read_config(const fs::path& model) {
  constexpr const char* name = "config.json";
  if (!gguf::is_gguf(model)) return gguf::read_model_object(model, name);
  return gguf::ModelFile{make_config(GgufFile::open(model)), gguf::name_of_model_file(model, name)};
}

const Architecture& gguf_architecture(const ModelConfig& config, const fs::path& folder) {
  const Architecture* const found =
      gguf::architecture_of(config.architecture, config.experts.has_value());
  if (found != nullptr) return *found;
  throw Error(fmt::format("{}: architectures: expected one that GGUF has a name for, found {}",
                          gguf::name_of_model_file(folder, "config.json"), config.architecture));
}

void add_configuration(const ModelConfig& config, const fs::path& folder, std::uint32_t file_type,
                       gguf::GgufWriter& writer) {
  const Architecture& architecture = gguf_architecture(config, folder);
  writer.add_string("general.architecture", architecture.name);
  writer.add_string("general.name", folder.filename().string());
  writer.add_u32("general.file_type", file_type);
  GgufFields f(config, folder, architecture, writer);
  common_fields(f);
  first_family(architecture, [&](const GgufFamily& family) {
    return family.class_name == config.architecture;
  }).rows(f);
}

}  // namespace kvzap::model
