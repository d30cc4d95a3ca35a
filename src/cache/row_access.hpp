// The rows of a cache as snapshots need them: their memory, and sequences that are made from a
// file.
#pragma once

#include <cstdint>
#include <kvzap/core/cache.hpp>
#include <vector>

namespace kvzap::cache {

/// The memory of one head's rows, for a host thread that reads them while other sequences of the
/// cache continue. Valid until the sequence changes or is freed.
template <class Value>
struct RawRows {
  std::vector<PageAddress> pages;  // all full but for the last
  std::int64_t retained = 0;       // rows in pages
  const Value* ring = nullptr;     // 2 * window * dim
  const float* ring_scores = nullptr;
  std::int64_t tokens = 0, ring_first = 0, ring_rows = 0;
  int window = 1, page_rows = 1, dim = 1;
  PageFormat format;
  // Keep a checkpoint's ring alive. Release them only on a thread that may call Kokkos.
  RingBlock<Value> block;

  std::int64_t rows() const { return retained + ring_rows; }
};

/// Rows of one head in host memory. Rows with a null pointer are not written.
template <class Value>
struct ImportedRows {
  const std::int32_t* positions = nullptr;  // ignored for ring rows
  const float* scores = nullptr;
  const Value* keys = nullptr;  // (row, head_dim)
  const Value* values = nullptr;
};

/// Access of snapshots to the rows of a cache.
template <class Value, PageOrder order>
class RowAccess {
 public:
  using Cache = KVCache<Value, order>;
  using Checkpoint = typename Cache::Checkpoint;

  /// `cache` outlives the access.
  explicit RowAccess(Cache& cache) : m_cache(cache) {}

  bool has_packed_rows() const { return m_cache.shape().format.packed(); }
  /// Returns the memory of a head's rows. Waits. Throws Error on device backends, where the host
  /// cannot read rows in place.
  RawRows<Value> raw_rows(SequenceId sequence, int layer, int head);
  /// Returns the memory of the ring rows that a checkpoint holds; no pages.
  RawRows<Value> raw_rows(const Checkpoint& checkpoint, int layer, int head) const;

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
                   std::int64_t begin, std::int64_t count, const ImportedRows<Value>& rows);
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
                   std::int64_t begin, std::int64_t count, const ImportedRows<Value>& rows);

 private:
  using Sequence = typename Cache::Sequence;
  using LayerStore = typename Cache::LayerStore;

  void check_extents(int layer, std::int64_t tokens, std::int64_t ring_first) const;

  Cache& m_cache;
};

}  // namespace kvzap::cache
