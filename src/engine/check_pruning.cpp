#include "engine/check_pruning.hpp"

#include <fmt/format.h>

#include "model/cache_layers.hpp"

namespace kvzap::engine {
namespace {

void check_rope(const PolicyChoice& choice, const ModelConfig& config) {
  if (!config.rope_depends_on_length() && !config.rotates_before_norms) return;
  // A policy that still has to learn from texts is checked when it reads them.
  const bool needs_frequencies =
      choice.rerotate || (!choice.learner && choice.make()->needs().frequencies);
  if (!needs_frequencies) return;
  const std::string reason =
      config.rotates_before_norms
          ? "but norms of queries and keys follow RoPE; expected a model with norms before RoPE"
          : fmt::format(
                "which depend on the length of the sequence with RoPE scaling of type {}; "
                "expected a model with another type",
                name_of(config.rope_scaling->type));
  throw Error(fmt::format(
      "policy {}: it turns {} to {} positions by RoPE frequencies, {}, or another policy",
      choice.name, choice.rerotate ? "keys" : "queries or keys", choice.rerotate ? "new" : "other",
      reason));
}

void check_layers(const LoadedPruning& pruning, const ModelConfig& config) {
  if (!pruning.prunes()) return;
  model::require_full_layers(config);
  if (config.embeds_positions && pruning.policy && pruning.policy->rerotate) {
    throw Error(fmt::format(
        "policy {}: it gives rows new positions; expected a model without learned positions",
        pruning.policy->name));
  }
  const std::int64_t full = model::full_layers(config);
  if (full < config.num_hidden_layers && pruning.policy && pruning.policy->rerotate) {
    throw Error(fmt::format(
        "policy {}: it gives the rows of all layers new positions; expected a model whose layers "
        "all have attention to all tokens, which {} of {} lack",
        pruning.policy->name, config.num_hidden_layers - full, config.num_hidden_layers));
  }
}

}  // namespace

void check_for_engine(const LoadedPruning& pruning, bool has_scorer, const ModelConfig& config) {
  check(pruning, has_scorer);
  check_layers(pruning, config);
  if (!pruning.prunes() || !pruning.policy) return;
  const PolicyChoice& choice = *pruning.policy;
  if (choice.info->repeats_context && !choice.repeat.is_bare &&
      (choice.repeat.first.empty() || choice.repeat.later.empty())) {
    throw Error(fmt::format(
        "policy {}: nothing asks the model to repeat the context (PolicyChoice::repeat is empty)",
        choice.name));
  }
  check_rope(choice, config);
}

}  // namespace kvzap::engine
