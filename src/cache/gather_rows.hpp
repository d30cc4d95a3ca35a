// Gathers the rows of one head as consecutive floats, for policies: rows of pages, of the ring, and
// of the step's new tokens.
#pragma once

#include <kvzap/core/array_view.hpp>
#include <kvzap/core/ragged_layer.hpp>

namespace kvzap::cache {

/// Rows begin … begin + count - 1 of a head.
struct RowRange {
  int head;
  std::int64_t begin, count;
};

/// Gathers rows of a head's keys, or of its `values`, into out, (row, dim).
///
/// A head's rows are its retained rows and the rows of the ring, both in order of position,
/// followed by new_rows. new_rows (token, head, dim) are keys or values of tokens that the cache
/// does not have yet, of the cache's type; it may be absent. Does not wait. Throws Error if `out`
/// is not (at least count, head_dim).
void gather_rows(const ExecutionSpace& exec, const RaggedLayer& cached, const RowRange& range,
                 const ConstArrayView& new_rows, bool values,
                 const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>& out);

/// Writes the positions of these rows to out(0) … out(count - 1). New tokens have positions
/// first_new_position, first_new_position + 1, …. Does not wait. Throws Error if `out` has fewer
/// than count elements.
void gather_positions(const ExecutionSpace& exec, const RaggedLayer& cached, const RowRange& range,
                      std::int64_t first_new_position,
                      const Kokkos::View<std::int64_t*, MemorySpace>& out);

}  // namespace kvzap::cache
