// Shared by the sources of KVCache: memory that it keeps between calls, pages on lease, and the
// conversion of failed allocations to OutOfMemory.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <kvzap/core/cache.hpp>
#include <limits>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/host_threads.hpp"
#include "base/scratch.hpp"
#include "cache/instance_order.hpp"
#include "cache/row_mover.hpp"

namespace kvzap {
namespace cache {

/// Copies memory of the backend, without waiting on a device. Cannot fail on hosts.
template <class T>
void copy_elements(const ExecutionSpace& exec, T* to, const T* from, std::size_t count) {
  if (count == 0) return;
  if constexpr (base::runs_on_host) {
    constexpr std::size_t at_once = (std::size_t{1} << 20) / sizeof(T);
    base::for_each_on_threads(
        static_cast<std::int64_t>((count + at_once - 1) / at_once), [=](std::int64_t i) {
          const std::size_t first = i * at_once;
          std::memcpy(static_cast<void*>(to + first), static_cast<const void*>(from + first),
                      std::min(at_once, count - first) * sizeof(T));
        });
  } else {
    using Target = Kokkos::View<T*, MemorySpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
    using Source = Kokkos::View<const T*, MemorySpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
    Kokkos::deep_copy(exec, Target(to, count), Source(from, count));
  }
}

/// Allocates a view of the backend's memory. A test can make this fail.
template <class View, class... Extents>
View allocate_view(const char* label, Extents... extents) {
  base::before_allocation((sizeof(typename View::value_type) * ... * extents));
  return View(Kokkos::view_alloc(Kokkos::WithoutInitializing, std::string(label)), extents...);
}

/// Calls work(). Throws OutOfMemory if work() fails for lack of memory.
template <class Work>
auto or_out_of_memory(const char* what, std::size_t wanted, const PagePool& pool, const Work& work)
    -> decltype(work()) {
  try {
    return work();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    // Kokkos' own allocations throw a runtime_error or bad_alloc, depending on its version.
    throw OutOfMemory(fmt::format("out of memory: {} ({})", what, error.what()), wanted,
                      pool.free_bytes());
  }
}

template <class View>
bool has_scores(const View& scores) {
  return scores.extent(0) > 0 && scores.extent(1) > 0;
}

}  // namespace cache

/// Memory kept between calls, so that a decode step allocates nothing.
struct KVCache::Workspace {
  std::vector<Sequence*> called;  // the sequences of the current call's spans
  std::vector<cache::AppendStep> append_steps;
  cache::KeptRows kept;
  // Pages on lease: those not handed out yet, the next one last, and those handed out.
  std::vector<PageId> fresh;
  std::vector<PageId> leased;
  // Arguments of the kernel of append_deferred: the arguments that were last written to the device,
  // and those of the current call.
  Kokkos::View<char*, MemorySpace> span_args;
  std::vector<char> written_args;
  std::size_t n_written = 0;  // sequences
  std::vector<char> new_args;
  std::optional<ExecutionSpace> span_args_on;
};

/// Rows of a ring that are saved before a step overwrites them: their positions, and where m_saved
/// has those of the layer's first head.
struct KVCache::SavedRange {
  std::int64_t first = 0;
  std::int64_t count = 0;
  std::int64_t row = 0;
};

/// Pages that a call has taken for its page lists. Without commit(), the destructor returns them to
/// the pool or to the spare pages of the step. It also cuts the page lists of the call back to the
/// rows that they hold. A cache has one lease at a time.
class KVCache::PageLease {
 public:
  /// `layer`: the layer of the called sequences at whose lists' ends the pages are added; -1: the
  /// caller restores its lists.
  explicit PageLease(KVCache& cache, int layer = -1)
      : m_cache(cache), m_work(*cache.m_work), m_layer(layer) {}
  PageLease(const PageLease&) = delete;
  PageLease& operator=(const PageLease&) = delete;
  // NOLINTNEXTLINE(bugprone-exception-escape): pages on lease are in use, so the pool takes them
  ~PageLease() {
    if (!m_committed) {
      for (std::size_t i = 0; m_layer >= 0 && i < m_work.called.size(); ++i) {
        LayerStore& layer = m_work.called[i]->layers[m_layer];
        for (std::size_t h = 0; h < layer.pages.size(); ++h) {
          const std::size_t needed = m_cache.pages_for(layer.retained(h));
          if (layer.pages[h].size() > needed) layer.pages[h].resize(needed);
        }
      }
      for (PageId page : m_work.leased) give_back(page);
    }
    // Also after a commit: if two sequences shared a page, only one of them needs a copy.
    for (PageId page : m_work.fresh) give_back(page);
    m_work.leased.clear();
    m_work.fresh.clear();
  }

  /// Takes `pages` pages from the pool and `of_spare` from the spare pages. Throws OutOfMemory.
  void take(const ExecutionSpace& exec, std::size_t pages, std::size_t of_spare = 0) {
    std::vector<PageId>& spare = m_cache.m_spare_pages;
    std::vector<PageId>& fresh = m_work.fresh;
    base::reserve_room(m_work.leased, pages + spare.size());
    base::reserve_room(fresh, pages + of_spare);
    m_cache.m_pool.allocate(pages, fresh);
    std::reverse(fresh.begin(), fresh.end());
    fresh.insert(fresh.end(), spare.end() - static_cast<std::ptrdiff_t>(of_spare), spare.end());
    spare.resize(spare.size() - of_spare);
    m_leased_spare += of_spare;
    m_cache.m_pool.addresses(exec);
  }
  /// Hands out a page from the lease or from the spare pages. Cannot fail.
  PageId next(bool of_spare = false) {
    std::vector<PageId>& from = of_spare ? m_cache.m_spare_pages : m_work.fresh;
    const PageId page = from.back();
    from.pop_back();
    m_work.leased.push_back(page);
    m_leased_spare += of_spare ? 1 : 0;
    return page;
  }
  /// Keeps the page that was handed out last in place, even without commit().
  void keep_last(bool of_spare = false) {
    m_work.leased.pop_back();
    m_leased_spare -= of_spare ? 1 : 0;
  }
  /// Keeps all pages that were handed out in place.
  void commit() {
    m_committed = true;
    m_leased_spare = 0;
  }

 private:
  // The list of spare pages has space, because it had these pages. Any pages can replace those that
  // it leased.
  void give_back(PageId page) {
    if (m_leased_spare == 0) return m_cache.m_pool.release(page);
    m_cache.m_spare_pages.push_back(page);
    --m_leased_spare;
  }

  KVCache& m_cache;
  Workspace& m_work;
  int m_layer;
  std::size_t m_leased_spare = 0;  // number of the spare pages on lease
  bool m_committed = false;
};

/// Adds a sequence that shares pages with the source. begin(copy, source) sets its lengths and
/// pages, fill(copy, source) writes its rings on the backend; both get a Sequence each.
template <class Begin, class Fill>
SequenceId KVCache::make_fork(const ExecutionSpace& exec, SequenceId source, const char* what,
                              const Begin& begin, const Fill& fill) {
  check_outside_step(source, what);
  settle(source);
  const SequenceId id = m_next_sequence++;
  cache::or_out_of_memory("a fork", bytes_per_sequence(), m_pool, [&] {
    Sequence& from = sequence_at(source);
    enter(exec, from);
    Sequence copy = make_sequence();
    begin(copy, from);
    std::size_t longest = 0;
    for (const LayerStore& layer : copy.layers) {
      for (const auto& list : layer.pages) longest = std::max(longest, list.size());
    }
    copy.last = exec;
    copy.total = from.total;
    widen_table(exec, copy, longest);
    upload_all(exec, copy);
    fill(copy, from);
    insert(id, std::move(copy));
    // After the last operation that can fail.
    for (const LayerStore& layer : m_sequences.at(id).layers) {
      for (const auto& list : layer.pages) {
        for (PageId page : list) m_pool.retain(page);
      }
    }
  });
  return id;
}

}  // namespace kvzap
