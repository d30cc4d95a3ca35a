#include "commands/run/recorded_options.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "commands/support/model_loading.hpp"
#include "files/escaped_list.hpp"
#include "files/json_file.hpp"
#include "options/policy_options.hpp"

namespace kvzap::driver {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

/// Returns valid JSON text for any bytes in a file name or a question.
std::string dumped(const ordered_json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

ordered_json value_of(const CLI::Option& option, const std::string& text) {
  if (is_flag(option)) return text == "true";
  const std::string type = option.get_type_name().substr(0, option.get_type_name().find(':'));
  const bool is_number =
      type == "INT" || type == "UINT" || type == "FLOAT" || type == "SCORE" || type == "SEED";
  // Infinity stays a text, because JSON has no such number.
  if (is_number && json::accept(text)) return files::parse_own_json(text);
  return text;
}

/// Returns --prune in force. Its default depends on other options.
std::string prune_of(const RunOptions& options) {
  return std::string(kvzap::name_of(options.pruning.mode_in_force()));
}

/// Returns the absolute path of a file or folder, or the given path if it cannot be made absolute.
std::string absolute(const std::string& file) {
  std::error_code failed;
  const fs::path path = fs::absolute(file, failed).lexically_normal();
  return file.empty() || failed ? file : path.string();
}

/// Returns whether an argument of a policy is a file name, and not a standard word such as "none".
bool names_file(const PolicyParameter& parameter, const std::string& value) {
  return parameter.kind == PolicyParameter::Kind::file && !value.empty() &&
         value != parameter.standard;
}

/// Returns "name:key=value,…" with absolute paths.
std::string with_absolute_paths(const std::string& part,
                                const std::vector<PolicyParameter>& parameters) {
  const std::size_t colon = part.find(':');
  if (colon == std::string::npos) return part;
  std::string text = part.substr(0, colon);
  char separator = ':';
  for (const std::string& pair : files::split_unescaped(part.substr(colon + 1), ',')) {
    const std::size_t equals = pair.find('=');
    const std::string key = pair.substr(0, equals);
    const std::string value = files::without_escapes(pair.substr(equals + 1), ",+");
    const bool is_file =
        std::any_of(parameters.begin(), parameters.end(), [&](const PolicyParameter& parameter) {
          return parameter.name == key && names_file(parameter, value);
        });
    text += separator;
    text += is_file ? key + "=" + escaped_in_policy(absolute(value)) : pair;
    separator = ',';
  }
  return text;
}

/// Returns --policy with absolute paths.
std::string absolute_policy(const RunOptions& options) {
  const std::string& given = options.pruning_texts.policy;
  PolicySpec spec;
  try {
    spec = parse_policy(options.pruning.policy_text(flag_names()));
  } catch (const Error&) {
    return given;  // the run reports the error
  }
  const std::string settings = given.substr(files::split_unescaped(given, '@').front().size());
  const std::vector<std::string> parts = files::split_unescaped(options.pruning.policy, '+');
  std::string text = with_absolute_paths(parts.front(), spec.info->parameters);
  for (std::size_t i = 1; i < parts.size(); ++i) {
    text += "+" + with_absolute_paths(parts[i], spec.modifiers.at(i - 1).first->parameters);
  }
  return escaped_in_settings(text) + settings;
}

}  // namespace

bool is_recorded(const std::string& name) {
  static const std::set<std::string> not_recorded = {
      "help",      "config",    "prompt",    "file",           "system",      "question",
      "questions", "separator", "placement", "balance",        "json",        "dump",
      "resume",    "append",    "dry-run",   "json-token-ids", "layer-table", "progress",
      "threads",   "quiet",     "no-history"};
  return not_recorded.count(name) == 0 && name.rfind("snapshot", 0) != 0;
}

bool may_change(const std::string& name) {
  static const std::set<std::string> free = {"dtype",
                                             "kv-type",
                                             "page-rows",
                                             "trim",
                                             "n-predict",
                                             "ignore-eos",
                                             "temp",
                                             "top-k",
                                             "top-p",
                                             "seed",
                                             "raw",
                                             "token-ids",
                                             "thinking",
                                             "ctx-size",
                                             "model",
                                             "min-p",
                                             "repeat-penalty",
                                             "repeat-last-n",
                                             "presence-penalty",
                                             "frequency-penalty",
                                             "greedy-plain"};
  return free.count(name) > 0;
}

bool names_policy(const std::string& name) {
  return std::find(std::begin(policy_flags), std::end(policy_flags), name) !=
         std::end(policy_flags);
}

bool is_flag(const CLI::Option& option) { return option.get_expected_max() == 0; }

std::string long_name(const CLI::Option& option) {
  return option.get_lnames().empty() ? "" : option.get_lnames().front();
}

std::string option_text(const CLI::Option& option) {
  if (option.count() == 0) return option.get_default_str();
  if (is_flag(option)) return option.as<bool>() ? "true" : "false";
  return option.as<std::string>();
}

std::string recorded_options(const CLI::App& app, const RunOptions& options) {
  ordered_json recorded = ordered_json::object();
  for (const CLI::Option* option : app.get_options()) {
    const std::string name = long_name(*option);
    const std::string text = is_recorded(name) ? option_text(*option) : "";
    if (!text.empty()) recorded[name] = value_of(*option, text);
  }
  // Another run may start in another folder.
  if (!options.model.empty()) recorded["model"] = absolute(options.model);
  const std::string& surrogate = options.pruning.surrogate;
  if (!surrogate.empty()) recorded["surrogate"] = absolute(surrogate);
  if (!options.pruning_texts.policy.empty()) recorded["policy"] = absolute_policy(options);
  recorded["prune"] = prune_of(options);
  return dumped(recorded);
}

std::string options_in_force(const CLI::App& app, const RunOptions& options) {
  ordered_json all = ordered_json::object();
  for (const CLI::Option* option : app.get_options()) {
    const std::string name = long_name(*option);
    if (name.empty() || name == "help") continue;
    const std::string text =
        name == "question" || name == "file" || name == "separator" ? "" : option_text(*option);
    all[name] = text.empty() ? (is_flag(*option) ? ordered_json(false) : ordered_json())
                             : value_of(*option, text);
  }
  if (options.prompt) all["prompt"] = *options.prompt;
  if (options.files.size() == 1) {
    all["file"] = options.files.front();
  } else if (!options.files.empty()) {
    all["file"] = options.files;
  }
  all["separator"] = options.separator;
  // They are among the questions.
  if (all.contains("questions")) all["questions"] = nullptr;
  all["question"] = options.questions.empty() ? ordered_json() : ordered_json(options.questions);
  all["trim"] = options.trim;
  all["prune"] = prune_of(options);
  return dumped(all);
}

std::string identity_of_policy(const Pruning& pruning) {
  if (!pruning.prunes()) return "";
  const PolicySpec spec = parse_policy(pruning.policy_text(flag_names()));
  std::string identity;
  const auto add = [&](const auto& info, const PolicyArguments& arguments) {
    identity += info.name;
    for (const PolicyParameter& parameter : info.parameters) {
      std::string value = arguments.text(parameter.name);
      if (names_file(parameter, value)) value = hash_of_policy_file(value);
      identity += fmt::format(":{}={}", parameter.name, value);
    }
  };
  add(*spec.info, spec.arguments);
  for (const auto& [info, arguments] : spec.modifiers) {
    identity += "+";
    add(*info, arguments);
  }
  return identity;
}

SurrogateIdentity identity_of_surrogate(const Pruning& pruning) {
  if (!pruning.prunes()) return {};
  const PolicySpec spec = parse_policy(pruning.policy_text(flag_names()));
  for (const PolicyParameter& parameter : spec.info->parameters) {
    const std::string value = spec.arguments.text(parameter.name);
    if (parameter.name != "surrogate" || !names_file(parameter, value)) continue;
    return {absolute(value), hash_of_policy_file(value)};
  }
  return {};
}

std::string further_text(const SnapshotInfo& info, const char* name) {
  const auto found = info.further.find(name);
  if (found == info.further.end()) return "";
  const auto* const text = std::get_if<std::string>(&found->second);
  return text ? *text : "";
}

}  // namespace kvzap::driver
