// The rows of a head in order of position.
#pragma once

#include <kvzap/core/ragged_layer.hpp>

namespace kvzap::attention {

/// Returns the slot of the ring's i-th oldest row.
KOKKOS_INLINE_FUNCTION std::int64_t ring_slot(const RaggedLayer& layer, std::int64_t i) {
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
template <class Value>
KOKKOS_INLINE_FUNCTION RowPlace<Value> cached_row(const RaggedLayer& layer, int head,
                                                  std::int64_t i) {
  const std::int64_t retained = layer.retained(head);
  const bool in_page = i < retained;
  const auto span = layer.span<Value>(head, in_page ? i / layer.page_rows : layer.pages(head));
  const std::int64_t slot = in_page ? i % layer.page_rows : ring_slot(layer, i - retained);
  const std::int64_t offset = slot * layer.head_dim;
  return {span.keys + offset, span.values + offset, 1};
}

}  // namespace kvzap::attention
