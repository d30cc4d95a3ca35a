// The eviction policy in the flags of `kvzap run`: --policy and --surrogate, the budget and its
// moments.
#pragma once

#include <kvzap/engine/policies.hpp>
#include <kvzap/engine/pruning.hpp>
#include <optional>
#include <string>
#include <vector>

#include "options/options.hpp"

namespace kvzap::driver {

/// Names fields of a Pruning as flags: "--evict-ratio".
const PruningNames& flag_names();

/// Reads the texts of the flags into options.pruning. Settings after an @ of --policy are applied
/// on top. A second call changes nothing. Throws Error naming the flag.
void resolve_pruning(EngineOptions& options);

/// Sets the threshold that kvzap calibrate has recommended if a surrogate is given without an
/// amount and its folder has one. Reads a file. Throws Error if that is malformed.
void take_recommended(EngineOptions& options);

/// Returns how a run, or its plan, uses its pruning, for the rules of find_fault.
PruningUse pruning_use(const RunOptions& options);

/// The evictions that a plan assumes.
struct PlannedEviction {
  double ratio = 0;
  /// Most recent tokens that stay at any ratio.
  int window = 0;
  /// Whether the whole cache exists before the first eviction.
  bool is_full_at_first = false;
};
/// Plans the evictions. `config` has the layers in use; `setup` has the config of the whole model.
PlannedEviction planned_eviction(const EngineOptions& options, const PolicySetup& setup,
                                 const ModelConfig& config, std::int64_t tokens);

}  // namespace kvzap::driver
