#include "base/machine.hpp"
#include "engine/decoder_shared.hpp"
#include "engine/delta_net.hpp"
#include "model/model_weights.hpp"
#include "model/step_block.hpp"

namespace kvzap {
namespace {

using engine::is_scored;
using model::block_tokens;

std::int64_t next_power_of_two(std::int64_t count) {
  std::int64_t power = 1;
  while (power < count) power *= 2;
  return power;
}

}  // namespace

// Reserves the memory of this step, except scratch space of products and the kept rows of long
// spans.
void Decoder::reserve(const StepBatch& batch) {
  begin_policies(batch);
  plan(batch);
  reserve_layers(batch);
  plan_shared(batch, std::min<std::int64_t>(batch.tokens().size(), block_tokens(m_model.config())));
  reserve_outputs();
  if (std::any_of(batch.spans().begin(), batch.spans().end(),
                  [](const StepBatch::Span& span) { return span.rule.score; })) {
    m_scorer->reserve(
        std::min<std::int64_t>(batch.tokens().size(), block_tokens(m_model.config())));
  }
  const auto& heads = m_cache.shape().heads;
  const int most = std::max(*std::max_element(heads.begin(), heads.end()), most_remote_heads());
  AttentionExtents extents = attention_extents(batch, most);
  if (m_shared && !m_shared->split_spans.empty()) extents.spans *= 3;  // the parts of push_split
  m_attention.reserve(extents, m_attention_path);
}

// Lists what the step appends and which rows give outputs.
void Decoder::plan(const StepBatch& batch) {
  Scratch& scratch = *m_scratch;
  const auto n_spans = static_cast<std::int64_t>(batch.spans().size());
  const auto count = static_cast<std::int64_t>(batch.tokens().size());
  scratch.scores = std::any_of(batch.spans().begin(), batch.spans().end(),
                               [](const StepBatch::Span& span) { return is_scored(span.rule); });
  // A decode step on a device waits only once, at its end.
  scratch.deferred = count == n_spans && base::machine().on_device() && !m_policies->any;
  scratch.attention_spans.reserve(n_spans);
  scratch.append_spans.clear();
  scratch.ring_spans.clear();
  scratch.sequences.clear();
  scratch.first_positions.clear();
  for (const StepBatch::Span& span : batch.spans()) {
    scratch.append_spans.push_back(
        {span.sequence, span.first, span.count, span.rule.eviction, is_scored(span.rule)});
    scratch.ring_spans.push_back({span.sequence, span.first, span.count, {}, false});
    scratch.sequences.push_back(span.sequence);
    scratch.first_positions.push_back(m_cache.tokens(span.sequence, 0));
  }
  scratch.output_spans.clear();
  scratch.output_rows.clear();
  for (const bool by_logits : {false, true}) {
    for (std::int64_t s = 0; s < n_spans; ++s) {
      const StepBatch::Span& span = batch.spans()[s];
      if (span.output == StepOutput::none) continue;
      if ((span.output != StepOutput::argmax) != by_logits) continue;
      const std::int64_t end = span.first + span.count;
      const bool is_each = span.output == StepOutput::all_logits;
      for (std::int64_t row = is_each ? span.first : end - 1; row < end; ++row) {
        scratch.output_spans.push_back(s);
        scratch.output_rows.push_back(row);
      }
    }
    if (!by_logits) scratch.n_argmax = scratch.output_rows.size();
  }
  scratch.results.clear();
  scratch.results.resize(n_spans);
}

// Reserves the buffers that blocks of tokens pass through, layer after layer.
void Decoder::reserve_layers(const StepBatch& batch) {
  Scratch& scratch = *m_scratch;
  const ModelConfig& config = m_model.config();
  const std::int64_t count = batch.tokens().size();
  const std::int64_t hidden = config.hidden_size;
  const std::int64_t dim = config.head_dim;
  const std::int64_t m = std::min(count, block_tokens(config));
  const std::int64_t outputs = scratch.output_rows.size();
  const auto& weights = m_model.weights();
  std::int64_t kv_heads = 0, projected = 0, attended = 0, gates = 0, rates = 0;
  for (int l = 0; l < static_cast<int>(config.num_hidden_layers); ++l) {
    const std::int64_t own = m_cache.shape().heads[l];
    std::int64_t gate_up = weights.layers[l].dense.gate_up.outputs();
    if (!weights.layers[l].experts.empty()) {
      gate_up = std::max(gate_up, weights.layers[l].experts.front().gate_up.outputs());
    }
    if (m_cache.shape().has_state(l)) {
      const engine::DeltaNet net{*config.delta_net, m_cache.shape().states[l].heads};
      attended = std::max(attended, net.values());
      projected = std::max(projected, net.columns());
      rates = std::max(rates, net.rates());
    }
    if (config.gates_attention && weights.are_here()) {
      gates = std::max(gates, own * config.query_group() * dim);
    }
    kv_heads = std::max(kv_heads, own);
    attended = std::max(attended, own * config.query_group() * dim);
    projected = std::max({projected, own * (config.query_group() + 2) * dim, gate_up / 2});
    gates = std::max(gates, gate_up);
  }
  // The output head uses these buffers after the last layer.
  projected = std::max(m * projected, outputs * weights.output_head.outputs());
  attended = std::max(m * attended, outputs * hidden);
  // Layers of a model without weights run elsewhere, with a residual stream and angles of their
  // own.
  const std::int64_t streamed = weights.are_here() ? count : 0;
  scratch.reserve(Scratch::residual, streamed * hidden);
  scratch.reserve(Scratch::normed, m * hidden);
  scratch.reserve(Scratch::projected, projected);
  scratch.reserve(Scratch::attended, attended);
  scratch.reserve(Scratch::gates, m * gates);
  scratch.reserve(Scratch::delta_rates, m * rates);
  scratch.reserve(Scratch::squares, 2 * m);
  if (config.attention_multiplier || config.query_scaling) {
    scratch.reserve(Scratch::query_scales, count);
  }
  if (config.has_sinks) scratch.reserve(Scratch::log_sums, m * kv_heads * config.query_group());
  if (config.is_parallel) scratch.reserve(Scratch::beside, m * hidden);
  if (config.experts) reserve_experts(m);
  scratch.reserve_new_rows(count * kv_heads * dim, scratch.scores ? count * kv_heads : 0, m_meter);
  reserve_joined(batch, kv_heads);
  scratch.exchange.reserve(m_comm, count * hidden, 0);
  base::reserve_scratch(scratch.ids, count, "kvzap::decoder::ids");
  base::reserve_scratch(scratch.positions, count, "kvzap::decoder::positions");
  if (config.rope_depends_on_length()) {
    base::reserve_scratch(scratch.tables, count, "kvzap::decoder::tables");
  }
  const auto reserve_angles = [&](auto& angles) {
    if (static_cast<std::int64_t>(angles.extent(0)) >= streamed) return;
    using Angles = std::decay_t<decltype(angles)>;
    angles = Angles();
    angles = Angles(Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::decoder::angles"),
                    streamed, dim / 2, 2);
  };
  reserve_angles(scratch.angles);
  if (config.window_rope_theta) reserve_angles(scratch.window_angles);
}

void Decoder::reserve_experts(std::int64_t tokens) {
  Scratch& scratch = *m_scratch;
  scratch.routes.reserve(*m_model.config().experts, tokens);
  for (const auto buffer : {Scratch::routed, Scratch::expert_inputs, Scratch::expert_outputs}) {
    scratch.reserve(buffer, tokens * m_model.config().hidden_size);
  }
}

// Reserves the buffers of tokens and logits.
void Decoder::reserve_outputs() {
  Scratch& scratch = *m_scratch;
  const std::int64_t hidden = m_model.config().hidden_size;
  const std::int64_t vocabulary = m_model.config().vocab_size;
  const std::int64_t outputs = scratch.output_rows.size();
  const std::int64_t n_logits = outputs - scratch.n_argmax;
  if (!outputs_lie_together()) {
    scratch.reserve(Scratch::last_rows, outputs * hidden);
    scratch.reserve(Scratch::last_added, outputs * hidden);
    base::reserve_scratch(scratch.device_rows, outputs, "kvzap::decoder::output_rows");
  }
  base::reserve_scratch(scratch.argmax, scratch.n_argmax, "kvzap::decoder::argmax");
  scratch.argmax_keys.resize(scratch.n_argmax + 1);
  scratch.local_logits.resize(n_logits * m_model.weights().output_head.outputs());
  if (m_comm.is_root()) {
    scratch.gathered_logits.resize(m_comm.size() > 1 ? n_logits * vocabulary : 0);
  }
  scratch.logit_counts.resize(m_comm.size());
  for (int r = 0; r < m_comm.size(); ++r) {
    const auto [begin, end] = even_range(vocabulary, m_comm.size(), r);
    scratch.logit_counts[r] = n_logits * (end - begin);
  }
  for (std::int64_t o = scratch.n_argmax, end = o; o < outputs && m_comm.is_root(); o = end) {
    const std::int64_t span = scratch.output_spans[o];
    while (end < outputs && scratch.output_spans[end] == span) ++end;
    scratch.results[span].logits.resize((end - o) * vocabulary);
  }
}

// Bounds the extents of this step's calls of attention, as if no row had been evicted.
AttentionExtents Decoder::attention_extents(const StepBatch& batch, int kv_heads) const {
  const ModelConfig& config = m_model.config();
  AttentionExtents extents;
  extents.kv_heads = kv_heads;
  extents.group = static_cast<int>(config.query_group());
  extents.head_dim = static_cast<int>(config.head_dim);
  extents.format = m_cache.shape().format;
  extents.spans = batch.spans().size();
  extents.tokens = std::min<std::int64_t>(batch.tokens().size(), block_tokens(config));
  std::int64_t all = 0;
  for (const StepBatch::Span& span : batch.spans()) {
    const std::int64_t rows = m_cache.tokens(span.sequence, 0) + span.count;
    all += rows;
    extents.longest_single = std::max(extents.longest_single, rows);
  }
  // Powers of two, so that scratch space grows rarely.
  extents.longest_single = next_power_of_two(extents.longest_single);
  extents.single_rows = kv_heads * next_power_of_two(all);
  return extents;
}

// Whether the rows of the outputs are consecutive, as with one span or with single tokens.
bool Decoder::outputs_lie_together() const {
  const auto& rows = m_scratch->output_rows;
  for (std::size_t i = 1; i < rows.size(); ++i) {
    if (rows[i] != rows[0] + static_cast<std::int64_t>(i)) return false;
  }
  return true;
}

void Decoder::begin_cache_step(const StepBatch& batch) {
  std::vector<StepSpan> spans;
  spans.reserve(batch.spans().size());
  for (const StepBatch::Span& span : batch.spans()) spans.push_back({span.sequence, span.count});
  m_cache.begin_step(m_scratch->exec, spans);
}

}  // namespace kvzap
