// The settings of an evaluation: every policy with every amount to evict.
#pragma once

#include <cstdint>
#include <kvzap/engine/pruning.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace kvzap::detail {

/// A pruning with a name.
struct EvalSetting {
  /// Unique; as an entry it gives this setting again: "snapkv@evict-ratio=0.5".
  std::string label;
  /// The policy may lack kvzap's surrogate; window, sink and chunk are the evaluation's.
  Pruning pruning;
  /// The text of the budget in bytes.
  std::string kv_budget;

  bool is_none() const { return pruning.policy.empty(); }
};

/// The list of policies, and the values that are combined with each.
struct SettingsRequest {
  /// "none;kvzap;snapkv@evict-ratios=0.5,0.75@prune-after=question"
  std::string policies;
  std::vector<double> evict_ratios;
  std::vector<double> thresholds;
  // Used for policies that can use them; an entry's own settings take precedence.
  PruneMoment prune_after = PruneMoment::context;
  PruneMode prune = PruneMode::prefill;
  PrefillMode prefill = PrefillMode::dense;
  /// For kvzap without a surrogate of its own; may be empty.
  std::string surrogate;
};

/// All settings, each once, in the order of the request. An entry is a policy, followed by its own
/// settings, each after an @: evict-ratios, thresholds, keep-tokens, kv-budget (lists between
/// commas, which replace the general ones), prune-after, prune, prefill. A backslash before ; or @
/// makes the character part of the policy.
///
/// Every policy with a budget gets the evict ratios; kvzap also gets the thresholds; a policy with
/// a built-in budget has one setting. An evict ratio of 0 is the full cache, "none", for any
/// policy. Policies whose scores need the question prune after it.
///
/// Throws Error, naming the entry, for unknown policies, keys (with the nearest one) and values,
/// and for a policy that gets no amount.
std::vector<EvalSetting> parse_settings(const SettingsRequest& request);

/// The policy for parse_policy, with `surrogate` added if kvzap names none. Throws Error if kvzap
/// needs one and `surrogate` is empty.
std::string policy_with_surrogate(const std::string& policy, const std::string& surrogate);

/// {"label", "policy", the amount, "prune_after", "prune", "prefill"}.
nlohmann::ordered_json to_json(const EvalSetting& setting);

/// Finite numbers between commas, at least `least` and below `below`. Throws Error, "WHAT: …", with
/// `expected`, for any other entry.
std::vector<double> parse_numbers(const std::string& text, const std::string& what,
                                  const std::string& expected, double least, double below);

}  // namespace kvzap::detail
