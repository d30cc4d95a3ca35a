// The pruning of a request: the server's policy, with the request's own amount and mode.
#include <fmt/format.h>

#include <kvzap/engine/thresholds.hpp>
#include <kvzap/server/protocol.hpp>

namespace kvzap::server {
namespace {

/// Returns the name that clients use for a field of a Pruning.
std::string request_name(PruningField field) {
  const bool is_of_request = field == PruningField::prune || field == PruningField::threshold ||
                             field == PruningField::evict_ratio;
  return (is_of_request ? "kvzap." : "") + std::string(name_of(field));
}

void set_threshold(Pruning& pruning, double threshold, const LoadedPruning& standard) {
  if (standard.chooses_rows()) {
    throw BadRequest("kvzap.threshold",
                     "the server prunes to a budget; expected kvzap.evict_ratio");
  }
  pruning.amount = {};
  pruning.threshold(threshold);
}

void set_evict_ratio(Pruning& pruning, double ratio, const LoadedPruning& standard) {
  const char* const field = "kvzap.evict_ratio";
  pruning.amount = {};
  pruning.evict_ratio(ratio);
  if (pruning.looks_up_threshold()) {
    try {
      const double threshold = look_up_threshold(pruning).threshold;
      pruning.amount = {};
      pruning.threshold(threshold);
    } catch (const Error&) {
      throw BadRequest(field, "the server has no calibrated threshold for this evict ratio");
    }
  } else if (standard.policy->budget.amount != Budget::Amount::evict_ratio) {
    throw BadRequest(field, "the server does not prune to an evict ratio");
  } else if (pruning.policy.find('+') != std::string::npos) {
    throw BadRequest(
        field, fmt::format("policy {} has modifiers, so a request cannot change its evict ratio",
                           standard.policy->name));
  }
}

}  // namespace

Pruning request_pruning(const PruneWish& wish, const LoadedPruning& standard) {
  Pruning pruning = standard.pruning;
  pruning.mode = wish.prune.value_or(standard.mode());
  const bool has_amount = wish.threshold || wish.evict_ratio;
  if (!standard.policy) {
    if (has_amount || pruning.prunes()) {
      throw BadRequest("kvzap", "the server was started without a surrogate or policy");
    }
    return pruning;
  }
  if (!pruning.prunes()) {
    if (has_amount) {
      throw BadRequest("kvzap", "kvzap has a threshold or an evict_ratio, but prune is none");
    }
    return pruning;
  }
  if (wish.threshold) set_threshold(pruning, *wish.threshold, standard);
  if (wish.evict_ratio) set_evict_ratio(pruning, *wish.evict_ratio, standard);
  const auto fault = find_fault(standard.with_amount_of(pruning), true, request_name);
  if (fault) throw BadRequest(request_name(fault->fields.front()), fault->text);
  return pruning;
}

}  // namespace kvzap::server
