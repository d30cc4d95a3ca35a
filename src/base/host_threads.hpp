// Host loops on several threads of this process, for every host backend of Kokkos.
//
// If the backend has its own threads (OpenMP, Threads), the backend runs the loops. If it is
// Serial, as in Debian's Kokkos, loops run on OpenMP's threads, which oneDNN needs in any case.
// Every loop uses the same number of threads, because GNU's run time would otherwise end threads
// and start new ones between loops.
#pragma once

#include <cstdint>

#include "base/kokkos_compat.hpp"

namespace kvzap::base {

/// Returns the number of threads for host loops.
int host_threads();
/// Sets the number of threads, 1 at first. Do not call it while loops run. It has no effect if
/// Kokkos' host backend has its own threads, and in builds without OpenMP.
void set_host_threads(int threads);
/// Returns whether set_host_threads has an effect.
bool can_set_host_threads();

/// Calls piece(work, begin, end) for one part of [0, n) on each of host_threads() threads: the t-th
/// part, in order, on the t-th thread. Rethrows the exception of the first part that threw. A
/// nested call runs on the calling thread alone.
void on_host_threads(std::int64_t n, const void* work,
                     void (*piece)(const void* work, std::int64_t begin, std::int64_t end));

/// Calls work(i) for 0 <= i < n, without Kokkos; `work` may throw. Parts and threads are those of
/// host_for.
template <class Work>
void for_each_on_threads(std::int64_t n, const Work& work) {
  on_host_threads(n, &work, [](const void* body, std::int64_t begin, std::int64_t end) {
    const Work& one = *static_cast<const Work*>(body);
    for (std::int64_t i = begin; i < end; ++i) one(i);
  });
}

/// Elements per thread below which more threads do not pay off.
constexpr std::int64_t worthwhile_elements = 8192;

/// Calls work(i) for 0 <= i < n. Calls with the same n give each i to the same thread, so that a
/// loop finds in its cache the data that another loop wrote. `weight`: elements that each i stands
/// for; loops of few elements run on one thread. `work` must not depend on the order and must not
/// launch kernels. It must not need Kokkos' atomics, which are plain accesses in a build of Kokkos
/// for Serial alone.
template <class Work>
void host_for(const char* label, std::int64_t n, std::int64_t weight, const Work& work) {
  using Range =
      Kokkos::RangePolicy<Kokkos::DefaultHostExecutionSpace, Kokkos::IndexType<std::int64_t>>;
  if (n < 2 || !can_set_host_threads() || host_threads() == 1 ||
      n * weight < 2 * worthwhile_elements) {
    Kokkos::parallel_for(label, Range(0, n), work);
    return;
  }
  // One kernel wraps the loop. The views in its copy of `work` count no references; these counts
  // are not thread-safe in such builds either. Profiling tools see the loop by its name.
  Kokkos::parallel_for(label, Range(0, 1), [=](std::int64_t) {
    on_host_threads(n, &work, [](const void* body, std::int64_t begin, std::int64_t end) {
      const Work& one = *static_cast<const Work*>(body);
      for (std::int64_t i = begin; i < end; ++i) one(i);
    });
  });
}

/// Does the same for i that are each worth a thread.
template <class Work>
void host_for(const char* label, std::int64_t n, const Work& work) {
  host_for(label, n, worthwhile_elements, work);
}

}  // namespace kvzap::base
