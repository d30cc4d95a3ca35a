// The row mover of hosts: loops over rows. If many rows move, it streams them in batches.
#include <array>
#include <cstring>
#include <numeric>

#include "base/host_threads.hpp"
#include "cache/row_mover.hpp"

namespace kvzap::cache {
namespace {

/// A row to move, its position and its score.
template <class Value>
struct MovingRow : TypedSpan<Value>::LeavingRow {
  std::int32_t position;
  float score;
};

template <class Value>
void copy_row_on_host(const Value* source, std::int64_t source_stride, Value* target, int dim) {
  if (source_stride == 1) {
    std::memcpy(target, source, dim * sizeof(Value));
  } else {
    for (int d = 0; d < dim; ++d) target[d] = source[d * source_stride];
  }
}

/// Moves rows first … last - 1 of a head one by one. row_of(r): the row that becomes the head's row
/// r. page_of(p): the address of the head's page p.
template <class Value, class RowOf, class PageOf>
void move_rows(std::int64_t first, std::int64_t last, const Block& block, const RowOf& row_of,
               const PageOf& page_of) {
  for (std::int64_t r = first; r < last; ++r) {
    const MovingRow<Value> row = row_of(r);
    const PageAddress page = page_of(r / block.capacity);
    const std::int64_t slot = r % block.capacity;
    Value* key = reinterpret_cast<Value*>(page.rows) + block.row_offset(slot);
    copy_row_on_host(row.key, row.key_stride, key, block.dim);
    if (block.vectors == 2) {
      copy_row_on_host(row.value, row.value_stride, key + block.values_offset(), block.dim);
    }
    page_positions(page.metadata)[slot] = row.position;
    page_scores(page.metadata, block.capacity)[slot] = row.score;
  }
}

/// Moves rows of whole heads in batches. Each batch knows the first rows of the next one, so that
/// prefetching continues across batches. For contiguous rows.
template <class Value>
class RowStream {
 public:
  RowStream(const Block& block, bool stream)
      : m_block(block), m_row_bytes(sizeof(Value) * block.dim), m_stream(stream) {}
  RowStream(const RowStream&) = delete;
  RowStream& operator=(const RowStream&) = delete;
  ~RowStream() {
    // No batch follows the last one: it prefetches its own last row again.
    for (int i = 0; i < prefetch_rows; ++i) {
      const std::int64_t last = m_block.vectors * batch().count;
      batch().rows[last + i] = last > 0 ? batch().rows[last - 1] : nullptr;
    }
    write(batch());
    if (m_stream) stream_fence();
  }

  static constexpr std::int64_t batch_rows = 64;

  /// Moves rows first … last - 1, at most batch_rows, of a head, on destruction at the latest.
  template <class RowOf, class PageOf>
  void move(std::int64_t first, std::int64_t last, const RowOf& row_of, const PageOf& page_of) {
    if (first >= last) return;
    Batch& next = m_batches[1 - m_current];
    next.first = first;
    next.count = last - first;
    for (std::int64_t i = 0; i < next.count; ++i) {
      const MovingRow<Value> row = row_of(first + i);
      next.rows[i] = reinterpret_cast<const char*>(row.key);
      if (m_block.vectors == 2) {
        next.rows[next.count + i] = reinterpret_cast<const char*>(row.value);
      }
      next.positions[i] = row.position;
      next.scores[i] = row.score;
    }
    const std::int64_t first_page = first / m_block.capacity;
    const std::int64_t last_page = (last - 1) / m_block.capacity;
    for (std::int64_t p = first_page; p <= last_page; ++p) next.pages[p - first_page] = page_of(p);
    Batch& now = batch();
    for (int i = 0; i < prefetch_rows; ++i) {
      now.rows[m_block.vectors * now.count + i] =
          next.rows[std::min<std::int64_t>(i, m_block.vectors * next.count - 1)];
    }
    write(now);
    m_current = 1 - m_current;
  }

 private:
  struct Batch {  // NOLINT(cppcoreguidelines-pro-type-member-init): filled before it is read
    std::int64_t first = 0;
    std::int64_t count = 0;
    // Keys, values, and the rows to prefetch after them.
    std::array<const char*, 2 * batch_rows + prefetch_rows> rows;
    std::array<std::int32_t, batch_rows> positions;
    std::array<float, batch_rows> scores;
    std::array<PageAddress, batch_rows> pages;
  };

  Batch& batch() { return m_batches[m_current]; }

  void write(const Batch& batch) {
    for (int v = 0; v < m_block.vectors; ++v) {
      std::int64_t r = 0;
      for (std::size_t p = 0; r < batch.count; ++p) {
        const std::int64_t slot = (batch.first + r) % m_block.capacity;
        const std::int64_t n = std::min(batch.count - r, m_block.capacity - slot);
        Value* page = reinterpret_cast<Value*>(batch.pages[p].rows);
        Value* target = page + m_block.row_offset(slot) + v * m_block.values_offset();
        gather_rows(batch.rows.data() + v * batch.count + r, n, reinterpret_cast<char*>(target),
                    m_row_bytes, m_stream);
        if (v == 0) {
          const std::uintptr_t metadata = batch.pages[p].metadata;
          std::memcpy(page_positions(metadata) + slot, batch.positions.data() + r,
                      n * sizeof(std::int32_t));
          std::memcpy(page_scores(metadata, m_block.capacity) + slot, batch.scores.data() + r,
                      n * sizeof(float));
        }
        r += n;
      }
    }
  }

  Block m_block;
  std::size_t m_row_bytes;
  bool m_stream;
  int m_current = 0;
  std::array<Batch, 2> m_batches;
};

/// host_for for a loop that only hosts can run. This file is compiled for devices too, whose
/// compilers reject such a lambda as a kernel.
template <class Work>
void parallel_on_host([[maybe_unused]] const char* label, [[maybe_unused]] std::int64_t n,
                      [[maybe_unused]] const Work& work) {
  if constexpr (base::runs_on_host) base::host_for(label, n, work);
}

/// Returns whether `bytes` are enough for lists of rows and non-temporal stores to pay off.
bool use_streams(std::int64_t bytes) {
  const RowPath path = row_path();
  return path == RowPath::streaming || (path == RowPath::automatic && bytes >= streaming_bytes);
}

/// The rows of a head that a rule keeps, and how many of the judged ones have no finite score.
struct Verdicts {
  std::int32_t* kept;
  std::int64_t n_kept = 0;
  std::int64_t non_finite = 0;

  void add(std::int32_t number, float score, std::int64_t position, const EvictionRule& rule) {
    kept[n_kept] = number;
    n_kept += rule.keeps(score, position) ? 1 : 0;
    non_finite += EvictionRule::is_finite(score) ? 0 : 1;
  }
};

/// Judges `n` pairs with positions first, first + 1, …, and scores `stride` apart. The first one
/// has this number.
void judge_run(const float* scores, std::int64_t stride, std::int64_t n, std::int64_t first,
               std::int64_t number, const EvictionRule& rule, Verdicts& verdicts) {
  std::int64_t i = 0;
  const std::int64_t one_by_one =
      stride == 1 ? std::clamp<std::int64_t>(rule.sink - first, 0, n) : n;
  for (; i < one_by_one; ++i) {
    verdicts.add(static_cast<std::int32_t>(number + i), scores[i * stride], first + i, rule);
  }
  verdicts.n_kept += list_retained(scores + i * stride, n - i, rule.threshold,
                                   static_cast<std::int32_t>(number + i),
                                   verdicts.kept + verdicts.n_kept, verdicts.non_finite);
}

/// Judges the leaving rows of a head. ring_scores: (head, window).
void judge_head(const AppendStep& step, int head, const float* ring_scores, const ScoresRef& scores,
                const EvictionRule& rule, Verdicts& verdicts) {
  if (!rule.judges()) {
    std::iota(verdicts.kept, verdicts.kept + step.leaving, 0);
    verdicts.n_kept = step.leaving;
    return;
  }
  // The rows that leave the ring lie in one or two runs of slots.
  const std::int64_t from_ring = std::min(step.leaving, step.in_ring);
  const std::int64_t slot = step.slot(step.first);
  const float* ring = ring_scores + std::int64_t{head} * step.window;
  if (step.leaving == 1 && from_ring == 1) {  // a decode step's
    return verdicts.add(0, ring[slot], step.first, rule);
  }
  const std::int64_t before_end = std::min<std::int64_t>(from_ring, step.window - slot);
  judge_run(ring + slot, 1, before_end, step.first, 0, rule, verdicts);
  judge_run(ring, 1, from_ring - before_end, step.first + before_end, before_end, rule, verdicts);
  const std::int64_t passing = step.leaving - from_ring;
  if (passing == 0) return;
  const float unscored = no_score();
  const bool scored = scores.data != nullptr;
  judge_run(scored ? scores.data + head * scores.head_stride : &unscored,
            scored ? scores.row_stride : 0, passing, step.first + from_ring, from_ring, rule,
            verdicts);
}

/// Lists the flagged rows among a head's first `rows` rows. Returns their number. Sets `first` to
/// the first row without a flag, or to the end.
std::int64_t list_flagged(const FlagsView& keep, int head, std::int64_t rows, std::int32_t* kept,
                          std::int64_t& first) {
  std::int64_t n = 0;
  if (rows > 0) {
    const std::int64_t stride = keep.stride(1);
    const std::uint8_t* flags = keep.data() + head * static_cast<std::int64_t>(keep.stride(0));
    for (std::int64_t row = 0; row < rows; ++row) {
      kept[n] = static_cast<std::int32_t>(row);
      n += flags[row * stride] != 0 ? 1 : 0;
    }
  }
  // Up to the first evicted row, each row's number equals its index in the list.
  first = std::partition_point(kept, kept + n,
                               [&](const std::int32_t& row) { return row == &row - kept; }) -
          kept;
  return n;
}

template <class Value>
class HostRowMover : public RowMover {
 public:
  bool runs_kernels() const override { return false; }

  void judge(const ExecutionSpace& /*exec*/, const SpanRows& span, const EvictionRule& rule,
             const KeptPart& kept) const override {
    std::int64_t non_finite = 0;
    for (int h = 0; h < kept.heads; ++h) {
      Verdicts verdicts{kept.rows + h * kept.extent};
      if (span.step.leaving > 0) {
        judge_head(span.step, h, span.ring.scores, span.scores, rule, verdicts);
      }
      kept.host_counts[h] = verdicts.n_kept;
      non_finite += verdicts.non_finite;
    }
    *kept.host_non_finite = non_finite;
  }

  void select(const ExecutionSpace& /*exec*/, const FlagsView& keep, const HeadCounts& rows,
              const KeptPart& kept) const override {
    for (int h = 0; h < kept.heads; ++h) {
      kept.host_counts[h] = list_flagged(keep, h, rows.host ? rows.host[h] : kept.extent,
                                         kept.rows + h * kept.extent, kept.host_firsts[h]);
    }
  }

  void count_non_finite(const ExecutionSpace& /*exec*/, const ScoresRef& scores,
                        const KeptPart& kept) const override {
    std::int64_t n = 0;
    for (int h = 0; h < kept.heads && scores.data; ++h) {
      const std::int32_t* const rows = kept.rows + h * kept.extent;
      for (std::int64_t i = 0; i < kept.host_counts[h]; ++i) {
        n += EvictionRule::is_finite(scores(h, rows[i])) ? 0 : 1;
      }
    }
    *kept.host_non_finite = n;
  }

  void admit(const ExecutionSpace& /*exec*/, const SpanRows& rows, const KeptPart& kept,
             const HeadCounts& retained, const PagesRef& pages) const override {
    const auto span = TypedSpan<Value>::of(rows);
    const AppendStep& step = span.step;
    const Block page_block = step.page();
    std::int64_t total = 0;
    std::int64_t most = 0;
    for (int h = 0; h < step.heads; ++h) {
      total += kept.host_counts[h];
      most = std::max(most, kept.host_counts[h]);
    }
    if (total == 0) return;
    const auto row_of = [&](int head, std::int64_t old) {
      const std::int32_t* head_kept = kept.rows + head * kept.extent;
      return [=, &step, &span](std::int64_t r) {
        const std::int64_t n = head_kept[r - old];
        return MovingRow<Value>{span.leaving_row(head, n),
                                static_cast<std::int32_t>(step.first + n),
                                span.leaving_score(head, n)};
      };
    };
    const std::int64_t row_bytes = sizeof(Value) * step.dim;
    const bool rows_whole =
        (span.keys.dim_stride == 1 && span.values.dim_stride == 1) || step.dim == 1;
    if (rows_whole && use_streams(step.vectors * row_bytes * total)) {
      // Heads alternate: rows of the same tokens are neighbours in the caller's views.
      using Stream = RowStream<Value>;
      const auto batches = [&](std::int64_t begin, std::int64_t end) {
        Stream stream(page_block, row_bytes % 16 == 0);
        for (std::int64_t b = begin; b < end; ++b) {
          for (int h = 0; h < step.heads; ++h) {
            const std::int64_t old = retained.host[h];
            stream.move(old + b * Stream::batch_rows,
                        old + std::min((b + 1) * Stream::batch_rows, kept.host_counts[h]),
                        row_of(h, old), [&](std::int64_t p) { return pages.at(h, p); });
          }
        }
      };
      const std::int64_t n_batches = (most + Stream::batch_rows - 1) / Stream::batch_rows;
      const std::int64_t workers = std::min<std::int64_t>(n_batches, base::host_threads());
      parallel_on_host("kvzap::append::admit_streamed", workers, [&](std::int64_t w) {
        batches(n_batches * w / workers, n_batches * (w + 1) / workers);
      });
      return;
    }
    for (int h = 0; h < step.heads; ++h) {
      const std::int64_t old = retained.host[h];
      if (kept.host_counts[h] == 0) continue;
      move_rows<Value>(old, old + kept.host_counts[h], page_block, row_of(h, old),
                       [&](std::int64_t p) { return pages.at(h, p); });
    }
  }

  void save(const ExecutionSpace& /*exec*/, const SpanRows& span, const SavedRows& saved,
            bool back) const override {
    const AppendStep& step = span.step;
    const RingRef<Value> ring{static_cast<Value*>(span.ring.rows), span.ring.scores};
    auto* const copies = static_cast<Value*>(saved.rows);
    const Block block = step.ring();
    for (std::int64_t i = 0; i < saved.count; ++i) {
      const std::int64_t slot = step.slot(step.first + i);
      Value* row = ring.rows + block.row_offset(slot);
      for (int h = 0; h < step.heads; ++h, row += block.size()) {
        const std::int64_t saved_row = h * saved.head_rows + i;
        Value* copy = copies + step.vectors * saved_row * step.dim;
        float* score = ring.scores + std::int64_t{h} * step.window + slot;
        float* score_copy = saved.scores + saved_row;
        const std::size_t row_bytes = sizeof(Value) * step.dim;
        for (int v = 0; v < step.vectors; ++v) {
          Value* const own = row + v * block.values_offset();
          Value* const own_copy = copy + std::int64_t{v} * step.dim;
          std::memcpy(back ? own : own_copy, back ? own_copy : own, row_bytes);
        }
        (back ? *score : *score_copy) = back ? *score_copy : *score;
      }
    }
  }

  void fill_ring(const ExecutionSpace& /*exec*/, const SpanRows& rows) const override {
    const auto span = TypedSpan<Value>::of(rows);
    const AppendStep& step = span.step;
    const Block block = step.ring();
    const std::int64_t entering = std::min<std::int64_t>(step.count, step.window);
    for (std::int64_t token = step.count - entering; token < step.count; ++token) {
      const std::int64_t slot = step.slot(step.old_tokens + token);
      Value* target = span.ring.rows + block.row_offset(slot);
      for (int h = 0; h < step.heads; ++h, target += block.size()) {
        copy_row_on_host(span.keys.at(token, h), span.keys.dim_stride, target, step.dim);
        if (step.vectors == 2) {
          copy_row_on_host(span.values.at(token, h), span.values.dim_stride,
                           target + block.values_offset(), step.dim);
        }
        span.ring.scores[std::int64_t{h} * step.window + slot] = span.scores(h, token);
      }
    }
  }

  // Ascending order: no row is overwritten before it has been read.
  void compact(const ExecutionSpace& /*exec*/, const Block& block, const KeptPart& kept,
               const PagesRef& from, const PagesRef& to) const override {
    std::int64_t moved = 0;
    for (int h = 0; h < kept.heads; ++h) moved += kept.host_counts[h] - kept.host_firsts[h];
    const auto move_head = [&](int head) {
      const auto row_of = [&, head_kept = kept.rows + head * kept.extent](std::int64_t r) {
        const std::int32_t row = head_kept[r];
        const std::int32_t slot = row % block.capacity;
        const PageAddress page = from.at(head, row / block.capacity);
        const Value* key = reinterpret_cast<const Value*>(page.rows) + block.row_offset(slot);
        return MovingRow<Value>{{key, key + block.values_offset(), 1, 1},
                                page_positions(page.metadata)[slot],
                                page_scores(page.metadata, block.capacity)[slot]};
      };
      const auto page_of = [&](std::int64_t p) { return to.at(head, p); };
      const std::int64_t row_bytes = sizeof(Value) * block.dim;
      if (use_streams(block.vectors * row_bytes * moved)) {
        using Stream = RowStream<Value>;
        Stream stream(block, row_bytes % 16 == 0);
        for (std::int64_t r = kept.host_firsts[head]; r < kept.host_counts[head];
             r += Stream::batch_rows) {
          stream.move(r, std::min(r + Stream::batch_rows, kept.host_counts[head]), row_of, page_of);
        }
        return;
      }
      move_rows<Value>(kept.host_firsts[head], kept.host_counts[head], block, row_of, page_of);
    };
    parallel_on_host("kvzap::compact::heads", kept.heads,
                     [&](std::int64_t head) { move_head(static_cast<int>(head)); });
  }
};

}  // namespace

const RowMover& host_row_mover(DType dtype) {
  return with_value_type(dtype, [](auto zero) -> const RowMover& {
    static const HostRowMover<decltype(zero)> mover;
    return mover;
  });
}

}  // namespace kvzap::cache
