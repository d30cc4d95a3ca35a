// Appends with known verdicts: the caller's flags select the rows of a prompt that stay.
#include "cache/cache_impl.hpp"

namespace kvzap::cache {
namespace {

// An append_kept in phases, of at least one row and one head.
class KeptAppend {
 public:
  KeptAppend(Store& store, const ExecutionSpace& exec, Sequence& sequence, int layer,
             const NewPairs& pairs, const FlagsView& keep)
      : m_store(store),
        m_mover(row_mover(store.dtype, store.shape.format)),
        m_exec(exec),
        m_sequence(sequence),
        m_layer_index(layer),
        m_layer(sequence.layers[layer]),
        m_heads(store.shape.heads[layer]),
        m_keep(keep) {
    m_rows.step = store.step_of(m_layer, layer, pairs.keys.extents[0]);
    // For the mover, all rows leave a ring that no row has entered.
    m_rows.step.leaving = m_rows.step.count;
    m_rows.keys = pairs.keys;
    m_rows.values = pairs.values;
    m_rows.scores = ScoresRef::of(pairs.scores, 0, has_scores(pairs.scores));
  }

  AppendCounts run() {
    m_store.settle(m_sequence);
    m_store.enter(m_exec, m_sequence);
    PageLease lease(m_store, m_layer_index);
    or_out_of_memory("an append", 0, m_store.pool, [&] {
      list();
      take_pages_for(lease);
    });
    for (int h = 0; h < m_heads; ++h) {
      m_store.take_pages(m_exec, m_sequence, m_layer_index, h, m_kept.host_counts[h], lease, false);
      m_store.write_entries(m_sequence, m_layer, h, 0);
    }
    m_store.upload_table(m_exec, m_sequence, m_layer);
    m_mover.admit(m_exec, m_rows, m_kept, {m_layer.retained.data(), m_layer.device_retained.data()},
                  m_store.pages_of(m_exec, m_sequence, m_layer));
    lease.commit();
    return record();
  }

 private:
  void list() {
    const std::int64_t rows = m_rows.step.count;
    KeptRows& kept = m_store.work.kept;
    kept.reserve(m_heads * rows, std::int64_t{m_heads} + 1);
    m_kept = kept.part(0, m_heads, 0, rows, m_heads);
    m_mover.select(m_exec, m_keep, {}, m_kept);
    m_mover.count_non_finite(m_exec, m_rows.scores, m_kept);
    if (m_mover.runs_kernels()) {
      kept.fetch(m_exec, "kvzap::append_kept: the kept rows decide how many pages it takes");
    }
  }

  void take_pages_for(PageLease& lease) {
    std::size_t missing = 0;
    std::size_t longest = 0;
    for (int h = 0; h < m_heads; ++h) {
      const PageNeeds needs = m_store.list_room(m_layer, h, m_kept.host_counts[h]);
      missing += needs.missing;
      longest = std::max(longest, needs.listed);
    }
    m_store.widen_table(m_exec, m_sequence, longest);
    const std::size_t of_spare = std::min({pages_of_step(), missing, m_store.spare_pages.size()});
    lease.take(m_exec, missing - of_spare, of_spare);
  }

  // Returns how many of the spare pages are for the layer. They suffice if all rows that can leave
  // the ring stay. If later rows of the step can leave the new ring, these pages have space for
  // them, too.
  std::size_t pages_of_step() const {
    if (!m_store.uses_spare_pages(m_sequence)) return 0;
    const StepState& state = m_store.step_states[m_sequence.step];
    return m_heads * m_store.pages_for(m_store.step_of(m_layer, m_layer_index, state.rows).leaving);
  }

  AppendCounts record() {
    m_layer.tokens = m_layer.ring_first = m_rows.step.count;
    AppendCounts counts;
    counts.judged = m_heads * m_rows.step.count;
    counts.evicted = counts.judged;
    counts.non_finite = *m_kept.host_non_finite;
    for (int h = 0; h < m_heads; ++h) {
      m_layer.keep_bounds(h, 0);
      m_layer.retained(h) = m_kept.host_counts[h];
      counts.evicted -= m_kept.host_counts[h];
    }
    m_store.upload_lengths(m_exec, m_layer);
    m_sequence.total.judged += counts.judged;
    m_sequence.total.evicted += counts.evicted;
    m_sequence.total.non_finite += counts.non_finite;
    return counts;
  }

  Store& m_store;
  const RowMover& m_mover;
  const ExecutionSpace& m_exec;
  Sequence& m_sequence;
  int m_layer_index;
  LayerStore& m_layer;
  int m_heads;
  const FlagsView& m_keep;
  SpanRows m_rows;
  KeptPart m_kept = {};
};

}  // namespace

}  // namespace kvzap::cache

namespace kvzap {

AppendCounts KVCache::append_kept(const ExecutionSpace& exec, SequenceId id, int layer_index,
                                  const ConstArrayView& keys, const ConstArrayView& values,
                                  const ScoresView& scores, const FlagsView& keep) {
  cache::Store& store = *m_store;
  const std::int64_t rows = keys.extents[0];
  const AppendSpan span{id, 0, rows, {}, cache::has_scores(scores)};
  store.check_layer(layer_index);
  store.check_pages(layer_index, "append_kept");
  store.check_spans(&span, 1, layer_index, {keys, values, scores});
  const int heads = store.shape.heads[layer_index];
  if (static_cast<int>(keep.extent(0)) != heads ||
      (heads > 0 && static_cast<std::int64_t>(keep.extent(1)) != rows)) {
    throw Error(fmt::format("cache append_kept: keep is ({}, {}); expected ({}, {}) = (head, row)",
                            keep.extent(0), keep.extent(1), heads, rows));
  }
  cache::Sequence& sequence = store.sequence_at(id);
  cache::LayerStore& layer = sequence.layers[layer_index];
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
  return cache::KeptAppend(store, exec, sequence, layer_index, {keys, values, scores}, keep).run();
}

}  // namespace kvzap
