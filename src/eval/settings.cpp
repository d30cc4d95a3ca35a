#include "eval/settings.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <set>

#include "base/decimal.hpp"
#include "base/escaped_list.hpp"
#include "base/nearest.hpp"
#include "policy/pruning_text.hpp"

namespace kvzap::detail {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
const std::vector<std::string> setting_keys = {
    "evict-ratios", "thresholds", "keep-tokens", "kv-budget", "prune-after", "prune", "prefill"};

std::string trimmed(const std::string& text) {
  const std::size_t begin = text.find_first_not_of(" \t\r\n");
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(" \t\r\n") - begin + 1);
}

bool has_modifier(const PolicySpec& spec, const char* name) {
  return std::any_of(spec.modifiers.begin(), spec.modifiers.end(),
                     [&](const auto& modifier) { return modifier.first->name == name; });
}

/// An entry of the list, with its own settings.
struct Entry {
  std::string text;    // of the policy, as given
  std::string policy;  // without escapes; empty: none
  bool has_amounts = false;
  std::vector<double> evict_ratios;
  std::vector<double> thresholds;
  std::vector<std::int64_t> keep_tokens;
  std::vector<std::string> kv_budgets;
  std::optional<PruneMoment> prune_after;
  std::optional<PruneMode> prune;
  std::optional<PrefillMode> prefill;
};

template <class Choice>
Choice one_of(const std::string& value, Choice first, Choice second, const std::string& where) {
  if (value == name_of(first)) return first;
  if (value == name_of(second)) return second;
  throw Error(fmt::format("{} is \"{}\"; expected {} or {}", where, value, name_of(first),
                          name_of(second)));
}

void read_setting(Entry& entry, const std::string& key, const std::string& value,
                  const std::string& where) {
  const std::string what = where + key;
  if (key == "evict-ratios" || key == "evict-ratio") {
    entry.has_amounts = true;
    entry.evict_ratios = parse_numbers(value, what, "numbers of at least 0 and less than 1", 0, 1);
  } else if (key == "thresholds" || key == "threshold") {
    entry.has_amounts = true;
    entry.thresholds = parse_numbers(value, what, "numbers", -infinity, infinity);
  } else if (key == "keep-tokens") {
    entry.has_amounts = true;
    constexpr double most = 9e15;  // below, every whole number is a double
    for (const double number : parse_numbers(value, what, "whole numbers of at least 1", 1, most)) {
      if (number != std::floor(number)) {
        throw Error(fmt::format("{} is {}; expected whole numbers of at least 1", what, number));
      }
      entry.keep_tokens.push_back(static_cast<std::int64_t>(number));
    }
  } else if (key == "kv-budget") {
    entry.has_amounts = true;
    for (const std::string& size : split_unescaped(value, ',')) {
      entry.kv_budgets.push_back(trimmed(size));
    }
  } else if (key == "prune-after") {
    entry.prune_after = one_of(value, PruneMoment::context, PruneMoment::question, what);
  } else if (key == "prune") {
    entry.prune = one_of(value, PruneMode::prefill, PruneMode::always, what);
  } else if (key == "prefill") {
    entry.prefill = one_of(value, PrefillMode::dense, PrefillMode::sparse, what);
  } else {
    const std::string nearest = nearest_name(key, setting_keys);
    throw Error(fmt::format("{}: unknown setting; {}expected one of {} after @", what,
                            nearest.empty() ? "" : "did you mean " + nearest + "? ",
                            fmt::join(setting_keys, ", ")));
  }
}

/// Plural and singular forms are one key.
std::string canonical_key(const std::string& key) {
  return key == "evict-ratio" || key == "threshold" ? key + "s" : key;
}

Entry read_entry(const std::string& text) {
  const std::vector<std::string> parts = split_unescaped(text, '@');
  Entry entry;
  entry.text = trimmed(parts[0]);
  entry.policy = without_escapes(entry.text, ";@");
  const std::string where = fmt::format("--policies: {}: ", text);
  std::set<std::string> seen;
  for (std::size_t i = 1; i < parts.size(); ++i) {
    const std::size_t equals = parts[i].find('=');
    if (equals == std::string::npos) {
      throw Error(fmt::format("{}\"@{}\" is not @key=value", where, parts[i]));
    }
    const std::string key = trimmed(parts[i].substr(0, equals));
    read_setting(entry, key, trimmed(parts[i].substr(equals + 1)), where + "@");
    if (!seen.insert(canonical_key(key)).second) {
      throw Error(fmt::format("{}@{} is given twice", where, key));
    }
  }
  if (entry.policy == "none") {
    if (parts.size() > 1) {
      throw Error(where + "the full cache has no settings of its own");
    }
    entry.policy.clear();
  }
  return entry;
}

/// Default amounts of an entry.
void add_general_amounts(Entry& entry, const PolicySpec& spec, const SettingsRequest& request) {
  const bool by_threshold = has_modifier(spec, "dms");
  if (!by_threshold) entry.evict_ratios = request.evict_ratios;
  // Thresholds are log scores of a surrogate; other policies' scores have other scales. Most
  // modifiers need a budget.
  const bool is_plain = spec.modifiers.empty() || (by_threshold && spec.modifiers.size() == 1);
  if (spec.info->name == "kvzap" && is_plain) entry.thresholds = request.thresholds;
}

/// Whether the policy has a built-in amount, and so one setting.
bool has_own_amount(const PolicySpec& spec) {
  if (spec.info->has_own_budget || has_modifier(spec, "per-layer")) return true;
  return std::any_of(spec.modifiers.begin(), spec.modifiers.end(), [](const auto& modifier) {
    return modifier.first->name == "dms" && modifier.second.has("threshold");
  });
}

/// An entry's settings without the amounts. General settings apply if the policy can use them.
EvalSetting setting_of(const Entry& entry, const PolicySpec& spec, const SettingsRequest& request,
                       bool is_budget) {
  const PolicyInfo& info = *spec.info;
  EvalSetting setting;
  Pruning& pruning = setting.pruning;
  pruning.policy = entry.policy;
  if (entry.prune_after) {
    pruning.moment = *entry.prune_after;
  } else if (info.needs_question ||
             (request.prune_after == PruneMoment::question && !info.repeats_context && is_budget)) {
    pruning.moment = PruneMoment::question;
  }
  const bool judges = !is_budget && info.judges_tokens && !info.has_own_budget;
  pruning.mode = entry.prune.value_or(judges ? request.prune : PruneMode::prefill);
  const bool scores_chunks =
      info.scores_again && !info.has_own_budget && pruning.moment == PruneMoment::context;
  pruning.prefill = entry.prefill.value_or(scores_chunks ? request.prefill : PrefillMode::dense);
  return setting;
}

}  // namespace

std::vector<double> parse_numbers(const std::string& text, const std::string& what,
                                  const std::string& expected, double least, double below) {
  std::vector<double> numbers;
  for (const std::string& part : split_unescaped(text, ',')) {
    const std::string entry = trimmed(part);
    double number = 0;
    if (detail::read_real(entry, number) != detail::DecimalFault::none || !std::isfinite(number) ||
        number < least || number >= below) {
      throw Error(fmt::format("{}: '{}'; expected {} between commas", what, entry, expected));
    }
    numbers.push_back(number == 0 ? 0 : number);  // no -0 in labels
  }
  return numbers;
}

std::string policy_with_surrogate(const std::string& policy, const std::string& surrogate) {
  if (name_in(policy) != "kvzap" || has_argument(policy, "surrogate")) return policy;
  if (surrogate.empty()) {
    throw Error("kvzap needs a surrogate: give --surrogate DIR, or kvzap:surrogate=DIR");
  }
  return with_argument(policy, "surrogate=" + escaped_in_policy(surrogate));
}

std::vector<EvalSetting> parse_settings(const SettingsRequest& request) {
  std::vector<EvalSetting> settings;
  std::set<std::string> labels;
  const auto add = [&](EvalSetting setting, const std::string& label) {
    setting.label = label;
    if (labels.insert(label).second) settings.push_back(std::move(setting));
  };
  const auto add_none = [&] { add(EvalSetting(), "none"); };
  for (const std::string& part : split_unescaped(request.policies, ';')) {
    const std::string text = trimmed(part);
    if (text.empty()) continue;
    Entry entry = read_entry(text);
    if (entry.policy.empty()) {
      add_none();
      continue;
    }
    const std::string where = fmt::format("--policies: {}: ", text);
    PolicySpec spec;
    try {
      spec = parse_policy(policy_with_surrogate(entry.policy, request.surrogate));
    } catch (const Error& error) {
      throw Error(where + error.what());
    }
    const bool own_amount = has_own_amount(spec);
    if (own_amount && entry.has_amounts) {
      throw Error(where + "the policy has a built-in amount: it takes no other");
    }
    if (!own_amount && !entry.has_amounts) add_general_amounts(entry, spec, request);

    const auto add_amount = [&](const std::string& amount, bool is_budget,
                                const std::function<void(EvalSetting&)>& set) {
      EvalSetting setting = setting_of(entry, spec, request, is_budget);
      set(setting);
      std::string label = entry.text + amount;
      const Pruning& pruning = setting.pruning;
      if (pruning.moment == PruneMoment::question && !spec.info->needs_question) {
        label += "@prune-after=question";
      }
      if (pruning.mode == PruneMode::always) label += "@prune=always";
      if (pruning.prefill == PrefillMode::sparse) label += "@prefill=sparse";
      add(std::move(setting), label);
    };
    if (own_amount) {
      add_amount("", has_modifier(spec, "per-layer"), [](EvalSetting&) {});
    }
    for (const double ratio : entry.evict_ratios) {
      if (ratio == 0) {
        add_none();
        continue;
      }
      add_amount(fmt::format("@evict-ratio={}", ratio), true,
                 [&](EvalSetting& setting) { setting.pruning.evict_ratio(ratio); });
    }
    for (const double threshold : entry.thresholds) {
      add_amount(fmt::format("@threshold={}", threshold), false,
                 [&](EvalSetting& setting) { setting.pruning.threshold(threshold); });
    }
    for (const std::int64_t tokens : entry.keep_tokens) {
      add_amount(fmt::format("@keep-tokens={}", tokens), true,
                 [&](EvalSetting& setting) { setting.pruning.keep_tokens(tokens); });
    }
    for (const std::string& size : entry.kv_budgets) {
      add_amount("@kv-budget=" + size, true, [&](EvalSetting& setting) {
        setting.kv_budget = size;
        setting.pruning.kv_bytes(parse_bytes(size, where + "@kv-budget"));
      });
    }
    if (!own_amount && entry.evict_ratios.empty() && entry.thresholds.empty() &&
        entry.keep_tokens.empty() && entry.kv_budgets.empty()) {
      throw Error(where +
                  "no amount to evict: give --evict-ratios, or @evict-ratios=, "
                  "@thresholds=, @keep-tokens= or @kv-budget= behind the policy");
    }
  }
  if (settings.empty()) {
    throw Error("no policies: give a list such as --policies \"none;kvzap;snapkv\"");
  }
  return settings;
}

nlohmann::ordered_json to_json(const EvalSetting& setting) {
  nlohmann::ordered_json json = {{"label", setting.label},
                                 {"policy", setting.is_none() ? "none" : setting.pruning.policy}};
  const Pruning& pruning = setting.pruning;
  if (setting.is_none()) json["evict_ratio"] = 0;
  if (pruning.amount.evict_ratio) json["evict_ratio"] = *pruning.amount.evict_ratio;
  if (pruning.amount.threshold) json["threshold"] = *pruning.amount.threshold;
  if (pruning.amount.keep_tokens) json["keep_tokens"] = *pruning.amount.keep_tokens;
  if (!setting.kv_budget.empty()) json["kv_budget"] = setting.kv_budget;
  json["prune_after"] = name_of(pruning.moment);
  json["prune"] = name_of(pruning.mode.value_or(PruneMode::prefill));
  json["prefill"] = name_of(pruning.prefill);
  return json;
}

}  // namespace kvzap::detail
