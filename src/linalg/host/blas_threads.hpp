// Keeps a threaded BLAS or oneDNN from putting more threads on a node than it has cores.
#pragma once

namespace kvzap::detail {

/// Sets the number of threads of the process's BLAS, if it has a setter. Sets that of oneDNN too,
/// unless Kokkos itself runs several host threads: oneDNN then uses their number. A BLAS keeps the
/// number that the user chose (OPENBLAS_NUM_THREADS, MKL_NUM_THREADS, BLIS_NUM_THREADS). The number
/// of oneDNN applies to products that the calling thread starts.
void set_blas_threads(int threads);

}  // namespace kvzap::detail
