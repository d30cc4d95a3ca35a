// Which rows the tokens of a block see: cached rows, and new rows up to their own.
#include <algorithm>

#include "cache/join_rows.hpp"
#include "engine/decoder_state.hpp"
#include "model/step_block.hpp"

namespace kvzap {
namespace {

/// Returns the layer as it is without its rows.
template <class Layer>
Layer without_rows(Layer layer) {
  layer.tokens = layer.ring_first = 0;  // the ring is all that such a layer has
  return layer;
}

}  // namespace

// Reserves the rows that the windows of a block see, for sequences that have rows in rings.
void Decoder::reserve_joined(const StepBatch& batch, std::int64_t kv_heads) {
  const std::int64_t block = model::block_tokens(m_model.config());
  std::int64_t widest = 0;
  for (std::int64_t l = 0; l < m_model.config().num_hidden_layers; ++l) {
    if (!is_pruned(static_cast<int>(l))) {
      widest = std::max(widest, m_model.config().layer(l).window);
    }
  }
  if (widest == 0) return;
  std::int64_t rows = 0;
  for (std::size_t s = 0; s < batch.spans().size(); ++s) {
    const std::int64_t count = batch.spans()[s].count;
    const std::int64_t before = std::min(m_scratch->first_positions[s], widest - 1);
    if (count > 1 && before > 0) rows += before + std::min(count, block + widest);
  }
  m_scratch->joined.reserve(2 * rows * kv_heads * m_model.config().head_dim,
                            "kvzap::decoder::joined");
}

void Decoder::list_spans(const StepBatch& batch, int layer, const Rows& rows) {
  Scratch& scratch = *m_scratch;
  scratch.attention_spans.clear();
  scratch.joined_spans.clear();
  if (!is_pruned(layer)) {
    return m_model.config().layer(layer).chunk > 0 ? list_chunk_spans(batch, layer, rows)
                                                   : list_window_spans(batch, layer, rows);
  }
  for_each_span(batch, rows, [&](std::size_t s, std::int64_t begin, std::int64_t end) {
    const StepBatch::Span& span = batch.spans()[s];
    const AttentionSpan whole{m_cache.layer(span.sequence, layer), begin - rows.begin, end - begin,
                              span.first, end - span.first};
    if (is_split(s, layer)) {
      push_split(scratch.attention_spans, whole, layer);
    } else {
      scratch.attention_spans.push_back(whole);
    }
  });
}

// Every token sees the last `window` tokens. Attention takes such a window of new rows alone, so
// rows of the ring that only some tokens see are copied in front of the new ones.
void Decoder::list_window_spans(const StepBatch& batch, int layer, const Rows& rows) {
  Scratch& scratch = *m_scratch;
  const std::int64_t window = m_model.config().layer(layer).window;
  const std::int64_t heads = m_cache.shape().heads[layer];
  const std::int64_t row_size = heads * m_model.config().head_dim;
  const ArrayView keys = new_rows(scratch.new_keys, batch, layer);
  const ArrayView values = new_rows(scratch.new_values, batch, layer);
  const std::int64_t capacity = row_size > 0 ? scratch.joined.capacity() / (2 * row_size) : 0;
  scratch.joined_keys = scratch.joined.array(capacity, heads, keys.extents[2]);
  scratch.joined_values =
      scratch.joined.array(capacity, heads, keys.extents[2], capacity * row_size);
  std::int64_t joined = 0;
  for_each_span(batch, rows, [&](std::size_t s, std::int64_t begin, std::int64_t end) {
    const StepBatch::Span& span = batch.spans()[s];
    const auto cached = m_cache.layer(span.sequence, layer);
    const std::int64_t first_new = scratch.first_positions[s];  // position of row span.first
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
      scratch.attention_spans.push_back(part);
      return;
    }
    part.cached = without_rows(cached);
    part.new_rows = last - oldest + 1;
    if (part.queries > 1 && part.new_rows > window) part.window = window;
    if (oldest >= first_new) {
      part.first_new = span.first + oldest - first_new;
      scratch.attention_spans.push_back(part);
      return;
    }
    part.first_new = joined;
    cache::join_rows(scratch.exec, cached, oldest, keys, values, span.first, end - span.first,
                     scratch.joined_keys, scratch.joined_values, joined);
    joined += part.new_rows;
    scratch.joined_spans.push_back(part);
  });
}

// A token sees no token before its chunk, so a span has a part for each chunk.
void Decoder::list_chunk_spans(const StepBatch& batch, int layer, const Rows& rows) {
  Scratch& scratch = *m_scratch;
  const std::int64_t chunk = m_model.config().layer(layer).chunk;
  for_each_span(batch, rows, [&](std::size_t s, std::int64_t begin, std::int64_t end) {
    const StepBatch::Span& span = batch.spans()[s];
    const auto cached = m_cache.layer(span.sequence, layer);
    const std::int64_t shift = scratch.first_positions[s] - span.first;  // from rows to positions
    while (begin < end) {
      const std::int64_t first = (begin + shift) / chunk * chunk - shift;  // row; may be cached
      const std::int64_t stop = std::min(end, first + chunk);
      AttentionSpan part;
      part.cached = first < span.first ? cached : without_rows(cached);
      part.first_query = begin - rows.begin;
      part.queries = stop - begin;
      part.first_new = std::max(first, span.first);
      part.new_rows = stop - part.first_new;
      scratch.attention_spans.push_back(part);
      begin = stop;
    }
  });
}

}  // namespace kvzap
