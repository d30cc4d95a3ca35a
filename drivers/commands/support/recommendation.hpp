// The threshold and window that `kvzap calibrate --evaluation` recommends.
#pragma once

#include <kvzap/engine/thresholds.hpp>
#include <string>
#include <vector>

namespace kvzap::driver {

/// Returns the threshold of a surrogate, and its window, with the largest evict ratio of those
/// whose accuracy interval contains the full cache's accuracy in the same evaluation.
/// `evaluations`: folders of `kvzap eval` with the policies none and kvzap at thresholds, all on
/// the same prompts, each with a window of its own. Throws Error if an evaluation is unfinished,
/// lacks one of these policies, used another surrogate or other prompts than the first, and if no
/// threshold qualifies.
ThresholdTable::Recommendation recommend_threshold(const std::vector<std::string>& evaluations,
                                                   const std::string& surrogate);

}  // namespace kvzap::driver
