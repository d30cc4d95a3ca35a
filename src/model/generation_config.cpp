// generation_config.json: the stop tokens and sampling rules of a model.
#include <fmt/format.h>

#include <algorithm>
#include <kvzap/model/model_config.hpp>
#include <set>
#include <string_view>

#include "files/json_file.hpp"
#include "gguf/model_file.hpp"
#include "model/config_fields.hpp"
#include "model/gguf_metadata.hpp"

namespace kvzap {

namespace fs = std::filesystem;
using files::described;
using model::ConfigFields;
using model::max_size;
using nlohmann::json;

namespace {

TokenId token_of(const ConfigFields& fields, const char* field, const json& id,
                 std::int64_t vocab_size) {
  if (!id.is_number_unsigned() ||
      id.get<std::uint64_t>() >= static_cast<std::uint64_t>(vocab_size)) {
    fields.fail(field, fmt::format("a whole number from 0 to {}", vocab_size - 1), described(id));
  }
  return id.get<TokenId>();
}

/// Appends the ids of eos_token_id in `fields`. Returns false if it has none.
bool read_stop_ids(ConfigFields& fields, std::int64_t vocab_size, std::vector<TokenId>& ids) {
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

std::vector<TokenId> read_tokens(const ConfigFields& fields, const char* field, const json& value,
                                 std::int64_t vocab_size) {
  if (!value.is_array()) fields.fail(field, "an array of token ids", described(value));
  std::vector<TokenId> tokens;
  for (const json& id : value) tokens.push_back(token_of(fields, field, id, vocab_size));
  return tokens;
}

std::vector<std::vector<TokenId>> read_bad_words(ConfigFields& fields, std::int64_t vocab_size) {
  constexpr const char* field = "bad_words_ids";
  const json* const value = fields.get(field);
  std::vector<std::vector<TokenId>> words;
  if (value == nullptr) return words;
  if (!value->is_array()) fields.fail(field, "an array of arrays of token ids", described(*value));
  for (const json& word : *value) {
    words.push_back(read_tokens(fields, field, word, vocab_size));
    if (words.back().empty()) fields.fail(field, "words of one token or more", "[]");
  }
  return words;
}

/// Fields that transformers' generate follows in a greedy answer and kvzap does not.
void refuse_generation_fields(ConfigFields& fields) {
  const auto expect = [&](const char* field, const char* expected, auto is_neutral) {
    const json* const value = fields.get(field);
    if (value == nullptr || is_neutral(*value)) return;
    fields.fail(field, fmt::format("{} (not supported)", expected), described(*value));
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

/// ConfigFields of generation_config.json that set sampling, bounds of lengths, names of tokens, or
/// how generate computes and returns its result.
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

std::vector<TokenId> load_stop_ids(const fs::path& folder, std::int64_t vocab_size) {
  if (vocab_size < 1 || vocab_size > max_size) {
    throw Error(
        fmt::format("load_stop_ids: vocab_size: expected a whole number from 1 to {}, found {}",
                    max_size, vocab_size));
  }
  std::vector<TokenId> ids;
  for (const bool is_own : {true, false}) {
    const auto file = is_own ? gguf::read_model_object(folder, "generation_config.json")
                             : kvzap::model::read_config(folder);
    if (!file) continue;
    ConfigFields fields(file->content, file->where);
    if (read_stop_ids(fields, vocab_size, ids)) break;
  }
  return ids;
}

GenerationConfig GenerationConfig::load(const fs::path& folder, std::int64_t vocab_size) {
  constexpr double largest_penalty = 1e6;  // the bound of Sampler
  GenerationConfig config;
  config.stop_ids = load_stop_ids(folder, vocab_size);
  auto file = gguf::read_model_object(folder, "generation_config.json");
  const bool has_own_file = file.has_value();
  if (!file) file = kvzap::model::read_config(folder);
  if (!file) return config;
  config.file = file->where;
  ConfigFields fields(file->content, config.file);
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
  // ModelConfig reads the other fields of config.json.
  if (has_own_file) fields.warn_unknown(harmless_generation_fields(), config.warnings);
  return config;
}

}  // namespace kvzap
