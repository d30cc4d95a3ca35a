// Steps of a model that runs outside of the library: its layers bring arrays of any strides.
#include <fmt/format.h>

#include "engine/decoder.hpp"
#include "engine/external_arrays.hpp"
#include "model/step_block.hpp"

namespace kvzap {
namespace {

using engine::RowRange;
using linalg::Matrix;

void check_extents(const ArrayView& array, const char* name, int layer,
                   const std::array<std::int64_t, 3>& expected) {
  if (!array) throw Error(fmt::format("attention of layer {}: {} are missing", layer, name));
  if (array.extents == expected) return;
  throw Error(fmt::format("attention of layer {}: {} are {} x {} x {}; expected {} x {} x {}",
                          layer, name, array.extents[0], array.extents[1], array.extents[2],
                          expected[0], expected[1], expected[2]));
}

// The rows first .. first + count - 1 of an array.
ArrayView rows_of(ArrayView array, std::int64_t first, std::int64_t count) {
  const std::int64_t offset =
      first * array.strides[0] * static_cast<std::int64_t>(size_of(array.dtype));
  array.data = static_cast<char*>(array.data) + offset;
  array.extents[0] = count;
  return array;
}

}  // namespace

void Decoder::begin_step(const StepBatch& batch) {
  if (m_external) throw Error("decoder: a step has begun already");
  if (m_comm.size() > 1) throw Error("decoder: an external model has one rank");
  const ModelConfig& config = m_model.config();
  if (config.value_dim != 0 && config.value_dim != config.head_dim) {
    throw Error(fmt::format(
        "decoder: values of {} dimensions; expected an external model whose values have the {} "
        "dimensions of keys",
        config.value_dim, config.head_dim));
  }
  for (int l = 0; l < static_cast<int>(m_layers.size()); ++l) {
    if (!m_step.shares_rows(l)) continue;
    throw Error(
        fmt::format("decoder: layer {} reads the keys and values of layer {}; expected an "
                    "external model whose layers all have their own",
                    l, m_step.rows_of(l)));
  }
  if (std::any_of(batch.spans().begin(), batch.spans().end(),
                  [](const StepBatch::Span& span) { return span.output != StepOutput::none; })) {
    throw Error("decoder: an external model computes its own logits");
  }
  for (const StepBatch::Span& span : batch.spans()) {
    // The caller's keys have the order of the checkpoint.
    if (span.rule.policy && span.rule.policy->policy->needs().frequencies &&
        !m_model.config().rotates_halves()) {
      throw Error(
          "the policy turns queries or keys by RoPE's frequencies; expected a model whose RoPE "
          "rotates each dimension of a head with the one half a head away");
    }
  }
  m_external = batch;
  try {
    begin(*m_external);
  } catch (...) {
    m_external.reset();
    throw;
  }
  m_next_layer = 0;
  or_cancel([&] {
    m_step.place_positions();
    skip_states();
  });
}

// Counts the tokens of the external step in layers that have no attention, up to the next that has.
void Decoder::skip_states() {
  for (; m_next_layer < static_cast<int>(m_layers.size()); ++m_next_layer) {
    if (m_cache.shape().has_rows(m_next_layer)) return;
    for (const StepBatch::Span& span : m_step.spans()) {
      m_cache.count_tokens(span.sequence, m_next_layer, span.count);
    }
  }
}

void Decoder::attend(int layer, const std::vector<ExternalLayer>& spans) {
  require_step();
  or_cancel([&] {
    const int layers = static_cast<int>(m_layers.size());
    if (layer != m_next_layer || layer >= layers) {
      throw Error(fmt::format("decoder: attention of layer {}; expected layer {} of {}", layer,
                              m_next_layer, layers));
    }
    check_layer(layer, spans);
    take_sinks(layer, spans);
    if (m_policies.see(m_step, layer)) {
      show_layer(layer);
      m_policies.show_external(spans, m_external_sinks);
    }
    const std::int64_t count = m_step.tokens();
    const std::int64_t block = model::block_tokens(m_model.config());
    for (std::int64_t begin = 0; begin < count; begin += block) {
      attend(layer, {begin, std::min(count, begin + block)}, spans);
    }
    end_layers(layer);
    m_step.agree_on_failure();
    base::fence(m_step.exec, "kvzap::decoder: the caller reads the output");
  });
  ++m_next_layer;
  skip_states();
}

void Decoder::end_step() {
  require_step();
  const int layers = static_cast<int>(m_layers.size());
  if (m_next_layer != layers) {
    throw Error(fmt::format("decoder: the step ends after {} of {} layers", m_next_layer, layers));
  }
  end();
  m_external.reset();
}

void Decoder::cancel_step() {
  if (m_external) cancel();
}

void Decoder::require_step() const {
  if (!m_external) throw Error("decoder: no step has begun");
}

bool Decoder::needs_hidden() const {
  require_step();
  return std::any_of(m_step.spans().begin(), m_step.spans().end(),
                     [](const StepBatch::Span& span) { return span.rule.score; }) ||
         m_policies.need_hidden(m_step);
}

void Decoder::check_layer(int layer, const std::vector<ExternalLayer>& spans) const {
  if (spans.size() != m_step.spans().size()) {
    throw Error(fmt::format("attention of layer {}: {} sequences; expected the step's {}", layer,
                            spans.size(), m_step.spans().size()));
  }
  const ModelConfig& config = m_model.config();
  const std::int64_t kv_heads = config.kv_heads_of(layer);
  const std::int64_t q_heads = config.query_heads_of(layer);
  const std::int64_t dim = config.head_dim_of(layer);
  const bool hidden_is_read = needs_hidden();
  for (std::size_t s = 0; s < spans.size(); ++s) {
    const std::int64_t count = m_step.spans()[s].count;
    check_extents(spans[s].queries, "queries", layer, {count, q_heads, dim});
    check_extents(spans[s].keys, "keys", layer, {count, kv_heads, dim});
    check_extents(spans[s].values, "values", layer, {count, kv_heads, dim});
    check_extents(spans[s].output, "outputs", layer, {count, q_heads, dim});
    if (hidden_is_read || spans[s].hidden) {
      check_extents(spans[s].hidden, "hidden states", layer, {count, 1, config.hidden_size});
    }
    if (has_sinks(layer)) check_extents(spans[s].sinks, "sinks", layer, {1, 1, q_heads});
    if (spans[s].output_weights) {
      check_extents(spans[s].output_weights, "output weights", layer,
                    {config.hidden_size, 1, q_heads * dim});
    }
  }
}

bool Decoder::has_sinks(int layer) const {
  return m_model.config().has_sinks && m_model.config().layer(layer).has_sinks;
}

void Decoder::take_sinks(int layer, const std::vector<ExternalLayer>& spans) {
  linalg::Vector& sinks = m_external_sinks;
  const std::int64_t heads = has_sinks(layer) ? m_model.config().query_heads_of(layer) : 0;
  const auto count = static_cast<std::int64_t>(sinks.extent(0));
  if (count != heads) sinks = linalg::Vector("kvzap::decoder::sinks", heads);
  if (heads == 0) return;
  engine::copy_array(m_step.exec, spans.front().sinks, sinks);
}

// As pass_layer's attention, with the projections of the caller.
void Decoder::attend(int layer, const RowRange& rows, const std::vector<ExternalLayer>& spans) {
  const ExecutionSpace& exec = m_step.exec;
  const std::int64_t m = rows.count(), dim = m_step.head_dim(layer);
  const std::int64_t kv_heads = m_step.kv_heads(layer), q_heads = m_step.query_heads(layer);
  const std::int64_t columns = (q_heads + 2 * kv_heads) * dim;
  const Matrix x = m_step.matrix(engine::Step::normed, m, m_model.config().hidden_size);
  const Matrix qkv = m_attention.room_for_qkv(m_step, layer, rows);
  const ArrayView queries(qkv.data(), DType::f32, {m, q_heads, dim}, {columns, dim, 1});
  const ArrayView attended(m_step.data(engine::Step::mixed), DType::f32, {m, q_heads, dim},
                           {q_heads * dim, dim, 1});
  const ArrayView keys = m_step.new_keys(layer), values = m_step.new_values(layer);
  // Calls visit(its rows of `array`, row of the step) for each span that has it.
  const auto for_each_part = [&](ArrayView ExternalLayer::*array, const auto& visit) {
    m_step.for_each_span(rows, [&](std::size_t s, std::int64_t begin, std::int64_t end) {
      const std::int64_t first = begin - m_step.spans()[s].first;
      if (spans[s].*array) visit(rows_of(spans[s].*array, first, end - begin), begin);
    });
  };
  m_step.locally([&] {
    for_each_part(&ExternalLayer::hidden, [&](const ArrayView& from, std::int64_t row) {
      engine::copy_array(exec, from, ArrayView(x).rows_from(row - rows.begin));
    });
    for_each_part(&ExternalLayer::queries, [&](const ArrayView& from, std::int64_t row) {
      engine::copy_array(exec, from, queries.rows_from(row - rows.begin));
    });
    for_each_part(&ExternalLayer::keys, [&](const ArrayView& from, std::int64_t row) {
      engine::copy_array(exec, from, keys.rows_from(row));
    });
    for_each_part(&ExternalLayer::values, [&](const ArrayView& from, std::int64_t row) {
      engine::copy_array(exec, from, values.rows_from(row));
    });
  });
  show_input(layer, rows, x);
  m_attention.attend(m_step, layer, rows, {x, qkv, m_external_sinks});
  m_step.locally([&] {
    for_each_part(&ExternalLayer::output, [&](const ArrayView& to, std::int64_t row) {
      engine::copy_array(exec, attended.rows(row - rows.begin, to.extents[0]), to);
    });
  });
}

}  // namespace kvzap
