#include "files/json_file.hpp"
#include "model/config_fields.hpp"
#include "model/families/family.hpp"
#include "model/gguf_metadata.hpp"
#include "model/model_folder.hpp"
#include "model/own_head.hpp"
#include "model/quantised_config.hpp"
#include "model/rope_config.hpp"
#include "model/text_model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <kvzap/model/model_config.hpp>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

namespace kvzap {

namespace fs = std::filesystem;
using files::described;
using model::ConfigFields;
using model::Family;
using model::max_size;
using nlohmann::json;

namespace {

constexpr std::int64_t max_count = 65536;
// The range in which single precision computes, with room for a product.
constexpr double smallest_float = 1e-30;
constexpr double largest_float = 1e30;

void read_sizes(ConfigFields& fields, const Family& family, ModelConfig& config) {
  config.hidden_size = fields.size("hidden_size", max_size);
  config.intermediate_size = fields.size(family.width_field, max_size);
  config.num_hidden_layers = fields.size("num_hidden_layers", max_count);
  config.num_attention_heads = fields.size("num_attention_heads", max_count);
  config.vocab_size = fields.size("vocab_size", max_size);
  config.max_position_embeddings = fields.size("max_position_embeddings", max_size);

  const auto absent_or = [&](const char* field, std::int64_t class_default, std::int64_t derived) {
    return class_default != 0 && !fields.has_key(field) ? class_default : derived;
  };
  config.num_key_value_heads =
      fields.find_size("num_key_value_heads", max_count)
          .value_or(absent_or("num_key_value_heads", family.default_key_value_heads,
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
    config.head_dim = absent_or("head_dim", family.default_head_dim, 0);
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

/// Refuses sizes at which reading weights, which visits each row of q, k and v, takes hours.
void check_heads(const ConfigFields& fields, const ModelConfig& config) {
  constexpr std::int64_t most = std::int64_t{1} << 22;  // far above any published model
  for (std::int64_t l = 0; l < config.num_hidden_layers; ++l) {
    const std::int64_t heads = config.query_heads_of(l), dim = config.head_dim_of(l);
    if (heads <= most / dim) continue;
    fields.fail("num_attention_heads",
                fmt::format("heads of at most {} dimensions together in a layer", most),
                fmt::format("{} of {} in layer {}", heads, dim, l));
  }
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
    fields.fail(field, "float32, float16 or bfloat16", files::in_quotes(*name));
  }
}

/// Features of other families. If a file sets one, its weights depend on it.
void refuse_unsupported(ConfigFields& fields) {
  for (const char* field : {"hidden_act", "hidden_activation", "activation_function"}) {
    if (!fields.was_read(field)) fields.require(field, "silu");
  }
  for (const char* field : {"embedding_multiplier", "logits_scaling", "residual_multiplier",
                            "attention_multiplier", "logit_scale", "scale_emb"}) {
    if (!fields.was_read(field)) fields.require(field, 1);
  }
  for (const char* field : {"num_experts", "num_local_experts", "n_routed_experts"}) {
    if (!fields.was_read(field)) fields.require(field, 0);
  }
  for (const char* field : {"compression_config", "attn_logit_softcapping",
                            "final_logit_softcapping", "query_pre_attn_scalar"}) {
    if (!fields.was_read(field)) fields.require_none(field);
  }
  for (const char* field : {"is_encoder_decoder", "add_cross_attention", "use_qk_norm", "qk_norm",
                            "qk_layernorm", "parallel_attn", "rope_interleaved"}) {
    if (!fields.was_read(field)) fields.require(field, false);
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
      "cache_implementation",
      "chunk_size_feed_forward",
      "classifier_dropout",
      "cross_attention_hidden_size",
      "decoder_start_token_id",
      "diversity_penalty",
      "do_sample",
      "early_stopping",
      "embd_pdrop",
      "encoder_no_repeat_ngram_size",
      "eod_token_id",
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
      "output_router_logits",
      "output_scores",
      "pad_token_id",
      "prefix",
      "pretraining_tp",
      "problem_type",
      "pruned_heads",
      "remove_invalid_values",
      "repetition_penalty",
      "resid_pdrop",
      "return_dict",
      "return_dict_in_generate",
      "router_aux_loss_coef",
      "router_jitter_noise",
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

/// Reads config.json as that of a family. `fields` knows afterwards which it has read.
ModelConfig read_as(const Family& family, ConfigFields& fields) {
  ModelConfig config{};
  config.architecture = family.class_name;
  fields.get("architectures");
  fields.get("model_type");
  read_sizes(fields, family, config);
  const char* const eps = family.norm_eps_field;
  config.rms_norm_eps = fields.find_positive(eps).value_or(family.default_norm_eps);
  fields.find_number(eps, smallest_float, largest_float);
  kvzap::model::read_rope(fields, family.rope, config);
  read_dtype(fields, config);
  config.tie_word_embeddings = fields.flag("tie_word_embeddings", family.ties_by_default);
  config.layers.resize(static_cast<std::size_t>(config.num_hidden_layers));
  family.read(fields, config);
  check_heads(fields, config);
  refuse_unsupported(fields);
  model::read_quantised_config(fields, config.warnings);  // open_weights reads it again
  return config;
}

/// What a family makes of the config.json of an unknown class.
struct Reading {
  const Family* family = nullptr;
  std::string refusal;
  std::vector<std::string> unknown;  // fields that it does not have
  std::size_t alike = 0;             // first letters of both classes' names

  bool is_nearer_than(const Reading& other) const {
    constexpr std::size_t same_name = 4;  // "Qwen"
    const auto rank = [](const Reading& r) {
      return std::tuple(r.alike < same_name, !r.refusal.empty(), r.unknown.size(),
                        -static_cast<std::int64_t>(r.alike));
    };
    return rank(*this) < rank(other);
  }
  std::string text() const {
    if (!refusal.empty()) return "it refuses " + refusal;
    constexpr std::size_t shown = 10;
    std::string names;
    for (std::size_t i = 0; i < std::min(shown, unknown.size()); ++i) {
      names += fmt::format("{}{}", i == 0 ? "" : ", ", files::shown(unknown[i], 40));
    }
    if (unknown.size() > shown) names += fmt::format(" and {} more", unknown.size() - shown);
    return unknown.empty() ? "it has all fields of this file" : "it lacks the fields " + names;
  }
};

Reading nearest_family(const json& content, const std::string& file, std::string_view name) {
  Reading nearest;
  for (const Family* family : model::families()) {
    model::ConfigContent renamed{content, {}};
    if (family->rename != nullptr) family->rename(renamed);
    ConfigFields fields(renamed, file);
    Reading reading;
    reading.family = family;
    const auto size = std::min(name.size(), family->class_name.size());
    while (reading.alike < size && name[reading.alike] == family->class_name[reading.alike]) {
      ++reading.alike;
    }
    try {
      read_as(*family, fields);
    } catch (const Error& error) {
      reading.refusal = error.what();
      if (reading.refusal.rfind(file + ": ", 0) == 0) reading.refusal.erase(0, file.size() + 2);
    }
    reading.unknown = fields.unknown(harmless_fields());
    if (nearest.family == nullptr || reading.is_nearer_than(nearest)) nearest = std::move(reading);
  }
  return nearest;
}

/// Throws Error for a class that is none of families().
[[noreturn]] void refuse_family(const json& content, const std::string& file) {
  const ConfigFields fields(content, file);
  constexpr const char* field = "architectures";
  const std::string name = model::class_in(content);
  if (name.empty()) {
    fields.fail(field, "a list with the name of one class",
                content.contains(field) ? described(content.at(field)) : "none");
  }
  std::string found = described(content.at(field)), text_field;
  const json* const text = model::text_config_in(content, file, text_field);
  if (text != nullptr && text->contains("model_type")) {
    found += fmt::format(" whose {} has the model_type {}", text_field,
                         described(text->at("model_type")));
  }
  const std::string_view lacking = model::missing_parts(name);
  if (!lacking.empty()) found += fmt::format(", which needs {}", lacking);
  const Reading nearest = nearest_family(text == nullptr ? content : *text, file, name);
  files::throw_unexpected(fmt::format("{}: {}", file, field),
                          "a family that kvzap runs (kvzap models lists them)",
                          fmt::format("{}; the nearest family is {}: {}", found,
                                      nearest.family->class_name, nearest.text()));
}

}  // namespace

ModelConfig ModelConfig::load(const fs::path& model) {
  kvzap::model::check_model(model);
  const auto file = kvzap::model::read_config(model);
  if (!file) throw Error(gguf::name_of_model_file(model, "config.json") + ": no such file");
  std::vector<std::string> warnings;
  model::ConfigContent content{
      kvzap::model::description_of_text(file->content, file->where, warnings), {}};
  const auto type = content.find("model_type");
  const std::string type_name =
      type != content.end() && type->is_string() ? type->get<std::string>() : "";
  const Family* const family =
      kvzap::model::find_family(kvzap::model::class_in(content), type_name);
  if (family == nullptr) refuse_family(content, file->where);
  const auto& others = family->text_types;
  if (std::find(others.begin(), others.end(), type_name) == others.end()) {
    ConfigFields(content, file->where).require("model_type", std::string(family->model_type));
  }
  if (family->rename != nullptr) family->rename(content);
  ConfigFields fields(content, file->where);
  ModelConfig config = read_as(*family, fields);
  config.warnings.insert(config.warnings.begin(), warnings.begin(), warnings.end());
  fields.warn_unknown(harmless_fields(), config.warnings);
  const bool is_text_of_model = model::class_in(file->content) != model::class_in(content);
  if (is_text_of_model && !fields.has_key("tie_word_embeddings")) {
    model::tie_missing_head(model, config);
  }
  model::untie_own_head(model, config);
  return config;
}

}  // namespace kvzap
