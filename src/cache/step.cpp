// The transaction around a step: memory for all layers first, and the way back.
#include "cache/cache_impl.hpp"

namespace kvzap {

template <class Value, PageOrder order>
void KVCache<Value, order>::begin_step(const ExecutionSpace& exec,
                                       const std::vector<StepSpan>& spans) {
  if (m_in_step) throw Error("cache begin_step: the step before has not been ended");
  ++m_calls;
  m_called.clear();
  detail::or_out_of_memory("a step", 0, m_pool,
                           [&] { detail::reserve_room(m_called, spans.size()); });
  for (const StepSpan& span : spans) {
    Sequence& sequence = sequence_at(span.sequence);
    m_called.push_back(&sequence);
    if (sequence.call == m_calls) {
      throw Error(fmt::format("cache begin_step: sequence {} twice in one step", span.sequence));
    }
    sequence.call = m_calls;
    if (span.tokens < 0) {
      throw Error(
          fmt::format("cache begin_step: {} tokens for sequence {}", span.tokens, span.sequence));
    }
  }
  for (Sequence* sequence : m_called) {
    settle(*sequence);
    enter(exec, *sequence);
  }

  const std::size_t n = spans.size();
  const int n_layers = static_cast<int>(m_shape.heads.size());
  m_stock.clear();
  try {
    detail::or_out_of_memory("a step", 0, m_pool, [&] {
      std::size_t missing = 0;
      std::size_t shared = 0;
      std::int64_t saved = 0;
      if (m_step.size() < n) m_step.resize(n);
      for (std::size_t i = 0; i < n; ++i) {
        Sequence& sequence = *m_called[i];
        StepState& state = m_step[i];
        state.id = spans[i].sequence;
        state.rows = spans[i].tokens;
        state.reserved = true;
        state.tokens.resize(n_layers);
        state.ring_first.resize(n_layers);
        state.retained.assign(sequence.retained.data(),
                              sequence.retained.data() + sequence.retained.extent(0));
        state.total = sequence.total;
        state.collected = sequence.collected;
        state.saved_rows = 0;
        for (int l = 0; l < n_layers; ++l) {
          const detail::AppendStep step = step_of(sequence.layers[l], l, state.rows);
          state.tokens[l] = step.old_tokens;
          state.ring_first[l] = step.ring_first;
          if (step.heads == 0) continue;
          state.saved_rows = std::max(state.saved_rows, std::min(step.exits, step.in_ring));
          if (step.exits > m_shape.window) state.reserved = false;
        }
        state.first_saved = saved;
        saved += state.saved_rows * all_heads();
        std::size_t longest = 0;
        for (int l = 0; l < n_layers; ++l) {
          LayerStore& layer = sequence.layers[l];
          const std::int64_t exits = step_of(layer, l, state.rows).exits;
          if (exits == 0) continue;
          for (int h = 0; h < m_shape.heads[l]; ++h) {
            if (!state.reserved) {
              shared += shares_last_page(layer, h) ? 1 : 0;
              continue;
            }
            const PageNeeds needs = list_room(layer, h, exits);
            shared += needs.shares_last ? 1 : 0;
            missing += needs.missing;
            longest = std::max(longest, needs.listed);
          }
        }
        widen_table(exec, sequence, longest);
      }
      std::int64_t most_exits = 0;
      std::int64_t most_heads = 0;
      for (int l = 0; l < n_layers; ++l) {
        std::int64_t exits = 0;
        for (std::size_t i = 0; i < n; ++i) {
          exits += step_of(m_called[i]->layers[l], l, m_step[i].rows).exits;
        }
        most_exits = std::max(most_exits, exits * m_shape.heads[l]);
        most_heads = std::max<std::int64_t>(most_heads, m_shape.heads[l]);
      }
      if (most_exits > 0) {
        reserve_kept(most_exits, static_cast<std::int64_t>(n) * (most_heads + 1));
      }
      detail::reserve_room(m_append_steps, n);
      detail::reserve_room(m_replaced, shared);
      detail::reserve_scratch(m_saved, 2 * saved * m_shape.head_dim, "kvzap::cache::saved");
      detail::reserve_scratch(m_saved_scores, saved, "kvzap::cache::saved_scores");
      if (detail::uses_device_kernels()) reserve_args(n);
      m_pool.allocate(missing, m_stock);
      m_pool.addresses(exec);
    });
  } catch (...) {
    for (PageId page : m_stock) m_pool.release(page);
    m_stock.clear();
    throw;
  }
  std::reverse(m_stock.begin(), m_stock.end());
  for (std::size_t i = 0; i < n; ++i) m_called[i]->step = static_cast<int>(i);
  m_n_step = n;
  m_in_step = true;
}

template <class Value, PageOrder order>
void KVCache<Value, order>::end_step() {
  if (!m_in_step) throw Error("cache end_step: no step was begun");
  for (const Replaced& replaced : m_replaced) m_pool.release(replaced.page);
  close_step();
}

template <class Value, PageOrder order>
void KVCache<Value, order>::close_step() {
  for (PageId page : m_stock) m_pool.release(page);
  for (std::size_t i = 0; i < m_n_step; ++i) {
    Sequence& sequence = sequence_at(m_step[i].id);
    sequence.step = -1;
    note_releases(*sequence.last);
  }
  m_replaced.clear();
  m_stock.clear();
  m_n_step = 0;
  m_in_step = false;
}

template <class Value, PageOrder order>
void KVCache<Value, order>::cancel_step() {
  if (!m_in_step) throw Error("cache cancel_step: no step was begun");
  const bool portable = detail::use_portable_path();
  for (std::size_t i = 0; i < m_n_step; ++i) settle(m_step[i].id);
  for (std::size_t i = 0; i < m_n_step; ++i) {
    const StepState& state = m_step[i];
    Sequence& sequence = sequence_at(state.id);
    const ExecutionSpace& exec = *sequence.last;
    for (std::size_t l = 0; l < sequence.layers.size(); ++l) {
      LayerStore& layer = sequence.layers[l];
      const std::int64_t appended = layer.tokens - state.tokens[l];
      layer.tokens = state.tokens[l];
      layer.ring_first = state.ring_first[l];
      detail::AppendStep step = step_of(layer, static_cast<int>(l), appended);
      const detail::RingRef<Value> ring{layer.ring.data(), layer.ring_scores.data()};
      const std::int64_t first = state.first_saved + layer.first_head * state.saved_rows;
      const detail::SavedRows<Value> saved{m_saved.data() + 2 * first * m_shape.head_dim,
                                           m_saved_scores.data() + first, state.saved_rows,
                                           std::min(step.exits, step.in_ring)};
      if (saved.count > 0 && step.heads > 0) {
        if (portable) {
          detail::save<Value, order>(exec, step, ring, saved, true);
        } else if constexpr (detail::runs_on_host) {
          detail::save_on_host<Value, order>(step, ring, saved, true);
        }
      }
      for (std::size_t h = 0; h < layer.pages.size(); ++h) {
        layer.retained(h) = state.retained[layer.first_head + h];
      }
    }
    sequence.total = state.total;
    sequence.collected = state.collected;
  }
  for (const Replaced& replaced : m_replaced) {
    LayerStore& layer = sequence_at(m_step[replaced.step].id).layers[replaced.layer];
    PageId& page = layer.pages[replaced.head][layer.retained(replaced.head) / m_shape.page_rows];
    m_pool.release(page);
    page = replaced.page;
  }
  for (std::size_t i = 0; i < m_n_step; ++i) {
    Sequence& sequence = sequence_at(m_step[i].id);
    for (LayerStore& layer : sequence.layers) release_surplus(layer);
    upload_all(*sequence.last, sequence);
  }
  close_step();
}

#define KVZAP_INSTANTIATE(Value, order)                                          \
  template void KVCache<Value, order>::begin_step(const ExecutionSpace&,         \
                                                  const std::vector<StepSpan>&); \
  template void KVCache<Value, order>::end_step();                               \
  template void KVCache<Value, order>::cancel_step();
KVZAP_FOR_EACH_CACHE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE

}  // namespace kvzap
