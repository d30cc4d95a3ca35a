// Second decisions: rows that were kept once are evicted, or get new scores.
#include "base/team.hpp"
#include "cache/cache_impl.hpp"
#include "cache/layer_rows.hpp"

namespace kvzap {

using detail::allocate_view;
using detail::AppendStep;

namespace {

using Flags = Kokkos::View<std::uint8_t**, Kokkos::LayoutRight, MemorySpace>;

/// Decides what stays of a layer: a team for each head, since the ties that stay are the oldest.
template <class Value>
struct JudgeAgain {
  detail::LayerRows<Value> rows;
  Kokkos::View<const Cutoff*, MemorySpace> cutoffs;
  Flags keep_page;        // (head, row)
  Flags keep_ring;        // (head, row)
  detail::Counts totals;  // dropped from the ring, not finite
  std::int64_t sink = 0;
  std::int64_t first_recent = 0;  // position

  template <class Team>
  KOKKOS_FUNCTION void operator()(const Team& team) const {
    const int head = team.league_rank();
    const Cutoff cutoff = cutoffs(head);
    const std::int64_t retained = rows.retained[head];
    Kokkos::parallel_scan(Kokkos::TeamThreadRange(team, static_cast<int>(rows.count(head))),
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

/// The flags of the ring's rows, which lie behind those of retained rows, for themselves, and what
/// goes of it.
template <class Value, class Keep>
void split_flags(const ExecutionSpace& exec, const detail::LayerRows<Value>& rows, int heads,
                 std::int64_t most, const Keep& keep, const Flags& keep_ring,
                 const detail::Counts& totals) {
  Kokkos::parallel_for(
      "kvzap::evict::split_flags", detail::Range(exec, 0, heads * most),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t head = i / most;
        const std::int64_t row = i % most;
        if (row >= rows.count(head)) return;
        const bool stays = keep(head, row) != 0;
        if (row >= rows.retained[head]) {
          keep_ring(head, row - rows.retained[head]) = stays ? 1 : 0;
          if (!stays) Kokkos::atomic_add(&totals(0), std::int64_t{1});
        }
        if (stays && !EvictionRule::is_finite(*rows.at(head, row).score)) {
          Kokkos::atomic_add(&totals(1), std::int64_t{1});
        }
      });
}

/// Of the head with the most retained rows.
template <class Layer>
std::int64_t most_retained(const Layer& layer, int heads) {
  std::int64_t most = 0;
  for (int h = 0; h < heads; ++h) most = std::max(most, layer.retained(h));
  return most;
}

}  // namespace

template <class Value, PageOrder order>
CompactCounts KVCache<Value, order>::compact(const ExecutionSpace& exec, SequenceId id,
                                             int layer_index, const FlagsView& keep) {
  check_outside_step(id, "compact");
  settle(id);
  const LayerStore& layer = store(id, layer_index);
  const int heads = m_shape.heads[layer_index];
  const std::int64_t longest = most_retained(layer, heads);
  if (static_cast<int>(keep.extent(0)) != heads ||
      static_cast<std::int64_t>(keep.extent(1)) < longest) {
    throw Error(
        fmt::format("cache compact: keep is ({}, {}); expected ({}, at least {}) = (head, "
                    "retained row)",
                    keep.extent(0), keep.extent(1), heads, longest));
  }
  Sequence& sequence = sequence_at(id);
  CompactCounts counts;
  if (longest > 0) {
    enter(exec, sequence);
    counts = detail::or_out_of_memory("a compaction", 0, m_pool, [&] {
      return rearrange(exec, sequence, layer_index, keep, FlagsView());
    });
  }
  sequence.checkpoints.clear();
  return counts;
}

template <class Value, PageOrder order>
CompactCounts KVCache<Value, order>::evict(const ExecutionSpace& exec, SequenceId id,
                                           int layer_index, const std::vector<Cutoff>& cutoffs,
                                           const EvictOptions& options) {
  check_outside_step(id, "evict");
  settle(id);
  const LayerStore& layer = store(id, layer_index);
  const int heads = m_shape.heads[layer_index];
  if (static_cast<int>(cutoffs.size()) != heads) {
    throw Error(fmt::format("cache evict: {} cutoffs; layer {} has {} heads", cutoffs.size(),
                            layer_index, heads));
  }
  for (const Cutoff& cutoff : cutoffs) {
    if (cutoff.score != cutoff.score) throw Error("cache evict: a cutoff is not a number");
  }
  Sequence& sequence = sequence_at(id);
  const std::int64_t longest = most_retained(layer, heads);
  const std::int64_t in_ring =
      std::min<std::int64_t>(layer.tokens - layer.ring_first, m_shape.window);
  CompactCounts counts;
  if (heads > 0 && longest + in_ring > 0) {
    enter(exec, sequence);
    counts = detail::or_out_of_memory("an eviction", 0, m_pool, [&] {
      JudgeAgain<Value> kernel;
      kernel.rows = detail::LayerRows<Value>::of(this->layer(id, layer_index),
                                                 layer.ring_scores.data(), order);
      const auto device_cutoffs = allocate_view<Kokkos::View<Cutoff*, MemorySpace>>(
          "kvzap::evict::cutoffs", cutoffs.size());
      const auto host_cutoffs = Kokkos::create_mirror_view(device_cutoffs);
      for (int h = 0; h < heads; ++h) host_cutoffs(h) = cutoffs[h];
      Kokkos::deep_copy(exec, device_cutoffs, host_cutoffs);
      kernel.cutoffs = device_cutoffs;
      kernel.keep_page =
          allocate_view<Flags>("kvzap::evict::keep_page", std::size_t(heads), std::size_t(longest));
      kernel.keep_ring =
          allocate_view<Flags>("kvzap::evict::keep_ring", std::size_t(heads), std::size_t(in_ring));
      kernel.totals = allocate_view<detail::Counts>("kvzap::evict::totals", std::size_t{2});
      Kokkos::deep_copy(exec, kernel.totals, std::int64_t{0});
      kernel.sink = options.sink;
      kernel.first_recent = layer.tokens - options.recent;
      const int threads = detail::team_shape({128, 1}).threads;
      Kokkos::parallel_for("kvzap::evict::judge",
                           Kokkos::TeamPolicy<ExecutionSpace>(exec, heads, threads), kernel);
      return rearrange_judged(exec, sequence, layer_index, kernel.keep_page, kernel.keep_ring,
                              kernel.totals);
    });
  }
  sequence.checkpoints.clear();
  return counts;
}

template <class Value, PageOrder order>
CompactCounts KVCache<Value, order>::evict(const ExecutionSpace& exec, SequenceId id,
                                           int layer_index, const FlagsView& keep,
                                           bool empties_ring) {
  check_outside_step(id, "evict");
  settle(id);
  const LayerStore& layer = store(id, layer_index);
  const int heads = m_shape.heads[layer_index];
  const std::int64_t longest = most_retained(layer, heads);
  const std::int64_t in_ring =
      std::min<std::int64_t>(layer.tokens - layer.ring_first, m_shape.window);
  if (static_cast<int>(keep.extent(0)) != heads ||
      (heads > 0 && static_cast<std::int64_t>(keep.extent(1)) < longest + in_ring)) {
    throw Error(
        fmt::format("cache evict: keep is ({}, {}); expected ({}, at least {}) = (head, row)",
                    keep.extent(0), keep.extent(1), heads, longest + in_ring));
  }
  Sequence& sequence = sequence_at(id);
  CompactCounts counts;
  if (heads > 0 && longest + in_ring > 0) {
    enter(exec, sequence);
    counts = detail::or_out_of_memory("an eviction", 0, m_pool, [&] {
      const auto keep_ring =
          allocate_view<Flags>("kvzap::evict::keep_ring", std::size_t(heads), std::size_t(in_ring));
      const auto totals = allocate_view<detail::Counts>("kvzap::evict::totals", std::size_t{2});
      Kokkos::deep_copy(exec, totals, std::int64_t{0});
      split_flags(exec,
                  detail::LayerRows<Value>::of(this->layer(id, layer_index),
                                               layer.ring_scores.data(), order),
                  heads, longest + in_ring, keep, keep_ring, totals);
      return rearrange_judged(exec, sequence, layer_index, keep, keep_ring, totals,
                              empties_ring && in_ring > 0);
    });
  }
  sequence.checkpoints.clear();
  return counts;
}

// rearrange, where kernels have decided what stays: the ring as it is, unless totals(0) of its rows
// go or it is to be emptied. totals(1) of all rows that stay have no finite score.
template <class Value, PageOrder order>
CompactCounts KVCache<Value, order>::rearrange_judged(const ExecutionSpace& exec,
                                                      Sequence& sequence, int layer_index,
                                                      const FlagsView& keep,
                                                      const FlagsView& keep_of_ring,
                                                      const Counts& totals, bool empties_ring) {
  detail::fence(exec, "kvzap::evict: the host reads whether rows of the ring go");
  const auto host_totals = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, totals);
  const LayerStore& layer = sequence.layers[layer_index];
  const std::int64_t heads = m_shape.heads[layer_index];
  bool any = false;
  for (int h = 0; h < heads; ++h) any = any || layer.retained(h) > 0;
  CompactCounts done;
  if (host_totals(0) > 0 || empties_ring) {
    done = rearrange(exec, sequence, layer_index, keep, keep_of_ring);
  } else {
    if (any) done = rearrange(exec, sequence, layer_index, keep, FlagsView());
    done.judged += heads * step_of(layer, layer_index, 0).in_ring;
  }
  done.non_finite = host_totals(1);
  return done;
}

// Keeps what is flagged of a layer's retained rows and, if there are flags for them, of its ring's
// rows, which then go behind those. Changes nothing but content without an owner before it returns.
template <class Value, PageOrder order>
CompactCounts KVCache<Value, order>::rearrange(const ExecutionSpace& exec, Sequence& sequence,
                                               int layer_index, const FlagsView& keep,
                                               const FlagsView& keep_of_ring) {
  LayerStore& layer = sequence.layers[layer_index];
  const int heads = m_shape.heads[layer_index];
  const int dim = m_shape.head_dim;
  const std::int64_t page_rows = m_shape.page_rows;
  const bool with_ring = keep_of_ring.extent(1) > 0;
  const std::int64_t longest = most_retained(layer, heads);
  // The ring's rows that stay are admitted as by an append of no tokens through which all leave.
  AppendStep ring_step = step_of(layer, layer_index, 0);
  ring_step.exits = with_ring ? ring_step.in_ring : 0;

  const bool portable = detail::use_portable_path();
  const std::int64_t ring_kept_at = heads * longest;
  reserve_kept(ring_kept_at + heads * ring_step.exits, 2 * std::int64_t{heads});
  std::vector<std::int64_t> first(heads, 0);  // evicted row of each head, or its end
  const auto pages_part = std::make_pair(0, heads);
  const auto ring_part = std::make_pair(heads, 2 * heads);
  const auto ring_kept =
      Kokkos::subview(m_kept, std::make_pair(ring_kept_at, ring_kept_at + heads * ring_step.exits));
  if (portable) {
    Kokkos::deep_copy(exec, m_kept_counts, std::int64_t{0});
    Kokkos::deep_copy(exec, m_firsts, std::int64_t{0});
    if (longest > 0) {
      detail::select_flagged(exec, heads, longest, layer.device_retained, keep, m_kept,
                             Kokkos::subview(m_begins, pages_part),
                             Kokkos::subview(m_kept_counts, pages_part),
                             Kokkos::subview(m_firsts, pages_part));
    }
    if (with_ring) {
      const detail::Counts in_ring("kvzap::compact::in_ring", heads);
      Kokkos::deep_copy(exec, in_ring, ring_step.in_ring);
      detail::select_flagged(exec, heads, ring_step.in_ring, in_ring, keep_of_ring, ring_kept,
                             Kokkos::subview(m_begins, ring_part),
                             Kokkos::subview(m_kept_counts, ring_part),
                             Kokkos::subview(m_firsts, ring_part));
    }
    detail::fence(exec, "kvzap::compact: the kept rows decide which pages are written");
    Kokkos::deep_copy(m_host_kept_counts, m_kept_counts);
    const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, m_firsts);
    for (int h = 0; h < heads; ++h) first[h] = host(h);
  } else if constexpr (detail::runs_on_host) {
    for (int h = 0; h < heads; ++h) {
      std::int64_t unused = 0;
      m_host_kept_counts(h) =
          detail::list_flagged(keep, h, layer.retained(h), m_kept.data() + h * longest, first[h]);
      m_host_kept_counts(heads + h) =
          detail::list_flagged(keep_of_ring, h, ring_step.exits,
                               m_kept.data() + ring_kept_at + h * ring_step.exits, unused);
    }
  }

  // Pages that are written but held by another list too are replaced; the others are written in
  // place.
  CompactCounts counts;
  std::vector<std::vector<PageId>> lists(layer.pages);
  std::vector<std::int64_t> written_from(heads);
  std::size_t missing = 0;
  std::size_t widest = 0;
  std::int64_t most_of_ring = 0;
  const auto is_replaced = [&](int head, std::size_t page) {
    return page >= layer.pages[head].size() || m_pool.reference_count(layer.pages[head][page]) > 1;
  };
  for (int h = 0; h < heads; ++h) {
    const std::int64_t kept = m_host_kept_counts(h);
    const std::int64_t from_ring = with_ring ? m_host_kept_counts(heads + h) : 0;
    counts.judged += layer.retained(h) + ring_step.exits;
    counts.evicted += layer.retained(h) - kept + ring_step.exits - from_ring;
    counts.moved += kept - first[h] + from_ring;
    most_of_ring = std::max(most_of_ring, from_ring);
    written_from[h] = first[h];
    lists[h].resize((kept + from_ring + page_rows - 1) / page_rows);
    widest = std::max(widest, lists[h].size());
    if (kept + from_ring == first[h]) continue;  // nothing is written
    for (std::size_t p = first[h] / page_rows; p < lists[h].size(); ++p) {
      missing += is_replaced(h, p) ? 1 : 0;
    }
  }
  if (counts.evicted == 0 && !with_ring) return counts;
  PageTable target_table;
  typename PageTable::HostMirror host_table;
  if (portable) {
    target_table = allocate_view<PageTable>("kvzap::compact::page_table", std::size_t(heads),
                                            std::max<std::size_t>(widest, 1));
    host_table = Kokkos::create_mirror_view(target_table);
  }
  widen_table(exec, sequence, widest);
  stock_up(exec, missing);

  for (int h = 0; h < heads; ++h) {
    const std::int64_t kept = m_host_kept_counts(h);
    const std::int64_t from_ring = with_ring ? m_host_kept_counts(heads + h) : 0;
    if (kept + from_ring == first[h]) continue;
    for (std::size_t p = first[h] / page_rows; p < lists[h].size(); ++p) {
      if (!is_replaced(h, p)) continue;
      lists[h][p] = m_fresh.back();
      m_fresh.pop_back();
    }
    const std::int64_t p = first[h] / page_rows;
    if (first[h] % page_rows == 0 || lists[h][p] == layer.pages[h][p]) continue;
    // The rows before the first evicted one.
    copy_page(exec, layer.pages[h][p], lists[h][p]);
  }

  const detail::RingRef<Value> ring{layer.ring.data(), layer.ring_scores.data()};
  if (portable) {
    for (int h = 0; h < heads; ++h) {
      for (std::size_t p = 0; p < lists[h].size(); ++p) host_table(h, p) = lists[h][p];
    }
    Kokkos::deep_copy(exec, target_table, host_table);
    const auto addresses = m_pool.addresses(exec);
    const auto kept_counts = Kokkos::subview(m_kept_counts, pages_part);
    if (longest > 0) {
      const auto own = std::make_pair(layer.first_head, layer.first_head + heads);
      detail::compact_columns<Value, order>(
          exec, heads, m_shape.page_rows, dim, m_kept, Kokkos::subview(m_begins, pages_part),
          kept_counts, addresses, m_pool.note_addresses(),
          Kokkos::subview(sequence.table, own, Kokkos::ALL), target_table);
    }
    if (most_of_ring > 0) {
      detail::admit<Value, order>(exec, ring_step, most_of_ring, ring, {}, {}, {}, ring_kept,
                                  Kokkos::subview(m_begins, ring_part),
                                  Kokkos::subview(m_kept_counts, ring_part), kept_counts, addresses,
                                  m_pool.note_addresses(), target_table);
    }
    detail::fence(exec, "kvzap::compact: the pages that rows have left can be taken by others");
  } else if constexpr (detail::runs_on_host) {
    std::int64_t moved = 0;
    for (int h = 0; h < heads; ++h) moved += m_host_kept_counts(h) - first[h];
    const detail::PageLists targets{&m_pool, &lists};
    detail::compact_on_host<Value, order>(
        exec, heads, detail::Block<order>{m_shape.page_rows, dim}, moved, longest, m_kept.data(),
        first.data(), m_host_kept_counts.data(), detail::PageLists{&m_pool, &layer.pages}, targets);
    if (most_of_ring > 0) {
      detail::admit_on_host<Value, order>(
          exec, ring_step, ring, {}, {}, {}, m_kept.data() + ring_kept_at,
          m_host_kept_counts.data() + heads, m_host_kept_counts.data(), targets);
    }
  }

  for (int h = 0; h < heads; ++h) {
    for (std::size_t p = 0; p < layer.pages[h].size(); ++p) {
      const bool stays = p < lists[h].size() && lists[h][p] == layer.pages[h][p];
      if (!stays) m_pool.release(layer.pages[h][p]);
    }
    layer.retained(h) = m_host_kept_counts(h) + (with_ring ? m_host_kept_counts(heads + h) : 0);
  }
  layer.pages.swap(lists);
  if (with_ring) layer.ring_first = layer.tokens;
  note_releases(exec);
  for (int h = 0; h < heads; ++h) write_entries(sequence, layer, h, 0);
  upload_table(exec, sequence, layer);
  upload_lengths(exec, layer);
  return counts;
}

// Replaces pages of a layer that other lists hold too by own copies.
template <class Value, PageOrder order>
void KVCache<Value, order>::own_pages(const ExecutionSpace& exec, Sequence& sequence,
                                      int layer_index) {
  LayerStore& layer = sequence.layers[layer_index];
  std::size_t shared = 0;
  for (const auto& list : layer.pages) {
    for (PageId page : list) shared += m_pool.reference_count(page) > 1 ? 1 : 0;
  }
  if (shared == 0) return;
  detail::or_out_of_memory("own pages", 0, m_pool, [&] { stock_up(exec, shared); });
  for (std::size_t h = 0; h < layer.pages.size(); ++h) {
    for (PageId& page : layer.pages[h]) {
      if (m_pool.reference_count(page) == 1) continue;
      copy_page(exec, page, m_fresh.back());
      m_pool.release(page);
      page = m_fresh.back();
      m_fresh.pop_back();
    }
    write_entries(sequence, layer, static_cast<int>(h), 0);
  }
  note_releases(exec);
  upload_table(exec, sequence, layer);
}

#define KVZAP_INSTANTIATE(Value, order)                                                         \
  template CompactCounts KVCache<Value, order>::compact(const ExecutionSpace&, SequenceId, int, \
                                                        const FlagsView&);                      \
  template CompactCounts KVCache<Value, order>::evict(                                          \
      const ExecutionSpace&, SequenceId, int, const std::vector<Cutoff>&, const EvictOptions&); \
  template CompactCounts KVCache<Value, order>::evict(const ExecutionSpace&, SequenceId, int,   \
                                                      const FlagsView&, bool);                  \
  template void KVCache<Value, order>::own_pages(const ExecutionSpace&, Sequence&, int);
KVZAP_FOR_EACH_CACHE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE

}  // namespace kvzap
