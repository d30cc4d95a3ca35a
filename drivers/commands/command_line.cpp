#include "commands/command_line.hpp"

#include <fmt/format.h>

#include <kvzap/config.hpp>

#include "commands/policies_command.hpp"
#include "engine/build_info.hpp"
#include "options/help.hpp"
#include "options/strict_values.hpp"

namespace kvzap::driver {
namespace {

std::string version_text() {
  std::string text = fmt::format("kvzap {}\n{:<16} {}", version, "revision", revision);
  for (const auto& [name, what] : engine::build_info()) {
    text += fmt::format("\n{:<16} {}", name, what);
  }
  return text;
}

}  // namespace

const char* const version = KVZAP_VERSION;
const char* const revision = KVZAP_REVISION;

// The locale of streams is left alone if it is classic: std::locale::global would also set that of
// C functions in the whole process.
ClassicLocale::ClassicLocale() {
  if (m_streams != std::locale::classic()) std::locale::global(std::locale::classic());
}

ClassicLocale::~ClassicLocale() {
  if (m_streams != std::locale::classic()) std::locale::global(m_streams);
}

CommandLine::CommandLine()
    : app("kvzap prunes the KV cache of a language model while it runs, and frees the memory.\n"
          "Flags that begin with --kokkos- are passed to Kokkos.") {
  // Set first, because subcommands inherit it.
  app.formatter(std::make_shared<HelpFormatter>());
  app.set_help_flag("-h,--help", "print this and exit");
  app.set_version_flag("-V,--version", version_text,
                       "print the version and the build configuration, and exit");
  app.require_subcommand(1);
  app.name("kvzap");
  run = app.add_subcommand("run", "answer questions about a long prompt with a pruned cache");
  declare(*run, run_options);
  chat = app.add_subcommand("chat", "talk with a model in the terminal, with one pruned cache");
  declare_chat(*chat, chat_options);
  serve = app.add_subcommand("serve", "serve many users over HTTP, with OpenAI's protocol");
  declare_serve(*serve, serve_options);
  bench = app.add_subcommand(
      "bench", "measure prefill and decode at given context lengths and evict ratios");
  declare(*bench, bench_options);
  collect = app.add_subcommand(
      "collect",
      "collect training data for surrogates: hidden states and the oracle's scores of texts");
  declare(*collect, collect_options);
  train = app.add_subcommand("train", "train a surrogate on the data of kvzap collect");
  declare(*train, train_options);
  calibrate = app.add_subcommand(
      "calibrate",
      "find the thresholds with which a surrogate reaches given evict ratios on texts");
  declare(*calibrate, calibrate_options);
  evaluate = app.add_subcommand(
      "eval", "measure accuracy against evict ratio on prompts with known answers");
  declare(*evaluate, eval_options);
  make_tasks = app.add_subcommand("make-tasks", "write prompts with known answers, of any length");
  declare(*make_tasks, make_tasks_options);
  leaderboard = app.add_subcommand("leaderboard", "compare evaluations on one page");
  declare(*leaderboard, leaderboard_options);
  convert =
      app.add_subcommand("convert", "write a GGUF file of a folder, or a folder of a GGUF file");
  declare(*convert, convert_options);
  quantize = app.add_subcommand("quantize", "write a GGUF file with quantised weights");
  declare(*quantize, quantize_options);
  inspect = app.add_subcommand(
      "inspect", "show a snapshot's contents and the kept parts of its text, or a model");
  declare(*inspect, inspect_options);
  diff = app.add_subcommand("diff", "show the differences between two snapshots of one text");
  declare(*diff, diff_options);
  policies =
      app.add_subcommand("policies", "list the eviction policies of a run, with their parameters");
  policies
      ->add_option("name", policy,
                   "show this policy or modifier in detail; default: list all of them")
      ->type_name("POLICY")
      ->check(known_policy);
  policies->add_flag("--json", policies_as_json, "print JSON");
  models = app.add_subcommand(
      "models", "list the supported architectures, files, weights, tokenizers and chat templates");
  models->add_flag("--json", models_as_json, "print JSON");
  completion = app.add_subcommand("completion", "print the completion script of a shell");
  completion
      ->add_option("shell", shell,
                   "for bash: source <(kvzap completion bash), which also completes after mpirun; "
                   "for fish: kvzap completion fish | source")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
  manual = app.add_subcommand("manual", "print the man page (kvzap manual | man -l -)");
  make_strict(app);
  // Set last, because subcommands would inherit it.
  app.footer("kvzap help COMMAND, or kvzap COMMAND --help, lists the options of a command.");
}

}  // namespace kvzap::driver
