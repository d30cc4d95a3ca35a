// Lists rows by verdict and moves them between the caller's views, rings and pages, by host loops
// or by kernels of any backend.
#pragma once

#include <kvzap/core/cache.hpp>
#include <vector>

#include "base/kokkos_compat.hpp"
#include "base/machine.hpp"
#include "base/scratch.hpp"
#include "cache/row_copy.hpp"

namespace kvzap::cache {

using Range = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;
using Counts = Kokkos::View<std::int64_t*, MemorySpace>;
using PageTable = Kokkos::View<PageId**, Kokkos::LayoutRight, MemorySpace>;
using FlagsView = Kokkos::View<const std::uint8_t**, Kokkos::LayoutStride, MemorySpace>;

/// Whether Kokkos kernels move rows rather than the host's own loops.
inline bool use_portable_path() {
  return base::machine().on_device() || row_path() == RowPath::portable;
}

/// The score of a row without one: NaN.
KOKKOS_INLINE_FUNCTION float no_score() { return base::bits_float(0x7fc00000u); }

/// A block of `capacity` keys and, after them, their values: a page or a ring. With one vector a
/// row, a value is its key (PageFormat::values_are_keys).
struct Block {
  int capacity;
  int dim;
  int vectors;
  KOKKOS_INLINE_FUNCTION std::int64_t row_offset(std::int64_t row) const { return row * dim; }
  KOKKOS_INLINE_FUNCTION std::int64_t values_offset() const {
    return std::int64_t{vectors - 1} * capacity * dim;
  }
  /// Returns the values of the block.
  KOKKOS_INLINE_FUNCTION std::int64_t size() const {
    return std::int64_t{vectors} * capacity * dim;
  }
};

/// The metadata of a page holds the positions of its rows, followed by their scores.
KOKKOS_INLINE_FUNCTION std::int32_t* page_positions(std::uintptr_t metadata) {
  return reinterpret_cast<std::int32_t*>(metadata);
}
KOKKOS_INLINE_FUNCTION float* page_scores(std::uintptr_t metadata, int page_rows) {
  return reinterpret_cast<float*>(page_positions(metadata) + page_rows);
}

/// An array of the caller in the form that kernels take: (row, head, dim).
template <class Value>
struct RowsRef {
  const Value* data = nullptr;
  std::int64_t row_stride = 0, head_stride = 0, dim_stride = 0;
  static RowsRef of(const ConstArrayView& rows) {
    return {rows.values<Value>(), rows.strides[0], rows.strides[1], rows.strides[2]};
  }
  KOKKOS_INLINE_FUNCTION const Value* at(std::int64_t row, std::int64_t head) const {
    return data + row * row_stride + head * head_stride;
  }
};

/// Scores of the caller, (head, row), in the same form. Without data, no row has a score.
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

/// Extents of one span's append to a layer. The rows that leave the ring have positions
/// first … first + leaving - 1. Older ones are in the ring. If more than a window of rows arrives
/// at once, younger ones never enter it.
struct AppendStep {
  int heads = 0;
  int dim = 0;
  int window = 1;
  int page_rows = 1;
  int vectors = 2;  // PageFormat::vectors
  std::int64_t count = 0;
  std::int64_t old_tokens = 0;
  std::int64_t ring_first = 0;
  std::int64_t in_ring = 0;
  std::int64_t first = 0;
  std::int64_t leaving = 0;

  KOKKOS_INLINE_FUNCTION std::int64_t slot(std::int64_t position) const {
    return (position - ring_first) % window;
  }
  KOKKOS_INLINE_FUNCTION Block ring() const { return {window, dim, vectors}; }
  KOKKOS_INLINE_FUNCTION Block page() const { return {page_rows, dim, vectors}; }
};

/// The ring of a layer: keys and values (head, vectors * window * dim), scores (head, window).
template <class Value>
struct RingRef {
  Value* rows = nullptr;
  float* scores = nullptr;
};

/// One span's append to a layer: its extents, the ring, and the new rows (row, head, dim).
struct SpanRows {
  AppendStep step;
  RingRef<void> ring;
  ConstArrayView keys, values;
  ScoresRef scores;
};

/// The same for kernels, with rows of type Value.
template <class Value>
struct TypedSpan {
  AppendStep step;
  RingRef<Value> ring;
  RowsRef<Value> keys, values;
  ScoresRef scores;
  static TypedSpan of(const SpanRows& span) {
    return {span.step,
            {static_cast<Value*>(span.ring.rows), span.ring.scores},
            RowsRef<Value>::of(span.keys),
            RowsRef<Value>::of(span.values),
            span.scores};
  }

  /// A row that leaves the ring, or never enters it. The strides are those of dimensions.
  struct LeavingRow {
    const Value* key;
    const Value* value;
    std::int64_t key_stride, value_stride;
  };
  /// Returns the n-th leaving row of a head.
  KOKKOS_INLINE_FUNCTION LeavingRow leaving_row(std::int64_t head, std::int64_t n) const {
    if (n >= step.in_ring) {
      return {keys.at(n - step.in_ring, head), values.at(n - step.in_ring, head), keys.dim_stride,
              values.dim_stride};
    }
    const Block block = step.ring();
    const Value* const key =
        ring.rows + head * block.size() + block.row_offset(step.slot(step.first + n));
    return {key, key + block.values_offset(), 1, 1};
  }
  KOKKOS_INLINE_FUNCTION float leaving_score(std::int64_t head, std::int64_t n) const {
    return n < step.in_ring ? ring.scores[head * step.window + step.slot(step.first + n)]
                            : scores(head, n - step.in_ring);
  }
  /// Writes the position and score of such a row to its slot in a page.
  KOKKOS_INLINE_FUNCTION void write_metadata(std::uintptr_t metadata, std::int64_t slot,
                                             std::int64_t head, std::int64_t n) const {
    page_positions(metadata)[slot] = static_cast<std::int32_t>(step.first + n);
    page_scores(metadata, step.page_rows)[slot] = leaving_score(head, n);
  }
};

/// Copies of ring rows that cancel_step restores. Row i of head h is copy h * head_rows + i, for
/// `count` rows that a step overwrites.
struct SavedRows {
  void* rows = nullptr;  // (copy, vectors * dim)
  float* scores = nullptr;
  std::int64_t head_rows = 0;
  std::int64_t count = 0;
};

/// The pages of a layer's heads, for the host and for kernels.
struct PagesRef {
  const PagePool* pool;
  const std::vector<std::vector<PageId>>* lists;  // (head, page)
  const std::uintptr_t* addresses;                // by page id, for kernels
  const std::uintptr_t* metadata;
  const PageId* table;  // (head, page), for kernels
  std::int64_t table_stride;

  /// Returns the address of a page, on the host.
  PageAddress at(int head, std::int64_t page) const { return pool->address((*lists)[head][page]); }
  KOKKOS_INLINE_FUNCTION PageId id(std::int64_t head, std::int64_t page) const {
    return table[head * table_stride + page];
  }
};

/// Numbers per head, for the host and for kernels (the same memory on host backends).
struct HeadCounts {
  const std::int64_t* host;
  const std::int64_t* device;
};

/// The rows that a verdict keeps, for some heads of a layer: row numbers of each head, ascending.
/// The host lists head h's from rows[h * extent] on, kernels from rows[begins[h]] on.
struct KeptPart {
  int heads;
  std::int64_t extent;  // space for a head's rows
  std::int32_t* rows;
  std::int64_t* begins;       // (head), for kernels
  std::int64_t* counts;       // (head)
  std::int64_t* firsts;       // (head), of flags alone: the first row that is not kept
  std::int64_t* non_finite;   // one number: scores that are not finite
  std::int64_t* host_counts;  // the counts on the host, after KeptRows::fetch
  std::int64_t* host_firsts;
  std::int64_t* host_non_finite;

  HeadCounts head_counts() const { return {host_counts, counts}; }
};

/// Memory for such lists. An entry has a list; further entries hold sums.
class KeptRows {
 public:
  /// Reserves space for this number of rows and entries. If that allocates, earlier lists are lost.
  void reserve(std::int64_t rows, std::int64_t entries) {
    base::reserve_scratch(m_rows, rows, "kvzap::cache::kept");
    if (m_entries >= entries) return;
    m_entries = 0;
    m_numbers = {};
    m_host_numbers = {};
    base::reserve_scratch(m_numbers, 3 * entries, "kvzap::cache::kept_counts");
    m_host_numbers = Kokkos::create_mirror_view(m_numbers);
    m_entries = entries;
  }
  /// Returns the lists of entries first_entry … first_entry + heads - 1, which begin at row
  /// first_row.
  KeptPart part(std::int64_t first_entry, int heads, std::int64_t first_row, std::int64_t extent,
                std::int64_t non_finite_entry) const {
    std::int64_t* const counts = m_numbers.data();
    std::int64_t* const host = m_host_numbers.data();
    return {heads,
            extent,
            m_rows.data() + first_row,
            counts + 2 * m_entries + first_entry,
            counts + first_entry,
            counts + m_entries + first_entry,
            counts + non_finite_entry,
            host + first_entry,
            host + m_entries + first_entry,
            host + non_finite_entry};
  }
  /// Copies counts, firsts and sums to the host, after the work on `exec`. Waits.
  void fetch(const ExecutionSpace& exec, const char* why) const {
    base::fence(exec, why);
    Kokkos::deep_copy(m_host_numbers, m_numbers);
  }

 private:
  Kokkos::View<std::int32_t*, MemorySpace> m_rows;
  Counts m_numbers;  // (3, entry): counts, firsts, begins
  base::HostMirror<Counts> m_host_numbers;
  std::int64_t m_entries = 0;
};

/// Lists and moves the rows of one layer of one sequence. It neither allocates memory of the cache
/// nor changes its bookkeeping.
class RowMover {
 public:
  RowMover() = default;
  RowMover(const RowMover&) = delete;
  RowMover& operator=(const RowMover&) = delete;
  virtual ~RowMover() = default;

  /// Returns whether kernels do the work, so that the host must fetch their lists.
  virtual bool runs_kernels() const = 0;

  /// Lists the leaving rows that `rule` keeps, and counts those whose score is not finite.
  virtual void judge(const ExecutionSpace& exec, const SpanRows& span, const EvictionRule& rule,
                     const KeptPart& kept) const = 0;
  /// Lists the flagged rows, keep(head, row), among each head's first `rows` rows. Without `rows`,
  /// uses kept.extent rows.
  virtual void select(const ExecutionSpace& exec, const FlagsView& keep, const HeadCounts& rows,
                      const KeptPart& kept) const = 0;
  /// Counts the listed rows whose score, (head, row), is not finite.
  virtual void count_non_finite(const ExecutionSpace& exec, const ScoresRef& scores,
                                const KeptPart& kept) const = 0;
  /// Copies the listed leaving rows into pages, after the `retained` rows of their heads.
  virtual void admit(const ExecutionSpace& exec, const SpanRows& span, const KeptPart& kept,
                     const HeadCounts& retained, const PagesRef& pages) const = 0;
  /// Copies rows that are about to leave the ring, or restores them if `back`.
  virtual void save(const ExecutionSpace& exec, const SpanRows& span, const SavedRows& saved,
                    bool back) const = 0;
  /// Writes the newest rows into the ring slots of the rows that left.
  virtual void fill_ring(const ExecutionSpace& exec, const SpanRows& span) const = 0;
  /// Moves the listed rows of pages `from` to the front of pages `to`, which may be the same pages.
  /// Rows before a head's first dropped one are not copied: both `from` and `to` have those of its
  /// page.
  virtual void compact(const ExecutionSpace& exec, const Block& block, const KeptPart& kept,
                       const PagesRef& from, const PagesRef& to) const = 0;
};

const RowMover& host_row_mover(DType dtype);
const RowMover& kernel_row_mover(DType dtype);
/// Returns the mover for pages with quantised rows.
const RowMover& quantised_row_mover(DType dtype, const PageFormat& format);

/// Returns the mover for this backend, the row path in force, the type of keys and values, and this
/// format of pages.
inline const RowMover& row_mover(DType dtype, const PageFormat& format) {
  if (format.quantised()) return quantised_row_mover(dtype, format);
  if constexpr (base::runs_on_host) {
    if (!use_portable_path()) return host_row_mover(dtype);
  }
  return kernel_row_mover(dtype);
}

}  // namespace kvzap::cache
