#include "engine/attention_spans.hpp"

#include <algorithm>

#include "cache/join_rows.hpp"
#include "model/step_block.hpp"

namespace kvzap::engine {
namespace {

/// Returns the layer as it is without its rows.
template <class Layer>
Layer without_rows(Layer layer) {
  layer.tokens = layer.ring_first = 0;  // the ring is all that such a layer has
  return layer;
}

}  // namespace

void AttentionSpans::reserve(const Step& step, std::int64_t row_values) {
  m_spans.reserve(step.spans().size());
  std::int64_t widest = 0;
  for (int l = 0; l < static_cast<int>(step.config.num_hidden_layers); ++l) {
    if (!step.is_pruned(l)) widest = std::max(widest, step.config.layer(l).window);
  }
  if (widest == 0) return;
  const std::int64_t block = model::block_tokens(step.config);
  std::int64_t rows = 0;
  for (std::size_t s = 0; s < step.spans().size(); ++s) {
    const std::int64_t count = step.spans()[s].count;
    const std::int64_t before = std::min(step.first_positions[s], widest - 1);
    if (count > 1 && before > 0) rows += before + std::min(count, block + widest);
  }
  m_rows.reserve(2 * rows * row_values, "kvzap::decoder::joined");
}

void AttentionSpans::release() {
  m_rows.release();
  m_keys = m_values = ArrayView();
}

void AttentionSpans::list(const Step& step, int layer, const RowRange& rows) {
  m_spans.clear();
  m_joined.clear();
  const int owner = step.rows_of(layer);
  if (!step.is_pruned(owner)) {
    return step.config.layer(layer).chunk > 0 ? list_chunks(step, layer, rows)
                                              : list_windows(step, layer, rows);
  }
  step.for_each_span(rows, [&](std::size_t s, std::int64_t begin, std::int64_t end) {
    const StepBatch::Span& span = step.spans()[s];
    if (step.runs_in_turn(span)) return;
    AttentionSpan whole{step.cache.layer(span.sequence, owner), begin - rows.begin, end - begin,
                        span.first, end - span.first};
    whole.read_pages = pages_of(step, span);
    if (m_shared && m_shared->is_split(step, s, layer)) {
      m_shared->push_split(m_spans, whole, layer);
    } else {
      m_spans.push_back(whole);
    }
  });
}

// The rest of a long span can be one token, too. A policy that observes weights needs those of all
// rows.
ReadPages AttentionSpans::pages_of(const Step& step, const StepBatch::Span& span) const {
  const bool observes = span.rule.policy && span.rule.policy->policy->needs().log_sum_exp;
  return (span.count == 1 || step.runs_in_turn(span)) && !observes ? m_read : ReadPages();
}

bool AttentionSpans::list_turn(const Step& step, int layer, const RowRange& rows,
                               std::int64_t turn) {
  m_spans.clear();
  m_joined.clear();
  step.for_each_span(rows, [&](std::size_t s, std::int64_t begin, std::int64_t end) {
    const StepBatch::Span& span = step.spans()[s];
    if (!step.runs_in_turn(span) || begin + turn >= end) return;
    m_spans.push_back(
        {step.cache.layer(span.sequence, layer), begin + turn - rows.begin, 1, begin + turn, 1});
    m_spans.back().read_pages = pages_of(step, span);
  });
  return !m_spans.empty();
}

// Every token sees the last `window` tokens. Attention takes such a window of new rows alone, so
// rows of the ring that only some tokens see are copied in front of the new ones.
void AttentionSpans::list_windows(const Step& step, int layer, const RowRange& rows) {
  const std::int64_t window = step.config.layer(layer).window;
  const std::int64_t heads = step.kv_heads(layer);
  const std::int64_t row_size = heads * step.head_dim(layer);
  const ArrayView keys = step.new_keys(layer);
  const ArrayView values = step.new_values(layer);
  const std::int64_t capacity = row_size > 0 ? m_rows.capacity() / (2 * row_size) : 0;
  m_keys = m_rows.array(capacity, heads, keys.extents[2]);
  m_values = m_rows.array(capacity, heads, keys.extents[2], capacity * row_size);
  std::int64_t joined = 0;
  step.for_each_span(rows, [&](std::size_t s, std::int64_t begin, std::int64_t end) {
    const StepBatch::Span& span = step.spans()[s];
    const auto cached = step.cache.layer(span.sequence, step.rows_of(layer));
    const std::int64_t first_new = step.first_positions[s];  // position of row span.first
    const std::int64_t last = first_new + end - 1 - span.first;
    const std::int64_t oldest =
        std::max<std::int64_t>(0, first_new + begin - span.first - (window - 1));
    const std::int64_t first_in_ring = first_new - cached.ring_rows();
    AttentionSpan part;
    part.first_query = begin - rows.begin;
    part.queries = end - begin;
    if (std::max<std::int64_t>(0, last - (window - 1)) <= first_in_ring) {
      part.cached = cached;  // all tokens see the whole ring
      part.first_new = span.first;
      part.new_rows = end - span.first;
      m_spans.push_back(part);
      return;
    }
    part.cached = without_rows(cached);
    part.new_rows = last - oldest + 1;
    if (part.queries > 1 && part.new_rows > window) part.window = window;
    if (oldest >= first_new) {
      part.first_new = span.first + oldest - first_new;
      m_spans.push_back(part);
      return;
    }
    part.first_new = joined;
    const std::int64_t count = end - span.first;
    cache::join_rows(step.exec, cached, oldest, keys.rows(span.first, count),
                     values.rows(span.first, count), m_keys.rows_from(joined),
                     m_values.rows_from(joined));
    joined += part.new_rows;
    m_joined.push_back(part);
  });
}

// A token sees no token before its chunk, so a span has a part for each chunk.
void AttentionSpans::list_chunks(const Step& step, int layer, const RowRange& rows) {
  const std::int64_t chunk = step.config.layer(layer).chunk;
  step.for_each_span(rows, [&](std::size_t s, std::int64_t begin, std::int64_t end) {
    const StepBatch::Span& span = step.spans()[s];
    const auto cached = step.cache.layer(span.sequence, step.rows_of(layer));
    const std::int64_t shift = step.first_positions[s] - span.first;  // from rows to positions
    while (begin < end) {
      const std::int64_t first = (begin + shift) / chunk * chunk - shift;  // row; may be cached
      const std::int64_t stop = std::min(end, first + chunk);
      AttentionSpan part;
      part.cached = first < span.first ? cached : without_rows(cached);
      part.first_query = begin - rows.begin;
      part.queries = stop - begin;
      part.first_new = std::max(first, span.first);
      part.new_rows = stop - part.first_new;
      m_spans.push_back(part);
      begin = stop;
    }
  });
}

}  // namespace kvzap::engine
