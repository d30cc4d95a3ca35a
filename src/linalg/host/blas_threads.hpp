// Keeps a threaded BLAS or oneDNN from putting more threads on a node than it has cores, and
// OpenBLAS from waiting for memory.
#pragma once

namespace kvzap::linalg {

/// Sets the number of threads of the process's BLAS, if it has a setter. Sets that of oneDNN too,
/// unless Kokkos itself runs several host threads: oneDNN then uses their number. A BLAS keeps the
/// number that the user chose (OPENBLAS_NUM_THREADS, MKL_NUM_THREADS, BLIS_NUM_THREADS). The number
/// of oneDNN applies to products that the calling thread starts.
/// Where address space is short, OpenBLAS stays at one thread.
void set_blas_threads(int threads);

/// Call before BLAS or LAPACK. Throws Error if OpenBLAS would wait forever for its first buffer.
void expect_room_for_blas();

}  // namespace kvzap::linalg
