// The settings of an evaluation: every policy with every amount that it is to evict.
#pragma once

#include <cstdint>
#include <kvzap/engine/pruning.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace kvzap::detail {

/// One way to prune, with a name.
struct EvalSetting {
  /// Unique, and an entry that gives this one setting again: "snapkv@evict-ratio=0.5".
  std::string label;
  /// Its policy may lack kvzap's surrogate; window, sink and chunk are the evaluation's.
  Pruning pruning;
  /// The bytes of the budget as they were written.
  std::string kv_budget;

  bool is_none() const { return pruning.policy.empty(); }
};

/// What entries of the list of policies are combined with.
struct SettingsRequest {
  /// "none;kvzap;snapkv@evict-ratios=0.5,0.75@prune-after=question"
  std::string policies;
  std::vector<double> evict_ratios;
  std::vector<double> thresholds;
  // Of the policies that they go with; an entry's own settings are of that entry whatever it is.
  PruneMoment prune_after = PruneMoment::context;
  PruneMode prune = PruneMode::prefill;
  PrefillMode prefill = PrefillMode::dense;
  /// Put in where kvzap names no surrogate of its own; may be empty.
  std::string surrogate;
};

/// All settings, each once, in the order in which they are asked for. An entry is a policy,
/// followed by settings of its own, each behind an @: evict-ratios, thresholds, keep-tokens,
/// kv-budget (lists between commas, which replace the general ones), prune-after, prune, prefill. A
/// backslash before ; or @ makes it part of the policy.
///
/// Every policy that takes a budget gets the evict ratios, kvzap the thresholds too, policies with
/// a budget of their own have one setting. An evict ratio of 0 is the full cache, "none", whatever
/// the policy. Policies whose scores need the question choose after it.
///
/// Throws Error, naming the entry, for unknown policies, keys (with the nearest one) and values,
/// and for a policy that gets no amount.
std::vector<EvalSetting> parse_settings(const SettingsRequest& request);

/// The policy as parse_policy takes it: with the surrogate put in where kvzap has none. Throws
/// Error if it needs one.
std::string policy_with_surrogate(const std::string& policy, const std::string& surrogate);

/// {"label", "policy", what is asked for, "prune_after", "prune", "prefill"}.
nlohmann::ordered_json to_json(const EvalSetting& setting);

/// Finite numbers between commas. Throws Error, "WHAT: …", for an entry that `expected` does not
/// tell of: at least `least`, less than `below`.
std::vector<double> parse_numbers(const std::string& text, const std::string& what,
                                  const std::string& expected, double least, double below);

}  // namespace kvzap::detail
