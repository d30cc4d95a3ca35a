#include <fmt/format.h>

#include "base/device_kernels.hpp"
#include "base/instantiate.hpp"
#include "base/kokkos_compat.hpp"
#include "base/scratch.hpp"
#include "cache/row_copy.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <kvzap/cache.hpp>
#include <limits>
#include <numeric>
#include <utility>

namespace kvzap {
namespace {

using ScoreMatrix = Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>;

template <class Value>
KOKKOS_INLINE_FUNCTION void copy_row(const Value* source, std::int64_t source_stride, Value* target,
                                     std::int64_t target_stride, int dim) {
  if (source_stride == 1 && target_stride == 1) {
    for (int d = 0; d < dim; ++d) target[d] = source[d];
  } else {
    for (int d = 0; d < dim; ++d) target[d * target_stride] = source[d * source_stride];
  }
}

/// Strides of row `row` in a block of `capacity` rows.
template <PageOrder order>
struct Block {
  int capacity;
  int dim;
  KOKKOS_INLINE_FUNCTION std::int64_t row_offset(std::int64_t row) const {
    return order == PageOrder::token_major ? row * dim : row;
  }
  KOKKOS_INLINE_FUNCTION std::int64_t dim_stride() const {
    return order == PageOrder::token_major ? 1 : capacity;
  }
  KOKKOS_INLINE_FUNCTION std::int64_t values_offset() const { return std::int64_t{capacity} * dim; }
};

template <class Value>
std::size_t page_bytes(const CacheShape& shape) {
  // Keys, values, and the positions of the rows behind them.
  return static_cast<std::size_t>(shape.page_rows) *
         (2 * sizeof(Value) * shape.head_dim + sizeof(std::int32_t));
}

template <class Value>
KOKKOS_INLINE_FUNCTION std::int32_t* page_positions(std::uintptr_t page, int page_rows, int dim) {
  return reinterpret_cast<std::int32_t*>(page + 2 * sizeof(Value) * page_rows * dim);
}

using Range = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;
using Counts = Kokkos::View<std::int64_t*, MemorySpace>;
// Pages of a head for which a sequence has room from the start.
constexpr int first_table_width = 16;
using Kept = Kokkos::View<std::int32_t*, MemorySpace>;
using PageTable = Kokkos::View<PageId**, Kokkos::LayoutRight, MemorySpace>;

/// Extents of one append. Rows that leave the ring through it have positions first .. first +
/// exits - 1; the older ones are in the ring, the younger ones (if more than a window of rows
/// arrive at once) only pass by.
struct AppendStep {
  int heads;
  int dim;
  int window;
  int page_rows;
  std::int64_t count;
  std::int64_t old_tokens;
  std::int64_t in_ring;
  std::int64_t first;
  std::int64_t exits;
  bool scored;
};

/// A row that is to move: where its key and value are, and which position they have.
template <class Value>
struct MovingRow {
  const Value* key;
  const Value* value;
  std::int64_t key_stride;  // of dimensions
  std::int64_t value_stride;
  std::int32_t position;
};

// -------------------------------------------------------------------------------------------------
// On the host.

template <class Value>
void copy_row_on_host(const Value* source, std::int64_t source_stride, Value* target,
                      std::int64_t target_stride, int dim) {
  if (source_stride == 1 && target_stride == 1) {
    std::memcpy(target, source, dim * sizeof(Value));
  } else {
    copy_row(source, source_stride, target, target_stride, dim);
  }
}

/// Moves rows first .. last - 1 of a head one by one. row_of(r) is the row that becomes the head's
/// row r, page_of(p) the address of the head's page p.
template <class Value, PageOrder order, class RowOf, class PageOf>
void move_rows(std::int64_t first, std::int64_t last, const Block<order>& block,
               const RowOf& row_of, const PageOf& page_of) {
  for (std::int64_t r = first; r < last; ++r) {
    const MovingRow<Value> row = row_of(r);
    const std::uintptr_t page = page_of(r / block.capacity);
    const std::int64_t slot = r % block.capacity;
    Value* key = reinterpret_cast<Value*>(page) + block.row_offset(slot);
    copy_row_on_host(row.key, row.key_stride, key, block.dim_stride(), block.dim);
    copy_row_on_host(row.value, row.value_stride, key + block.values_offset(), block.dim_stride(),
                     block.dim);
    page_positions<Value>(page, block.capacity, block.dim)[slot] = row.position;
  }
}

/// Moves rows of whole heads in batches, each of which knows where the next one begins, so that
/// fetching runs ahead across batches. For rows without strides in token-major pages.
template <class Value>
class RowStream {
 public:
  RowStream(const Block<PageOrder::token_major>& block, bool stream)
      : m_block(block), m_row_bytes(sizeof(Value) * block.dim), m_stream(stream) {}
  RowStream(const RowStream&) = delete;
  RowStream& operator=(const RowStream&) = delete;
  ~RowStream() {
    // Nothing follows the last batch; it fetches its own last row again.
    for (int i = 0; i < detail::prefetch_rows; ++i) {
      batch().rows[2 * batch().count + i] =
          batch().count > 0 ? batch().rows[2 * batch().count - 1] : nullptr;
    }
    write(batch());
    if (m_stream) detail::stream_fence();
  }

  static constexpr std::int64_t batch_rows = 64;

  /// Moves rows first .. last - 1, at most batch_rows, of a head; at the latest on destruction.
  template <class RowOf, class PageOf>
  void move(std::int64_t first, std::int64_t last, const RowOf& row_of, const PageOf& page_of) {
    if (first >= last) return;
    Batch& next = m_batches[1 - m_current];
    next.first = first;
    next.count = last - first;
    for (std::int64_t i = 0; i < next.count; ++i) {
      const MovingRow<Value> row = row_of(first + i);
      next.rows[i] = reinterpret_cast<const char*>(row.key);
      next.rows[next.count + i] = reinterpret_cast<const char*>(row.value);
      next.positions[i] = row.position;
    }
    const std::int64_t first_page = first / m_block.capacity;
    const std::int64_t last_page = (last - 1) / m_block.capacity;
    for (std::int64_t p = first_page; p <= last_page; ++p) next.pages[p - first_page] = page_of(p);
    Batch& now = batch();
    for (int i = 0; i < detail::prefetch_rows; ++i) {
      now.rows[2 * now.count + i] = next.rows[std::min<std::int64_t>(i, 2 * next.count - 1)];
    }
    write(now);
    m_current = 1 - m_current;
  }

 private:
  struct Batch {  // NOLINT(cppcoreguidelines-pro-type-member-init): filled before it is read
    std::int64_t first = 0;
    std::int64_t count = 0;
    // Keys, values, and the rows to fetch after them.
    std::array<const char*, 2 * batch_rows + detail::prefetch_rows> rows;
    std::array<std::int32_t, batch_rows> positions;
    std::array<std::uintptr_t, batch_rows> pages;
  };

  Batch& batch() { return m_batches[m_current]; }

  void write(const Batch& batch) {
    for (const bool values : {false, true}) {
      std::int64_t r = 0;
      for (std::size_t p = 0; r < batch.count; ++p) {
        const std::int64_t slot = (batch.first + r) % m_block.capacity;
        const std::int64_t n = std::min(batch.count - r, m_block.capacity - slot);
        Value* page = reinterpret_cast<Value*>(batch.pages[p]);
        Value* target =
            page + m_block.row_offset(slot) + (values ? m_block.values_offset() : std::int64_t{0});
        detail::gather_rows(batch.rows.data() + (values ? batch.count : 0) + r, n,
                            reinterpret_cast<char*>(target), m_row_bytes, m_stream);
        if (!values) {
          std::memcpy(page_positions<Value>(batch.pages[p], m_block.capacity, m_block.dim) + slot,
                      batch.positions.data() + r, n * sizeof(std::int32_t));
        }
        r += n;
      }
    }
  }

  Block<PageOrder::token_major> m_block;
  std::size_t m_row_bytes;
  bool m_stream;
  int m_current = 0;
  std::array<Batch, 2> m_batches;
};

bool use_portable_path() {
  return detail::uses_device_kernels() || detail::row_path() == detail::RowPath::portable;
}

/// Whether so many bytes are worth lists of rows and non-temporal stores.
[[maybe_unused]] bool use_streams(std::int64_t bytes) {
  const detail::RowPath path = detail::row_path();
  return path == detail::RowPath::streaming ||
         (path == detail::RowPath::automatic && bytes >= detail::streaming_bytes);
}

/// Judges `n` pairs with positions first, first + 1, …, whose scores lie `stride` apart, and adds
/// the numbers number, number + 1, … of the kept ones to `kept`.
[[maybe_unused]] std::int64_t judge_run(const float* scores, std::int64_t stride, std::int64_t n,
                                        std::int64_t first, std::int32_t number,
                                        const EvictionRule& rule, std::int32_t* kept,
                                        std::int64_t& non_finite) {
  std::int64_t n_kept = 0;
  std::int64_t i = 0;
  const std::int64_t one_by_one =
      stride == 1 ? std::clamp<std::int64_t>(rule.sink - first, 0, n) : n;
  for (; i < one_by_one; ++i) {
    const float score = scores[i * stride];
    kept[n_kept] = number + static_cast<std::int32_t>(i);
    n_kept += rule.keeps(score, first + i) ? 1 : 0;
    non_finite += EvictionRule::is_finite(score) ? 0 : 1;
  }
  return n_kept + detail::list_retained(scores + i * stride, n - i, rule.threshold,
                                        number + static_cast<std::int32_t>(i), kept + n_kept,
                                        non_finite);
}

/// Numbers of the kept exits of one head; returns how many.
template <class Ring, class Scores>
std::int64_t judge_head(const AppendStep& step, int head, const Ring& ring_scores,
                        const Scores& scores, const EvictionRule& rule, std::int32_t* kept,
                        std::int64_t& non_finite) {
  if (!rule.judge) {
    std::iota(kept, kept + step.exits, 0);
    return step.exits;
  }
  // The ring's rows that leave lie in one or two runs of slots.
  const std::int64_t from_ring = std::min(step.exits, step.in_ring);
  const std::int64_t slot = step.first % step.window;
  const std::int64_t before_end = std::min<std::int64_t>(from_ring, step.window - slot);
  const float* ring = &ring_scores(head, 0);
  std::int64_t n = 0;
  n += judge_run(ring + slot, 1, before_end, step.first, 0, rule, kept, non_finite);
  n += judge_run(ring, 1, from_ring - before_end, step.first + before_end,
                 static_cast<std::int32_t>(before_end), rule, kept + n, non_finite);
  const std::int64_t passing = step.exits - from_ring;
  if (passing == 0) return n;
  const float unscored = std::numeric_limits<float>::quiet_NaN();
  n += judge_run(step.scored ? &scores(head, 0) : &unscored, step.scored ? scores.stride(1) : 0,
                 passing, step.first + from_ring, static_cast<std::int32_t>(from_ring), rule,
                 kept + n, non_finite);
  return n;
}

/// Moves the kept exits of all heads to the ends of their pages.
template <class Value, PageOrder order, class Ring, class Rows, class Table>
void admit_on_host(const ExecutionSpace& exec, const AppendStep& step, const Ring& ring,
                   const Rows& keys, const Rows& values, const std::int32_t* kept,
                   const std::int64_t* kept_counts, const std::int64_t* retained,
                   const Table& page_address) {
  const Block<order> ring_block{step.window, step.dim};
  const Block<order> page_block{step.page_rows, step.dim};
  std::int64_t total = 0;
  std::int64_t most = 0;
  for (int h = 0; h < step.heads; ++h) {
    total += kept_counts[h];
    most = std::max(most, kept_counts[h]);
  }
  // retained rows counts the new rows already.
  const auto row_of = [&](int head, std::int64_t old) {
    const Value* head_ring = &ring(head, 0);
    const Value* head_keys = step.count > 0 ? &keys(0, head, 0) : nullptr;
    const Value* head_values = step.count > 0 ? &values(0, head, 0) : nullptr;
    const std::int32_t* head_kept = kept + head * step.exits;
    return [=, &step, key_stride = static_cast<std::int64_t>(keys.stride(0)),
            value_stride = static_cast<std::int64_t>(values.stride(0)),
            key_dim = static_cast<std::int64_t>(keys.stride(2)),
            value_dim = static_cast<std::int64_t>(values.stride(2))](std::int64_t r) {
      const std::int64_t exit = head_kept[r - old];
      const auto position = static_cast<std::int32_t>(step.first + exit);
      if (exit < step.in_ring) {
        const Value* key = head_ring + ring_block.row_offset(position % step.window);
        return MovingRow<Value>{key, key + ring_block.values_offset(), ring_block.dim_stride(),
                                ring_block.dim_stride(), position};
      }
      const std::int64_t token = exit - step.in_ring;
      return MovingRow<Value>{head_keys + token * key_stride, head_values + token * value_stride,
                              key_dim, value_dim, position};
    };
  };
  if constexpr (order == PageOrder::token_major) {
    const std::int64_t row_bytes = sizeof(Value) * step.dim;
    const bool rows_whole = (keys.stride(2) == 1 && values.stride(2) == 1) || step.dim == 1;
    if (rows_whole && use_streams(2 * row_bytes * total)) {
      // Heads take turns: their rows of the same tokens are neighbours in the caller's views.
      using Stream = RowStream<Value>;
      const auto batches = [&](std::int64_t begin, std::int64_t end) {
        Stream stream(page_block, row_bytes % 16 == 0);
        for (std::int64_t b = begin; b < end; ++b) {
          for (int h = 0; h < step.heads; ++h) {
            const std::int64_t old = retained[h] - kept_counts[h];
            stream.move(old + b * Stream::batch_rows,
                        std::min(old + (b + 1) * Stream::batch_rows, retained[h]), row_of(h, old),
                        [&](std::int64_t p) { return page_address(h, p); });
          }
        }
      };
      const std::int64_t n_batches = (most + Stream::batch_rows - 1) / Stream::batch_rows;
      const std::int64_t workers = std::min<std::int64_t>(n_batches, exec.concurrency());
      Kokkos::parallel_for(
          "kvzap::append::admit_streamed", Range(exec, 0, workers),
          [&](std::int64_t w) { batches(n_batches * w / workers, n_batches * (w + 1) / workers); });
      return;
    }
  }
  for (int h = 0; h < step.heads; ++h) {
    const std::int64_t old = retained[h] - kept_counts[h];
    if (kept_counts[h] == 0) continue;
    move_rows<Value>(old, retained[h], page_block, row_of(h, old),
                     [&](std::int64_t p) { return page_address(h, p); });
  }
}

/// The last rows to arrive take the ring slots of those that left.
template <class Value, PageOrder order, class Ring, class RingScores, class Rows, class Scores>
void fill_ring_on_host(const AppendStep& step, const Ring& ring, const RingScores& ring_scores,
                       const Rows& keys, const Rows& values, const Scores& scores) {
  const Block<order> block{step.window, step.dim};
  const std::int64_t entering = std::min<std::int64_t>(step.count, step.window);
  for (int h = 0; h < step.heads; ++h) {
    for (std::int64_t token = step.count - entering; token < step.count; ++token) {
      const std::int64_t slot = (step.old_tokens + token) % step.window;
      Value* target = &ring(h, 0) + block.row_offset(slot);
      copy_row_on_host(&keys(token, h, 0), keys.stride(2), target, block.dim_stride(), step.dim);
      copy_row_on_host(&values(token, h, 0), values.stride(2), target + block.values_offset(),
                       block.dim_stride(), step.dim);
      ring_scores(h, slot) =
          step.scored ? scores(h, token) : std::numeric_limits<float>::quiet_NaN();
    }
  }
}

/// Moves kept rows towards the front of their heads' pages. Rows are written in ascending order,
/// and never behind one that is still to be read.
template <class Value, PageOrder order, class SourcePage, class TargetPage>
void compact_on_host(const ExecutionSpace& exec, int heads, const Block<order>& block,
                     std::int64_t moved, std::int64_t longest, const std::int32_t* kept,
                     const std::int64_t* first, const std::int64_t* kept_counts,
                     const SourcePage& source_page, const TargetPage& target_page) {
  const auto move_head = [&](int head) {
    const auto row_of = [&, head_kept = kept + head * longest](std::int64_t r) {
      const std::int32_t row = head_kept[r];
      const std::int32_t slot = row % block.capacity;
      const std::uintptr_t page = source_page(head, row / block.capacity);
      const Value* key = reinterpret_cast<const Value*>(page) + block.row_offset(slot);
      return MovingRow<Value>{key, key + block.values_offset(), block.dim_stride(),
                              block.dim_stride(),
                              page_positions<Value>(page, block.capacity, block.dim)[slot]};
    };
    const auto page_of = [&](std::int64_t p) { return target_page(head, p); };
    if constexpr (order == PageOrder::token_major) {
      const std::int64_t row_bytes = sizeof(Value) * block.dim;
      if (use_streams(2 * row_bytes * moved)) {
        using Stream = RowStream<Value>;
        Stream stream(block, row_bytes % 16 == 0);
        for (std::int64_t r = first[head]; r < kept_counts[head]; r += Stream::batch_rows) {
          stream.move(r, std::min(r + Stream::batch_rows, kept_counts[head]), row_of, page_of);
        }
        return;
      }
    }
    move_rows<Value>(first[head], kept_counts[head], block, row_of, page_of);
  };
  Kokkos::parallel_for("kvzap::compact::heads", Range(exec, 0, heads),
                       [&](std::int64_t head) { move_head(static_cast<int>(head)); });
}

// -------------------------------------------------------------------------------------------------
// On any backend.

/// Lists those of `heads` x `extent` rows that keeps(head, row) wants, head after head.
template <class Keeps>
void select(const ExecutionSpace& exec, int heads, std::int64_t extent, const Keeps& keeps,
            const Kept& kept_rows, const Counts& begins, const Counts& counts) {
  Kokkos::parallel_scan(
      "kvzap::select", Range(exec, 0, heads * extent),
      KOKKOS_LAMBDA(std::int64_t i, std::int64_t & kept, bool final) {
        const int head = static_cast<int>(i / extent);
        const std::int64_t row = i % extent;
        const bool keep = keeps(head, row);
        if (final) {
          if (row == 0) begins(head) = kept;
          if (keep) kept_rows(kept) = static_cast<std::int32_t>(row);
          if (row == extent - 1) counts(head) = kept + (keep ? 1 : 0);
        }
        if (keep) ++kept;
      });
  Kokkos::parallel_for(
      "kvzap::select_counts", Range(exec, 0, heads),
      KOKKOS_LAMBDA(std::int64_t head) { counts(head) -= begins(head); });
}

template <class Value, PageOrder order, class Ring, class Rows>
void admit(const ExecutionSpace& exec, const AppendStep& step, std::int64_t most, const Ring& ring,
           const Rows& keys, const Rows& values, const Kept& kept, const Counts& begins,
           const Counts& kept_counts, const Counts& old_retained,
           const PagePool::AddressView& addresses, const PageTable& table) {
  const Block<order> ring_block{step.window, step.dim};
  const Block<order> page_block{step.page_rows, step.dim};
  // One dimension of a row each, so that neighbours read and write neighbouring bytes.
  Kokkos::parallel_for(
      "kvzap::append::admit", Range(exec, 0, step.heads * most * step.dim),
      KOKKOS_LAMBDA(std::int64_t i) {
        const int d = static_cast<int>(i % step.dim);
        const int head = static_cast<int>(i / step.dim / most);
        const std::int64_t n = i / step.dim % most;
        if (n >= kept_counts(head)) return;
        const std::int64_t exit = kept(begins(head) + n);
        const std::int64_t row = old_retained(head) + n;
        const std::uintptr_t page = addresses(table(head, row / step.page_rows));
        const std::int64_t slot = row % step.page_rows;
        Value* const target = reinterpret_cast<Value*>(page) + page_block.row_offset(slot) +
                              d * page_block.dim_stride();
        if (d == 0) {
          page_positions<Value>(page, step.page_rows, step.dim)[slot] =
              static_cast<std::int32_t>(step.first + exit);
        }
        if (exit < step.in_ring) {
          const Value* const source = &ring(head, 0) +
                                      ring_block.row_offset((step.first + exit) % step.window) +
                                      d * ring_block.dim_stride();
          target[0] = source[0];
          target[page_block.values_offset()] = source[ring_block.values_offset()];
        } else {
          const std::int64_t token = exit - step.in_ring;
          target[0] = keys(token, head, d);
          target[page_block.values_offset()] = values(token, head, d);
        }
      });
}

/// One token of one layer: the row that leaves the ring is judged and, if kept, moved to the end of
/// its head's pages; the new one takes its slot. Pointers rather than views, because Kokkos passes
/// large kernels through a buffer for which it waits.
template <class Value, PageOrder order>
struct StepKernel {
  Value* ring = nullptr;          // (head, 2 * window * dim)
  float* ring_scores = nullptr;   // (head, window)
  const Value* keys = nullptr;    // (head, dim) with strides
  const Value* values = nullptr;  // the same
  const float* scores = nullptr;  // (head) with a stride, or null
  const PageId* table = nullptr;  // (head, page)
  const std::uintptr_t* addresses = nullptr;
  std::int64_t* retained = nullptr;  // (head)
  std::int64_t* totals = nullptr;    // evicted, not finite
  std::int64_t key_head = 0, key_dim = 0, value_head = 0, value_dim = 0, score_head = 0;
  std::int64_t table_head = 0;
  std::int64_t token = 0;  // its position
  EvictionRule rule;
  int dim = 0, window = 1, page_rows = 1;
  bool exits = false;

  template <class Team>
  KOKKOS_FUNCTION void operator()(const Team& team) const {
    const std::int64_t head = team.league_rank();
    const std::int64_t slot = token % window;
    const std::int64_t position = token - window;  // of the row that leaves
    const Block<order> ring_block{window, dim};
    const Block<order> page_block{page_rows, dim};
    const float score = exits ? ring_scores[head * window + slot] : 0.0f;
    const bool keep = exits && rule.keeps(score, position);
    const std::int64_t row = retained[head];
    const std::uintptr_t page = keep ? addresses[table[head * table_head + row / page_rows]] : 0;
    Value* const from = ring + 2 * head * window * dim + ring_block.row_offset(slot);
    Value* const to =
        keep ? reinterpret_cast<Value*>(page) + page_block.row_offset(row % page_rows) : nullptr;
    Kokkos::parallel_for(Kokkos::TeamThreadRange(team, 2 * dim), [&](int i) {
      const bool is_value = i >= dim;
      const int d = is_value ? i - dim : i;
      Value& old = from[d * ring_block.dim_stride() + (is_value ? ring_block.values_offset() : 0)];
      if (keep) {
        to[d * page_block.dim_stride() + (is_value ? page_block.values_offset() : 0)] = old;
      }
      old = is_value ? values[head * value_head + d * value_dim]
                     : keys[head * key_head + d * key_dim];
    });
    team.team_barrier();
    Kokkos::single(Kokkos::PerTeam(team), [&] {
      ring_scores[head * window + slot] = scores ? scores[head * score_head] : bits_of_no_score();
      if (keep) {
        page_positions<Value>(page, page_rows, dim)[row % page_rows] =
            static_cast<std::int32_t>(position);
        retained[head] = row + 1;
      }
      if (!exits || !rule.judge) return;
      if (!keep) Kokkos::atomic_add(&totals[0], std::int64_t{1});
      if (!EvictionRule::is_finite(score)) Kokkos::atomic_add(&totals[1], std::int64_t{1});
    });
  }

  KOKKOS_INLINE_FUNCTION static float bits_of_no_score() {
    return detail::bits_float(0x7fc00000u);  // NaN
  }
};

template <class Value, PageOrder order>
void append_row(const ExecutionSpace& exec, int heads, const StepKernel<Value, order>& kernel) {
  static_assert(sizeof(kernel) <= 384);
  Kokkos::parallel_for(
      "kvzap::append::step",
      Kokkos::TeamPolicy<ExecutionSpace>(exec, heads, detail::runs_on_host ? 1 : 128), kernel);
}

/// Entries of a page table that travel as arguments of a kernel.
struct NewEntries {
  static constexpr int most = 16;
  struct Entry {
    std::int32_t head;
    std::int32_t index;
    PageId page;
  };
  Entry entry[most];
  int count = 0;
};

void write_entries(const ExecutionSpace& exec, const PageTable& table, const NewEntries& entries) {
  Kokkos::parallel_for(
      "kvzap::append::link", Kokkos::RangePolicy<ExecutionSpace>(exec, 0, entries.count),
      KOKKOS_LAMBDA(int i) {
        table(entries.entry[i].head, entries.entry[i].index) = entries.entry[i].page;
      });
}

template <class Value, PageOrder order, class Ring, class RingScores, class Rows, class Scores>
void fill_ring(const ExecutionSpace& exec, const AppendStep& step, const Ring& ring,
               const RingScores& ring_scores, const Rows& keys, const Rows& values,
               const Scores& scores) {
  const Block<order> block{step.window, step.dim};
  const std::int64_t entering = std::min<std::int64_t>(step.count, step.window);
  const float unscored = std::numeric_limits<float>::quiet_NaN();
  Kokkos::parallel_for(
      "kvzap::append::ring", Range(exec, 0, step.heads * entering * step.dim),
      KOKKOS_LAMBDA(std::int64_t i) {
        const int d = static_cast<int>(i % step.dim);
        const int head = static_cast<int>(i / step.dim / entering);
        const std::int64_t token = step.count - entering + i / step.dim % entering;
        const std::int64_t slot = (step.old_tokens + token) % step.window;
        Value* const target = &ring(head, 0) + block.row_offset(slot) + d * block.dim_stride();
        target[0] = keys(token, head, d);
        target[block.values_offset()] = values(token, head, d);
        if (d == 0) ring_scores(head, slot) = step.scored ? scores(head, token) : unscored;
      });
}

/// Moves kept rows towards the front of their heads' pages. Every dimension of a head moves on its
/// own, in ascending order, so that nothing is overwritten before it was read.
template <class Value, PageOrder order>
void compact_columns(const ExecutionSpace& exec, int heads, int page_rows, int dim,
                     const Kept& kept, const Counts& begins, const Counts& kept_counts,
                     const PagePool::AddressView& addresses, const PageTable& from,
                     const PageTable& to) {
  const Block<order> block{page_rows, dim};
  const std::int64_t columns = 2 * std::int64_t{dim} + 1;
  Kokkos::parallel_for(
      "kvzap::compact::columns", Range(exec, 0, heads * columns), KOKKOS_LAMBDA(std::int64_t i) {
        const int head = static_cast<int>(i / columns);
        const std::int64_t column = i % columns;
        const std::int64_t offset =
            column < dim ? column * block.dim_stride()
                         : block.values_offset() + (column - dim) * block.dim_stride();
        for (std::int64_t n = 0; n < kept_counts(head); ++n) {
          const std::int64_t row = kept(begins(head) + n);
          if (row == n) continue;
          const std::uintptr_t source = addresses(from(head, row / page_rows));
          const std::uintptr_t target = addresses(to(head, n / page_rows));
          if (column == 2 * std::int64_t{dim}) {
            page_positions<Value>(target, page_rows, dim)[n % page_rows] =
                page_positions<Value>(source, page_rows, dim)[row % page_rows];
          } else {
            reinterpret_cast<Value*>(target)[block.row_offset(n % page_rows) + offset] =
                reinterpret_cast<const Value*>(source)[block.row_offset(row % page_rows) + offset];
          }
        }
      });
}

const CacheShape& checked(const CacheShape& shape) {
  if (shape.heads.empty() || shape.head_dim < 1 || shape.window < 1 || shape.page_rows < 1) {
    throw Error(
        fmt::format("cache: {} layers, head_dim {}, window {}, page of {} rows; expected at "
                    "least 1 of each",
                    shape.heads.size(), shape.head_dim, shape.window, shape.page_rows));
  }
  for (int heads : shape.heads) {
    if (heads < 0) throw Error(fmt::format("cache: a layer with {} heads", heads));
  }
  return shape;
}

}  // namespace

template <class Value, PageOrder order>
KVCache<Value, order>::KVCache(CacheShape shape, MemoryMeter* meter)
    : m_shape(checked(shape)), m_meter(meter), m_pool(page_bytes<Value>(shape), meter) {}

template <class Value, PageOrder order>
KVCache<Value, order>::~KVCache() = default;

template <class Value, PageOrder order>
std::size_t KVCache<Value, order>::ring_bytes() const {
  const std::size_t heads =
      std::accumulate(m_shape.heads.begin(), m_shape.heads.end(), std::size_t{0});
  return heads * m_shape.window * (2 * sizeof(Value) * m_shape.head_dim + sizeof(float));
}

template <class Value, PageOrder order>
auto KVCache<Value, order>::make_sequence() const -> Sequence {
  Sequence sequence;
  const int all_heads = std::accumulate(m_shape.heads.begin(), m_shape.heads.end(), 0);
  sequence.lengths = Counts("kvzap::cache::lengths", all_heads + 2);
  sequence.host_lengths = Kokkos::create_mirror_view(sequence.lengths);
  Kokkos::deep_copy(sequence.host_lengths, 0);
  int first_head = 0;
  for (int heads : m_shape.heads) {
    LayerStore layer;
    try {
      layer.ring = decltype(layer.ring)(
          Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::cache::ring"), heads,
          std::size_t{2} * m_shape.window * m_shape.head_dim);
      layer.ring_scores =
          ScoreMatrix(Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::cache::ring_scores"),
                      heads, m_shape.window);
    } catch (const std::exception&) {
      throw Error(fmt::format("out of memory: no room for {} bytes of rings (window {})",
                              ring_bytes(), m_shape.window));
    }
    layer.pages.resize(heads);
    layer.retained.assign(heads, 0);
    layer.page_table = PageTable("kvzap::cache::page_table", heads, first_table_width);
    const auto own = std::make_pair(first_head, first_head + heads);
    first_head += heads;
    layer.device_retained = Kokkos::subview(sequence.lengths, own);
    layer.host_page_table = Kokkos::create_mirror_view(layer.page_table);
    layer.host_retained = Kokkos::subview(sequence.host_lengths, own);
    sequence.layers.push_back(std::move(layer));
  }
  sequence.ring_bytes = MeteredBytes(m_meter, ring_bytes());
  return sequence;
}

template <class Value, PageOrder order>
SequenceId KVCache<Value, order>::add_sequence() {
  m_sequences.emplace(m_next_sequence, make_sequence());
  return m_next_sequence++;
}

template <class Value, PageOrder order>
SequenceId KVCache<Value, order>::fork(SequenceId source) {
  settle(source);
  Sequence copy = make_sequence();
  for (std::size_t l = 0; l < copy.layers.size(); ++l) {
    const LayerStore& from = m_sequences.at(source).layers[l];
    LayerStore& to = copy.layers[l];
    to.tokens = from.tokens;
    to.pages = from.pages;
    to.retained = from.retained;
    Kokkos::deep_copy(to.ring, from.ring);
    Kokkos::deep_copy(to.ring_scores, from.ring_scores);
    for (const auto& list : to.pages) {
      for (PageId page : list) m_pool.retain(page);
    }
    set_all_entries(to);
    upload_tables(to);
  }
  m_sequences.emplace(m_next_sequence, std::move(copy));
  return m_next_sequence++;
}

template <class Value, PageOrder order>
void KVCache<Value, order>::free_sequence(SequenceId sequence) {
  settle(sequence);
  for (const LayerStore& layer : m_sequences.at(sequence).layers) {
    for (const auto& list : layer.pages) {
      for (PageId page : list) m_pool.release(page);
    }
  }
  m_sequences.erase(sequence);
}

template <class Value, PageOrder order>
auto KVCache<Value, order>::store(SequenceId sequence, int layer) const -> const LayerStore& {
  const auto found = m_sequences.find(sequence);
  if (found == m_sequences.end()) throw Error(fmt::format("cache: no sequence {}", sequence));
  if (layer < 0 || layer >= static_cast<int>(m_shape.heads.size())) {
    throw Error(fmt::format("cache: no layer {}; it has {}", layer, m_shape.heads.size()));
  }
  return found->second.layers[layer];
}

template <class Value, PageOrder order>
auto KVCache<Value, order>::store(SequenceId sequence, int layer) -> LayerStore& {
  return const_cast<LayerStore&>(static_cast<const KVCache&>(*this).store(sequence, layer));
}

template <class Value, PageOrder order>
int KVCache<Value, order>::checked_head(int layer, int head) const {
  if (head < 0 || head >= m_shape.heads[layer]) {
    throw Error(fmt::format("cache: no head {} in layer {}; it has {} on this rank", head, layer,
                            m_shape.heads[layer]));
  }
  return head;
}

template <class Value, PageOrder order>
void KVCache<Value, order>::copy_page(PageId from, PageId to) {
  using Bytes = Kokkos::View<char*, MemorySpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  Kokkos::deep_copy(Bytes(reinterpret_cast<char*>(m_pool.address(to)), m_pool.page_bytes()),
                    Bytes(reinterpret_cast<char*>(m_pool.address(from)), m_pool.page_bytes()));
}

// Makes room for `new_retained` more rows of a head: pages that are missing, and an own copy of
// the last page if rows are to be written into one that another list holds too.
template <class Value, PageOrder order>
void KVCache<Value, order>::reserve(LayerStore& layer, int head, std::int64_t new_retained) {
  if (new_retained == 0) return;
  auto& pages = layer.pages[head];
  const std::int64_t filled = layer.retained[head] % m_shape.page_rows;
  // After a deferred append the last page is its own already.
  if (!layer.deferred && filled != 0 && m_pool.reference_count(pages.back()) > 1) {
    const PageId own = m_pool.allocate();
    copy_page(pages.back(), own);
    m_pool.release(pages.back());
    pages.back() = own;
  }
  const std::int64_t rows = layer.retained[head] + new_retained;
  const std::size_t needed = (rows + m_shape.page_rows - 1) / m_shape.page_rows;
  while (pages.size() < needed) pages.push_back(m_pool.allocate());
}

template <class Value, PageOrder order>
void KVCache<Value, order>::reserve_kept(int heads, std::int64_t rows) {
  detail::reserve_scratch(m_kept, heads * rows, "kvzap::cache::kept");
  if (static_cast<int>(m_kept_counts.extent(0)) >= heads) return;
  detail::reserve_scratch(m_begins, heads, "kvzap::cache::begins");
  detail::reserve_scratch(m_kept_counts, heads, "kvzap::cache::kept_counts");
  m_host_kept_counts = Kokkos::create_mirror_view(m_kept_counts);
}

// Makes room for the rows that m_host_kept_counts adds to each head, and counts them.
template <class Value, PageOrder order>
void KVCache<Value, order>::admit_counted(LayerStore& layer) {
  const int heads = static_cast<int>(layer.pages.size());
  try {
    for (int h = 0; h < heads; ++h) reserve(layer, h, m_host_kept_counts(h));
    grow_page_table(layer);
  } catch (...) {
    release_surplus(layer);
    set_all_entries(layer);
    upload_tables(layer);
    throw;
  }
  for (int h = 0; h < heads; ++h) {
    if (m_host_kept_counts(h) == 0) continue;
    const std::size_t first_page = layer.retained[h] / m_shape.page_rows;
    layer.retained[h] += m_host_kept_counts(h);
    set_entries(layer, h, first_page);
  }
}

// Gives back pages that the retained rows do not need.
template <class Value, PageOrder order>
void KVCache<Value, order>::release_surplus(LayerStore& layer) {
  for (std::size_t h = 0; h < layer.pages.size(); ++h) {
    const std::size_t needed = (layer.retained[h] + m_shape.page_rows - 1) / m_shape.page_rows;
    while (layer.pages[h].size() > needed) {
      m_pool.release(layer.pages[h].back());
      layer.pages[h].pop_back();
    }
  }
}

// Writes what kernels are to know of a head from page `first_page` on; upload_tables brings it to
// where they run.
template <class Value, PageOrder order>
void KVCache<Value, order>::set_entries(LayerStore& layer, int head, std::size_t first_page) {
  const std::vector<PageId>& list = layer.pages[head];
  for (std::size_t p = first_page; p < list.size(); ++p) layer.host_page_table(head, p) = list[p];
  // Between a deferred append and collect the kernels alone know how many retained rows there are.
  if (!layer.deferred) layer.host_retained(head) = layer.retained[head];
}

template <class Value, PageOrder order>
void KVCache<Value, order>::grow_page_table(LayerStore& layer) {
  std::size_t longest = 1;
  for (const auto& list : layer.pages) longest = std::max(longest, list.size());
  if (layer.page_table.extent(1) >= longest) return;
  layer.page_table =
      PageTable(Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::cache::page_table"),
                layer.pages.size(), longest + longest / 2);
  layer.host_page_table = Kokkos::create_mirror_view(layer.page_table);
  for (std::size_t h = 0; h < layer.pages.size(); ++h) {
    set_entries(layer, static_cast<int>(h), 0);
  }
}

template <class Value, PageOrder order>
void KVCache<Value, order>::set_all_entries(LayerStore& layer) {
  grow_page_table(layer);
  for (std::size_t h = 0; h < layer.pages.size(); ++h) {
    set_entries(layer, static_cast<int>(h), 0);
  }
}

template <class Value, PageOrder order>
void KVCache<Value, order>::upload_tables([[maybe_unused]] LayerStore& layer) {
  if constexpr (!detail::runs_on_host) {
    Kokkos::deep_copy(layer.page_table, layer.host_page_table);
    Kokkos::deep_copy(layer.device_retained, layer.host_retained);
  }
}

/// Throws Error if the extents of new rows do not fit `layer_index`, or positions would overflow.
template <class Value, PageOrder order>
void KVCache<Value, order>::check_append(int layer_index, const RowsView& keys,
                                         const RowsView& values, const ScoresView& scores,
                                         std::int64_t tokens) const {
  const int heads = m_shape.heads[layer_index];
  const int dim = m_shape.head_dim;
  const std::int64_t count = keys.extent(0);
  for (const RowsView* view : {&keys, &values}) {
    if (static_cast<std::int64_t>(view->extent(0)) != count ||
        static_cast<int>(view->extent(1)) != heads || static_cast<int>(view->extent(2)) != dim) {
      throw Error(
          fmt::format("cache append: keys or values are ({}, {}, {}); expected ({}, {}, {}) = "
                      "(token, head, dim)",
                      view->extent(0), view->extent(1), view->extent(2), count, heads, dim));
    }
  }
  if (scores.extent(0) > 0 && scores.extent(1) > 0 &&
      (static_cast<int>(scores.extent(0)) != heads ||
       static_cast<std::int64_t>(scores.extent(1)) != count)) {
    throw Error(fmt::format("cache append: scores are ({}, {}); expected ({}, {}) = (head, token)",
                            scores.extent(0), scores.extent(1), heads, count));
  }
  if (tokens + count > std::numeric_limits<std::int32_t>::max()) {
    throw Error(fmt::format("cache append: {} tokens exceed the largest position {}",
                            tokens + count, std::numeric_limits<std::int32_t>::max()));
  }
}

template <class Value, PageOrder order>
void KVCache<Value, order>::append_deferred(const ExecutionSpace& exec, SequenceId sequence_id,
                                            int layer_index, const RowsView& keys,
                                            const RowsView& values, const ScoresView& scores,
                                            const EvictionRule& rule) {
  LayerStore& layer = store(sequence_id, layer_index);
  Sequence& sequence = m_sequences.at(sequence_id);
  const int heads = m_shape.heads[layer_index];
  check_append(layer_index, keys, values, scores, layer.tokens);
  if (keys.extent(0) != 1) {
    throw Error(fmt::format("cache append: {} tokens in one step; expected 1", keys.extent(0)));
  }
  const bool exits = layer.tokens >= m_shape.window && heads > 0;
  if (exits) {
    NewEntries entries;
    const auto link = [&] {
      if (entries.count > 0) write_entries(exec, layer.page_table, entries);
      entries.count = 0;
    };
    const std::size_t width = layer.page_table.extent(1);
    try {
      for (int h = 0; h < heads; ++h) {
        const std::vector<PageId>& list = layer.pages[h];
        const std::size_t old_size = list.size();
        const PageId old_last = list.empty() ? -1 : list.back();
        reserve(layer, h, 1);
        if (list.size() == old_size && list.back() == old_last) continue;
        const std::size_t index = list.size() - 1;
        if (index >= width) continue;  // the whole table is written below
        layer.host_page_table(h, index) = list.back();
        entries.entry[entries.count++] = {h, static_cast<std::int32_t>(index), list.back()};
        if (entries.count == NewEntries::most) link();
      }
      link();
      grow_page_table(layer);
    } catch (...) {
      release_surplus(layer);
      set_all_entries(layer);
      Kokkos::deep_copy(layer.page_table, layer.host_page_table);
      throw;
    }
    if (layer.page_table.extent(1) != width) {
      Kokkos::deep_copy(layer.page_table, layer.host_page_table);
    }
    for (std::int64_t& bound : layer.retained) ++bound;
    layer.deferred = true;
    if (rule.judge) sequence.collected.judged += heads;
  }
  if (heads > 0) {
    const bool scored = scores.extent(0) > 0 && scores.extent(1) > 0;
    StepKernel<Value, order> kernel;
    kernel.ring = layer.ring.data();
    kernel.ring_scores = layer.ring_scores.data();
    kernel.keys = keys.data();
    kernel.values = values.data();
    kernel.scores = scored ? scores.data() : nullptr;
    kernel.table = layer.page_table.data();
    kernel.addresses = m_pool.addresses(exec).data();
    kernel.retained = layer.device_retained.data();
    kernel.totals = sequence.lengths.data() + sequence.lengths.extent(0) - 2;
    kernel.key_head = keys.stride(1);
    kernel.key_dim = keys.stride(2);
    kernel.value_head = values.stride(1);
    kernel.value_dim = values.stride(2);
    kernel.score_head = scored ? scores.stride(0) : 0;
    kernel.table_head = layer.page_table.stride(0);
    kernel.token = layer.tokens;
    kernel.rule = rule;
    kernel.dim = m_shape.head_dim;
    kernel.window = m_shape.window;
    kernel.page_rows = m_shape.page_rows;
    kernel.exits = exits;
    append_row(exec, heads, kernel);
    sequence.pending = exec;
  }
  ++layer.tokens;
}

// Logically nothing changes: what the kernels have decided becomes known.
template <class Value, PageOrder order>
void KVCache<Value, order>::settle(SequenceId sequence_id) const {
  store(sequence_id, 0);  // checks the id
  KVCache& self = const_cast<KVCache&>(*this);
  Sequence& sequence = self.m_sequences.at(sequence_id);
  if (!sequence.pending) return;
  Kokkos::deep_copy(*sequence.pending, sequence.host_lengths, sequence.lengths);
  detail::fence(*sequence.pending, "kvzap::collect: the host reads how many rows were kept");
  sequence.pending.reset();
  for (LayerStore& layer : sequence.layers) {
    if (!layer.deferred) continue;
    layer.deferred = false;
    for (std::size_t h = 0; h < layer.retained.size(); ++h) {
      layer.retained[h] = layer.host_retained(h);
    }
    self.release_surplus(layer);
  }
  const std::size_t totals = sequence.lengths.extent(0) - 2;
  const std::int64_t evicted = sequence.host_lengths(totals);
  const std::int64_t non_finite = sequence.host_lengths(totals + 1);
  sequence.collected.evicted += evicted - sequence.evicted_before;
  sequence.collected.non_finite += non_finite - sequence.non_finite_before;
  sequence.evicted_before = evicted;
  sequence.non_finite_before = non_finite;
}

template <class Value, PageOrder order>
AppendCounts KVCache<Value, order>::collect(SequenceId sequence) {
  settle(sequence);
  return std::exchange(m_sequences.at(sequence).collected, {});
}

template <class Value, PageOrder order>
AppendCounts KVCache<Value, order>::append(const ExecutionSpace& exec, SequenceId sequence,
                                           int layer_index, const RowsView& keys,
                                           const RowsView& values, const ScoresView& scores,
                                           const EvictionRule& rule) {
  settle(sequence);
  LayerStore& layer = store(sequence, layer_index);
  const int heads = m_shape.heads[layer_index];
  const int dim = m_shape.head_dim;
  const int window = m_shape.window;
  const std::int64_t count = keys.extent(0);
  check_append(layer_index, keys, values, scores, layer.tokens);
  const bool scored = scores.extent(0) > 0 && scores.extent(1) > 0;

  AppendStep step{};
  step.heads = heads;
  step.dim = dim;
  step.window = window;
  step.page_rows = m_shape.page_rows;
  step.count = count;
  step.old_tokens = layer.tokens;
  step.in_ring = std::min<std::int64_t>(layer.tokens, window);
  step.first = step.old_tokens - step.in_ring;
  step.exits = std::max<std::int64_t>(0, step.in_ring + count - window);
  step.scored = scored;

  const bool portable = use_portable_path();
  AppendCounts counts;
  if (step.exits > 0 && heads > 0) {
    // Judge: the numbers of the kept rows among those that leave the ring, per head.
    reserve_kept(heads, step.exits);
    if (rule.judge) counts.judged = heads * step.exits;
    if (portable) {
      const auto ring_scores = layer.ring_scores;
      const float unscored = std::numeric_limits<float>::quiet_NaN();
      const auto score_of = KOKKOS_LAMBDA(int head, std::int64_t exit) {
        if (exit < step.in_ring) return ring_scores(head, (step.first + exit) % window);
        return scored ? scores(head, exit - step.in_ring) : unscored;
      };
      select(
          exec, heads, step.exits,
          KOKKOS_LAMBDA(int head, std::int64_t exit) {
            return rule.keeps(score_of(head, exit), step.first + exit);
          },
          m_kept, m_begins, m_kept_counts);
      if (rule.judge) {
        Kokkos::parallel_reduce(
            "kvzap::append::count_non_finite", Range(exec, 0, heads * step.exits),
            KOKKOS_LAMBDA(std::int64_t i, std::int64_t & sum) {
              const int head = static_cast<int>(i / step.exits);
              if (!EvictionRule::is_finite(score_of(head, i % step.exits))) ++sum;
            },
            counts.non_finite);
      }
      detail::fence(exec, "kvzap::append: the number of kept rows decides how many pages it takes");
      Kokkos::deep_copy(m_host_kept_counts, m_kept_counts);
    } else if constexpr (detail::runs_on_host) {
      for (int h = 0; h < heads; ++h) {
        m_host_kept_counts(h) = judge_head(step, h, layer.ring_scores, scores, rule,
                                           m_kept.data() + h * step.exits, counts.non_finite);
      }
    }
    std::int64_t kept = 0;
    std::int64_t most = 0;
    for (int h = 0; h < heads; ++h) {
      kept += m_host_kept_counts(h);
      most = std::max(most, m_host_kept_counts(h));
    }
    if (rule.judge) counts.evicted = counts.judged - kept;

    // Allocate, then admit: kept rows move into their pages, dropped ones are never touched.
    if (kept > 0) {
      if (portable) {
        detail::reserve_scratch(m_old_retained, heads, "kvzap::cache::old_retained");
        const auto range = std::make_pair(0, heads);
        Kokkos::deep_copy(Kokkos::subview(m_old_retained, range), layer.device_retained);
      }
      admit_counted(layer);
      upload_tables(layer);
      if (portable) {
        admit<Value, order>(exec, step, most, layer.ring, keys, values, m_kept, m_begins,
                            m_kept_counts, m_old_retained, m_pool.addresses(), layer.page_table);
      } else if constexpr (detail::runs_on_host) {
        admit_on_host<Value, order>(
            exec, step, layer.ring, keys, values, m_kept.data(), m_host_kept_counts.data(),
            layer.retained.data(),
            [&](int head, std::int64_t p) { return m_pool.address(layer.pages[head][p]); });
      }
    }
  }

  if (portable) {
    fill_ring<Value, order>(exec, step, layer.ring, layer.ring_scores, keys, values, scores);
  } else if constexpr (detail::runs_on_host) {
    fill_ring_on_host<Value, order>(step, layer.ring, layer.ring_scores, keys, values, scores);
  }
  layer.tokens += count;
  return counts;
}

template <class Value, PageOrder order>
CompactCounts KVCache<Value, order>::compact(const ExecutionSpace& exec, SequenceId sequence,
                                             int layer_index, const FlagsView& keep) {
  settle(sequence);
  LayerStore& layer = store(sequence, layer_index);
  const int heads = m_shape.heads[layer_index];
  const int dim = m_shape.head_dim;
  const std::int64_t page_rows = m_shape.page_rows;
  const std::int64_t longest =
      heads == 0 ? 0 : *std::max_element(layer.retained.begin(), layer.retained.end());
  if (static_cast<int>(keep.extent(0)) != heads ||
      static_cast<std::int64_t>(keep.extent(1)) < longest) {
    throw Error(
        fmt::format("cache compact: keep is ({}, {}); expected ({}, at least {}) = (head, "
                    "retained row)",
                    keep.extent(0), keep.extent(1), heads, longest));
  }
  m_sequences.at(sequence).checkpoints.clear();
  CompactCounts counts;
  if (longest == 0) return counts;

  const bool portable = use_portable_path();
  reserve_kept(heads, longest);
  std::vector<std::int64_t> first(layer.retained);  // evicted row of each head, or its end
  if (portable) {
    const auto retained = layer.device_retained;
    select(
        exec, heads, longest,
        KOKKOS_LAMBDA(int head, std::int64_t row) {
          return row < retained(head) && keep(head, row) != 0;
        },
        m_kept, m_begins, m_kept_counts);
    Counts firsts("kvzap::compact::firsts", heads);
    Kokkos::deep_copy(firsts, retained);
    Kokkos::parallel_for(
        "kvzap::compact::first", Range(exec, 0, heads * longest), KOKKOS_LAMBDA(std::int64_t i) {
          const int head = static_cast<int>(i / longest);
          const std::int64_t row = i % longest;
          if (row < retained(head) && keep(head, row) == 0) {
            Kokkos::atomic_fetch_min(&firsts(head), row);
          }
        });
    detail::fence(exec, "kvzap::compact: the kept rows decide which pages are written");
    Kokkos::deep_copy(m_host_kept_counts, m_kept_counts);
    const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, firsts);
    for (int h = 0; h < heads; ++h) first[h] = host(h);
  } else if constexpr (detail::runs_on_host) {
    const std::int64_t stride = keep.stride(1);
    for (int h = 0; h < heads; ++h) {
      const std::uint8_t* flags = &keep(h, 0);
      const std::int64_t rows = layer.retained[h];
      std::int32_t* kept = m_kept.data() + h * longest;
      std::int64_t n = 0;
      for (std::int64_t row = 0; row < rows; ++row) {
        kept[n] = static_cast<std::int32_t>(row);
        n += flags[row * stride] != 0 ? 1 : 0;
      }
      // Rows before the first evicted one are their own numbers.
      first[h] = std::partition_point(kept, kept + n,
                                      [&](const std::int32_t& row) { return row == &row - kept; }) -
                 kept;
      m_host_kept_counts(h) = n;
    }
  }

  // Pages that are written but held by another list too are replaced; the others are written in
  // place.
  std::vector<std::vector<PageId>> lists(layer.pages);
  std::vector<PageId> fresh;
  PageTable target_table;
  try {
    for (int h = 0; h < heads; ++h) {
      const std::int64_t kept = m_host_kept_counts(h);
      counts.judged += layer.retained[h];
      counts.evicted += layer.retained[h] - kept;
      counts.moved += kept - first[h];
      lists[h].resize((kept + page_rows - 1) / page_rows);
      if (kept == first[h]) continue;
      for (std::size_t p = first[h] / page_rows; p < lists[h].size(); ++p) {
        if (m_pool.reference_count(lists[h][p]) == 1) continue;
        lists[h][p] = m_pool.allocate();
        fresh.push_back(lists[h][p]);
      }
    }
    if (counts.evicted == 0) return counts;
    if (portable) {
      target_table =
          PageTable(Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::compact::page_table"),
                    heads, layer.page_table.extent(1));
    }
  } catch (...) {
    for (PageId page : fresh) m_pool.release(page);
    throw;
  }
  for (int h = 0; h < heads; ++h) {
    const std::int64_t p = first[h] / page_rows;
    if (first[h] % page_rows == 0 || m_host_kept_counts(h) == first[h]) continue;
    if (lists[h][p] == layer.pages[h][p]) continue;
    // The rows before the first evicted one.
    copy_page(layer.pages[h][p], lists[h][p]);
  }

  if (portable) {
    const auto table = Kokkos::create_mirror_view(target_table);
    for (int h = 0; h < heads; ++h) {
      for (std::size_t p = 0; p < lists[h].size(); ++p) table(h, p) = lists[h][p];
    }
    Kokkos::deep_copy(target_table, table);
    compact_columns<Value, order>(exec, heads, m_shape.page_rows, dim, m_kept, m_begins,
                                  m_kept_counts, m_pool.addresses(), layer.page_table,
                                  target_table);
    detail::fence(exec, "kvzap::compact: the pages that rows have left can be taken by others");
  } else if constexpr (detail::runs_on_host) {
    compact_on_host<Value, order>(
        exec, heads, Block<order>{m_shape.page_rows, dim}, counts.moved, longest, m_kept.data(),
        first.data(), m_host_kept_counts.data(),
        [&](int head, std::int64_t p) { return m_pool.address(layer.pages[head][p]); },
        [&](int head, std::int64_t p) { return m_pool.address(lists[head][p]); });
  }

  for (int h = 0; h < heads; ++h) {
    for (std::size_t p = 0; p < layer.pages[h].size(); ++p) {
      const bool stays = p < lists[h].size() && lists[h][p] == layer.pages[h][p];
      if (!stays) m_pool.release(layer.pages[h][p]);
    }
    layer.retained[h] = m_host_kept_counts(h);
  }
  layer.pages = std::move(lists);
  set_all_entries(layer);
  upload_tables(layer);
  return counts;
}

template <class Value, PageOrder order>
auto KVCache<Value, order>::checkpoint(SequenceId sequence) -> Checkpoint {
  settle(sequence);
  Checkpoint checkpoint;
  checkpoint.sequence = sequence;
  for (const LayerStore& layer : m_sequences.at(sequence).layers) {
    typename Checkpoint::LayerState state{layer.tokens, layer.retained, {}, {}};
    state.ring = decltype(state.ring)(
        Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::checkpoint::ring"),
        layer.ring.extent(0), layer.ring.extent(1));
    state.ring_scores = ScoreMatrix(
        Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::checkpoint::ring_scores"),
        layer.ring_scores.extent(0), layer.ring_scores.extent(1));
    Kokkos::deep_copy(state.ring, layer.ring);
    Kokkos::deep_copy(state.ring_scores, layer.ring_scores);
    checkpoint.layers.push_back(std::move(state));
  }
  checkpoint.bytes = MeteredBytes(m_meter, ring_bytes());
  checkpoint.id = m_next_checkpoint++;
  m_sequences.at(sequence).checkpoints.insert(checkpoint.id);
  return checkpoint;
}

template <class Value, PageOrder order>
void KVCache<Value, order>::restore(SequenceId sequence, const Checkpoint& checkpoint) {
  settle(sequence);
  if (checkpoint.sequence != sequence) {
    throw Error(fmt::format("cache restore: sequence {} given a checkpoint of sequence {}",
                            sequence, checkpoint.sequence));
  }
  // Rows that came after an earlier state are gone once the sequence has been cut back to it, and
  // so are the checkpoints between.
  auto& valid = m_sequences.at(sequence).checkpoints;
  const auto found = valid.find(checkpoint.id);
  if (found == valid.end()) {
    throw Error(
        fmt::format("cache restore: sequence {} was cut back past this checkpoint, or compacted "
                    "since",
                    sequence));
  }
  valid.erase(std::next(found), valid.end());
  auto& layers = m_sequences.at(sequence).layers;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    LayerStore& layer = layers[l];
    const auto& state = checkpoint.layers[l];
    layer.tokens = state.tokens;
    Kokkos::deep_copy(layer.ring, state.ring);
    Kokkos::deep_copy(layer.ring_scores, state.ring_scores);
    for (std::size_t h = 0; h < layer.pages.size(); ++h) {
      layer.retained[h] = state.retained[h];
      const std::size_t keep = (state.retained[h] + m_shape.page_rows - 1) / m_shape.page_rows;
      while (layer.pages[h].size() > keep) {
        m_pool.release(layer.pages[h].back());
        layer.pages[h].pop_back();
      }
      set_entries(layer, static_cast<int>(h), layer.pages[h].size());
    }
    upload_tables(layer);
  }
}

template <class Value, PageOrder order>
std::size_t KVCache<Value, order>::trim() {
  const std::size_t bytes = m_pool.trim();
  release_unused_host_memory();
  return bytes;
}

template <class Value, PageOrder order>
auto KVCache<Value, order>::layer(SequenceId sequence, int layer_index) -> Layer {
  const LayerStore& from = store(sequence, layer_index);
  Layer layer;
  layer.addresses = m_pool.addresses();
  layer.page_table = from.page_table;
  layer.retained = from.device_retained;
  layer.ring = from.ring;
  layer.bounds = decltype(layer.bounds)(from.retained.data(), from.retained.size());
  layer.tokens = from.tokens;
  layer.heads = m_shape.heads[layer_index];
  layer.window = m_shape.window;
  layer.page_rows = m_shape.page_rows;
  layer.head_dim = m_shape.head_dim;
  return layer;
}

template <class Value, PageOrder order>
std::int64_t KVCache<Value, order>::tokens(SequenceId sequence, int layer) const {
  return store(sequence, layer).tokens;
}

template <class Value, PageOrder order>
std::int64_t KVCache<Value, order>::rows(SequenceId sequence, int layer, int head) const {
  settle(sequence);
  const LayerStore& from = store(sequence, layer);
  return from.retained[checked_head(layer, head)] +
         std::min<std::int64_t>(from.tokens, m_shape.window);
}

template <class Value, PageOrder order>
auto KVCache<Value, order>::host_rows(SequenceId sequence, int layer_index, int head) -> HostRows {
  settle(sequence);
  const LayerStore& from = store(sequence, layer_index);
  const std::int64_t total = rows(sequence, layer_index, head);
  const std::int64_t retained = from.retained[head];
  const std::int64_t first_in_ring =
      from.tokens - std::min<std::int64_t>(from.tokens, m_shape.window);
  const int dim = m_shape.head_dim;
  const int page_rows = m_shape.page_rows;
  const int window = m_shape.window;
  Kokkos::View<Value**, Kokkos::LayoutRight, MemorySpace> keys(
      Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::host_rows::keys"), total, dim);
  Kokkos::View<Value**, Kokkos::LayoutRight, MemorySpace> values(
      Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::host_rows::values"), total, dim);
  Kokkos::View<std::int64_t*, MemorySpace> positions(
      Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::host_rows::positions"), total);
  const auto addresses = m_pool.addresses();
  const auto table = from.page_table;
  const auto ring = from.ring;
  const Block<order> ring_block{window, dim};
  const Block<order> page_block{page_rows, dim};
  const ExecutionSpace exec;
  Kokkos::parallel_for(
      "kvzap::host_rows::gather", Range(exec, 0, total), KOKKOS_LAMBDA(std::int64_t row) {
        const Value* source;
        Block<order> block = ring_block;
        if (row < retained) {
          const std::uintptr_t page = addresses(table(head, row / page_rows));
          block = page_block;
          source = reinterpret_cast<const Value*>(page) + block.row_offset(row % page_rows);
          positions(row) = page_positions<Value>(page, page_rows, dim)[row % page_rows];
        } else {
          positions(row) = first_in_ring + row - retained;
          source = &ring(head, 0) + block.row_offset(positions(row) % window);
        }
        copy_row(source, block.dim_stride(), &keys(row, 0), 1, dim);
        copy_row(source + block.values_offset(), block.dim_stride(), &values(row, 0), 1, dim);
      });
  detail::fence(exec, "kvzap::host_rows: the host reads the gathered rows");
  HostRows host;
  const auto host_keys = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, keys);
  const auto host_values = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, values);
  const auto host_positions = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, positions);
  host.keys.assign(host_keys.data(), host_keys.data() + host_keys.size());
  host.values.assign(host_values.data(), host_values.data() + host_values.size());
  host.positions.assign(host_positions.data(), host_positions.data() + host_positions.size());
  return host;
}

template <class Value, PageOrder order>
std::vector<std::int64_t> KVCache<Value, order>::positions(SequenceId sequence, int layer,
                                                           int head) {
  return host_rows(sequence, layer, head).positions;
}

template <class Value, PageOrder order>
CacheBytes KVCache<Value, order>::bytes() const {
  CacheBytes bytes;
  const std::size_t row = 2 * sizeof(Value) * m_shape.head_dim;
  for (const auto& [id, sequence] : m_sequences) {
    settle(id);
    for (const LayerStore& layer : sequence.layers) {
      const std::int64_t ring = std::min<std::int64_t>(layer.tokens, m_shape.window);
      for (std::int64_t retained : layer.retained) bytes.live += row * (retained + ring);
    }
    bytes.allocated += sequence.ring_bytes.bytes();
  }
  bytes.allocated += m_pool.allocated_bytes();
  bytes.returned = m_pool.returned_bytes();
  return bytes;
}

template <class Value, PageOrder order>
const std::vector<PageId>& KVCache<Value, order>::page_list(SequenceId sequence, int layer,
                                                            int head) const {
  settle(sequence);
  return store(sequence, layer).pages[checked_head(layer, head)];
}

template <class Value, PageOrder order>
std::vector<SequenceId> KVCache<Value, order>::sequences() const {
  std::vector<SequenceId> ids;
  for (const auto& entry : m_sequences) ids.push_back(entry.first);
  return ids;
}

#define KVZAP_INSTANTIATE(Value, order) template class KVCache<Value, order>;
KVZAP_FOR_EACH_CACHE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE

}  // namespace kvzap
