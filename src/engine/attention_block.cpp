#include "engine/attention_block.hpp"

#include "engine/delta_net.hpp"

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
  const std::int64_t m = step.most_rows(), dim = config.head_dim, group = config.query_group();
  std::int64_t most = 0;
  for (int l = 0; l < static_cast<int>(config.num_hidden_layers); ++l) {
    const std::int64_t own = step.kv_heads(l);
    most = std::max(most, own);
    step.reserve(Step::projected, m * own * (group + config.row_vectors()) * dim);
    step.reserve(Step::mixed, m * std::max(own * group * dim, columns(step, l)));
    if (config.gates_attention && step.model.weights().are_here()) {
      step.reserve(Step::gates, m * columns(step, l));
    }
    if (config.has_sinks || is_shared(step, l)) {
      base::reserve_scratch(m_log_sums, m * own * group, "kvzap::decoder::log_sums");
    }
  }
  if (config.qk_norm == QkNorm::row) {
    base::reserve_scratch(m_squares, 2 * m, "kvzap::decoder::squares");
  }
  if (config.latent && step.model.weights().are_here()) m_latent.reserve(step);
  m_angles.reserve(step);
  m_spans.reserve(step, most);
  if (m_shared) most = std::max<std::int64_t>(most, m_shared->most_remote_heads());
  AttentionExtents extents = this->extents(step, most);
  if (m_shared && m_shared->splits_spans()) extents.spans *= 3;  // the parts of push_split
  m_attention.reserve(extents);
}

void AttentionBlock::release() {
  m_angles.release();
  m_spans.release();
  m_latent.release();
  m_squares = m_log_sums = {};
}

// Bounds the extents of this step's calls of attention, as if no row had been evicted.
AttentionExtents AttentionBlock::extents(const Step& step, std::int64_t kv_heads) const {
  AttentionExtents extents;
  extents.kv_heads = static_cast<int>(kv_heads);
  extents.group = static_cast<int>(step.config.query_group());
  extents.head_dim = static_cast<int>(step.config.head_dim);
  extents.format = step.cache.shape().format;
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
  return step.kv_heads(layer) * step.config.query_group() * step.config.head_dim;
}

Matrix AttentionBlock::room_for_qkv(const Step& step, int layer, const RowRange& rows) const {
  const std::int64_t heads = step.config.query_group() + step.config.row_vectors();
  return step.matrix(Step::projected, rows.count(),
                     step.kv_heads(layer) * heads * step.config.head_dim);
}

Matrix AttentionBlock::run(Step& step, int layer, const RowRange& rows, const Matrix& x) {
  project(step, layer, rows, x);
  if (step.read_rows(layer, rows).count() == 0 && !m_policies.see(step, layer)) return {};
  attend(step, layer, rows, {x, room_for_qkv(step, layer, rows), step.weights(layer).sinks});
  const std::int64_t columns = this->columns(step, layer);
  const Matrix attended = step.matrix(Step::mixed, rows.count(), columns);
  if (step.config.gates_attention) {
    step.locally(
        [&] { apply_gates(step.exec, step.matrix(Step::gates, rows.count(), columns), attended); });
  }
  if (step.config.latent) return m_latent.expand(step, layer, attended);
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
    if (config.qkv_limit > 0) clamp(step.exec, computed, static_cast<float>(config.qkv_limit));
    if (config.gates_attention) {
      step.linear(step.exec, x, step.rounded, weights.attention_gate, weights.attention_gate_bias,
                  step.matrix(Step::gates, m, columns(step, layer)));
    }
  });
  if (is_shared(step, layer)) m_shared->gather_projections(step, layer, computed, qkv);
  HeadTransform transform;
  const Matrix sums(m_squares.data(), m, 2);
  if (config.qk_norm == QkNorm::row) {
    norm_tokens(step, layer, qkv, sums);
  } else {
    transform.q_norm = weights.q_norm;
    transform.k_norm = weights.k_norm;
  }
  transform.eps = static_cast<float>(config.rms_norm_eps);
  transform.first = rows.begin;
  const LayerConfig own = config.layer(layer);
  transform.rotates_before_norms = config.rotates_before_norms;
  transform.has_unit_norms = config.qk_norm == QkNorm::unit && own.has_rope;
  if (own.has_rope) transform.angles = m_angles.of_layer(config, own);
  transform.query_scales = m_angles.query_scales(config, own);
  step.locally([&] {
    transform_heads(step.exec, qkv, static_cast<int>(config.head_dim), step.kv_heads(layer),
                    transform, step.new_keys(layer).rows_from(rows.begin),
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
  const std::int64_t q_heads = step.kv_heads(layer) * step.config.query_group();
  return m_policies.need_log_sums(step, layer) ? m_policies.log_sums(m, q_heads)
                                               : Matrix(m_log_sums.data(), m, q_heads);
}

void AttentionBlock::attend(Step& step, int layer, const RowRange& rows, const Input& input) {
  const std::int64_t m = rows.count(), dim = step.config.head_dim;
  const std::int64_t kv_heads = step.kv_heads(layer);
  const std::int64_t q_heads = kv_heads * step.config.query_group();
  const bool has_sinks = input.sinks.extent(0) > 0;
  step.locally([&] {
    const Attention::QueryView queries(
        input.qkv.data(), Kokkos::LayoutStride(m, input.qkv.stride(0), q_heads, dim, dim, 1));
    const SpanAttention::Heads attended(step.data(Step::mixed), m, q_heads, dim);
    m_spans.list(step, layer, rows);
    LogSumExpView lse;
    if (m_policies.need_log_sums(step, layer) || has_sinks || is_shared(step, layer)) {
      lse = log_sums(step, layer, m);
    }
    m_attention(step.exec, m_spans.spans(), queries, step.new_keys(layer), step.new_values(layer),
                attended, lse);
    if (!m_spans.joined().empty() && kv_heads > 0) {
      m_attention(step.exec, m_spans.joined(), queries, m_spans.joined_keys(),
                  m_spans.joined_values(), attended, lse);
    }
    if (has_sinks) add_sinks(step.exec, input.sinks, lse, attended);
  });
  // Before the next product overwrites the hidden states.
  if (m_policies.see(step, layer)) m_policies.observe(step, layer, rows, input.x, input.qkv);
  if (!is_shared(step, layer)) return;
  m_shared->attend(step, layer, rows, m_attention);
  m_shared->merge(step, layer, log_sums(step, layer, m));
}

}  // namespace kvzap::engine
