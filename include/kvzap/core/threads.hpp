// The number of threads that a process computes on.
#pragma once

#include <kvzap/core/communicator.hpp>

namespace kvzap {

/// Sets the number of threads for loops on the host, and for products of BLAS and oneDNN that this
/// thread starts. It is 1 at first. Results do not depend on it. Call this function before the
/// first engine is made, because objects allocate scratch space for the current number of threads.
/// Do not call it while any function of this library runs. If Kokkos' host backend has its own
/// threads (OpenMP, Threads), and in builds without OpenMP, it affects only products. Throws Error
/// unless threads >= 1.
void set_threads(int threads);
/// Returns the number of threads for loops on the host.
int threads();

/// Returns the number of cores that this rank may use, at least 1. If OMP_NUM_THREADS is set, it
/// decides. Otherwise the cores to which the rank is bound are divided among the ranks on its node
/// that share any of them; a container's quota may reduce the result. Collective.
int threads_of_rank(const Communicator& comm);

}  // namespace kvzap
