// The rows of a head in order of position.
#pragma once

#include <kvzap/core/cache.hpp>

namespace kvzap::detail {

/// Slot of the ring's i-th oldest row.
template <class Value, PageOrder order>
KOKKOS_INLINE_FUNCTION std::int64_t ring_slot(const RaggedLayer<Value, order>& layer,
                                              std::int64_t i) {
  return (layer.tokens - layer.ring_first - layer.ring_rows() + i) % layer.window;
}

/// Where a row lies.
template <class Value>
struct RowPlace {
  const Value* key;
  const Value* value;
  std::int64_t dim_stride;
};

/// The i-th oldest of the rows that a head has in the cache: retained ones, then the ring's.
template <class Value, PageOrder order>
KOKKOS_INLINE_FUNCTION RowPlace<Value> cached_row(const RaggedLayer<Value, order>& layer, int head,
                                                  std::int64_t i) {
  const std::int64_t retained = layer.retained(head);
  const bool in_page = i < retained;
  const auto span = layer.span(head, in_page ? i / layer.page_rows : layer.pages(head));
  const std::int64_t slot = in_page ? i % layer.page_rows : ring_slot(layer, i - retained);
  const std::int64_t offset = slot * span.row_stride;
  return {span.keys + offset, span.values + offset, span.dim_stride};
}

}  // namespace kvzap::detail
