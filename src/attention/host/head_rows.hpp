// The memory of the rows of a head that a span's queries see, for kernels on the host.
#pragma once

#include <algorithm>

#include "attention/call.hpp"
#include "attention/host/decode_rows.hpp"

namespace kvzap::attention {

/// Returns the run of rows of a head that begins at `row` and ends at `end` at the latest; empty
/// from `end` on. Rows are counted over the head's pages, the ring in slot order, and the span's
/// new rows.
template <class Value>
RowRun<Value> run_of(const AttentionSpan& span, int head, const RowsView<Value>& new_keys,
                     const RowsView<Value>& new_values, std::int64_t row, std::int64_t end) {
  if (row >= end) return {};
  const RaggedLayer& layer = span.cached;
  const std::int64_t retained = layer.retained(head);
  const std::int64_t cached_rows = layer.rows(head);
  RowRun<Value> run;
  std::int64_t skipped;
  if (row < cached_rows) {
    const bool in_page = row < retained;
    const std::int64_t index = in_page ? row / layer.page_rows : layer.pages(head);
    const auto cached = layer.span<Value>(head, index);
    run = {cached.keys, cached.values, cached.rows, layer.head_dim, 1};
    skipped = in_page ? row - index * layer.page_rows : row - retained;
  } else {
    run = {&new_keys(span.first_new, head, 0), &new_values(span.first_new, head, 0), span.new_rows,
           static_cast<std::int64_t>(new_keys.stride(0)),
           static_cast<std::int64_t>(new_keys.stride(2))};
    skipped = row - cached_rows;
  }
  run.keys += skipped * run.row_stride;
  run.values += skipped * run.row_stride;
  run.rows = std::min(run.rows - skipped, end - row);
  return run;
}

}  // namespace kvzap::attention
