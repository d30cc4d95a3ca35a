#include "base/json_file.hpp"
#include "gguf/model_file.hpp"
#include "model/config_fields.hpp"
#include "model/model_folder.hpp"
#include "model/quantised_config.hpp"
#include "model/rope_config.hpp"
#include "model/supported_names.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <kvzap/model/model_config.hpp>
#include <set>
#include <string_view>
#include <utility>

namespace kvzap {

namespace fs = std::filesystem;
using base::described;
using model::ConfigFields;
using model::max_size;
using nlohmann::json;

namespace {

constexpr std::int64_t max_count = 65536;
// The range in which single precision computes, with room for a product.
constexpr double smallest_float = 1e-30;
constexpr double largest_float = 1e30;

/// The differences between the supported architectures.
struct Architecture {
  std::string_view name;
  std::string_view model_type;
  bool qk_norm;
  bool always_qkv_bias;
  bool has_attention_bias_field;
  bool has_mlp_bias_field;
  /// Meaning of an absent field in transformers; 0: derived from the other sizes, as for null.
  std::int64_t default_key_value_heads;
  std::int64_t default_head_dim;
};

constexpr std::array<Architecture, 4> architectures = {{
    {"Qwen3ForCausalLM", "qwen3", true, false, true, false, 32, 128},
    {"Qwen2ForCausalLM", "qwen2", false, true, false, false, 32, 0},
    {"LlamaForCausalLM", "llama", false, false, true, true, 0, 0},
    {"MistralForCausalLM", "mistral", false, false, false, false, 8, 0},
}};

const Architecture& read_architecture(ConfigFields& fields) {
  std::vector<std::string_view> names;
  for (const Architecture& known : architectures) names.push_back(known.name);
  const std::string expected = base::alternatives(names);
  const json* const value = fields.get("architectures");
  if (value == nullptr) fields.fail("architectures", expected, "none");
  if (!value->is_array() || value->size() != 1 || !value->front().is_string()) {
    fields.fail("architectures", expected, described(*value));
  }
  const auto& name = value->front().get_ref<const std::string&>();
  const auto found = std::find_if(architectures.begin(), architectures.end(),
                                  [&](const Architecture& known) { return known.name == name; });
  if (found == architectures.end()) fields.fail("architectures", expected, described(*value));
  fields.require("model_type", std::string(found->model_type));
  return *found;
}

void read_sizes(ConfigFields& fields, const Architecture& architecture, ModelConfig& config) {
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

/// transformers ignores a bias field that its class does not have. A file that sets one was
/// probably written for other code, so it gets a warning.
bool read_bias(ConfigFields& fields, const std::string& field, bool is_supported,
               ModelConfig& config) {
  const bool value = fields.flag(field, false);
  if (value && !is_supported) {
    config.warnings.push_back(fmt::format("{}: {}: {} has no such field, true is ignored",
                                          fields.file(), field, config.architecture));
  }
  return value && is_supported;
}

void read_dtype(ConfigFields& fields, ModelConfig& config) {
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
    fields.fail(field, "float32, float16 or bfloat16", base::in_quotes(*name));
  }
}

/// Kinds of attention of a file's layers; true: with a sliding window.
bool read_layer_types(ConfigFields& fields, const json& types, bool has_window,
                      const ModelConfig& config) {
  if (!types.is_array() || types.size() != static_cast<std::size_t>(config.num_hidden_layers)) {
    fields.fail("layer_types", fmt::format("an array of {} names", config.num_hidden_layers),
                described(types));
  }
  bool slides = false;
  for (const json& type : types) {
    if (type == "full_attention") continue;
    if (!has_window || type != "sliding_attention") {
      fields.fail("layer_types", "only \"full_attention\"", described(type));
    }
    slides = true;
  }
  return slides;
}

/// Returns the window of the layers that have one, or 0, by the rules of transformers' classes.
std::int64_t read_sliding_window(ConfigFields& fields, const ModelConfig& config) {
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
  // Llama has no such field; a stray sliding_window there stays among the unknown fields.
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

/// Features of related architectures. If a file sets one, its weights depend on it.
void refuse_unsupported(ConfigFields& fields) {
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
  for (const char* field : {"compression_config", "attn_logit_softcapping",
                            "final_logit_softcapping", "query_pre_attn_scalar"}) {
    fields.require_none(field);
  }
  for (const char* field : {"is_encoder_decoder", "add_cross_attention", "use_qk_norm",
                            "qk_layernorm", "parallel_attn", "rope_interleaved"}) {
    fields.require(field, false);
  }
}

/// ConfigFields that name, document or train a model, or configure other programs.
const std::set<std::string_view>& harmless_fields() {
  static const std::set<std::string_view> fields = {
      "_attn_implementation",
      "_attn_implementation_autoset",
      "_commit_hash",
      "_model_name_or_path",
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
      "is_llama_config",
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
      "unk_token_id",
      "use_bfloat16",
      "use_cache",
  };
  return fields;
}

}  // namespace

std::vector<model::ArchitectureName> model::architecture_names() {
  std::vector<ArchitectureName> names;
  for (const Architecture& known : architectures) names.push_back({known.name, known.model_type});
  return names;
}

ModelConfig ModelConfig::load(const fs::path& model) {
  kvzap::model::check_model(model);
  const auto file = gguf::read_model_object(model, "config.json");
  if (!file) throw Error(gguf::name_of_model_file(model, "config.json") + ": no such file");
  ConfigFields fields(file->content, file->where);

  ModelConfig config{};
  const Architecture& architecture = read_architecture(fields);
  config.architecture = architecture.name;
  read_sizes(fields, architecture, config);
  config.rms_norm_eps = fields.find_positive("rms_norm_eps").value_or(1e-6);
  fields.find_number("rms_norm_eps", smallest_float, largest_float);
  kvzap::model::read_rope(fields, config);
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
  model::read_quantised_config(fields, config.warnings);  // open_weights reads it again
  fields.warn_unknown(harmless_fields(), config.warnings);
  return config;
}

}  // namespace kvzap
