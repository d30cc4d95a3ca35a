// What the parts of the cache share: how rows lie in rings and pages, the extents of an append, and
// the functions that move rows, on hosts and on any backend.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <kvzap/core/cache.hpp>
#include <limits>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "base/device_kernels.hpp"
#include "base/instantiate.hpp"
#include "base/kokkos_compat.hpp"
#include "base/scratch.hpp"
#include "cache/instances.hpp"
#include "cache/row_copy.hpp"

namespace kvzap::detail {

using Range = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;
using Counts = Kokkos::View<std::int64_t*, MemorySpace>;
using Kept = Kokkos::View<std::int32_t*, MemorySpace>;
using PageTable = Kokkos::View<PageId**, Kokkos::LayoutRight, MemorySpace>;
using FlagsView = Kokkos::View<const std::uint8_t**, Kokkos::LayoutStride, MemorySpace>;

/// The score of a row that has none: NaN.
KOKKOS_INLINE_FUNCTION float no_score() { return bits_float(0x7fc00000u); }

/// Strides of a block of `capacity` rows, a page or a ring.
template <PageOrder order>
struct Block {
  int capacity;
  int dim;
  KOKKOS_INLINE_FUNCTION std::int64_t row_offset(std::int64_t row) const {
    return order == PageOrder::token_major ? row * dim : row;
  }
  KOKKOS_INLINE_FUNCTION std::int64_t dim_stride() const {
    return order == PageOrder::token_major ? 1 : capacity;
  }
  KOKKOS_INLINE_FUNCTION std::int64_t values_offset() const { return std::int64_t{capacity} * dim; }
};

/// A page's notes are the positions of its rows, and behind those their scores.
KOKKOS_INLINE_FUNCTION std::int32_t* page_positions(std::uintptr_t notes) {
  return reinterpret_cast<std::int32_t*>(notes);
}
KOKKOS_INLINE_FUNCTION float* page_scores(std::uintptr_t notes, int page_rows) {
  return reinterpret_cast<float*>(page_positions(notes) + page_rows);
}

/// A view of the caller as kernels take it: (row, head, dim). Smaller than a view.
template <class Value>
struct RowsRef {
  const Value* data = nullptr;
  std::int64_t row_stride = 0, head_stride = 0, dim_stride = 0;
  template <class View>
  static RowsRef of(const View& view, std::int64_t first_row) {
    RowsRef ref{view.data(), static_cast<std::int64_t>(view.stride(0)),
                static_cast<std::int64_t>(view.stride(1)),
                static_cast<std::int64_t>(view.stride(2))};
    ref.data += first_row * ref.row_stride;
    return ref;
  }
  KOKKOS_INLINE_FUNCTION const Value* at(std::int64_t row, std::int64_t head) const {
    return data + row * row_stride + head * head_stride;
  }
};

/// The same for scores, (head, row); without data: no row has one.
struct ScoresRef {
  const float* data = nullptr;
  std::int64_t head_stride = 0, row_stride = 0;
  template <class View>
  static ScoresRef of(const View& view, std::int64_t first_row, bool scored) {
    if (!scored) return {};
    ScoresRef ref{view.data(), static_cast<std::int64_t>(view.stride(0)),
                  static_cast<std::int64_t>(view.stride(1))};
    ref.data += first_row * ref.row_stride;
    return ref;
  }
  KOKKOS_INLINE_FUNCTION float operator()(std::int64_t head, std::int64_t row) const {
    return data ? data[head * head_stride + row * row_stride] : no_score();
  }
};

/// Extents of one span's append to a layer. Rows that leave the ring through it have positions
/// first … first + exits - 1; the older ones are in the ring, the younger ones (if more than a
/// window of rows arrive at once) only pass by.
struct AppendStep {
  int heads = 0;
  int dim = 0;
  int window = 1;
  int page_rows = 1;
  std::int64_t count = 0;
  std::int64_t old_tokens = 0;
  std::int64_t ring_first = 0;
  std::int64_t in_ring = 0;
  std::int64_t first = 0;
  std::int64_t exits = 0;

  KOKKOS_INLINE_FUNCTION std::int64_t slot(std::int64_t position) const {
    return (position - ring_first) % window;
  }
};

/// Within a step: the first `count` rows that leave the ring are copied to rows first_row + i + h *
/// head_rows of what cancel_step brings back.
template <class Value>
struct SavedRows {
  Value* rows = nullptr;  // (row, 2 * dim)
  float* scores = nullptr;
  std::int64_t head_rows = 0;
  std::int64_t count = 0;
};

/// A layer's ring: keys and values (head, 2 * window * dim), scores (head, window).
template <class Value>
struct RingRef {
  Value* rows = nullptr;
  float* scores = nullptr;
};

/// Addresses of the pages of a layer's heads on the host.
struct PageLists {
  const PagePool* pool;
  const std::vector<std::vector<PageId>>* lists;  // (head, page)
  PageAddress operator()(int head, std::int64_t page) const {
    return pool->address((*lists)[head][page]);
  }
};

/// Whether rows are moved by Kokkos kernels rather than by the host's own loops.
inline bool use_portable_path() { return uses_device_kernels() || row_path() == RowPath::portable; }

/// Copies memory of the backend, without waiting on a device. Cannot fail on hosts.
template <class T>
void copy_elements(const ExecutionSpace& exec, T* to, const T* from, std::size_t count) {
  if (count == 0) return;
  if constexpr (runs_on_host) {
    std::memcpy(static_cast<void*>(to), static_cast<const void*>(from), count * sizeof(T));
  } else {
    using Target = Kokkos::View<T*, MemorySpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
    using Source = Kokkos::View<const T*, MemorySpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
    Kokkos::deep_copy(exec, Target(to, count), Source(from, count));
  }
}

/// A view of the backend's memory that a test can let fail.
template <class View, class... Extents>
View allocate_view(const char* label, Extents... extents) {
  before_allocation((sizeof(typename View::value_type) * ... * extents));
  return View(Kokkos::view_alloc(Kokkos::WithoutInitializing, std::string(label)), extents...);
}

/// Calls work(); memory that it could not get makes it throw OutOfMemory.
template <class Work>
auto or_out_of_memory(const char* what, std::size_t wanted, const PagePool& pool, const Work& work)
    -> decltype(work()) {
  try {
    return work();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    // Kokkos' own allocations throw a runtime_error or bad_alloc, depending on its version.
    throw OutOfMemory(fmt::format("out of memory: {} ({})", what, error.what()), wanted,
                      pool.free_bytes());
  }
}

// ---- On the host -----------------------------------------------------------------------------

/// Numbers of the kept exits of one head; returns how many. ring_scores: (head, window).
std::int64_t judge_on_host(const AppendStep& step, int head, const float* ring_scores,
                           const ScoresRef& scores, const EvictionRule& rule, std::int32_t* kept,
                           std::int64_t& non_finite);

/// Lists the flagged ones of a head's first `rows` rows, keep(head, row), in `kept`, which has room
/// for all; returns how many, and the first row without a flag, or their end, in `first`.
std::int64_t list_flagged(const FlagsView& keep, int head, std::int64_t rows, std::int32_t* kept,
                          std::int64_t& first);

/// Moves the kept exits of all heads behind their retained rows. kept: (head, exit).
template <class Value, PageOrder order>
void admit_on_host(const ExecutionSpace& exec, const AppendStep& step, const RingRef<Value>& ring,
                   const RowsRef<Value>& keys, const RowsRef<Value>& values,
                   const ScoresRef& scores, const std::int32_t* kept,
                   const std::int64_t* kept_counts, const std::int64_t* retained,
                   const PageLists& pages);

/// Copies rows that are about to leave the ring, or brings them back.
template <class Value, PageOrder order>
void save_on_host(const AppendStep& step, const RingRef<Value>& ring, const SavedRows<Value>& saved,
                  bool back);

/// The last rows to arrive take the ring slots of those that left.
template <class Value, PageOrder order>
void fill_ring_on_host(const AppendStep& step, const RingRef<Value>& ring,
                       const RowsRef<Value>& keys, const RowsRef<Value>& values,
                       const ScoresRef& scores);

/// Moves kept rows towards the front of their heads' pages. Rows are written in ascending order,
/// and never behind one that is still to be read. kept: (head, longest).
template <class Value, PageOrder order>
void compact_on_host(const ExecutionSpace& exec, int heads, const Block<order>& block,
                     std::int64_t moved, std::int64_t longest, const std::int32_t* kept,
                     const std::int64_t* first, const std::int64_t* kept_counts,
                     const PageLists& from, const PageLists& to);

// ---- On any backend --------------------------------------------------------------------------

/// Judges one span: lists the kept exits, head after head, with where each head's begin and how
/// many they are, and counts the scores that are not finite in *non_finite.
void judge(const ExecutionSpace& exec, const AppendStep& step, const float* ring_scores,
           const ScoresRef& scores, const EvictionRule& rule, const Kept& kept,
           const Counts& begins, const Counts& counts,
           const Kokkos::View<std::int64_t, MemorySpace>& non_finite);

/// Moves the kept exits, at most `most` of a head, behind the old_retained rows of their heads.
template <class Value, PageOrder order>
void admit(const ExecutionSpace& exec, const AppendStep& step, std::int64_t most,
           const RingRef<Value>& ring, const RowsRef<Value>& keys, const RowsRef<Value>& values,
           const ScoresRef& scores, const Kept& kept, const Counts& begins, const Counts& counts,
           const Counts& old_retained, const PagePool::AddressView& addresses,
           const PagePool::AddressView& notes, const PageTable& table);

template <class Value, PageOrder order>
void save(const ExecutionSpace& exec, const AppendStep& step, const RingRef<Value>& ring,
          const SavedRows<Value>& saved, bool back);

template <class Value, PageOrder order>
void fill_ring(const ExecutionSpace& exec, const AppendStep& step, const RingRef<Value>& ring,
               const RowsRef<Value>& keys, const RowsRef<Value>& values, const ScoresRef& scores);

/// Lists those of `heads` x `extent` rows that are below retained(head) and flagged, head after
/// head.
void select_flagged(const ExecutionSpace& exec, int heads, std::int64_t extent,
                    const Counts& retained, const FlagsView& keep, const Kept& kept,
                    const Counts& begins, const Counts& counts, const Counts& firsts);

/// Moves kept rows towards the front of their heads' pages. Every dimension of a head moves on its
/// own, in ascending order, so that nothing is overwritten before it was read.
template <class Value, PageOrder order>
void compact_columns(const ExecutionSpace& exec, int heads, int page_rows, int dim,
                     const Kept& kept, const Counts& begins, const Counts& counts,
                     const PagePool::AddressView& addresses, const PagePool::AddressView& notes,
                     const PageTable& from, const PageTable& to);

}  // namespace kvzap::detail
