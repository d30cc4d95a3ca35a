// The program's command line, with the options of every command. Parsing, --help, the man page and
// shell completion use it.
#pragma once

#include <CLI/CLI.hpp>
#include <locale>
#include <string>

#include "commands/files/convert.hpp"
#include "commands/files/diff.hpp"
#include "commands/files/inspect.hpp"
#include "commands/files/quantize.hpp"
#include "commands/lab/calibrate.hpp"
#include "commands/lab/collect.hpp"
#include "commands/lab/eval.hpp"
#include "commands/lab/leaderboard.hpp"
#include "commands/lab/make_tasks.hpp"
#include "commands/lab/train.hpp"
#include "commands/run/chat.hpp"
#include "commands/serve/prefix.hpp"
#include "commands/serve/serve.hpp"
#include "commands/support/command_table.hpp"
#include "files/c_locale.hpp"
#include "options/bench_options.hpp"
#include "options/options.hpp"

namespace kvzap::driver {

/// While it lives, streams and C functions of its thread use the locale "C", by which CLI11 reads
/// and prints numbers. The program starts in it, but a preloaded library may have changed it.
class ClassicLocale {
 public:
  ClassicLocale();
  ~ClassicLocale();
  ClassicLocale(const ClassicLocale&) = delete;
  ClassicLocale& operator=(const ClassicLocale&) = delete;

 private:
  std::locale m_streams;
  files::CLocale m_functions;
};

struct CommandLine {
  CommandLine();
  CommandLine(const CommandLine&) = delete;
  CommandLine& operator=(const CommandLine&) = delete;

  ClassicLocale locale;  // first, because help records defaults as texts
  CLI::App app;

  /// Returns the command that was parsed. There must be one.
  CLI::App& given() const { return *app.get_subcommands().front(); }
  const Command& command() const { return *find_command(given().get_name()); }

  // Parsing sets these.
  RunOptions run_options;
  RunOptions chat_options;
  ServeOptions serve_options;
  PrefixOptions prefix_options;
  BenchOptions bench_options;
  CollectOptions collect_options;
  TrainOptions train_options;
  CalibrateOptions calibrate_options;
  EvalOptions eval_options;
  MakeTasksOptions make_tasks_options;
  LeaderboardOptions leaderboard_options;
  ConvertOptions convert_options;
  QuantizeOptions quantize_options;
  InspectOptions inspect_options;
  DiffOptions diff_options;
  std::string shell;
  std::string policy;  // policy to show; empty: all
  bool policies_as_json = false;
  bool models_as_json = false;
};

}  // namespace kvzap::driver
