// One layer of a sequence as kernels read it.
#pragma once

#include <kvzap/core/packed_rows.hpp>
#include <kvzap/core/page_pool.hpp>

namespace kvzap {

/// One layer of one sequence as attention kernels read it. A head has retained rows in pages and
/// rows in its ring. Their order does not matter to attention. Kernels find every row's key and
/// value through span().
struct RaggedLayer {
  // By page id: the address of a page's keys, followed by its values; and of its rows' positions
  // (int32), followed by their scores (float).
  Kokkos::View<const std::uintptr_t*, MemorySpace> addresses;
  Kokkos::View<const std::uintptr_t*, MemorySpace> metadata_addresses;
  Kokkos::View<const PageId**, Kokkos::LayoutRight, MemorySpace> page_table;  // (head, page)
  Kokkos::View<const std::int64_t*, MemorySpace> retained;                    // (head)
  // (head, 2 * window * dim) values of `dtype`, in bytes
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

  /// Consecutive rows: keys and values are (row, head_dim).
  template <class Value>
  struct Span {
    const Value* keys;
    const Value* values;
    std::int64_t rows;
  };

  KOKKOS_INLINE_FUNCTION std::int64_t ring_rows() const {
    const std::int64_t since = tokens - ring_first;
    return since < window ? since : window;
  }
  KOKKOS_INLINE_FUNCTION std::int64_t rows(int head) const { return retained(head) + ring_rows(); }
  /// Returns the keys of a head's ring, followed by their values. Value is the type of `dtype`.
  template <class Value>
  KOKKOS_INLINE_FUNCTION const Value* ring_of(int head) const {
    return reinterpret_cast<const Value*>(&ring(head, 0));
  }
  KOKKOS_INLINE_FUNCTION std::int64_t pages(int head) const {
    return (retained(head) + page_rows - 1) / page_rows;
  }
  /// Returns whether a head's row, counted over its pages and its ring, has 8 or 4 bits.
  KOKKOS_INLINE_FUNCTION bool is_packed(int head, std::int64_t row) const {
    return format.keys != RowType::wide && row < retained(head);
  }
  /// Returns the keys or values of a page with packed rows.
  KOKKOS_INLINE_FUNCTION PackedRows packed(int head, std::int64_t page, bool values) const {
    return PackedPage{format, page_rows, head_dim}.at(addresses(page_table(head, page)), values);
  }
  /// Spans 0 … pages - 1 are the pages, unless their rows are packed; span `pages` is the ring,
  /// which may have no rows. Value is the type of `dtype`.
  template <class Value>
  KOKKOS_INLINE_FUNCTION Span<Value> span(int head, std::int64_t index) const {
    const bool is_ring = index == pages(head);
    const int capacity = is_ring ? window : page_rows;
    const Value* base = is_ring
                            ? ring_of<Value>(head)
                            : reinterpret_cast<const Value*>(addresses(page_table(head, index)));
    const std::int64_t left = retained(head) - index * page_rows;
    const std::int64_t rows = is_ring ? ring_rows() : (left < page_rows ? left : page_rows);
    return {base, base + std::int64_t{capacity} * head_dim, rows};
  }
};

/// A layer together with bounds that the host knows without waiting for kernels. Kernels receive
/// only the base class.
struct CachedLayer : RaggedLayer {
  /// (head): an upper bound of the head's retained rows.
  Kokkos::View<const std::int64_t*, Kokkos::HostSpace> bounds;
};

}  // namespace kvzap
