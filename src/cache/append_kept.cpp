// Appends with known verdicts: the caller's flags select the rows of a prompt that stay.
#include "cache/cache_impl.hpp"

namespace kvzap {

using cache::AppendStep;
using cache::KeptPart;
using cache::RowMover;
using cache::ScoresRef;
using cache::SpanRows;

// An append_kept in phases, of at least one row and one head.
class KVCache::KeptAppend {
 public:
  KeptAppend(KVCache& cache, const ExecutionSpace& exec, Sequence& sequence, int layer,
             const ConstArrayView& keys, const ConstArrayView& values, const ScoresView& scores,
             const FlagsView& keep)
      : m_cache(cache),
        m_mover(cache::row_mover(cache.m_dtype, cache.m_shape.format)),
        m_exec(exec),
        m_sequence(sequence),
        m_layer_index(layer),
        m_layer(sequence.layers[layer]),
        m_heads(cache.m_shape.heads[layer]),
        m_keep(keep) {
    m_rows.step = cache.step_of(m_layer, layer, keys.extents[0]);
    // For the mover, all rows leave a ring that no row has entered.
    m_rows.step.leaving = m_rows.step.count;
    m_rows.keys = keys;
    m_rows.values = values;
    m_rows.scores = ScoresRef::of(scores, 0, cache::has_scores(scores));
  }

  AppendCounts run() {
    m_cache.settle(m_sequence);
    m_cache.enter(m_exec, m_sequence);
    PageLease lease(m_cache, m_layer_index);
    cache::or_out_of_memory("an append", 0, m_cache.m_pool, [&] {
      list();
      take_pages_for(lease);
    });
    for (int h = 0; h < m_heads; ++h) {
      m_cache.take_pages(m_exec, m_sequence, m_layer_index, h, m_kept.host_counts[h], lease, false);
      m_cache.write_entries(m_sequence, m_layer, h, 0);
    }
    m_cache.upload_table(m_exec, m_sequence, m_layer);
    m_mover.admit(m_exec, m_rows, m_kept, {m_layer.retained.data(), m_layer.device_retained.data()},
                  m_cache.pages_of(m_exec, m_sequence, m_layer));
    lease.commit();
    return record();
  }

 private:
  void list() {
    const std::int64_t rows = m_rows.step.count;
    cache::KeptRows& kept = m_cache.m_work->kept;
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
      const PageNeeds needs = m_cache.list_room(m_layer, h, m_kept.host_counts[h]);
      missing += needs.missing;
      longest = std::max(longest, needs.listed);
    }
    m_cache.widen_table(m_exec, m_sequence, longest);
    const std::size_t of_spare = std::min({pages_of_step(), missing, m_cache.m_spare_pages.size()});
    lease.take(m_exec, missing - of_spare, of_spare);
  }

  // Returns how many of the spare pages are for the layer. They suffice if all rows that can leave
  // the ring stay. If later rows of the step can leave the new ring, these pages have space for
  // them, too.
  std::size_t pages_of_step() const {
    if (!m_cache.uses_spare_pages(m_sequence)) return 0;
    const StepState& state = m_cache.m_step[m_sequence.step];
    return m_heads * m_cache.pages_for(m_cache.step_of(m_layer, m_layer_index, state.rows).leaving);
  }

  AppendCounts record() {
    m_layer.tokens = m_layer.ring_first = m_rows.step.count;
    AppendCounts counts;
    counts.judged = m_heads * m_rows.step.count;
    counts.evicted = counts.judged;
    counts.non_finite = *m_kept.host_non_finite;
    for (int h = 0; h < m_heads; ++h) {
      m_layer.retained(h) = m_kept.host_counts[h];
      counts.evicted -= m_kept.host_counts[h];
    }
    m_cache.upload_lengths(m_exec, m_layer);
    m_sequence.total.judged += counts.judged;
    m_sequence.total.evicted += counts.evicted;
    m_sequence.total.non_finite += counts.non_finite;
    return counts;
  }

  KVCache& m_cache;
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

AppendCounts KVCache::append_kept(const ExecutionSpace& exec, SequenceId id, int layer_index,
                                  const ConstArrayView& keys, const ConstArrayView& values,
                                  const ScoresView& scores, const FlagsView& keep) {
  const std::int64_t rows = keys.extents[0];
  const AppendSpan span{id, 0, rows, {}, cache::has_scores(scores)};
  check_layer(layer_index);
  check_pages(layer_index, "append_kept");
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
  return KeptAppend(*this, exec, sequence, layer_index, keys, values, scores, keep).run();
}

}  // namespace kvzap
