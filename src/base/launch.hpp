// Launches that a LaunchGraph can keep.
#pragma once

#include <functional>
#include <vector>

#include "base/kokkos_compat.hpp"

namespace kvzap::base {

/// The launches that a LaunchGraph of a host keeps on this thread at the moment; null: none. (CUDA
/// records its streams by itself.)
inline thread_local std::vector<std::function<void()>>* kept_launches = nullptr;

/// Calls work(), which launches kernels, copies device memory or fills it. While a LaunchGraph of a
/// host records, the graph keeps work instead.
template <class Work>
void launch(const Work& work) {
  if constexpr (runs_on_host) {
    if (kept_launches != nullptr) {
      kept_launches->emplace_back(work);
      return;
    }
  }
  work();
}

/// Kokkos::parallel_for by way of `launch`.
template <class Policy, class Kernel>
void parallel_for(const char* label, const Policy& policy, const Kernel& kernel) {
  if constexpr (runs_on_host) {
    launch([=] { Kokkos::parallel_for(label, policy, kernel); });
  } else {
    Kokkos::parallel_for(label, policy, kernel);
  }
}

}  // namespace kvzap::base
