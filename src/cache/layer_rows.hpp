// Access to single rows of a layer in order of position, for kernels whose speed does not matter.
#pragma once

#include "cache/cache_impl.hpp"
#include "cache/quantised_place.hpp"
#include "linalg/pack_row.hpp"

namespace kvzap::cache {

/// The rows of every head of a layer: those in pages, then those in the ring.
struct LayerRows {
  RaggedLayer layer;
  float* ring_scores = nullptr;  // (head, window); null: not asked for

  static LayerRows of(Store& store, SequenceId sequence, int layer_index) {
    return {store.cached_layer(sequence, layer_index),
            store.layer_at(sequence, layer_index).ring_scores.data()};
  }

  /// A row's position and score, and where its page has the position; null in the ring.
  struct Row {
    std::int64_t position;
    float* score;
    std::int32_t* held_position;
  };
  KOKKOS_INLINE_FUNCTION Row at(std::int64_t head, std::int64_t row) const {
    const RowPlace place = HeadExtents::of(layer, head, RingOrder::positions).place(row, row + 1);
    if (place.page < 0) {
      float* const score =
          ring_scores == nullptr ? nullptr : ring_scores + head * layer.window + place.slot;
      return {layer.tokens - layer.rows(head) + row, score, nullptr};
    }
    const std::uintptr_t metadata = layer.metadata_addresses(layer.page_table(head, place.page));
    std::int32_t* const position = page_positions(metadata) + place.slot;
    return {*position, page_scores(metadata, layer.page_rows) + place.slot, position};
  }
  /// Returns the key and value of a row that is not quantised.
  template <class Value>
  KOKKOS_INLINE_FUNCTION RowRun<Value> wide(std::int64_t head, std::int64_t row) const {
    return HeadRows<Value>{layer, head, RingOrder::positions}.run(row, row + 1);
  }
  /// Returns the place of a quantised row.
  KOKKOS_INLINE_FUNCTION QuantisedPlace quantised(std::int64_t head, std::int64_t row,
                                                  bool values) const {
    return {{layer.format, layer.page_rows, layer.head_dim},
            layer.addresses(layer.page_table(head, row / layer.page_rows)),
            row % layer.page_rows,
            values};
  }
  /// Reads the key and value of a row. Unpacks quantised ones.
  template <class Value>
  KOKKOS_INLINE_FUNCTION void read(std::int64_t head, std::int64_t row, Value* key,
                                   Value* value) const {
    if (layer.is_packed(head, row)) {
      const std::int64_t page = row / layer.page_rows, slot = row % layer.page_rows;
      linalg::unpack_row_to(layer.quantised(head, page, false), slot, key);
      linalg::unpack_row_to(layer.quantised(head, page, true), slot, value);
      return;
    }
    const RowRun<Value> found = wide<Value>(head, row);
    for (int d = 0; d < layer.head_dim; ++d) {
      key[d] = found.keys[d];
      value[d] = found.values[d];
    }
  }
};

}  // namespace kvzap::cache
