// The ragged key-value cache. Each sequence, layer and KV head has a ring of the most recent rows
// and pages of the older rows that were retained. A layer whose attention sees no older rows has a
// ring only; one without attention has a state.
#pragma once

#include <algorithm>
#include <kvzap/core/array_view.hpp>
#include <kvzap/core/eviction.hpp>
#include <kvzap/core/packed_rows.hpp>
#include <kvzap/core/page_pool.hpp>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

namespace kvzap {

/// The ring of a layer whose attention sees recent tokens only. The ring is all that the layer
/// keeps: rows that leave it are dropped, and counted by no function.
struct OwnRing {
  /// Rows; 0: the layer has pages, and a ring of CacheShape::window rows.
  int rows = 0;
  /// The ring begins anew after each multiple of `rows` tokens, as chunked attention needs it.
  bool restarts = false;
};

/// The state of a layer that keeps no rows: float values of the caller, for each of its heads. They
/// begin as zeros, and the caller changes them in each step (KVCache::state).
struct StateShape {
  /// Heads that this rank owns. They need not be KV heads.
  int heads = 0;
  /// Values of a head; 0: the layer has rows.
  std::int64_t values = 0;
};

/// Extents of one rank's part of a cache.
struct CacheShape {
  /// KV heads that this rank owns, per layer.
  std::vector<int> heads;
  int head_dim = 0;
  /// Rows of the ring: the most recent tokens, always kept.
  int window = 128;
  /// Rows of a page.
  int page_rows = 64;
  /// Per layer; empty: all layers have pages.
  std::vector<OwnRing> own_rings = {};
  /// Per layer; empty: all layers have rows.
  std::vector<StateShape> states = {};
  /// How pages store rows. Rings store them as they arrive.
  PageFormat format = {};

  bool has_state(int layer) const { return !states.empty() && states[layer].values > 0; }
  /// Returns the own ring of a layer. That of a layer with a state is always empty: it begins anew
  /// after each token.
  OwnRing own_ring(int layer) const {
    if (has_state(layer)) return {1, true};
    return own_rings.empty() ? OwnRing() : own_rings[layer];
  }
  bool has_pages(int layer) const { return own_ring(layer).rows == 0; }
  bool has_layers_without_pages() const { return !own_rings.empty() || !states.empty(); }
  /// Returns the rows of a layer's ring.
  int ring_rows(int layer) const { return has_pages(layer) ? window : own_ring(layer).rows; }
};

/// Identifies a sequence of a cache. An id is never used twice.
using SequenceId = int;

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

/// The rings of one size, of all layers with such rings.
struct RingBlock {
  // (head, 2 * ring rows * dim) values, in bytes
  Kokkos::View<char**, Kokkos::LayoutRight, MemorySpace> rows;
  Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> scores;  // (head, ring rows)
};

/// Counts of an append, summed over this rank's heads of the layer.
struct AppendCounts {
  std::int64_t judged = 0;   // pairs that a rule or the caller's flags judged
  std::int64_t evicted = 0;  // judged pairs that were dropped
  std::int64_t non_finite =
      0;  // judged pairs that were kept although their score is NaN or infinite
};

/// Counts of a compaction or eviction, summed over this rank's heads of the layer.
struct CompactCounts {
  std::int64_t judged = 0;      // rows before
  std::int64_t evicted = 0;     // rows dropped
  std::int64_t moved = 0;       // kept rows that now lie elsewhere
  std::int64_t non_finite = 0;  // kept rows whose score is NaN or infinite; only evict counts them
};

/// The part of an append's rows that belongs to one sequence.
struct AppendSpan {
  SequenceId sequence = -1;
  /// Rows first_row … first_row + rows - 1 of keys and values, and the same columns of scores.
  std::int64_t first_row = 0;
  std::int64_t rows = 1;
  /// Judges the pairs that leave the ring.
  EvictionRule rule;
  /// Whether `scores` has scores of these rows. Otherwise their scores are NaN.
  bool scored = false;
};

/// The tokens that a step appends to one sequence, in every layer.
struct StepSpan {
  SequenceId sequence = -1;
  std::int64_t tokens = 1;
};

/// Bytes of a row's key and value in a page.
constexpr std::size_t page_row_values(int head_dim, std::size_t value_bytes,
                                      const PageFormat& format = {}) {
  if (format.keys == RowType::wide) return 2 * value_bytes * head_dim;
  return PackedRows::code_bytes(format.keys, head_dim) +
         PackedRows::code_bytes(format.values, head_dim) + 2 * sizeof(bfloat16);
}
/// Bytes of a row in a page: key, value, position and score.
constexpr std::size_t page_row_bytes(int head_dim, std::size_t value_bytes,
                                     const PageFormat& format = {}) {
  return page_row_values(head_dim, value_bytes, format) + sizeof(std::int32_t) + sizeof(float);
}
/// Bytes of a row in a ring, which needs no position.
constexpr std::size_t ring_row_bytes(int head_dim, std::size_t value_bytes) {
  return 2 * value_bytes * head_dim + sizeof(float);
}

/// Bytes of this rank's part of a cache.
struct CacheBytes {
  std::size_t live = 0;       // keys and values of rows that attention can see
  std::size_t allocated = 0;  // pages of the pool, in use or free, rings, and states
  std::size_t returned = 0;   // returned to the system by trim
};

namespace cache {
struct AppendStep;
struct PagesRef;
class RowAccess;
}  // namespace cache

/// A cache of any number of sequences that share one page pool.
///
/// Rows arrive in order of position: 0, 1, 2, …. A row stays in the ring until `window` newer rows
/// have arrived. Then it is judged, once, and either moves into a page of its head or is dropped.
/// Keys are stored as they arrive (after RoPE at their own position). A row's score stays with it:
/// beside the ring, then in its page. In layers with an own ring (OwnRing) rows that leave it are
/// dropped instead; compact, evict, append_kept and compact_positions throw Error for such layers.
/// Layers with a state (StateShape) take no rows.
///
/// No function communicates: every rank has its own part.
///
/// Execution-space instances: a function that takes an instance runs its kernels there, after all
/// that the cache did for the sequence on other instances (it waits for those if necessary). Pages
/// that it frees are not written on another instance before. Kernels of the caller that read a
/// layer must run on the instance of the next call for the sequence. A function that takes no
/// instance uses ExecutionSpace().
///
/// A function that throws leaves the cache unchanged. Every function throws Error for an unknown
/// sequence, layer or head.
///
class KVCache {
 public:
  /// Views of the caller, of any layout.
  using ScoresView = Kokkos::View<const float**, Kokkos::LayoutStride, MemorySpace>;
  using FlagsView = Kokkos::View<const std::uint8_t**, Kokkos::LayoutStride, MemorySpace>;
  using ScoresOut = Kokkos::View<float**, Kokkos::LayoutStride, MemorySpace>;
  using PositionsOut = Kokkos::View<std::int64_t**, Kokkos::LayoutStride, MemorySpace>;
  using Layer = CachedLayer;

  /// Makes an empty cache of keys and values of type `dtype`. If `meter` is given it must outlive
  /// the cache. `limit`: see set_limit. Throws Error if an extent of the shape is not positive (a
  /// rank may own no head of a layer).
  KVCache(DType dtype, const CacheShape& shape, MemoryMeter* meter = nullptr,
          std::size_t limit = 0);
  ~KVCache();
  KVCache(const KVCache&) = delete;
  KVCache& operator=(const KVCache&) = delete;

  /// Adds an empty sequence. Throws OutOfMemory. Like a failed fork, a failed call uses up an id.
  /// So ranks that make the same calls get the same ids, even if one of them has no memory.
  SequenceId add_sequence();
  /// Adds a second sequence with the same content. The two share pages, which are copied when one
  /// of them writes into them; rings and states are copied. Throws OutOfMemory.
  SequenceId fork(const ExecutionSpace& exec, SequenceId source);
  /// fork on ExecutionSpace().
  SequenceId fork(SequenceId source) { return fork(ExecutionSpace(), source); }
  /// Adds a sequence that equals the source after its first `tokens` tokens, if the source has
  /// evicted no row since. (Rows that return from packed pages to a ring have lost what packing
  /// loses.) The two share pages; the ring's rows are copied from pages and ring.
  /// Waits. Throws Error if the source has fewer tokens, if `evict` emptied its ring since, if it
  /// lacks a row that was in a ring, or if a layer has a state, which depends on all tokens; throws
  /// OutOfMemory.
  SequenceId fork_beginning(const ExecutionSpace& exec, SequenceId source, std::int64_t tokens);
  /// Frees the sequence. Its pages are reusable at once.
  void free_sequence(const ExecutionSpace& exec, SequenceId sequence);
  /// free_sequence on ExecutionSpace().
  void free_sequence(SequenceId sequence) { free_sequence(ExecutionSpace(), sequence); }

  /// Limits pages, rings and states together to `bytes` from now on (0: no limit).
  void set_limit(std::size_t bytes) { m_pool.set_limit(bytes); }

  /// Begins a step, which appends spans[i].tokens rows to every layer of spans[i].sequence.
  ///
  /// Each sequence occurs once. A layer gets its rows by any number of calls of append,
  /// append_deferred and append_kept. The step takes the memory of all layers now, so that no
  /// append fails within the step. Two exceptions take pages only when the number of kept rows is
  /// known: append_kept, and a span that moves more than `window` rows per head out of a ring.
  /// Until end_step or cancel_step the sequences cannot be forked, freed, checkpointed, restored,
  /// compacted or evicted from. Throws OutOfMemory, and Error within another step or for invalid
  /// spans.
  void begin_step(const ExecutionSpace& exec, const std::vector<StepSpan>& spans);
  /// Ends the step and frees the pages that it did not need. Does not wait.
  void end_step();
  /// Ends the step and returns its sequences to their state before it.
  void cancel_step();
  /// Returns whether a step has begun and not ended.
  bool in_step() const { return m_in_step; }

  /// Appends rows to every head of a layer, for any number of sequences, each at most once.
  ///
  /// keys, values: (row, head, dim), views of any layout with values of the cache's type. scores:
  /// (head, row), log scores of the new pairs; may be empty
  /// if no span has scores. The span's rule judges every pair that leaves a ring through this call;
  /// a rule that does not judge keeps all. Returns the counts of all spans. Throws Error for
  /// extents or a type that do not fit; OutOfMemory.
  AppendCounts append(const ExecutionSpace& exec, const std::vector<AppendSpan>& spans, int layer,
                      const ConstArrayView& keys, const ConstArrayView& values,
                      const ScoresView& scores);
  /// Appends all rows to one sequence. They have scores unless `scores` is empty.
  AppendCounts append(const ExecutionSpace& exec, SequenceId sequence, int layer,
                      const ConstArrayView& keys, const ConstArrayView& values,
                      const ScoresView& scores, const EvictionRule& rule);

  /// Appends the first rows of a layer, and keeps those that the caller's flags select.
  ///
  /// keep(h, r), (head, row): whether row r of head h stays. Kept rows are copied directly into
  /// pages, with positions and scores; the others are never copied. Afterwards the ring is empty
  /// and begins anew, so that no later append judges these rows. Within a step it takes the pages
  /// that the step lacks. Returns all pairs as judged, and as non-finite the kept pairs with such
  /// scores (none if `scores` is empty). Throws Error for extents that do not fit or if the layer
  /// has had rows, and OutOfMemory.
  AppendCounts append_kept(const ExecutionSpace& exec, SequenceId id, int layer,
                           const ConstArrayView& keys, const ConstArrayView& values,
                           const ScoresView& scores, const FlagsView& keep);

  /// Appends one token to each sequence with one kernel and without waiting, for devices.
  ///
  /// Heads that may need a page get it in advance. Only the kernels know which rows they kept.
  /// collect, or another function that needs the lengths of heads, copies these numbers to the
  /// host. If the last append of a sequence ran on another instance, the call waits for that
  /// instance. Throws as append does.
  void append_deferred(const ExecutionSpace& exec, const std::vector<AppendSpan>& spans, int layer,
                       const ConstArrayView& keys, const ConstArrayView& values,
                       const ScoresView& scores);
  /// Does the same for one sequence. The token has a score unless `scores` is empty.
  void append_deferred(const ExecutionSpace& exec, SequenceId sequence, int layer,
                       const ConstArrayView& keys, const ConstArrayView& values,
                       const ScoresView& scores, const EvictionRule& rule);
  /// Waits, once, for the kernels of append_deferred and frees pages that they did not need.
  /// Returns the counts of those calls, in all layers, since the last collect.
  AppendCounts collect(const std::vector<SequenceId>& sequences);
  /// collect for one sequence.
  AppendCounts collect(SequenceId sequence);

  using State = Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>;
  /// A layer's state, (head, value), as it is and as it becomes.
  struct StateUpdate {
    State before;
    /// To be written whole before count_tokens. It may be the same memory as `before`.
    State after;
  };
  /// Returns the state of a layer for kernels on `exec`. Within a step, `after` is other memory
  /// until count_tokens is called, so that cancel_step need not copy anything. Valid until the next
  /// call of count_tokens for the layer, or of end_step, and while the sequence exists. Throws
  /// Error if the layer has no state.
  StateUpdate state(const ExecutionSpace& exec, SequenceId sequence, int layer);
  /// Adds `count` to the tokens of a layer whose state the caller has updated with them. Throws
  /// Error if the layer has no state.
  void count_tokens(SequenceId sequence, int layer, std::int64_t count);

  /// Returns the counts of all appends to the sequence. A fork continues its source's counts;
  /// restore returns to the checkpoint's. Waits if deferred appends are pending. Valid until the
  /// sequence is freed.
  const AppendCounts& counts(SequenceId sequence) const;

  /// Evicts retained rows of a layer by flags and closes the gaps.
  ///
  /// keep(h, i), (head, retained row): whether the i-th oldest retained row of head h stays. There
  /// may be more columns than a head has retained rows. Kept rows keep their order and positions;
  /// rows before a head's first evicted row do not move; the ring is unchanged. Empty pages become
  /// free. Pages that another sequence shares are copied before they are written. Checkpoints of
  /// the sequence become void. Waits. Throws Error for extents that do not fit; OutOfMemory.
  CompactCounts compact(const ExecutionSpace& exec, SequenceId id, int layer,
                        const FlagsView& keep);

  /// Evicts rows of pages and ring by scores: cutoffs[h] is for head h.
  ///
  /// `ties` counts the oldest of all rows of the head, whether or not `options` keeps them. If a
  /// row of any head's ring is evicted, all kept ring rows move into pages and the ring begins
  /// anew, so that no later append judges them. Everything else is as for compact. Throws Error if
  /// there is not one cutoff per head or a cutoff is NaN, and OutOfMemory.
  CompactCounts evict(const ExecutionSpace& exec, SequenceId id, int layer,
                      const std::vector<Cutoff>& cutoffs, const EvictOptions& options = {});
  /// Evicts rows of pages and ring by flags. keep(h, i): whether row i of head h, in order of
  /// position, stays; there may be more columns than rows. With `empties_ring` the kept rows leave
  /// the ring even if none of them is evicted. Everything else is as for evict by cutoffs.
  CompactCounts evict(const ExecutionSpace& exec, SequenceId id, int layer, const FlagsView& keep,
                      bool empties_ring = false);

  /// Renumbers the rows of all layers to positions 0, 1, 2, … and rotates their keys accordingly.
  ///
  /// Row i of every head rotates by RoPE's angles from its old position p to i: by (i - p) *
  /// inverse_frequencies(j) for dimensions j and j + head_dim / 2. The rotation is computed in
  /// float from the stored key and rounded once. (FINCH, Corallo and Papotti, arXiv 2408.00167,
  /// section 3.2, and kvpress' KeyRerotationPress.)
  ///
  /// Every head of every layer must have the same number of rows, n, and empty rings, as after
  /// append_kept or an eviction of ring rows. The next token gets position n, and `tokens` becomes
  /// n: read the number of appended tokens before.
  ///
  /// If `rows` is not negative, n must equal it; a rank without heads needs it. Pages that another
  /// sequence shares are copied first. Checkpoints of the sequence become void. Returns n. Throws
  /// Error if heads differ, a ring has rows, or there are not head_dim / 2 frequencies; throws
  /// OutOfMemory.
  std::int64_t compact_positions(const ExecutionSpace& exec, SequenceId id,
                                 const Kokkos::View<const float*, MemorySpace>& inverse_frequencies,
                                 std::int64_t rows = -1);

  /// Writes the scores of head h's rows, in order of position, to scores(h, 0), scores(h, 1), ….
  /// Writes their positions likewise, unless that view is empty. Does not wait. Throws Error if the
  /// views do not have one row per head and a column for each row of the longest head.
  void row_scores(const ExecutionSpace& exec, SequenceId sequence, int layer,
                  const ScoresOut& scores, const PositionsOut& positions = {});
  /// Sets the scores of rows, in the same order. Pages that another sequence shares are copied
  /// first. Throws Error for extents that do not fit; OutOfMemory.
  void set_row_scores(const ExecutionSpace& exec, SequenceId sequence, int layer,
                      const ScoresView& scores);

  /// The contents of a sequence that restore brings back: copies of rings and states, and lengths
  /// of the page lists. Does not include scores in pages: changes by set_row_scores stay.
  struct Checkpoint {
    SequenceId sequence = -1;
    std::int64_t id = -1;
    std::vector<std::int64_t> tokens;      // (layer)
    std::vector<std::int64_t> ring_first;  // (layer)
    std::vector<std::int64_t> retained;    // (head of any layer)
    std::vector<RingBlock> rings;
    Kokkos::View<float*, MemorySpace> states;  // of all layers
    AppendCounts counts;
    MeteredBytes bytes;
  };
  /// Records the state of a sequence. Throws OutOfMemory.
  Checkpoint checkpoint(const ExecutionSpace& exec, SequenceId id);
  /// checkpoint on ExecutionSpace().
  Checkpoint checkpoint(SequenceId sequence) { return checkpoint(ExecutionSpace(), sequence); }
  /// Cuts the sequence back to a recorded state, any number of times. Frees the pages past it and
  /// voids later checkpoints. Throws Error for a void checkpoint or one of another sequence.
  void restore(const ExecutionSpace& exec, SequenceId id, const Checkpoint& checkpoint);
  /// restore on ExecutionSpace().
  void restore(SequenceId sequence, const Checkpoint& checkpoint) {
    restore(ExecutionSpace(), sequence, checkpoint);
  }

  /// Returns free memory of the pool to the system, and the states of earlier steps. Returns the
  /// number of bytes of the pool.
  std::size_t trim();

  /// Returns a layer for kernels. Valid until the cache changes (its memory stays readable even
  /// then); after append_deferred, for kernels on the same instance.
  Layer layer(SequenceId sequence, int layer);
  /// Returns the number of tokens appended so far, kept or not. After compact_positions it counts
  /// from the remaining rows.
  std::int64_t tokens(SequenceId sequence, int layer) const;
  /// Returns the number of rows that head `head` (index on this rank) holds.
  std::int64_t rows(SequenceId sequence, int layer, int head) const;
  /// Returns the positions of those rows, ascending. Waits.
  std::vector<std::int64_t> positions(SequenceId sequence, int layer, int head);
  /// Rows of one head on the host, in order of position: keys and values (rows x head_dim,
  /// row-major, exact), and scores (NaN: none).
  struct HostRows {
    std::vector<std::int64_t> positions;
    std::vector<float> keys;
    std::vector<float> values;
    std::vector<float> scores;
  };
  /// Returns all rows of a head. Waits.
  HostRows host_rows(SequenceId sequence, int layer, int head);
  /// Returns the number of rows that a head's ring had at a checkpoint.
  std::int64_t ring_rows(const Checkpoint& checkpoint, int layer) const;
  /// Returns the number of rows that a head had in pages at a checkpoint.
  std::int64_t retained_rows(const Checkpoint& checkpoint, int layer, int head) const;

  /// Returns the first position of the layer's ring: see RaggedLayer::ring_first.
  std::int64_t ring_first(SequenceId sequence, int layer) const;

  /// Returns a layer's state at a checkpoint.
  State state(const Checkpoint& checkpoint, int layer) const;

  /// Returns the bytes of a sequence's rings and states. Each sequence of a step needs memory for
  /// one more set of states, which later steps use again.
  std::size_t bytes_per_sequence() const;
  /// Returns the bytes of this rank's part. Waits if deferred appends are pending.
  CacheBytes bytes() const;
  /// Returns the bytes of the keys and values that attention to a sequence can see. Waits as bytes.
  std::size_t live_bytes(SequenceId sequence) const;
  DType dtype() const { return m_dtype; }
  const CacheShape& shape() const { return m_shape; }
  const PagePool& pool() const { return m_pool; }
  /// Returns the page ids of a head, in order. Within a step there may be more than its rows need.
  const std::vector<PageId>& page_list(SequenceId sequence, int layer, int head) const;
  /// Returns the ids of all sequences, ascending.
  std::vector<SequenceId> sequences() const;

 private:
  /// Snapshots read and write rows through it.
  friend class cache::RowAccess;

  using PageTable = Kokkos::View<PageId**, Kokkos::LayoutRight, MemorySpace>;
  using Counts = Kokkos::View<std::int64_t*, MemorySpace>;
  using HostCounts = Kokkos::View<std::int64_t*, Kokkos::HostSpace>;
  using Rings = Kokkos::View<char**, Kokkos::LayoutRight, MemorySpace>;
  using RingScores = Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>;
  using States = Kokkos::View<float*, MemorySpace>;

  // Heads are numbered through all layers: head h of a layer has number first_head + h.
  struct LayerStore {
    std::int64_t tokens = 0;
    std::int64_t ring_first = 0;
    std::vector<std::vector<PageId>> pages;  // per head
    bool deferred = false;
    int first_head = 0;
    int window = 1;         // rows of its ring
    bool has_pages = true;  // else see OwnRing
    bool restarts = false;
    // Subviews of the sequence's views, for this layer's heads.
    HostCounts retained;
    Rings ring;
    RingScores ring_scores;
    Counts device_retained;
    typename Counts::HostMirror host_retained;

    void add_tokens(std::int64_t count) {
      tokens += count;
      if (restarts) ring_first = tokens - tokens % window;
    }
    std::int64_t in_ring() const { return std::min<std::int64_t>(tokens - ring_first, window); }
  };
  struct Sequence {
    std::vector<LayerStore> layers;
    std::vector<RingBlock> rings;
    States states;
    // Retained rows per head; since a deferred append, an upper bound.
    HostCounts retained;
    // For kernels, with their host copies (the same memory on host backends). `table`: (head,
    // page). `lengths`: retained rows per head, then two totals of all deferred appends: pairs
    // evicted, and pairs kept because their score is not finite.
    PageTable table;
    typename PageTable::HostMirror host_table;
    Counts lengths;
    typename Counts::HostMirror host_lengths;
    std::int64_t evicted_before = 0;  // the collected part of those totals
    std::int64_t non_finite_before = 0;
    AppendCounts collected;  // since the last call of collect
    AppendCounts total;      // of all appends; deferred ones once collected
    bool pending = false;    // deferred appends have not been collected
    // the instance on which the cache last worked on the sequence
    std::optional<ExecutionSpace> last;
    std::int64_t call = -1;  // the last call of append or begin_step that had it as an argument
    int step = -1;           // its index in m_step
    MeteredBytes own_bytes;  // bytes_per_sequence()
    std::set<std::int64_t> checkpoints;  // checkpoints that restore still accepts, oldest first
  };
  // A sequence as it was before the step, and its share of the step.
  struct StepState {
    SequenceId id = -1;
    std::int64_t rows = 0;
    bool reserved = true;                  // whether m_spare_pages has its pages
    std::vector<std::int64_t> tokens;      // (layer)
    std::vector<std::int64_t> ring_first;  // (layer)
    std::vector<std::int64_t> retained;    // (head)
    AppendCounts total;
    AppendCounts collected;
    // Rows that leave the ring are saved first. Head h's rows are first_saved + h * saved_rows, …
    std::int64_t first_saved = 0;
    std::int64_t saved_rows = 0;
  };
  // Where the ring of a layer's first head lies in the blocks of rings.
  struct RingPlace {
    std::size_t block = 0;
    int first = 0;
  };
  // A page that a step has replaced by its own copy.
  struct Replaced {
    int step;
    int layer;
    int head;
    PageId page;
  };
  // Pages that a head needs for more rows.
  struct PageNeeds {
    std::size_t listed;   // the length of its list including these pages
    std::size_t missing;  // pages to take: those missing in the list, and a copy of a shared page
    bool shares_last;     // whether the last page must be copied
  };
  // Defined in src/cache/cache_impl.hpp.
  struct Workspace;
  class PageLease;
  // Calls in phases, each defined beside the function that makes it.
  class Append;
  class KeptAppend;
  class DeferredAppend;
  class StepPreparation;
  class Rearrangement;

  const Sequence& sequence_at(SequenceId sequence) const;
  Sequence& sequence_at(SequenceId sequence);
  const LayerStore& store(SequenceId sequence, int layer) const;
  LayerStore& store(SequenceId sequence, int layer);
  Sequence make_sequence() const;
  template <class Begin, class Fill>
  SequenceId make_fork(const ExecutionSpace& exec, SequenceId source, const char* what,
                       const Begin& begin, const Fill& fill);
  static std::int64_t oldest_in_ring(const LayerStore& layer, std::int64_t tokens);
  static bool reaches_back(const LayerStore& layer, std::int64_t tokens);
  void begin_layer(LayerStore& layer, const LayerStore& from, SequenceId source,
                   std::int64_t tokens) const;
  void fill_ring(const ExecutionSpace& exec, const LayerStore& layer, SequenceId source,
                 int layer_index);
  void insert(SequenceId id, Sequence&& sequence);
  std::vector<RingBlock> make_rings(const char* label) const;
  static void copy_rings(const ExecutionSpace& exec, const std::vector<RingBlock>& to,
                         const std::vector<RingBlock>& from);
  // Bytes of a key followed by its value.
  std::int64_t pair_bytes() const {
    return 2 * m_shape.head_dim * static_cast<std::int64_t>(size_of(m_dtype));
  }
  States make_states(const char* label) const;
  std::size_t state_bytes() const { return m_first_state.back() * sizeof(float); }
  void reserve_next_states(std::size_t n);
  State state_in(const States& states, int layer) const;
  int all_heads() const;
  void check_layer(int layer) const;
  void check_pages(int layer, const char* what) const;
  int checked_head(int layer, int head) const;
  void check_rows(int layer, const ConstArrayView& keys, const ConstArrayView& values) const;
  void check_spans(const AppendSpan* spans, std::size_t n, int layer, const ConstArrayView& keys,
                   const ConstArrayView& values, const ScoresView& scores);
  void check_outside_step(SequenceId sequence, const char* what) const;
  void defer_spans(const ExecutionSpace& exec, const AppendSpan* spans, std::size_t n, int layer,
                   const ConstArrayView& keys, const ConstArrayView& values,
                   const ScoresView& scores);
  cache::AppendStep step_of(const LayerStore& layer, int layer_index, std::int64_t rows) const;
  void reserve_args(std::size_t n);
  void enter(const ExecutionSpace& exec, Sequence& sequence);
  void order_releases(const ExecutionSpace& exec);
  void record_releases(const ExecutionSpace& exec);
  void settle(SequenceId sequence) const;
  void settle(Sequence& sequence);
  void take_lengths(Sequence& sequence);
  void copy_page(const ExecutionSpace& exec, PageId from, PageId to);
  std::size_t pages_for(std::int64_t rows) const;
  bool uses_spare_pages(const Sequence& sequence) const;
  bool shares_last_page(const LayerStore& layer, int head) const;
  PageNeeds list_room(LayerStore& layer, int head, std::int64_t more_rows) const;
  void take_pages(const ExecutionSpace& exec, Sequence& sequence, int layer, int head,
                  std::int64_t more_rows, PageLease& lease, bool of_spare);
  void release_surplus(LayerStore& layer, bool to_spare = false);
  void write_entries(Sequence& sequence, const LayerStore& layer, int head, std::size_t first_page);
  void widen_table(const ExecutionSpace& exec, Sequence& sequence, std::size_t pages);
  void upload_table(const ExecutionSpace& exec, Sequence& sequence, const LayerStore& layer);
  void upload_lengths(const ExecutionSpace& exec, LayerStore& layer);
  void upload_all(const ExecutionSpace& exec, Sequence& sequence);
  cache::PagesRef pages_of(const ExecutionSpace& exec, Sequence& sequence, const LayerStore& layer);
  struct SavedRange;
  SavedRange saved_range(const Sequence& sequence, const LayerStore& layer, int layer_index,
                         std::int64_t rows) const;
  CompactCounts rearrange(const ExecutionSpace& exec, Sequence& sequence, int layer,
                          const FlagsView& keep, const FlagsView& keep_of_ring);
  CompactCounts rearrange_judged(const ExecutionSpace& exec, Sequence& sequence, int layer,
                                 const FlagsView& keep, const FlagsView& keep_of_ring,
                                 const Counts& totals, bool empties_ring = false);
  std::int64_t check_row_scores(SequenceId sequence, int layer, std::size_t heads,
                                std::size_t columns);
  void own_pages(const ExecutionSpace& exec, Sequence& sequence, int layer);
  void bring_back(const StepState& state, Sequence& sequence);
  void adopt_states(std::size_t i);
  void close_step();

  CacheShape m_shape;
  DType m_dtype;
  std::vector<RingPlace> m_ring_places;     // (layer)
  std::vector<int> m_block_heads;           // (block of rings)
  std::vector<int> m_block_rows;            // rows of one ring
  std::vector<std::int64_t> m_first_state;  // (layer + 1), in the values of all states
  MemoryMeter* m_meter;
  PagePool m_pool;
  std::map<SequenceId, Sequence> m_sequences;
  SequenceId m_next_sequence = 0;
  std::int64_t m_next_checkpoint = 0;
  std::int64_t m_calls = 0;
  // An instance whose kernels may still read pages that were released.
  std::optional<ExecutionSpace> m_released_on;

  // Kept between steps, so that a decode step allocates nothing.
  bool m_in_step = false;
  std::size_t m_n_step = 0;                          // sequences of the step
  std::vector<StepState> m_step;                     // their states, and those of earlier steps
  std::vector<PageId> m_spare_pages;                 // pages taken for the step, next one last
  std::vector<Replaced> m_replaced;                  // each entry still owns its page
  Kokkos::View<char*, MemorySpace> m_saved;          // (row, 2 * dim) values, in bytes
  Kokkos::View<float*, MemorySpace> m_saved_scores;  // (row)
  std::vector<States> m_next_states;  // of each sequence of the step, and of earlier steps
  MeteredBytes m_next_state_bytes;
  std::unique_ptr<Workspace> m_work;
};

}  // namespace kvzap
