#include "commands/run/recorded_options.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "files/escaped_list.hpp"
#include "files/json_file.hpp"
#include "options/policy_options.hpp"
#include "options/recording.hpp"
#include "session/recorded.hpp"

namespace kvzap::driver {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

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

/// Returns --policy with absolute paths.
std::string absolute_policy(const RunOptions& options) {
  const std::string& given = options.pruning_texts.policy;
  const std::string settings = given.substr(files::split_unescaped(given, '@').front().size());
  const PolicyText policy = session::absolute_policy(options.pruning, flag_names());
  return escaped_in_settings(policy.text()) + settings;
}

}  // namespace

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
    if (recording_of(*option) == Recording::none) continue;
    const std::string text = option_text(*option);
    if (!text.empty()) recorded[long_name(*option)] = value_of(*option, text);
  }
  // Another run may start in another folder.
  if (!options.model.empty()) recorded["model"] = session::absolute_path(options.model);
  const std::string& surrogate = options.pruning.surrogate;
  if (!surrogate.empty()) recorded["surrogate"] = session::absolute_path(surrogate);
  if (!options.pruning_texts.policy.empty()) recorded["policy"] = absolute_policy(options);
  recorded["prune"] = prune_of(options);
  recorded["window"] = options.pruning.window;  // auto has been replaced by a number
  return files::json_text(recorded);
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
  all["window"] = options.pruning.window;
  return files::json_text(all);
}

}  // namespace kvzap::driver
