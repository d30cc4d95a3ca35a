// Engines that run texts for what a policy sees of them, and keep next to nothing.
#pragma once

#include <kvzap/engine/engine.hpp>
#include <kvzap/engine/policy.hpp>
#include <string>

namespace kvzap::detail {

/// For an Engine whose prefill steps a policy of this name watches: rows with a score of 0 go,
/// those with 1 stay, and so does each head's newest.
CacheOptions watching_options(const std::string& name, PolicyMaker make);

/// scores (head, row): the first row of each head stays, for a layer that keeps none would be none.
void keep_first_row(const ExecutionSpace& exec, const Policy::ScoreView& scores);

}  // namespace kvzap::detail
