// Appends that wait for their verdicts: judge rows, take pages, move kept rows, fill the ring.
#include "cache/cache_impl.hpp"

namespace kvzap::cache {
namespace {

void check_rows(const Store& store, int layer, const NewPairs& pairs) {
  if (!store.shape.has_rows(layer)) {
    throw Error(fmt::format("cache append: layer {} takes no rows", layer));
  }
  const int heads = store.shape.heads[layer];
  const int dim = store.shape.dim(layer);
  const std::int64_t count = pairs.keys.extents[0];
  for (const ConstArrayView* view : {&pairs.keys, &pairs.values}) {
    if (view->dtype != store.dtype) {
      throw Error(fmt::format("cache append: keys or values are {}; expected {}, the cache's type",
                              name_of(view->dtype), name_of(store.dtype)));
    }
    if (view->extents != std::array<std::int64_t, 3>{count, heads, dim}) {
      throw Error(
          fmt::format("cache append: keys or values are ({}, {}, {}); expected ({}, {}, {}) = "
                      "(token, head, dim)",
                      view->extents[0], view->extents[1], view->extents[2], count, heads, dim));
    }
  }
}

// An append in phases. It takes the memory for all spans before it changes anything. After that
// nothing fails on hosts; on devices the launch of a kernel can fail.
class Append {
 public:
  Append(Store& store, const ExecutionSpace& exec, const AppendSpan* spans, std::size_t n,
         int layer, const NewPairs& pairs)
      : m_store(store),
        m_work(store.work),
        m_mover(row_mover(store.dtype, store.shape.format)),
        m_exec(exec),
        m_spans(spans),
        m_n(n),
        m_layer(layer),
        m_heads(store.shape.heads[layer]),
        m_has_pages(store.shape.has_pages(layer)),
        m_pairs(pairs) {}

  AppendCounts run() {
    for (std::size_t i = 0; i < m_n; ++i) {
      m_store.settle(sequence(i));
      m_store.enter(m_exec, sequence(i));
    }
    or_out_of_memory("an append", 0, m_store.pool, [&] { list_steps(); });
    if (m_leaving > 0) judge();
    PageLease lease(m_store, m_layer);
    if (m_leaving > 0) {
      or_out_of_memory("an append", 0, m_store.pool, [&] { take_pages_for(lease); });
    }
    admit(lease);
    // Changes lengths last, after all operations that can fail on hosts.
    for (std::size_t i = 0; i < m_n; ++i) {
      if (moves(i)) m_mover.fill_ring(m_exec, rows_of(i));
    }
    lease.commit();
    return record();
  }

 private:
  Sequence& sequence(std::size_t span) const { return *m_work.called[span]; }
  LayerStore& layer(std::size_t span) const { return sequence(span).layers[m_layer]; }
  const AppendStep& step(std::size_t span) const { return m_work.append_steps[span]; }
  bool moves(std::size_t span) const { return m_heads > 0 && step(span).count > 0; }

  SpanRows rows_of(std::size_t i) const {
    const AppendSpan& span = m_spans[i];
    return {step(i),
            {layer(i).ring.data(), layer(i).ring_scores.data()},
            m_pairs.keys.rows_from(span.first_row),
            m_pairs.values.rows_from(span.first_row),
            ScoresRef::of(m_pairs.scores, span.first_row, span.scored)};
  }
  // The lists have an entry for each head of each span, then a sum for each span.
  KeptPart kept_of(std::size_t i, std::int64_t first_row) const {
    const auto span = static_cast<std::int64_t>(i);
    return m_work.kept.part(span * m_heads, m_heads, first_row, step(i).leaving,
                            static_cast<std::int64_t>(m_n) * m_heads + span);
  }

  void list_steps() {
    m_work.append_steps.clear();
    base::reserve_room(m_work.append_steps, m_n);
    for (std::size_t i = 0; i < m_n; ++i) {
      m_work.append_steps.push_back(m_store.step_of(layer(i), m_layer, m_spans[i].rows));
      if (m_has_pages) m_leaving += step(i).leaving * m_heads;
    }
    if (m_leaving > 0)
      m_work.kept.reserve(m_leaving, static_cast<std::int64_t>(m_n) * (m_heads + 1));
  }

  void judge() {
    std::int64_t first_row = 0;
    for (std::size_t i = 0; i < m_n; ++i) {
      m_mover.judge(m_exec, rows_of(i), m_spans[i].rule, kept_of(i, first_row));
      first_row += m_heads * step(i).leaving;
    }
    if (m_mover.runs_kernels()) {
      m_work.kept.fetch(m_exec, "kvzap::append: the kept rows decide how many pages it takes");
    }
  }

  void take_pages_for(PageLease& lease) {
    std::size_t missing = 0;
    for (std::size_t i = 0; i < m_n; ++i) {
      if (m_store.uses_spare_pages(sequence(i))) continue;
      const KeptPart kept = kept_of(i, 0);
      std::size_t longest = 0;
      for (int h = 0; h < m_heads; ++h) {
        if (kept.host_counts[h] == 0) continue;
        const PageNeeds needs = m_store.list_room(layer(i), h, kept.host_counts[h]);
        missing += needs.missing;
        longest = std::max(longest, needs.listed);
      }
      m_store.widen_table(m_exec, sequence(i), longest);
    }
    lease.take(m_exec, missing);
  }

  // Kept rows move into their pages; dropped rows are never touched.
  void admit(PageLease& lease) {
    std::int64_t first_row = 0;
    for (std::size_t i = 0; i < m_n; ++i) {
      if (!moves(i)) continue;
      if (sequence(i).step >= 0) save(i);
      if (m_has_pages && step(i).leaving > 0) {
        const KeptPart kept = kept_of(i, first_row);
        bool any = false;
        for (int h = 0; h < m_heads; ++h) {
          if (kept.host_counts[h] == 0) continue;
          any = true;
          m_store.take_pages(m_exec, sequence(i), m_layer, h, kept.host_counts[h], lease,
                             m_store.uses_spare_pages(sequence(i)));
          m_store.write_entries(sequence(i), layer(i), h,
                                layer(i).retained(h) / m_store.shape.page_rows);
        }
        const SpanRows rows = rows_of(i);
        if (any) {
          m_store.upload_table(m_exec, sequence(i), layer(i));
          m_mover.admit(m_exec, rows, kept,
                        {layer(i).retained.data(), layer(i).device_retained.data()},
                        m_store.pages_of(m_exec, sequence(i), layer(i)));
        }
      }
      first_row += m_heads * step(i).leaving;
    }
  }

  // Within a step: copies the rows that the new ones overwrite, for cancel_step.
  void save(std::size_t i) {
    const SavedRange range = m_store.saved_range(sequence(i), layer(i), m_layer, m_spans[i].rows);
    if (range.count == 0) return;
    SpanRows rows = rows_of(i);
    const StepState& state = m_store.step_states[sequence(i).step];
    rows.step.first = range.first;
    rows.step.ring_first = state.ring_first[m_layer];  // that of the saved rows
    m_mover.save(m_exec, rows,
                 {m_store.saved.data() + range.byte, m_store.saved_scores.data() + range.row,
                  state.saved_rows, range.count},
                 false);
  }

  AppendCounts record() {
    AppendCounts sum;
    for (std::size_t i = 0; i < m_n; ++i) {
      layer(i).add_tokens(step(i).count);
      if (step(i).leaving == 0 || m_heads == 0 || !m_has_pages) continue;
      const KeptPart kept = kept_of(i, 0);
      std::int64_t n_kept = 0;
      for (int h = 0; h < m_heads; ++h) {
        layer(i).keep_bounds(h, layer(i).retained(h) / m_store.shape.page_rows);
        layer(i).retained(h) += kept.host_counts[h];
        n_kept += kept.host_counts[h];
      }
      if (n_kept > 0) m_store.upload_lengths(m_exec, layer(i));
      if (!m_spans[i].rule.judges()) continue;
      if (sequence(i).step >= 0) m_store.step_states[sequence(i).step].judges[m_layer] = true;
      const std::int64_t judged = m_heads * step(i).leaving;
      for (AppendCounts* counts : {&sum, &sequence(i).total}) {
        counts->judged += judged;
        counts->evicted += judged - n_kept;
        counts->non_finite += *kept.host_non_finite;
      }
    }
    return sum;
  }

  Store& m_store;
  Workspace& m_work;
  const RowMover& m_mover;
  const ExecutionSpace& m_exec;
  const AppendSpan* m_spans;
  std::size_t m_n;
  int m_layer;
  int m_heads;
  bool m_has_pages;
  const NewPairs& m_pairs;
  std::int64_t m_leaving = 0;  // of all heads of all spans
};

}  // namespace

// Notes the sequences of the spans in `called`. Throws Error if spans do not fit the extents of the
// rows, each other, or the step, or if positions would overflow.
void Store::check_spans(const AppendSpan* spans, std::size_t n, int layer_index,
                        const NewPairs& pairs) {
  const KVCache::ScoresView& scores = pairs.scores;
  std::vector<Sequence*>& called = work.called;
  called.clear();
  if (n == 0) return;
  or_out_of_memory("an append", 0, pool, [&] { base::reserve_room(called, n); });
  check_layer(layer_index);
  check_rows(*this, layer_index, pairs);
  const int heads = shape.heads[layer_index];
  const std::int64_t count = pairs.keys.extents[0];
  if (has_scores(scores) && (static_cast<int>(scores.extent(0)) != heads ||
                             static_cast<std::int64_t>(scores.extent(1)) != count)) {
    throw Error(fmt::format("cache append: scores are ({}, {}); expected ({}, {}) = (head, token)",
                            scores.extent(0), scores.extent(1), heads, count));
  }
  ++calls;
  for (std::size_t i = 0; i < n; ++i) {
    const AppendSpan& span = spans[i];
    Sequence& sequence = sequence_at(span.sequence);
    called.push_back(&sequence);
    const LayerStore& layer = sequence.layers[layer_index];
    if (sequence.call == calls) {
      throw Error(fmt::format("cache append: sequence {} twice in one call", span.sequence));
    }
    sequence.call = calls;
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
    const StepState& state = step_states[sequence.step];
    if (layer.tokens + span.rows > state.tokens[layer_index] + state.rows) {
      throw Error(fmt::format("cache append: sequence {} gets {} tokens in a step begun with {}",
                              span.sequence, layer.tokens + span.rows - state.tokens[layer_index],
                              state.rows));
    }
  }
}

AppendStep Store::step_of(const LayerStore& layer, int layer_index, std::int64_t rows) const {
  AppendStep step;
  step.heads = shape.heads[layer_index];
  step.dim = shape.dim(layer_index);
  step.vectors = shape.format.vectors();
  step.window = layer.window;
  step.page_rows = shape.page_rows;
  step.count = rows;
  step.old_tokens = layer.tokens;
  step.ring_first = layer.ring_first;
  step.in_ring = layer.in_ring();
  step.first = step.old_tokens - step.in_ring;
  step.leaving = std::max<std::int64_t>(0, step.in_ring + rows - layer.window);
  return step;
}

// Returns which rows that the ring had before the step `rows` more tokens overwrite. A ring that
// begins anew keeps its slots: position p has slot p % window.
SavedRange Store::saved_range(const Sequence& sequence, const LayerStore& layer, int layer_index,
                              std::int64_t rows) const {
  const StepState& state = step_states[sequence.step];
  const std::int64_t old_tokens = state.tokens[layer_index];
  const std::int64_t oldest =
      std::max<std::int64_t>(state.ring_first[layer_index], old_tokens - layer.window);
  SavedRange range;
  range.first = std::max<std::int64_t>(oldest, layer.tokens - layer.window);
  range.count = std::max<std::int64_t>(
      0, std::min<std::int64_t>(old_tokens, layer.tokens + rows - layer.window) - range.first);
  range.row = state.first_saved + layer.first_head * state.saved_rows;
  range.byte =
      range.row * most_pair_bytes() + (range.first - oldest) * pair_bytes(shape.dim(layer_index));
  range.row += range.first - oldest;
  return range;
}

}  // namespace kvzap::cache

namespace kvzap {

using cache::has_scores;

AppendCounts KVCache::append(const ExecutionSpace& exec, const std::vector<AppendSpan>& spans,
                             int layer, const ConstArrayView& keys, const ConstArrayView& values,
                             const ScoresView& scores) {
  m_store->check_spans(spans.data(), spans.size(), layer, {keys, values, scores});
  if (spans.empty()) return {};
  return cache::Append(*m_store, exec, spans.data(), spans.size(), layer, {keys, values, scores})
      .run();
}

AppendCounts KVCache::append(const ExecutionSpace& exec, SequenceId sequence, int layer,
                             const ConstArrayView& keys, const ConstArrayView& values,
                             const ScoresView& scores, const EvictionRule& rule) {
  const AppendSpan span{sequence, 0, keys.extents[0], rule, has_scores(scores)};
  m_store->check_spans(&span, 1, layer, {keys, values, scores});
  return cache::Append(*m_store, exec, &span, 1, layer, {keys, values, scores}).run();
}

}  // namespace kvzap
