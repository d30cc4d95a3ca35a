// Steps: memory is taken before the first append, and cancel_step undoes the appends.
#include "base/machine.hpp"
#include "cache/cache_impl.hpp"

namespace kvzap {

// Records the state of a step's sequences and takes all memory that its appends need.
class KVCache::StepPreparation {
 public:
  StepPreparation(KVCache& cache, const ExecutionSpace& exec)
      : m_cache(cache),
        m_work(*cache.m_work),
        m_exec(exec),
        m_layers(static_cast<int>(cache.m_shape.heads.size())) {}

  void run(const std::vector<StepSpan>& spans) {
    const std::size_t n = spans.size();
    if (m_cache.m_step.size() < n) m_cache.m_step.resize(n);
    for (std::size_t i = 0; i < n; ++i) {
      record(m_cache.m_step[i], *m_work.called[i], spans[i]);
      add_pages(m_cache.m_step[i], *m_work.called[i]);
    }
    reserve_lists(n);
    base::reserve_room(m_work.append_steps, n);
    base::reserve_room(m_cache.m_replaced, m_shared);
    base::reserve_room(m_work.leased, m_missing);
    base::reserve_scratch(m_cache.m_saved, m_saved * m_cache.pair_bytes(), "kvzap::cache::saved");
    base::reserve_scratch(m_cache.m_saved_scores, m_saved, "kvzap::cache::saved_scores");
    m_cache.reserve_next_states(n);
    if (base::machine().on_device()) m_cache.reserve_args(n);
    base::reserve_room(m_cache.m_spare_pages, m_missing);
    PageLease lease(m_cache);
    lease.take(m_exec, m_missing);
    m_cache.m_spare_pages.assign(m_work.fresh.begin(), m_work.fresh.end());
    m_work.fresh.clear();
  }

 private:
  void record(StepState& state, const Sequence& sequence, const StepSpan& span) {
    state.id = span.sequence;
    state.rows = span.tokens;
    state.reserved = true;
    state.tokens.resize(m_layers);
    state.ring_first.resize(m_layers);
    state.retained.assign(sequence.retained.data(),
                          sequence.retained.data() + sequence.retained.extent(0));
    state.total = sequence.total;
    state.collected = sequence.collected;
    state.saved_rows = 0;
    for (int l = 0; l < m_layers; ++l) {
      const cache::AppendStep step = m_cache.step_of(sequence.layers[l], l, state.rows);
      state.tokens[l] = step.old_tokens;
      state.ring_first[l] = step.ring_first;
      if (step.heads == 0) continue;
      state.saved_rows = std::max(state.saved_rows, std::min(step.leaving, step.in_ring));
      if (step.leaving > step.window && m_cache.m_shape.has_pages(l)) state.reserved = false;
    }
    state.first_saved = m_saved;
    m_saved += state.saved_rows * m_cache.all_heads();
  }

  void add_pages(const StepState& state, Sequence& sequence) {
    std::size_t longest = 0;
    for (int l = 0; l < m_layers; ++l) {
      LayerStore& layer = sequence.layers[l];
      const std::int64_t leaving = m_cache.step_of(layer, l, state.rows).leaving;
      if (leaving == 0 || !layer.has_pages) continue;
      for (int h = 0; h < m_cache.m_shape.heads[l]; ++h) {
        if (!state.reserved) {
          m_shared += m_cache.shares_last_page(layer, h) ? 1 : 0;
          continue;
        }
        const PageNeeds needs = m_cache.list_room(layer, h, leaving);
        m_shared += needs.shares_last ? 1 : 0;
        m_missing += needs.missing;
        longest = std::max(longest, needs.listed);
      }
    }
    m_cache.widen_table(m_exec, sequence, longest);
  }

  // Reserves space to list the kept rows of the layer with the most.
  void reserve_lists(std::size_t n) {
    std::int64_t most_leaving = 0;
    std::int64_t most_heads = 0;
    for (int l = 0; l < m_layers; ++l) {
      if (!m_cache.m_shape.has_pages(l)) continue;
      std::int64_t leaving = 0;
      for (std::size_t i = 0; i < n; ++i) {
        leaving += m_cache.step_of(m_work.called[i]->layers[l], l, m_cache.m_step[i].rows).leaving;
      }
      most_leaving = std::max(most_leaving, leaving * m_cache.m_shape.heads[l]);
      most_heads = std::max<std::int64_t>(most_heads, m_cache.m_shape.heads[l]);
    }
    if (most_leaving > 0) {
      m_work.kept.reserve(most_leaving, static_cast<std::int64_t>(n) * (most_heads + 1));
    }
  }

  KVCache& m_cache;
  Workspace& m_work;
  const ExecutionSpace& m_exec;
  int m_layers;
  std::size_t m_missing = 0;  // pages
  std::size_t m_shared = 0;   // pages that need a copy
  std::int64_t m_saved = 0;   // rows, of all heads
};

void KVCache::begin_step(const ExecutionSpace& exec, const std::vector<StepSpan>& spans) {
  if (m_in_step) throw Error("cache begin_step: the step before has not been ended");
  ++m_calls;
  std::vector<Sequence*>& called = m_work->called;
  called.clear();
  cache::or_out_of_memory("a step", 0, m_pool, [&] { base::reserve_room(called, spans.size()); });
  for (const StepSpan& span : spans) {
    Sequence& sequence = sequence_at(span.sequence);
    called.push_back(&sequence);
    if (sequence.call == m_calls) {
      throw Error(fmt::format("cache begin_step: sequence {} twice in one step", span.sequence));
    }
    sequence.call = m_calls;
    if (span.tokens < 0) {
      throw Error(
          fmt::format("cache begin_step: {} tokens for sequence {}", span.tokens, span.sequence));
    }
  }
  for (Sequence* sequence : called) {
    settle(*sequence);
    enter(exec, *sequence);
  }
  m_spare_pages.clear();
  cache::or_out_of_memory("a step", 0, m_pool, [&] { StepPreparation(*this, exec).run(spans); });
  for (std::size_t i = 0; i < spans.size(); ++i) called[i]->step = static_cast<int>(i);
  m_n_step = spans.size();
  m_in_step = true;
}

void KVCache::end_step() {
  if (!m_in_step) throw Error("cache end_step: no step was begun");
  for (const Replaced& replaced : m_replaced) m_pool.release(replaced.page);
  for (std::size_t i = 0; i < m_n_step && !m_shape.states.empty(); ++i) adopt_states(i);
  close_step();
}

// Gives the i-th sequence of the step its new states.
void KVCache::adopt_states(std::size_t i) {
  Sequence& sequence = sequence_at(m_step[i].id);
  for (std::size_t l = 0; l < sequence.layers.size(); ++l) {
    if (sequence.layers[l].tokens != m_step[i].tokens[l]) continue;
    const std::int64_t first = m_first_state[l];
    cache::copy_elements(*sequence.last, m_next_states[i].data() + first,
                         sequence.states.data() + first, m_first_state[l + 1] - first);
  }
  std::swap(sequence.states, m_next_states[i]);
}

// Takes memory for the states that a step of n sequences makes.
void KVCache::reserve_next_states(std::size_t n) {
  while (!m_shape.states.empty() && m_next_states.size() < n) {
    base::reserve_more(m_next_states, 1);
    m_pool.claim(state_bytes());
    try {
      m_next_states.push_back(make_states("kvzap::cache::next_states"));
    } catch (...) {
      m_pool.unclaim(state_bytes());
      throw;
    }
    m_next_state_bytes = {};
    m_next_state_bytes = MeteredBytes(m_meter, m_next_states.size() * state_bytes());
  }
}

void KVCache::close_step() {
  for (PageId page : m_spare_pages) m_pool.release(page);
  for (std::size_t i = 0; i < m_n_step; ++i) {
    Sequence& sequence = sequence_at(m_step[i].id);
    sequence.step = -1;
    record_releases(*sequence.last);
  }
  m_replaced.clear();
  m_spare_pages.clear();
  m_n_step = 0;
  m_in_step = false;
}

// Returns rings and lengths of a sequence to what they were before the step.
void KVCache::bring_back(const StepState& state, Sequence& sequence) {
  const auto& mover = cache::row_mover(m_dtype, m_shape.format);
  for (std::size_t l = 0; l < sequence.layers.size(); ++l) {
    LayerStore& layer = sequence.layers[l];
    const std::int64_t appended = layer.tokens - state.tokens[l];
    layer.tokens = state.tokens[l];
    layer.ring_first = state.ring_first[l];
    cache::SpanRows rows;
    rows.step = step_of(layer, static_cast<int>(l), appended);
    rows.ring = {layer.ring.data(), layer.ring_scores.data()};
    const std::int64_t first = state.first_saved + layer.first_head * state.saved_rows;
    const cache::SavedRows saved{m_saved.data() + first * pair_bytes(),
                                 m_saved_scores.data() + first, state.saved_rows,
                                 std::min(rows.step.leaving, rows.step.in_ring)};
    if (saved.count > 0 && rows.step.heads > 0) mover.save(*sequence.last, rows, saved, true);
    for (std::size_t h = 0; h < layer.pages.size(); ++h) {
      layer.retained(h) = state.retained[layer.first_head + h];
    }
  }
  sequence.total = state.total;
  sequence.collected = state.collected;
}

void KVCache::cancel_step() {
  if (!m_in_step) throw Error("cache cancel_step: no step was begun");
  for (std::size_t i = 0; i < m_n_step; ++i) settle(m_step[i].id);
  for (std::size_t i = 0; i < m_n_step; ++i) bring_back(m_step[i], sequence_at(m_step[i].id));
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

}  // namespace kvzap
