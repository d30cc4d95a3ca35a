#include "engine/check_options.hpp"

#include <fmt/format.h>

#include <cmath>

#include "engine/sequence_pruning.hpp"

namespace kvzap::detail {
namespace {

void check_policy(const CacheOptions& options) {
  const PolicyChoice& choice = *options.policy;
  const auto refuse = [&](const std::string& what) {
    throw Error(fmt::format("--policy {}: {}", choice.name, what));
  };
  if (options.decode_every < 0 || options.decode_keep < 0) {
    refuse("--decode-every and --decode-keep are 0 or more");
  }
  if (!(options.decode_evict_ratio >= 0 && options.decode_evict_ratio < 1)) {
    refuse(fmt::format("--decode-evict-ratio is {}; expected a number in [0, 1)",
                       options.decode_evict_ratio));
  }
  if (choice.info->repeats_context) {
    if (options.prune_after == PruneMoment::question) {
      refuse("the model repeats the context before any question: --prune-after context");
    }
    if (options.prune == PruneMode::always) {
      refuse("the model repeats the context alone: --prune prefill");
    }
    if (choice.repeat.first.empty() || choice.repeat.later.empty()) {
      refuse("nothing asks the model to repeat the context (PolicyChoice::repeat is empty)");
    }
  }
  if (options.decode_every > 0 && !choice.info->scores_again) {
    refuse("--decode-every needs a policy that can score again while the model generates");
  }
  if (options.decode_every > 0 && choice.info->has_own_budget) {
    refuse("--decode-every needs a policy without a budget of its own");
  }
  if (options.prune == PruneMode::always && options.decode_every == 0) {
    if (chooses_rows(choice)) {
      refuse(
          "--prune always judges pairs by a threshold as they leave the window; a budget is kept "
          "to while the model generates with --decode-every");
    }
    if (!choice.info->judges_tokens) {
      refuse(
          "--prune always needs a policy that judges a new token from its own key, value and "
          "hidden state; cut the cache every n tokens with --decode-every instead");
    }
  }
  if (options.prune == PruneMode::always && options.decode_every > 0 && !chooses_rows(choice)) {
    // Which rows a cut moves out of the ring, unjudged, depends on the heads of the rank.
    refuse(
        "--prune always judges new tokens by the threshold, --decode-every cuts by rank: one of "
        "the two (--prune prefill leaves new tokens to --decode-every)");
  }
  if (choice.info->needs_question && options.prune_after != PruneMoment::question) {
    refuse("it scores by the question: --prune-after question");
  }
  if (options.prefill == PrefillMode::sparse) {
    if (!choice.info->scores_again || choice.info->has_own_budget) {
      refuse("--prefill sparse needs a policy that can score again after each chunk");
    }
  }
}

}  // namespace

void check_rope(const CacheOptions& options, const ModelConfig& config) {
  if (!config.rope_depends_on_length() || !uses_policy(options)) return;
  const PolicyChoice& choice = *options.policy;
  const std::string what = fmt::format(
      "depend on the length of the text with RoPE scaling of type {}; expected a model with "
      "another type, or another policy",
      name_of(config.rope_scaling->type));
  if (choice.rerotate) {
    throw Error(fmt::format("--policy {}: it turns keys to new positions by frequencies, which {}",
                            choice.name, what));
  }
  // (What is still to look at texts is refused when it does so.)
  if (!choice.calibration && choice.make()->needs().frequencies) {
    throw Error(fmt::format("--policy {}: it turns queries or keys back by frequencies, which {}",
                            choice.name, what));
  }
}

void check_options(const CacheOptions& options, bool has_scorer) {
  if (options.window < 1) {
    throw Error(fmt::format("--window is {}; expected at least 1", options.window));
  }
  if (options.sink < 0) throw Error(fmt::format("--sink is {}; expected 0 or more", options.sink));
  if (options.chunk < 1)
    throw Error(fmt::format("--chunk is {}; expected at least 1", options.chunk));
  if (options.page_rows < 1) {
    throw Error(fmt::format("--page-rows is {}; expected at least 1", options.page_rows));
  }
  if (options.prune != PruneMode::none) {
    if (std::isnan(options.threshold)) {
      throw Error("--threshold is NaN; expected a number (no score is below NaN)");
    }
    if (options.policy && options.policy->make && options.prefill == PrefillMode::sparse &&
        options.prune_after == PruneMoment::question) {
      throw Error(
          fmt::format("--policy {}: --prune-after question runs context and question as one step: "
                      "--prefill dense",
                      options.policy->name));
    }
    if (uses_policy(options)) {
      check_policy(options);
    } else if (!has_scorer) {
      throw Error(
          fmt::format("--prune {} needs a surrogate (--surrogate DIR)", name_of(options.prune)));
    }
  }
}

}  // namespace kvzap::detail
