// The settings of an evaluation: every policy with every amount to evict.
#pragma once

#include <cstdint>
#include <kvzap/engine/pruning.hpp>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace kvzap::eval {

/// Policies of the caller's own, by the names that entries give them. A name has no @, ; or +.
using OwnPolicies = std::map<std::string, std::shared_ptr<const PolicyInfo>>;

/// A pruning with a name.
struct EvalSetting {
  /// Unique. As an entry it gives this setting again: "snapkv@evict-ratio=0.5".
  std::string label;
  Pruning pruning;
  /// The text of the budget in bytes.
  std::string kv_budget;
  /// The type of the rows in pages, such as "q8,q4"; empty: that of all settings.
  std::string kv_type;
  /// The evict ratio for which the threshold of `pruning` was looked up.
  std::optional<double> looked_up_ratio;
  /// Whether the amount comes from the request's lists and not from the entry.
  bool has_general_amount = false;

  /// Whether the cache is full.
  bool is_none() const { return pruning.policy.empty(); }
};

/// The list of policies, and the values that are combined with each.
struct SettingsRequest {
  /// "none;kvzap;snapkv@evict-ratios=0.5,0.75@prune-after=question"
  std::string policies;
  std::vector<double> evict_ratios;
  std::vector<double> thresholds;
  /// Whether the recommended threshold follows `thresholds`.
  bool recommended = false;
  /// Moment, mode, prefill and surrogate apply to policies that can use them; an entry's own
  /// settings take precedence. All settings have this window, sink and chunk.
  Pruning general;
  OwnPolicies own;
};

/// Returns all settings, without duplicates, in the order of the request. An entry is a text of
/// Pruning::parse, which may have several amounts (evict-ratios, thresholds, keep-tokens,
/// kv-budget): lists separated by commas, which replace the general ones. Each amount is a setting.
/// @kv-type=NAME sets the type of rows, for "none" too; its name is not checked. A backslash before
/// ; or @ makes the character part of the policy.
///
/// Every policy gets the evict ratios; kvzap gets the thresholds instead, if there are any; a
/// policy with a built-in budget has one setting. An evict ratio of plain kvzap is not looked up
/// yet (Pruning::looks_up_threshold). An evict ratio of 0 is the full cache, "none", for any
/// policy. Policies whose scores need the question prune after it.
///
/// Throws Error, naming the entry, where Pruning::parse throws, for unknown policies, and for a
/// policy that gets no amount. Does not check the rules of find_fault.
std::vector<EvalSetting> parse_settings(const SettingsRequest& request,
                                        const PruningNames& names = plain_names());

/// Returns a label in words, for people: "kvzap, threshold -5.506 (74 % evicted)". A threshold has
/// four digits. The mean `evict_ratio` that was reached follows unless the label names an evict
/// ratio. `threshold`: of the setting, if it has one; it follows if it was looked up.
std::string setting_words(const std::string& label, double evict_ratio,
                          std::optional<double> threshold = {});

/// Returns {"label", "policy", the amount, "prune_after", "prune", "prefill", "kv_type" if it has
/// one}.
nlohmann::ordered_json to_json(const EvalSetting& setting);

}  // namespace kvzap::eval
