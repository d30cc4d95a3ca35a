// The ragged key-value cache: per sequence, layer and KV head a ring of the most recent rows, and
// pages of the retained rows among older ones.
#pragma once

#include <kvzap/page_pool.hpp>
#include <kvzap/prune.hpp>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

namespace kvzap {

/// Extents of one rank's part of a cache.
struct CacheShape {
  /// KV heads that this rank owns, per layer.
  std::vector<int> heads;
  int head_dim = 0;
  /// Rows of the ring: the most recent tokens, always kept.
  int window = 128;
  /// Rows of a page.
  int page_rows = 64;
};

/// Names a sequence of a cache; never used twice.
using SequenceId = int;

/// One layer of one sequence as attention reads it. A head's rows are its ring rows and its
/// retained rows; their order does not matter to attention, and every pair of each row's key and
/// value is found through span.
template <class Value, PageOrder order>
struct RaggedLayer {
  Kokkos::View<const std::uintptr_t*, MemorySpace> addresses;                 // by page id
  Kokkos::View<const PageId**, Kokkos::LayoutRight, MemorySpace> page_table;  // (head, page)
  Kokkos::View<const std::int64_t*, MemorySpace> retained;                    // (head)
  Kokkos::View<const Value**, Kokkos::LayoutRight, MemorySpace> ring;  // (head, 2 * window * dim)
  std::int64_t tokens = 0;  // appended so far; the token at position p has ring slot p % window
  int heads = 0;
  int window = 1;
  int page_rows = 1;
  int head_dim = 1;

  /// A run of rows with constant strides.
  struct Span {
    const Value* keys;
    const Value* values;
    std::int64_t rows;
    std::int64_t row_stride;
    std::int64_t dim_stride;
  };

  KOKKOS_INLINE_FUNCTION std::int64_t ring_rows() const {
    return tokens < window ? tokens : window;
  }
  KOKKOS_INLINE_FUNCTION std::int64_t rows(int head) const { return retained(head) + ring_rows(); }
  KOKKOS_INLINE_FUNCTION std::int64_t pages(int head) const {
    return (retained(head) + page_rows - 1) / page_rows;
  }
  /// Spans 0 .. pages-1 are the pages, span `pages` is the ring (it may have no rows).
  KOKKOS_INLINE_FUNCTION Span span(int head, std::int64_t index) const {
    const bool is_ring = index == pages(head);
    const int capacity = is_ring ? window : page_rows;
    const Value* base = is_ring
                            ? &ring(head, 0)
                            : reinterpret_cast<const Value*>(addresses(page_table(head, index)));
    const std::int64_t left = retained(head) - index * page_rows;
    const std::int64_t rows = is_ring ? ring_rows() : (left < page_rows ? left : page_rows);
    constexpr bool by_token = order == PageOrder::token_major;
    return {base, base + std::int64_t{capacity} * head_dim, rows, by_token ? head_dim : 1,
            by_token ? 1 : capacity};
  }
};

/// What the host knows of such a layer without waiting for kernels; those get the base alone.
template <class Value, PageOrder order>
struct CachedLayer : RaggedLayer<Value, order> {
  /// (head): no head has more retained rows than this.
  Kokkos::View<const std::int64_t*, Kokkos::HostSpace> bounds;
};

/// What an append did, summed over this rank's heads of the layer.
struct AppendCounts {
  std::int64_t judged = 0;      // pairs that a rule was applied to
  std::int64_t evicted = 0;     // of those, dropped
  std::int64_t non_finite = 0;  // of those, kept because their score is NaN or infinite
};

/// What a compaction did, summed over this rank's heads of the layer.
struct CompactCounts {
  std::int64_t judged = 0;   // retained rows before
  std::int64_t evicted = 0;  // of those, gone
  std::int64_t moved = 0;    // of those that stayed, the rows that now lie elsewhere in their pages
};

/// Bytes of this rank's part of a cache.
struct CacheBytes {
  std::size_t live = 0;       // keys and values of rows that attention can see
  std::size_t allocated = 0;  // pages of the pool, in use or free, and rings
  std::size_t returned = 0;   // handed back to the system by trim
};

/// A cache of any number of sequences that share one page pool.
///
/// Rows arrive in order of position, 0, 1, 2, …; the row at position p stays in the ring until
/// `window` newer ones have arrived, and then is admitted to its head's pages or dropped: it is
/// judged once and moves at most once. Keys are stored as they come (after RoPE at their own
/// position).
///
/// Value: float, half or bfloat16. order: how the rows of a page, and of the ring, lie in memory.
template <class Value, PageOrder order>
class KVCache {
 public:
  /// Views of the caller, of any layout.
  using RowsView = Kokkos::View<const Value***, Kokkos::LayoutStride, MemorySpace>;
  using ScoresView = Kokkos::View<const float**, Kokkos::LayoutStride, MemorySpace>;
  using FlagsView = Kokkos::View<const std::uint8_t**, Kokkos::LayoutStride, MemorySpace>;
  using Layer = CachedLayer<Value, order>;

  /// Throws Error if an extent of the shape is not positive (a rank may own no head of a layer).
  explicit KVCache(CacheShape shape, MemoryMeter* meter = nullptr);
  ~KVCache();
  KVCache(const KVCache&) = delete;
  KVCache& operator=(const KVCache&) = delete;

  SequenceId add_sequence();
  /// A second sequence with the same content: pages are shared (and copied when one of the two has
  /// to write into them), rings are copied.
  SequenceId fork(SequenceId source);
  /// Frees the sequence; its pages are reusable at once.
  void free_sequence(SequenceId sequence);

  /// Appends T tokens to every head of a layer.
  /// keys, values: (token, head, dim). scores: (head, token), the log scores of the new pairs, or
  /// an empty view if they have none (they then count as NaN, should they be judged). Every pair
  /// that leaves the ring through this is judged by `rule`, or admitted unjudged if the rule does
  /// not judge. Throws Error on extents that do not fit, or, with the sequence as it was, when
  /// memory is exhausted.
  AppendCounts append(const ExecutionSpace& exec, SequenceId sequence, int layer,
                      const RowsView& keys, const RowsView& values, const ScoresView& scores,
                      const EvictionRule& rule);

  /// append of one token, for devices: does not wait for `exec`. Heads that may need a page get it
  /// ahead, and the kernels alone know which rows they kept, until collect, or any other function
  /// that needs the lengths of the sequence's heads, brings that back. Until then all calls for the
  /// sequence are to use one instance.
  void append_deferred(const ExecutionSpace& exec, SequenceId sequence_id, int layer,
                       const RowsView& keys, const RowsView& values, const ScoresView& scores,
                       const EvictionRule& rule);
  /// Waits for what append_deferred has launched, and gives pages back that were not needed after
  /// all. Returns what those calls did, in all layers, since the last collect.
  AppendCounts collect(SequenceId sequence);

  /// Evicts retained rows of a layer a second time, in place. keep: (head, retained row), of which
  /// keep(h, i) says whether the i-th oldest of head h's rows(…) - ring rows stays; there may be
  /// more columns than a head has retained rows. The rows that stay keep their order and positions,
  /// and those before a head's first evicted one are not touched; the ring is left as it is. Pages
  /// that become empty are free, and pages that another sequence holds too are copied before they
  /// are written. Checkpoints of the sequence become void. Throws Error on extents that do not fit,
  /// or, with the layer as it was, when memory is exhausted.
  CompactCounts compact(const ExecutionSpace& exec, SequenceId sequence, int layer,
                        const FlagsView& keep);

  /// The state of a sequence to which restore returns: copies of the rings, lengths of the pages.
  struct Checkpoint {
    SequenceId sequence = -1;
    std::int64_t id = -1;
    /// One layer of it.
    struct LayerState {
      std::int64_t tokens = 0;
      std::vector<std::int64_t> retained;
      Kokkos::View<Value**, Kokkos::LayoutRight, MemorySpace> ring;
      Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> ring_scores;
    };
    std::vector<LayerState> layers;
    MeteredBytes bytes;
  };
  Checkpoint checkpoint(SequenceId sequence);
  /// Cuts the sequence back to an earlier state of itself, any number of times; pages past it are
  /// freed, and checkpoints taken after it are void, as all are once a layer was compacted. Throws
  /// Error for a void checkpoint or one of another sequence.
  void restore(SequenceId sequence, const Checkpoint& checkpoint);

  /// Hands memory of the pool that no page needs back to the system; returns the bytes.
  std::size_t trim();

  /// For kernels; valid until the cache changes. After append_deferred for kernels on the same
  /// instance.
  Layer layer(SequenceId sequence, int layer);
  /// Tokens appended so far, kept or not.
  std::int64_t tokens(SequenceId sequence, int layer) const;
  /// Rows that head `head` (index on this rank) still has.
  std::int64_t rows(SequenceId sequence, int layer, int head) const;
  /// Positions of those rows, ascending.
  std::vector<std::int64_t> positions(SequenceId sequence, int layer, int head);
  /// Keys, values (rows x head_dim, row-major) of those rows on the host, in order of position.
  struct HostRows {
    std::vector<std::int64_t> positions;
    std::vector<Value> keys;
    std::vector<Value> values;
  };
  HostRows host_rows(SequenceId sequence, int layer, int head);

  CacheBytes bytes() const;
  const CacheShape& shape() const { return m_shape; }
  const PagePool& pool() const { return m_pool; }
  /// Page ids of a head, in order.
  const std::vector<PageId>& page_list(SequenceId sequence, int layer, int head) const;
  std::vector<SequenceId> sequences() const;

 private:
  using PageTable = Kokkos::View<PageId**, Kokkos::LayoutRight, MemorySpace>;
  using Counts = Kokkos::View<std::int64_t*, MemorySpace>;

  struct LayerStore {
    std::int64_t tokens = 0;
    Kokkos::View<Value**, Kokkos::LayoutRight, MemorySpace> ring;         // (head, 2*window*dim)
    Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> ring_scores;  // (head, window)
    std::vector<std::vector<PageId>> pages;                               // per head
    // Per head; since a deferred append, what they can be at most.
    std::vector<std::int64_t> retained;
    bool deferred = false;
    // The same for kernels, and what is copied there (the same memory on host backends).
    PageTable page_table;                            // (head, page)
    Counts device_retained;                          // (head), part of Sequence::lengths
    typename PageTable::HostMirror host_page_table;  // (head, page)
    typename Counts::HostMirror host_retained;       // (head), part of Sequence::host_lengths
  };
  struct Sequence {
    std::vector<LayerStore> layers;
    // Retained rows of all layers' heads, one behind the other, then how many pairs deferred
    // appends have evicted, and how many they have kept for want of a finite score, ever.
    Counts lengths;
    typename Counts::HostMirror host_lengths;
    std::int64_t evicted_before = 0;  // of those, the ones that were collected
    std::int64_t non_finite_before = 0;
    AppendCounts collected;                 // and not yet told
    std::optional<ExecutionSpace> pending;  // where deferred appends run
    MeteredBytes ring_bytes;
    std::set<std::int64_t> checkpoints;  // those that restore still accepts, oldest first
  };

  const LayerStore& store(SequenceId sequence, int layer) const;
  LayerStore& store(SequenceId sequence, int layer);
  Sequence make_sequence() const;
  std::size_t ring_bytes() const;
  int checked_head(int layer, int head) const;
  void copy_page(PageId from, PageId to);
  void check_append(int layer, const RowsView& keys, const RowsView& values,
                    const ScoresView& scores, std::int64_t tokens) const;
  void settle(SequenceId sequence_id) const;
  void reserve(LayerStore& layer, int head, std::int64_t new_retained);
  void reserve_kept(int heads, std::int64_t rows);
  void admit_counted(LayerStore& layer);
  void release_surplus(LayerStore& layer);
  void set_entries(LayerStore& layer, int head, std::size_t first_page);
  void grow_page_table(LayerStore& layer);
  void set_all_entries(LayerStore& layer);
  void upload_tables(LayerStore& layer);

  CacheShape m_shape;
  MemoryMeter* m_meter;
  PagePool m_pool;
  std::map<SequenceId, Sequence> m_sequences;
  SequenceId m_next_sequence = 0;
  std::int64_t m_next_checkpoint = 0;

  // The rows that a judgement keeps: head h's are m_kept(m_begins(h)) … , m_kept_counts(h) of them.
  // Kept between calls, so that a decode step allocates nothing.
  Kokkos::View<std::int32_t*, MemorySpace> m_kept;
  Counts m_begins;
  Counts m_kept_counts;
  Counts m_old_retained;
  typename Counts::HostMirror m_host_kept_counts;
};

}  // namespace kvzap
