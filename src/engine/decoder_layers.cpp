#include <cmath>
#include <map>
#include <numeric>

#include "base/stopwatch.hpp"
#include "engine/decoder_state.hpp"
#include "engine/delta_net.hpp"
#include "engine/step_kernels.hpp"
#include "model/model_weights.hpp"

namespace kvzap {
namespace {

using engine::is_scored;
using engine::range;
using linalg::ConstMatrix;
using linalg::Matrix;

bool scales_queries(const ModelConfig& config) {
  return config.attention_multiplier || config.query_scaling;
}

bool scales_queries(const ModelConfig& config, const LayerConfig& layer) {
  if (!config.query_scaling || config.query_scaling->in_rope_layers) return scales_queries(config);
  return !layer.has_rope;
}

/// y = down (activation(gate x) * up x). `rounded`: x rounded, or empty. y may be x.
template <class Scratch>
void run_feed_forward(Scratch& scratch, const ModelConfig& config,
                      const Model::Weights::FeedForward& weights, const Matrix& x,
                      linalg::RoundedRows rounded, const Matrix& y) {
  const auto m = static_cast<std::int64_t>(x.extent(0));
  const std::int64_t width = weights.gate_up.outputs() / 2;
  const Matrix gate_up = scratch.matrix(Scratch::gates, m, 2 * width);
  scratch.linear(scratch.exec, x, rounded, weights.gate_up, weights.gate_up_bias, gate_up);
  rounded = scratch.linear.room_for_rounded(weights.down.dtype(), m, width);
  const Matrix gated = scratch.matrix(Scratch::projected, m, width);
  engine::activate(scratch.exec, gate_up, gated, rounded, config.activation,
                   static_cast<float>(config.gate_limit));
  scratch.linear(scratch.exec, gated, rounded, weights.down, weights.down_bias, y);
}

}  // namespace

// Copies positions to the device.
void Decoder::place_positions(const StepBatch& batch) {
  Scratch& scratch = *m_scratch;
  locally([&] {
    const auto host_positions = Kokkos::create_mirror_view(scratch.positions);
    for (std::size_t s = 0; s < batch.spans().size(); ++s) {
      const StepBatch::Span& span = batch.spans()[s];
      std::int64_t* const own = host_positions.data() + span.first;
      std::iota(own, own + span.count, scratch.first_positions[s]);
    }
    Kokkos::deep_copy(scratch.positions, host_positions);
  });
}

// Copies token ids and positions to the device and computes RoPE's angles there, in float as
// transformers does.
void Decoder::place_rows(const StepBatch& batch) {
  Scratch& scratch = *m_scratch;
  const std::int64_t count = batch.tokens().size();
  place_positions(batch);
  locally([&] {
    const auto host_ids = Kokkos::create_mirror_view(scratch.ids);
    std::copy(batch.tokens().begin(), batch.tokens().end(), host_ids.data());
    Kokkos::deep_copy(scratch.ids, host_ids);
    ConstMatrix frequencies(scratch.inverse_frequencies.data(), 1,
                            scratch.inverse_frequencies.extent(0));
    Kokkos::View<const std::int64_t*, MemorySpace> tables;
    if (m_model.config().rope_depends_on_length()) {
      choose_frequencies(batch);
      frequencies = scratch.frequency_tables;
      tables = scratch.tables;
    }
    engine::fill_angles(scratch.exec, count, scratch.positions, tables, frequencies,
                        m_model.config().rope_attention_factor(), scratch.angles);
    place_window_angles(count);
    place_query_scales(batch);
  });
  scratch.h = scratch.matrix(Scratch::residual, count, m_model.config().hidden_size);
  scratch.pending = Matrix();
}

// Computes the angles of layers with a window, if they have a RoPE of their own.
void Decoder::place_window_angles(std::int64_t count) {
  Scratch& scratch = *m_scratch;
  const auto pairs = static_cast<std::int64_t>(scratch.window_frequencies.extent(0));
  if (pairs == 0) return;
  engine::fill_angles(scratch.exec, count, scratch.positions, {},
                      ConstMatrix(scratch.window_frequencies.data(), 1, pairs), 1,
                      scratch.window_angles);
}

// Chooses RoPE's frequencies for each span, by the length of its sequence after the step.
void Decoder::choose_frequencies(const StepBatch& batch) {
  Scratch& scratch = *m_scratch;
  const ModelConfig& config = m_model.config();
  const RopeScaling& scaling = *config.rope_scaling;
  const auto host_tables = Kokkos::create_mirror_view(scratch.tables);
  std::map<std::int64_t, std::int64_t> table_of_length = {{0, 0}};
  std::vector<float> rows = rope_inverse_frequencies(config);
  for (std::size_t s = 0; s < batch.spans().size(); ++s) {
    const StepBatch::Span& span = batch.spans()[s];
    std::int64_t length = scratch.first_positions[s] + span.count;
    if (length <= scaling.original_max_position_embeddings) length = 0;
    // longrope has one table for all longer texts.
    if (length > 0 && scaling.type == RopeType::longrope) {
      length = scaling.original_max_position_embeddings + 1;
    }
    const auto [entry, is_new] =
        table_of_length.emplace(length, static_cast<std::int64_t>(table_of_length.size()));
    if (is_new) {
      const std::vector<float> row = rope_inverse_frequencies(config, length);
      rows.insert(rows.end(), row.begin(), row.end());
    }
    std::fill_n(host_tables.data() + span.first, span.count, entry->second);
  }
  Kokkos::deep_copy(scratch.tables, host_tables);
  const std::int64_t pairs = config.head_dim / 2;
  const auto count = static_cast<std::int64_t>(rows.size()) / pairs;
  if (static_cast<std::int64_t>(scratch.frequency_tables.extent(0)) != count) {
    scratch.frequency_tables = Matrix("kvzap::decoder::frequency_tables", count, pairs);
  }
  Kokkos::deep_copy(scratch.frequency_tables,
                    Kokkos::View<const float**, Kokkos::LayoutRight, Kokkos::HostSpace>(
                        rows.data(), count, pairs));
}

// Factors of the queries, beside the 1 / sqrt(head_dim) of attention.
void Decoder::place_query_scales(const StepBatch& batch) {
  const ModelConfig& config = m_model.config();
  if (!scales_queries(config)) return;
  const double all =
      config.attention_multiplier
          ? *config.attention_multiplier * std::sqrt(static_cast<double>(config.head_dim))
          : 1;
  const auto scales = Kokkos::subview(m_scratch->buffers[Scratch::query_scales],
                                      range(0, static_cast<std::int64_t>(batch.tokens().size())));
  const auto host = Kokkos::create_mirror_view(scales);
  for (std::size_t s = 0; s < batch.spans().size(); ++s) {
    const StepBatch::Span& span = batch.spans()[s];
    for (std::int64_t i = 0; i < span.count; ++i) {
      double scale = all;
      if (config.query_scaling) {
        const QueryScaling& scaling = *config.query_scaling;
        const std::int64_t position = m_scratch->first_positions[s] + i + scaling.offset;
        scale *= 1 + scaling.beta * std::log1p(static_cast<double>(position / scaling.length));
      }
      host(span.first + i) = static_cast<float>(scale);
    }
  }
  Kokkos::deep_copy(scales, host);
}

// Each rank fills the rows of its part of the vocabulary; the sum over ranks completes them.
void Decoder::embed() {
  Scratch& scratch = *m_scratch;
  locally([&] {
    engine::embed(scratch.exec, scratch.ids, m_model.weights().embedding,
                  m_model.weights().first_token, scratch.h);
  });
  scratch.exchange.sum(scratch.exec, m_comm, scratch.h);
  auto multiplier = static_cast<float>(m_model.config().embedding_multiplier);
  if (m_model.config().rounds_embedding_multiplier) {
    multiplier = with_value_type(m_model.dtype(), [&](auto zero) {
      return static_cast<float>(static_cast<decltype(zero)>(multiplier));
    });
  }
  if (multiplier != 1) locally([&] { engine::scale(scratch.exec, scratch.h, multiplier); });
}

// Calls the scorer once for all sequences: on the rows from the first scored span to the last one.
void Decoder::score(const StepBatch& batch, int layer, const Rows& rows, const Matrix& x) {
  Scratch& scratch = *m_scratch;
  std::int64_t begin = rows.end, end = rows.begin;
  for_each_span(batch, rows, [&](std::size_t s, std::int64_t first, std::int64_t last) {
    if (!batch.spans()[s].rule.score) return;
    begin = std::min(begin, first);
    end = std::max(end, last);
  });
  if (begin >= end) return;
  const auto own = range(begin, end);
  const Matrix scores = new_scores(batch, layer);
  // Not by `locally`: all ranks must call a scorer that communicates.
  const base::Stopwatch watch(m_seconds.scoring);
  try {
    m_scorer->score(scratch.exec, layer, Kokkos::subview(scratch.positions, own),
                    Kokkos::subview(x, range(begin - rows.begin, end - rows.begin), Kokkos::ALL),
                    Kokkos::subview(scores, Kokkos::ALL, own));
  } catch (...) {
    if (!m_failure) m_failure = std::current_exception();
  }
}

// Shows the input of attention to the observer, and scores the rows.
void Decoder::show_input(const StepBatch& batch, int layer, const Rows& rows, const Matrix& x) {
  if (m_observer) {
    locally([&] {
      for_each_span(batch, rows, [&](std::size_t s, std::int64_t begin, std::int64_t end) {
        const StepBatch::Span& span = batch.spans()[s];
        m_observer->attention_input(
            span.sequence, layer, m_scratch->first_positions[s] + begin - span.first,
            Kokkos::subview(x, range(begin - rows.begin, end - rows.begin), Kokkos::ALL));
      });
    });
  }
  if (m_scratch->scores && is_pruned(layer)) score(batch, layer, rows, x);
}

// Attention of a block of rows: from its queries in Scratch::projected, and new keys and values up
// to its end, to Scratch::attended.
void Decoder::attend_rows(const StepBatch& batch, int layer, const Rows& rows) {
  Scratch& scratch = *m_scratch;
  const std::int64_t m = rows.count();
  const std::int64_t dim = m_model.config().head_dim;
  const std::int64_t kv_heads = m_cache.shape().heads[layer];
  const std::int64_t q_heads = kv_heads * m_model.config().query_group();
  locally([&] {
    using Queries = Attention::QueryView;
    using Heads = Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace>;
    const Queries queries(
        scratch.buffers[Scratch::projected].data(),
        Kokkos::LayoutStride(m, (q_heads + 2 * kv_heads) * dim, q_heads, dim, dim, 1));
    const Heads attended(scratch.buffers[Scratch::attended].data(), m, q_heads, dim);
    list_spans(batch, layer, rows);
    LogSumExpView lse;
    const auto sinks = sinks_of(layer);
    if (m_policies->log_sum_exp && is_pruned(layer)) {
      const Matrix kept(m_policies->scratch.lse.data(), m, q_heads);
      lse = kept;
    } else if (sinks.extent(0) > 0 || is_shared(layer)) {
      lse = scratch.matrix(Scratch::log_sums, m, q_heads);
    }
    m_attention(scratch.exec, scratch.attention_spans, queries,
                new_rows(scratch.new_keys, batch, layer),
                new_rows(scratch.new_values, batch, layer), attended, m_attention_path, lse,
                static_cast<float>(m_model.config().attention_soft_cap));
    if (!scratch.joined_spans.empty() && kv_heads > 0) {
      m_attention(scratch.exec, scratch.joined_spans, queries, scratch.joined_keys,
                  scratch.joined_values, attended, m_attention_path, lse,
                  static_cast<float>(m_model.config().attention_soft_cap));
    }
    if (sinks.extent(0) > 0) engine::add_sinks(scratch.exec, sinks, lse, attended);
  });
  // Before the next product overwrites the hidden states.
  if (m_policies->any && is_pruned(layer)) observe(batch, layer, rows);
  if (!is_shared(layer)) return;
  attend_remote_heads(batch, layer, rows);
  const bool is_kept = m_policies->log_sum_exp && is_pruned(layer);
  merge_shared(layer, m,
               is_kept ? Matrix(m_policies->scratch.lse.data(), m, q_heads)
                       : scratch.matrix(Scratch::log_sums, m, q_heads));
}

// Norms of all queries and all keys of a token together, over all ranks' heads.
void Decoder::norm_query_rows(int layer, const Matrix& qkv) {
  Scratch& scratch = *m_scratch;
  const ModelConfig& config = m_model.config();
  const auto& weights = m_model.weights().layers[layer];
  const Matrix sums = scratch.matrix(Scratch::squares, qkv.extent(0), 2);
  locally([&] {
    engine::sum_squares(scratch.exec, qkv, weights.q_norm.extent(0), weights.k_norm.extent(0),
                        sums);
  });
  scratch.exchange.sum(scratch.exec, m_comm, sums);
  locally([&] {
    engine::norm_rows(
        scratch.exec, qkv, sums,
        {weights.q_norm, weights.k_norm, config.num_attention_heads * config.head_dim,
         config.num_key_value_heads * config.head_dim, static_cast<float>(config.rms_norm_eps)});
  });
}

// q, k, v → norms and RoPE, from the input x of attention.
void Decoder::project_heads(const StepBatch& batch, int layer, const Rows& rows, const Matrix& x) {
  Scratch& scratch = *m_scratch;
  const ModelConfig& config = m_model.config();
  const auto& weights = m_model.weights().layers[layer];
  const int dim = static_cast<int>(config.head_dim);
  const std::int64_t kv_heads = m_cache.shape().heads[layer];
  const std::int64_t columns = kv_heads * (config.query_group() + 2) * dim;
  const Matrix qkv = scratch.matrix(Scratch::projected, rows.count(), columns);
  const Matrix computed = m_model.partition().deals_projections()
                              ? scratch.matrix(Scratch::dealt, rows.count(), weights.qkv.outputs())
                              : qkv;
  locally([&] {
    scratch.linear(scratch.exec, x, scratch.rounded, weights.qkv, weights.qkv_bias, computed);
    if (config.gates_attention) {
      scratch.linear(scratch.exec, x, scratch.rounded, weights.attention_gate,
                     weights.attention_gate_bias,
                     scratch.matrix(Scratch::gates, rows.count(), attended_columns(layer)));
    }
  });
  if (is_shared(layer)) gather_projections(layer, computed, qkv);
  engine::HeadTransform transform;
  if (config.qk_norm == QkNorm::row) {
    norm_query_rows(layer, qkv);
  } else {
    transform.q_norm = weights.q_norm;
    transform.k_norm = weights.k_norm;
  }
  transform.eps = static_cast<float>(config.rms_norm_eps);
  transform.first = rows.begin;
  const LayerConfig own = config.layer(layer);
  transform.has_unit_norms = config.qk_norm == QkNorm::unit && own.has_rope;
  if (own.has_rope) {
    transform.angles =
        config.window_rope_theta && own.window > 0 ? scratch.window_angles : scratch.angles;
  }
  if (scales_queries(config, own)) {
    transform.query_scales = scratch.buffers[Scratch::query_scales];
  }
  locally([&] {
    engine::transform_heads(scratch.exec, qkv, dim, kv_heads, transform,
                            new_rows(scratch.new_keys, batch, layer).rows_from(rows.begin),
                            new_rows(scratch.new_values, batch, layer).rows_from(rows.begin));
  });
  if (is_shared(layer)) transform_remote_heads(layer, rows, transform);
}

// What follows the sum over ranks of attention or of a feed-forward part, before it is added to the
// residual stream.
void Decoder::finish_part(const Matrix& y, const linalg::Vector& norm) {
  const ModelConfig& config = m_model.config();
  if (norm.extent(0) > 0) {
    locally([&] {
      engine::add_and_norm(m_scratch->exec, y, Matrix(), engine::norm_of(config, norm), y,
                           linalg::RoundedRows());
    });
  }
  const auto multiplier = static_cast<float>(config.residual_multiplier);
  if (multiplier != 1) locally([&] { engine::scale(m_scratch->exec, y, multiplier); });
}

// The input of attention, or of what a layer has instead: adds what is pending to the residual
// stream, and norms it.
auto Decoder::enter_layer(int layer, const Rows& rows) -> Activations {
  Scratch& scratch = *m_scratch;
  const ModelConfig& config = m_model.config();
  const std::int64_t m = rows.count();
  const Matrix h = Kokkos::subview(scratch.h, range(rows.begin, rows.end), Kokkos::ALL);
  const Matrix x = scratch.matrix(Scratch::normed, m, config.hidden_size);
  locally([&] {
    scratch.rounded = scratch.linear.room_for_rounded(m_model.dtype(), m, config.hidden_size);
    engine::add_and_norm(scratch.exec, h, scratch.pending,
                         engine::norm_of(config, m_model.weights().layers[layer].attention_in), x,
                         scratch.rounded);
  });
  return x;
}

// The rows of a block that are read after a layer: all, or in the last layer from the first to the
// last row whose output is asked for.
auto Decoder::read_rows(int layer, const Rows& rows) const -> Rows {
  if (layer + 1 < m_model.config().num_hidden_layers) return rows;
  const std::vector<std::int64_t>& outputs = m_scratch->output_rows;
  Rows read{rows.end, rows.begin};
  for (const std::int64_t row : outputs) {
    if (row < rows.begin || row >= rows.end) continue;
    read = {std::min(read.begin, row), std::max(read.end, row + 1)};
  }
  return read.count() > 0 ? read : Rows{rows.begin, rows.begin};
}

// The last map of attention, or of what a layer has instead, from `columns` of Scratch::attended to
// y → sum over ranks → norm, for the rows that are read. y takes the place of the layer's input x,
// unless the feed-forward part still reads that.
void Decoder::map_attended(int layer, const Rows& rows, std::int64_t columns, const Matrix& x) {
  Scratch& scratch = *m_scratch;
  const auto& weights = m_model.weights().layers[layer];
  const Rows read = read_rows(layer, rows);
  if (read.count() == 0) return;
  const auto within = range(read.begin - rows.begin, read.end - rows.begin);
  const Matrix y = Kokkos::subview(
      m_model.config().is_parallel ? scratch.matrix(Scratch::beside, rows.count(), x.extent(1)) : x,
      within, Kokkos::ALL);
  locally([&] {
    const Matrix attended = Kokkos::subview(
        scratch.matrix(Scratch::attended, rows.count(), columns), within, Kokkos::ALL);
    scratch.linear(scratch.exec, attended, weights.o, weights.o_bias, y);
  });
  if (m_model.config().is_parallel) return;  // the feed-forward part adds y
  scratch.exchange.sum(scratch.exec, m_comm, y);
  finish_part(y, weights.attention_out);
}

// norm → score → q, k, v → norm and RoPE → attention → gates → o
void Decoder::attention_block(const StepBatch& batch, int layer, const Rows& rows) {
  Scratch& scratch = *m_scratch;
  const ModelConfig& config = m_model.config();
  const std::int64_t m = rows.count();
  const std::int64_t columns = attended_columns(layer);
  const Matrix x = enter_layer(layer, rows);
  show_input(batch, layer, rows, x);
  project_heads(batch, layer, rows, x);
  const bool is_observed = m_policies->any && is_pruned(layer);
  if (read_rows(layer, rows).count() == 0 && !is_observed) return;
  attend_rows(batch, layer, rows);
  if (config.gates_attention) {
    locally([&] {
      engine::apply_gates(scratch.exec, scratch.matrix(Scratch::gates, m, columns),
                          scratch.matrix(Scratch::attended, m, columns));
    });
  }
  map_attended(layer, rows, columns, x);
}

// norm → q, k, v, gates, strengths and decays → convolution → recurrence → norm → gates → o
void Decoder::delta_net_block(const StepBatch& batch, int layer, const Rows& rows) {
  Scratch& scratch = *m_scratch;
  const ModelConfig& config = m_model.config();
  const auto& weights = m_model.weights().layers[layer];
  const engine::DeltaNet net{*config.delta_net, m_cache.shape().states[layer].heads};
  const Matrix x = enter_layer(layer, rows);
  const Matrix in = scratch.matrix(Scratch::projected, rows.count(), net.columns());
  const Matrix rates = scratch.matrix(Scratch::delta_rates, rows.count(), net.rates());
  const Matrix out = scratch.matrix(Scratch::attended, rows.count(), net.values());
  locally([&] {
    scratch.linear(scratch.exec, x, scratch.rounded, weights.delta_in, {}, in);
    scratch.linear(scratch.exec, x, scratch.rounded, weights.delta_rates, {}, rates);
    // (nvcc 13 does not compile these braces as an argument.)
    const engine::DeltaWeights own_weights{weights.delta_convolution, weights.delta_decay_rates,
                                           weights.delta_decay_shifts, weights.delta_norm,
                                           static_cast<float>(config.rms_norm_eps)};
    const engine::DeltaTokens tokens{in, rates, out};
    for_each_span(batch, rows, [&](std::size_t s, std::int64_t begin, std::int64_t end) {
      const SequenceId sequence = batch.spans()[s].sequence;
      const auto state = m_cache.state(scratch.exec, sequence, layer);
      engine::pass_delta_net(scratch.exec, net, own_weights,
                             tokens.part(begin - rows.begin, end - rows.begin), state.before,
                             state.after);
      m_cache.count_tokens(sequence, layer, end - begin);
    });
  });
  map_attended(layer, rows, net.values(), x);
}

// norm → feed-forward part, dense or of experts → sum over ranks → norm, for the rows that are read
void Decoder::feed_forward_block(int layer, const Rows& rows, bool is_whole) {
  Scratch& scratch = *m_scratch;
  const ExecutionSpace& exec = scratch.exec;
  const ModelConfig& config = m_model.config();
  const auto& weights = m_model.weights().layers[layer];
  const Rows read = read_rows(layer, rows);
  if (read.count() == 0) return;
  const std::int64_t m = read.count();
  const auto rows_of = [&](typename Scratch::Buffer buffer) -> Matrix {
    return Kokkos::subview(scratch.matrix(buffer, rows.count(), config.hidden_size),
                           range(read.begin - rows.begin, read.end - rows.begin), Kokkos::ALL);
  };
  const Matrix h = Kokkos::subview(scratch.h, range(read.begin, read.end), Kokkos::ALL);
  const Matrix x = rows_of(Scratch::normed);
  Matrix y = x;
  locally([&] {
    if (config.is_parallel) {
      // x is the norm that attention has read.
      run_feed_forward(scratch, config, weights.dense, x, linalg::RoundedRows(), y);
      engine::add(exec, y, rows_of(Scratch::beside));
      return;
    }
    scratch.rounded = scratch.linear.room_for_rounded(m_model.dtype(), m, config.hidden_size);
    engine::add_and_norm(exec, h, x, engine::norm_of(config, weights.feed_forward_in), x,
                         scratch.rounded);
    if (weights.experts.empty()) {
      run_feed_forward(scratch, config, weights.dense, x, scratch.rounded, y);
    } else {
      y = use_experts(layer, x);
    }
  });
  scratch.exchange.sum(exec, m_comm, y);
  finish_part(y, weights.feed_forward_out);
  if (is_whole && m == rows.count()) {
    scratch.pending = y;  // the next norm adds it; nothing overwrites it until then
  } else {
    scratch.pending = Matrix();
    locally([&] { engine::add(exec, h, y); });
  }
}

// The sum of the experts' outputs. Each rank has a part of each expert, so all ranks read the same
// bytes, however the tokens are spread; the sum over ranks that follows completes them.
auto Decoder::use_experts(int layer, const Matrix& x) -> Activations {
  Scratch& scratch = *m_scratch;
  const ExecutionSpace& exec = scratch.exec;
  const ModelConfig& config = m_model.config();
  const auto& weights = m_model.weights().layers[layer];
  const auto m = static_cast<std::int64_t>(x.extent(0));
  const auto hidden = static_cast<std::int64_t>(x.extent(1));
  const Matrix logits = scratch.routes.logits(m);
  const Matrix y = scratch.matrix(Scratch::routed, m, hidden);
  // The router first: a later product may reuse the rounded rows.
  scratch.linear(exec, x, scratch.rounded, weights.router, {}, logits);
  scratch.routes.choose(exec, *config.experts, m, weights.correction, weights.router_bias);
  if (weights.dense.gate_up.outputs() == 0) {
    engine::clear(exec, y);
  } else {
    if (weights.shared_gate.outputs() > 0) {
      scratch.linear(exec, x, scratch.rounded, weights.shared_gate, {}, scratch.shared_logits(m));
    }
    run_feed_forward(scratch, config, weights.dense, x, scratch.rounded, y);
    if (weights.shared_gate.outputs() > 0) {
      engine::gate_rows(exec, scratch.shared_logits(m), y);
    }
  }
  for (std::size_t e = 0; e < weights.experts.size(); ++e) {
    auto tokens = scratch.routes.tokens_of(static_cast<std::int64_t>(e));
    const auto count = static_cast<std::int64_t>(tokens.rows.extent(0));
    if (count == 0) continue;
    const Matrix input = scratch.matrix(Scratch::expert_inputs, count, hidden);
    const Matrix output = scratch.matrix(Scratch::expert_outputs, count, hidden);
    engine::gather_rows(exec, x, tokens.rows, input);
    if (config.experts->scales_input) {
      engine::scale_rows(exec, tokens.weights, input);
      tokens.weights = {};
    }
    run_feed_forward(scratch, config, weights.experts[e], input, linalg::RoundedRows(), output);
    engine::add_weighted_rows(exec, output, tokens, y);
  }
  return y;
}

void Decoder::append(const StepBatch& batch, int layer) {
  const bool judges =
      std::any_of(batch.spans().begin(), batch.spans().end(),
                  [](const StepBatch::Span& span) { return span.rule.eviction.judges(); });
  double unjudged = 0;
  const base::Stopwatch watch(judges ? m_seconds.pruning : unjudged);
  locally([&] {
    Scratch& scratch = *m_scratch;
    const ArrayView keys = new_rows(scratch.new_keys, batch, layer);
    const ArrayView values = new_rows(scratch.new_values, batch, layer);
    const Activations scores = new_scores(batch, layer);
    if (m_observer && is_pruned(layer)) {
      for (std::size_t s = 0; s < batch.spans().size(); ++s) {
        const StepBatch::Span& span = batch.spans()[s];
        if (!is_scored(span.rule)) continue;
        m_observer->scores(
            span.sequence, layer, scratch.first_positions[s],
            Kokkos::subview(scores, Kokkos::ALL, range(span.first, span.first + span.count)));
      }
    }
    const auto& spans = !is_pruned(layer) ? scratch.ring_spans
                        : m_policies->any ? m_policies->append_spans
                                          : scratch.append_spans;
    if (spans.empty() || m_cache.shape().has_state(layer)) return;
    if (scratch.deferred) {
      m_cache.append_deferred(scratch.exec, spans, layer, keys, values, scores);
    } else {
      m_cache.append(scratch.exec, spans, layer, keys, values, scores);
    }
  });
}

}  // namespace kvzap
