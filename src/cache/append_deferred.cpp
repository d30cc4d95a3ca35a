// Appends of one token for which the host does not wait: one kernel judges and moves the rows that
// leave the rings of all sequences of a step.
#include "base/team.hpp"
#include "cache/cache_impl.hpp"

namespace kvzap {
namespace {

/// A sequence as the kernel takes it: the same for all layers of a step. Heads of all layers are
/// numbered through.
template <class Value>
struct SpanArgs {
  Value* rings;               // (head, 2 * window * dim)
  float* ring_scores;         // (head, window)
  const PageId* table;        // (head, page)
  std::int64_t* retained;     // (head)
  std::int64_t* totals;       // evicted, not finite
  Value* saved;               // (head * saved_rows, 2 * dim), or null
  float* saved_scores;        // (head * saved_rows)
  std::int64_t table_stride;  // of heads
  std::int64_t row;           // of keys, values and scores
  std::int32_t saved_rows;
  std::int32_t token;  // its position
  std::int32_t ring_first;
  float threshold;
  std::int32_t sink;
  std::uint8_t judge, exits, scored;
};

/// One token of one layer for each of several sequences: the row that leaves the ring is judged
/// and, if kept, moved to the end of its head's pages; the new one takes its slot. Pointers rather
/// than views, because Kokkos passes large kernels through a buffer for which it waits; more than a
/// few sequences are read from memory.
template <class Value, PageOrder order>
struct StepKernel {
  static constexpr int most_own = 2;
  SpanArgs<Value> own[most_own] = {};
  const SpanArgs<Value>* shared = nullptr;
  const Value* keys = nullptr;    // (row, head, dim) with strides
  const Value* values = nullptr;  // the same
  const float* scores = nullptr;  // (head, row) with strides
  const std::uintptr_t* addresses = nullptr;
  const std::uintptr_t* note_addresses = nullptr;
  std::int64_t key_row = 0, key_head = 0, key_dim = 0;
  std::int64_t value_row = 0, value_head = 0, value_dim = 0;
  std::int64_t score_head = 0, score_row = 0;
  int heads = 0, first_head = 0, dim = 0, window = 1, page_rows = 1;

  template <class Team>
  KOKKOS_FUNCTION void operator()(const Team& team) const {
    const int number = team.league_rank() / heads;
    const std::int64_t local = team.league_rank() % heads;
    const SpanArgs<Value>& span = shared ? shared[number] : own[number];
    const std::int64_t head = first_head + local;
    const std::int64_t slot = (span.token - span.ring_first) % window;
    const std::int64_t position = span.token - window;  // of the row that leaves
    const bool exits = span.exits != 0;
    const EvictionRule rule{span.threshold, span.sink, span.judge != 0};
    const detail::Block<order> ring_block{window, dim};
    const detail::Block<order> page_block{page_rows, dim};
    float* const ring_score = span.ring_scores + head * window + slot;
    const float score = exits ? *ring_score : 0.0f;
    const bool keep = exits && rule.keeps(score, position);
    const std::int64_t row = span.retained[head];
    const PageId page = keep ? span.table[head * span.table_stride + row / page_rows] : 0;
    Value* const from = span.rings + 2 * head * window * dim + ring_block.row_offset(slot);
    Value* const to =
        keep ? reinterpret_cast<Value*>(addresses[page]) + page_block.row_offset(row % page_rows)
             : nullptr;
    Value* const saved =
        exits && span.saved ? span.saved + 2 * head * span.saved_rows * dim : nullptr;
    const Value* const key = keys + span.row * key_row + local * key_head;
    const Value* const value = values + span.row * value_row + local * value_head;
    Kokkos::parallel_for(Kokkos::TeamVectorRange(team, 2 * dim), [&](int i) {
      const bool is_value = i >= dim;
      const int d = is_value ? i - dim : i;
      Value& old = from[d * ring_block.dim_stride() + (is_value ? ring_block.values_offset() : 0)];
      if (keep) {
        to[d * page_block.dim_stride() + (is_value ? page_block.values_offset() : 0)] = old;
      }
      if (saved) saved[i] = old;
      old = is_value ? value[d * value_dim] : key[d * key_dim];
    });
    team.team_barrier();
    Kokkos::single(Kokkos::PerTeam(team), [&] {
      if (saved) span.saved_scores[head * span.saved_rows] = score;
      *ring_score =
          span.scored ? scores[local * score_head + span.row * score_row] : detail::no_score();
      if (keep) {
        const std::uintptr_t notes = note_addresses[page];
        detail::page_positions(notes)[row % page_rows] = static_cast<std::int32_t>(position);
        detail::page_scores(notes, page_rows)[row % page_rows] = score;
        span.retained[head] = row + 1;
      }
      if (!exits || !rule.judge) return;
      if (!keep) Kokkos::atomic_add(&span.totals[0], std::int64_t{1});
      if (!EvictionRule::is_finite(score)) Kokkos::atomic_add(&span.totals[1], std::int64_t{1});
    });
  }
};

template <class Value, PageOrder order>
void launch(const ExecutionSpace& exec, int spans, const StepKernel<Value, order>& kernel) {
  static_assert(sizeof(kernel) <= detail::most_arguments);
  const detail::TeamShape team = detail::team_shape({128, 1});
  Kokkos::parallel_for(
      "kvzap::append::step",
      Kokkos::TeamPolicy<ExecutionSpace>(exec, spans * kernel.heads, team.threads, team.lanes),
      kernel);
}

/// Writes arguments for the kernel, which travel as those of another one: nothing waits.
template <class Value>
struct WriteArgs {
  static constexpr int most = 3;
  SpanArgs<Value> args[most] = {};
  SpanArgs<Value>* target = nullptr;
  KOKKOS_FUNCTION void operator()(int i) const { target[i] = args[i]; }
};

/// Entries of page tables that travel as arguments of a kernel.
struct NewEntries {
  static constexpr int most = 16;
  struct Entry {
    PageId* target;
    PageId page;
  };
  Entry entry[most] = {};
  int count = 0;
  KOKKOS_FUNCTION void operator()(int i) const { *entry[i].target = entry[i].page; }

  void link(const ExecutionSpace& exec) {
    if (count == 0) return;
    Kokkos::parallel_for("kvzap::append::link", Kokkos::RangePolicy<ExecutionSpace>(exec, 0, count),
                         *this);
    count = 0;
  }
};

}  // namespace

template <class Value, PageOrder order>
void KVCache<Value, order>::defer_spans(const ExecutionSpace& exec, const AppendSpan* spans,
                                        std::size_t n, int layer_index, const RowsView& keys,
                                        const RowsView& values, const ScoresView& scores) {
  using Args = SpanArgs<Value>;
  check_spans(spans, n, layer_index, keys, values, scores);
  for (std::size_t i = 0; i < n; ++i) {
    if (spans[i].rows != 1) {
      throw Error(fmt::format("cache append: {} tokens in one step; expected 1", spans[i].rows));
    }
  }
  if (n == 0) return;
  const int heads = m_shape.heads[layer_index];
  if (heads == 0) {
    for (std::size_t i = 0; i < n; ++i) {
      ++m_called[i]->layers[layer_index].tokens;
    }
    return;
  }
  const auto exits = [&](const LayerStore& layer) {
    return layer.tokens - layer.ring_first >= m_shape.window;
  };
  const auto from_stock = [&](const Sequence& sequence) {
    return sequence.step >= 0 && m_step[sequence.step].reserved;
  };
  for (std::size_t i = 0; i < n; ++i) enter(exec, *m_called[i]);

  detail::or_out_of_memory("an append", 0, m_pool, [&] {
    std::size_t missing = 0;
    for (std::size_t i = 0; i < n; ++i) {
      Sequence& sequence = *m_called[i];
      LayerStore& layer = sequence.layers[layer_index];
      if (!exits(layer) || from_stock(sequence)) continue;
      std::size_t longest = 0;
      for (int h = 0; h < heads; ++h) {
        const PageNeeds needs = list_room(layer, h, 1);
        missing += needs.missing;
        longest = std::max(longest, needs.listed);
      }
      widen_table(exec, sequence, longest);
    }
    reserve_args(n);
    stock_up(exec, missing);
  });

  StepKernel<Value, order> kernel;
  std::memset(static_cast<void*>(kernel.own), 0, sizeof(kernel.own));
  Args* const all =
      n <= std::size_t{kernel.most_own} ? kernel.own : reinterpret_cast<Args*>(m_new_args.data());
  std::memset(static_cast<void*>(all), 0, n * sizeof(Args));
  try {
    NewEntries entries;
    for (std::size_t i = 0; i < n; ++i) {
      Sequence& sequence = *m_called[i];
      LayerStore& layer = sequence.layers[layer_index];
      const std::int64_t stride = sequence.table.stride(0);
      for (int h = 0; h < heads && exits(layer); ++h) {
        const std::vector<PageId>& list = layer.pages[h];
        const std::size_t old_size = list.size();
        const PageId old_last = list.empty() ? -1 : list.back();
        take_pages(exec, sequence, layer_index, h, 1, from_stock(sequence) ? m_stock : m_fresh);
        if (list.size() == old_size && list.back() == old_last) continue;
        const std::size_t index = list.size() - 1;
        sequence.host_table(layer.first_head + h, index) = list.back();
        entries.entry[entries.count++] = {
            sequence.table.data() + (layer.first_head + h) * stride + index, list.back()};
        if (entries.count == NewEntries::most) entries.link(exec);
      }
      Args& args = all[i];
      args.rings = sequence.rings.data();
      args.ring_scores = sequence.ring_scores.data();
      args.table = sequence.table.data();
      args.retained = sequence.lengths.data();
      args.totals = sequence.lengths.data() + sequence.lengths.extent(0) - 2;
      args.table_stride = stride;
      args.row = spans[i].first_row;
      args.token = static_cast<std::int32_t>(layer.tokens);
      args.ring_first = static_cast<std::int32_t>(layer.ring_first);
      args.threshold = spans[i].rule.threshold;
      args.sink = static_cast<std::int32_t>(std::clamp<std::int64_t>(
          spans[i].rule.sink, 0, std::numeric_limits<std::int32_t>::max()));
      args.judge = spans[i].rule.judge ? 1 : 0;
      args.exits = exits(layer) ? 1 : 0;
      args.scored = spans[i].scored ? 1 : 0;
      if (sequence.step >= 0 && exits(layer)) {
        const StepState& state = m_step[sequence.step];
        // Rows that came within the step need no copy.
        if (layer.tokens - m_shape.window < state.tokens[layer_index]) {
          const std::int64_t row =
              saved_row(sequence, layer, layer_index) - layer.first_head * state.saved_rows;
          args.saved = m_saved.data() + 2 * row * m_shape.head_dim;
          args.saved_scores = m_saved_scores.data() + row;
          args.saved_rows = static_cast<std::int32_t>(state.saved_rows);
        }
      }
    }
    entries.link(exec);
    if (n > std::size_t{kernel.most_own}) {
      kernel.shared = reinterpret_cast<const Args*>(m_span_args.data());
      write_args(exec, n);
    }
    kernel.keys = keys.data();
    kernel.values = values.data();
    kernel.scores = scores.data();
    kernel.addresses = m_pool.addresses(exec).data();
    kernel.note_addresses = m_pool.note_addresses().data();
    kernel.key_row = keys.stride(0);
    kernel.key_head = keys.stride(1);
    kernel.key_dim = keys.stride(2);
    kernel.value_row = values.stride(0);
    kernel.value_head = values.stride(1);
    kernel.value_dim = values.stride(2);
    kernel.score_head = scores.stride(0);
    kernel.score_row = scores.stride(1);
    kernel.heads = heads;
    kernel.first_head = m_called[0]->layers[layer_index].first_head;
    kernel.dim = m_shape.head_dim;
    kernel.window = m_shape.window;
    kernel.page_rows = m_shape.page_rows;
    launch(exec, static_cast<int>(n), kernel);
  } catch (...) {
    for (std::size_t i = 0; i < n; ++i) {
      release_surplus(m_called[i]->layers[layer_index]);
    }
    for (PageId page : m_fresh) m_pool.release(page);
    m_fresh.clear();
    throw;
  }
  // Two sequences that shared a page do not both need a copy of it.
  for (PageId page : m_fresh) m_pool.release(page);
  m_fresh.clear();

  for (std::size_t i = 0; i < n; ++i) {
    Sequence& sequence = *m_called[i];
    LayerStore& layer = sequence.layers[layer_index];
    if (exits(layer)) {
      for (int h = 0; h < heads; ++h) ++layer.retained(h);
      layer.deferred = true;
      if (spans[i].rule.judge) {
        sequence.collected.judged += heads;
        sequence.total.judged += heads;
      }
    }
    sequence.pending = true;
    ++layer.tokens;
  }
}

// Room for the arguments of so many sequences, beside those that were last written.
template <class Value, PageOrder order>
void KVCache<Value, order>::reserve_args(std::size_t n) {
  const std::size_t bytes = n * sizeof(SpanArgs<Value>);
  if (n <= std::size_t{StepKernel<Value, order>::most_own}) return;
  if (m_new_args.size() < bytes) m_new_args.resize(2 * bytes);
  if (m_written_args.size() < m_new_args.size()) m_written_args.resize(m_new_args.size());
  if (m_span_args.extent(0) < bytes) {
    m_n_written = 0;
    detail::reserve_scratch(m_span_args, 2 * bytes, "kvzap::append::span_args");
  }
}

// Brings m_new_args, the arguments of n sequences, to where the kernel reads them, unless they are
// there, as they are in all layers of a step but the first.
template <class Value, PageOrder order>
void KVCache<Value, order>::write_args(const ExecutionSpace& exec, std::size_t n) {
  using Args = SpanArgs<Value>;
  if (m_span_args_on) {
    detail::follow(*m_span_args_on, exec, "kvzap::append: arguments are in use elsewhere");
  }
  m_span_args_on = exec;
  const std::size_t bytes = n * sizeof(Args);
  if (m_n_written == n && std::memcmp(m_new_args.data(), m_written_args.data(), bytes) == 0) {
    return;
  }
  m_n_written = 0;
  Args* const target = reinterpret_cast<Args*>(m_span_args.data());
  for (std::size_t i = 0; i < n; i += WriteArgs<Value>::most) {
    WriteArgs<Value> write;
    const std::size_t count = std::min<std::size_t>(WriteArgs<Value>::most, n - i);
    std::memcpy(static_cast<void*>(write.args), m_new_args.data() + i * sizeof(Args),
                count * sizeof(Args));
    write.target = target + i;
    Kokkos::parallel_for("kvzap::append::span_args",
                         Kokkos::RangePolicy<ExecutionSpace>(exec, 0, static_cast<int>(count)),
                         write);
  }
  std::memcpy(m_written_args.data(), m_new_args.data(), bytes);
  m_n_written = n;
}

template <class Value, PageOrder order>
void KVCache<Value, order>::append_deferred(const ExecutionSpace& exec,
                                            const std::vector<AppendSpan>& spans, int layer,
                                            const RowsView& keys, const RowsView& values,
                                            const ScoresView& scores) {
  defer_spans(exec, spans.data(), spans.size(), layer, keys, values, scores);
}

template <class Value, PageOrder order>
void KVCache<Value, order>::append_deferred(const ExecutionSpace& exec, SequenceId sequence,
                                            int layer, const RowsView& keys, const RowsView& values,
                                            const ScoresView& scores, const EvictionRule& rule) {
  const AppendSpan span{sequence, 0, static_cast<std::int64_t>(keys.extent(0)), rule,
                        scores.extent(0) > 0 && scores.extent(1) > 0};
  defer_spans(exec, &span, 1, layer, keys, values, scores);
}

#define KVZAP_INSTANTIATE(Value, order)                                                        \
  template void KVCache<Value, order>::reserve_args(std::size_t);                              \
  template void KVCache<Value, order>::append_deferred(                                        \
      const ExecutionSpace&, const std::vector<AppendSpan>&, int, const RowsView&,             \
      const RowsView&, const ScoresView&);                                                     \
  template void KVCache<Value, order>::append_deferred(const ExecutionSpace&, SequenceId, int, \
                                                       const RowsView&, const RowsView&,       \
                                                       const ScoresView&, const EvictionRule&);
KVZAP_FOR_EACH_CACHE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE

}  // namespace kvzap
