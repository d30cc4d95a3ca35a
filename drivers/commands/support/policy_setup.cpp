#include "commands/support/policy_setup.hpp"

#include <fmt/format.h>

#include <filesystem>

#include "console/console.hpp"
#include "files/counted.hpp"
#include "options/policy_options.hpp"
#include "session/model_setup.hpp"
#include "session/prompt.hpp"

namespace kvzap::driver {
namespace {

/// Throws UsageError for --evict-ratio outside of the surrogate's table of thresholds. Errors in
/// the table itself are left to kvzap::resolve_threshold.
void check_ratio(const Pruning& pruning) {
  if (!pruning.looks_up_threshold() || !pruning.prunes() || !pruning.amount.evict_ratio) return;
  ThresholdTable table;
  const std::filesystem::path file = ThresholdTable::file_in(pruning.plain_surrogate());
  try {
    table = ThresholdTable::load(file);
  } catch (const Error&) {
    return;
  }
  try {
    table.nearest(pruning.window).threshold(*pruning.amount.evict_ratio);
  } catch (const Error& error) {
    throw UsageError(fmt::format("--evict-ratio: {}: {}", file.string(), error.what()));
  }
}

}  // namespace

std::optional<RepeatPrompt> share_repeat_prompt(const EngineOptions& options,
                                                const ModelSetup& setup, const Tokenizer* tokenizer,
                                                const std::vector<TokenId>& context,
                                                const Communicator& comm) {
  using session::PromptSource;
  const PromptSource source = options.token_ids ? PromptSource::token_ids
                              : options.raw     ? PromptSource::text
                                                : PromptSource::chat_template;
  return session::share_repeat_prompt(options.pruning, setup, source, tokenizer, context, comm,
                                      flag_names());
}

void check_budget(const EngineOptions& options, const PolicyChoice& policy,
                  const ModelConfig& config, std::int64_t tokens, const PageFormat& format) {
  try {
    kvzap::check_budget(policy.budget, config, dtype_from_name(options.dtype), tokens, format);
  } catch (const Error& error) {
    const bool is_size = policy.budget.amount == Budget::Amount::bytes;
    throw UsageError((is_size ? "--kv-budget: " : "") + std::string(error.what()));
  }
}

Texts load_policy_texts(const EngineOptions& options, const PolicyChoice* choice,
                        const ModelSetup& setup, const Tokenizer* tokenizer,
                        const Communicator& comm) {
  Texts texts = session::read_policy_texts(choice, setup, tokenizer, comm);
  if (texts.empty() || options.quiet || !comm.is_root()) return texts;
  const std::string file = choice->learner->texts();
  for (std::size_t i = 0; i < texts.size(); ++i) {
    if (static_cast<std::int64_t>(texts[i].size()) <= setup.config.longest_context()) continue;
    say("kvzap: warning: {}: text {} has {}, more than the model's {} = {}\n", file, i + 1,
        files::counted(texts[i].size(), "token"), name_of_longest(setup.config),
        setup.config.longest_context());
  }
  return texts;
}

LoadedPruning load_policy(const EngineOptions& options, const std::optional<RepeatPrompt>& repeat,
                          const ModelSetup& setup, const Communicator& comm) {
  return session::load_policy(options.pruning, setup, dtype_from_name(options.dtype), comm, repeat,
                              flag_names());
}

void resolve_window(Pruning& pruning, const Communicator& comm, bool talks) {
  if (!pruning.auto_window) return;
  kvzap::resolve_window(pruning, comm, flag_names());
  if (talks) say("kvzap: --window auto: {}\n", files::counted(pruning.window, "token"));
}

std::optional<LookedUpThreshold> resolve_threshold(EngineOptions& options, bool talks,
                                                   const Communicator& comm) {
  resolve_window(options.pruning, comm, talks);
  agree_on_usage(comm, [&] { check_ratio(options.pruning); });
  std::optional<bool> chat_template;
  if (!options.token_ids) chat_template = !options.raw;
  auto found = kvzap::resolve_threshold(options.pruning, comm, chat_template, flag_names());
  if (!found || !talks) return found;
  if (options.takes_recommended) {
    say("kvzap: --threshold auto: {:.3f}, which {} recommends (evict ratio {:.2f} in its "
        "evaluation)\n",
        found->threshold, found->file, found->evict_ratio);
  }
  for (const auto& warning : found->warnings) say("kvzap: warning: {}\n", warning);
  return found;
}

}  // namespace kvzap::driver
