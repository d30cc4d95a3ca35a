// The host's bookkeeping of a cache: sequences, page lists and tables, lengths, and the order of
// execution-space instances.
#include <numeric>

#include "cache/cache_impl.hpp"

namespace kvzap::cache {

Sequence& Store::sequence_at(SequenceId sequence) {
  const auto found = sequences.find(sequence);
  if (found == sequences.end()) throw Error(fmt::format("cache: no sequence {}", sequence));
  return found->second;
}

LayerStore& Store::layer_at(SequenceId sequence, int layer) {
  Sequence& found = sequence_at(sequence);
  check_layer(layer);
  return found.layers[layer];
}

int Store::all_heads() const { return std::accumulate(shape.heads.begin(), shape.heads.end(), 0); }

void Store::check_layer(int layer) const {
  if (layer < 0 || layer >= static_cast<int>(shape.heads.size())) {
    throw Error(fmt::format("cache: no layer {}; it has {}", layer, shape.heads.size()));
  }
}

// Throws Error unless the layer keeps rows that leave its ring.
void Store::check_pages(int layer, const char* what) const {
  if (!shape.has_pages(layer)) {
    throw Error(fmt::format("cache {}: layer {} has no pages, only a ring of {} rows", what, layer,
                            shape.ring_rows(layer)));
  }
}

int Store::checked_head(int layer, int head) const {
  if (head < 0 || head >= shape.heads[layer]) {
    throw Error(fmt::format("cache: no head {} in layer {}; it has {} on this rank", head, layer,
                            shape.heads[layer]));
  }
  return head;
}

void Store::check_outside_step(SequenceId sequence, const char* what) {
  if (sequence_at(sequence).step >= 0) {
    throw Error(fmt::format("cache {}: sequence {} is in a step", what, sequence));
  }
}

// Makes later kernels of `exec` run after those that other instances have for the sequence and for
// released pages.
void Store::enter(const ExecutionSpace& exec, Sequence& sequence) {
  order_releases(exec);
  if (sequence.last) {
    if (in_order(*sequence.last, exec)) return;
    follow(*sequence.last, exec, "kvzap::cache: the sequence was last used elsewhere");
  }
  sequence.last = exec;
}

void Store::order_releases(const ExecutionSpace& exec) {
  if (!released_on) return;
  follow(*released_on, exec, "kvzap::cache: pages were released elsewhere");
  released_on.reset();
}

// Records that kernels of `exec` may still read released pages. The cache remembers one instance.
void Store::record_releases(const ExecutionSpace& exec) {
  if (released_on && in_order(*released_on, exec)) return;
  order_releases(exec);
  released_on = exec;
}

// -------------------------------------------------------------------------------------------------
// Lengths that only kernels know.

// Copies the lengths to the host.
void Store::settle(Sequence& sequence) {
  if (!sequence.pending) return;
  Kokkos::deep_copy(*sequence.last, sequence.host_lengths, sequence.lengths);
  base::fence(*sequence.last, "kvzap::collect: the host reads how many rows were kept");
  take_lengths(sequence);
}

// Stores lengths that were copied to the host.
void Store::take_lengths(Sequence& sequence) {
  sequence.pending = false;
  for (LayerStore& layer : sequence.layers) {
    if (!layer.deferred) continue;
    layer.deferred = false;
    for (std::size_t h = 0; h < layer.pages.size(); ++h) {
      layer.retained(h) = layer.host_retained(h);
    }
    // The step may need these pages for later rows.
    release_surplus(layer, uses_spare_pages(sequence));
  }
  const std::size_t totals = sequence.lengths.extent(0) - 2;
  const std::int64_t evicted = sequence.host_lengths(totals) - sequence.evicted_before;
  const std::int64_t non_finite = sequence.host_lengths(totals + 1) - sequence.non_finite_before;
  for (AppendCounts* counts : {&sequence.collected, &sequence.total}) {
    counts->evicted += evicted;
    counts->non_finite += non_finite;
  }
  sequence.evicted_before += evicted;
  sequence.non_finite_before += non_finite;
}

// -------------------------------------------------------------------------------------------------
// Pages.

void Store::copy_page(const ExecutionSpace& exec, PageId from, PageId to) {
  const auto copy = [&](std::uintptr_t target, std::uintptr_t source, std::size_t bytes) {
    copy_elements(exec, reinterpret_cast<char*>(target), reinterpret_cast<const char*>(source),
                  bytes);
  };
  const PageAddress source = pool.address(from), target = pool.address(to);
  copy(target.rows, source.rows, pool.row_bytes());
  copy(target.metadata, source.metadata, pool.metadata_bytes());
}

// Returns the number of pages that hold `rows` rows.
std::size_t Store::pages_for(std::int64_t rows) const {
  return (rows + shape.page_rows - 1) / shape.page_rows;
}

// Returns whether a step has reserved all pages that appends to the sequence can need.
bool Store::uses_spare_pages(const Sequence& sequence) const {
  return sequence.step >= 0 && step_states[sequence.step].reserved;
}

// Returns whether another list shares the page that gets the head's next row.
bool Store::shares_last_page(const LayerStore& layer, int head) const {
  // A deferred append has already replaced a shared last page.
  return !layer.deferred && layer.retained(head) % shape.page_rows != 0 &&
         pool.reference_count(layer.pages[head].back()) > 1;
}

// Returns the pages that `more_rows` more rows of a head need. Reserves space in its page list.
PageNeeds Store::list_room(LayerStore& layer, int head, std::int64_t more_rows) const {
  std::vector<PageId>& pages = layer.pages[head];
  if (more_rows == 0) return {pages.size(), 0, false};
  const std::size_t needed = pages_for(layer.retained(head) + more_rows);
  base::reserve_room(pages, needed);
  const bool shares_last = shares_last_page(layer, head);
  const std::size_t lacking = needed > pages.size() ? needed - pages.size() : 0;
  return {needed, lacking + (shares_last ? 1 : 0), shares_last};
}

// Gives a head the pages for `more_rows` more rows. Cannot fail on hosts.
void Store::take_pages(const ExecutionSpace& exec, Sequence& sequence, int layer_index, int head,
                       std::int64_t more_rows, PageLease& lease, bool of_spare) {
  if (more_rows == 0) return;
  LayerStore& layer = sequence.layers[layer_index];
  auto& pages = layer.pages[head];
  if (shares_last_page(layer, head)) {
    const PageId own = lease.next(of_spare);
    copy_page(exec, pages.back(), own);
    if (sequence.step >= 0) {
      replaced.push_back({sequence.step, layer_index, head, pages.back()});
    } else {
      // The other list may now change the page in place.
      pool.release(pages.back());
      record_releases(exec);
    }
    pages.back() = own;
    lease.keep_last(of_spare);
  }
  const std::size_t needed = pages_for(layer.retained(head) + more_rows);
  while (pages.size() < needed) pages.push_back(lease.next(of_spare));
}

// Returns surplus pages, which the retained rows do not need, to the pool or to the step's spare
// pages.
void Store::release_surplus(LayerStore& layer, bool to_spare) {
  for (std::size_t h = 0; h < layer.pages.size(); ++h) {
    std::vector<PageId>& pages = layer.pages[h];
    const std::size_t needed = pages_for(layer.retained(h));
    for (; pages.size() > needed; pages.pop_back()) {
      if (to_spare) {
        spare_pages.push_back(pages.back());
      } else {
        pool.release(pages.back());
      }
    }
  }
}

// -------------------------------------------------------------------------------------------------
// Page lists and lengths for kernels.

// Copies a head's page list, from page `first_page` on, to the host's copy of the table.
void Store::write_entries(Sequence& sequence, const LayerStore& layer, int head,
                          std::size_t first_page) {
  const std::vector<PageId>& list = layer.pages[head];
  for (std::size_t p = first_page; p < list.size(); ++p) {
    sequence.host_table(layer.first_head + head, p) = list[p];
  }
}

// Makes the table wide enough for `pages` pages per head.
void Store::widen_table(const ExecutionSpace& exec, Sequence& sequence, std::size_t pages) {
  if (sequence.table.extent(1) >= pages) return;
  const auto table = allocate_view<PageTable>("kvzap::cache::page_table", sequence.table.extent(0),
                                              pages + pages / 2);
  const auto host = Kokkos::create_mirror_view(table);
  if constexpr (!base::runs_on_host) {
    base::fence(exec, "kvzap::cache: kernels may still read the table that is replaced");
  }
  sequence.table = table;
  sequence.host_table = host;
  for (const LayerStore& layer : sequence.layers) {
    for (std::size_t h = 0; h < layer.pages.size(); ++h) {
      write_entries(sequence, layer, static_cast<int>(h), 0);
    }
  }
  if constexpr (!base::runs_on_host) Kokkos::deep_copy(exec, table, host);
}

void Store::upload_table([[maybe_unused]] const ExecutionSpace& exec,
                         [[maybe_unused]] Sequence& sequence,
                         [[maybe_unused]] const LayerStore& layer) {
  if constexpr (!base::runs_on_host) {
    const auto own =
        std::make_pair(layer.first_head, layer.first_head + static_cast<int>(layer.pages.size()));
    Kokkos::deep_copy(exec, Kokkos::subview(sequence.table, own, Kokkos::ALL),
                      Kokkos::subview(sequence.host_table, own, Kokkos::ALL));
  }
}

void Store::upload_lengths([[maybe_unused]] const ExecutionSpace& exec, LayerStore& layer) {
  for (std::size_t h = 0; h < layer.pages.size(); ++h) layer.host_retained(h) = layer.retained(h);
  if constexpr (!base::runs_on_host) {
    Kokkos::deep_copy(exec, layer.device_retained, layer.host_retained);
  }
  forget_bounds(exec, layer);
}

void Store::upload_all([[maybe_unused]] const ExecutionSpace& exec, Sequence& sequence) {
  for (LayerStore& layer : sequence.layers) {
    for (std::size_t h = 0; h < layer.pages.size(); ++h) {
      write_entries(sequence, layer, static_cast<int>(h), 0);
      layer.host_retained(h) = layer.retained(h);
    }
  }
  if constexpr (!base::runs_on_host) {
    Kokkos::deep_copy(exec, sequence.table, sequence.host_table);
    Kokkos::deep_copy(exec, sequence.lengths, sequence.host_lengths);
  }
  for (LayerStore& layer : sequence.layers) forget_bounds(exec, layer);
}

PagesRef Store::pages_of(const ExecutionSpace& exec, Sequence& sequence, const LayerStore& layer) {
  const auto addresses = pool.addresses(exec);
  const std::int64_t stride = sequence.table.stride(0);
  return {&pool,
          &layer.pages,
          addresses.data(),
          pool.metadata_addresses().data(),
          sequence.table.data() + layer.first_head * stride,
          stride};
}

}  // namespace kvzap::cache

namespace kvzap {

AppendCounts KVCache::collect(const std::vector<SequenceId>& sequences) {
  for (SequenceId id : sequences) {
    cache::Sequence& sequence = m_store->sequence_at(id);
    if (sequence.pending) {
      Kokkos::deep_copy(*sequence.last, sequence.host_lengths, sequence.lengths);
    }
  }
  const ExecutionSpace* waited = nullptr;
  AppendCounts counts;
  for (SequenceId id : sequences) {
    cache::Sequence& sequence = m_store->sequence_at(id);
    if (sequence.pending) {
      if (!waited || !base::same_instance(*waited, *sequence.last)) {
        waited = &*sequence.last;
        base::fence(*waited, "kvzap::collect: the host reads how many rows were kept");
      }
      m_store->take_lengths(sequence);
    }
    const AppendCounts own = std::exchange(sequence.collected, {});
    counts.judged += own.judged;
    counts.evicted += own.evicted;
    counts.non_finite += own.non_finite;
  }
  return counts;
}

AppendCounts KVCache::collect(SequenceId sequence) {
  m_store->settle(sequence);
  return std::exchange(m_store->sequence_at(sequence).collected, {});
}

const AppendCounts& KVCache::counts(SequenceId sequence) const {
  m_store->settle(sequence);
  return m_store->sequence_at(sequence).total;
}

}  // namespace kvzap
