// Shared by the sources of KVCache: its state and bookkeeping, pages on lease, and the conversion
// of failed allocations to OutOfMemory.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <kvzap/core/cache.hpp>
#include <limits>
#include <map>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/host_threads.hpp"
#include "base/kokkos_compat.hpp"
#include "base/scratch.hpp"
#include "cache/instance_order.hpp"
#include "cache/row_mover.hpp"

namespace kvzap::cache {

using HostCounts = Kokkos::View<std::int64_t*, Kokkos::HostSpace>;
using States = Kokkos::View<float*, MemorySpace>;

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

// Heads are numbered through all layers: head h of a layer has number first_head + h.
struct LayerStore {
  std::int64_t tokens = 0;
  std::int64_t ring_first = 0;
  std::vector<std::vector<PageId>> pages;  // per head
  bool deferred = false;
  int first_head = 0;
  int window = 1;         // rows of its ring
  bool has_pages = true;  // else see OwnRing
  bool restarts = false;
  // Subviews of the sequence's views, for this layer's heads.
  HostCounts retained;
  Kokkos::View<char**, Kokkos::LayoutRight, MemorySpace> ring;
  Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> ring_scores;
  Counts device_retained;
  base::HostMirror<Counts> host_retained;
  // (head): the first pages that have bounds (CacheShape::bounds_from); empty without bounds. With
  // kernels for devices an upper bound: Sequence::bounded has the numbers.
  std::vector<std::int64_t> bounded;
  bool bounded_fewer = false;  // since the last call of bound_pages
  // Whether `bounded` was exact in that call and no kernel has forgotten bounds since.
  bool are_bounds_exact = false;
  // With kernels for devices: (head) the first pages that have bounds, and the most that still have
  // them after code of the host has changed rows. Subviews of Sequence::bounded.
  Counts device_bounded, still_bounded;

  /// Forgets the bounds of a head's pages from `most` on, because their rows change.
  void keep_bounds(int head, std::int64_t most) {
    if (bounded.empty() || bounded[head] <= most) return;
    bounded[head] = most;
    bounded_fewer = true;
  }
  void add_tokens(std::int64_t count) {
    tokens += count;
    if (restarts) ring_first = tokens - tokens % window;
  }
  std::int64_t in_ring() const { return std::min<std::int64_t>(tokens - ring_first, window); }
};

struct Sequence {
  std::vector<LayerStore> layers;
  std::vector<RingBlock> rings;
  States states;
  // Retained rows per head; since a deferred append, an upper bound.
  HostCounts retained;
  // For kernels, with their host copies (the same memory on host backends). `table`: (head, page).
  // `lengths`: retained rows per head, then two totals of all deferred appends: pairs evicted, and
  // pairs kept because their score is not finite.
  PageTable table;
  base::HostMirror<PageTable> host_table;
  Counts lengths;
  base::HostMirror<Counts> host_lengths;
  Counts bounded;                   // device_bounded and still_bounded of all layers
  std::int64_t evicted_before = 0;  // the collected part of those totals
  std::int64_t non_finite_before = 0;
  AppendCounts collected;  // since the last call of collect
  AppendCounts total;      // of all appends; deferred ones once collected
  bool pending = false;    // deferred appends have not been collected
  // The instance on which the cache last worked on the sequence.
  std::optional<ExecutionSpace> last;
  std::int64_t call = -1;  // the last call of append or begin_step that had it as an argument
  int step = -1;           // its index in Store::step_states
  MeteredBytes own_bytes;  // bytes_per_sequence()
  std::set<std::int64_t> checkpoints;  // checkpoints that restore still accepts, oldest first
};

// A sequence as it was before the step, and its share of the step.
struct StepState {
  SequenceId id = -1;
  std::int64_t rows = 0;
  bool reserved = true;                  // whether Store::spare_pages has its pages
  std::vector<std::int64_t> tokens;      // (layer)
  std::vector<std::int64_t> ring_first;  // (layer)
  std::vector<std::int64_t> retained;    // (head)
  std::vector<std::int64_t> passed;      // (layer): tokens that the next state has seen
  std::vector<bool> judges;              // (layer): whether a rule has judged rows
  AppendCounts total;
  AppendCounts collected;
  // Rows that leave the ring are saved first. Head h's rows are first_saved + h * saved_rows, …
  std::int64_t first_saved = 0;
  std::int64_t saved_rows = 0;
};

/// Where the ring of a layer's first head lies in the blocks of rings.
struct RingPlace {
  std::size_t block = 0;
  int first = 0;
};

/// A page that a step has replaced by its own copy.
struct Replaced {
  int step;
  int layer;
  int head;
  PageId page;
};

/// Pages that a head needs for more rows.
struct PageNeeds {
  std::size_t listed;   // the length of its list including these pages
  std::size_t missing;  // pages to take: those missing in the list, and a copy of a shared page
  bool shares_last;     // whether the last page must be copied
};

/// Rows of a ring that are saved before a step overwrites them: their positions, and where
/// Store::saved has those of the layer's first head.
struct SavedRange {
  std::int64_t first = 0;
  std::int64_t count = 0;
  std::int64_t row = 0;
  std::int64_t byte = 0;  // the same place in bytes
};

/// Memory kept between calls, so that a decode step allocates nothing.
struct Workspace {
  std::vector<Sequence*> called;  // the sequences of the current call's spans
  std::vector<AppendStep> append_steps;
  KeptRows kept;
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

/// The keys, values and scores that an append adds, as its caller passes them.
struct NewPairs {
  const ConstArrayView& keys;
  const ConstArrayView& values;
  const KVCache::ScoresView& scores;
};

class AppendPlans;
class PageLease;

/// The state of a KVCache, and what several of its functions do with it.
class Store {
 public:
  /// As KVCache's constructor.
  Store(DType type, const CacheShape& extents, MemoryMeter* memory_meter, std::size_t limit);

  // Sequences and their memory.
  Sequence& sequence_at(SequenceId sequence);
  LayerStore& layer_at(SequenceId sequence, int layer);
  CachedLayer cached_layer(SequenceId sequence, int layer);
  std::int64_t rows(SequenceId sequence, int layer, int head);
  Sequence make_sequence() const;
  void insert(SequenceId id, Sequence&& sequence);
  template <class Begin, class Fill>
  SequenceId make_fork(const ExecutionSpace& exec, SequenceId source, const char* what,
                       const Begin& begin, const Fill& fill);
  std::vector<RingBlock> make_rings(const char* label) const;
  States make_states(const char* label) const;
  KVCache::State state_in(const States& states, int layer) const;
  void reserve_next_states(std::size_t n);
  std::size_t bytes_per_sequence() const;
  std::size_t state_bytes() const { return first_state.back() * sizeof(float); }
  /// Bytes of a key of `dim` dimensions, followed by its value if it has one of its own.
  std::int64_t pair_bytes(int dim) const {
    return shape.format.vectors() * dim * static_cast<std::int64_t>(size_of(dtype));
  }
  /// Dimensions of the widest head.
  int most_dim() const;
  std::int64_t most_pair_bytes() const { return pair_bytes(most_dim()); }
  int all_heads() const;

  // Checks of arguments.
  void check_layer(int layer) const;
  void check_pages(int layer, const char* what) const;
  int checked_head(int layer, int head) const;
  void check_spans(const AppendSpan* spans, std::size_t n, int layer, const NewPairs& pairs);
  void check_outside_step(SequenceId sequence, const char* what);

  // The order of instances, and lengths that only kernels know.
  void enter(const ExecutionSpace& exec, Sequence& sequence);
  void order_releases(const ExecutionSpace& exec);
  void record_releases(const ExecutionSpace& exec);
  void settle(SequenceId sequence) { settle(sequence_at(sequence)); }
  void settle(Sequence& sequence);
  void take_lengths(Sequence& sequence);

  // Appends and steps.
  AppendStep step_of(const LayerStore& layer, int layer_index, std::int64_t rows) const;
  SavedRange saved_range(const Sequence& sequence, const LayerStore& layer, int layer_index,
                         std::int64_t rows) const;
  void reserve_args(std::size_t n);
  void close_step();

  // Pages.
  void copy_page(const ExecutionSpace& exec, PageId from, PageId to);
  std::size_t pages_for(std::int64_t rows) const;
  bool uses_spare_pages(const Sequence& sequence) const;
  bool shares_last_page(const LayerStore& layer, int head) const;
  PageNeeds list_room(LayerStore& layer, int head, std::int64_t more_rows) const;
  void take_pages(const ExecutionSpace& exec, Sequence& sequence, int layer, int head,
                  std::int64_t more_rows, PageLease& lease, bool of_spare);
  void release_surplus(LayerStore& layer, bool to_spare = false);
  void own_pages(const ExecutionSpace& exec, Sequence& sequence, int layer);
  void bound_pages(Sequence& sequence, LayerStore& layer);
  void bound_device_pages(Sequence& sequence, LayerStore& layer);
  /// With kernels for devices: forgets the bounds of pages that a layer has no longer, after
  /// device_retained has changed otherwise than by deferred appends.
  void forget_bounds(const ExecutionSpace& exec, LayerStore& layer);

  // Page lists and lengths for kernels.
  void write_entries(Sequence& sequence, const LayerStore& layer, int head, std::size_t first_page);
  void widen_table(const ExecutionSpace& exec, Sequence& sequence, std::size_t pages);
  void upload_table(const ExecutionSpace& exec, Sequence& sequence, const LayerStore& layer);
  void upload_lengths(const ExecutionSpace& exec, LayerStore& layer);
  void upload_all(const ExecutionSpace& exec, Sequence& sequence);
  PagesRef pages_of(const ExecutionSpace& exec, Sequence& sequence, const LayerStore& layer);

  CacheShape shape;
  DType dtype;
  std::vector<RingPlace> ring_places;  // (layer)
  std::vector<int> block_heads;        // (block of rings)
  // Rows of one ring, and dimensions of a head.
  std::vector<std::pair<int, int>> block_rings;
  std::vector<std::int64_t> first_state;  // (layer + 1), in the values of all states
  MemoryMeter* meter;
  PagePool pool;
  std::map<SequenceId, Sequence> sequences;
  SequenceId next_sequence = 0;
  std::int64_t next_checkpoint = 0;
  std::int64_t calls = 0;
  // An instance whose kernels may still read pages that were released.
  std::optional<ExecutionSpace> released_on;

  // Kept between steps, so that a decode step allocates nothing.
  bool in_step = false;
  std::size_t n_step = 0;                          // sequences of the step
  std::size_t n_ended = 0;                         // of the last step, if it has ended
  std::vector<StepState> step_states;              // of the step's sequences, and of earlier steps
  std::vector<PageId> spare_pages;                 // pages taken for the step, next one last
  std::vector<Replaced> replaced;                  // each entry still owns its page
  Kokkos::View<char*, MemorySpace> saved;          // (row, most_pair_bytes()) bytes
  Kokkos::View<float*, MemorySpace> saved_scores;  // (row)
  std::vector<States> next_states;  // of each sequence of the step, and of earlier steps
  MeteredBytes next_state_bytes;
  Workspace work;
  std::shared_ptr<AppendPlans> plans;  // null before the first
  // (layer): whether its append of the step is planned and its kernel has not run.
  std::vector<bool> waits;
};

/// Pages that a call has taken for its page lists. Without commit(), the destructor returns them to
/// the pool or to the spare pages of the step. It also cuts the page lists of the call back to the
/// rows that they hold. A cache has one lease at a time.
class PageLease {
 public:
  /// `layer`: the layer of the called sequences at whose lists' ends the pages are added; -1: the
  /// caller restores its lists.
  explicit PageLease(Store& store, int layer = -1)
      : m_store(store), m_work(store.work), m_layer(layer) {}
  PageLease(const PageLease&) = delete;
  PageLease& operator=(const PageLease&) = delete;
  // NOLINTNEXTLINE(bugprone-exception-escape): pages on lease are in use, so the pool takes them
  ~PageLease() {
    if (!m_committed) {
      for (std::size_t i = 0; m_layer >= 0 && i < m_work.called.size(); ++i) {
        LayerStore& layer = m_work.called[i]->layers[m_layer];
        for (std::size_t h = 0; h < layer.pages.size(); ++h) {
          const std::size_t needed = m_store.pages_for(layer.retained(h));
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
    std::vector<PageId>& spare = m_store.spare_pages;
    std::vector<PageId>& fresh = m_work.fresh;
    base::reserve_room(m_work.leased, pages + spare.size());
    base::reserve_room(fresh, pages + of_spare);
    m_store.pool.allocate(pages, fresh);
    std::reverse(fresh.begin(), fresh.end());
    fresh.insert(fresh.end(), spare.end() - static_cast<std::ptrdiff_t>(of_spare), spare.end());
    spare.resize(spare.size() - of_spare);
    m_leased_spare += of_spare;
    m_store.pool.addresses(exec);
  }
  /// Hands out a page from the lease or from the spare pages. Cannot fail.
  PageId next(bool of_spare = false) {
    std::vector<PageId>& from = of_spare ? m_store.spare_pages : m_work.fresh;
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
    if (m_leased_spare == 0) return m_store.pool.release(page);
    m_store.spare_pages.push_back(page);
    --m_leased_spare;
  }

  Store& m_store;
  Workspace& m_work;
  int m_layer;
  std::size_t m_leased_spare = 0;  // number of the spare pages on lease
  bool m_committed = false;
};

/// Adds a sequence that shares pages with the source. begin(copy, source) sets its lengths and
/// pages, fill(copy, source) writes its rings on the backend; both get a Sequence each.
template <class Begin, class Fill>
SequenceId Store::make_fork(const ExecutionSpace& exec, SequenceId source, const char* what,
                            const Begin& begin, const Fill& fill) {
  check_outside_step(source, what);
  settle(source);
  const SequenceId id = next_sequence++;
  or_out_of_memory("a fork", bytes_per_sequence(), pool, [&] {
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
    for (const LayerStore& layer : sequences.at(id).layers) {
      for (const auto& list : layer.pages) {
        for (PageId page : list) pool.retain(page);
      }
    }
  });
  return id;
}

}  // namespace kvzap::cache
