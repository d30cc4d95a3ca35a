// MPI from the start of a program to its end. Without MPI there is nothing to start.
#pragma once

#include <kvzap/config.hpp>

#if KVZAP_HAVE_MPI
#include <mpi.h>

#include <cstdio>
#include <cstdlib>
#endif

namespace kvzap::detail {

/// MPI from construction to destruction.
class MpiSession {
 public:
  MpiSession([[maybe_unused]] int& argc, [[maybe_unused]] char**& argv) {
#if KVZAP_HAVE_MPI
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
