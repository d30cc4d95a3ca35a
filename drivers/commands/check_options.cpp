#include "commands/check_options.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <random>

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

/// Checks that the options of one kind of surrogate are not given for the other.
void check_kind(const CommandLine& line) {
  const std::string& kind = line.train_options.kind;
  for (const char* flag : {"--hidden", "--epochs", "--lr", "--batch", "--ridge"}) {
    const std::string own = flag == std::string("--ridge") ? "linear" : "mlp";
    require(kind == own || line.train->count(flag) == 0,
            fmt::format("{} has no effect with {}; it is for {}", flag, kind, own));
  }
}

void check_other_command(const CommandLine& line) {
  if (line.bench->parsed()) tests_of(line.bench_options);
  if (line.collect->parsed()) check_options(line.collect_options);
  if (line.train->parsed()) {
    check_options(line.train_options);
    check_kind(line);
  }
  if (line.calibrate->parsed()) check_options(line.calibrate_options);
  if (line.evaluate->parsed()) check_options(line.eval_options);
  if (line.make_tasks->parsed()) check_options(line.make_tasks_options);
  if (line.leaderboard->parsed()) check_options(line.leaderboard_options);
  if (line.convert->parsed()) check_options(line.convert_options);
  if (line.quantize->parsed()) check_options(line.quantize_options);
}

}  // namespace

void check_options(const CommandLine& line, const Communicator& comm) {
  agree_on_usage(comm, [&] {
    if (line.run->parsed()) return check_run(line.run_options);
    if (line.chat->parsed()) return check_chat(line.chat_options);
    if (line.serve->parsed()) return check_serve(line.serve_options);
    as_usage([&] { check_other_command(line); });
  });
}

std::string draw_seed(const CommandLine& line, const Communicator& comm) {
  CLI::App& command = *line.app.get_subcommands().front();
  CLI::Option* const option = command.get_option_no_throw("--seed");
  // The server draws one for each request.
  const bool is_random =
      option && option->results() == std::vector<std::string>{"-1"} && !line.serve->parsed();
  if (!is_random) return "";
  std::uint32_t seed = std::random_device()();
  comm.broadcast(&seed, sizeof(seed), 0);
  option->clear();
  option->add_result(std::to_string(seed));
  option->run_callback();
  return fmt::format("--seed -1 drew {}; --seed {} repeats it", seed, seed);
}

bool is_quiet(const CommandLine& line) {
  const CLI::Option* const quiet =
      line.app.get_subcommands().front()->get_option_no_throw("--quiet");
  return quiet && quiet->count() > 0 && quiet->as<bool>();
}

}  // namespace kvzap::driver
