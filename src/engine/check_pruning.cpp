#include "engine/check_pruning.hpp"

#include <fmt/format.h>

namespace kvzap::engine {
namespace {

void check_rope(const PolicyChoice& choice, const ModelConfig& config) {
  if (!config.rope_depends_on_length()) return;
  // A policy that still has to learn from texts is checked when it reads them.
  const bool needs_frequencies =
      choice.rerotate || (!choice.learner && choice.make()->needs().frequencies);
  if (!needs_frequencies) return;
  throw Error(
      fmt::format("policy {}: it turns {} to {} positions by RoPE frequencies, which depend on the "
                  "length of the sequence with RoPE scaling of type {}; expected a model with "
                  "another type, or another policy",
                  choice.name, choice.rerotate ? "keys" : "queries or keys",
                  choice.rerotate ? "new" : "other", name_of(config.rope_scaling->type)));
}

}  // namespace

void check_for_engine(const LoadedPruning& pruning, bool has_scorer, const ModelConfig& config) {
  check(pruning, has_scorer);
  if (!pruning.prunes() || !pruning.policy) return;
  const PolicyChoice& choice = *pruning.policy;
  if (choice.info->repeats_context &&
      (choice.repeat.first.empty() || choice.repeat.later.empty())) {
    throw Error(fmt::format(
        "policy {}: nothing asks the model to repeat the context (PolicyChoice::repeat is empty)",
        choice.name));
  }
  check_rope(choice, config);
}

}  // namespace kvzap::engine
