#include "engine/attention_block.hpp"

namespace kvzap::engine {

using linalg::Matrix;

namespace {

std::int64_t next_power_of_two(std::int64_t count) {
  std::int64_t power = 1;
  while (power < count) power *= 2;
  return power;
}

}  // namespace

void AttentionBlock::reserve(Step& step) {
  const ModelConfig& config = step.config;
  const std::int64_t m = step.most_rows();
  std::int64_t most_values = 0;
  for (int l = 0; l < static_cast<int>(config.num_hidden_layers); ++l) {
    if (!step.cache.shape().has_rows(l)) continue;
    const std::int64_t own = step.kv_heads(l), q_heads = step.query_heads(l);
    most_values = std::max(most_values, own * step.head_dim(l));
    step.reserve(Step::projected, m * qkv_columns(step, l));
    if (config.shared_blocks) m_adapters.reserve(step, step.weights(l).qkv_adapter);
    step.reserve(Step::mixed, m * std::max(q_heads * step.head_dim(l), columns(step, l)));
    if (config.gates_attention && step.model.weights().are_here()) {
      step.reserve(Step::gates, m * step.weights(l).attention_gate.outputs());
    }
    if (config.has_sinks || is_shared(step, l)) {
      base::reserve_scratch(m_log_sums, m * q_heads, "kvzap::decoder::log_sums");
    }
  }
  if (config.qk_norm == QkNorm::row || config.has_inner_norms) {
    base::reserve_scratch(m_squares, 2 * m, "kvzap::decoder::squares");
  }
  if (config.latent && step.model.weights().are_here()) m_latent.reserve(step);
  m_angles.reserve(step);
  m_spans.reserve(step, most_values);
  reserve_attention(step);
}

// Reserves attention's memory once for each size of layers.
void AttentionBlock::reserve_attention(const Step& step) {
  std::vector<AttentionExtents> all;
  for (int l = 0; l < static_cast<int>(step.config.num_hidden_layers); ++l) {
    if (!step.cache.shape().has_rows(l)) continue;
    std::int64_t heads = step.kv_heads(l);
    if (m_shared) heads = std::max<std::int64_t>(heads, m_shared->most_remote_heads());
    AttentionExtents extents = this->extents(step, l, heads);
    if (m_shared && m_shared->splits_spans()) extents.spans *= 3;  // the parts of push_split
    const auto is_same = [&](const AttentionExtents& other) {
      return other.kv_heads == extents.kv_heads && other.group == extents.group &&
             other.head_dim == extents.head_dim &&
             other.chosen_page_rows == extents.chosen_page_rows;
    };
    if (std::any_of(all.begin(), all.end(), is_same)) continue;
    all.push_back(extents);
    m_attention.reserve(extents);
  }
}

void AttentionBlock::release() {
  m_angles.release();
  m_spans.release();
  m_latent.release();
  m_adapters.release();
  m_squares = m_log_sums = {};
}

// Bounds the extents of this step's calls of attention, as if no row had been evicted.
AttentionExtents AttentionBlock::extents(const Step& step, int layer, std::int64_t kv_heads) const {
  AttentionExtents extents;
  extents.kv_heads = static_cast<int>(kv_heads);
  extents.group = static_cast<int>(step.config.query_group_of(layer));
  extents.head_dim = static_cast<int>(step.head_dim(layer));
  extents.format = step.cache.shape().format;
  if (step.cache.shape().has_bounds(layer)) extents.chosen_page_rows = step.cache.shape().page_rows;
  extents.spans = step.spans().size();
  extents.tokens = step.most_rows();
  std::int64_t all = 0;
  for (std::size_t s = 0; s < step.spans().size(); ++s) {
    const std::int64_t rows = step.first_positions[s] + step.spans()[s].count;
    all += rows;
    extents.longest_single = std::max(extents.longest_single, rows);
  }
  // Powers of two, so that scratch space grows rarely.
  extents.longest_single = next_power_of_two(extents.longest_single);
  extents.single_rows = kv_heads * next_power_of_two(all);
  return extents;
}

// The inputs of o on this rank.
std::int64_t AttentionBlock::columns(const Step& step, int layer) const {
  if (is_shared(step, layer)) return m_shared->inputs(layer);
  return step.query_heads(layer) * step.head_dim(layer);
}

// The outputs of q, k and v of this rank's heads.
std::int64_t AttentionBlock::qkv_columns(const Step& step, int layer) const {
  const std::int64_t kv_heads = step.shares_rows(layer) ? 0 : step.kv_heads(layer);
  return (step.query_heads(layer) + step.config.row_vectors() * kv_heads) * step.head_dim(layer);
}

Matrix AttentionBlock::gates(const Step& step, int layer, std::int64_t m) const {
  return step.matrix(Step::gates, m, step.weights(layer).attention_gate.outputs());
}

GateRule AttentionBlock::gate_rule(const Step& step, int layer) const {
  const ModelConfig& config = step.config;
  GateRule rule;
  if (config.gates_heads) rule.dim = step.head_dim(layer);
  rule.skip = step.weights(layer).attention_gate_skip;
  rule.is_softplus = config.has_softplus_gates;
  return rule;
}

Matrix AttentionBlock::room_for_qkv(const Step& step, int layer, const RowRange& rows) const {
  return step.matrix(Step::projected, rows.count(), qkv_columns(step, layer));
}

Matrix AttentionBlock::run(Step& step, int layer, const RowRange& rows, const Matrix& x) {
  project(step, layer, rows, x);
  const bool is_read = step.read_rows(layer, rows).count() > 0 || step.feeds_state(layer);
  if (!is_read && !m_policies.see(step, layer)) return {};
  attend(step, layer, rows, {x, room_for_qkv(step, layer, rows), step.weights(layer).sinks});
  const std::int64_t columns = this->columns(step, layer);
  const Matrix attended = step.matrix(Step::mixed, rows.count(), columns);
  if (step.config.gates_attention) {
    step.locally([&] {
      apply_gates(step.exec, gates(step, layer, rows.count()), gate_rule(step, layer), attended);
    });
  }
  if (step.config.latent) return m_latent.expand(step, layer, attended);
  if (step.config.has_inner_norms) {
    norm_inputs(step, attended, step.weights(layer).inner_norm,
                static_cast<float>(step.config.rms_norm_eps),
                step.config.num_attention_heads * step.config.head_dim,
                Matrix(m_squares.data(), rows.count(), 2));
  }
  return attended;
}

// q, k, v → norms and RoPE
void AttentionBlock::project(Step& step, int layer, const RowRange& rows, const Matrix& x) {
  const ModelConfig& config = step.config;
  const auto& weights = step.weights(layer);
  const std::int64_t m = rows.count();
  const Matrix qkv = room_for_qkv(step, layer, rows);
  const Matrix computed = m_shared ? m_shared->computed(layer, qkv) : qkv;
  step.locally([&] {
    if (config.latent) return m_latent.project(step, layer, x, computed);
    step.linear(step.exec, x, step.rounded, weights.qkv, weights.qkv_bias, computed);
    m_adapters.add(step, weights.qkv_adapter, x, step.rounded, computed);
    if (config.qk_norm != QkNorm::row) clamp_qkv(step.exec, config, computed);
    if (config.gates_attention) {
      step.linear(step.exec, x, step.rounded, weights.attention_gate, weights.attention_gate_bias,
                  gates(step, layer, m));
    }
  });
  if (is_shared(step, layer)) m_shared->gather_projections(step, layer, computed, qkv);
  HeadTransform transform;
  const Matrix sums(m_squares.data(), m, 2);
  if (config.qk_norm == QkNorm::row) {
    norm_tokens(step, layer, qkv, sums);
    step.locally([&] { clamp_qkv(step.exec, config, qkv); });
  } else {
    transform.q_norm = weights.q_norm;
    transform.k_norm = weights.k_norm;
    transform.has_layer_norms = config.qk_norm == QkNorm::layer_of_head;
    transform.q_bias = weights.q_norm_bias;
    transform.k_bias = weights.k_norm_bias;
  }
  transform.eps = static_cast<float>(config.rms_norm_eps);
  transform.first = rows.begin;
  const LayerConfig own = config.layer(layer);
  transform.rotates_before_norms = config.rotates_before_norms;
  transform.has_unit_norms = config.qk_norm == QkNorm::unit && own.has_rope;
  if (own.has_rope) transform.angles = m_angles.of_layer(config, own);
  transform.query_scales = m_angles.query_scales(config, own);
  transform.norms_values = config.norms_values;
  step.locally([&] {
    const int dim = static_cast<int>(step.head_dim(layer));
    if (step.shares_rows(layer)) {
      return transform_heads(step.exec, qkv, dim, 0, transform, {}, {});
    }
    transform_heads(step.exec, qkv, dim, step.kv_heads(layer), transform,
                    step.new_keys(layer).rows_from(rows.begin),
                    config.latent ? ArrayView() : step.new_values(layer).rows_from(rows.begin));
  });
  if (is_shared(step, layer)) m_shared->transform_queries(step, layer, rows, transform, sums);
}

// Norms of all queries and all keys of a token together, over all ranks' heads.
void AttentionBlock::norm_tokens(Step& step, int layer, const Matrix& qkv, const Matrix& sums) {
  const ModelConfig& config = step.config;
  const auto& weights = step.weights(layer);
  step.locally([&] {
    sum_squares(step.exec, qkv, weights.q_norm.extent(0), weights.k_norm.extent(0), sums);
  });
  step.exchange.sum(step.exec, step.comm, sums);
  step.locally([&] {
    norm_rows(
        step.exec, qkv, sums,
        {weights.q_norm, weights.k_norm, config.num_attention_heads * config.head_dim,
         config.num_key_value_heads * config.head_dim, static_cast<float>(config.rms_norm_eps)});
  });
}

// Where attention leaves its log-sum-exp.
Matrix AttentionBlock::log_sums(const Step& step, int layer, std::int64_t m) const {
  const std::int64_t q_heads = step.query_heads(layer);
  return m_policies.need_log_sums(step, layer) ? m_policies.log_sums(m, q_heads)
                                               : Matrix(m_log_sums.data(), m, q_heads);
}

// Attention of spans that run in turn: after each token but a span's last, the cache judges and
// moves the rows that leave the ring.
void AttentionBlock::attend_in_turn(Step& step, int layer, const RowRange& rows,
                                    const Attended& heads) {
  for (std::int64_t turn = 0; m_spans.list_turn(step, layer, rows, turn); ++turn) {
    m_attention(step.exec, m_spans.spans(), heads.queries, step.new_keys(layer),
                step.new_values(layer), heads.output, heads.lse);
    m_appended.clear();
    step.for_each_span(rows, [&](std::size_t s, std::int64_t begin, std::int64_t end) {
      const StepBatch::Span& span = step.spans()[s];
      const std::int64_t row = begin + turn;
      if (!step.runs_in_turn(span) || row >= std::min(end, span.first + span.count - 1)) return;
      m_appended.push_back({span.sequence, row, 1, span.rule.eviction, is_scored(span.rule)});
    });
    if (m_appended.empty()) continue;
    step.cache.append(step.exec, m_appended, layer, step.new_keys(layer), step.new_values(layer),
                      step.new_scores(layer));
  }
}

void AttentionBlock::attend_spans(Step& step, int layer, const RowRange& rows,
                                  const Attended& heads) {
  m_spans.list(step, layer, rows);
  m_attention(step.exec, m_spans.spans(), heads.queries, step.new_keys(layer),
              step.new_values(layer), heads.output, heads.lse);
  if (!m_spans.joined().empty() && step.kv_heads(layer) > 0) {
    m_attention(step.exec, m_spans.joined(), heads.queries, m_spans.joined_keys(),
                m_spans.joined_values(), heads.output, heads.lse);
  }
  if (step.is_pruned(layer)) attend_in_turn(step, layer, rows, heads);
}

bool AttentionBlock::can_plan(const Step& step) const {
  for (int l = 0; l < static_cast<int>(step.config.num_hidden_layers); ++l) {
    if (!step.cache.shape().has_rows(l)) continue;
    if (is_shared(step, l)) return false;  // the host plans what ranks exchange
    if (!m_attention.can_plan(this->extents(step, l, step.kv_heads(l)))) return false;
  }
  return true;
}

void AttentionBlock::begin_plans(const Step& step) {
  m_attention.calls().plan_calls(step.config.num_hidden_layers);
}

void AttentionBlock::plan(Step& step, int layer) {
  const RowRange rows{0, step.tokens()};
  const Attended heads =
      arrays(step, layer, rows, {{}, room_for_qkv(step, layer, rows), step.weights(layer).sinks});
  // Each token sees the whole ring, so nothing is joined.
  m_spans.list(step, layer, rows);
  m_attention.plan(layer, m_spans.spans(), heads.queries, step.new_keys(layer),
                   step.new_values(layer), heads.output, heads.lse);
}

// The arrays that a layer's call of attention reads and writes.
AttentionBlock::Attended AttentionBlock::arrays(const Step& step, int layer, const RowRange& rows,
                                                const Input& input) const {
  const std::int64_t m = rows.count(), dim = step.head_dim(layer);
  const std::int64_t q_heads = step.query_heads(layer);
  Attended heads;
  heads.queries = Attention::QueryView(
      input.qkv.data(), Kokkos::LayoutStride(m, qkv_columns(step, layer), q_heads, dim, dim, 1));
  heads.output = SpanAttention::Heads(step.data(Step::mixed), m, q_heads, dim);
  if (m_policies.need_log_sums(step, layer) || input.sinks.extent(0) > 0 ||
      is_shared(step, layer)) {
    heads.lse = log_sums(step, layer, m);
  }
  return heads;
}

void AttentionBlock::attend(Step& step, int layer, const RowRange& rows, const Input& input) {
  step.locally([&] {
    const Attended heads = arrays(step, layer, rows, input);
    if (step.is_planned) {
      m_attention.calls().run_planned(step.exec, layer);
    } else {
      attend_spans(step, layer, rows, heads);
    }
    if (input.sinks.extent(0) > 0) add_sinks(step.exec, input.sinks, heads.lse, heads.output);
  });
  // Before the next product overwrites the hidden states.
  if (m_policies.see(step, layer)) m_policies.observe(step, layer, rows, input.x, input.qkv);
  if (!is_shared(step, layer)) return;
  m_shared->attend(step, layer, rows, m_attention);
  m_shared->merge(step, layer, log_sums(step, layer, rows.count()));
}

}  // namespace kvzap::engine
