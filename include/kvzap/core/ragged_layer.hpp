// One layer of a sequence as kernels read it.
#pragma once

#include <kvzap/core/page_pool.hpp>
#include <kvzap/core/quantised_rows.hpp>

namespace kvzap {

/// Bytes of a row's position and score in the metadata of a page.
inline constexpr std::size_t page_metadata_row_bytes = sizeof(std::int32_t) + sizeof(float);

/// One layer of one sequence as attention kernels read it. A head has retained rows in pages and
/// rows in its ring. Their order does not matter to attention. Kernels find every row's key and
/// value through HeadRows.
struct RaggedLayer {
  // By page id: the address of a page's keys, followed by its values if it has any; and of its
  // rows' positions (int32), followed by their scores (float).
  Kokkos::View<const std::uintptr_t*, MemorySpace> addresses;
  Kokkos::View<const std::uintptr_t*, MemorySpace> metadata_addresses;
  Kokkos::View<const PageId**, Kokkos::LayoutRight, MemorySpace> page_table;  // (head, page)
  Kokkos::View<const std::int64_t*, MemorySpace> retained;                    // (head)
  // (head, format.vectors() * window * dim) values of `dtype`, in bytes
  Kokkos::View<const char**, Kokkos::LayoutRight, MemorySpace> ring;
  std::int64_t tokens = 0;  // appended so far
  // The ring holds no position below this: 0, or the number of tokens when `evict` last emptied it
  // or when it last began anew (OwnRing).
  // Position p has ring slot (p - ring_first) % window: slots 0 … ring_rows() - 1 are in use.
  std::int64_t ring_first = 0;
  int heads = 0;
  int window = 1;
  int page_rows = 1;
  int head_dim = 1;
  DType dtype = DType::f32;
  PageFormat format;
  // Every full page has the bounds of its keys (CacheShape::bounds_from).
  bool has_bounds = false;

  KOKKOS_INLINE_FUNCTION std::int64_t ring_rows() const {
    const std::int64_t since = tokens - ring_first;
    return since < window ? since : window;
  }
  KOKKOS_INLINE_FUNCTION std::int64_t rows(std::int64_t head) const {
    return retained(head) + ring_rows();
  }
  /// Returns the keys of a head's ring, followed by their values. Value is the type of `dtype`.
  template <class Value>
  KOKKOS_INLINE_FUNCTION const Value* ring_of(std::int64_t head) const {
    return reinterpret_cast<const Value*>(&ring(head, 0));
  }
  /// Returns whether a head's row, counted over its pages and its ring, is quantised.
  KOKKOS_INLINE_FUNCTION bool is_packed(std::int64_t head, std::int64_t row) const {
    return format.keys != RowType::wide && row < retained(head);
  }
  /// Returns the bounds of a full page's keys: the largest value of each dimension, then the
  /// smallest ones. Bound is the type of `dtype`. Those of quantised keys are rotated, of type
  /// bfloat16.
  template <class Bound>
  KOKKOS_INLINE_FUNCTION const Bound* page_bounds(std::int64_t head, std::int64_t page) const {
    return reinterpret_cast<const Bound*>(metadata_addresses(page_table(head, page)) +
                                          page_rows * page_metadata_row_bytes);
  }
  /// Returns the keys or values of a page with quantised rows.
  KOKKOS_INLINE_FUNCTION QuantisedRows quantised(std::int64_t head, std::int64_t page,
                                                 bool values) const {
    return QuantisedPage{format, page_rows, head_dim}.at(addresses(page_table(head, page)), values);
  }
};

/// A layer together with bounds that the host knows without waiting for kernels. Kernels receive
/// only the base class.
struct CachedLayer : RaggedLayer {
  /// (head): an upper bound of the head's retained rows.
  Kokkos::View<const std::int64_t*, Kokkos::HostSpace> bounds;
};

/// How a head's ring rows follow those of its pages: by position, or by slot. By slot they lie one
/// after the other.
enum class RingOrder : std::uint8_t { positions, slots };

/// Rows of a head that lie one after the other.
struct RowPlace {
  std::int64_t page;  // its index in the head's list; -1: in the ring
  std::int64_t slot;  // of the first row
  std::int64_t rows;
};

/// Where the rows of a head lie. They are counted over its pages, then its ring.
struct HeadExtents {
  std::int64_t retained = 0, ring_rows = 0;
  std::int64_t ring_begin = 0;  // slot of the ring's first row, plus a multiple of `window`
  int page_rows = 1, window = 1;

  KOKKOS_INLINE_FUNCTION static HeadExtents of(const RaggedLayer& layer, std::int64_t head,
                                               RingOrder order) {
    const std::int64_t rows = layer.ring_rows();
    return {layer.retained(head), rows,
            order == RingOrder::slots ? 0 : layer.tokens - layer.ring_first - rows, layer.page_rows,
            layer.window};
  }
  KOKKOS_INLINE_FUNCTION std::int64_t rows() const { return retained + ring_rows; }
  /// Returns the place of the rows from `row` on that lie one after the other, up to `end` at most.
  KOKKOS_INLINE_FUNCTION RowPlace place(std::int64_t row, std::int64_t end) const {
    const bool in_page = row < retained;
    const std::int64_t slot = in_page ? row % page_rows : (ring_begin + row - retained) % window;
    const std::int64_t space = (in_page ? page_rows : window) - slot;
    const std::int64_t last = in_page ? retained : rows();
    const std::int64_t left = (end < last ? end : last) - row;
    return {in_page ? row / page_rows : -1, slot, left < space ? left : space};
  }
};

/// Rows with constant strides: element d of key i is keys[i * row_stride + d * dim_stride]; values
/// alike.
template <class Value>
struct RowRun {
  const Value* keys = nullptr;
  const Value* values = nullptr;
  std::int64_t rows = 0;
  std::int64_t row_stride = 0;
  std::int64_t dim_stride = 1;
};

/// Finds the keys and values of a head. Its rows are those of its pages, of its ring, and `fresh`:
/// rows that the cache does not have yet. Value is the type of the layer's `dtype`.
template <class Value>
struct HeadRows {
  const RaggedLayer& layer;
  std::int64_t head;
  RingOrder order;
  RowRun<Value> fresh = {};

  KOKKOS_INLINE_FUNCTION std::int64_t rows() const { return layer.rows(head) + fresh.rows; }
  /// Returns the run of rows that begins at `row` and ends at `end` at the latest; it is empty if
  /// there are none. Quantised rows (RaggedLayer::is_packed) have no run.
  KOKKOS_INLINE_FUNCTION RowRun<Value> run(std::int64_t row, std::int64_t end) const {
    const HeadExtents cached = HeadExtents::of(layer, head, order);
    const std::int64_t last = cached.rows() + fresh.rows;
    if (last < end) end = last;
    if (row >= end) return {};
    if (row >= cached.rows()) {
      const std::int64_t skipped = (row - cached.rows()) * fresh.row_stride;
      return {fresh.keys + skipped, fresh.values + skipped, end - row, fresh.row_stride,
              fresh.dim_stride};
    }
    const RowPlace place = cached.place(row, end);
    const bool in_page = place.page >= 0;
    const Value* const block =
        in_page
            ? reinterpret_cast<const Value*>(layer.addresses(layer.page_table(head, place.page)))
            : layer.template ring_of<Value>(head);
    const std::int64_t dim = layer.head_dim;
    const Value* const keys = block + place.slot * dim;
    const std::int64_t values_offset =
        layer.format.values_are_keys ? 0 : (in_page ? layer.page_rows : layer.window) * dim;
    return {keys, keys + values_offset, place.rows, dim, 1};
  }
};

}  // namespace kvzap
