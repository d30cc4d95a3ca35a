#include "eval/settings.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "files/escaped_list.hpp"
#include "files/missing_file.hpp"

namespace kvzap::eval {
namespace {

std::string trimmed(const std::string& text) {
  const std::size_t begin = text.find_first_not_of(" \t\r\n");
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(" \t\r\n") - begin + 1);
}

/// An entry of the list, as texts for Pruning::parse.
struct Entry {
  std::string text;   // the whole entry, as given
  std::string label;  // the policy, as given
  std::string policy;
  std::string settings;              // settings other than amounts: "@prune=always"
  std::vector<std::string> amounts;  // "@threshold=-4"
  std::string kv_type;
  std::set<std::string> keys;  // of all settings
};

/// Splits the lists of amounts.
Entry read_entry(const std::string& text) {
  Entry entry;
  entry.text = text;
  entry.label = trimmed(files::split_unescaped(text, '@').front());
  const std::vector<std::string> parts =
      files::split_unescaped(files::without_escapes(text, ";"), '@');
  entry.policy = trimmed(parts.front());
  for (std::size_t i = 1; i < parts.size(); ++i) {
    const std::size_t equals = parts[i].find('=');
    std::string key = trimmed(parts[i].substr(0, equals));
    if (key == "evict-ratios" || key == "thresholds") key.pop_back();
    const bool is_new = entry.keys.insert(key).second;
    if (key == "kv-type" && equals != std::string::npos) {
      if (!is_new) throw Error(fmt::format("{}: @{} is given twice", text, key));
      entry.kv_type = trimmed(parts[i].substr(equals + 1));
      if (entry.kv_type.empty()) throw Error(fmt::format("{}: @kv-type has no value", text));
      continue;
    }
    const bool is_amount =
        key == "evict-ratio" || key == "threshold" || key == "keep-tokens" || key == "kv-budget";
    if (!is_amount || equals == std::string::npos) {
      entry.settings += "@" + parts[i];
      continue;
    }
    if (!is_new) throw Error(fmt::format("{}: @{} is given twice", text, key));
    for (const std::string& value : files::split_unescaped(parts[i].substr(equals + 1), ',')) {
      entry.amounts.push_back("@" + key + "=" + trimmed(value));
    }
  }
  return entry;
}

/// Returns the default amounts of an entry.
std::vector<std::string> general_amounts(const PolicySpec& spec, const SettingsRequest& request) {
  std::vector<std::string> amounts;
  const bool by_threshold = spec.has_modifier(&ModifierInfo::judges_rows);
  // Thresholds are log scores of a surrogate; other policies' scores have other scales. Most
  // modifiers need a budget.
  const bool is_plain = spec.modifiers.empty() || (by_threshold && spec.modifiers.size() == 1);
  if (!spec.info->surrogate.empty() && is_plain) {
    for (const double threshold : request.thresholds) {
      amounts.push_back(fmt::format("@threshold={}", threshold));
    }
    if (request.recommended) amounts.emplace_back("@threshold=auto");
  }
  if (!amounts.empty() || by_threshold) return amounts;
  for (const double ratio : request.evict_ratios) {
    amounts.push_back(fmt::format("@evict-ratio={}", ratio));
  }
  return amounts;
}

/// Returns whether the policy has a built-in amount, and so one setting.
bool has_own_amount(const PolicySpec& spec) {
  return spec.info->has_own_budget || spec.has_amount_of_modifier();
}

/// Returns the entry's pruning with one of its amounts. A policy that lacks a surrogate gets the
/// general one.
Pruning parsed(const Entry& entry, const std::string& amount, const SettingsRequest& request,
               Pruning base = {}) {
  Pruning pruning = Pruning::parse(entry.policy + entry.settings + amount, std::move(base));
  const auto own = request.own.find(entry.policy);
  if (own != request.own.end()) pruning.policy = PolicyText(own->second);
  if (pruning.lacks_surrogate()) pruning.surrogate = request.general.surrogate;
  return pruning;
}

/// Returns the entry's pruning with one of its amounts. General settings apply if the policy can
/// use them.
Pruning pruning_of(const Entry& entry, const std::string& amount, const PolicySpec& spec,
                   const SettingsRequest& request) {
  const Pruning& general = request.general;
  Pruning base = general;
  base.surrogate.clear();
  base.mode.reset();
  Pruning pruning = parsed(entry, amount, request, base);
  const PolicyInfo& info = *spec.info;
  const bool is_budget = pruning.has_budget(spec);
  if (entry.keys.count("prune-after") == 0) {
    const bool can_wait = is_budget && !info.repeats_context;
    const bool waits = info.needs_question || (can_wait && general.moment == PruneMoment::question);
    pruning.moment = waits ? PruneMoment::question : PruneMoment::context;
  }
  if (!pruning.mode) {
    const bool judges = !is_budget && info.judges_tokens && !info.has_own_budget;
    pruning.mode = judges && general.mode ? *general.mode : PruneMode::prefill;
  }
  if (entry.keys.count("prefill") == 0) {
    const bool scores_chunks =
        info.scores_again && !info.has_own_budget && pruning.moment == PruneMoment::context;
    if (!scores_chunks) pruning.prefill = PrefillMode::dense;
  }
  return pruning;
}

/// Returns the entry that gives this setting again, whatever the general values. `policy`: as
/// given.
std::string label_of(const EvalSetting& setting, const std::string& policy, const PolicySpec& spec,
                     const Pruning& general) {
  const Pruning standard;
  Pruning rest = setting.pruning;
  rest.policy = {};
  if (rest.surrogate == general.surrogate) rest.surrogate.clear();
  if (!setting.kv_budget.empty()) rest.amount.kv_bytes.reset();
  if (rest.mode == PruneMode::prefill) rest.mode.reset();
  if (spec.info->needs_question) rest.moment = standard.moment;
  rest.window = standard.window;
  rest.sink = standard.sink;
  rest.chunk = standard.chunk;
  std::string label = policy;
  if (!setting.kv_budget.empty()) label += "@kv-budget=" + setting.kv_budget;
  return rest == standard ? label : label + rest.text();
}

std::vector<EvalSetting> settings_of(Entry entry, const SettingsRequest& request,
                                     const PruningNames& names) {
  const auto fail = [&](const std::string& what) {
    throw Error(fmt::format("{}: {}", entry.text, what));
  };
  const std::string type_label = entry.kv_type.empty() ? "" : "@kv-type=" + entry.kv_type;
  EvalSetting none;
  none.label = "none" + type_label;
  none.kv_type = entry.kv_type;
  none.pruning.window = request.general.window;
  const std::string first = entry.amounts.empty() ? "" : entry.amounts.front();
  const Pruning named = parsed(entry, first, request);
  if (entry.policy == "none") return {none};
  if (named.policy.empty()) fail("there is no policy; expected its name, or none");
  for (const PruningField field : {PruningField::window, PruningField::sink, PruningField::chunk}) {
    const std::string key(name_of(field));
    if (entry.keys.count(key) > 0) {
      fail(fmt::format("@{} is the same for all settings: give {}", key, names(field)));
    }
  }
  PolicySpec spec;
  try {
    spec = named.spec(names);
  } catch (const files::MissingFile& error) {
    throw files::MissingFile(fmt::format("{}: {}", entry.text, error.what()));
  } catch (const Error& error) {
    fail(error.what());
  }
  const bool own_amount = has_own_amount(spec);
  const bool is_general = !own_amount && entry.amounts.empty();
  if (own_amount && !entry.amounts.empty()) {
    fail("the policy has a built-in amount: it takes no other");
  }
  if (own_amount) {
    entry.amounts = {""};
  } else if (entry.amounts.empty()) {
    entry.amounts = general_amounts(spec, request);
  }
  if (entry.amounts.empty()) {
    fail(
        "no amount to evict: give evict ratios for all policies, or @evict-ratios=, @thresholds=, "
        "@keep-tokens= or @kv-budget= after the policy");
  }
  std::vector<EvalSetting> settings;
  for (const std::string& amount : entry.amounts) {
    EvalSetting setting;
    setting.pruning = pruning_of(entry, amount, spec, request);
    const Pruning::Amount& found = setting.pruning.amount;
    if (found.threshold && !std::isfinite(*found.threshold)) {
      fail(fmt::format("{}; expected a finite threshold", amount));
    }
    if (found.kv_bytes) setting.kv_budget = amount.substr(amount.find('=') + 1);
    setting.has_general_amount = is_general;
    setting.kv_type = entry.kv_type;
    setting.label = label_of(setting, entry.label, spec, request.general) + type_label;
    const bool cuts_answers = setting.pruning.decode.every > 0;
    if (cuts_answers && setting.pruning.moment == PruneMoment::question) {
      fail("cuts while the answer is generated need @prune-after=context, found question");
    }
    const bool keeps_all = found.evict_ratio == 0.0 && !cuts_answers;
    settings.push_back(keeps_all ? none : std::move(setting));
  }
  return settings;
}

}  // namespace

std::vector<EvalSetting> parse_settings(const SettingsRequest& request, const PruningNames& names) {
  std::vector<EvalSetting> settings;
  std::set<std::string> labels;
  for (const std::string& part : files::split_unescaped(request.policies, ';')) {
    const std::string text = trimmed(part);
    if (text.empty()) continue;
    for (EvalSetting& setting : settings_of(read_entry(text), request, names)) {
      if (labels.insert(setting.label).second) settings.push_back(std::move(setting));
    }
  }
  if (settings.empty()) throw Error("no policies; expected a list such as \"none;kvzap;snapkv\"");
  return settings;
}

std::string setting_words(const std::string& label, double evict_ratio,
                          std::optional<double> threshold) {
  const std::vector<std::string> parts = files::split_unescaped(label, '@');
  std::string words = files::without_escapes(parts.front(), "@;");
  bool names_ratio = parts.front() == "none", names_threshold = false;
  for (std::size_t i = 1; i < parts.size(); ++i) {
    const std::size_t equals = std::min(parts[i].find('='), parts[i].size());
    std::string key = parts[i].substr(0, equals);
    std::string value = files::without_escapes(parts[i].substr(equals), "@;");
    if (!value.empty()) value.front() = ' ';
    if (key == "evict-ratio") names_ratio = true;
    if (key == "threshold" && value != " auto") {
      names_threshold = true;
      if (threshold) value = fmt::format(" {:.3f}", *threshold);
    }
    std::replace(key.begin(), key.end(), '-', ' ');
    words += ", " + key + value;
  }
  std::vector<std::string> notes;
  const bool is_looked_up = threshold && !names_threshold;
  if (!names_ratio || is_looked_up)
    notes.push_back(fmt::format("{:.0f} % evicted", 100 * evict_ratio));
  if (is_looked_up) notes.push_back(fmt::format("threshold {:.3f}", *threshold));
  return notes.empty() ? words : fmt::format("{} ({})", words, fmt::join(notes, ", "));
}

nlohmann::ordered_json to_json(const EvalSetting& setting) {
  nlohmann::ordered_json json = {
      {"label", setting.label},
      {"policy", setting.is_none() ? "none" : setting.pruning.policy.text()}};
  const Pruning& pruning = setting.pruning;
  if (setting.is_none()) json["evict_ratio"] = 0;
  if (pruning.amount.evict_ratio) json["evict_ratio"] = *pruning.amount.evict_ratio;
  if (setting.looked_up_ratio) json["evict_ratio"] = *setting.looked_up_ratio;
  if (pruning.amount.threshold) json["threshold"] = *pruning.amount.threshold;
  if (pruning.amount.keep_tokens) json["keep_tokens"] = *pruning.amount.keep_tokens;
  if (!setting.kv_budget.empty()) json["kv_budget"] = setting.kv_budget;
  json["prune_after"] = name_of(pruning.moment);
  json["prune"] = name_of(pruning.mode.value_or(PruneMode::prefill));
  json["prefill"] = name_of(pruning.prefill);
  if (!setting.kv_type.empty()) json["kv_type"] = setting.kv_type;
  return json;
}

}  // namespace kvzap::eval
