// Rows of a ring and new rows in order of position, for attention over windows.
#pragma once

#include <kvzap/core/array_view.hpp>
#include <kvzap/core/ragged_layer.hpp>

namespace kvzap::cache {

/// Copies the ring's rows from position `oldest` on, then those of new_keys and new_values, to the
/// first rows of keys and values. All arrays are (row, head, dim), one after the other, and of the
/// cache's type. Does not wait. Throws Error if `keys` has too few rows.
void join_rows(const ExecutionSpace& exec, const RaggedLayer& cached, std::int64_t oldest,
               const ConstArrayView& new_keys, const ConstArrayView& new_values,
               const ArrayView& keys, const ArrayView& values);

}  // namespace kvzap::cache
