// Device memory that grows on demand and is kept between calls.
#pragma once

#include <Kokkos_Core.hpp>
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "base/allocation_hook.hpp"
#include "base/huge_pages.hpp"

namespace kvzap::base {

/// Reserves space for `size` elements in total, and more if it has to grow.
template <class Vector>
void reserve_room(Vector& vector, std::size_t size) {
  if (vector.capacity() < size) vector.reserve(std::max(size, 2 * vector.capacity()));
}

/// Reserves space for `count` more elements.
template <class Vector>
void reserve_more(Vector& vector, std::size_t count) {
  reserve_room(vector, vector.size() + count);
}

/// How often memory has moved that kernels of later steps name again: scratch memory, and the
/// arrays of pages' addresses.
inline std::atomic<std::int64_t> memory_moves = 0;

/// Makes `scratch` hold at least `count` elements; if it grows, their contents are unspecified. The
/// old memory is freed before the new one is allocated, so that both never exist together. On the
/// host, huge pages hold much of it: kernels read it in long runs, and eviction reads scattered
/// rows.
template <class Value, class... Properties>
void reserve_scratch(Kokkos::View<Value*, Properties...>& scratch, std::int64_t count,
                     const char* label) {
  if (static_cast<std::int64_t>(scratch.extent(0)) >= count) return;
  scratch = {};
  ++memory_moves;
  before_allocation(count * sizeof(Value));
  scratch = Kokkos::View<Value*, Properties...>(
      Kokkos::view_alloc(Kokkos::WithoutInitializing, std::string(label)), count);
  if constexpr (std::is_same_v<typename Kokkos::View<Value*, Properties...>::memory_space,
                               Kokkos::HostSpace>) {
    advise_huge_pages(scratch.data(), scratch.size() * sizeof(Value));
  }
}

/// Makes scratch memory of bytes hold `count` values of any type, as reserve_scratch does. Returns
/// the values.
template <class Value, class... Properties>
Value* scratch_of(Kokkos::View<std::uint8_t*, Properties...>& scratch, std::int64_t count,
                  const char* label) {
  reserve_scratch(scratch, count * static_cast<std::int64_t>(sizeof(Value)), label);
  return reinterpret_cast<Value*>(scratch.data());
}

}  // namespace kvzap::base
