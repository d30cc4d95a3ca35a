// Appends of which the caller says what stays: the rows of a prompt whose verdicts are known.
#include "cache/cache_impl.hpp"

namespace kvzap {

using detail::AppendStep;
using detail::Range;
using detail::RowsRef;
using detail::ScoresRef;

namespace {

/// How many of the flagged rows have a score that is not finite, into *non_finite.
template <class Keep>
void count_non_finite(const ExecutionSpace& exec, int heads, std::int64_t rows, const Keep& keep,
                      const ScoresRef& scores,
                      const Kokkos::View<std::int64_t, MemorySpace>& non_finite) {
  Kokkos::parallel_reduce(
      "kvzap::append_kept::count_non_finite", Range(exec, 0, scores.data ? heads * rows : 0),
      KOKKOS_LAMBDA(std::int64_t i, std::int64_t & sum) {
        const std::int64_t head = i / rows;
        const std::int64_t row = i % rows;
        if (keep(head, row) != 0 && !EvictionRule::is_finite(scores(head, row))) ++sum;
      },
      non_finite);
}

}  // namespace

template <class Value, PageOrder order>
AppendCounts KVCache<Value, order>::append_kept(const ExecutionSpace& exec, SequenceId id,
                                                int layer_index, const RowsView& keys,
                                                const RowsView& values, const ScoresView& scores,
                                                const FlagsView& keep) {
  const std::int64_t rows = keys.extent(0);
  const bool scored = scores.extent(0) > 0 && scores.extent(1) > 0;
  const AppendSpan span{id, 0, rows, {}, scored};
  check_spans(&span, 1, layer_index, keys, values, scores);
  const int heads = m_shape.heads[layer_index];
  if (static_cast<int>(keep.extent(0)) != heads ||
      (heads > 0 && static_cast<std::int64_t>(keep.extent(1)) != rows)) {
    throw Error(fmt::format("cache append_kept: keep is ({}, {}); expected ({}, {}) = (head, row)",
                            keep.extent(0), keep.extent(1), heads, rows));
  }
  Sequence& sequence = sequence_at(id);
  LayerStore& layer = sequence.layers[layer_index];
  if (layer.tokens != 0) {
    throw Error(
        fmt::format("cache append_kept: layer {} of sequence {} has had {} tokens; expected none",
                    layer_index, id, layer.tokens));
  }
  if (rows == 0) return {};
  if (heads == 0) {
    layer.tokens = layer.ring_first = rows;
    return {};
  }
  settle(sequence);
  enter(exec, sequence);

  // To what moves rows, all of them leave a ring that none has entered.
  AppendStep step = step_of(layer, layer_index, rows);
  step.exits = rows;
  const bool portable = detail::use_portable_path();
  const ScoresRef own_scores = ScoresRef::of(scores, 0, scored);
  const auto heads_part = std::make_pair(0, heads);
  // A step has set aside what the layer needs if all rows that can leave the ring stay. If later
  // rows of the step can leave the new ring, then those pages have room for these rows too.
  std::size_t from_stock = 0;
  if (sequence.step >= 0 && m_step[sequence.step].reserved) {
    const std::int64_t exits = step_of(layer, layer_index, m_step[sequence.step].rows).exits;
    from_stock = heads * ((exits + m_shape.page_rows - 1) / m_shape.page_rows);
  }
  detail::or_out_of_memory("an append", 0, m_pool, [&] {
    reserve_kept(heads * rows, std::int64_t{heads} + 1);
    if (portable) {
      detail::before_allocation(heads * sizeof(std::int64_t));
      const detail::Counts all("kvzap::append_kept::rows", heads);
      Kokkos::deep_copy(exec, all, rows);
      detail::select_flagged(
          exec, heads, rows, all, keep, m_kept, Kokkos::subview(m_begins, heads_part),
          Kokkos::subview(m_kept_counts, heads_part), Kokkos::subview(m_firsts, heads_part));
      count_non_finite(exec, heads, rows, keep, own_scores, Kokkos::subview(m_kept_counts, heads));
      detail::fence(exec, "kvzap::append_kept: the number of kept rows decides how many pages");
      Kokkos::deep_copy(m_host_kept_counts, m_kept_counts);
    } else if constexpr (detail::runs_on_host) {
      std::int64_t non_finite = 0;
      for (int h = 0; h < heads; ++h) {
        std::int32_t* const kept = m_kept.data() + h * rows;
        std::int64_t unused = 0;
        const std::int64_t n = detail::list_flagged(keep, h, rows, kept, unused);
        for (std::int64_t i = 0; scored && i < n; ++i) {
          non_finite += EvictionRule::is_finite(own_scores(h, kept[i])) ? 0 : 1;
        }
        m_host_kept_counts(h) = n;
      }
      m_host_kept_counts(heads) = non_finite;
    }

    std::size_t missing = 0;
    std::size_t longest = 0;
    for (int h = 0; h < heads; ++h) {
      const PageNeeds needs = list_room(layer, h, m_host_kept_counts(h));
      missing += needs.missing;
      longest = std::max(longest, needs.listed);
    }
    widen_table(exec, sequence, longest);
    from_stock = std::min({from_stock, missing, m_stock.size()});
    m_fresh.clear();
    detail::reserve_room(m_fresh, missing);
    stock_up(exec, missing - from_stock);
  });
  m_fresh.insert(m_fresh.end(), m_stock.end() - static_cast<std::ptrdiff_t>(from_stock),
                 m_stock.end());
  m_stock.resize(m_stock.size() - from_stock);

  std::int64_t kept = 0;
  std::int64_t most = 0;
  try {
    for (int h = 0; h < heads; ++h) {
      const std::int64_t n = m_host_kept_counts(h);
      kept += n;
      most = std::max(most, n);
      take_pages(exec, sequence, layer_index, h, n, m_fresh);
      write_entries(sequence, layer, h, 0);
    }
    const auto all_keys = RowsRef<Value>::of(keys, 0);
    const auto all_values = RowsRef<Value>::of(values, 0);
    if (most > 0 && portable) {
      upload_table(exec, sequence, layer);
      const auto addresses = m_pool.addresses(exec);
      detail::admit<Value, order>(
          exec, step, most, {}, all_keys, all_values, own_scores, m_kept,
          Kokkos::subview(m_begins, heads_part), Kokkos::subview(m_kept_counts, heads_part),
          layer.device_retained, addresses, m_pool.note_addresses(),
          Kokkos::subview(sequence.table,
                          std::make_pair(layer.first_head, layer.first_head + heads), Kokkos::ALL));
    } else if (most > 0) {
      if constexpr (detail::runs_on_host) {
        detail::admit_on_host<Value, order>(exec, step, {}, all_keys, all_values, own_scores,
                                            m_kept.data(), m_host_kept_counts.data(),
                                            layer.retained.data(),
                                            detail::PageLists{&m_pool, &layer.pages});
      }
    }
  } catch (...) {
    // The step has its pages back: any are as good as those that it lent.
    for (auto& list : layer.pages) {
      m_fresh.insert(m_fresh.end(), list.begin(), list.end());
      list.clear();
    }
    for (std::size_t i = 0; i < m_fresh.size(); ++i) {
      if (i < from_stock) {
        m_stock.push_back(m_fresh[i]);
      } else {
        m_pool.release(m_fresh[i]);
      }
    }
    m_fresh.clear();
    throw;
  }

  layer.tokens = layer.ring_first = rows;
  for (int h = 0; h < heads; ++h) layer.retained(h) = m_host_kept_counts(h);
  upload_lengths(exec, layer);
  const AppendCounts counts{heads * rows, heads * rows - kept, m_host_kept_counts(heads)};
  sequence.total.judged += counts.judged;
  sequence.total.evicted += counts.evicted;
  sequence.total.non_finite += counts.non_finite;
  return counts;
}

#define KVZAP_INSTANTIATE(Value, order)                                                            \
  template AppendCounts KVCache<Value, order>::append_kept(const ExecutionSpace&, SequenceId, int, \
                                                           const RowsView&, const RowsView&,       \
                                                           const ScoresView&, const FlagsView&);
KVZAP_FOR_EACH_CACHE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE

}  // namespace kvzap
