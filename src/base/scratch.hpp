// Device memory that grows on demand and is kept between calls.
#pragma once

#include <Kokkos_Core.hpp>
#include <cstdint>
#include <string>
#include <type_traits>

#include "base/huge_pages.hpp"

namespace kvzap::detail {

/// Makes `scratch` hold at least `count` elements, of unspecified content if it had to grow. What
/// it held is freed before more is taken, so that both never exist together. On the host, much of
/// it lies on huge pages: kernels read it in long runs, and eviction reads rows scattered over it.
template <class Value, class... Properties>
void reserve_scratch(Kokkos::View<Value*, Properties...>& scratch, std::int64_t count,
                     const char* label) {
  if (static_cast<std::int64_t>(scratch.extent(0)) >= count) return;
  scratch = {};
  scratch = Kokkos::View<Value*, Properties...>(
      Kokkos::view_alloc(Kokkos::WithoutInitializing, std::string(label)), count);
  if constexpr (std::is_same_v<typename Kokkos::View<Value*, Properties...>::memory_space,
                               Kokkos::HostSpace>) {
    advise_huge_pages(scratch.data(), scratch.size() * sizeof(Value));
  }
}

}  // namespace kvzap::detail
