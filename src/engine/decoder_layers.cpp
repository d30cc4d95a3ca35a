// The parts of a layer around its blocks: norms, residual connections and sums over ranks.
#include "base/launch.hpp"
#include "base/stopwatch.hpp"
#include "engine/decoder.hpp"

namespace kvzap {

using engine::norm_of;
using engine::range;
using engine::RowRange;
using linalg::Matrix;

// norm → token mixer → o → sum over ranks → norm, then the same with the channel mixer, for the
// rows that are read. Parallel parts share the first norm and one sum. A layer may lack either
// part.
void Decoder::pass_layer(int layer, const RowRange& rows) {
  const ModelConfig& config = m_model.config();
  const LayerBlocks& blocks = m_layers[layer];
  if (m_step.feeds_state(layer)) return pass_shared_layer(layer, rows);
  if (m_alt_up) m_step.locally([&] { m_alt_up->predict(m_step, layer, rows); });
  const RowRange read = m_step.read_rows(layer, rows);
  const auto within = range(read.begin - rows.begin, read.end - rows.begin);
  const Matrix x = m_step.matrix(engine::Step::normed, rows.count(), config.hidden_size);
  const Matrix own = Kokkos::subview(x, within, Kokkos::ALL);
  Matrix of_tokens;  // what the residual stream still lacks
  if (blocks.tokens != nullptr) {
    enter_layer(layer, rows, x);
    if (m_cache.shape().keeps_rows(layer)) show_input(layer, rows, x);
    const bool is_apart = config.is_parallel || blocks.beside != nullptr;
    of_tokens = is_apart ? Matrix(m_parallel.data(), read.count(), config.hidden_size) : own;
    mix_tokens(layer, rows, x, of_tokens);
    if (read.count() == 0) return;
    if (!config.is_parallel) complete(of_tokens, m_step.weights(layer).attention_out);
  } else {
    count_tokens(layer, rows);
    if (read.count() == 0) return;
    if (m_step.pending.extent(0) > 0) {
      of_tokens = Kokkos::subview(m_step.pending, within, Kokkos::ALL);
    }
  }
  const Matrix h = Kokkos::subview(m_step.h, range(read.begin, read.end), Kokkos::ALL);
  if (m_alt_up) {
    m_step.locally([&] { m_alt_up->add_augmented(m_step, of_tokens, h); });
    of_tokens = Matrix();
  }
  Matrix y = blocks.channels != nullptr ? own : of_tokens;
  if (blocks.channels != nullptr) mix_channels(layer, read, of_tokens, y);
  leave_layer(layer, read, y);
}

// A layer with a shared block (SharedBlocksConfig). Neither attention nor the feed-forward part has
// a residual connection.
void Decoder::pass_shared_layer(int layer, const RowRange& rows) {
  const ModelConfig& config = m_model.config();
  const LayerBlocks& blocks = m_layers[layer];
  const auto& weights = m_step.weights(layer);
  const std::int64_t m = rows.count(), hidden = config.hidden_size;
  const Matrix x = join_input(layer, rows);
  show_input(layer, rows, x);
  const Matrix attended = blocks.tokens->run(m_step, layer, rows, x);
  const Matrix y(m_parallel.data(), m, hidden);
  const Matrix z = m_step.matrix(engine::Step::normed, m, hidden);
  const auto norm = [&](const Model::Weights::Norm& own) {
    m_step.rounded = m_step.linear.room_for_rounded(m_model.dtype(), m, hidden);
    engine::add_and_norm(m_step.exec, y, Matrix(), norm_of(config, own), z, m_step.rounded);
  };
  m_step.locally([&] { m_step.linear(m_step.exec, attended, weights.o, weights.o_bias, y); });
  m_step.exchange.sum(m_step.exec, m_comm, y);
  m_step.locally([&] { norm(weights.feed_forward_in); });
  const Matrix of_channels = blocks.channels->run(m_step, layer, z);
  m_step.exchange.sum(m_step.exec, m_comm, of_channels);
  const auto [first, end] = even_range(hidden, m_comm.size(), m_comm.rank());
  const Matrix own = Kokkos::subview(of_channels, Kokkos::ALL, range(first, end));
  m_step.locally([&] { m_step.linear(m_step.exec, own, weights.block_out, {}, y); });
  m_step.exchange.sum(m_step.exec, m_comm, y);
  m_step.locally([&] {
    engine::add(m_step.exec, y,
                Kokkos::subview(m_step.h, range(rows.begin, rows.end), Kokkos::ALL));
    norm(weights.space_in);
  });
  const Matrix mixed = blocks.beside->run(m_step, layer, rows, z);
  count_tokens(layer, rows);
  const RowRange read = m_step.read_rows(layer, rows);
  if (read.count() == 0) return;
  const auto within = range(read.begin - rows.begin, read.end - rows.begin);
  const Matrix output = Kokkos::subview(z, within, Kokkos::ALL);
  m_step.locally([&] {
    m_step.linear(m_step.exec, Kokkos::subview(mixed, within, Kokkos::ALL), weights.space_out,
                  weights.space_out_bias, output);
  });
  m_step.exchange.sum(m_step.exec, m_comm, output);
  leave_layer(layer, read, output);
}

// The normed input of attention in such a layer, for which nothing is pending any more.
Matrix Decoder::join_input(int layer, const RowRange& rows) {
  const ModelConfig& config = m_model.config();
  const std::int64_t inputs = config.attention_inputs();
  const Matrix x = m_step.matrix(engine::Step::normed, rows.count(), inputs);
  m_step.locally([&] {
    if (m_step.pending.extent(0) > 0) {
      engine::add(m_step.exec, Kokkos::subview(m_step.h, range(rows.begin, rows.end), Kokkos::ALL),
                  m_step.pending);
    }
    m_joined->join(m_step, rows, x);
    m_step.rounded = m_step.linear.room_for_rounded(m_model.dtype(), rows.count(), inputs);
    engine::add_and_norm(m_step.exec, x, Matrix(),
                         norm_of(config, m_step.weights(layer).attention_in), x, m_step.rounded);
  });
  m_step.pending = Matrix();
  return x;
}

// Adds the output of a layer's channel mixer to the residual stream, and what follows it.
void Decoder::leave_layer(int layer, const RowRange& rows, const Matrix& y) {
  const auto& weights = m_step.weights(layer);
  if (rows.count() == m_step.tokens() && !m_inputs && !m_alt_up && weights.scale == 1) {
    m_step.pending = y;  // the next norm adds it; nothing overwrites it until then
    return;
  }
  m_step.pending = Matrix();
  const Matrix h = Kokkos::subview(m_step.h, range(rows.begin, rows.end), Kokkos::ALL);
  m_step.locally([&] {
    engine::add(m_step.exec, h, y);
    if (m_alt_up) m_alt_up->correct(m_step, layer, rows);
  });
  if (m_inputs) {
    const Matrix input = m_step.matrix(engine::Step::normed, rows.count(), h.extent(1));
    m_step.locally([&] { m_inputs->run(m_step, layer, rows, input); });
    complete(input, weights.inputs.norm);
    m_step.locally([&] {
      if (m_alt_up) {
        m_alt_up->add_to_others(m_step, rows, input);
      } else {
        engine::add(m_step.exec, h, input);
      }
    });
  }
  if (weights.scale != 1) m_step.locally([&] { engine::scale(m_step.exec, h, weights.scale); });
}

// Sets y to this rank's part of the token mixer's output, for the rows that are read.
void Decoder::mix_tokens(int layer, const RowRange& rows, const Matrix& x, const Matrix& y) {
  const auto& weights = m_step.weights(layer);
  const LayerBlocks& blocks = m_layers[layer];
  const RowRange read = m_step.read_rows(layer, rows);
  const auto within = range(read.begin - rows.begin, read.end - rows.begin);
  const auto project = [&](const Matrix& mixed, const Model::Weights::Linear& map,
                           const Model::Weights::Vector& bias, double multiplier,
                           const Matrix& to) {
    if (read.count() == 0) return;
    m_step.locally([&] {
      m_step.linear(m_step.exec, Kokkos::subview(mixed, within, Kokkos::ALL), map, bias, to);
      if (multiplier != 1) engine::scale(m_step.exec, to, static_cast<float>(multiplier));
    });
  };
  const ModelConfig& config = m_model.config();
  const double multiplier = config.layer(layer).mixing == TokenMixing::delta_net
                                ? config.delta_net->out_multiplier
                                : config.attention_out_multiplier;
  const Matrix of_tokens = blocks.tokens->run(m_step, layer, rows, x);
  if (blocks.beside == nullptr) count_tokens(layer, rows);
  if (m_alt_up && read.count() > 0) {
    // Before the product overwrites x.
    m_step.locally(
        [&] { m_alt_up->augment(m_step, layer, Kokkos::subview(x, within, Kokkos::ALL)); });
  }
  project(of_tokens, weights.o, weights.o_bias, multiplier, y);
  if (blocks.beside == nullptr) return;
  m_step.rounded = linalg::RoundedRows();  // the product has overwritten them
  const Matrix mixed = blocks.beside->run(m_step, layer, rows, x);
  count_tokens(layer, rows);
  const Matrix own = Kokkos::subview(x, within, Kokkos::ALL);  // nothing reads x any more
  project(mixed, weights.space_out, weights.space_out_bias, config.state_space->out_multiplier,
          own);
  if (read.count() > 0) m_step.locally([&] { engine::add(m_step.exec, y, own); });
}

// Counts the tokens that a layer with a state, or one that keeps nothing, has passed. Those of a
// planned step are counted once its launches have run, recorded or not.
void Decoder::count_tokens(int layer, const RowRange& rows) {
  if (m_step.is_planned || !counts_tokens(layer)) return;
  m_step.locally([&] {
    m_step.for_each_span(rows, [&](std::size_t s, std::int64_t begin, std::int64_t end) {
      m_cache.count_tokens(m_step.spans()[s].sequence, layer, end - begin);
    });
  });
}

bool Decoder::counts_tokens(int layer) const {
  return m_cache.shape().has_state(layer) || m_layers[layer].tokens == nullptr;
}

// The input x of a token mixer: adds what is pending to the residual stream, and norms it.
void Decoder::enter_layer(int layer, const RowRange& rows, const Matrix& x) {
  const ModelConfig& config = m_model.config();
  const Matrix h = Kokkos::subview(m_step.h, range(rows.begin, rows.end), Kokkos::ALL);
  m_step.locally([&] {
    m_step.rounded =
        m_step.linear.room_for_rounded(m_model.dtype(), rows.count(), config.hidden_size);
    engine::add_and_norm(m_step.exec, h, m_step.pending,
                         norm_of(config, m_step.weights(layer).attention_in), x, m_step.rounded);
    if (!config.normed_residuals) return;
    const bool has_attention = config.layer(layer).has_attention();
    const auto& factors = *config.normed_residuals;
    keep_normed(h, x, has_attention ? factors.attention : factors.state);
  });
}

// Makes the residual stream that of ModelConfig::normed_residuals.
void Decoder::keep_normed(const Matrix& h, const Matrix& normed, double factor) {
  base::launch([exec = m_step.exec, h, normed] { Kokkos::deep_copy(exec, h, normed); });
  if (factor != 1) engine::scale(m_step.exec, h, static_cast<float>(factor));
}

// Sets y to the complete output of the channel mixer. Before, y is its memory, and the norm that
// the token mixer has read if the two are parallel. They share it unless the channel mixer has a
// norm of h of its own; if they are not parallel, the mixer reads the norm of h + of_tokens.
void Decoder::mix_channels(int layer, const RowRange& rows, const Matrix& of_tokens, Matrix& y) {
  const ModelConfig& config = m_model.config();
  const Matrix h = Kokkos::subview(m_step.h, range(rows.begin, rows.end), Kokkos::ALL);
  const auto& weights = m_step.weights(layer);
  const auto& norm = weights.feed_forward_in;
  m_step.rounded = linalg::RoundedRows();
  m_step.locally([&] {
    if (config.is_parallel && norm.weight.extent(0) == 0) return;
    m_step.rounded =
        m_step.linear.room_for_rounded(m_model.dtype(), h.extent(0), config.hidden_size);
    engine::add_and_norm(m_step.exec, h, config.is_parallel ? Matrix() : of_tokens,
                         norm_of(config, norm), y, m_step.rounded);
    if (config.normed_residuals) keep_normed(h, y, config.normed_residuals->feed_forward);
  });
  const Matrix of_experts = join_experts(layer, rows, y);
  y = m_layers[layer].channels->run(m_step, layer, y);
  if (of_experts.extent(0) > 0) m_step.locally([&] { engine::add(m_step.exec, y, of_experts); });
  if (config.is_parallel) {
    m_step.locally([&] { engine::add(m_step.exec, y, of_tokens); });
  }
  if (weights.dense_out.weight.extent(0) == 0) return complete(y, weights.feed_forward_out);
  complete(y, weights.dense_out);
  add_experts(layer, h, y);
  finish(y, weights.feed_forward_out);
}

// Runs experts on x, the input of a dense part, if their output joins the next layer's
// (ExpertsConfig::joins_next). Returns what an earlier layer's experts have left for this one.
Matrix Decoder::join_experts(int layer, const RowRange& rows, const Matrix& x) {
  const ModelConfig& config = m_model.config();
  if (!config.experts || !config.experts->joins_next) return {};
  const Matrix own(m_of_experts.data() + rows.begin * config.hidden_size, rows.count(),
                   config.hidden_size);
  if (!config.layer(layer).has_experts) return own;
  const Matrix y = m_experts.run(m_step, layer, x);
  m_step.locally(
      [&] { base::launch([exec = m_step.exec, own, y] { Kokkos::deep_copy(exec, own, y); }); });
  m_step.rounded = linalg::RoundedRows();  // the experts' products have overwritten them
  return {};
}

// Adds the output of experts beside a dense part. They and their router read h, each with a norm of
// its own.
void Decoder::add_experts(int layer, const Matrix& h, const Matrix& y) {
  const ModelConfig& config = m_model.config();
  const auto& weights = m_step.weights(layer);
  const Matrix x(m_parallel.data(), h.extent(0), config.hidden_size);
  const auto norm_input = [&](const Model::Weights::Norm& norm) {
    m_step.rounded =
        m_step.linear.room_for_rounded(m_model.dtype(), h.extent(0), config.hidden_size);
    engine::add_and_norm(m_step.exec, h, Matrix(), norm_of(config, norm), x, m_step.rounded);
  };
  Matrix z = x;
  m_step.locally([&] {
    norm_input(weights.router_in);
    m_experts.route(m_step, layer, x);
    norm_input(weights.experts_in);
    z = m_experts.run_routed(m_step, layer, x);
  });
  complete(z, weights.experts_out);
  m_step.locally([&] { engine::add(m_step.exec, y, z); });
}

// Sums the output of a part over ranks, and norms and scales it for the residual stream.
void Decoder::complete(const Matrix& y, const Model::Weights::Norm& norm) {
  m_step.exchange.sum(m_step.exec, m_comm, y);
  finish(y, norm);
}

void Decoder::finish(const Matrix& y, const Model::Weights::Norm& norm) {
  const ModelConfig& config = m_model.config();
  if (norm.weight.extent(0) > 0) {
    m_step.locally([&] {
      engine::add_and_norm(m_step.exec, y, Matrix(), norm_of(config, norm), y,
                           linalg::RoundedRows());
    });
  }
  const auto multiplier = static_cast<float>(config.residual_multiplier);
  if (multiplier != 1) m_step.locally([&] { engine::scale(m_step.exec, y, multiplier); });
}

void Decoder::show_layer(int layer) {
  ArrayView output_weights;
  if (m_shared && m_shared->gives_output_weights()) {
    output_weights = m_shared->gather_output_weights(m_step, layer);
  }
  m_policies.show_layer(m_step, layer, output_weights);
}

// Shows the input of attention to the observer, and scores the rows.
void Decoder::show_input(int layer, const RowRange& rows, const Matrix& x) {
  if (m_observer) {
    m_step.locally([&] {
      m_step.for_each_span(rows, [&](std::size_t s, std::int64_t begin, std::int64_t end) {
        const StepBatch::Span& span = m_step.spans()[s];
        m_observer->attention_input(
            span.sequence, layer, m_step.first_positions[s] + begin - span.first,
            Kokkos::subview(x, range(begin - rows.begin, end - rows.begin), Kokkos::ALL));
      });
    });
  }
  if (m_step.has_scores && m_step.is_pruned(layer)) score(layer, rows, x);
}

// Calls the scorer once for all sequences: on the rows from the first scored span to the last one.
void Decoder::score(int layer, const RowRange& rows, const Matrix& x) {
  std::int64_t begin = rows.end, end = rows.begin;
  m_step.for_each_span(rows, [&](std::size_t s, std::int64_t first, std::int64_t last) {
    if (!m_step.spans()[s].rule.score) return;
    begin = std::min(begin, first);
    end = std::max(end, last);
  });
  if (begin >= end) return;
  // Not by `locally`: all ranks must call a scorer that communicates.
  const base::Stopwatch watch(m_step.seconds.scoring);
  try {
    m_scorer->score(m_step.exec, layer, Kokkos::subview(m_step.positions, range(begin, end)),
                    Kokkos::subview(x, range(begin - rows.begin, end - rows.begin), Kokkos::ALL),
                    m_step.new_scores(layer, begin, end));
  } catch (...) {
    m_step.note(std::current_exception());
  }
}

}  // namespace kvzap
