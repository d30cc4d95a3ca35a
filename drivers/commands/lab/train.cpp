#include "commands/lab/train.hpp"

#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <kvzap/lab/pairs.hpp>
#include <kvzap/lab/train.hpp>
#include <vector>

#include "commands/support/setup.hpp"
#include "console/console.hpp"
#include "console/progress.hpp"
#include "console/signals.hpp"
#include "files/quote.hpp"
#include "options/options.hpp"

namespace kvzap::driver {
namespace {

namespace fs = std::filesystem;

/// Returns the command that reproduces the surrogate.
std::string command_of(const TrainOptions& o) {
  std::string command = fmt::format("kvzap train {} {} -o {}", o.kind, files::shell_quoted(o.pairs),
                                    files::shell_quoted(o.output));
  if (o.kind == "mlp") {
    if (o.hidden) command += fmt::format(" --hidden {}", *o.hidden);
    command += fmt::format(" --epochs {} --lr {} --batch {}", o.epochs, o.learning_rate, o.batch);
  } else {
    command += fmt::format(" --ridge {}", o.ridge);
  }
  command += fmt::format(" --validation {} --seed {}", o.validation, o.seed);
  if (o.dtype != "f32") command += " --dtype " + o.dtype;
  return command;
}

std::string value_or_dash(double value, int digits) {
  return std::isfinite(value) ? fmt::format("{:.{}f}", value, digits) : "-";
}

void print_table(const TrainingReport& report) {
  fmt::print("{:>5}  {:<{}}  {:>9}  {:>9}  {:>8}  {:>8}\n", "layer", "R2 by KV head",
             report.layers.empty() ? 13 : std::max<std::size_t>(13, 6 * report.layers[0].r2.size()),
             "MSE", "train MSE", "dropped", "seconds");
  double sum = 0;
  std::int64_t count = 0;
  for (const LayerReport& layer : report.layers) {
    std::string r2;
    for (const double value : layer.r2) {
      r2 += fmt::format("{:>5} ", value_or_dash(value, 3));
      if (std::isfinite(value)) {
        sum += value;
        ++count;
      }
    }
    fmt::print("{:>5}  {:<13}  {:>9}  {:>9}  {:>8}  {:>8.2f}\n", layer.layer, r2,
               value_or_dash(layer.mse, 4), value_or_dash(layer.training_mse, 4), layer.dropped,
               layer.seconds);
  }
  fmt::print("mean R2 {} on {} validation pairs ({}), trained on {}\n",
             count > 0 ? fmt::format("{:.3f}", sum / static_cast<double>(count)) : "-",
             report.validation, report.split_by_text ? "whole texts" : "single pairs",
             report.training);
}

/// Returns the plot script beside the program or in the source folder of its build, or the command
/// kvzap-plot of the search path.
std::string plot_script() {
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  if (!error) {
    for (const fs::path& script : {program.parent_path() / "kvzap-plot",
                                   program.parent_path() / "../drivers/kvzap_plot.py"}) {
      if (fs::exists(script, error)) return script.string();
    }
  }
  return "kvzap-plot";
}

/// Draws training.json of `folder` to `image`. Throws Error if that fails.
void draw(const fs::path& folder, const std::string& image) {
  std::vector<std::string> words = {plot_script(), "train", (folder / "training.json").string(),
                                    "-o", image};
  // The script may lack its execute permission.
  if (fs::path(words[0]).extension() == ".py") words.insert(words.begin(), "python3");
  std::vector<char*> arguments;
  arguments.reserve(words.size() + 1);
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  pid_t process = 0;
  const int failure =
      posix_spawnp(&process, arguments[0], nullptr, nullptr, arguments.data(), environ);
  const std::string advice =
      fmt::format("the surrogate in {} is complete; kvzap-plot train {} -o {} draws it later",
                  folder.string(), (folder / "training.json").string(), image);
  if (failure != 0) {
    throw Error(fmt::format("--plot: {} cannot be started: {}; {}", words[0],
                            std::strerror(failure), advice));
  }
  int status = 0;
  while (waitpid(process, &status, 0) < 0 && errno == EINTR) {
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    throw Error(fmt::format("--plot: {} failed (is matplotlib there?); {}", words[0], advice));
  }
}

}  // namespace

void check_options(const TrainOptions& o) {
  require(o.kind == "linear" || o.kind == "mlp",
          o.kind.empty()
              ? std::string("no kind of surrogate: give linear or mlp first")
              : fmt::format("'{}' is no kind of surrogate; expected linear or mlp", o.kind));
  require(!o.pairs.empty(), "no pairs: give a file written by kvzap collect");
  require(!o.output.empty(), "no output: give a folder with -o");
  require(!o.hidden || (*o.hidden >= 1 && *o.hidden <= (1 << 24)),
          fmt::format("--hidden is {}; expected 1 to {}", o.hidden.value_or(0), 1 << 24));
  require(o.epochs >= 1, fmt::format("--epochs is {}; expected at least 1", o.epochs));
  require(o.learning_rate > 0 && std::isfinite(o.learning_rate),
          fmt::format("--lr is {}; expected a positive number", o.learning_rate));
  require(o.batch >= 1 && o.batch <= (1 << 24),
          fmt::format("--batch is {}; expected 1 to {}", o.batch, 1 << 24));
  require(o.ridge >= 0 && std::isfinite(o.ridge),
          fmt::format("--ridge is {}; expected 0 or more", o.ridge));
  require(o.validation >= 0 && o.validation < 1,
          fmt::format("--validation is {}; expected at least 0 and less than 1", o.validation));
  require(!(o.resume && o.overwrite), "--resume and --overwrite contradict each other");
  require(o.plot != "-", "--plot cannot be standard output");
}

void declare(CLI::App& app, TrainOptions& o) {
  const auto what = "Training";
  app.add_option("kind,--kind", o.kind,
                 "linear (ridge regression) or mlp (Linear-GELU-Linear), for each layer")
      ->group(what);
  app.add_option("pairs,--pairs", o.pairs, "file of pairs written by kvzap collect")
      ->type_name("FILE")
      ->group(what);
  app.add_option("-o,--output", o.output, "folder of the surrogate; required")
      ->type_name("DIR")
      ->group(what);
  app.add_option("--hidden", o.hidden, "mlp: hidden units; default: an eighth of the hidden size")
      ->group(what);
  app.add_option("--epochs", o.epochs, "mlp: passes over the pairs")
      ->capture_default_str()
      ->group(what);
  app.add_option("--lr", o.learning_rate,
                 "mlp: initial learning rate of AdamW, with cosine annealing to 0")
      ->capture_default_str()
      ->group(what);
  app.add_option("--batch", o.batch, "mlp: pairs of a step")->capture_default_str()->group(what);
  app.add_option("--ridge", o.ridge,
                 "linear: ridge penalty, added to the diagonal of X^T X; 0 or more")
      ->capture_default_str()
      ->group(what);
  app.add_option("--validation", o.validation,
                 "share of the pairs for validation, by whole texts if there are enough; in [0, 1)")
      ->capture_default_str()
      ->group(what);
  app.add_option("--seed", o.seed, "seed of the split, and of an mlp's initial weights and batches")
      ->capture_default_str()
      ->check(not_negative)
      ->group(what);
  app.add_flag("--resume", o.resume,
               "continue from the checkpoint in the folder, if any, to the same result; SIGTERM, "
               "SIGINT, SIGHUP and SIGUSR1 write one after the current batch and end the training")
      ->group(what);

  const auto output = "Output";
  app.add_option("--dtype", o.dtype, "value type of the published weights")
      ->capture_default_str()
      ->check(CLI::IsMember({"f32", "bf16"}))
      ->group(output);
  app.add_option("--model-name", o.model_name,
                 "name of the model in the model card; default: that of the pairs")
      ->type_name("NAME")
      ->group(output);
  app.add_flag("--overwrite", o.overwrite,
               "replace an earlier surrogate in the folder, once the new one is complete")
      ->group(output);
  app.add_option("--json", o.json,
                 "also write the report to this file; - is standard output, instead of the table")
      ->type_name("FILE")
      ->group(output);
  app.add_option("--plot", o.plot,
                 "draw R2 by layer and head, and predictions against the oracle, to this file "
                 "(kvzap-plot, which needs Python and matplotlib)")
      ->type_name("FILE")
      ->group(output);
  declare_progress(app, o.progress, output);
  app.add_flag("-q,--quiet", o.quiet, "no progress and no warnings on standard error")
      ->group(output);
  declare_threads(app, o.threads, output);
  declare_deck(app, o.config, output);
}

int train(const TrainOptions& options, const Communicator& comm, const std::string& version) {
  std::unique_ptr<PairsFile> pairs;
  TrainingOptions training;
  training.mlp = options.kind == "mlp";
  training.ridge.alpha = options.ridge;
  training.mlp_options.hidden = options.hidden.value_or(0);
  training.mlp_options.epochs = options.epochs;
  training.mlp_options.learning_rate = options.learning_rate;
  training.mlp_options.batch = options.batch;
  training.validation = options.validation;
  training.seed = options.seed;
  training.pairs_file = options.pairs;
  training.model_name = options.model_name;
  training.version = version;
  training.resume = options.resume;
  training.overwrite = options.overwrite;
  const int ranks_on_node = comm.ranks_on_node();
  use_threads(options.threads, comm, comm.is_root() && !options.quiet);
  comm.agree([&] {
    training.command = command_of(options);
    training.dtype = dtype_from_name(options.dtype);
    pairs = PairsFile::open(options.pairs);
    const PairsInfo& info = pairs->info();
    if (info.pairs == 0) {
      throw Error(fmt::format("{}: the file has no pairs: kvzap collect has finished no text",
                              options.pairs));
    }
    check_memory(training.mlp ? MlpTrainer::bytes(info, training.mlp_options) : ridge_bytes(info),
                 std::min(ranks_on_node, info.layers),
                 training.mlp ? "the pairs of a layer and the MLP's training"
                              : "the normal equations of a layer");
  });
  comm.agree_on_root([&] {
    // The folder itself may not exist yet.
    if (fs::path(options.json).parent_path() / "" != fs::path(options.output) / "") {
      check_writable(options.json);
    }
  });

  Progress bar(comm.is_root() && !options.quiet, options.progress);
  TrainingProgress progress;
  progress.update = [&](int done, int layers, double share) {
    constexpr double parts = 1000;
    bar.update("training", std::llround(parts * (done + share)),
               static_cast<std::int64_t>(parts) * layers);
  };
  TrainingReport report;
  int signal = 0;
  {
    const SignalWatch watch;
    report = train_surrogate(
        *pairs, training, options.output, comm, [] { return caught_signal != 0; }, progress);
    signal = static_cast<int>(comm.all_reduce_max(std::int64_t{caught_signal}));
  }
  bar.clear();
  if (comm.is_root() && !options.quiet) {
    for (const std::string& warning : report.warnings) {
      say("kvzap: warning: {}\n", warning);
    }
  }
  if (report.stopped) {
    if (comm.is_root() && !options.quiet) {
      say("kvzap: stopped by signal {}; --resume continues from the checkpoint in {}\n", signal,
          options.output);
    }
    return 128 + signal;
  }
  comm.agree_on_root([&] {
    if (!options.json.empty()) {
      const std::string json = training_json(report, training, pairs->info());
      write_whole(options.json, json);
    }
    if (options.json != "-") print_table(report);
    flush_stdout();
    if (!options.plot.empty()) draw(options.output, options.plot);
  });
  return 0;
}

}  // namespace kvzap::driver
