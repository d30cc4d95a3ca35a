// The views of an attention call, as all implementations of attention take them.
#pragma once

#include <algorithm>
#include <kvzap/core/attention.hpp>

#include "attention/softmax.hpp"

namespace kvzap::attention {

/// The first row that a span's token sees, less the token's number, as begin() of tiles takes it:
/// every token sees all rows.
inline constexpr std::int64_t no_window = -(std::int64_t{1} << 62);

/// The views of one call, checked to fit each other, and sizes derived from them. An implementation
/// looks up the type of rows once in a call, and its kernels read them as NewRows and HeadRows.
struct AttentionCall : AttentionOptions {
  Attention::QueryView queries;
  ConstArrayView new_keys;
  ConstArrayView new_values;
  Attention::OutputView output;
  int kv_heads = 0;  // > 0
  int group = 1;
  int dim = 1;

  DType dtype() const { return new_keys.dtype; }
  bool wants_lse() const { return lse.extent(0) > 0; }
};

/// A span's new rows, as kernels read them. Keys and values have the same strides.
template <class Value>
struct NewRows {
  const Value* keys;
  const Value* values;
  std::int64_t rows, row_stride, head_stride, dim_stride;

  NewRows(const AttentionSpan& span, const ConstArrayView& of_keys, const ConstArrayView& of_values)
      : keys(of_keys.values<Value>() + span.first_new * of_keys.strides[0]),
        values(of_values.values<Value>() + span.first_new * of_keys.strides[0]),
        rows(span.new_rows),
        row_stride(of_keys.strides[0]),
        head_stride(of_keys.strides[1]),
        dim_stride(of_keys.strides[2]) {}
  /// Returns the rows of a head from `first` on.
  KOKKOS_INLINE_FUNCTION RowRun<Value> of_head(std::int64_t head, std::int64_t first = 0) const {
    // Arrays without rows may have no address.
    const std::int64_t offset = rows > 0 ? first * row_stride + head * head_stride : 0;
    return {keys + offset, values + offset, rows - first, row_stride, dim_stride};
  }
};

}  // namespace kvzap::attention
