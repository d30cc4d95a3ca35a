// The views of an attention call, as all implementations of attention take them.
#pragma once

#include <algorithm>
#include <kvzap/core/attention.hpp>

#include "attention/softmax.hpp"

namespace kvzap::attention {

/// The first row that a span's token sees, less the token's number, as begin() of tiles takes it:
/// every token sees all rows.
inline constexpr std::int64_t no_window = -(std::int64_t{1} << 62);

/// Rows of type Value: (row, head, dim).
template <class Value>
using RowsView = Kokkos::View<const Value***, Kokkos::LayoutStride, MemorySpace>;

/// Returns rows first … first + count - 1 of a head of a call's new keys and values.
template <class Value>
KOKKOS_INLINE_FUNCTION RowRun<Value> new_rows_of(const RowsView<Value>& keys,
                                                 const RowsView<Value>& values, int head,
                                                 std::int64_t first, std::int64_t count) {
  const auto offset = [&](const RowsView<Value>& view) {
    return first * static_cast<std::int64_t>(view.stride(0)) +
           head * static_cast<std::int64_t>(view.stride(1));
  };
  return {keys.data() + offset(keys), values.data() + offset(values), count,
          static_cast<std::int64_t>(keys.stride(0)), static_cast<std::int64_t>(keys.stride(2))};
}

/// The views of one call, checked to fit each other, and sizes derived from them. NewRows:
/// ConstArrayView before an implementation is chosen, then RowsView.
template <class NewRows>
struct BasicCall {
  using Span = AttentionSpan;

  Attention::QueryView queries;
  NewRows new_keys;
  NewRows new_values;
  Attention::OutputView output;
  LogSumExpView lse;  // may be empty
  int kv_heads = 0;   // > 0
  int group = 1;
  int dim = 1;
  float soft_cap = 0;  // of scaled scores; 0: none

  bool wants_lse() const { return lse.extent(0) > 0; }
  template <class Value>
  BasicCall<RowsView<Value>> as() const {
    return {queries,
            new_keys.template as<Value>(),
            new_values.template as<Value>(),
            output,
            lse,
            kv_heads,
            group,
            dim,
            soft_cap};
  }
};
template <class Value>
using AttentionCall = BasicCall<RowsView<Value>>;

}  // namespace kvzap::attention
