// Every command of the program with all its options. Parsing, --help, the man page and shell
// completion use this one table.
#pragma once

#include <CLI/CLI.hpp>
#include <locale>
#include <string>

#include "commands/calibrate.hpp"
#include "commands/chat.hpp"
#include "commands/collect.hpp"
#include "commands/convert.hpp"
#include "commands/diff.hpp"
#include "commands/eval.hpp"
#include "commands/inspect.hpp"
#include "commands/leaderboard.hpp"
#include "commands/make_tasks.hpp"
#include "commands/quantize.hpp"
#include "commands/serve.hpp"
#include "commands/train.hpp"
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
  CLI::App* run;
  CLI::App* chat;
  CLI::App* serve;
  CLI::App* bench;
  CLI::App* collect;
  CLI::App* train;
  CLI::App* calibrate;
  CLI::App* evaluate;
  CLI::App* make_tasks;
  CLI::App* leaderboard;
  CLI::App* convert;
  CLI::App* quantize;
  CLI::App* inspect;
  CLI::App* diff;
  CLI::App* policies;
  CLI::App* models;
  CLI::App* completion;
  CLI::App* manual;

  // Parsing sets these.
  RunOptions run_options;
  RunOptions chat_options;
  ServeOptions serve_options;
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

/// "0.1.0"
extern const char* const version;
/// The revision of the sources as Git describes it, or "unknown".
extern const char* const revision;

}  // namespace kvzap::driver
