#include "base/host_threads.hpp"

#include <algorithm>
#include <exception>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "base/address_space.hpp"

namespace kvzap::base {
namespace {

/// Threads of Kokkos' host backend.
int kokkos_threads() {
  static const int threads = Kokkos::DefaultHostExecutionSpace().concurrency();
  return threads;
}

int& own_threads() {
  static int threads = 1;
  return threads;
}

}  // namespace

bool can_set_host_threads() {
#if defined(_OPENMP)
  return kokkos_threads() == 1;
#else
  return false;
#endif
}

int host_threads() { return can_set_host_threads() ? own_threads() : kokkos_threads(); }

void set_host_threads(int threads) {
  if (can_set_host_threads()) own_threads() = std::max(1, threads);
}

void on_host_threads(std::int64_t n, const void* work,
                     void (*piece)(const void* work, std::int64_t begin, std::int64_t end)) {
#if defined(_OPENMP)
  const int threads = own_threads();
  if (threads > 1 && omp_in_parallel() == 0) {
    std::exception_ptr error;  // of the first part that threw
    int part_of_error = threads;
    expect_threads(threads);
#pragma omp parallel num_threads(threads)
    {
      // OpenMP may give fewer threads than requested (OMP_THREAD_LIMIT); the parts stay the same.
      for (int t = omp_get_thread_num(); t < threads; t += omp_get_num_threads()) {
        try {
          piece(work, n * t / threads, n * (t + 1) / threads);
        } catch (...) {
#pragma omp critical(kvzap_host_threads)
          if (t < part_of_error) {
            part_of_error = t;
            error = std::current_exception();
          }
        }
      }
    }
    if (error) std::rethrow_exception(error);
    return;
  }
#endif
  piece(work, 0, n);
}

}  // namespace kvzap::base
