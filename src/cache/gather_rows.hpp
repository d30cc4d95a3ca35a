// Rows of one head one behind the other as floats, for policies: those of pages, ring, and of the
// step's new tokens.
#pragma once

#include <kvzap/core/cache.hpp>

namespace kvzap::detail {

/// out(i, d) = dimension d of row begin + i of a head, as float, for i < count: of its value if
/// `values`, else of its key. A head's rows are its retained ones, those of the ring, both in order
/// of position, and then new_rows, (token, head, dim): keys or values of tokens that are not in the
/// cache yet (no tokens: an empty view). Bytes read: count * head_dim values. Does not wait. Throws
/// Error if `out` is not (at least count, head_dim).
template <class Value, PageOrder order>
void gather_rows(const ExecutionSpace& exec, const RaggedLayer<Value, order>& cached, int head,
                 const Kokkos::View<const Value***, Kokkos::LayoutStride, MemorySpace>& new_rows,
                 std::int64_t begin, std::int64_t count, bool values,
                 const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>& out);

/// out(i) = position of such a row, for i < count; new tokens have the positions
/// first_new_position, first_new_position + 1, …. Does not wait. Throws Error if `out` has fewer
/// than count elements.
template <class Value, PageOrder order>
void gather_positions(const ExecutionSpace& exec, const RaggedLayer<Value, order>& cached, int head,
                      std::int64_t first_new_position, std::int64_t begin, std::int64_t count,
                      const Kokkos::View<std::int64_t*, MemorySpace>& out);

}  // namespace kvzap::detail
