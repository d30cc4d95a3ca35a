// What the flags of `kvzap run` say of its eviction policy: --policy and --surrogate, the budget
// and its moments.
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

/// Reads the texts of the flags into options.pruning; what stands behind an @ of --policy comes on
/// top. Again has no further effect. Throws Error naming the flag.
void resolve_pruning(EngineOptions& options);

/// What a run, or its plan, asks of its pruning.
PruningUse pruning_use(const RunOptions& options);

/// The share of a sequence's pairs that a plan takes as evicted.
struct PlannedEviction {
  double ratio = 0;
  /// Most recent tokens that stay whatever the ratio.
  int window = 0;
  /// Nothing is evicted before the whole cache has been there.
  bool is_full_at_first = false;
};
/// `config` is of the layers in use, that of `setup` of the whole model.
PlannedEviction planned_eviction(const EngineOptions& options,
                                 const std::optional<PolicySpec>& spec, const PolicySetup& setup,
                                 const ModelConfig& config, std::int64_t tokens);

}  // namespace kvzap::driver
