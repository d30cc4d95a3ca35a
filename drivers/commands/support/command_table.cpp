#include "commands/support/command_table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "commands/lab/bench.hpp"
#include "commands/run/chat.hpp"
#include "commands/run/recorded_options.hpp"
#include "commands/run/resumed_run.hpp"
#include "commands/run/run.hpp"
#include "commands/support/command_line.hpp"
#include "commands/support/documents.hpp"
#include "commands/support/models_command.hpp"
#include "commands/support/policies_command.hpp"
#include "commands/support/policy_setup.hpp"
#include "commands/support/version.hpp"
#include "files/json_file.hpp"
#include "options/policy_options.hpp"
#include "options/usage.hpp"

namespace kvzap::driver {
namespace {

/// Returns whether a run takes its options from a snapshot, which open_resumed reads.
bool resumes(const RunOptions& options) {
  return !options.resume.empty() && options.resume != "-" && !options.dry_run;
}

void check_run(RunOptions options) {
  if (resumes(options)) return;
  as_usage([&] { resolve_pruning(options); });
  if (!options.dry_run) take_recommended(options);  // reads a file
  as_usage([&] { validate(options, true); });
}

void check_chat(RunOptions options) {
  if (resumes(options)) return;
  as_usage([&] { resolve_pruning(options); });
  take_recommended(options);
  as_usage([&] {
    settle_chat(options, false);
    validate(options, false);
  });
}

void check_serve(ServeOptions options) {
  as_usage([&] { resolve_pruning(options); });
  take_recommended(options);
  as_usage([&] { check_options(options); });
}

void check_prefix(PrefixOptions options, const CLI::App& app) {
  if (options.action == "add") {
    as_usage([&] { resolve_pruning(options); });
    take_recommended(options);
  }
  as_usage([&] { check_options(options, app); });
}

void check_train(const CommandLine& line) {
  check_options(line.train_options);
  // The options of one kind of surrogate must not be given for the other.
  const std::string& kind = line.train_options.kind;
  for (const char* flag : {"--hidden", "--epochs", "--lr", "--batch", "--ridge"}) {
    const std::string own = flag == std::string("--ridge") ? "linear" : "mlp";
    require(kind == own || line.given().count(flag) == 0,
            fmt::format("{} has no effect with {}; it is for {}", flag, kind, own));
  }
}

int run_run(CommandLine& line, const Communicator& comm) {
  RunOptions& options = line.run_options;
  auto resumed = open_resumed(line.given(), options, comm);
  resolve_window(options.pruning, comm, comm.is_root() && !options.quiet);
  const RunDescription description{version, revision, recorded_options(line.given(), options),
                                   options_in_force(line.given(), options)};
  return run(options, description, std::move(resumed), comm);
}

void declare_policies(CLI::App& app, CommandLine& line) {
  app.add_option("name", line.policy,
                 "show this policy or modifier in detail; default: list all of them")
      ->type_name("POLICY")
      ->check(known_policy);
  app.add_flag("--json", line.policies_as_json, "print JSON");
}

std::string policies_document(const CommandLine& line) {
  return line.policies_as_json ? files::json_lines(policies_json(line.policy))
                               : policies_text(line.policy);
}

void declare_completion(CLI::App& app, CommandLine& line) {
  app.add_option("shell", line.shell,
                 "for bash: source <(kvzap completion bash), which also completes after mpirun; "
                 "for fish: kvzap completion fish | source")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
}

std::string completion_document(const CommandLine& line) {
  if (line.shell == "zsh") return zsh_completion(line.app);
  if (line.shell == "fish") return fish_completion(line.app);
  return bash_completion(line.app);
}

/// The functions of a command whose options are a member of the command line.
template <auto options>
void declare_options(CLI::App& app, CommandLine& line) {
  declare(app, line.*options);
}
template <auto options>
void check_usage(const CommandLine& line) {
  as_usage([&] { check_options(line.*options); });
}

using Line = CommandLine;
using Comm = Communicator;

const Command table[] = {
    {"run", "answer questions about a long prompt with a pruned cache",
     declare_options<&Line::run_options>, [](const Line& line) { check_run(line.run_options); },
     run_run, nullptr},
    {"chat", "talk with a model in the terminal, with one pruned cache",
     [](CLI::App& app, Line& line) { declare_chat(app, line.chat_options); },
     [](const Line& line) { check_chat(line.chat_options); },
     [](Line& line, const Comm& comm) {
       return chat(line.given(), line.chat_options, comm, version, revision);
     },
     nullptr},
    {"serve", "serve many users over HTTP, with OpenAI's protocol",
     [](CLI::App& app, Line& line) { declare_serve(app, line.serve_options); },
     [](const Line& line) { check_serve(line.serve_options); },
     [](Line& line, const Comm& comm) {
       return serve(line.serve_options, comm, version, revision);
     },
     nullptr},
    {"prefix", "list, add or remove the stored states of documents that a server finds again",
     declare_options<&Line::prefix_options>,
     [](const Line& line) { check_prefix(line.prefix_options, line.given()); },
     [](Line& line, const Comm& comm) { return prefix(line.prefix_options, comm); }, nullptr},
    {"bench", "measure prefill and decode at given context lengths and evict ratios",
     declare_options<&Line::bench_options>,
     [](const Line& line) { as_usage([&] { tests_of(line.bench_options); }); },
     [](Line& line, const Comm& comm) {
       return bench(line.bench_options, comm, version, revision);
     },
     nullptr},
    {"collect",
     "collect training data for surrogates: hidden states and the oracle's scores of texts",
     declare_options<&Line::collect_options>, check_usage<&Line::collect_options>,
     [](Line& line, const Comm& comm) { return collect(line.collect_options, comm, version); },
     nullptr},
    {"train", "train a surrogate on the data of kvzap collect",
     declare_options<&Line::train_options>,
     [](const Line& line) { as_usage([&] { check_train(line); }); },
     [](Line& line, const Comm& comm) { return train(line.train_options, comm, version); },
     nullptr},
    {"calibrate", "find the thresholds with which a surrogate reaches given evict ratios on texts",
     declare_options<&Line::calibrate_options>, check_usage<&Line::calibrate_options>,
     [](Line& line, const Comm& comm) {
       calibrate(line.calibrate_options, comm, version);
       return 0;
     },
     nullptr},
    {"eval", "measure accuracy against evict ratio on prompts with known answers",
     declare_options<&Line::eval_options>, check_usage<&Line::eval_options>,
     [](Line& line, const Comm& comm) { return evaluate(line.eval_options, comm, version); },
     nullptr},
    {"make-tasks", "write prompts with known answers, of any length",
     declare_options<&Line::make_tasks_options>, check_usage<&Line::make_tasks_options>,
     [](Line& line, const Comm& comm) { return make_tasks(line.make_tasks_options, comm); },
     nullptr},
    {"leaderboard", "compare evaluations on one page", declare_options<&Line::leaderboard_options>,
     check_usage<&Line::leaderboard_options>,
     [](Line& line, const Comm& comm) {
       leaderboard(line.leaderboard_options, comm, version);
       return 0;
     },
     nullptr},
    {"convert", "write a GGUF file of a folder, or a folder of a GGUF file",
     declare_options<&Line::convert_options>, check_usage<&Line::convert_options>,
     [](Line& line, const Comm& comm) { return convert(line.convert_options, comm); }, nullptr},
    {"quantize", "write a GGUF file with quantised weights",
     declare_options<&Line::quantize_options>, check_usage<&Line::quantize_options>,
     [](Line& line, const Comm& comm) { return quantize(line.quantize_options, comm); }, nullptr},
    {"inspect", "show a snapshot's contents and the kept parts of its text, or a model",
     declare_options<&Line::inspect_options>, nullptr,
     [](Line& line, const Comm& comm) {
       inspect(line.inspect_options, comm, version);
       return 0;
     },
     nullptr},
    {"diff", "show the differences between two snapshots of one text",
     declare_options<&Line::diff_options>, nullptr,
     [](Line& line, const Comm& comm) {
       diff(line.diff_options, comm, version);
       return 0;
     },
     nullptr},
    {"policies", "list the eviction policies of a run, with their parameters", declare_policies,
     nullptr, nullptr, policies_document},
    {"models", "list the supported architectures, files, weights, tokenizers and chat templates",
     [](CLI::App& app, Line& line) { app.add_flag("--json", line.models_as_json, "print JSON"); },
     nullptr, nullptr,
     [](const Line& line) {
       return line.models_as_json ? files::json_lines(models_json()) : models_text();
     }},
    {"completion", "print the completion script of a shell", declare_completion, nullptr, nullptr,
     completion_document},
    {"manual", "print the man page (kvzap manual | man -l -)", [](CLI::App&, Line&) {}, nullptr,
     nullptr, [](const Line& line) { return man_page(line.app, version); }},
};

}  // namespace

void add_commands(CLI::App& app, CommandLine& line) {
  for (const Command& command : table) {
    command.declare(*app.add_subcommand(command.name, command.summary), line);
  }
}

const Command* find_command(std::string_view name) {
  const auto* const found = std::find_if(std::begin(table), std::end(table),
                                         [&](const Command& c) { return c.name == name; });
  return found == std::end(table) ? nullptr : found;
}

}  // namespace kvzap::driver
