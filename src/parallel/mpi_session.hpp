// MPI from the start of a program to its end. Without MPI there is nothing to start.
#pragma once

#include <kvzap/config.hpp>

#if KVZAP_HAVE_MPI
#include <mpi.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>
#endif

namespace kvzap::detail {

#if KVZAP_HAVE_MPI
/// Whether a launcher of MPI (mpirun, mpiexec, srun) has started this process: each tells its ranks
/// by variables of these names who they are. First called before MPI starts, which sets some
/// itself.
inline bool has_mpi_launcher() {
  static const bool found = [] {
    constexpr std::string_view prefixes[] = {
        "OMPI_COMM_WORLD_", "PMIX_", "PMI_",  "PMI2_", "MPI_LOCALRANKID",
        "I_MPI_HYDRA_",     "HYDI_", "ALPS_", "JSM_"};
    for (char** variable = environ; variable && *variable; ++variable) {
      for (const std::string_view prefix : prefixes) {
        if (std::string_view(*variable).rfind(prefix, 0) == 0) return true;
      }
    }
    return false;
  }();
  return found;
}

/// A process that no launcher has started talks to nobody. Unless it is told so, Open MPI starts a
/// daemon (orted) for what such a process might spawn, which stays behind if the process is killed,
/// and looks for networks: together 0.3 s, against 0.03. What the user has set stays; other MPIs do
/// not know these variables.
inline void be_alone_in_mpi() {
  if (has_mpi_launcher()) return;
  setenv("OMPI_MCA_ess_singleton_isolated", "1", 0);
  // All such processes of a user would share one folder, which the first to end takes away from
  // those that begin.
  setenv("OMPI_MCA_orte_create_session_dirs", "0", 0);
  setenv("OMPI_MCA_pml", "ob1", 0);
  setenv("OMPI_MCA_btl", "self", 0);
}
#endif

/// MPI from construction to destruction.
class MpiSession {
 public:
  MpiSession([[maybe_unused]] int& argc, [[maybe_unused]] char**& argv) {
#if KVZAP_HAVE_MPI
    be_alone_in_mpi();
    // Threads of Kokkos and of the BLAS exist beside the one that calls MPI.
    int provided = MPI_THREAD_SINGLE;
    if (MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided) != MPI_SUCCESS ||
        provided < MPI_THREAD_FUNNELED) {
      std::fprintf(stderr, "kvzap: error: MPI cannot be started beside threads\n");
      std::exit(1);
    }
#endif
  }
  ~MpiSession() {
#if KVZAP_HAVE_MPI
    MPI_Finalize();
#endif
  }
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;
};

}  // namespace kvzap::detail
