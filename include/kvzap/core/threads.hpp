// How many threads a process computes on.
#pragma once

#include <kvzap/core/communicator.hpp>

namespace kvzap {

/// Threads on which loops of hosts run from now on, and BLAS' and oneDNN's products that this
/// thread starts; 1 at first. Results do not depend on it. Not while anything of this library runs,
/// and before the first engine: what has been made keeps room for as many threads as there were.
/// Where Kokkos' host backend has threads of its own (OpenMP, Threads), and in builds without
/// OpenMP, products alone follow. Throws Error unless threads >= 1.
void set_threads(int threads);
/// Threads on which loops of hosts run.
int threads();

/// Cores that this rank may use: its share of those that it is bound to, among the ranks of its
/// node that may use one of them too; a container's quota may leave fewer. OMP_NUM_THREADS where
/// that is set. At least 1. Collective.
int threads_of_rank(const Communicator& comm);

}  // namespace kvzap
