// The extents of a cache, and the bytes of its rows.
#pragma once

#include <kvzap/core/quantised_rows.hpp>
#include <optional>
#include <vector>

namespace kvzap {

/// The ring of a layer whose attention sees recent tokens only. The ring is all that the layer
/// keeps: rows that leave it are dropped, and counted by no function.
struct OwnRing {
  /// Rows; 0: the layer has pages, and a ring of CacheShape::window rows.
  int rows = 0;
  /// The ring begins anew after each multiple of `rows` tokens, as chunked attention needs it.
  bool restarts = false;
  /// Dimensions of the layer's heads; 0: CacheShape::head_dim.
  int head_dim = 0;
};

/// The state of a layer, mostly of one that keeps no rows: float values of the caller, for each of
/// its heads. They begin as zeros, and the caller changes them in each step (KVCache::state).
struct StateShape {
  /// Heads that this rank owns. They need not be KV heads.
  int heads = 0;
  /// Values of a head; 0: no state.
  std::int64_t values = 0;
  /// The layer has rows beside its state. (Without a state it has rows unless it keeps nothing.)
  bool is_beside_rows = false;
  bool keeps_nothing = false;
};

/// Extents of one rank's part of a cache.
struct CacheShape {
  /// KV heads that this rank owns, per layer.
  std::vector<int> heads;
  /// Dimensions of a head, unless the layer's OwnRing has others.
  int head_dim = 0;
  /// Rows of the ring: the most recent tokens, always kept.
  int window = 128;
  /// Rows of a page.
  int page_rows = 64;
  /// Per layer; empty: all layers have pages.
  std::vector<OwnRing> own_rings = {};
  /// Per layer; empty: all layers have rows, and no state.
  std::vector<StateShape> states = {};
  /// How pages store rows. Rings store them as they arrive.
  PageFormat format = {};
  /// From this layer on, each full page has the bounds of its keys (RaggedLayer::page_bounds), for
  /// AttentionSpan::read_pages.
  std::optional<int> bounds_from = std::nullopt;

  bool has_state(int layer) const { return !states.empty() && states[layer].values > 0; }
  bool has_rows(int layer) const {
    if (states.empty()) return true;
    return has_state(layer) ? states[layer].is_beside_rows : !states[layer].keeps_nothing;
  }
  /// Returns the own ring of a layer. That of a layer without rows is always empty: it begins anew
  /// after each token.
  OwnRing own_ring(int layer) const {
    if (!has_rows(layer)) return {1, true};
    return own_rings.empty() ? OwnRing() : own_rings[layer];
  }
  bool has_pages(int layer) const { return own_ring(layer).rows == 0; }
  /// Returns whether a layer keeps rows. A ring of one row that begins anew after each token is
  /// always empty: such a layer has a state, or sees the rows of another layer.
  bool keeps_rows(int layer) const {
    const OwnRing ring = own_ring(layer);
    return !(ring.rows == 1 && ring.restarts);
  }
  /// Returns the dimensions of a layer's heads.
  int dim(int layer) const {
    const int own = own_ring(layer).head_dim;
    return own == 0 ? head_dim : own;
  }
  bool has_bounds(int layer) const {
    return bounds_from && layer >= *bounds_from && has_pages(layer);
  }
  bool has_layers_without_pages() const { return !own_rings.empty() || !states.empty(); }
  /// Returns the rows of a layer's ring.
  int ring_rows(int layer) const { return has_pages(layer) ? window : own_ring(layer).rows; }
};

/// Bytes of a row's key and value in a page.
constexpr std::size_t page_row_values(int head_dim, std::size_t value_bytes,
                                      const PageFormat& format = {}) {
  if (format.keys == RowType::wide) return format.vectors() * value_bytes * head_dim;
  const std::size_t keys = QuantisedRows::code_bytes(format.keys, head_dim) + sizeof(bfloat16);
  if (format.values_are_keys) return keys;
  return keys + QuantisedRows::code_bytes(format.values, head_dim) + sizeof(bfloat16);
}
/// Bytes of a row in a page: key, value, position and score.
constexpr std::size_t page_row_bytes(int head_dim, std::size_t value_bytes,
                                     const PageFormat& format = {}) {
  return page_row_values(head_dim, value_bytes, format) + sizeof(std::int32_t) + sizeof(float);
}
/// Bytes of the bounds of a page's keys: two values for each dimension.
constexpr std::size_t page_bounds_bytes(int head_dim, std::size_t value_bytes,
                                        const PageFormat& format = {}) {
  return 2 * head_dim * (format.keys == RowType::wide ? value_bytes : sizeof(bfloat16));
}
/// Bytes of a row in a ring, which needs no position.
constexpr std::size_t ring_row_bytes(int head_dim, std::size_t value_bytes,
                                     const PageFormat& format = {}) {
  return format.vectors() * value_bytes * head_dim + sizeof(float);
}

}  // namespace kvzap
