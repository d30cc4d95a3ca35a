// The views of an attention call, as all implementations of attention take them.
#pragma once

#include <algorithm>
#include <kvzap/core/attention.hpp>

#include "attention/softmax.hpp"

namespace kvzap::attention {

/// The first row that a span's token sees, less the token's number, as begin() of tiles takes it:
/// every token sees all rows.
inline constexpr std::int64_t no_window = -(std::int64_t{1} << 62);

/// The views of one call, checked to fit each other, and sizes derived from them.
template <class Value>
struct AttentionCall {
  using Span = AttentionSpan<Value>;

  typename Attention<Value>::QueryView queries;
  typename Attention<Value>::RowsView new_keys;
  typename Attention<Value>::RowsView new_values;
  typename Attention<Value>::OutputView output;
  LogSumExpView lse;  // may be empty
  int kv_heads = 0;   // > 0
  int group = 1;
  int dim = 1;
  float soft_cap = 0;  // of scaled scores; 0: none

  bool wants_lse() const { return lse.extent(0) > 0; }
};

}  // namespace kvzap::attention
