// The rows of a head in order of position.
#pragma once

#include <kvzap/core/cache.hpp>

namespace kvzap::attention {

/// Returns the slot of the ring's i-th oldest row.
template <class Value, PageOrder order>
KOKKOS_INLINE_FUNCTION std::int64_t ring_slot(const RaggedLayer<Value, order>& layer,
                                              std::int64_t i) {
  return (layer.tokens - layer.ring_first - layer.ring_rows() + i) % layer.window;
}

/// The place of a row in memory.
template <class Value>
struct RowPlace {
  const Value* key;
  const Value* value;
  std::int64_t dim_stride;
};

/// Returns the i-th oldest row of a head in the cache: retained rows first, then the ring's.
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

}  // namespace kvzap::attention
