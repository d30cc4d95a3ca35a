#include "engine/watching.hpp"

#include <kvzap/engine/policies.hpp>
#include <memory>
#include <utility>

#include "policy/row_math.hpp"

namespace kvzap::engine {
namespace {

// A policy that watches texts itself chooses the rows that stay, so it needs no budget.
const PolicyInfo& watching_info() {
  static const PolicyInfo info = [] {
    PolicyInfo made;
    made.name = "watching";
    made.has_own_budget = true;
    return made;
  }();
  return info;
}

}  // namespace

CacheOptions watching_options(const std::string& name, PolicyMaker make) {
  auto watcher = std::make_shared<PolicyChoice>();
  watcher->name = name;
  watcher->info = &watching_info();
  watcher->make = std::move(make);
  watcher->threshold = 0.5;
  CacheOptions options;
  options.pruning.mode = PruneMode::prefill;
  options.pruning.window = 1;
  options.policy = watcher;
  return options;
}

void keep_first_row(const ExecutionSpace& exec, const Policy::ScoreView& scores) {
  const auto columns = static_cast<std::int64_t>(scores.extent(1));
  Kokkos::parallel_for(
      "kvzap::watching::keep_first_row", policy::PolicyRange(exec, 0, scores.extent(0) * columns),
      KOKKOS_LAMBDA(const std::int64_t i) {
        scores(i / columns, i % columns) = i % columns == 0 ? 1.0F : 0.0F;
      });
}

}  // namespace kvzap::engine
