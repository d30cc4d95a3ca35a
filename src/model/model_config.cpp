#include "base/json_file.hpp"
#include "base/quote.hpp"
#include "model/model_folder.hpp"
#include "model/rope.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <kvzap/model/model_config.hpp>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

namespace kvzap {

namespace fs = std::filesystem;
using detail::max_rope_factor;
using nlohmann::json;

namespace {

// Bounds far above any published model. They keep a hostile file from asking for absurd amounts of
// memory before its weights are looked at.
constexpr std::int64_t max_size = 2147483647;
constexpr std::int64_t max_count = 65536;
constexpr double min_attention = 1e-3;
constexpr double max_attention = 1e3;
constexpr double min_beta = 1e-6;
constexpr double max_beta = 1e9;
// What single precision computes with, with room for a product.
constexpr double smallest_float = 1e-30;
constexpr double largest_float = 1e30;

/// A value as a message shows it: JSON, cut to a readable length.
std::string text_of(const json& value) {
  constexpr std::size_t longest = 80;
  std::string text = value.dump(-1, ' ', true);
  if (text.size() > longest) text = text.substr(0, longest) + "...";
  return text;
}

/// One JSON object of a file. Remembers which fields were looked at, so that the rest can be
/// reported.
class Fields {
 public:
  /// `prefix` is put before field names in messages, e.g. "rope_scaling.".
  Fields(const json& object, std::string file, std::string prefix = "")
      : m_object(object), m_file(std::move(file)), m_prefix(std::move(prefix)) {}

  [[noreturn]] void fail(std::string_view field, std::string_view expected,
                         std::string_view found) const {
    throw Error(fmt::format("{}: {}{}: expected {}, found {}", m_file, m_prefix, field, expected,
                            detail::shown(found, 300)));
  }

  const std::string& file() const { return m_file; }

  /// The field's value; nullptr if it is absent or null, which mean the same in these files.
  const json* get(const std::string& field) {
    m_seen.insert(field);
    const auto found = m_object.find(field);
    return found == m_object.end() || found->is_null() ? nullptr : &*found;
  }

  bool has_key(const std::string& field) const { return m_object.contains(field); }

  /// A whole number in [1, bound].
  std::optional<std::int64_t> find_size(const std::string& field, std::int64_t bound) {
    const json* const value = get(field);
    if (value == nullptr) return std::nullopt;
    const bool is_valid = value->is_number_unsigned() && value->get<std::uint64_t>() >= 1 &&
                          value->get<std::uint64_t>() <= static_cast<std::uint64_t>(bound);
    if (!is_valid) fail(field, fmt::format("a whole number from 1 to {}", bound), text_of(*value));
    return value->get<std::int64_t>();
  }

  std::int64_t size(const std::string& field, std::int64_t bound) {
    const auto value = find_size(field, bound);
    if (!value) fail(field, fmt::format("a whole number from 1 to {}", bound), "none");
    return *value;
  }

  /// A number above zero.
  std::optional<double> find_positive(const std::string& field) {
    const json* const value = get(field);
    if (value == nullptr) return std::nullopt;
    if (!value->is_number() || !std::isfinite(value->get<double>()) ||
        !(value->get<double>() > 0)) {
      fail(field, "a number above 0", text_of(*value));
    }
    return value->get<double>();
  }

  double positive(const std::string& field) {
    const auto value = find_positive(field);
    if (!value) fail(field, "a number above 0", "none");
    return *value;
  }

  /// A number in [low, high].
  std::optional<double> find_number(const std::string& field, double low, double high) {
    const json* const value = get(field);
    if (value == nullptr) return std::nullopt;
    // NaN is in no range.
    if (!value->is_number() || !(value->get<double>() >= low) || !(value->get<double>() <= high)) {
      fail(field, fmt::format("a number from {} to {}", low, high), text_of(*value));
    }
    return value->get<double>();
  }

  double number(const std::string& field, double low, double high) {
    const auto value = find_number(field, low, high);
    if (!value) fail(field, fmt::format("a number from {} to {}", low, high), "none");
    return *value;
  }

  bool flag(const std::string& field, bool fallback) {
    const json* const value = get(field);
    if (value == nullptr) return fallback;
    if (!value->is_boolean()) fail(field, "true or false", text_of(*value));
    return value->get<bool>();
  }

  std::optional<std::string> find_text(const std::string& field) {
    const json* const value = get(field);
    if (value == nullptr) return std::nullopt;
    if (!value->is_string()) fail(field, "a string", text_of(*value));
    return value->get<std::string>();
  }

  /// The field may only be absent, null or equal to `neutral`.
  void require(const std::string& field, const json& neutral) {
    const json* const value = get(field);
    if (value != nullptr && *value != neutral) fail(field, text_of(neutral), text_of(*value));
  }

  /// The field may only be absent or null.
  void require_none(const std::string& field) {
    const json* const value = get(field);
    if (value != nullptr) fail(field, "none (it is not supported)", text_of(*value));
  }

  /// Adds a warning for every field that was not looked at and is not in `harmless`.
  void warn_unknown(const std::set<std::string_view>& harmless,
                    std::vector<std::string>& warnings) const {
    constexpr std::size_t most = 20;  // said one by one
    std::size_t count = 0;
    for (const auto& [field, value] : m_object.items()) {
      if (value.is_null() || m_seen.count(field) != 0 || harmless.count(field) != 0) continue;
      if (++count > most) continue;
      warnings.push_back(fmt::format("{}: {}{}: unknown field is ignored, found {}", m_file,
                                     m_prefix, detail::shown(field), text_of(value)));
    }
    if (count > most) {
      warnings.push_back(
          fmt::format("{}: {} further unknown fields are ignored", m_file, count - most));
    }
  }

 private:
  const json& m_object;
  std::string m_file;
  std::string m_prefix;
  std::set<std::string> m_seen;
};

/// What one of the two dialects says about RoPE.
struct Rope {
  std::optional<double> theta;
  std::optional<RopeScaling> scaling;
};

constexpr std::string_view rope_types = "default, linear, dynamic, yarn, longrope or llama3";

/// A base whose powers are floats.
std::optional<double> find_theta(Fields& fields) {
  const auto theta = fields.find_positive("rope_theta");
  if (theta) fields.find_number("rope_theta", smallest_float, largest_float);
  return theta;
}

/// Tokens a model was trained on before its context was extended. transformers lets a field beside
/// the RoPE parameters, as Phi-3 has it, win over one among them.
std::int64_t original_length(Fields& fields, std::optional<std::int64_t> beside,
                             const ModelConfig& config, std::vector<std::string>& warnings) {
  const auto own = fields.find_size("original_max_position_embeddings", max_size);
  if (beside && own && *beside != *own) {
    warnings.push_back(
        fmt::format("{}: original_max_position_embeddings = {} counts, not the {} among the RoPE "
                    "parameters, as in transformers",
                    fields.file(), *beside, *own));
  }
  const std::int64_t length = beside ? *beside : own.value_or(config.max_position_embeddings);
  if (length < 2) {
    fields.fail("original_max_position_embeddings", "a whole number above 1",
                fmt::format("{}", length));
  }
  return length;
}

/// The factor, or, where that is null, what max_position_embeddings is of the original length.
double extension(Fields& fields, bool may_be_absent, std::int64_t original,
                 const ModelConfig& config) {
  const auto factor = fields.find_number("factor", 1, max_rope_factor);
  if (factor) return *factor;
  if (!may_be_absent && !fields.has_key("factor")) {
    fields.fail("factor", fmt::format("a number from 1 to {}", max_rope_factor), "none");
  }
  if (original > config.max_position_embeddings) {
    fields.fail("original_max_position_embeddings",
                fmt::format("at most max_position_embeddings ({}), as there is no factor",
                            config.max_position_embeddings),
                fmt::format("{}", original));
  }
  return static_cast<double>(config.max_position_embeddings) / static_cast<double>(original);
}

std::vector<double> factors_of_longrope(Fields& fields, const std::string& field,
                                        std::int64_t pairs) {
  const auto expected = fmt::format("an array of {} numbers above 0 (half of head_dim), up to {}",
                                    pairs, max_rope_factor);
  const json* const value = fields.get(field);
  if (value == nullptr) fields.fail(field, expected, "none");
  if (!value->is_array()) fields.fail(field, expected, text_of(*value));
  if (value->size() != static_cast<std::size_t>(pairs)) {
    fields.fail(field, expected, fmt::format("{} values", value->size()));
  }
  std::vector<double> factors;
  for (const json& factor : *value) {
    // Smaller ones than this would be frequencies beyond all sense, or no floats at all.
    if (!factor.is_number() || !(factor.get<double>() >= 1 / max_rope_factor) ||
        !(factor.get<double>() <= max_rope_factor)) {
      fields.fail(field, expected, text_of(factor));
    }
    factors.push_back(factor.get<double>());
  }
  return factors;
}

void read_llama3(Fields& fields, RopeScaling& scaling) {
  const auto positive = [&](const char* field) {
    fields.positive(field);
    return fields.number(field, 1 / max_rope_factor, max_rope_factor);
  };
  scaling.factor = positive("factor");
  scaling.low_freq_factor = positive("low_freq_factor");
  scaling.high_freq_factor = positive("high_freq_factor");
  if (!(scaling.high_freq_factor > scaling.low_freq_factor)) {
    fields.fail("high_freq_factor",
                fmt::format("more than low_freq_factor ({})", scaling.low_freq_factor),
                fmt::format("{}", scaling.high_freq_factor));
  }
}

void read_yarn(Fields& fields, RopeScaling& scaling) {
  const auto attention = fields.find_number("attention_factor", min_attention, max_attention);
  // 0 means absent, as in transformers.
  const double mscale = fields.find_number("mscale", 0, max_attention).value_or(0);
  const double mscale_all_dim = fields.find_number("mscale_all_dim", 0, max_attention).value_or(0);
  scaling.attention_factor =
      attention.value_or(detail::yarn_attention_factor(scaling.factor, mscale, mscale_all_dim));
  scaling.beta_fast = fields.find_number("beta_fast", min_beta, max_beta).value_or(32);
  scaling.beta_slow = fields.find_number("beta_slow", min_beta, max_beta).value_or(1);
  if (scaling.beta_fast < scaling.beta_slow) {
    fields.fail("beta_fast", fmt::format("at least beta_slow ({})", scaling.beta_slow),
                fmt::format("{}", scaling.beta_fast));
  }
  // Absent and null are not the same to transformers.
  if (fields.has_key("truncate") && fields.get("truncate") == nullptr) {
    fields.fail("truncate", "true or false", "null");
  }
  scaling.truncate = fields.flag("truncate", true);
}

void read_longrope(Fields& fields, const ModelConfig& config, RopeScaling& scaling) {
  const auto attention = fields.find_number("attention_factor", min_attention, max_attention);
  const auto original = static_cast<double>(scaling.original_max_position_embeddings);
  scaling.attention_factor = attention.value_or(
      scaling.factor <= 1 ? 1.0 : std::sqrt(1 + std::log(scaling.factor) / std::log(original)));
  scaling.short_factor = factors_of_longrope(fields, "short_factor", config.head_dim / 2);
  scaling.long_factor = factors_of_longrope(fields, "long_factor", config.head_dim / 2);
}

/// Reads the object `key`: "rope_scaling" (older files) or "rope_parameters" (transformers 5).
Rope parse_rope(Fields& config, const std::string& key, const json& value,
                std::optional<std::int64_t> original_beside, const ModelConfig& sizes,
                std::vector<std::string>& warnings) {
  if (!value.is_object()) config.fail(key, "an object", text_of(value));
  for (const auto& [field, nested] : value.items()) {
    if (nested.is_object()) {
      config.fail(fmt::format("{}.{}", key, field), "one set of RoPE parameters for all layers",
                  text_of(nested));
    }
  }
  Fields fields(value, config.file(), key + ".");
  const auto current_type = fields.find_text("rope_type");
  const auto older_type = fields.find_text("type");
  if (!current_type && !older_type && fields.has_key("factor")) {
    fields.fail("rope_type", rope_types, "none");
  }
  const std::string type = current_type ? *current_type : older_type.value_or("default");

  Rope rope;
  rope.theta = find_theta(fields);
  fields.require("partial_rotary_factor", 1);
  RopeScaling scaling;
  if (type == "linear" || type == "dynamic") {
    scaling.type = type == "linear" ? RopeType::linear : RopeType::dynamic;
    scaling.factor = fields.number("factor", 1, max_rope_factor);
    scaling.original_max_position_embeddings = sizes.max_position_embeddings;
  } else if (type == "yarn" || type == "longrope") {
    scaling.type = type == "yarn" ? RopeType::yarn : RopeType::longrope;
    scaling.original_max_position_embeddings =
        original_length(fields, original_beside, sizes, warnings);
    scaling.factor = extension(fields, scaling.type == RopeType::longrope,
                               scaling.original_max_position_embeddings, sizes);
    if (scaling.type == RopeType::yarn) {
      read_yarn(fields, scaling);
    } else {
      read_longrope(fields, sizes, scaling);
    }
  } else if (type == "llama3") {
    scaling.type = RopeType::llama3;
    scaling.original_max_position_embeddings =
        original_length(fields, original_beside, sizes, warnings);
    read_llama3(fields, scaling);
  } else if (type != "default") {
    fields.fail(current_type ? "rope_type" : "type", rope_types, "\"" + type + "\"");
  }
  if (type != "default") rope.scaling = scaling;
  fields.warn_unknown({}, warnings);
  return rope;
}

void read_rope(Fields& fields, ModelConfig& config) {
  const auto theta = find_theta(fields);
  const auto original = fields.find_size("original_max_position_embeddings", max_size);
  const json* const older = fields.get("rope_scaling");
  const json* const current = fields.get("rope_parameters");
  Rope rope;
  if (older != nullptr) {
    rope = parse_rope(fields, "rope_scaling", *older, original, config, config.warnings);
  }
  if (current != nullptr) {
    const Rope parsed =
        parse_rope(fields, "rope_parameters", *current, original, config, config.warnings);
    if (older != nullptr && rope.scaling != parsed.scaling) {
      fields.fail("rope_parameters", "the same as rope_scaling", text_of(*current));
    }
    if (rope.theta && parsed.theta && *rope.theta != *parsed.theta) {
      fields.fail("rope_parameters.rope_theta", fmt::format("{} as in rope_scaling", *rope.theta),
                  fmt::format("{}", *parsed.theta));
    }
    rope.scaling = parsed.scaling;
    if (parsed.theta) rope.theta = parsed.theta;
  }
  if (theta && rope.theta && *theta != *rope.theta) {
    fields.fail("rope_theta", fmt::format("{} as in the RoPE parameters", *rope.theta),
                fmt::format("{}", *theta));
  }
  constexpr double default_theta = 10000.0;
  config.rope_theta = rope.theta.value_or(theta.value_or(default_theta));
  config.rope_scaling = rope.scaling;
  if (!config.rope_scaling) return;
  if (const std::string problem = detail::rope_problem(config, *config.rope_scaling);
      !problem.empty()) {
    throw Error(fmt::format("{}: {}", fields.file(), problem));
  }
}

/// What differs between the supported architectures.
struct Architecture {
  std::string_view name;
  std::string_view model_type;
  bool qk_norm;
  bool always_qkv_bias;
  bool has_attention_bias_field;
  bool has_mlp_bias_field;
  /// What an absent field means to transformers; 0: derived from the other sizes, as null is.
  std::int64_t default_key_value_heads;
  std::int64_t default_head_dim;
};

constexpr std::array<Architecture, 4> architectures = {{
    {"Qwen3ForCausalLM", "qwen3", true, false, true, false, 32, 128},
    {"Qwen2ForCausalLM", "qwen2", false, true, false, false, 32, 0},
    {"LlamaForCausalLM", "llama", false, false, true, true, 0, 0},
    {"MistralForCausalLM", "mistral", false, false, false, false, 8, 0},
}};

const Architecture& read_architecture(Fields& fields) {
  constexpr std::string_view expected =
      "one of Qwen3ForCausalLM, Qwen2ForCausalLM, LlamaForCausalLM and MistralForCausalLM";
  const json* const value = fields.get("architectures");
  if (value == nullptr) fields.fail("architectures", expected, "none");
  if (!value->is_array() || value->size() != 1 || !value->front().is_string()) {
    fields.fail("architectures", expected, text_of(*value));
  }
  const auto& name = value->front().get_ref<const std::string&>();
  const auto found = std::find_if(architectures.begin(), architectures.end(),
                                  [&](const Architecture& known) { return known.name == name; });
  if (found == architectures.end()) fields.fail("architectures", expected, text_of(*value));
  fields.require("model_type", std::string(found->model_type));
  return *found;
}

void read_sizes(Fields& fields, const Architecture& architecture, ModelConfig& config) {
  config.hidden_size = fields.size("hidden_size", max_size);
  config.intermediate_size = fields.size("intermediate_size", max_size);
  config.num_hidden_layers = fields.size("num_hidden_layers", max_count);
  config.num_attention_heads = fields.size("num_attention_heads", max_count);
  config.vocab_size = fields.size("vocab_size", max_size);
  config.max_position_embeddings = fields.size("max_position_embeddings", max_size);

  const auto absent_or = [&](const char* field, std::int64_t class_default, std::int64_t derived) {
    return class_default != 0 && !fields.has_key(field) ? class_default : derived;
  };
  config.num_key_value_heads =
      fields.find_size("num_key_value_heads", max_count)
          .value_or(absent_or("num_key_value_heads", architecture.default_key_value_heads,
                              config.num_attention_heads));
  if (config.num_attention_heads % config.num_key_value_heads != 0) {
    fields.fail("num_key_value_heads",
                fmt::format("a divisor of num_attention_heads ({})", config.num_attention_heads),
                fmt::format("{}", config.num_key_value_heads));
  }
  const auto head_dim = fields.find_size("head_dim", max_count);
  if (head_dim) {
    config.head_dim = *head_dim;
  } else {
    config.head_dim = absent_or("head_dim", architecture.default_head_dim, 0);
    if (config.head_dim == 0) {
      if (config.hidden_size % config.num_attention_heads != 0) {
        fields.fail("hidden_size",
                    fmt::format("a multiple of num_attention_heads ({}), as there is no head_dim",
                                config.num_attention_heads),
                    fmt::format("{}", config.hidden_size));
      }
      config.head_dim = config.hidden_size / config.num_attention_heads;
    }
  }
  if (config.head_dim % 2 != 0 || config.head_dim > max_count) {
    fields.fail("head_dim", fmt::format("an even number up to {}", max_count),
                fmt::format("{}", config.head_dim));
  }
}

/// Transformers ignores a bias field its class does not have. A file that sets one was probably
/// written for other code, so it is worth a warning.
bool read_bias(Fields& fields, const std::string& field, bool is_supported, ModelConfig& config) {
  const bool value = fields.flag(field, false);
  if (value && !is_supported) {
    config.warnings.push_back(fmt::format("{}: {}: {} has no such field, true is ignored",
                                          fields.file(), field, config.architecture));
  }
  return value && is_supported;
}

void read_dtype(Fields& fields, ModelConfig& config) {
  const bool is_current = fields.has_key("dtype");
  const std::string field = is_current ? "dtype" : "torch_dtype";
  const auto name = fields.find_text(field);
  fields.get("torch_dtype");
  if (!name) return;
  if (*name == "float32") {
    config.dtype = DType::f32;
  } else if (*name == "float16") {
    config.dtype = DType::f16;
  } else if (*name == "bfloat16") {
    config.dtype = DType::bf16;
  } else {
    fields.fail(field, "float32, float16 or bfloat16", "\"" + *name + "\"");
  }
}

/// The kinds of attention that a file gives its layers; true: some have a sliding window.
bool read_layer_types(Fields& fields, const json& types, bool has_window,
                      const ModelConfig& config) {
  if (!types.is_array() || types.size() != static_cast<std::size_t>(config.num_hidden_layers)) {
    fields.fail("layer_types", fmt::format("an array of {} names", config.num_hidden_layers),
                text_of(types));
  }
  bool slides = false;
  for (const json& type : types) {
    if (type == "full_attention") continue;
    if (!has_window || type != "sliding_attention") {
      fields.fail("layer_types", "only \"full_attention\"", text_of(type));
    }
    slides = true;
  }
  return slides;
}

/// The window that some layer has, or 0, as transformers' classes find it.
std::int64_t read_sliding_window(Fields& fields, const ModelConfig& config) {
  constexpr std::int64_t class_default = 4096;
  constexpr std::int64_t default_max_window_layers = 28;
  const json* const types = fields.get("layer_types");
  const auto window_or_default = [&] {
    const auto window = fields.find_size("sliding_window", max_size);
    return fields.has_key("sliding_window") ? window.value_or(0) : class_default;
  };
  if (config.architecture == "MistralForCausalLM") {
    const std::int64_t window = window_or_default();
    if (types != nullptr) read_layer_types(fields, *types, window > 0, config);
    return window;
  }
  const bool is_qwen =
      config.architecture == "Qwen2ForCausalLM" || config.architecture == "Qwen3ForCausalLM";
  // Llama has no such field; there a stray sliding_window stays among the unknown ones.
  if (is_qwen) fields.get("sliding_window");
  const std::int64_t window =
      is_qwen && fields.flag("use_sliding_window", false) ? window_or_default() : 0;
  if (types != nullptr) {
    return read_layer_types(fields, *types, window > 0, config) ? window : 0;
  }
  if (window == 0) return 0;
  const auto first =
      static_cast<std::int64_t>(fields.find_number("max_window_layers", 0, max_size)
                                    .value_or(static_cast<double>(default_max_window_layers)));
  return first < config.num_hidden_layers ? window : 0;
}

/// Features of related architectures. Where a file sets one, the weights expect it.
void refuse_unsupported(Fields& fields) {
  fields.require("hidden_act", "silu");
  for (const char* field : {"hidden_activation", "activation_function"}) {
    fields.require(field, "silu");
  }
  for (const char* field :
       {"partial_rotary_factor", "embedding_multiplier", "logits_scaling", "residual_multiplier",
        "attention_multiplier", "logit_scale", "scale_emb"}) {
    fields.require(field, 1);
  }
  for (const char* field : {"num_experts", "num_local_experts", "n_routed_experts"}) {
    fields.require(field, 0);
  }
  for (const char* field : {"quantization_config", "compression_config", "attn_logit_softcapping",
                            "final_logit_softcapping", "query_pre_attn_scalar"}) {
    fields.require_none(field);
  }
  for (const char* field : {"is_encoder_decoder", "add_cross_attention", "use_qk_norm",
                            "qk_layernorm", "parallel_attn"}) {
    fields.require(field, false);
  }
}

/// Fields that name, document or train a model, or tell other programs how to run it.
const std::set<std::string_view>& harmless_fields() {
  static const std::set<std::string_view> fields = {
      "_attn_implementation",
      "_attn_implementation_autoset",
      "_commit_hash",
      "_name_or_path",
      "attention_dropout",
      "attn_implementation",
      "bad_words_ids",
      "begin_suppress_tokens",
      "bos_token_id",
      "chunk_size_feed_forward",
      "classifier_dropout",
      "cross_attention_hidden_size",
      "decoder_start_token_id",
      "diversity_penalty",
      "do_sample",
      "early_stopping",
      "encoder_no_repeat_ngram_size",
      "eos_token_id",
      "exponential_decay_length_penalty",
      "finetuning_task",
      "forced_bos_token_id",
      "forced_eos_token_id",
      "id2label",
      "initializer_range",
      "is_decoder",
      "label2id",
      "length_penalty",
      "max_length",
      "max_window_layers",
      "min_length",
      "no_repeat_ngram_size",
      "num_beam_groups",
      "num_beams",
      "num_return_sequences",
      "output_attentions",
      "output_hidden_states",
      "output_scores",
      "pad_token_id",
      "prefix",
      "pretraining_tp",
      "problem_type",
      "pruned_heads",
      "remove_invalid_values",
      "repetition_penalty",
      "return_dict",
      "return_dict_in_generate",
      "sep_token_id",
      "suppress_tokens",
      "task_specific_params",
      "temperature",
      "tf_legacy_loss",
      "tie_encoder_decoder",
      "tokenizer_class",
      "top_k",
      "top_p",
      "torchscript",
      "transformers_version",
      "transformers.js_config",
      "typical_p",
      "unsloth_fixed",
      "unsloth_version",
      "use_bfloat16",
      "use_cache",
  };
  return fields;
}

TokenId token_of(const Fields& fields, const char* field, const json& id, std::int64_t vocab_size) {
  if (!id.is_number_unsigned() ||
      id.get<std::uint64_t>() >= static_cast<std::uint64_t>(vocab_size)) {
    fields.fail(field, fmt::format("a whole number from 0 to {}", vocab_size - 1), text_of(id));
  }
  return id.get<TokenId>();
}

/// Appends the ids of `fields`' eos_token_id; false if it has none.
bool read_stop_ids(Fields& fields, std::int64_t vocab_size, std::vector<TokenId>& ids) {
  const json* const value = fields.get("eos_token_id");
  if (value == nullptr) return false;
  const auto append = [&](const json& id) {
    const TokenId token = token_of(fields, "eos_token_id", id, vocab_size);
    if (std::find(ids.begin(), ids.end(), token) == ids.end()) ids.push_back(token);
  };
  if (value->is_array()) {
    for (const json& id : *value) append(id);
  } else {
    append(*value);
  }
  return true;
}

std::vector<TokenId> read_tokens(const Fields& fields, const char* field, const json& value,
                                 std::int64_t vocab_size) {
  if (!value.is_array()) fields.fail(field, "an array of token ids", text_of(value));
  std::vector<TokenId> tokens;
  for (const json& id : value) tokens.push_back(token_of(fields, field, id, vocab_size));
  return tokens;
}

std::vector<std::vector<TokenId>> read_bad_words(Fields& fields, std::int64_t vocab_size) {
  constexpr const char* field = "bad_words_ids";
  const json* const value = fields.get(field);
  std::vector<std::vector<TokenId>> words;
  if (value == nullptr) return words;
  if (!value->is_array()) fields.fail(field, "an array of arrays of token ids", text_of(*value));
  for (const json& word : *value) {
    words.push_back(read_tokens(fields, field, word, vocab_size));
    if (words.back().empty()) fields.fail(field, "words of one token or more", "[]");
  }
  return words;
}

/// What transformers' generate would follow, in a greedy answer, and nothing here does.
void refuse_generation_fields(Fields& fields) {
  const auto expect = [&](const char* field, const char* expected, auto is_neutral) {
    const json* const value = fields.get(field);
    if (value == nullptr || is_neutral(*value)) return;
    fields.fail(field, fmt::format("{} (not supported; --greedy-plain ignores it)", expected),
                text_of(*value));
  };
  for (const char* field : {"no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length",
                            "min_new_tokens", "penalty_alpha"}) {
    expect(field, "0", [](const json& value) { return value == 0; });
  }
  for (const char* field :
       {"num_beams", "num_beam_groups", "encoder_repetition_penalty", "guidance_scale"}) {
    expect(field, "1", [](const json& value) { return value == 1; });
  }
  for (const char* field : {"begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
                            "sequence_bias", "exponential_decay_length_penalty", "force_words_ids",
                            "constraints", "stop_strings", "watermarking_config", "dola_layers"}) {
    expect(field, "none", [](const json& value) { return value.is_array() && value.empty(); });
  }
  for (const char* field : {"token_healing", "force_bos_token_to_be_generated"}) {
    expect(field, "false", [](const json& value) { return value == false; });
  }
}

/// Fields of generation_config.json that sample, bound lengths, name tokens, or say how generate
/// computes and what it returns.
const std::set<std::string_view>& harmless_generation_fields() {
  static const std::set<std::string_view> fields = {
      "_commit_hash",
      "_from_model_config",
      "_name_or_path",
      "assistant_confidence_threshold",
      "assistant_early_exit",
      "assistant_lookbehind",
      "bos_token_id",
      "cache_config",
      "cache_implementation",
      "chat_format",
      "compile_config",
      "decoder_start_token_id",
      "disable_compile",
      "diversity_penalty",
      "do_sample",
      "early_stopping",
      "epsilon_cutoff",
      "eta_cutoff",
      "is_assistant",
      "length_penalty",
      "low_memory",
      "max_length",
      "max_matching_ngram_size",
      "max_new_tokens",
      "max_time",
      "max_window_size",
      "min_p",
      "num_assistant_tokens",
      "num_assistant_tokens_schedule",
      "num_return_sequences",
      "output_attentions",
      "output_hidden_states",
      "output_logits",
      "output_scores",
      "pad_token_id",
      "prefill_chunk_size",
      "prompt_lookup_num_tokens",
      "remove_invalid_values",
      "renormalize_logits",
      "return_dict_in_generate",
      "target_lookbehind",
      "temperature",
      "top_h",
      "top_k",
      "top_p",
      "transformers_version",
      "trust_remote_code",
      "typical_p",
      "use_cache",
  };
  return fields;
}

}  // namespace

ModelConfig ModelConfig::load(const fs::path& folder) {
  detail::check_folder(folder, "a model's folder: config.json, *.safetensors, tokenizer.json");
  const fs::path file = folder / "config.json";
  const json object = detail::read_json_object(file);
  Fields fields(object, file.string());

  ModelConfig config{};
  const Architecture& architecture = read_architecture(fields);
  config.architecture = architecture.name;
  read_sizes(fields, architecture, config);
  config.rms_norm_eps = fields.find_positive("rms_norm_eps").value_or(1e-6);
  fields.find_number("rms_norm_eps", smallest_float, largest_float);
  read_rope(fields, config);
  read_dtype(fields, config);
  config.tie_word_embeddings = fields.flag("tie_word_embeddings", false);
  config.qk_norm = architecture.qk_norm;
  const bool attention_bias =
      read_bias(fields, "attention_bias",
                architecture.has_attention_bias_field || architecture.always_qkv_bias, config);
  config.qkv_bias = attention_bias || architecture.always_qkv_bias;
  config.o_bias = attention_bias && architecture.has_attention_bias_field;
  config.mlp_bias = read_bias(fields, "mlp_bias", architecture.has_mlp_bias_field, config);
  config.sliding_window = read_sliding_window(fields, config);
  refuse_unsupported(fields);
  fields.warn_unknown(harmless_fields(), config.warnings);
  return config;
}

std::vector<TokenId> load_stop_ids(const fs::path& folder, std::int64_t vocab_size) {
  if (vocab_size < 1 || vocab_size > max_size) {
    throw Error(
        fmt::format("load_stop_ids: vocab_size: expected a whole number from 1 to {}, found {}",
                    max_size, vocab_size));
  }
  std::vector<TokenId> ids;
  for (const char* name : {"generation_config.json", "config.json"}) {
    const fs::path file = folder / name;
    std::error_code status;
    if (!fs::exists(file, status)) continue;
    const json object = detail::read_json_object(file);
    Fields fields(object, file.string());
    if (read_stop_ids(fields, vocab_size, ids)) break;
  }
  return ids;
}

GenerationConfig GenerationConfig::load(const fs::path& folder, std::int64_t vocab_size) {
  constexpr double largest_penalty = 1e6;  // as Sampler has it
  GenerationConfig config;
  config.stop_ids = load_stop_ids(folder, vocab_size);
  std::error_code status;
  const bool has_own_file = fs::exists(folder / "generation_config.json", status);
  const fs::path file = folder / (has_own_file ? "generation_config.json" : "config.json");
  if (!fs::exists(file, status)) return config;
  config.file = file.string();
  const json object = detail::read_json_object(file);
  Fields fields(object, config.file);
  fields.get("eos_token_id");
  config.repetition_penalty =
      fields.find_number("repetition_penalty", 1 / largest_penalty, largest_penalty).value_or(1);
  if (const json* const tokens = fields.get("suppress_tokens")) {
    config.suppress_tokens = read_tokens(fields, "suppress_tokens", *tokens, vocab_size);
  }
  config.bad_words = read_bad_words(fields, vocab_size);
  const auto is_stop = [&](const std::vector<TokenId>& word) {
    const auto& stops = config.stop_ids;
    return word.size() == 1 && std::find(stops.begin(), stops.end(), word.front()) != stops.end();
  };
  auto& words = config.bad_words;
  words.erase(std::remove_if(words.begin(), words.end(), is_stop), words.end());
  refuse_generation_fields(fields);
  // The others of config.json are ModelConfig's.
  if (has_own_file) fields.warn_unknown(harmless_generation_fields(), config.warnings);
  return config;
}

}  // namespace kvzap
