#include "commands/files/inspect_model.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>
#include <kvzap/engine/thresholds.hpp>
#include <kvzap/model/chat_template.hpp>
#include <kvzap/model/memory_plan.hpp>
#include <kvzap/model/safetensors.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <vector>

#include "commands/run/report.hpp"
#include "commands/run/run_plan.hpp"
#include "commands/support/model_loading.hpp"
#include "commands/support/setup.hpp"
#include "files/counted.hpp"
#include "files/json_file.hpp"
#include "files/quote.hpp"
#include "gguf/gguf_file.hpp"
#include "gguf/model_file.hpp"
#include "model/find_model.hpp"
#include "options/options.hpp"

namespace kvzap::driver {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

/// The tensors of one type.
struct TypeCount {
  std::int64_t tensors = 0;
  std::int64_t values = 0;
  std::int64_t bytes = 0;
};
using Types = std::map<std::string, TypeCount>;

void add(Types& types, const std::string& type, const std::vector<std::int64_t>& shape,
         std::size_t bytes) {
  TypeCount& count = types[type];
  std::int64_t values = 1;
  for (const std::int64_t extent : shape) values *= extent;
  ++count.tensors;
  count.values += values;
  count.bytes += static_cast<std::int64_t>(bytes);
}

Types types_of(const std::string& model) {
  Types types;
  if (gguf::is_gguf(model)) {
    const auto file = gguf::GgufFile::open(model);
    for (const auto& [name, tensor] : file.tensors()) {
      add(types, gguf::type_name(tensor), tensor.shape, tensor.bytes);
    }
  } else if (!session::weight_files(model).empty()) {
    const auto files = SafetensorsFolder::open(model);
    for (const std::string& name : files.names()) {
      const TensorInfo& tensor = *files.find(name);
      add(types, tensor.stored_dtype, tensor.shape, tensor.bytes);
    }
  }
  return types;
}

/// Returns the error that `work` throws, or "".
template <class Work>
std::string error_of(const Work& work) {
  try {
    work();
    return "";
  } catch (const Error& error) {
    return files::shown_message(error.what());
  }
}

/// What a config alone says of a context's memory.
class Contexts {
 public:
  Contexts(const std::string& model, const ModelConfig& config) : m_config(config) {
    m_options.model = model;
    m_weights = quantised_bytes(m_options, config, 1);
  }

  /// Bytes of keys and values that each further token takes, in layers that see all tokens.
  std::int64_t bytes_per_token(const std::string& kv_type) const {
    constexpr std::int64_t many = 1 << 20;
    const auto stored = [&](std::int64_t tokens) { return plan(tokens, 0, kv_type).kv_unpruned; };
    return (stored(2 * many) - stored(many)) / many;
  }

  /// The longest context, up to the model's, that needs at most `available` bytes on one rank.
  std::int64_t longest(std::int64_t available, double evict_ratio) const {
    std::int64_t fits = 0, fails = m_config.longest_context() + 1;
    while (fails - fits > 1) {
      const std::int64_t tokens = fits + (fails - fits) / 2;
      const auto needed = needed_bytes(plan(tokens, evict_ratio, ""), false);
      (needed <= available ? fits : fails) = tokens;
    }
    return fits;
  }

 private:
  MemoryPlan plan(std::int64_t tokens, double evict_ratio, const std::string& kv_type) const {
    return plan_memory(m_config, {dtype_from_name(m_options.dtype), tokens, evict_ratio, 1,
                                  evict_ratio > 0 ? m_options.pruning.window : 0, 0, m_weights,
                                  page_format(kv_type, m_options.dtype)});
  }

  const ModelConfig& m_config;
  EngineOptions m_options;
  std::vector<std::int64_t> m_weights;
};

constexpr double usual_ratio = 0.75;

ordered_json config_json(const std::string& model, const ModelConfig& config) {
  ordered_json json = {
      {"layers", config.num_hidden_layers},        {"kv_heads", config.num_key_value_heads},
      {"query_heads", config.num_attention_heads}, {"head_dim", config.head_dim},
      {"hidden_size", config.hidden_size},         {"vocab_size", config.vocab_size},
      {"context_tokens", config.longest_context()}};
  if (config.experts) json["experts"] = config.experts->count;
  const Contexts contexts(model, config);
  ordered_json& bytes = json["kv_bytes_per_token"];
  bytes["bf16"] = contexts.bytes_per_token("");
  for (const char* type : {"q8", "q8,q4", "q4", "q3", "q2"}) {
    // Some head sizes cannot be quantised.
    const std::string error = error_of([&] { bytes[type] = contexts.bytes_per_token(type); });
    if (!error.empty()) bytes[type] = nullptr;
  }
  const std::int64_t available = available_bytes_of_node();
  ordered_json& machine = json["machine"];
  machine["available_bytes"] = available < 0 ? ordered_json() : ordered_json(available);
  if (available < 0) return json;
  machine["context_tokens"] = contexts.longest(available, 0);
  machine["evict_ratio"] = usual_ratio;
  machine["context_tokens_pruned"] = contexts.longest(available, usual_ratio);
  return json;
}

ordered_json types_json(const Types& types) {
  ordered_json list = ordered_json::array();
  for (const auto& [name, count] : types) {
    list.push_back({{"type", name},
                    {"tensors", count.tensors},
                    {"values", count.values},
                    {"bytes", count.bytes}});
  }
  return list;
}

ordered_json model_json(const std::string& model, const std::string& version) {
  ordered_json json = {{"format", "kvzap.model"},
                       {"format_version", 1},
                       {"version", version},
                       {"model", model},
                       {"file_format", gguf::is_gguf(model) ? "GGUF" : "safetensors"}};
  std::optional<ModelConfig> config;
  const std::string why = error_of([&] { config = ModelConfig::load(model); });
  if (config) {
    json["architecture"] = config->architecture;
    json.update(config_json(model, *config));
  } else {
    json["error"] = why;
    if (gguf::is_gguf(model)) {
      const auto file = gguf::GgufFile::open(model);
      const auto name = file.metadata().find_string("general.architecture");
      if (name) json["architecture"] = files::shown(*name);
    }
  }
  json["tensors"] = types_json(types_of(model));
  ordered_json& tokenizer = json["tokenizer"];
  const std::string no_tokenizer =
      error_of([&] { tokenizer["tokens"] = Tokenizer::load(model).vocabulary_size(); });
  if (!no_tokenizer.empty()) tokenizer["error"] = no_tokenizer;
  ordered_json& chat = json["chat_template"];
  const std::string no_template = error_of([&] {
    ChatTemplate::detect(model);
    chat["supported"] = true;
  });
  if (!no_template.empty()) chat = {{"supported", false}, {"error", no_template}};
  return json;
}

std::string fits_text(const ordered_json& json, const char* key) {
  const auto tokens = json["machine"][key].get<std::int64_t>();
  const auto most = json["context_tokens"].get<std::int64_t>();
  if (tokens == 0) return "not even one token";
  return fmt::format("{} tokens{}", tokens, tokens == most ? " (the model's longest)" : "");
}

std::string config_text(const ordered_json& json) {
  const auto number = [&](const char* key) { return json[key].get<std::int64_t>(); };
  std::string text =
      fmt::format("layers         {}, {} KV heads and {} query heads of {} values{}\n",
                  number("layers"), number("kv_heads"), number("query_heads"), number("head_dim"),
                  json.contains("experts") ? fmt::format(", {} experts", number("experts")) : "");
  text += fmt::format("context        {} tokens\n", number("context_tokens"));
  text += "KV a token     ";
  const char* comma = "";
  for (const auto& [type, bytes] : json["kv_bytes_per_token"].items()) {
    if (bytes.is_null()) continue;
    text += fmt::format("{}{} in {}", comma, human_bytes(bytes.get<std::int64_t>()), type);
    comma = ", ";
  }
  const ordered_json& machine = json["machine"];
  if (machine["available_bytes"].is_null()) return text + "\n";
  return text +
         fmt::format(
             "\nthis machine   {} are free: {} with the full cache, {} with {:.0f} % evicted\n",
             human_bytes(machine["available_bytes"].get<std::int64_t>()),
             fits_text(json, "context_tokens"), fits_text(json, "context_tokens_pruned"),
             100 * usual_ratio);
}

std::string weights_text(const ordered_json& json) {
  std::int64_t values = 0, bytes = 0;
  for (const auto& type : json["tensors"]) {
    values += type["values"].get<std::int64_t>();
    bytes += type["bytes"].get<std::int64_t>();
  }
  std::string text =
      values == 0 ? std::string("weights        none\n")
                  : fmt::format("weights        {} parameters, {}\n", values, human_bytes(bytes));
  for (const auto& type : json["tensors"]) {
    const auto size = type["bytes"].get<std::int64_t>();
    const std::string name = files::shown(type["type"].get<std::string>());
    const std::string tensors = files::counted(type["tensors"].get<std::int64_t>(), "tensor");
    text += fmt::format("               {:<9} {:>13}  {:>9}\n", name, tensors,
                        size == 0 ? "unknown" : human_bytes(size));
  }
  return text;
}

std::string model_text(const ordered_json& json) {
  std::string text = fmt::format(
      "{}: {}, {}\n", files::shown(json["model"].get<std::string>(), 400),
      json.value("architecture", "unknown architecture"), json["file_format"].get<std::string>());
  if (json.contains("layers")) text += config_text(json);
  text += weights_text(json);
  const ordered_json& tokenizer = json["tokenizer"];
  text += "tokenizer      " +
          (tokenizer.contains("error")
               ? tokenizer["error"].get<std::string>()
               : fmt::format("{} tokens", tokenizer["tokens"].get<std::int64_t>())) +
          "\n";
  const ordered_json& chat = json["chat_template"];
  text += "chat template  " +
          (chat.contains("error") ? chat["error"].get<std::string>() : std::string("yes")) + "\n";
  if (json.contains("error")) {
    text += "kvzap cannot run this model: " + json["error"].get<std::string>() + "\n";
  }
  return text;
}

ordered_json surrogate_json(const std::string& folder, const std::string& version) {
  const fs::path path = folder;
  const auto config = files::read_json_object(path / "config.json");
  const auto field = [&](const char* name) {
    const auto found = config.find(name);
    return found != config.end() && found->is_number_integer()
               ? ordered_json(found->get<std::int64_t>())
               : ordered_json();
  };
  ordered_json json = {{"format", "kvzap.surrogate"},
                       {"format_version", 1},
                       {"version", version},
                       {"surrogate", folder},
                       {"layers", field("n_modules")},
                       {"kv_heads", field("output_dim")},
                       {"hidden_size", field("input_dim")},
                       {"hidden_units", field("hidden_dim")}};
  json["tensors"] = types_json(types_of(folder));
  json["windows"] = ordered_json::array();
  json["evict_ratios"] = ordered_json::array();
  json["recommended_threshold"] = nullptr;
  json["recommended_window"] = nullptr;
  std::error_code ignored;
  if (!fs::exists(ThresholdTable::file_in(path), ignored)) return json;
  const ThresholdTable table = ThresholdTable::load(ThresholdTable::file_in(path));
  std::set<double> ratios;
  for (const auto& window : table.windows) {
    json["windows"].push_back(window.window);
    for (const auto& row : window.rows) ratios.insert(row.evict_ratio);
  }
  json["evict_ratios"] = ratios;
  if (!table.recommended) return json;
  json["recommended_threshold"] = table.recommended->threshold;
  json["recommended_window"] = table.recommended->window;
  return json;
}

std::string surrogate_text(const ordered_json& json) {
  const auto number = [&](const char* name) {
    return json[name].is_null() ? "?" : json[name].dump();
  };
  const ordered_json &units = json["hidden_units"], &ratios = json["evict_ratios"];
  const ordered_json& recommended = json["recommended_threshold"];
  const std::string kind =
      units.is_null() ? "linear" : "MLP of " + files::counted(units.get<std::int64_t>(), "unit");
  std::string text = fmt::format("{}: KVzap surrogate, for --surrogate\n",
                                 files::shown(json["surrogate"].get<std::string>(), 400));
  text += fmt::format("layers         {}, {} KV heads, hidden size {}, {}\n", number("layers"),
                      number("kv_heads"), number("hidden_size"), kind);
  text += weights_text(json) + "thresholds     ";
  text += ratios.empty() ? std::string("none; kvzap calibrate stores some")
                         : fmt::format("{}, from {:.2f} to {:.2f}",
                                       files::counted(ratios.size(), "evict ratio"),
                                       ratios.front().get<double>(), ratios.back().get<double>());
  if (!ratios.empty()) {
    text += fmt::format(", for windows of {}",
                        fmt::join(json["windows"].get<std::vector<int>>(), ", "));
  }
  if (!recommended.is_null()) {
    text += fmt::format("; --threshold auto is {:.3f}, --window auto {}", recommended.get<double>(),
                        json["recommended_window"].get<int>());
  }
  return text + "\n";
}

}  // namespace

bool is_model(const std::string& file) {
  std::error_code ignored;
  return gguf::is_gguf(file) || fs::exists(fs::path(file) / "config.json", ignored) ||
         !model::gguf_files(file).empty();
}

void inspect_model(const std::string& file, bool as_json, const std::string& version) {
  std::error_code ignored;
  if (!gguf::is_gguf(file) && !fs::exists(fs::path(file) / "config.json", ignored)) {
    ModelConfig::load(file);  // throws the error of a folder without a model
  }
  const bool is_surrogate = model::is_surrogate(file);
  const ordered_json json =
      is_surrogate ? surrogate_json(file, version) : model_json(file, version);
  write_whole("-", as_json        ? files::json_lines(json)
                   : is_surrogate ? surrogate_text(json)
                                  : model_text(json));
}

}  // namespace kvzap::driver
