// The kvzap program: starts MPI and Kokkos, reads the command line, hands over to a subcommand.
#include <fmt/format.h>
#include <mpi.h>

#include <CLI/CLI.hpp>
#include <Kokkos_Core.hpp>
#include <cstdio>
#include <kvzap/communicator.hpp>
#include <string>
#include <vector>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "options.hpp"
#include "run.hpp"

namespace {

constexpr int exit_failure = 1;
constexpr int exit_usage = 2;

/// MPI from construction to destruction.
class MpiSession {
 public:
  MpiSession(int& argc, char**& argv) {
    if (MPI_Init(&argc, &argv) != MPI_SUCCESS) throw kvzap::Error("MPI_Init failed");
  }
  ~MpiSession() { MPI_Finalize(); }
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;
};

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

int usage_error(const CLI::App& app, const CLI::App& run, const CLI::ParseError& error,
                const kvzap::Communicator& comm) {
  const bool failed = error.get_exit_code() != 0;
  if (comm.is_root()) {
    if (!failed) {
      app.exit(error);  // --help or --version, on standard output
      std::fflush(stdout);
    } else {
      std::string hint;
      const std::string message = error.what();
      const auto dashes = message.rfind("--");
      if (dynamic_cast<const CLI::ExtrasError*>(&error) && dashes != std::string::npos) {
        const std::string name =
            message.substr(dashes + 2, message.find_first_of(" =", dashes) - dashes - 2);
        const std::string nearest = kvzap::driver::nearest_option(run, name);
        if (!nearest.empty()) hint = "; did you mean --" + nearest + "?";
      }
      fmt::print(stderr, "kvzap: error: {}{}\n", message, hint);
    }
  }
  return failed ? exit_usage : 0;
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

  CLI::App app(
      "kvzap prunes the KV cache of a language model while it runs, and frees the memory.\n"
      "Flags that begin with --kokkos- are passed on to Kokkos.");
  const std::string version = KVZAP_VERSION;
  app.set_version_flag("--version", "kvzap " + version);
  app.require_subcommand(1);
  app.name("kvzap");
  auto* run = app.add_subcommand("run", "answer questions about a long prompt with a pruned cache");
  kvzap::driver::RunOptions options;
  kvzap::driver::declare(*run, options);
  try {
    app.parse(arguments);
  } catch (const CLI::ParseError& error) {
    return usage_error(app, *run, error, comm);
  }

  const KokkosSession kokkos(kokkos_arguments);
  comm.agree([&] {
    if (!options.config.empty()) kvzap::driver::read_deck(*run, options.config);
  });
  kvzap::driver::run(options, comm, version);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
#ifdef M_MMAP_THRESHOLD
  // Large blocks keep coming from mmap, so that what is freed goes back to the system at once:
  // glibc otherwise raises this limit to the largest block it has seen freed.
  mallopt(M_MMAP_THRESHOLD, 1 << 20);
#endif
  const MpiSession mpi(argc, argv);
  const auto comm = kvzap::Communicator::world();
  try {
    return run_program(argc, argv, comm);
  } catch (const kvzap::AgreedError& error) {
    if (comm.is_root()) fmt::print(stderr, "kvzap: error: {}\n", error.what());
    return exit_failure;
  } catch (const std::exception& error) {
    // This rank's own trouble: the others wait in some collective call and must be ended.
    const char* what = dynamic_cast<const std::bad_alloc*>(&error) ? "out of memory" : error.what();
    fmt::print(stderr, "kvzap: error: rank {}: {}\n", comm.rank(), what);
    std::fflush(stderr);
    MPI_Abort(comm.mpi(), exit_failure);
  }
  return exit_failure;
}
