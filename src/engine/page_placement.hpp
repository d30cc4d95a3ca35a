// Which pages of a cache lie on other ranks than the owners of their heads, and moves of pages that
// balance the ranks.
#pragma once

#include <kvzap/core/cache.hpp>
#include <kvzap/core/communicator.hpp>
#include <kvzap/core/head_partition.hpp>
#include <map>
#include <vector>

#include "cache/row_access.hpp"
#include "engine/page_plan.hpp"

namespace kvzap::engine {

/// Returns heads first … first + count - 1 of a layer as a layer of their own.
template <class Layer>
Layer heads_of(const Layer& layer, int first, int count) {
  const auto own = std::make_pair(first, first + count);
  Layer part = layer;
  part.page_table = Kokkos::subview(layer.page_table, own, Kokkos::ALL);
  part.retained = Kokkos::subview(layer.retained, own);
  part.ring = Kokkos::subview(layer.ring, own, Kokkos::ALL);
  part.bounds = Kokkos::subview(layer.bounds, own);
  part.heads = count;
  return part;
}

/// The placement of rows on ranks. New rows arrive at the owner of their KV head, which keeps the
/// ring and judges rows. Full pages may lie on any rank: a rank with remote pages gives the
/// partial attention over them (its output and log-sum-exp), which are merged exactly. Every rank
/// knows the whole placement.
///
/// All functions are collective unless they say otherwise, and every rank makes the same calls.
class PagePlacement {
 public:
  using Cache = KVCache;
  using Layer = CachedLayer;

  using Run = PagesAway;

  /// partition, own and meter outlive the placement. Does not communicate.
  PagePlacement(const HeadPartition& partition, const Communicator& comm, Cache& own,
                MemoryMeter* meter);

  // These do not communicate.

  /// Returns whether all rows of all sequences lie with the owners of their heads.
  bool is_plain() const { return m_away.empty(); }
  bool has_pages_away(SequenceId sequence) const { return m_away.count(sequence) > 0; }
  /// Returns the runs of a head, oldest move first. head: global, as everywhere here.
  const std::vector<Run>& runs(SequenceId sequence, int layer, int head) const;
  /// Returns the rows of a head that lie on other ranks than its owner.
  std::int64_t rows_away(SequenceId sequence, int layer, int head) const;
  /// Returns such rows of all heads.
  std::int64_t rows_away(SequenceId sequence) const {
    const auto found = m_away.find(sequence);
    return found == m_away.end() ? 0 : found->second.pages * m_own.shape().page_rows;
  }
  /// Returns the rows of remote pages as kernels read them, head by head of the layer; nothing in
  /// `layer` if this rank has none of the sequence.
  struct RemoteRows {
    bool any = false;
    Layer layer;
  };
  RemoteRows remote_rows(SequenceId sequence, int layer);
  /// Returns a layer without rows, of one head. Throws OutOfMemory at the first call.
  Layer no_rows(int layer);
  /// Returns the sequence of this rank's cache of remote pages that has those of a sequence; -1:
  /// none. Its heads are all KV heads of a layer.
  SequenceId remote_sequence_of(SequenceId sequence) const {
    const auto found = m_away.find(sequence);
    return found == m_away.end() ? -1 : found->second.remote;
  }
  Cache& remote_cache() { return m_remote; }
  /// Returns the bytes of remote pages.
  CacheBytes remote_bytes() const { return m_remote.bytes(); }
  /// Returns the number of pages that have moved so far, over all ranks.
  std::int64_t pages_moved() const { return m_pages_moved; }
  /// Gives the copy of a sequence the same placement. Throws OutOfMemory.
  void fork(SequenceId source, SequenceId copy);
  /// Forgets a sequence and frees its remote pages.
  void free(SequenceId sequence);
  /// Returns unused memory of remote pages to the system. Returns the number of bytes.
  std::size_t trim();
  /// Limits the bytes of the owner's cache and of remote pages together (0: no limit).
  void set_limit(std::size_t bytes);

  /// Moves pages of these sequences until in each layer no rank has more than (1 + tolerance) times
  /// the mean of the ranks' rows, as far as pages allow and `most_bytes` suffice. Pages that
  /// another sequence shares stay. If a rank has no memory for a page, the moves end there. Returns
  /// the slowest rank's rows divided by the mean, in the worst layer before the moves.
  double balance(const std::vector<SequenceId>& sequences, double tolerance,
                 std::int64_t most_bytes);
  /// A move of neighbouring pages of a head between two ranks.
  struct Move {
    SequenceId sequence = -1;
    int layer = 0, head = 0;
    int from = 0, to = 0;
    std::int64_t first = 0;  // in the owner's list
    std::int64_t pages = 0;
  };
  /// Moves pages. Returns false on all ranks, with nothing changed, if one of them has no memory.
  bool carry_out(const Move& move);
  /// Brings all pages of a sequence back to the owners. Throws AgreedOutOfMemory; pages that came
  /// back before stay there.
  void recall(SequenceId sequence);

 private:
  struct Away {
    std::vector<std::vector<Run>> heads;  // (layer * KV heads + head)
    SequenceId remote = -1;               // its sequence in m_remote, if this rank has pages
    std::int64_t pages = 0;
    bool is_forked = false;  // another sequence may share remote pages, which then stay
  };
  // What ranks tell each other before they plan.
  struct HeadRows {
    std::int64_t rows = 0;       // with the owner, in pages and ring
    std::int64_t full = 0;       // full pages with the owner
    std::int64_t available = 0;  // the last of these that no other sequence shares
  };
  using Access = cache::RowAccess;
  using PageRun = Access::PageRun;

  int owner(int layer, int head) const { return m_owners[layer * m_partition.n_kv_heads() + head]; }
  int local_head(int layer, int head) const {
    return m_local_heads[layer * m_partition.n_kv_heads() + head];
  }
  std::vector<Run>& runs_of(SequenceId sequence, int layer, int head);
  std::vector<HeadRows> gather_rows(const std::vector<SequenceId>& sequences) const;
  LayerPlan plan_layer(int layer, const std::vector<SequenceId>& sequences,
                       const std::vector<HeadRows>& rows) const;
  double balance_layer(int layer, const std::vector<SequenceId>& sequences,
                       const std::vector<HeadRows>& rows, double tolerance,
                       std::int64_t& most_pages);
  PageRun run_at(const Move& move, int rank);
  void reserve(const Move& move);
  void send_pages(const Move& move);
  void note(const Move& move);
  void share_limit();

  const HeadPartition& m_partition;
  const Communicator m_comm;
  Cache& m_own;
  Cache m_remote;                            // heads by their global numbers; no rings
  std::vector<int> m_owners, m_local_heads;  // (layer * KV heads + head)
  std::map<SequenceId, Away> m_away;
  SequenceId m_nobody = -1;  // a sequence without rows
  std::vector<char> m_buffer;
  std::int64_t m_pages_moved = 0;
  std::size_t m_limit = 0;
};

}  // namespace kvzap::engine
