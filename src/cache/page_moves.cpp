// Whole pages enter and leave the lists of heads, for moves between ranks.
#include "cache/cache_impl.hpp"
#include "cache/row_access.hpp"

namespace kvzap::cache {
namespace {

using HostBytes = Kokkos::View<char*, Kokkos::HostSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
using DeviceBytes = Kokkos::View<char*, MemorySpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;

DeviceBytes bytes_at(std::uintptr_t address, std::size_t count) {
  return DeviceBytes(reinterpret_cast<char*>(address), count);
}

}  // namespace

void RowAccess::check_run(const PageRun& run, std::int64_t last, const char* what) const {
  m_store.check_outside_step(run.sequence, what);
  m_store.check_layer(run.layer);
  m_store.check_pages(run.layer, what);
  m_store.checked_head(run.layer, run.head);
  if (run.first < 0 || run.count < 0 || run.first > last || run.count > last - run.first) {
    throw Error(fmt::format("cache {}: {} pages from page {} on; expected pages up to {}", what,
                            run.count, run.first, last));
  }
}

std::int64_t RowAccess::full_pages(SequenceId sequence, int layer, int head) const {
  m_store.settle(sequence);
  const LayerStore& store = m_store.layer_at(sequence, layer);
  return store.retained(m_store.checked_head(layer, head)) / m_store.shape.page_rows;
}

std::int64_t RowAccess::own_full_pages(SequenceId sequence, int layer, int head) const {
  const std::int64_t full = full_pages(sequence, layer, head);
  const auto& pages = m_store.layer_at(sequence, layer).pages[head];
  std::int64_t own = 0;
  while (own < full && m_store.pool.reference_count(pages[full - own - 1]) == 1) ++own;
  return own;
}

// Tells kernels a list that has changed from page run.first on, and a length that has changed by
// `rows`.
void RowAccess::list_changed(const ExecutionSpace& exec, Sequence& sequence, const PageRun& run,
                             std::int64_t rows) {
  LayerStore& layer = sequence.layers[run.layer];
  layer.keep_bounds(run.head, run.first);
  layer.retained(run.head) += rows;
  m_store.write_entries(sequence, layer, run.head, static_cast<std::size_t>(run.first));
  m_store.upload_table(exec, sequence, layer);
  m_store.upload_lengths(exec, layer);
}

void RowAccess::insert_pages(const ExecutionSpace& exec, const PageRun& run) {
  const std::int64_t full = full_pages(run.sequence, run.layer, run.head);
  check_run({run.sequence, run.layer, run.head, run.first, 0}, full, "insert_pages");
  Sequence& sequence = m_store.sequence_at(run.sequence);
  auto& pages = sequence.layers[run.layer].pages[run.head];
  m_store.enter(exec, sequence);
  PageLease lease(m_store);
  or_out_of_memory("pages of another rank", run.count * page_bytes(), m_store.pool, [&] {
    base::reserve_room(pages, pages.size() + run.count);
    m_store.widen_table(exec, sequence, pages.size() + run.count);
    lease.take(exec, static_cast<std::size_t>(run.count));
  });
  auto place = pages.insert(pages.begin() + run.first, static_cast<std::size_t>(run.count), 0);
  for (std::int64_t i = 0; i < run.count; ++i) *place++ = lease.next();
  lease.commit();
  list_changed(exec, sequence, run, run.count * m_store.shape.page_rows);
}

void RowAccess::remove_pages(const ExecutionSpace& exec, const PageRun& run, bool inserted_since) {
  check_run(run, full_pages(run.sequence, run.layer, run.head), "remove_pages");
  Sequence& sequence = m_store.sequence_at(run.sequence);
  auto& pages = sequence.layers[run.layer].pages[run.head];
  m_store.enter(exec, sequence);
  const auto begin = pages.begin() + run.first;
  const auto end = begin + run.count;
  for (auto page = begin; page != end; ++page) m_store.pool.release(*page);
  m_store.record_releases(exec);
  pages.erase(begin, end);
  if (!inserted_since) sequence.checkpoints.clear();
  list_changed(exec, sequence, run, -run.count * m_store.shape.page_rows);
}

void RowAccess::read_page(const ExecutionSpace& exec, const PageRun& run, std::int64_t page,
                          char* content) const {
  const PagePool& pool = m_store.pool;
  m_store.enter(exec, m_store.sequence_at(run.sequence));
  const PageAddress from =
      pool.address(m_store.layer_at(run.sequence, run.layer).pages[run.head].at(run.first + page));
  Kokkos::deep_copy(exec, HostBytes(content, pool.row_bytes()),
                    bytes_at(from.rows, pool.row_bytes()));
  Kokkos::deep_copy(exec, HostBytes(content + pool.row_bytes(), pool.metadata_bytes()),
                    bytes_at(from.metadata, pool.metadata_bytes()));
  base::fence(exec, "kvzap::cache: the host sends a page");
}

void RowAccess::write_page(const ExecutionSpace& exec, const PageRun& run, std::int64_t page,
                           const char* content) {
  const PagePool& pool = m_store.pool;
  m_store.enter(exec, m_store.sequence_at(run.sequence));
  m_store.layer_at(run.sequence, run.layer).keep_bounds(run.head, run.first + page);
  const PageAddress to =
      pool.address(m_store.layer_at(run.sequence, run.layer).pages[run.head].at(run.first + page));
  Kokkos::deep_copy(exec, bytes_at(to.rows, pool.row_bytes()),
                    HostBytes(const_cast<char*>(content), pool.row_bytes()));
  Kokkos::deep_copy(
      exec, bytes_at(to.metadata, pool.metadata_bytes()),
      HostBytes(const_cast<char*>(content) + pool.row_bytes(), pool.metadata_bytes()));
  base::fence(exec, "kvzap::cache: the host's copy of a page may go");
}

}  // namespace kvzap::cache
