#include "commands/run/chat.hpp"

#include <algorithm>
#include <kvzap/engine/policies.hpp>

#include "commands/run/chat_loop.hpp"
#include "commands/run/recorded_options.hpp"
#include "commands/run/resumed_run.hpp"
#include "commands/run/run.hpp"
#include "commands/support/policy_setup.hpp"
#include "options/policy_options.hpp"

namespace kvzap::driver {
namespace {

/// Returns whether a threshold judges every pair as it leaves the window, including pairs of
/// messages and answers.
bool judges_what_is_said(const Pruning& pruning) {
  if (!pruning.prunes() || !pruning.has_policy() || pruning.decode.every > 0) return false;
  const PolicySpec spec = pruning.spec(flag_names());
  return spec.info->judges_tokens && !spec.info->has_own_budget && !pruning.has_budget(spec);
}

}  // namespace

void declare_chat(CLI::App& app, RunOptions& options) {
  options.new_tokens = 4096;  // enough for any answer
  declare_model(app, options);
  declare_conversation(app, options, {"context"});
  declare_resume(app, options);
  const auto describe = [&](const char* name, const char* text) {
    app.get_option(name)->description(text);
  };
  describe("--prune-after",
           "apply a budget after the context; kvzap run can also apply it after each question");
  describe("--prompt", "context before the first message");
  describe("--file", "file with the context, as UTF-8 text. May be repeated");
  describe("--separator",
           "text between two files of -f, unless white space is there; default: a blank line");
  describe(
      "--system",
      "system message before the context; replaces that of the chat template, also after /reset");
  describe("--random-weights", "generate random weights from this seed");
  describe("--evict-ratio",
           "budget: evicted share of all pairs of the context, in [0, 1); with --surrogate and "
           "without --policy: the threshold that kvzap calibrate has stored for this ratio");
  describe("--n-predict",
           "largest number of tokens of an answer; -1: until a stop token or the "
           "end of the context");
  describe(
      "--prune",
      "tokens to judge: none, prefill (the context of -p or -f) or always (with a threshold: also "
      "messages and answers); default: always with a threshold, otherwise prefill with a "
      "policy, none without");
  describe("--seed", "seed of the sampler, the same for each answer; -1: a random seed");
  describe(
      "--resume",
      "continue this snapshot of /save or of kvzap run with its options, as /load does within a "
      "conversation");
  describe("--quiet", "print no prompts, no progress and no report on standard error");
  app.add_flag(
         "--no-history", options.no_history,
         "neither read nor write the history of typed lines ($XDG_STATE_HOME/kvzap/history or "
         "~/.local/state/kvzap/history)")
      ->group("Output");
}

void settle_chat(RunOptions& options, bool resumes) {
  const bool reads_input =
      std::find(options.files.begin(), options.files.end(), "-") != options.files.end();
  require(!reads_input, "-f - is standard input, which has the conversation: name a file");
  Pruning& pruning = options.pruning;
  if (!pruning.mode && judges_what_is_said(pruning)) pruning.mode = PruneMode::always;
  // Without a context, a budget would prune only the few tokens of the chat template.
  const bool has_context = options.prompt || !options.files.empty() || resumes;
  require(!pruning.prunes() || pruning.mode == PruneMode::always || pruning.decode.every > 0 ||
              has_context,
          "a budget is met at the end of a context, and there is none: give one with -p or -f, a "
          "--threshold instead of the budget, or --decode-every N");
}

int chat(CLI::App& app, RunOptions& options, const Communicator& comm, const std::string& version,
         const std::string& revision) {
  auto resumed = open_resumed(app, options, comm);
  agree_on_usage(comm, [&] { settle_chat(options, resumed != nullptr); });
  resolve_window(options.pruning, comm, comm.is_root() && !options.quiet);
  // The context is the beginning of the chat template.
  if (!options.prompt && options.files.empty() && !resumed) options.prompt = "";
  const RunDescription description{version, revision, recorded_options(app, options),
                                   options_in_force(app, options)};
  return run(options, description, std::move(resumed), comm,
             [&](OpenRun& open) { ChatLoop(open, app, description.recorded)(); });
}

}  // namespace kvzap::driver
