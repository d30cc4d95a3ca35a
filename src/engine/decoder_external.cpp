// Steps of a model that runs outside of the library: its layers bring arrays of any strides.
#include <fmt/format.h>

#include "engine/decoder_state.hpp"
#include "engine/external_arrays.hpp"
#include "model/model_weights.hpp"

namespace kvzap {
namespace {

using engine::range;
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

bool Decoder::needs_hidden() const {
  const StepBatch& batch = external_batch();
  for (std::size_t s = 0; s < batch.spans().size(); ++s) {
    const engine::PolicyStep* const step = batch.spans()[s].rule.policy;
    if (batch.spans()[s].rule.score) return true;
    if (step && m_policies->needs[s].blocks && !step->only_watches) return true;
  }
  return false;
}

void Decoder::check_layer(const StepBatch& batch, int layer,
                          const std::vector<ExternalLayer>& spans) const {
  if (spans.size() != batch.spans().size()) {
    throw Error(fmt::format("attention of layer {}: {} sequences; expected the step's {}", layer,
                            spans.size(), batch.spans().size()));
  }
  const ModelConfig& config = m_model.config();
  const std::int64_t kv_heads = config.num_key_value_heads;
  const std::int64_t q_heads = config.num_attention_heads;
  const std::int64_t dim = config.head_dim;
  const bool hidden_is_read = needs_hidden();
  for (std::size_t s = 0; s < spans.size(); ++s) {
    const std::int64_t count = batch.spans()[s].count;
    check_extents(spans[s].queries, "queries", layer, {count, q_heads, dim});
    check_extents(spans[s].keys, "keys", layer, {count, kv_heads, dim});
    check_extents(spans[s].values, "values", layer, {count, kv_heads, dim});
    check_extents(spans[s].output, "outputs", layer, {count, q_heads, dim});
    if (hidden_is_read || spans[s].hidden) {
      check_extents(spans[s].hidden, "hidden states", layer, {count, 1, config.hidden_size});
    }
    if (config.has_sinks) check_extents(spans[s].sinks, "sinks", layer, {1, 1, q_heads});
    if (spans[s].output_weights) {
      check_extents(spans[s].output_weights, "output weights", layer,
                    {config.hidden_size, 1, q_heads * dim});
    }
  }
}

void Decoder::take_sinks(const std::vector<ExternalLayer>& spans) {
  if (!m_model.config().has_sinks) return;
  linalg::Vector& sinks = m_scratch->external_sinks;
  const std::int64_t heads = m_model.config().num_attention_heads;
  if (sinks.extent(0) == 0) sinks = linalg::Vector("kvzap::decoder::sinks", heads);
  engine::copy_array(m_scratch->exec, spans.front().sinks, sinks);
}

// Returns the logits of a layer's attention sinks; empty: it has none.
auto Decoder::sinks_of(int layer) const -> Kokkos::View<float*, MemorySpace> {
  return m_scratch->external ? m_scratch->external_sinks : m_model.weights().layers[layer].sinks;
}

// As attention_block, with the projections of the caller.
void Decoder::external_block(const StepBatch& batch, int layer, const Rows& rows,
                             const std::vector<ExternalLayer>& spans) {
  Scratch& scratch = *m_scratch;
  const ExecutionSpace& exec = scratch.exec;
  const std::int64_t m = rows.count();
  const std::int64_t dim = m_model.config().head_dim;
  const std::int64_t kv_heads = m_cache.shape().heads[layer];
  const std::int64_t q_heads = kv_heads * m_model.config().query_group();
  const std::int64_t columns = (q_heads + 2 * kv_heads) * dim;
  const Matrix x = scratch.matrix(Scratch::normed, m, m_model.config().hidden_size);
  const ArrayView queries(scratch.buffers[Scratch::projected].data(), DType::f32, {m, q_heads, dim},
                          {columns, dim, 1});
  const ArrayView attended(scratch.buffers[Scratch::attended].data(), DType::f32, {m, q_heads, dim},
                           {q_heads * dim, dim, 1});
  const ArrayView keys = new_rows(scratch.new_keys, batch, layer);
  const ArrayView values = new_rows(scratch.new_values, batch, layer);
  // Calls visit(span, its rows of `array`, row of the block).
  const auto for_each_part = [&](ArrayView ExternalLayer::*array, const auto& visit) {
    for_each_span(batch, rows, [&](std::size_t s, std::int64_t begin, std::int64_t end) {
      const std::int64_t first = begin - batch.spans()[s].first;
      if (spans[s].*array) visit(rows_of(spans[s].*array, first, end - begin), begin);
    });
  };
  locally([&] {
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
  show_input(batch, layer, rows, x);
  attend_rows(batch, layer, rows);
  locally([&] {
    for_each_part(&ExternalLayer::output, [&](const ArrayView& to, std::int64_t row) {
      engine::copy_array(exec, attended.rows(row - rows.begin, to.extents[0]), to);
    });
  });
}

}  // namespace kvzap
