// Access to single rows of a layer in order of position, for kernels whose speed does not matter.
#pragma once

#include "cache/cache_impl.hpp"

namespace kvzap::cache {

/// The rows of every head of a layer: those in pages, then those in the ring.
struct LayerRows {
  const std::uintptr_t* addresses = nullptr;
  const std::uintptr_t* metadata_addresses = nullptr;
  const PageId* table = nullptr;
  const std::int64_t* retained = nullptr;
  char* ring = nullptr;
  float* ring_scores = nullptr;
  std::int64_t table_stride = 0;
  std::int64_t tokens = 0;
  std::int64_t ring_first = 0;
  std::int64_t in_ring = 0;
  int window = 1, page_rows = 1, dim = 1, value_bytes = 4;
  PageFormat format;

  static LayerRows of(Store& store, SequenceId sequence, int layer_index) {
    const CachedLayer layer = store.cached_layer(sequence, layer_index);
    LayerRows rows;
    rows.addresses = layer.addresses.data();
    rows.metadata_addresses = layer.metadata_addresses.data();
    rows.table = layer.page_table.data();
    rows.retained = layer.retained.data();
    rows.ring = const_cast<char*>(layer.ring.data());
    rows.ring_scores = store.layer_at(sequence, layer_index).ring_scores.data();
    rows.table_stride = layer.page_table.stride(0);
    rows.tokens = layer.tokens;
    rows.ring_first = layer.ring_first;
    rows.in_ring = layer.ring_rows();
    rows.window = layer.window;
    rows.page_rows = layer.page_rows;
    rows.dim = layer.head_dim;
    rows.value_bytes = static_cast<int>(size_of(layer.dtype));
    rows.format = layer.format;
    return rows;
  }

  /// A row by its key and value, of the cache's type, or, if it is packed, by its page's rows and
  /// its slot there.
  struct Row {
    void* key;
    void* value;
    std::int64_t position;
    float* score;
    bool packed;
    std::int64_t slot;
    PackedRows packed_keys, packed_values;
  };

  KOKKOS_INLINE_FUNCTION std::int64_t count(std::int64_t head) const {
    return retained[head] + in_ring;
  }
  KOKKOS_INLINE_FUNCTION Row at(std::int64_t head, std::int64_t row) const {
    const bool in_page = row < retained[head];
    const std::int64_t position = tokens - in_ring + row - retained[head];  // in the ring
    const std::int64_t slot = in_page ? row % page_rows : (position - ring_first) % window;
    const std::int64_t capacity = in_page ? page_rows : window;
    const PageId page = in_page ? table[head * table_stride + row / page_rows] : 0;
    const std::uintptr_t metadata = in_page ? metadata_addresses[page] : 0;
    const std::int64_t bytes = std::int64_t{dim} * value_bytes;  // of a key
    char* const base =
        in_page ? reinterpret_cast<char*>(addresses[page]) : ring + 2 * head * window * bytes;
    char* const key = base + slot * bytes;
    Row found{
        key,
        key + capacity * bytes,
        in_page ? page_positions(metadata)[slot] : position,
        in_page ? page_scores(metadata, page_rows) + slot : ring_scores + head * window + slot,
        in_page && format.keys != RowType::wide,
        slot,
        {},
        {}};
    if (found.packed) {
      const PackedPage packed{format, page_rows, dim};
      found.packed_keys = packed.at(addresses[page], false);
      found.packed_values = packed.at(addresses[page], true);
    }
    return found;
  }
};

}  // namespace kvzap::cache
