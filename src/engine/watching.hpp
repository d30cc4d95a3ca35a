// Engines that run texts for a policy that observes them, and keep almost no rows.
#pragma once

#include <kvzap/engine/engine.hpp>
#include <kvzap/engine/policy.hpp>
#include <string>

namespace kvzap::engine {

/// Returns options for an Engine whose prefill steps are watched by a policy of this name. Rows
/// with a score of 0 are evicted. Rows with 1 and each head's newest row stay.
CacheOptions watching_options(const std::string& name, PolicyMaker make);

/// Sets scores (head, row) such that the first row of each head stays, because a layer must keep a
/// row.
void keep_first_row(const ExecutionSpace& exec, const Policy::ScoreView& scores);

}  // namespace kvzap::engine
