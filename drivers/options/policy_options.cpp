#include "options/policy_options.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <kvzap/engine/thresholds.hpp>
#include <system_error>
#include <vector>

#include "files/decimal.hpp"
#include "model/cache_layers.hpp"

namespace kvzap::driver {
namespace {

/// Returns the budget with the changes that the policy and its modifiers make. Loads the policy, so
/// that a plan refuses what a run refuses.
Budget planned_budget(const Pruning& pruning, const PolicySpec& spec, const PolicySetup& setup) {
  const Pruning::Amount& amount = pruning.amount;
  const bool has_amount =
      amount.has_budget() || amount.has_threshold() || spec.has_amount_of_modifier();
  if (!pruning.prunes() || pruning.looks_up_threshold() || !has_amount) return pruning.budget();
  return load(pruning, setup, {}, flag_names()).policy->budget;
}

}  // namespace

const PruningNames& flag_names() {
  static const PruningNames names = [](PruningField field) {
    if (field == PruningField::plan) return std::string("--dry-run");
    std::string flag = "--" + std::string(name_of(field));
    std::replace(flag.begin(), flag.end(), '_', '-');
    return flag;
  };
  return names;
}

void resolve_pruning(EngineOptions& o) {
  const PruningTexts& texts = o.pruning_texts;
  Pruning& pruning = o.pruning;
  if (texts.threshold == "auto") {
    pruning.recommended_threshold();
  } else if (!texts.threshold.empty()) {
    double number = 0;
    files::read_real(texts.threshold, number);  // has been checked
    pruning.threshold(number);
  }
  if (!texts.kv_budget.empty()) pruning.kv_bytes(parse_bytes(texts.kv_budget, "--kv-budget"));
  for (const PruneMode mode : {PruneMode::none, PruneMode::prefill, PruneMode::always}) {
    if (texts.prune == name_of(mode)) pruning.mode = mode;
  }
  if (texts.prune_after == name_of(PruneMoment::question)) pruning.moment = PruneMoment::question;
  if (texts.prefill == name_of(PrefillMode::sparse)) pruning.prefill = PrefillMode::sparse;
  if (!texts.policy.empty()) {
    try {
      pruning = Pruning::parse(texts.policy, pruning);
    } catch (const Error& error) {
      throw Error(fmt::format("--policy {}", error.what()));
    }
  }
}

void take_recommended(EngineOptions& o) {
  Pruning& pruning = o.pruning;
  const Pruning::Amount& amount = pruning.amount;
  if (!pruning.is_plain_kvzap() || !pruning.prunes()) return;
  if (amount.has_threshold() || amount.has_budget() || pruning.moment == PruneMoment::question) {
    return;
  }
  const auto file = ThresholdTable::file_in(pruning.plain_surrogate());
  std::error_code ignored;
  if (!std::filesystem::exists(file, ignored) || !ThresholdTable::load(file).recommended) return;
  pruning.recommended_threshold();
  o.takes_recommended = true;
}

PruningUse pruning_use(const RunOptions& o) {
  PruningUse use;
  use.plans = o.dry_run;
  use.has_question = !o.questions.empty() || !o.resume.empty();
  return use;
}

PlannedEviction planned_eviction(const EngineOptions& o, const PolicySetup& setup,
                                 const ModelConfig& config, std::int64_t tokens) {
  const bool has_policy = o.pruning.has_policy();
  const PolicySpec spec = has_policy ? o.pruning.spec(flag_names()) : PolicySpec();
  const Budget budget = has_policy ? planned_budget(o.pruning, spec, setup) : o.pruning.budget();
  const bool is_plain_ratio = budget.amount == Budget::Amount::evict_ratio &&
                              (!has_policy || o.pruning.looks_up_threshold());
  if (!budget.has_amount()) return {0, o.pruning.window, !o.pruning.prunes()};
  if (is_plain_ratio || tokens == 0) return {budget.evict_ratio, o.pruning.window, false};
  // A budget may also evict rows of the window.
  model::require_full_layers(config);
  const Budget::Model model =
      budget_model(config, size_of(setup.dtype), page_format(o.kv_type, o.dtype));
  std::int64_t rows = 0;
  for (int place = 0; place < model.layers; ++place) {
    rows += budget.rows_per_head(model, model.layer_at(place), tokens);
  }
  rows = (rows + model.layers - 1) / model.layers;  // rows per layer on average
  const auto evicted = static_cast<double>(tokens - rows);
  double ratio = evicted / static_cast<double>(tokens);
  // The plan rounds down to whole rows, and the quotient may be slightly too small.
  while (std::floor(ratio * static_cast<double>(tokens)) < evicted)
    ratio = std::nextafter(ratio, 1.0);
  const bool waits_for_all = has_policy && o.pruning.prefill == PrefillMode::dense &&
                             (spec.pools_layers() || spec.info->repeats_context);
  return {ratio, 0, !o.pruning.prunes() || waits_for_all};
}

}  // namespace kvzap::driver
