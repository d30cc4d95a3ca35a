// The kvzap program: starts MPI and Kokkos, reads the command line, hands over to a subcommand.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <Kokkos_Core.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <kvzap/communicator.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "base/kokkos_compat.hpp"
#include "base/quote.hpp"
#include "bench.hpp"
#include "command_line.hpp"
#include "console.hpp"
#include "documents.hpp"
#include "parallel/mpi_session.hpp"
#include "policies_command.hpp"
#include "run.hpp"
#include "snapshots.hpp"
#include "standard_streams.hpp"

namespace {

constexpr int exit_failure = 1;
constexpr int exit_usage = 2;

/// Kokkos from construction to destruction. It sees only its own flags: version 3.4 swallows --help
/// and --threads.
class KokkosSession {
 public:
  explicit KokkosSession(std::vector<char*> arguments) {
    int count = static_cast<int>(arguments.size());
    arguments.push_back(nullptr);
    Kokkos::initialize(count, arguments.data());
  }
  ~KokkosSession() { Kokkos::finalize(); }
  KokkosSession(const KokkosSession&) = delete;
  KokkosSession& operator=(const KokkosSession&) = delete;
};

/// What the parser could not place, or else what it says itself. `command`: the subcommand that was
/// named, or the program.
std::string usage_message(const CLI::App& app, const CLI::App& command,
                          const CLI::ParseError& error) {
  const std::vector<std::string> unknown = app.remaining(true);
  if (unknown.empty()) return kvzap::driver::explain(command, error);
  const std::string& first = unknown.front();
  const std::string name = first.substr(0, first.find('='));
  if (name.rfind('-', 0) != 0) {
    return &command != &app ? fmt::format("unexpected argument '{}'", first)
                            : fmt::format(
                                  "unknown subcommand '{}'; expected run, bench, collect, train, "
                                  "calibrate, eval, make-tasks, leaderboard, inspect, diff or "
                                  "policies",
                                  first);
  }
  const std::string nearest =
      kvzap::driver::nearest_option(command, name.substr(std::min(name.size(), std::size_t{2})));
  return fmt::format(
      "unknown option {}{}", name,
      name.rfind("--", 0) == 0 && !nearest.empty() ? "; did you mean --" + nearest + "?" : "");
}

int flush_exit() {
  std::cout.flush();
  if (std::cout.good()) return 0;
  kvzap::driver::say("kvzap: error: standard output: writing failed (is the disk full?)\n");
  return exit_failure;
}

int usage_exit(const CLI::App& app, const CLI::ParseError& error, bool is_root) {
  const bool failed = error.get_exit_code() != 0;
  if (!is_root) return failed ? exit_usage : 0;
  if (failed) {
    const auto named = app.get_subcommands();
    const CLI::App& command = named.empty() ? app : *named.front();
    kvzap::driver::say("kvzap: error: {}\n", usage_message(app, command, error));
    return exit_usage;
  }
  app.exit(error);  // --help or --version, on standard output
  return flush_exit();
}

/// What was asked for needs neither MPI nor Kokkos: a build makes the man page and the completion
/// scripts, also on a machine where neither can start.
bool asks_for_document(int argc, char** argv) {
  const std::string command = argc > 1 ? argv[1] : "";
  return command == "policies" || command == "completion" || command == "manual";
}

int print_document(const kvzap::driver::CommandLine& line) {
  if (line.manual->parsed()) {
    std::cout << kvzap::driver::man_page(line.app, kvzap::driver::version);
  } else if (line.policies->parsed() && line.policies_as_json) {
    std::cout << kvzap::driver::policies_json(line.policy).dump(2) << "\n";
  } else if (line.policies->parsed()) {
    std::cout << kvzap::driver::policies_text(line.policy);
  } else if (line.shell == "zsh") {
    std::cout << kvzap::driver::zsh_completion(line.app);
  } else {
    std::cout << kvzap::driver::bash_completion(line.app);
  }
  return flush_exit();
}

int print_document(int argc, char** argv) {
  kvzap::driver::CommandLine line;
  try {
    line.app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return usage_exit(line.app, error, true);
  }
  return print_document(line);
}

/// Whether Kokkos is to be told how ranks choose devices: not on hosts, nor if the user has told
/// it.
bool takes_turns_on_devices([[maybe_unused]] const std::vector<char*>& kokkos_arguments) {
#if KOKKOS_VERSION >= 30700
  if (kvzap::detail::runs_on_host) return false;
  for (const char* name : {"KOKKOS_DEVICE_ID", "KOKKOS_MAP_DEVICE_ID_BY"}) {
    if (std::getenv(name)) return false;
  }
  return std::none_of(kokkos_arguments.begin(), kokkos_arguments.end(), [](const char* argument) {
    const std::string_view flag = argument;
    return flag.rfind("--kokkos-device-id", 0) == 0 || flag.rfind("--kokkos-map-device-id", 0) == 0;
  });
#else
  return false;
#endif
}

int run_program(int argc, char** argv, const kvzap::Communicator& comm) {
  std::vector<char*> kokkos_arguments = {argv[0]};
  std::vector<std::string> arguments;  // CLI11 takes them last first
  for (int i = argc - 1; i > 0; --i) {
    const std::string argument = argv[i];
    if (argument.rfind("--kokkos-", 0) == 0) {
      kokkos_arguments.push_back(argv[i]);
    } else {
      arguments.push_back(argument);
    }
  }

  kvzap::driver::CommandLine line;
  try {
    line.app.parse(arguments);
  } catch (const CLI::ParseError& error) {
    return usage_exit(line.app, error, comm.is_root());
  }
  if (line.policies->parsed() || line.completion->parsed() || line.manual->parsed()) {
    return comm.is_root() ? print_document(line) : 0;
  }
  const auto read_deck_of = [&](CLI::App& command, const std::string& deck) {
    comm.agree([&] {
      if (!deck.empty()) kvzap::driver::read_deck(command, deck);
    });
  };

  // The ranks of a node take its devices in turns, unless the user says which.
  std::string map_devices = "--kokkos-map-device-id-by=mpi_rank";
  if (comm.size() > 1 && takes_turns_on_devices(kokkos_arguments)) {
    kokkos_arguments.push_back(map_devices.data());
  }
  // Each rank would print Kokkos' warnings, all the same.
  std::string quiet = "--kokkos-disable-warnings";
  if (!comm.is_root()) kokkos_arguments.push_back(quiet.data());
  const KokkosSession kokkos(kokkos_arguments);
  namespace driver = kvzap::driver;
  if (line.bench->parsed()) {
    read_deck_of(*line.bench, line.bench_options.config);
    return driver::bench(line.bench_options, comm, driver::version, driver::revision);
  } else if (line.collect->parsed()) {
    read_deck_of(*line.collect, line.collect_options.config);
    return driver::collect(line.collect_options, comm, driver::version);
  } else if (line.train->parsed()) {
    read_deck_of(*line.train, line.train_options.config);
    return driver::train(line.train_options, comm, driver::version);
  } else if (line.calibrate->parsed()) {
    read_deck_of(*line.calibrate, line.calibrate_options.config);
    driver::calibrate(line.calibrate_options, comm, driver::version);
  } else if (line.evaluate->parsed()) {
    read_deck_of(*line.evaluate, line.eval_options.config);
    return driver::evaluate(line.eval_options, comm, driver::version);
  } else if (line.make_tasks->parsed()) {
    read_deck_of(*line.make_tasks, line.make_tasks_options.config);
    driver::make_tasks(line.make_tasks_options, comm, driver::version);
  } else if (line.leaderboard->parsed()) {
    read_deck_of(*line.leaderboard, line.leaderboard_options.config);
    driver::leaderboard(line.leaderboard_options, comm, driver::version);
  } else if (line.inspect->parsed()) {
    read_deck_of(*line.inspect, line.inspect_options.view.config);
    driver::inspect(line.inspect_options, comm, driver::version);
  } else if (line.diff->parsed()) {
    read_deck_of(*line.diff, line.diff_options.view.config);
    driver::diff(line.diff_options, comm, driver::version);
  } else {
    read_deck_of(*line.run, line.run_options.config);
    auto resumed = driver::open_resumed(*line.run, line.run_options, comm);
    const driver::RunDescription description{driver::version, driver::revision,
                                             driver::recorded_options(*line.run, line.run_options),
                                             driver::options_in_force(*line.run, line.run_options)};
    return driver::run(line.run_options, description, std::move(resumed), comm);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) try {
  kvzap::driver::prepare_standard_streams();
#ifdef M_MMAP_THRESHOLD
  // Large blocks keep coming from mmap, so that what is freed goes back to the system at once:
  // glibc otherwise raises this limit to the largest block it has seen freed.
  mallopt(M_MMAP_THRESHOLD, 1 << 20);
#endif
  if (asks_for_document(argc, argv)) return print_document(argc, argv);
  const kvzap::detail::MpiSession mpi(argc, argv);
  const auto comm = kvzap::Communicator::world();
  try {
    return run_program(argc, argv, comm);
  } catch (const kvzap::AgreedError& error) {
    if (comm.is_root())
      kvzap::driver::say("kvzap: error: {}\n", kvzap::detail::shown_message(error.what()));
    return exit_failure;
  } catch (const std::exception& error) {
    // This rank's own trouble: the others wait in some collective call and must be ended.
    std::string what = dynamic_cast<const std::bad_alloc*>(&error) ? "out of memory" : error.what();
    std::replace(what.begin(), what.end(), '\n', ' ');  // Kokkos' message has several lines
    kvzap::driver::say("kvzap: error: rank {}: {}\n", comm.rank(),
                       kvzap::detail::shown_message(what));
    std::fflush(stderr);
    comm.abort(exit_failure);
  }
} catch (const std::exception& error) {
  // Before there are ranks, or where the message above could not be written.
  std::fprintf(stderr, "kvzap: error: %s\n", kvzap::detail::shown_message(error.what()).c_str());
  return exit_failure;
} catch (...) {
  return exit_failure;
}
