// The rows of a cache as snapshots and other ranks need them: their memory, sequences that are made
// from a file, and pages that move to another cache.
#pragma once

#include <cstdint>
#include <kvzap/core/cache.hpp>
#include <vector>

namespace kvzap::cache {

struct Sequence;

/// One head's rows, for a host thread that reads them while other sequences of the cache continue:
/// their memory, valid until the sequence changes or is freed, or copies of it.
struct RawRows : HeadExtents {
  std::vector<PageAddress> pages;  // all full but for the last
  const char* ring = nullptr;      // vectors * window * dim values, in bytes
  const float* ring_scores = nullptr;
  std::int64_t tokens = 0;
  int dim = 1;
  DType dtype = DType::f32;
  PageFormat format;
  // Keep a checkpoint's ring, and copies, alive. Release them only on a thread that may call
  // Kokkos.
  RingBlock block;
  Kokkos::View<const std::uint64_t*, Kokkos::HostSpace> page_copies;
  Kokkos::View<const char*, Kokkos::HostSpace> ring_copy;
  Kokkos::View<const float*, Kokkos::HostSpace> score_copy;
};

/// Rows of one head in host memory, keys and values of the cache's type. Rows with a null pointer
/// are not written.
struct ImportedRows {
  const std::int32_t* positions = nullptr;  // ignored for ring rows
  const float* scores = nullptr;
  const void* keys = nullptr;  // (row, head_dim)
  const void* values = nullptr;
  // As they lie in pages of the cache's format: (row, code_bytes), (row). Not for ring rows.
  const std::uint8_t* key_codes = nullptr;
  const std::uint8_t* value_codes = nullptr;
  const bfloat16* key_scales = nullptr;  // given with the codes
  const bfloat16* value_scales = nullptr;
};

/// Access of snapshots and of moves between ranks to the rows of a cache.
class RowAccess {
 public:
  using Cache = KVCache;
  using Checkpoint = Cache::Checkpoint;

  /// `cache` outlives the access.
  explicit RowAccess(Cache& cache) : m_cache(cache), m_store(*cache.m_store) {}

  DType dtype() const { return m_cache.dtype(); }
  const PageFormat& format() const { return m_cache.shape().format; }
  /// Whether the host can read and write rows where they lie.
  static bool is_in_place();
  /// Returns the rows of a head, in place or copied. Waits.
  RawRows raw_rows(SequenceId sequence, int layer, int head);
  /// Returns the ring rows that a checkpoint holds; no pages.
  RawRows raw_rows(const Checkpoint& checkpoint, int layer, int head) const;

  /// Returns values first … first + count - 1 of a layer's state, as they lie in memory: one head
  /// after the other. The memory stays while the result is held. Waits.
  Kokkos::View<float*, MemorySpace> state(SequenceId sequence, int layer, std::int64_t first,
                                          std::int64_t count);
  /// The same of the state that a checkpoint holds.
  Kokkos::View<float*, MemorySpace> state(const Checkpoint& checkpoint, int layer,
                                          std::int64_t first, std::int64_t count) const;

  /// Gives an empty layer of a sequence the extents of a saved cache.
  ///
  /// Head h gets rows[h] rows of `tokens` tokens; the newest min(tokens - ring_first, window) are
  /// in the ring. Their content is undefined until import_rows has written it. Throws Error if the
  /// layer has had tokens, or for extents that no cache has; OutOfMemory.
  void import_layer(const ExecutionSpace& exec, SequenceId id, int layer, std::int64_t tokens,
                    std::int64_t ring_first, const std::vector<std::int64_t>& rows);
  /// Writes the head's rows begin … begin + count - 1 after import_layer, while no other sequence
  /// shares its pages. Throws Error for rows that the head does not have; OutOfMemory.
  void import_rows(const ExecutionSpace& exec, SequenceId id, int layer, int head,
                   std::int64_t begin, std::int64_t count, const ImportedRows& rows);
  /// Sets the value that counts(id) returns.
  void import_counts(SequenceId id, const AppendCounts& counts);
  /// Makes a checkpoint of an earlier state of a saved sequence.
  ///
  /// tokens, ring_first: (layer). retained: (head of any layer). The content of its rings is
  /// undefined until import_rows has written it. Throws Error if the sequence cannot be cut back to
  /// such a state; OutOfMemory.
  Checkpoint import_checkpoint(const ExecutionSpace& exec, SequenceId id,
                               const std::vector<std::int64_t>& tokens,
                               const std::vector<std::int64_t>& ring_first,
                               const std::vector<std::int64_t>& retained,
                               const AppendCounts& counts);
  /// Writes ring rows begin … begin + count - 1 of such a checkpoint, counted from the oldest.
  void import_rows(const ExecutionSpace& exec, const Checkpoint& checkpoint, int layer, int head,
                   std::int64_t begin, std::int64_t count, const ImportedRows& rows);

  /// Replaces values of a head's rows, which are counted in order of position: values (row, dim),
  /// rounded once, become those of rows(0), rows(1), …. Keys, positions and scores remain. Pages
  /// that another sequence shares are copied first. Checkpoints of the sequence become void. Within
  /// a step the layer must have had no token before it. Does not wait. Throws Error for other
  /// layers, for extents that do not fit, and if a row has no value beside its key; OutOfMemory.
  void set_values(const ExecutionSpace& exec, SequenceId id, int layer, int head,
                  const Kokkos::View<const std::int64_t*, MemorySpace>& rows,
                  const Kokkos::View<const float**, Kokkos::LayoutRight, MemorySpace>& values);

  // Pages byte by byte, with positions and scores, for a cache of the same type,
  // page and format.

  /// A run of pages of a head, all of whose rows are in use.
  struct PageRun {
    SequenceId sequence = -1;
    int layer = 0;
    int head = 0;
    std::int64_t first = 0;
    std::int64_t count = 0;
  };
  /// Bytes of a page's content.
  std::size_t page_bytes() const { return m_cache.pool().page_bytes(); }
  /// Returns the number of the head's pages whose rows are all in use. Waits if deferred appends
  /// are pending, as do the functions that follow.
  std::int64_t full_pages(SequenceId sequence, int layer, int head) const;
  /// Returns how many of the last of those pages no other sequence shares.
  std::int64_t own_full_pages(SequenceId sequence, int layer, int head) const;
  /// Adds pages to a head's list, in front of page run.first. Their content is undefined until
  /// write_page. Checkpoints of the sequence remain, and the caller adds the rows to their counts.
  /// Throws Error within a step or for a run that does not fit; OutOfMemory.
  void insert_pages(const ExecutionSpace& exec, const PageRun& run);
  /// Removes pages from a head's list. Checkpoints of the sequence become void, unless the pages
  /// were inserted since. Throws Error as insert_pages does.
  void remove_pages(const ExecutionSpace& exec, const PageRun& run, bool inserted_since = false);
  /// Copies the content of a page, page_bytes(), to host memory. Waits.
  void read_page(const ExecutionSpace& exec, const PageRun& run, std::int64_t page,
                 char* content) const;
  /// Writes the content of a page that no other sequence shares. Waits.
  void write_page(const ExecutionSpace& exec, const PageRun& run, std::int64_t page,
                  const char* content);

 private:
  void list_changed(const ExecutionSpace& exec, Sequence& sequence, const PageRun& run,
                    std::int64_t rows);
  void check_run(const PageRun& run, std::int64_t last, const char* what) const;
  void check_extents(int layer, std::int64_t tokens, std::int64_t ring_first) const;

  Cache& m_cache;
  Store& m_store;
};

}  // namespace kvzap::cache
