// Loops of hosts on several threads of this process, whatever Kokkos' host backend is.
//
// Where that backend has threads of its own (OpenMP, Threads), loops are its. Where it is Serial,
// as Debian's, they run on OpenMP's threads, which oneDNN brings in any case: as many for every
// loop, since GNU's run time would otherwise end threads and begin new ones from loop to loop.
#pragma once

#include <cstdint>

#include "base/kokkos_compat.hpp"

namespace kvzap::detail {

/// Threads on which loops of hosts run.
int host_threads();
/// How many there are from now on, 1 at first; not while loops run. Without effect where Kokkos'
/// host backend has threads of its own, and in builds without OpenMP.
void set_host_threads(int threads);
/// Whether set_host_threads has an effect.
bool can_set_host_threads();

/// Calls piece(work, begin, end) for a part of [0, n) on each of host_threads() threads, the t-th
/// part, in order, on the t-th thread. Throws what the first of these parts that threw has thrown.
/// From within itself: on the calling thread alone.
void on_host_threads(std::int64_t n, const void* work,
                     void (*piece)(const void* work, std::int64_t begin, std::int64_t end));

/// work(i) for 0 <= i < n, apart from Kokkos: for work that may throw. The same parts on the same
/// threads as host_for's.
template <class Work>
void for_each_on_threads(std::int64_t n, const Work& work) {
  on_host_threads(n, &work, [](const void* body, std::int64_t begin, std::int64_t end) {
    const Work& one = *static_cast<const Work*>(body);
    for (std::int64_t i = begin; i < end; ++i) one(i);
  });
}

/// Work for a thread below which a loop is not worth others: as elements of a row.
constexpr std::int64_t worthwhile_elements = 8192;

/// work(i) for 0 <= i < n. Which thread does which i does not change from call to call with the
/// same n, so that what one loop writes first another finds near. `weight`: elements that each i
/// stands for; loops of few run on one thread. `work` must not depend on the order, must not launch
/// kernels, and has no use for Kokkos' atomics, which a build of Kokkos for Serial alone makes
/// plain accesses.
template <class Work>
void host_for(const char* label, std::int64_t n, std::int64_t weight, const Work& work) {
  using Range =
      Kokkos::RangePolicy<Kokkos::DefaultHostExecutionSpace, Kokkos::IndexType<std::int64_t>>;
  if (n < 2 || !can_set_host_threads() || host_threads() == 1 ||
      n * weight < 2 * worthwhile_elements) {
    Kokkos::parallel_for(label, Range(0, n), work);
    return;
  }
  // As one kernel, whose copy of `work` has views that count no references: these counts are not
  // made for threads either. And tools see the loop by its name.
  Kokkos::parallel_for(label, Range(0, 1), [=](std::int64_t) {
    on_host_threads(n, &work, [](const void* body, std::int64_t begin, std::int64_t end) {
      const Work& one = *static_cast<const Work*>(body);
      for (std::int64_t i = begin; i < end; ++i) one(i);
    });
  });
}

/// The same for i that are worth a thread each.
template <class Work>
void host_for(const char* label, std::int64_t n, const Work& work) {
  host_for(label, n, worthwhile_elements, work);
}

}  // namespace kvzap::detail
