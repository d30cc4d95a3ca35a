// Appends that wait for their verdicts: judge, take pages, move what stays, fill the ring.
#include "cache/cache_impl.hpp"

namespace kvzap {

using detail::AppendStep;
using detail::RingRef;
using detail::RowsRef;
using detail::SavedRows;
using detail::ScoresRef;

namespace {

template <class View>
bool has_scores(const View& scores) {
  return scores.extent(0) > 0 && scores.extent(1) > 0;
}

}  // namespace

template <class Value, PageOrder order>
void KVCache<Value, order>::check_rows(int layer, const RowsView& keys,
                                       const RowsView& values) const {
  const int heads = m_shape.heads[layer];
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
}

// Notes the sequences of the spans in m_called. Throws Error if spans do not fit the extents of the
// rows, each other, or the step, or positions would overflow.
template <class Value, PageOrder order>
void KVCache<Value, order>::check_spans(const AppendSpan* spans, std::size_t n, int layer_index,
                                        const RowsView& keys, const RowsView& values,
                                        const ScoresView& scores) {
  m_called.clear();
  if (n == 0) return;
  detail::or_out_of_memory("an append", 0, m_pool, [&] { detail::reserve_room(m_called, n); });
  check_layer(layer_index);
  check_rows(layer_index, keys, values);
  const int heads = m_shape.heads[layer_index];
  const std::int64_t count = keys.extent(0);
  if (has_scores(scores) && (static_cast<int>(scores.extent(0)) != heads ||
                             static_cast<std::int64_t>(scores.extent(1)) != count)) {
    throw Error(fmt::format("cache append: scores are ({}, {}); expected ({}, {}) = (head, token)",
                            scores.extent(0), scores.extent(1), heads, count));
  }
  ++m_calls;
  for (std::size_t i = 0; i < n; ++i) {
    const AppendSpan& span = spans[i];
    Sequence& sequence = sequence_at(span.sequence);
    m_called.push_back(&sequence);
    const LayerStore& layer = sequence.layers[layer_index];
    if (sequence.call == m_calls) {
      throw Error(fmt::format("cache append: sequence {} twice in one call", span.sequence));
    }
    sequence.call = m_calls;
    if (span.first_row < 0 || span.rows < 0 || span.first_row + span.rows > count) {
      throw Error(fmt::format("cache append: a span of {} rows from row {} on; there are {}",
                              span.rows, span.first_row, count));
    }
    if (span.scored && span.rows > 0 && heads > 0 && !has_scores(scores)) {
      throw Error(
          fmt::format("cache append: scores are ({}, {}); expected ({}, {}) = (head, token)",
                      scores.extent(0), scores.extent(1), heads, count));
    }
    if (layer.tokens + span.rows > std::numeric_limits<std::int32_t>::max()) {
      throw Error(fmt::format("cache append: {} tokens exceed the largest position {}",
                              layer.tokens + span.rows, std::numeric_limits<std::int32_t>::max()));
    }
    if (sequence.step < 0) continue;
    const StepState& state = m_step[sequence.step];
    if (layer.tokens + span.rows > state.tokens[layer_index] + state.rows) {
      throw Error(fmt::format("cache append: sequence {} gets {} tokens in a step begun with {}",
                              span.sequence, layer.tokens + span.rows - state.tokens[layer_index],
                              state.rows));
    }
  }
}

template <class Value, PageOrder order>
AppendStep KVCache<Value, order>::step_of(const LayerStore& layer, int layer_index,
                                          std::int64_t rows) const {
  AppendStep step;
  step.heads = m_shape.heads[layer_index];
  step.dim = m_shape.head_dim;
  step.window = m_shape.window;
  step.page_rows = m_shape.page_rows;
  step.count = rows;
  step.old_tokens = layer.tokens;
  step.ring_first = layer.ring_first;
  step.in_ring = std::min<std::int64_t>(layer.tokens - layer.ring_first, m_shape.window);
  step.first = step.old_tokens - step.in_ring;
  step.exits = std::max<std::int64_t>(0, step.in_ring + rows - m_shape.window);
  return step;
}

// Where the first row that leaves the ring next is saved within a step, for the layer's first head.
template <class Value, PageOrder order>
std::int64_t KVCache<Value, order>::saved_row(const Sequence& sequence, const LayerStore& layer,
                                              int layer_index) const {
  const StepState& state = m_step[sequence.step];
  const std::int64_t old_tokens = state.tokens[layer_index];
  const auto oldest = [&](std::int64_t tokens) {
    return tokens - std::min<std::int64_t>(tokens - layer.ring_first, m_shape.window);
  };
  return state.first_saved + layer.first_head * state.saved_rows + oldest(layer.tokens) -
         oldest(old_tokens);
}

template <class Value, PageOrder order>
AppendCounts KVCache<Value, order>::append_spans(const ExecutionSpace& exec,
                                                 const AppendSpan* spans, std::size_t n,
                                                 int layer_index, const RowsView& keys,
                                                 const RowsView& values, const ScoresView& scores) {
  check_spans(spans, n, layer_index, keys, values, scores);
  AppendCounts sum;
  if (n == 0) return sum;
  const int heads = m_shape.heads[layer_index];
  const bool portable = detail::use_portable_path();
  const auto sequence_of = [&](std::size_t span) -> Sequence& { return *m_called[span]; };
  for (std::size_t i = 0; i < n; ++i) {
    Sequence& sequence = sequence_of(i);
    settle(sequence);
    enter(exec, sequence);
  }

  // Judge: the numbers of the kept rows among those that leave each ring.
  std::int64_t exits = 0;
  const std::int64_t entries = static_cast<std::int64_t>(n) * heads;
  detail::or_out_of_memory("an append", 0, m_pool, [&] {
    m_append_steps.clear();
    detail::reserve_room(m_append_steps, n);
    for (std::size_t i = 0; i < n; ++i) {
      const LayerStore& layer = sequence_of(i).layers[layer_index];
      m_append_steps.push_back(step_of(layer, layer_index, spans[i].rows));
      exits += m_append_steps[i].exits * heads;
    }
    if (exits > 0) reserve_kept(exits, entries + static_cast<std::int64_t>(n));
  });
  std::int64_t first_kept = 0;
  for (std::size_t i = 0; i < n && exits > 0; ++i) {
    const AppendStep& step = m_append_steps[i];
    const std::int64_t first_entry = static_cast<std::int64_t>(i) * heads;
    const LayerStore& layer = sequence_of(i).layers[layer_index];
    const ScoresRef own_scores = ScoresRef::of(scores, spans[i].first_row, spans[i].scored);
    if (portable) {
      const auto own = std::make_pair(first_entry, first_entry + heads);
      if (step.exits == 0) {
        Kokkos::deep_copy(exec, Kokkos::subview(m_kept_counts, own), std::int64_t{0});
        Kokkos::deep_copy(exec, Kokkos::subview(m_kept_counts, entries + i), std::int64_t{0});
        continue;
      }
      detail::judge(
          exec, step, layer.ring_scores.data(), own_scores, spans[i].rule,
          Kokkos::subview(m_kept, std::make_pair(first_kept, first_kept + heads * step.exits)),
          Kokkos::subview(m_begins, own), Kokkos::subview(m_kept_counts, own),
          Kokkos::subview(m_kept_counts, entries + i));
    } else if constexpr (detail::runs_on_host) {
      std::int64_t non_finite = 0;
      for (int h = 0; h < heads; ++h) {
        m_host_kept_counts(first_entry + h) =
            step.exits == 0 ? 0
                            : detail::judge_on_host(
                                  step, h, layer.ring_scores.data(), own_scores, spans[i].rule,
                                  m_kept.data() + first_kept + h * step.exits, non_finite);
      }
      m_host_kept_counts(entries + i) = non_finite;
    }
    first_kept += heads * step.exits;
  }
  if (portable && exits > 0) {
    detail::fence(exec, "kvzap::append: the number of kept rows decides how many pages it takes");
    Kokkos::deep_copy(m_host_kept_counts, m_kept_counts);
  }

  // Take memory for all spans before anything changes.
  const std::int64_t* const all_kept = m_host_kept_counts.data();
  const auto kept_of = [&](std::size_t span, int head) {
    return exits == 0 ? 0 : all_kept[static_cast<std::int64_t>(span) * heads + head];
  };
  const auto from_stock = [&](const Sequence& sequence) {
    return sequence.step >= 0 && m_step[sequence.step].reserved;
  };
  if (exits > 0) {
    detail::or_out_of_memory("an append", 0, m_pool, [&] {
      std::size_t missing = 0;
      for (std::size_t i = 0; i < n; ++i) {
        Sequence& sequence = sequence_of(i);
        LayerStore& layer = sequence.layers[layer_index];
        if (from_stock(sequence)) continue;
        std::size_t longest = 0;
        for (int h = 0; h < heads; ++h) {
          const std::int64_t kept = kept_of(i, h);
          if (kept == 0) continue;
          const PageNeeds needs = list_room(layer, h, kept);
          missing += needs.missing;
          longest = std::max(longest, needs.listed);
        }
        widen_table(exec, sequence, longest);
      }
      stock_up(exec, missing);
    });
  }

  // Admit: kept rows move into their pages, dropped ones are never touched. On hosts nothing fails
  // from here on, but for the launch of a kernel, before it has run.
  first_kept = 0;
  try {
    for (std::size_t i = 0; i < n; ++i) {
      Sequence& sequence = sequence_of(i);
      LayerStore& layer = sequence.layers[layer_index];
      const AppendStep& step = m_append_steps[i];
      const std::int64_t first_entry = static_cast<std::int64_t>(i) * heads;
      std::vector<PageId>& pages = from_stock(sequence) ? m_stock : m_fresh;
      std::int64_t most = 0;
      for (int h = 0; h < heads; ++h) {
        const std::int64_t kept = kept_of(i, h);
        if (kept == 0) continue;
        most = std::max(most, kept);
        take_pages(exec, sequence, layer_index, h, kept, pages);
        write_entries(sequence, layer, h, layer.retained(h) / m_shape.page_rows);
      }
      if (heads == 0 || step.count == 0) continue;
      const RingRef<Value> ring{layer.ring.data(), layer.ring_scores.data()};
      const auto own_keys = RowsRef<Value>::of(keys, spans[i].first_row);
      const auto own_values = RowsRef<Value>::of(values, spans[i].first_row);
      const ScoresRef own_scores = ScoresRef::of(scores, spans[i].first_row, spans[i].scored);
      SavedRows<Value> saved;
      if (sequence.step >= 0) {
        const StepState& state = m_step[sequence.step];
        const std::int64_t first = saved_row(sequence, layer, layer_index);
        saved = {m_saved.data() + 2 * first * m_shape.head_dim, m_saved_scores.data() + first,
                 state.saved_rows,
                 std::max<std::int64_t>(
                     0, std::min(step.exits, state.tokens[layer_index] - step.first))};
      }
      if (portable) {
        const auto own = std::make_pair(first_entry, first_entry + heads);
        if (most > 0) {
          upload_table(exec, sequence, layer);
          const auto addresses = m_pool.addresses(exec);
          detail::admit<Value, order>(
              exec, step, most, ring, own_keys, own_values, own_scores,
              Kokkos::subview(m_kept, std::make_pair(first_kept, first_kept + heads * step.exits)),
              Kokkos::subview(m_begins, own), Kokkos::subview(m_kept_counts, own),
              layer.device_retained, addresses, m_pool.note_addresses(),
              Kokkos::subview(sequence.table,
                              std::make_pair(layer.first_head, layer.first_head + heads),
                              Kokkos::ALL));
        }
        if (saved.count > 0) detail::save<Value, order>(exec, step, ring, saved, false);
      } else if constexpr (detail::runs_on_host) {
        if (most > 0) {
          detail::admit_on_host<Value, order>(
              exec, step, ring, own_keys, own_values, own_scores, m_kept.data() + first_kept,
              m_host_kept_counts.data() + first_entry, layer.retained.data(),
              detail::PageLists{&m_pool, &layer.pages});
        }
        if (saved.count > 0) detail::save_on_host<Value, order>(step, ring, saved, false);
      }
      first_kept += heads * step.exits;
    }
    // Rings change last, and after all that can fail on hosts.
    for (std::size_t i = 0; i < n && heads > 0; ++i) {
      const AppendStep& step = m_append_steps[i];
      if (step.count == 0) continue;
      const LayerStore& layer = sequence_of(i).layers[layer_index];
      const RingRef<Value> ring{layer.ring.data(), layer.ring_scores.data()};
      const auto own_keys = RowsRef<Value>::of(keys, spans[i].first_row);
      const auto own_values = RowsRef<Value>::of(values, spans[i].first_row);
      const ScoresRef own_scores = ScoresRef::of(scores, spans[i].first_row, spans[i].scored);
      if (portable) {
        detail::fill_ring<Value, order>(exec, step, ring, own_keys, own_values, own_scores);
      } else if constexpr (detail::runs_on_host) {
        detail::fill_ring_on_host<Value, order>(step, ring, own_keys, own_values, own_scores);
      }
    }
  } catch (...) {
    for (std::size_t i = 0; i < n; ++i) {
      release_surplus(sequence_of(i).layers[layer_index]);
    }
    for (PageId page : m_fresh) m_pool.release(page);
    m_fresh.clear();
    throw;
  }
  // Two sequences that shared a page do not both need a copy of it.
  for (PageId page : m_fresh) m_pool.release(page);
  m_fresh.clear();

  for (std::size_t i = 0; i < n; ++i) {
    Sequence& sequence = sequence_of(i);
    LayerStore& layer = sequence.layers[layer_index];
    const AppendStep& step = m_append_steps[i];
    layer.tokens += step.count;
    if (step.exits == 0) continue;
    std::int64_t kept = 0;
    for (int h = 0; h < heads; ++h) {
      layer.retained(h) += kept_of(i, h);
      kept += kept_of(i, h);
    }
    if (kept > 0) upload_lengths(exec, layer);
    if (!spans[i].rule.judge || heads == 0) continue;
    const std::int64_t judged = heads * step.exits;
    const std::int64_t non_finite = m_host_kept_counts(entries + i);
    for (AppendCounts* counts : {&sum, &sequence.total}) {
      counts->judged += judged;
      counts->evicted += judged - kept;
      counts->non_finite += non_finite;
    }
  }
  return sum;
}

template <class Value, PageOrder order>
AppendCounts KVCache<Value, order>::append(const ExecutionSpace& exec,
                                           const std::vector<AppendSpan>& spans, int layer,
                                           const RowsView& keys, const RowsView& values,
                                           const ScoresView& scores) {
  return append_spans(exec, spans.data(), spans.size(), layer, keys, values, scores);
}

template <class Value, PageOrder order>
AppendCounts KVCache<Value, order>::append(const ExecutionSpace& exec, SequenceId sequence,
                                           int layer, const RowsView& keys, const RowsView& values,
                                           const ScoresView& scores, const EvictionRule& rule) {
  const AppendSpan span{sequence, 0, static_cast<std::int64_t>(keys.extent(0)), rule,
                        has_scores(scores)};
  return append_spans(exec, &span, 1, layer, keys, values, scores);
}

#define KVZAP_INSTANTIATE(Value, order)                                                           \
  template void KVCache<Value, order>::check_spans(                                               \
      const AppendSpan*, std::size_t, int, const RowsView&, const RowsView&, const ScoresView&);  \
  template AppendStep KVCache<Value, order>::step_of(const LayerStore&, int, std::int64_t) const; \
  template std::int64_t KVCache<Value, order>::saved_row(const Sequence&, const LayerStore&, int) \
      const;                                                                                      \
  template AppendCounts KVCache<Value, order>::append(                                            \
      const ExecutionSpace&, const std::vector<AppendSpan>&, int, const RowsView&,                \
      const RowsView&, const ScoresView&);                                                        \
  template AppendCounts KVCache<Value, order>::append(const ExecutionSpace&, SequenceId, int,     \
                                                      const RowsView&, const RowsView&,           \
                                                      const ScoresView&, const EvictionRule&);
KVZAP_FOR_EACH_CACHE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE

}  // namespace kvzap
