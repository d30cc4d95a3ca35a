// What the flags of `kvzap run` say of its eviction policy: --policy and --surrogate, the budget
// and its moments.
#pragma once

#include <kvzap/engine/policies.hpp>
#include <optional>
#include <string>
#include <vector>

#include "options/options.hpp"

namespace kvzap::driver {

/// Bytes of "512M", "1.5GiB", "2 GB" or "4096": k, M, G, T and P are powers of 1000, Ki, Mi, … of
/// 1024, a B may follow. Throws Error naming `flag` for anything else and for less than 1 byte.
std::int64_t parse_bytes(const std::string& text, const std::string& flag);

/// Whether anything is to be pruned: --prune, or, without it, whether there is a policy.
bool prunes(const RunOptions& options);

/// Whether --evict-ratio is reached by a threshold that `kvzap calibrate` has stored beside the
/// surrogate: with --surrogate and without --policy.
bool looks_up_threshold(const RunOptions& options);

/// A threshold that was looked up.
struct LookedUpThreshold {
  double evict_ratio = 0;  // that was asked for
  double threshold = 0;
  std::string file;
  /// For the user: where the table was made for another run than this.
  std::vector<std::string> warnings;
};
/// For options that look_up_threshold is true of. One process alone. Throws Error, which has the
/// table or how to make one.
LookedUpThreshold look_up_threshold(const RunOptions& options);

/// The amount that the flags give, or none.
Budget budget_of(const RunOptions& options);

/// The value of a policy's parameter as parse_policy takes it.
std::string escaped_in_policy(const std::string& value);

/// The policy as parse_policy takes it, with the folder of --surrogate put in; empty without
/// --policy and --surrogate. Throws Error if the two do not go together.
std::string policy_text(const RunOptions& options);

/// The policy that is to be made for this run. None without one, if nothing is pruned, and where
/// the surrogate alone scores: kvzap with a threshold and without modifiers. Checks what options
/// and policy ask of one another; throws Error naming the flag.
std::optional<PolicySpec> policy_spec(const RunOptions& options);

/// Throws Error, naming the flag, for options of this header that are out of range or contradict
/// one another, whatever the policy.
void check_policy_options(const RunOptions& options);

/// The share of a sequence's pairs that a plan takes as evicted.
struct PlannedEviction {
  double ratio = 0;
  /// Most recent tokens that stay whatever the ratio.
  int window = 0;
  /// Nothing is evicted before the whole cache has been there.
  bool is_full_at_first = false;
};
/// `config` is of the layers in use, that of `setup` of the whole model.
PlannedEviction planned_eviction(const RunOptions& options, const std::optional<PolicySpec>& spec,
                                 const PolicySetup& setup, const ModelConfig& config,
                                 std::int64_t tokens);

/// What rows are made of, for budgets.
Budget::Model budget_model(const ModelConfig& config, DType dtype);

}  // namespace kvzap::driver
