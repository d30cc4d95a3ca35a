// The ragged key-value cache. Each sequence, layer and KV head has a ring of the most recent rows
// and pages of the older rows that were retained. A layer whose attention sees no older rows has a
// ring only; one without attention has a state.
#pragma once

#include <kvzap/core/array_view.hpp>
#include <kvzap/core/cache_shape.hpp>
#include <kvzap/core/eviction.hpp>
#include <kvzap/core/page_pool.hpp>
#include <kvzap/core/ragged_layer.hpp>
#include <memory>
#include <vector>

namespace kvzap {

/// Identifies a sequence of a cache. An id is never used twice.
using SequenceId = int;

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

/// Bytes of this rank's part of a cache.
struct CacheBytes {
  std::size_t live = 0;       // keys and values of rows that attention can see
  std::size_t allocated = 0;  // pages of the pool, in use or free, rings, and states
  std::size_t returned = 0;   // returned to the system by trim
};

namespace cache {
class RowAccess;
class Store;
}  // namespace cache

/// A cache of any number of sequences that share one page pool.
///
/// Rows arrive in order of position: 0, 1, 2, …. A row stays in the ring until `window` newer rows
/// have arrived. Then it is judged, once, and either moves into a page of its head or is dropped.
/// Keys are stored as they arrive (after RoPE at their own position). A row's score stays with it:
/// beside the ring, then in its page. In layers with an own ring (OwnRing) rows that leave it are
/// dropped instead; compact, evict, append_kept and compact_positions throw Error for such layers.
/// Layers without rows (CacheShape::has_rows) take none.
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
  /// evicted no row since. (Rows that return from quantised pages to a ring have lost what packing
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
  void set_limit(std::size_t bytes);

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
  /// Takes back the last `count` tokens of a sequence, which the last step has appended. The
  /// sequence becomes what it would be if the step had not had them: rows that they had pushed out
  /// of a ring return to it, and pages that these rows do not need become free.
  ///
  /// Call it after end_step, before any other function changes the cache; also several times.
  /// Allocates nothing, and waits. Throws Error if the sequence was not in the last step or has got
  /// fewer tokens in it, if the step gave it more tokens than a ring has rows, and if a layer has a
  /// state.
  void take_back(const ExecutionSpace& exec, SequenceId sequence, std::int64_t count);
  /// take_back on ExecutionSpace().
  void take_back(SequenceId sequence, std::int64_t count) {
    take_back(ExecutionSpace(), sequence, count);
  }
  /// Returns whether a step has begun and not ended.
  bool in_step() const;

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

  /// An append_deferred in two parts, for steps whose launches are recorded and repeated.
  ///
  /// plan_appends forgets the plans of the step before. plan_append does for a layer what the host
  /// does in append_deferred. copy_plans brings the arguments of all kernels to the device, and
  /// append_planned launches a layer's: again and again with the same arguments, as long as the
  /// number of sequences, the arrays of pairs and the memory of the cache stay the same.
  void plan_appends(std::size_t sequences);
  void plan_append(const ExecutionSpace& exec, const std::vector<AppendSpan>& spans, int layer,
                   const ConstArrayView& keys, const ConstArrayView& values,
                   const ScoresView& scores);
  void copy_plans(const ExecutionSpace& exec);
  void append_planned(const ExecutionSpace& exec, int layer);
  /// Tells whether the kernels of the step's plans have run, where append_planned does not know it:
  /// it was recorded, or what was recorded has been launched. cancel_step takes back what they did.
  void note_planned(bool have_run);

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
  /// Adds `count` to the tokens of a layer whose state the caller has updated with them, or which
  /// keeps no rows (CacheShape::keeps_rows). In a layer with rows beside its state the append does
  /// so; call this one, too, before end_step. Throws Error if the layer has rows alone.
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
  /// then); after append_deferred, and with bounds of pages (CacheShape::bounds_from) on a device,
  /// for kernels on the instance that used the sequence last.
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
  DType dtype() const;
  const CacheShape& shape() const;
  const PagePool& pool() const;
  /// Returns the page ids of a head, in order. Within a step there may be more than its rows need.
  const std::vector<PageId>& page_list(SequenceId sequence, int layer, int head) const;
  /// Returns the ids of all sequences, ascending.
  std::vector<SequenceId> sequences() const;

 private:
  friend class cache::RowAccess;

  std::unique_ptr<cache::Store> m_store;
};

}  // namespace kvzap
