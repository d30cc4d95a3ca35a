// Steps: memory is taken before the first append, and cancel_step undoes the appends.
#include "base/machine.hpp"
#include "cache/cache_impl.hpp"

namespace kvzap::cache {
namespace {

// Records the state of a step's sequences and takes all memory that its appends need.
class StepPreparation {
 public:
  StepPreparation(Store& store, const ExecutionSpace& exec)
      : m_store(store),
        m_work(store.work),
        m_exec(exec),
        m_layers(static_cast<int>(store.shape.heads.size())) {}

  void run(const std::vector<StepSpan>& spans) {
    const std::size_t n = spans.size();
    if (m_store.step_states.size() < n) m_store.step_states.resize(n);
    for (std::size_t i = 0; i < n; ++i) {
      record(m_store.step_states[i], *m_work.called[i], spans[i]);
      add_pages(m_store.step_states[i], *m_work.called[i]);
    }
    reserve_lists(n);
    base::reserve_room(m_work.append_steps, n);
    base::reserve_room(m_store.replaced, m_shared);
    base::reserve_room(m_work.leased, m_missing);
    base::reserve_scratch(m_store.saved, m_saved * m_store.most_pair_bytes(),
                          "kvzap::cache::saved");
    base::reserve_scratch(m_store.saved_scores, m_saved, "kvzap::cache::saved_scores");
    m_store.reserve_next_states(n);
    if (base::machine().on_device()) m_store.reserve_args(n);
    base::reserve_room(m_store.spare_pages, m_missing);
    PageLease lease(m_store);
    lease.take(m_exec, m_missing);
    m_store.spare_pages.assign(m_work.fresh.begin(), m_work.fresh.end());
    m_work.fresh.clear();
  }

 private:
  void record(StepState& state, const Sequence& sequence, const StepSpan& span) {
    state.id = span.sequence;
    state.rows = span.tokens;
    state.reserved = true;
    state.tokens.resize(m_layers);
    state.ring_first.resize(m_layers);
    state.passed.assign(m_layers, 0);
    state.judges.assign(m_layers, false);
    state.retained.assign(sequence.retained.data(),
                          sequence.retained.data() + sequence.retained.extent(0));
    state.total = sequence.total;
    state.collected = sequence.collected;
    state.saved_rows = 0;
    for (int l = 0; l < m_layers; ++l) {
      const AppendStep step = m_store.step_of(sequence.layers[l], l, state.rows);
      state.tokens[l] = step.old_tokens;
      state.ring_first[l] = step.ring_first;
      if (step.heads == 0) continue;
      state.saved_rows = std::max(state.saved_rows, std::min(step.leaving, step.in_ring));
      if (step.leaving > step.window && m_store.shape.has_pages(l)) state.reserved = false;
    }
    state.first_saved = m_saved;
    m_saved += state.saved_rows * m_store.all_heads();
  }

  void add_pages(const StepState& state, Sequence& sequence) {
    std::size_t longest = 0;
    for (int l = 0; l < m_layers; ++l) {
      LayerStore& layer = sequence.layers[l];
      const std::int64_t leaving = m_store.step_of(layer, l, state.rows).leaving;
      if (leaving == 0 || !layer.has_pages) continue;
      for (int h = 0; h < m_store.shape.heads[l]; ++h) {
        if (!state.reserved) {
          m_shared += m_store.shares_last_page(layer, h) ? 1 : 0;
          continue;
        }
        const PageNeeds needs = m_store.list_room(layer, h, leaving);
        m_shared += needs.shares_last ? 1 : 0;
        m_missing += needs.missing;
        longest = std::max(longest, needs.listed);
      }
    }
    m_store.widen_table(m_exec, sequence, longest);
  }

  // Reserves space to list the kept rows of the layer with the most.
  void reserve_lists(std::size_t n) {
    std::int64_t most_leaving = 0;
    std::int64_t most_heads = 0;
    for (int l = 0; l < m_layers; ++l) {
      if (!m_store.shape.has_pages(l)) continue;
      std::int64_t leaving = 0;
      for (std::size_t i = 0; i < n; ++i) {
        leaving +=
            m_store.step_of(m_work.called[i]->layers[l], l, m_store.step_states[i].rows).leaving;
      }
      most_leaving = std::max(most_leaving, leaving * m_store.shape.heads[l]);
      most_heads = std::max<std::int64_t>(most_heads, m_store.shape.heads[l]);
    }
    if (most_leaving > 0) {
      m_work.kept.reserve(most_leaving, static_cast<std::int64_t>(n) * (most_heads + 1));
    }
  }

  Store& m_store;
  Workspace& m_work;
  const ExecutionSpace& m_exec;
  int m_layers;
  std::size_t m_missing = 0;  // pages
  std::size_t m_shared = 0;   // pages that need a copy
  std::int64_t m_saved = 0;   // rows, of all heads
};

// Gives the i-th sequence of the step its new states.
void adopt_states(Store& store, std::size_t i) {
  Sequence& sequence = store.sequence_at(store.step_states[i].id);
  for (std::size_t l = 0; l < sequence.layers.size(); ++l) {
    if (store.step_states[i].passed[l] > 0) continue;
    const std::int64_t first = store.first_state[l];
    copy_elements(*sequence.last, store.next_states[i].data() + first,
                  sequence.states.data() + first, store.first_state[l + 1] - first);
  }
  std::swap(sequence.states, store.next_states[i]);
}

// Returns rings and lengths of a sequence to what they were before the step.
void bring_back(Store& store, const StepState& state, Sequence& sequence) {
  const auto& mover = row_mover(store.dtype, store.shape.format);
  for (std::size_t l = 0; l < sequence.layers.size(); ++l) {
    LayerStore& layer = sequence.layers[l];
    const bool waits = l < store.waits.size() && store.waits[l];
    const std::int64_t appended = waits ? 0 : layer.tokens - state.tokens[l];
    layer.tokens = state.tokens[l];
    layer.ring_first = state.ring_first[l];
    SpanRows rows;
    rows.step = store.step_of(layer, static_cast<int>(l), appended);
    rows.ring = {layer.ring.data(), layer.ring_scores.data()};
    const std::int64_t first = state.first_saved + layer.first_head * state.saved_rows;
    const SavedRows saved{store.saved.data() + first * store.most_pair_bytes(),
                          store.saved_scores.data() + first, state.saved_rows,
                          std::min(rows.step.leaving, rows.step.in_ring)};
    if (saved.count > 0 && rows.step.heads > 0) mover.save(*sequence.last, rows, saved, true);
    for (std::size_t h = 0; h < layer.pages.size(); ++h) {
      layer.retained(h) = state.retained[layer.first_head + h];
    }
  }
  sequence.total = state.total;
  sequence.collected = state.collected;
}

}  // namespace

// Takes memory for the states that a step of n sequences makes.
void Store::reserve_next_states(std::size_t n) {
  while (!shape.states.empty() && next_states.size() < n) {
    base::reserve_more(next_states, 1);
    pool.claim(state_bytes());
    try {
      next_states.push_back(make_states("kvzap::cache::next_states"));
    } catch (...) {
      pool.unclaim(state_bytes());
      throw;
    }
    next_state_bytes = {};
    next_state_bytes = MeteredBytes(meter, next_states.size() * state_bytes());
  }
}

void Store::close_step() {
  for (PageId page : spare_pages) pool.release(page);
  for (std::size_t i = 0; i < n_step; ++i) {
    Sequence& sequence = sequence_at(step_states[i].id);
    sequence.step = -1;
    record_releases(*sequence.last);
  }
  replaced.clear();
  spare_pages.clear();
  n_step = 0;
  in_step = false;
  waits.clear();
}

}  // namespace kvzap::cache

namespace kvzap {

void KVCache::begin_step(const ExecutionSpace& exec, const std::vector<StepSpan>& spans) {
  cache::Store& store = *m_store;
  if (store.in_step) throw Error("cache begin_step: the step before has not been ended");
  ++store.calls;
  std::vector<cache::Sequence*>& called = store.work.called;
  called.clear();
  cache::or_out_of_memory("a step", 0, store.pool,
                          [&] { base::reserve_room(called, spans.size()); });
  for (const StepSpan& span : spans) {
    cache::Sequence& sequence = store.sequence_at(span.sequence);
    called.push_back(&sequence);
    if (sequence.call == store.calls) {
      throw Error(fmt::format("cache begin_step: sequence {} twice in one step", span.sequence));
    }
    sequence.call = store.calls;
    if (span.tokens < 0) {
      throw Error(
          fmt::format("cache begin_step: {} tokens for sequence {}", span.tokens, span.sequence));
    }
  }
  for (cache::Sequence* sequence : called) {
    store.settle(*sequence);
    store.enter(exec, *sequence);
  }
  store.spare_pages.clear();
  store.n_ended = 0;
  cache::or_out_of_memory("a step", 0, store.pool,
                          [&] { cache::StepPreparation(store, exec).run(spans); });
  for (std::size_t i = 0; i < spans.size(); ++i) called[i]->step = static_cast<int>(i);
  store.n_step = spans.size();
  store.in_step = true;
}

void KVCache::end_step() {
  cache::Store& store = *m_store;
  if (!store.in_step) throw Error("cache end_step: no step was begun");
  for (const cache::Replaced& replaced : store.replaced) store.pool.release(replaced.page);
  for (std::size_t i = 0; i < store.n_step && !store.shape.states.empty(); ++i) {
    cache::adopt_states(store, i);
  }
  const std::size_t ended = store.n_step;
  store.close_step();
  store.n_ended = ended;
}

void KVCache::cancel_step() {
  cache::Store& store = *m_store;
  if (!store.in_step) throw Error("cache cancel_step: no step was begun");
  for (std::size_t i = 0; i < store.n_step; ++i) store.settle(store.step_states[i].id);
  for (std::size_t i = 0; i < store.n_step; ++i) {
    cache::bring_back(store, store.step_states[i], store.sequence_at(store.step_states[i].id));
  }
  for (const cache::Replaced& replaced : store.replaced) {
    cache::LayerStore& layer =
        store.sequence_at(store.step_states[replaced.step].id).layers[replaced.layer];
    PageId& page =
        layer.pages[replaced.head][layer.retained(replaced.head) / store.shape.page_rows];
    store.pool.release(page);
    page = replaced.page;
  }
  for (std::size_t i = 0; i < store.n_step; ++i) {
    cache::Sequence& sequence = store.sequence_at(store.step_states[i].id);
    for (cache::LayerStore& layer : sequence.layers) store.release_surplus(layer);
    store.upload_all(*sequence.last, sequence);
  }
  store.close_step();
}

}  // namespace kvzap
