// The kvzap program: starts MPI and Kokkos, parses the command line, and runs a command.
#include <fmt/format.h>
#include <sys/resource.h>

#include <Kokkos_Core.hpp>
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <kvzap/core/communicator.hpp>
#include <kvzap/program.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "base/kokkos_compat.hpp"
#include "base/machine.hpp"
#include "base/simd.hpp"
#include "commands/run/prompt.hpp"
#include "commands/support/check_options.hpp"
#include "commands/support/command_line.hpp"
#include "commands/support/setup.hpp"
#include "console/console.hpp"
#include "console/launcher.hpp"
#include "console/library_settings.hpp"
#include "console/standard_streams.hpp"
#include "files/quote.hpp"
#include "linalg/gemm.hpp"
#include "options/arguments.hpp"
#include "options/usage.hpp"
#include "parallel/mpi_session.hpp"

namespace {

constexpr int exit_failure = 1;

/// Initializes Kokkos in the constructor and finalizes it in the destructor. Passes only Kokkos'
/// own flags, because version 3.4 removes --help and --threads.
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

/// Returns the exit status for an error, whose text it prints in one line if `prints`. A closed
/// pipe has a signal's status, and is no error of kvzap's.
int report(std::string text, bool is_usage, bool prints = true) {
  const bool is_pipe = text == kvzap::driver::closed_pipe;
  // Messages of libraries may have several lines.
  for (std::size_t end = 0; (end = text.find('\n', end)) != std::string::npos;) {
    const std::size_t next = std::min(text.find_first_not_of(" \n", end), text.size());
    text.replace(end, next - end, next == text.size() ? "" : " ");
  }
  if (prints) {
    kvzap::driver::say("kvzap: {}{}\n",
                       is_pipe ? "" : "error: ", kvzap::files::shown_message(text));
  }
  constexpr int by_signal = 128;
  if (is_pipe) return by_signal + SIGPIPE;
  return is_usage ? kvzap::driver::exit_usage : exit_failure;
}

/// Prints a document. A reader who has seen enough, such as head, ends the program without a word.
int print(const std::string& text) {
  std::signal(SIGPIPE, SIG_DFL);
  std::cout << text;
  std::cout.flush();
  if (std::cout.good()) return 0;
  kvzap::driver::say("kvzap: error: standard output: writing failed (is the disk full?)\n");
  return exit_failure;
}

/// Exit status of a command line that runs nothing.
int reading_exit(const kvzap::driver::Reading& reading, bool is_root) {
  if (!is_root) return reading.status;
  if (!reading.error.empty()) report(reading.error, true);
  const int failed = print(reading.out);
  return failed != 0 ? failed : reading.status;
}

/// Throws Error for an environment variable with a value that kvzap does not know.
void check_environment() {
  kvzap::base::machine();
  kvzap::linalg::may_pack_weights();
}

/// Returns whether the command needs neither MPI nor Kokkos. (With several ranks this is false:
/// they might get different commands and wait for each other.)
bool asks_for_document(const std::vector<std::string>& arguments) {
  if (kvzap::driver::launched_ranks() > 1 || arguments.empty()) return false;
  const auto* const command = kvzap::driver::find_command(arguments.front());
  return command && command->document;
}

int print_document(const std::vector<std::string>& arguments) {
  kvzap::driver::CommandLine line;
  const kvzap::driver::Reading reading = kvzap::driver::read_arguments(line, arguments);
  return reading.ends ? reading_exit(reading, true) : print(line.command().document(line));
}

/// Returns whether to tell Kokkos how ranks choose devices: not on hosts, and not if the user has
/// done so.
bool takes_turns_on_devices([[maybe_unused]] const std::vector<char*>& kokkos_arguments) {
#if KOKKOS_VERSION >= 30700
  if (kvzap::base::runs_on_host) return false;
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

/// Throws Error if MPI would otherwise end the process with its own message.
void check_open_files() {
  constexpr rlim_t least = 12;
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= least) return;
  throw kvzap::Error(fmt::format("limit of open files (ulimit -n): expected at least {}, found {}",
                                 least, limit.rlim_cur));
}

int run_program(const char* name, const std::vector<std::string>& arguments,
                const kvzap::Communicator& comm) {
  namespace driver = kvzap::driver;
  comm.agree(check_environment);
  driver::CommandLine line;
  driver::Reading reading = driver::read_arguments(line, arguments);
  driver::agree_on_reading(reading, comm);
  if (reading.ends) return reading_exit(reading, comm.is_root());
  driver::read_deck_of_command(line, comm);
  driver::check_same_on_ranks(line, comm);
  if (line.given().get_name() == "run") driver::take_input(line.run_options, comm);
  driver::check_options(line, comm);
  const std::string seed_note = driver::draw_seed(line, comm);
  if (!seed_note.empty()) reading.notes.push_back(seed_note);
  if (comm.is_root() && !driver::is_quiet(line)) {
    for (const std::string& note : reading.notes) driver::say("kvzap: note: {}\n", note);
  }
  if (const auto document = line.command().document) {
    return comm.is_root() ? print(document(line)) : 0;
  }

  std::string program = name;
  std::vector<char*> kokkos_arguments = {program.data()};
  for (std::string& argument : reading.kokkos) kokkos_arguments.push_back(argument.data());
  // The ranks of a node take its devices in turns, unless the user assigns them.
  std::string map_devices = "--kokkos-map-device-id-by=mpi_rank";
  if (comm.size() > 1 && takes_turns_on_devices(kokkos_arguments)) {
    kokkos_arguments.push_back(map_devices.data());
  }
  // Without this flag each rank would print the same warnings of Kokkos.
  std::string quiet = "--kokkos-disable-warnings";
  if (!comm.is_root()) kokkos_arguments.push_back(quiet.data());
  const KokkosSession kokkos(kokkos_arguments);
  return line.command().run(line, comm);
}

/// Returns the text of an error of this rank alone. Kokkos tells a failed allocation in 300
/// characters: the label and the size are kept.
std::string text_of(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error)) return "out of memory";
  std::string what = error.what();
  std::replace(what.begin(), what.end(), '\n', ' ');
  const auto between = [&](std::string_view before, std::string_view after) {
    const std::size_t begin = what.find(before);
    if (begin == std::string::npos) return std::string();
    const std::size_t first = begin + before.size();
    const std::size_t last = what.find(after, first);
    return last == std::string::npos ? std::string() : what.substr(first, last - first);
  };
  const std::string label = between("Kokkos failed to allocate memory for label \"", "\"");
  const std::string size = between("Allocation of size ", " failed");
  if (label.empty() || size.empty()) return what;
  return fmt::format("out of memory: no room for {} ({})", label, size);
}

int main_status(int argc, char** argv) try {
  kvzap::driver::prepare_standard_streams();
#ifdef M_MMAP_THRESHOLD
  // Large blocks always come from mmap, so that freed memory returns to the system at once.
  // Otherwise glibc raises this limit to the largest block that was freed.
  mallopt(M_MMAP_THRESHOLD, 1 << 20);
#endif
  const std::vector<std::string> arguments(argv + std::min(argc, 1), argv + argc);
  if (asks_for_document(arguments)) return print_document(arguments);
  kvzap::driver::settle_library_settings(argv);
  check_open_files();
  const kvzap::parallel::MpiSession mpi(argc, argv);
  const auto comm = kvzap::Communicator::world();
  try {
    return run_program(argv[0], arguments, comm);
  } catch (const kvzap::AgreedError& error) {
    return report(error.what(),
                  dynamic_cast<const kvzap::driver::AgreedUsageError*>(&error) != nullptr,
                  comm.is_root());
  } catch (const std::exception& error) {
    // The error is on this rank alone. The others wait in a collective call and must be ended.
    const bool is_pipe = error.what() == kvzap::driver::closed_pipe;
    const std::string where = is_pipe ? "" : fmt::format("rank {}: ", comm.rank());
    const int status = report(where + text_of(error), false);
    std::fflush(stderr);
    // No other process waits for a single rank. MPI_Abort could print a banner, or wait for memory
    // that does not exist.
    if (comm.size() == 1) std::_Exit(status);
    comm.abort(exit_failure);
  }
} catch (const std::exception& error) {
  // MPI has not started, or the message above could not be written.
  std::fprintf(stderr, "kvzap: error: %s\n", kvzap::files::shown_message(error.what()).c_str());
  return exit_failure;
} catch (...) {
  return exit_failure;
}

}  // namespace

int kvzap::run_program(int argc, char** argv) {
  const int status = main_status(argc, argv);
  if (status == 0) return 0;
  // Skips the exit handlers of libraries. OpenBLAS' handler waits for its threads, which retry to
  // allocate memory, and would wait forever if there is none.
  std::cout.flush();
  std::fflush(nullptr);
  std::_Exit(status);
}
