// The ragged key-value cache: per sequence, layer and KV head a ring of the most recent rows, and
// pages of the retained rows among older ones.
#pragma once

#include <kvzap/core/eviction.hpp>
#include <kvzap/core/page_pool.hpp>
#include <map>
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
  // By page id: a page's keys, behind which are its values; and its rows' positions (int32), behind
  // which are their scores (float).
  Kokkos::View<const std::uintptr_t*, MemorySpace> addresses;
  Kokkos::View<const std::uintptr_t*, MemorySpace> note_addresses;
  Kokkos::View<const PageId**, Kokkos::LayoutRight, MemorySpace> page_table;  // (head, page)
  Kokkos::View<const std::int64_t*, MemorySpace> retained;                    // (head)
  Kokkos::View<const Value**, Kokkos::LayoutRight, MemorySpace> ring;  // (head, 2 * window * dim)
  std::int64_t tokens = 0;                                             // appended so far
  // The ring holds no position below this: 0, or the tokens when `evict` last emptied it. Position
  // p has ring slot (p - ring_first) % window, so that slots 0 … ring_rows() - 1 are in use.
  std::int64_t ring_first = 0;
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
    const std::int64_t since = tokens - ring_first;
    return since < window ? since : window;
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
  std::int64_t judged = 0;      // pairs that a rule, or the caller's flags, decided upon
  std::int64_t evicted = 0;     // of those, dropped
  std::int64_t non_finite = 0;  // of those, kept although their score is NaN or infinite
};

/// What a compaction did, summed over this rank's heads of the layer.
struct CompactCounts {
  std::int64_t judged = 0;      // rows before
  std::int64_t evicted = 0;     // of those, gone
  std::int64_t moved = 0;       // of those that stayed, the rows that now lie elsewhere
  std::int64_t non_finite = 0;  // of those that stayed, the rows whose score is NaN or infinite;
                                // counted by evict alone
};

/// What one sequence gets of the rows of an append.
struct AppendSpan {
  SequenceId sequence = -1;
  /// Rows first_row … first_row + rows - 1 of keys and values, and such columns of scores.
  std::int64_t first_row = 0;
  std::int64_t rows = 1;
  /// Judges the pairs that leave the ring.
  EvictionRule rule;
  /// Whether the scores are these rows'; otherwise they have none (NaN).
  bool scored = false;
};

/// How many tokens a step is to append to a sequence, in every layer.
struct StepSpan {
  SequenceId sequence = -1;
  std::int64_t tokens = 1;
};

/// Bytes of a row in a page: key, value, position and score.
constexpr std::size_t page_row_bytes(int head_dim, std::size_t value_bytes) {
  return 2 * value_bytes * head_dim + sizeof(std::int32_t) + sizeof(float);
}
/// Bytes of a row in a ring, which needs no position.
constexpr std::size_t ring_row_bytes(int head_dim, std::size_t value_bytes) {
  return 2 * value_bytes * head_dim + sizeof(float);
}

/// Bytes of this rank's part of a cache.
struct CacheBytes {
  std::size_t live = 0;       // keys and values of rows that attention can see
  std::size_t allocated = 0;  // pages of the pool, in use or free, and rings
  std::size_t returned = 0;   // handed back to the system by trim
};

namespace detail {
struct AppendStep;
}

/// A cache of any number of sequences that share one page pool.
///
/// Rows arrive in order of position, 0, 1, 2, …; the row at position p stays in the ring until
/// `window` newer ones have arrived, and then is admitted to its head's pages or dropped: it is
/// judged once and moves at most once. Keys are stored as they come (after RoPE at their own
/// position). The score of a row stays with it: in place beside the ring, then in its page.
///
/// Execution-space instances: a function that takes one does its work there, after all that the
/// cache did for the sequence on another one (it waits for that one if it has to) and before
/// pages that it frees are written on another one. Kernels of the caller that read a layer are
/// ordered with all this if they run on the instance of the next call for the sequence. A function
/// that takes none uses ExecutionSpace().
///
/// A function that throws leaves the cache as it was.
///
/// Value: float, half or bfloat16. order: how the rows of a page, and of the ring, lie in memory.
template <class Value, PageOrder order>
class KVCache {
 public:
  /// Views of the caller, of any layout.
  using RowsView = Kokkos::View<const Value***, Kokkos::LayoutStride, MemorySpace>;
  using ScoresView = Kokkos::View<const float**, Kokkos::LayoutStride, MemorySpace>;
  using FlagsView = Kokkos::View<const std::uint8_t**, Kokkos::LayoutStride, MemorySpace>;
  using ScoresOut = Kokkos::View<float**, Kokkos::LayoutStride, MemorySpace>;
  using PositionsOut = Kokkos::View<std::int64_t**, Kokkos::LayoutStride, MemorySpace>;
  using Layer = CachedLayer<Value, order>;

  /// `limit`: see set_limit. Throws Error if an extent of the shape is not positive (a rank may own
  /// no head of a layer).
  explicit KVCache(const CacheShape& shape, MemoryMeter* meter = nullptr, std::size_t limit = 0);
  ~KVCache();
  KVCache(const KVCache&) = delete;
  KVCache& operator=(const KVCache&) = delete;

  /// An empty sequence. Throws OutOfMemory; as with fork, the call has used up an id even then, so
  /// that ids stay the same on ranks that make the same calls, whichever of them has no memory.
  SequenceId add_sequence();
  /// A second sequence with the same content: pages are shared (and copied when one of the two has
  /// to write into them), rings are copied. Throws OutOfMemory.
  SequenceId fork(const ExecutionSpace& exec, SequenceId source);
  /// fork on ExecutionSpace().
  SequenceId fork(SequenceId source) { return fork(ExecutionSpace(), source); }
  /// Frees the sequence; its pages are reusable at once.
  void free_sequence(const ExecutionSpace& exec, SequenceId sequence);
  /// free_sequence on ExecutionSpace().
  void free_sequence(SequenceId sequence) { free_sequence(ExecutionSpace(), sequence); }

  /// Pages and rings together take at most so many bytes from now on; 0: no limit.
  void set_limit(std::size_t bytes) { m_pool.set_limit(bytes); }

  /// Begins a step that appends spans[i].tokens rows to every layer of spans[i].sequence, each
  /// sequence once, by any number of calls of append and append_deferred per layer. Memory that
  /// these need is taken now, for all layers: in the step no append can fail for want of it, unless
  /// more than `window` rows per head leave a sequence's ring; for such a span append takes pages
  /// when it knows how many rows stay, as append_kept always does. Until end_step or cancel_step
  /// the sequences cannot be forked, freed, checkpointed, restored, compacted or evicted from.
  /// Throws OutOfMemory; Error within another step, or for spans that make no sense.
  void begin_step(const ExecutionSpace& exec, const std::vector<StepSpan>& spans);
  /// Ends the step; pages that were not needed are free. Does not wait.
  void end_step();
  /// Ends the step with all of its sequences as they were when it began, whatever was appended.
  void cancel_step();
  /// Whether a step was begun and not ended.
  bool in_step() const { return m_in_step; }

  /// Appends rows to every head of a layer of any number of sequences, each at most once.
  /// keys, values: (row, head, dim). scores: (head, row), the log scores of the new pairs; may be
  /// empty if no span has any (they then count as NaN, should they be judged). Every pair that
  /// leaves a ring through this is judged by its span's rule, or admitted unjudged if the rule does
  /// not judge. Returns the sum over spans. Throws Error on extents that do not fit, OutOfMemory,
  /// with all sequences as they were.
  AppendCounts append(const ExecutionSpace& exec, const std::vector<AppendSpan>& spans, int layer,
                      const RowsView& keys, const RowsView& values, const ScoresView& scores);
  /// The same for all rows and one sequence; these are scored unless `scores` is empty.
  AppendCounts append(const ExecutionSpace& exec, SequenceId sequence, int layer,
                      const RowsView& keys, const RowsView& values, const ScoresView& scores,
                      const EvictionRule& rule);

  /// The rows of a sequence that has had none in this layer, of which keep(h, r), (head, row), says
  /// whether row r of head h stays. Those that stay go straight into pages, with their positions
  /// and scores, and the others are never copied. The ring is empty afterwards and begins anew, so
  /// that no later append judges these rows. In a step the pages are taken when it is known how
  /// many rows stay, beyond those that the step has. Returns all pairs as judged, and the scores of
  /// those that stay as non-finite where they are; none are if `scores` is empty. Throws Error on
  /// extents that do not fit or if the layer has had rows, OutOfMemory.
  AppendCounts append_kept(const ExecutionSpace& exec, SequenceId id, int layer,
                           const RowsView& keys, const RowsView& values, const ScoresView& scores,
                           const FlagsView& keep);

  /// append of one token to each sequence, for devices: one kernel for all of them, and no wait for
  /// `exec`. Heads that may need a page get it ahead, and the kernels alone know which rows they
  /// kept, until collect, or any other function that needs the lengths of a sequence's heads,
  /// brings that back. Where the last append of a sequence ran on another instance, that one is
  /// waited for first.
  void append_deferred(const ExecutionSpace& exec, const std::vector<AppendSpan>& spans, int layer,
                       const RowsView& keys, const RowsView& values, const ScoresView& scores);
  /// The same for one sequence, whose token is scored unless `scores` is empty.
  void append_deferred(const ExecutionSpace& exec, SequenceId sequence, int layer,
                       const RowsView& keys, const RowsView& values, const ScoresView& scores,
                       const EvictionRule& rule);
  /// Waits, once, for what append_deferred has launched, and gives pages back that were not needed
  /// after all. Returns what those calls did, in all layers, since the last collect.
  AppendCounts collect(const std::vector<SequenceId>& sequences);
  /// The same for one sequence.
  AppendCounts collect(SequenceId sequence);

  /// What all appends to the sequence did; a fork goes on from its source's, restore from the
  /// checkpoint's. Valid until the sequence is freed.
  const AppendCounts& counts(SequenceId sequence) const;

  /// Evicts retained rows of a layer a second time, in place. keep: (head, retained row), of which
  /// keep(h, i) says whether the i-th oldest of head h's rows(…) - ring rows stays; there may be
  /// more columns than a head has retained rows. The rows that stay keep their order and positions,
  /// and those before a head's first evicted one are not touched; the ring is left as it is. Pages
  /// that become empty are free, and pages that another sequence holds too are copied before they
  /// are written. Checkpoints of the sequence become void. Throws Error on extents that do not fit,
  /// OutOfMemory.
  CompactCounts compact(const ExecutionSpace& exec, SequenceId id, int layer,
                        const FlagsView& keep);

  /// The same by scores, for pages and ring: of head h stays what cutoffs[h] says; the `ties`
  /// oldest are those of all its rows, whether or not `options` keeps them. If rows of the ring go,
  /// in any head, all of its rows that stay move into pages, and the ring begins anew, so that no
  /// later append judges them. Throws Error if there is not one cutoff for each head, OutOfMemory.
  CompactCounts evict(const ExecutionSpace& exec, SequenceId id, int layer,
                      const std::vector<Cutoff>& cutoffs, const EvictOptions& options = {});
  /// The same by flags: keep(h, i) says whether the i-th of head h's rows(…) stays, in order of
  /// position; there may be more columns. Throws Error on extents that do not fit, OutOfMemory.
  /// With `empties_ring` the rows that stay leave the ring for pages even if none of it goes.
  CompactCounts evict(const ExecutionSpace& exec, SequenceId id, int layer, const FlagsView& keep,
                      bool empties_ring = false);

  /// Gives the rows that are left the positions 0, 1, 2, … in all layers: row i of every head turns
  /// by RoPE's angles from its old position p to i, (i - p) * inverse_frequencies(j) for dimensions
  /// j and j + head_dim / 2. (As in FINCH, Corallo and Papotti, arXiv 2408.00167, section 3.2, and
  /// kvpress' KeyRerotationPress; computed in float from the key as it is stored, and rounded
  /// once.) Every head of every layer must have the same number of rows, n, none of them in a ring
  /// (as after append_kept, or an eviction that took rows of the ring). The next token's position
  /// is n, and `tokens` becomes n: who asks it how many tokens the sequence was given, as for the
  /// bytes of an unpruned cache, must have asked before. `rows`, if not negative, is what n must
  /// be; a rank without any heads cannot know it otherwise. Pages that another sequence holds too
  /// are copied first. Checkpoints of the sequence become void. Returns n. Throws Error if heads
  /// differ, a ring has rows, or the frequencies are not head_dim / 2; OutOfMemory.
  std::int64_t close_up(const ExecutionSpace& exec, SequenceId id,
                        const Kokkos::View<const float*, MemorySpace>& inverse_frequencies,
                        std::int64_t rows = -1);

  /// Writes the scores of head h's rows(…), in order of position, to scores(h, 0), scores(h, 1), …,
  /// and their positions likewise, unless that view is empty. Does not wait. Throws Error if there
  /// is not a row for each head and a column for each of the longest head's rows.
  void row_scores(const ExecutionSpace& exec, SequenceId sequence, int layer,
                  const ScoresOut& scores, const PositionsOut& positions = {});
  /// The inverse: gives rows new scores. Pages that another sequence holds too are copied first.
  /// Throws Error on extents that do not fit, OutOfMemory.
  void set_row_scores(const ExecutionSpace& exec, SequenceId sequence, int layer,
                      const ScoresView& scores);

  /// The state of a sequence to which restore returns: copies of the rings, lengths of the pages.
  /// (Scores that set_row_scores has changed in pages since stay changed.)
  struct Checkpoint {
    SequenceId sequence = -1;
    std::int64_t id = -1;
    std::vector<std::int64_t> tokens;      // (layer)
    std::vector<std::int64_t> ring_first;  // (layer)
    std::vector<std::int64_t> retained;    // (head of any layer)
    Kokkos::View<Value**, Kokkos::LayoutRight, MemorySpace> rings;
    Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> ring_scores;
    AppendCounts counts;
    MeteredBytes bytes;
  };
  /// Throws OutOfMemory.
  Checkpoint checkpoint(const ExecutionSpace& exec, SequenceId id);
  /// checkpoint on ExecutionSpace().
  Checkpoint checkpoint(SequenceId sequence) { return checkpoint(ExecutionSpace(), sequence); }
  /// Cuts the sequence back to an earlier state of itself, any number of times; pages past it are
  /// freed, and checkpoints taken after it are void, as all are once a layer was compacted. Throws
  /// Error for a void checkpoint or one of another sequence.
  void restore(const ExecutionSpace& exec, SequenceId id, const Checkpoint& checkpoint);
  /// restore on ExecutionSpace().
  void restore(SequenceId sequence, const Checkpoint& checkpoint) {
    restore(ExecutionSpace(), sequence, checkpoint);
  }

  /// Hands memory of the pool that no page needs back to the system; returns the bytes.
  std::size_t trim();

  /// For kernels; valid until the cache changes (what it refers to stays readable even then). After
  /// append_deferred for kernels on the same instance.
  Layer layer(SequenceId sequence, int layer);
  /// Tokens appended so far, kept or not; since close_up, counted from the rows that were left.
  std::int64_t tokens(SequenceId sequence, int layer) const;
  /// Rows that head `head` (index on this rank) still has.
  std::int64_t rows(SequenceId sequence, int layer, int head) const;
  /// Positions of those rows, ascending.
  std::vector<std::int64_t> positions(SequenceId sequence, int layer, int head);
  /// Keys, values (rows x head_dim, row-major) and scores (NaN: none) of those rows on the host, in
  /// order of position.
  struct HostRows {
    std::vector<std::int64_t> positions;
    std::vector<Value> keys;
    std::vector<Value> values;
    std::vector<float> scores;
  };
  HostRows host_rows(SequenceId sequence, int layer, int head);
  /// The same of the ring rows that a checkpoint holds. `head` counts within the layer.
  HostRows host_rows(const Checkpoint& checkpoint, int layer, int head) const;
  /// Rows of the ring of such a head, and rows that it has in pages of the sequence.
  std::int64_t ring_rows(const Checkpoint& checkpoint, int layer) const;
  std::int64_t retained_rows(const Checkpoint& checkpoint, int layer, int head) const;

  /// Where the rows of one head lie, for a thread of the host that reads them while other sequences
  /// of the cache go on. Good for as long as the sequence neither changes nor is freed.
  struct RawRows {
    std::vector<PageAddress> pages;  // all full but for the last
    std::int64_t retained = 0;       // rows in pages
    const Value* ring = nullptr;     // 2 * window * dim
    const float* ring_scores = nullptr;
    std::int64_t tokens = 0, ring_first = 0, ring_rows = 0;
    int window = 1, page_rows = 1, dim = 1;
    // What a ring is part of, so that a checkpoint's lives on. Let go of by who may use Kokkos.
    Kokkos::View<Value**, Kokkos::LayoutRight, MemorySpace> rings;
    Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> all_ring_scores;

    std::int64_t rows() const { return retained + ring_rows; }
  };
  /// On host backends only: elsewhere the host cannot read rows where they lie, and Error is
  /// thrown.
  RawRows raw_rows(SequenceId sequence, int layer, int head);
  /// The ring rows that a checkpoint holds; no pages.
  RawRows raw_rows(const Checkpoint& checkpoint, int layer, int head) const;
  /// Position from which on the layer's ring has the rows: see RaggedLayer.
  std::int64_t ring_first(SequenceId sequence, int layer) const;

  /// Gives a layer of a sequence that has had no tokens there the extents of a cache that was kept:
  /// head h has rows[h] rows of `tokens` tokens; the newest ones, min(tokens - ring_first, window),
  /// are in the ring. What they hold is undefined until import_rows has written it. Throws Error if
  /// the layer has had tokens, or for numbers that no cache has; OutOfMemory.
  void import_layer(const ExecutionSpace& exec, SequenceId id, int layer, std::int64_t tokens,
                    std::int64_t ring_first, const std::vector<std::int64_t>& rows);
  /// Of rows of one head on the host; null: not to be written.
  struct ImportedRows {
    const std::int32_t* positions = nullptr;  // those of ring rows do not matter
    const float* scores = nullptr;
    const Value* keys = nullptr;  // (row, head_dim)
    const Value* values = nullptr;
  };
  /// Writes the head's rows begin … begin + count - 1 after import_layer, while no other sequence
  /// shares its pages. Throws Error for rows that it does not have.
  void import_rows(const ExecutionSpace& exec, SequenceId id, int layer, int head,
                   std::int64_t begin, std::int64_t count, const ImportedRows& rows);
  /// What counts(id) is from now on.
  void import_counts(SequenceId id, const AppendCounts& counts);
  /// A checkpoint of a state that the sequence was in before it was kept: tokens and ring_first of
  /// each layer, retained rows of each head of any layer. The content of its rings is undefined
  /// until import_rows has written it. Throws Error if the sequence cannot be cut back to such a
  /// state; OutOfMemory.
  Checkpoint import_checkpoint(const ExecutionSpace& exec, SequenceId id,
                               const std::vector<std::int64_t>& tokens,
                               const std::vector<std::int64_t>& ring_first,
                               const std::vector<std::int64_t>& retained,
                               const AppendCounts& counts);
  /// Writes ring rows begin … begin + count - 1, counted from the oldest one, of such a checkpoint.
  void import_rows(const ExecutionSpace& exec, const Checkpoint& checkpoint, int layer, int head,
                   std::int64_t begin, std::int64_t count, const ImportedRows& rows);

  CacheBytes bytes() const;
  const CacheShape& shape() const { return m_shape; }
  const PagePool& pool() const { return m_pool; }
  /// Page ids of a head, in order. Within a step there may be more than the rows need.
  const std::vector<PageId>& page_list(SequenceId sequence, int layer, int head) const;
  std::vector<SequenceId> sequences() const;

 private:
  using PageTable = Kokkos::View<PageId**, Kokkos::LayoutRight, MemorySpace>;
  using Counts = Kokkos::View<std::int64_t*, MemorySpace>;
  using HostCounts = Kokkos::View<std::int64_t*, Kokkos::HostSpace>;
  using Rings = Kokkos::View<Value**, Kokkos::LayoutRight, MemorySpace>;
  using RingScores = Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>;

  // Heads of all layers are numbered through: the layer's head h is head first_head + h.
  struct LayerStore {
    std::int64_t tokens = 0;
    std::int64_t ring_first = 0;
    std::vector<std::vector<PageId>> pages;  // per head
    bool deferred = false;
    int first_head = 0;
    // Parts of the sequence's, for this layer's heads.
    HostCounts retained;
    Rings ring;
    RingScores ring_scores;
    Counts device_retained;
    typename Counts::HostMirror host_retained;
  };
  struct Sequence {
    std::vector<LayerStore> layers;
    Rings rings;             // (head, 2 * window * dim)
    RingScores ring_scores;  // (head, window)
    // Retained rows per head; since a deferred append, what they can be at most.
    HostCounts retained;
    // The same for kernels, and what is copied there (the same memory on host backends): page table
    // (head, page); retained rows per head, then how many pairs deferred appends have evicted, and
    // how many they have kept for want of a finite score, ever.
    PageTable table;
    typename PageTable::HostMirror host_table;
    Counts lengths;
    typename Counts::HostMirror host_lengths;
    std::int64_t evicted_before = 0;  // of those, the ones that were collected
    std::int64_t non_finite_before = 0;
    AppendCounts collected;              // and not yet told
    AppendCounts total;                  // of all appends, deferred ones once collected
    bool pending = false;                // deferred appends have not been collected
    std::optional<ExecutionSpace> last;  // where the cache last worked on the sequence
    std::int64_t call = -1;              // the last call of append or begin_step that named it
    int step = -1;                       // its index in m_step
    MeteredBytes ring_bytes;
    std::set<std::int64_t> checkpoints;  // those that restore still accepts, oldest first
  };
  // What cancel_step needs to know of a sequence, and append of its share of the step.
  struct StepState {
    SequenceId id = -1;
    std::int64_t rows = 0;
    bool reserved = true;                  // the pages, for as many rows as can leave the ring
    std::vector<std::int64_t> tokens;      // (layer)
    std::vector<std::int64_t> ring_first;  // (layer)
    std::vector<std::int64_t> retained;    // (head)
    AppendCounts total;
    AppendCounts collected;
    // Rows that leave the ring are saved first: head h's are rows first_saved + h * saved_rows, …
    std::int64_t first_saved = 0;
    std::int64_t saved_rows = 0;
  };
  // A page that a step has replaced by an own copy.
  struct Replaced {
    int step;
    int layer;
    int head;
    PageId page;
  };

  // What more rows of a head take.
  struct PageNeeds {
    std::size_t listed;  // pages of its list then
    std::size_t
        missing;       // those to be taken: what the list lacks, and an own copy of its last page
    bool shares_last;  // whether it needs that copy
  };

  const Sequence& sequence_at(SequenceId sequence) const;
  Sequence& sequence_at(SequenceId sequence);
  const LayerStore& store(SequenceId sequence, int layer) const;
  LayerStore& store(SequenceId sequence, int layer);
  Sequence make_sequence() const;
  void insert(SequenceId id, Sequence&& sequence);
  int all_heads() const;
  std::size_t ring_bytes() const;
  void check_layer(int layer) const;
  int checked_head(int layer, int head) const;
  void check_rows(int layer, const RowsView& keys, const RowsView& values) const;
  void check_spans(const AppendSpan* spans, std::size_t n, int layer, const RowsView& keys,
                   const RowsView& values, const ScoresView& scores);
  void check_outside_step(SequenceId sequence, const char* what) const;
  AppendCounts append_spans(const ExecutionSpace& exec, const AppendSpan* spans, std::size_t n,
                            int layer, const RowsView& keys, const RowsView& values,
                            const ScoresView& scores);
  void defer_spans(const ExecutionSpace& exec, const AppendSpan* spans, std::size_t n, int layer,
                   const RowsView& keys, const RowsView& values, const ScoresView& scores);
  detail::AppendStep step_of(const LayerStore& layer, int layer_index, std::int64_t rows) const;
  void reserve_args(std::size_t n);
  void write_args(const ExecutionSpace& exec, std::size_t n);
  void enter(const ExecutionSpace& exec, Sequence& sequence);
  void order_releases(const ExecutionSpace& exec);
  void note_releases(const ExecutionSpace& exec);
  void settle(SequenceId sequence) const;
  void settle(Sequence& sequence);
  void take_lengths(Sequence& sequence);
  void copy_page(const ExecutionSpace& exec, PageId from, PageId to);
  bool shares_last_page(const LayerStore& layer, int head) const;
  PageNeeds list_room(LayerStore& layer, int head, std::int64_t more_rows) const;
  void take_pages(const ExecutionSpace& exec, Sequence& sequence, int layer, int head,
                  std::int64_t more_rows, std::vector<PageId>& from);
  void stock_up(const ExecutionSpace& exec, std::size_t pages);
  void reserve_kept(std::int64_t rows, std::int64_t counts);
  void release_surplus(LayerStore& layer);
  void write_entries(Sequence& sequence, const LayerStore& layer, int head, std::size_t first_page);
  void widen_table(const ExecutionSpace& exec, Sequence& sequence, std::size_t pages);
  void upload_table(const ExecutionSpace& exec, Sequence& sequence, const LayerStore& layer);
  void upload_lengths(const ExecutionSpace& exec, LayerStore& layer);
  void upload_all(const ExecutionSpace& exec, Sequence& sequence);
  std::int64_t saved_row(const Sequence& sequence, const LayerStore& layer, int layer_index) const;
  CompactCounts rearrange(const ExecutionSpace& exec, Sequence& sequence, int layer,
                          const FlagsView& keep, const FlagsView& keep_of_ring);
  CompactCounts rearrange_judged(const ExecutionSpace& exec, Sequence& sequence, int layer,
                                 const FlagsView& keep, const FlagsView& keep_of_ring,
                                 const Counts& totals, bool empties_ring = false);
  void check_extents(int layer, std::int64_t tokens, std::int64_t ring_first) const;
  std::int64_t check_row_scores(SequenceId sequence, int layer, std::size_t heads,
                                std::size_t columns);
  void own_pages(const ExecutionSpace& exec, Sequence& sequence, int layer);
  void close_step();

  CacheShape m_shape;
  MemoryMeter* m_meter;
  PagePool m_pool;
  std::map<SequenceId, Sequence> m_sequences;
  SequenceId m_next_sequence = 0;
  std::int64_t m_next_checkpoint = 0;
  std::int64_t m_calls = 0;
  // Where pages were released that kernels there may still read.
  std::optional<ExecutionSpace> m_released_on;

  // What follows is kept between calls, so that a decode step allocates nothing.
  bool m_in_step = false;
  std::size_t m_n_step = 0;                          // sequences of the step
  std::vector<StepState> m_step;                     // their states, and those of earlier steps
  std::vector<PageId> m_stock;                       // pages taken for the step, next one last
  std::vector<Replaced> m_replaced;                  // each still holds its page
  Kokkos::View<Value*, MemorySpace> m_saved;         // (row, 2 * dim)
  Kokkos::View<float*, MemorySpace> m_saved_scores;  // (row)
  std::vector<PageId> m_fresh;
  std::vector<Sequence*> m_called;  // sequences of the spans of the current call
  std::vector<detail::AppendStep> m_append_steps;
  // The rows that a judgement keeps: those of entry e, a head of a span, are m_kept(m_begins(e)) …
  // , m_kept_counts(e) of them (on hosts they begin where the entry's rows would if all were kept).
  // Behind the counts are those of scores that are not finite, per span.
  Kokkos::View<std::int32_t*, MemorySpace> m_kept;
  Counts m_begins;
  Counts m_kept_counts;
  Counts m_firsts;
  typename Counts::HostMirror m_host_kept_counts;
  // Arguments of the kernel of append_deferred: on the device, as they were last written there, and
  // those of the current call.
  Kokkos::View<char*, MemorySpace> m_span_args;
  std::vector<char> m_written_args;
  std::size_t m_n_written = 0;  // sequences
  std::vector<char> m_new_args;
  std::optional<ExecutionSpace> m_span_args_on;
};

}  // namespace kvzap
