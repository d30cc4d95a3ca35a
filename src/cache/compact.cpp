// Later eviction: judges rows again that were kept once.
#include "base/team.hpp"
#include "cache/cache_impl.hpp"
#include "cache/layer_rows.hpp"

namespace kvzap::cache {
namespace {

using Flags = Kokkos::View<std::uint8_t**, Kokkos::LayoutRight, MemorySpace>;

/// Decides which rows of a layer stay. One team per head, because the oldest ties stay.
struct JudgeAgain {
  LayerRows rows;
  Kokkos::View<const Cutoff*, MemorySpace> cutoffs;
  Flags keep_page;  // (head, row)
  Flags keep_ring;  // (head, row)
  Counts totals;    // rows dropped from the ring, scores that are not finite
  std::int64_t sink = 0;
  std::int64_t first_recent = 0;  // position

  template <class Team>
  KOKKOS_FUNCTION void operator()(const Team& team) const {
    const int head = team.league_rank();
    const Cutoff cutoff = cutoffs(head);
    const std::int64_t retained = rows.layer.retained(head);
    Kokkos::parallel_scan(Kokkos::TeamThreadRange(team, static_cast<int>(rows.layer.rows(head))),
                          [&](int row, std::int64_t& ties, bool final) {
                            const auto found = rows.at(head, row);
                            const bool tie = *found.score == cutoff.score;
                            if (final) {
                              const bool finite = EvictionRule::is_finite(*found.score);
                              const bool keep =
                                  !finite || *found.score > cutoff.score || found.position < sink ||
                                  found.position >= first_recent || (tie && ties < cutoff.ties);
                              if (row < retained) {
                                keep_page(head, row) = keep ? 1 : 0;
                              } else {
                                keep_ring(head, row - retained) = keep ? 1 : 0;
                                if (!keep) Kokkos::atomic_add(&totals(0), std::int64_t{1});
                              }
                              if (!finite) Kokkos::atomic_add(&totals(1), std::int64_t{1});
                            }
                            if (tie) ++ties;
                          });
  }
};

/// Copies the flags of ring rows, which follow those of retained rows, to keep_ring. totals: ring
/// rows dropped, and kept rows whose score is not finite.
template <class Keep>
void split_flags(const ExecutionSpace& exec, const LayerRows& rows, int heads, std::int64_t most,
                 const Keep& keep, const Flags& keep_ring, const Counts& totals) {
  Kokkos::parallel_for(
      "kvzap::evict::split_flags", Range(exec, 0, heads * most), KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t head = i / most;
        const std::int64_t row = i % most;
        if (row >= rows.layer.rows(head)) return;
        const bool stays = keep(head, row) != 0;
        if (row >= rows.layer.retained(head)) {
          keep_ring(head, row - rows.layer.retained(head)) = stays ? 1 : 0;
          if (!stays) Kokkos::atomic_add(&totals(0), std::int64_t{1});
        }
        if (stays && !EvictionRule::is_finite(*rows.at(head, row).score)) {
          Kokkos::atomic_add(&totals(1), std::int64_t{1});
        }
      });
}

/// Returns the number of retained rows of the head with the most.
template <class Layer>
std::int64_t most_retained(const Layer& layer, int heads) {
  std::int64_t most = 0;
  for (int h = 0; h < heads; ++h) most = std::max(most, layer.retained(h));
  return most;
}

// Keeps the flagged rows of a layer, in phases. If ring rows have flags they take part; the kept
// ones then follow the retained rows in pages. After the pages are taken, nothing fails on hosts.
class Rearrangement {
 public:
  Rearrangement(Store& store, const ExecutionSpace& exec, Sequence& sequence, int layer,
                const FlagsView& keep, const FlagsView& keep_of_ring)
      : m_store(store),
        m_mover(row_mover(store.dtype, store.shape.format)),
        m_exec(exec),
        m_sequence(sequence),
        m_layer(sequence.layers[layer]),
        m_heads(store.shape.heads[layer]),
        m_keep(keep),
        m_keep_of_ring(keep_of_ring),
        m_with_ring(keep_of_ring.extent(1) > 0) {
    // For the mover, this is an append of no tokens through which all rows leave the ring.
    m_ring.step = store.step_of(m_layer, layer, 0);
    m_ring.step.leaving = m_with_ring ? m_ring.step.in_ring : 0;
    m_ring.ring = {m_layer.ring.data(), m_layer.ring_scores.data()};
  }

  CompactCounts run() {
    list();
    const CompactCounts counts = plan();
    if (counts.evicted == 0 && !m_with_ring) return counts;
    TargetTable table;
    if (m_mover.runs_kernels()) {
      table.entries = allocate_view<PageTable>("kvzap::compact::page_table", std::size_t(m_heads),
                                               std::max<std::size_t>(m_widest, 1));
      table.host = Kokkos::create_mirror_view(table.entries);
    }
    m_store.widen_table(m_exec, m_sequence, m_widest);
    PageLease lease(m_store);
    lease.take(m_exec, m_missing);
    replace_pages(lease);
    move(table);
    lease.commit();
    record();
    return counts;
  }

 private:
  // The new page lists for kernels.
  struct TargetTable {
    PageTable entries;  // (head, page)
    base::HostMirror<PageTable> host;
  };

  void list() {
    KeptRows& kept = m_store.work.kept;
    const std::int64_t longest = most_retained(m_layer, m_heads);
    const std::int64_t in_ring = m_ring.step.leaving;
    const std::int64_t totals = 2 * std::int64_t{m_heads};
    kept.reserve(m_heads * (longest + in_ring), totals + 1);
    m_kept = kept.part(0, m_heads, 0, longest, totals);
    m_ring_kept = kept.part(m_heads, m_heads, m_heads * longest, in_ring, totals);
    m_mover.select(m_exec, m_keep, {m_layer.retained.data(), m_layer.device_retained.data()},
                   m_kept);
    m_mover.select(m_exec, m_keep_of_ring, {}, m_ring_kept);
    if (m_mover.runs_kernels()) {
      kept.fetch(m_exec, "kvzap::compact: the kept rows decide which pages are written");
    }
  }

  std::int64_t first_written(int head) const { return m_kept.host_firsts[head]; }
  std::int64_t rows_after(int head) const {
    return m_kept.host_counts[head] + m_ring_kept.host_counts[head];
  }
  // Returns the first page that is written: the page with the head's first evicted row. If no row
  // moves, returns the end of the list.
  std::size_t first_written_page(int head) const {
    return rows_after(head) == first_written(head)
               ? m_lists[head].size()
               : static_cast<std::size_t>(first_written(head) / m_store.shape.page_rows);
  }
  // Returns whether the page is replaced. Written pages that another list shares are replaced; the
  // others are written in place.
  bool is_replaced(int head, std::size_t page) const {
    const std::vector<PageId>& list = m_layer.pages[head];
    return page >= list.size() || m_store.pool.reference_count(list[page]) > 1;
  }

  CompactCounts plan() {
    CompactCounts counts;
    m_lists = m_layer.pages;
    for (int h = 0; h < m_heads; ++h) {
      const std::int64_t before = m_layer.retained(h) + m_ring.step.leaving;
      counts.judged += before;
      counts.evicted += before - rows_after(h);
      counts.moved += rows_after(h) - first_written(h);
      m_lists[h].resize(m_store.pages_for(rows_after(h)));
      m_widest = std::max(m_widest, m_lists[h].size());
      for (std::size_t p = first_written_page(h); p < m_lists[h].size(); ++p) {
        m_missing += is_replaced(h, p) ? 1 : 0;
      }
    }
    return counts;
  }

  void replace_pages(PageLease& lease) {
    for (int h = 0; h < m_heads; ++h) {
      const std::size_t first = first_written_page(h);
      for (std::size_t p = first; p < m_lists[h].size(); ++p) {
        if (is_replaced(h, p)) m_lists[h][p] = lease.next();
      }
      if (first >= m_lists[h].size() || first_written(h) % m_store.shape.page_rows == 0) continue;
      // The mover does not copy the rows before the first evicted one.
      if (m_lists[h][first] != m_layer.pages[h][first]) {
        m_store.copy_page(m_exec, m_layer.pages[h][first], m_lists[h][first]);
      }
    }
  }

  void move(const TargetTable& table) {
    const PagesRef from = m_store.pages_of(m_exec, m_sequence, m_layer);
    PagesRef to = from;
    to.lists = &m_lists;
    if (m_mover.runs_kernels()) {
      for (int h = 0; h < m_heads; ++h) {
        for (std::size_t p = 0; p < m_lists[h].size(); ++p) table.host(h, p) = m_lists[h][p];
      }
      Kokkos::deep_copy(m_exec, table.entries, table.host);
      to.table = table.entries.data();
      to.table_stride = table.entries.stride(0);
    }
    const CacheShape& shape = m_store.shape;
    m_mover.compact(m_exec, {shape.page_rows, shape.head_dim, shape.format.vectors()}, m_kept, from,
                    to);
    m_mover.admit(m_exec, m_ring, m_ring_kept, m_kept.head_counts(), to);
    if (m_mover.runs_kernels()) {
      base::fence(m_exec, "kvzap::compact: the pages that rows have left can be taken by others");
    }
  }

  void record() {
    for (int h = 0; h < m_heads; ++h) {
      m_layer.keep_bounds(h, static_cast<std::int64_t>(first_written_page(h)));
      for (std::size_t p = 0; p < m_layer.pages[h].size(); ++p) {
        const bool stays = p < m_lists[h].size() && m_lists[h][p] == m_layer.pages[h][p];
        if (!stays) m_store.pool.release(m_layer.pages[h][p]);
      }
      m_layer.retained(h) = rows_after(h);
    }
    m_layer.pages.swap(m_lists);
    if (m_with_ring) m_layer.ring_first = m_layer.tokens;
    m_store.record_releases(m_exec);
    for (int h = 0; h < m_heads; ++h) m_store.write_entries(m_sequence, m_layer, h, 0);
    m_store.upload_table(m_exec, m_sequence, m_layer);
    m_store.upload_lengths(m_exec, m_layer);
  }

  Store& m_store;
  const RowMover& m_mover;
  const ExecutionSpace& m_exec;
  Sequence& m_sequence;
  LayerStore& m_layer;
  int m_heads;
  const FlagsView& m_keep;
  const FlagsView& m_keep_of_ring;
  bool m_with_ring;
  SpanRows m_ring;
  KeptPart m_kept = {};
  KeptPart m_ring_kept = {};
  std::vector<std::vector<PageId>> m_lists;  // the pages afterwards
  std::size_t m_missing = 0;                 // pages to take
  std::size_t m_widest = 0;                  // length of the longest list
};

// Flags that kernels have written, (head, row), whether rows stay. totals(0) counts the rows of the
// ring that do not; totals(1) the kept rows without a finite score.
struct JudgedRows {
  FlagsView keep_page;
  FlagsView keep_ring;
  Counts totals;
};

// Rearranges by flags. The ring stays unchanged unless rows of it are dropped or `empties_ring`.
CompactCounts rearrange_judged(Store& store, const ExecutionSpace& exec, Sequence& sequence,
                               int layer_index, const JudgedRows& judged,
                               bool empties_ring = false) {
  base::fence(exec, "kvzap::evict: the host reads whether rows of the ring go");
  const auto host_totals = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, judged.totals);
  const LayerStore& layer = sequence.layers[layer_index];
  const std::int64_t heads = store.shape.heads[layer_index];
  bool any = false;
  for (int h = 0; h < heads; ++h) any = any || layer.retained(h) > 0;
  CompactCounts done;
  if (host_totals(0) > 0 || empties_ring) {
    done =
        Rearrangement(store, exec, sequence, layer_index, judged.keep_page, judged.keep_ring).run();
  } else {
    if (any) {
      done = Rearrangement(store, exec, sequence, layer_index, judged.keep_page, FlagsView()).run();
    }
    done.judged += heads * store.step_of(layer, layer_index, 0).in_ring;
  }
  done.non_finite = host_totals(1);
  return done;
}

}  // namespace

// Replaces the shared pages of a layer by copies.
void Store::own_pages(const ExecutionSpace& exec, Sequence& sequence, int layer_index) {
  LayerStore& layer = sequence.layers[layer_index];
  std::size_t shared = 0;
  for (const auto& list : layer.pages) {
    for (PageId page : list) shared += pool.reference_count(page) > 1 ? 1 : 0;
  }
  if (shared == 0) return;
  PageLease lease(*this);
  or_out_of_memory("own pages", 0, pool, [&] { lease.take(exec, shared); });
  for (std::size_t h = 0; h < layer.pages.size(); ++h) {
    for (PageId& page : layer.pages[h]) {
      if (pool.reference_count(page) == 1) continue;
      const PageId own = lease.next();
      copy_page(exec, page, own);
      pool.release(std::exchange(page, own));
      lease.keep_last();
    }
    write_entries(sequence, layer, static_cast<int>(h), 0);
  }
  record_releases(exec);
  upload_table(exec, sequence, layer);
}

}  // namespace kvzap::cache

namespace kvzap {

using cache::allocate_view;

CompactCounts KVCache::compact(const ExecutionSpace& exec, SequenceId id, int layer_index,
                               const FlagsView& keep) {
  cache::Store& store = *m_store;
  store.check_outside_step(id, "compact");
  store.check_pages(layer_index, "compact");
  store.settle(id);
  const cache::LayerStore& layer = store.layer_at(id, layer_index);
  const int heads = store.shape.heads[layer_index];
  const std::int64_t longest = cache::most_retained(layer, heads);
  if (static_cast<int>(keep.extent(0)) != heads ||
      static_cast<std::int64_t>(keep.extent(1)) < longest) {
    throw Error(
        fmt::format("cache compact: keep is ({}, {}); expected ({}, at least {}) = (head, "
                    "retained row)",
                    keep.extent(0), keep.extent(1), heads, longest));
  }
  cache::Sequence& sequence = store.sequence_at(id);
  CompactCounts counts;
  if (longest > 0) {
    store.enter(exec, sequence);
    counts = cache::or_out_of_memory("a compaction", 0, store.pool, [&] {
      return cache::Rearrangement(store, exec, sequence, layer_index, keep, FlagsView()).run();
    });
  }
  sequence.checkpoints.clear();
  return counts;
}

CompactCounts KVCache::evict(const ExecutionSpace& exec, SequenceId id, int layer_index,
                             const std::vector<Cutoff>& cutoffs, const EvictOptions& options) {
  cache::Store& store = *m_store;
  store.check_outside_step(id, "evict");
  store.check_pages(layer_index, "evict");
  store.settle(id);
  const cache::LayerStore& layer = store.layer_at(id, layer_index);
  const int heads = store.shape.heads[layer_index];
  if (static_cast<int>(cutoffs.size()) != heads) {
    throw Error(fmt::format("cache evict: {} cutoffs; layer {} has {} heads", cutoffs.size(),
                            layer_index, heads));
  }
  for (const Cutoff& cutoff : cutoffs) {
    if (cutoff.score != cutoff.score) throw Error("cache evict: a cutoff is not a number");
  }
  cache::Sequence& sequence = store.sequence_at(id);
  const std::int64_t longest = cache::most_retained(layer, heads);
  const std::int64_t in_ring = layer.in_ring();
  CompactCounts counts;
  if (heads > 0 && longest + in_ring > 0) {
    store.enter(exec, sequence);
    counts = cache::or_out_of_memory("an eviction", 0, store.pool, [&] {
      cache::JudgeAgain kernel;
      kernel.rows = cache::LayerRows::of(store, id, layer_index);
      const auto device_cutoffs = allocate_view<Kokkos::View<Cutoff*, MemorySpace>>(
          "kvzap::evict::cutoffs", cutoffs.size());
      const auto host_cutoffs = Kokkos::create_mirror_view(device_cutoffs);
      for (int h = 0; h < heads; ++h) host_cutoffs(h) = cutoffs[h];
      Kokkos::deep_copy(exec, device_cutoffs, host_cutoffs);
      kernel.cutoffs = device_cutoffs;
      kernel.keep_page = allocate_view<cache::Flags>("kvzap::evict::keep_page", std::size_t(heads),
                                                     std::size_t(longest));
      kernel.keep_ring = allocate_view<cache::Flags>("kvzap::evict::keep_ring", std::size_t(heads),
                                                     std::size_t(in_ring));
      kernel.totals = allocate_view<cache::Counts>("kvzap::evict::totals", std::size_t{2});
      Kokkos::deep_copy(exec, kernel.totals, std::int64_t{0});
      kernel.sink = options.sink;
      kernel.first_recent = layer.tokens - options.recent;
      const int threads = base::team_shape({128, 1}).threads;
      Kokkos::parallel_for("kvzap::evict::judge",
                           Kokkos::TeamPolicy<ExecutionSpace>(exec, heads, threads), kernel);
      return cache::rearrange_judged(store, exec, sequence, layer_index,
                                     {kernel.keep_page, kernel.keep_ring, kernel.totals});
    });
  }
  sequence.checkpoints.clear();
  return counts;
}

CompactCounts KVCache::evict(const ExecutionSpace& exec, SequenceId id, int layer_index,
                             const FlagsView& keep, bool empties_ring) {
  cache::Store& store = *m_store;
  store.check_outside_step(id, "evict");
  store.check_pages(layer_index, "evict");
  store.settle(id);
  const cache::LayerStore& layer = store.layer_at(id, layer_index);
  const int heads = store.shape.heads[layer_index];
  const std::int64_t longest = cache::most_retained(layer, heads);
  const std::int64_t in_ring = layer.in_ring();
  if (static_cast<int>(keep.extent(0)) != heads ||
      (heads > 0 && static_cast<std::int64_t>(keep.extent(1)) < longest + in_ring)) {
    throw Error(
        fmt::format("cache evict: keep is ({}, {}); expected ({}, at least {}) = (head, row)",
                    keep.extent(0), keep.extent(1), heads, longest + in_ring));
  }
  cache::Sequence& sequence = store.sequence_at(id);
  CompactCounts counts;
  if (heads > 0 && longest + in_ring > 0) {
    store.enter(exec, sequence);
    counts = cache::or_out_of_memory("an eviction", 0, store.pool, [&] {
      const auto keep_ring = allocate_view<cache::Flags>("kvzap::evict::keep_ring",
                                                         std::size_t(heads), std::size_t(in_ring));
      const auto totals = allocate_view<cache::Counts>("kvzap::evict::totals", std::size_t{2});
      Kokkos::deep_copy(exec, totals, std::int64_t{0});
      cache::split_flags(exec, cache::LayerRows::of(store, id, layer_index), heads,
                         longest + in_ring, keep, keep_ring, totals);
      return cache::rearrange_judged(store, exec, sequence, layer_index, {keep, keep_ring, totals},
                                     empties_ring && in_ring > 0);
    });
  }
  sequence.checkpoints.clear();
  return counts;
}

}  // namespace kvzap
