// Rows of a ring and new rows in order of position, for attention over windows.
#pragma once

#include <kvzap/core/cache.hpp>

namespace kvzap::cache {

/// Copies the ring's rows from position `oldest` on, then rows first_new … first_new + count - 1 of
/// new_keys and new_values, to rows first_out, … of keys and values. All views are (row, head,
/// dim), LayoutRight. Does not wait. Throws Error if `keys` has too few rows.
template <class Value>
void join_rows(const ExecutionSpace& exec, const RaggedLayer<Value>& cached, std::int64_t oldest,
               const Kokkos::View<const Value***, Kokkos::LayoutRight, MemorySpace>& new_keys,
               const Kokkos::View<const Value***, Kokkos::LayoutRight, MemorySpace>& new_values,
               std::int64_t first_new, std::int64_t count,
               const Kokkos::View<Value***, Kokkos::LayoutRight, MemorySpace>& keys,
               const Kokkos::View<Value***, Kokkos::LayoutRight, MemorySpace>& values,
               std::int64_t first_out);

}  // namespace kvzap::cache
