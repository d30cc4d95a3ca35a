// Keeps a threaded BLAS or oneDNN from putting more threads on a node than it has cores.
#pragma once

namespace kvzap::detail {

/// Sets the number of threads of the BLAS behind this process, if it is one that can be told, and
/// of oneDNN, unless Kokkos itself runs several host threads (they then share its number). A BLAS
/// for which the user chose a number (OPENBLAS_NUM_THREADS, MKL_NUM_THREADS, BLIS_NUM_THREADS)
/// keeps it. oneDNN's is that of products which the calling thread starts.
void set_blas_threads(int threads);

}  // namespace kvzap::detail
