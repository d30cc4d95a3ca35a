// The threshold that `kvzap calibrate --evaluation` recommends.
#pragma once

#include <kvzap/engine/thresholds.hpp>
#include <string>

namespace kvzap::driver {

/// Returns the threshold of a surrogate with the largest evict ratio of those whose accuracy
/// interval contains the full cache's accuracy. `evaluation`: folder of `kvzap eval` with the
/// policies none and kvzap at thresholds. Throws Error if the evaluation is unfinished, lacks one
/// of these policies or used another surrogate, and if no threshold qualifies.
ThresholdTable::Recommendation recommend_threshold(const std::string& evaluation,
                                                   const std::string& surrogate);

}  // namespace kvzap::driver
