#include "engine/policy_layer.hpp"

#include <algorithm>
#include <cfloat>
#include <kvzap/core/array_view.hpp>
#include <utility>

#include "base/kokkos_compat.hpp"
#include "engine/external_arrays.hpp"
#include "linalg/quantised/products.hpp"
#include "model/model_weights.hpp"

namespace kvzap {

namespace engine {

namespace {

template <class Value>
void take_plain_inputs(const ExecutionSpace& exec, const linalg::LinearWeights& weights,
                       std::int64_t first, const linalg::Matrix& y) {
  const Kokkos::RangePolicy<ExecutionSpace> range(exec, 0, y.size());
  const std::int64_t outputs = weights.outputs();
  if (!weights.is_packed()) {
    const auto rows = weights.rows<Value>();
    Kokkos::parallel_for(
        "kvzap::policy::output_weights", range, KOKKOS_LAMBDA(const std::int64_t i) {
          y(i / outputs, i % outputs) = static_cast<float>(rows(i % outputs, first + i / outputs));
        });
    return;
  }
  // See LinearWeights.
  constexpr std::int64_t block = linalg::LinearWeights::block_outputs;
  constexpr std::int64_t together = std::is_same_v<Value, bfloat16> ? 2 : 1;
  const std::int64_t padded =
      linalg::LinearWeights::padded_inputs(weights.dtype(), weights.inputs());
  const Value* const packed = weights.values<Value>();
  Kokkos::parallel_for(
      "kvzap::policy::output_weights", range, KOKKOS_LAMBDA(const std::int64_t i) {
        const std::int64_t output = i % outputs;
        const std::int64_t input = first + i / outputs;
        const std::int64_t group = (output / block * padded + input / together * together) * block;
        y(i / outputs, output) =
            static_cast<float>(packed[group + output % block * together + input % together]);
      });
}

void keep_marked(const ExecutionSpace& exec, const ScoredLayer& layer) {
  const auto scores = layer.scores;
  const auto keep = layer.keep;
  const std::int64_t columns = keep.extent(1);
  Kokkos::parallel_for(
      "kvzap::policy::keep_marked",
      Kokkos::RangePolicy<ExecutionSpace>(exec, 0, keep.extent(0) * columns),
      KOKKOS_LAMBDA(const std::int64_t i) {
        const float score = scores(i / columns, i % columns);
        keep(i / columns, i % columns) =
            static_cast<std::uint8_t>(score > 0 || !EvictionRule::is_finite(score));
      });
}

// Rows are in order of position and none has been evicted, so the sinks are the first rows.
void mark_sinks(const ExecutionSpace& exec, std::int64_t sink, const linalg::Matrix& scores) {
  const std::int64_t count = std::min<std::int64_t>(sink, scores.extent(1));
  Kokkos::parallel_for(
      "kvzap::policy::mark_sinks",
      Kokkos::RangePolicy<ExecutionSpace>(exec, 0, scores.extent(0) * count),
      KOKKOS_LAMBDA(const std::int64_t i) { scores(i / count, i % count) = FLT_MAX; });
}

}  // namespace

void take_inputs(const ExecutionSpace& exec, const linalg::LinearWeights& weights,
                 std::int64_t first, const linalg::Matrix& y) {
  if (weights.quantised() != nullptr) {
    return linalg::quantised::take_inputs(exec, *weights.quantised(), first, y);
  }
  with_value_type(weights.dtype(),
                  [&](auto zero) { take_plain_inputs<decltype(zero)>(exec, weights, first, y); });
}

void choose_rows(const ExecutionSpace& exec, const Communicator& comm, const RowChoice& choice,
                 const std::vector<ScoredLayer>& layers,
                 const std::vector<linalg::Matrix>& scores) {
  if (choice.sink > 0) {
    for (const linalg::Matrix& of_layer : scores) mark_sinks(exec, choice.sink, of_layer);
  }
  if (choice.budget.has_amount()) {
    return choice.budget.choose(exec, comm, choice.model, choice.tokens, layers);
  }
  for (const ScoredLayer& layer : layers) keep_marked(exec, layer);
}

void set_keep(const Budget* budget, const Budget::Model& model, std::int64_t tokens,
              PolicyLayer::Extents& extents) {
  extents.keep = extents.tokens;
  extents.evict_ratio = 0;
  if (!budget || !budget->has_amount()) return;
  extents.keep = budget->rows_per_head(model, extents.layer, tokens);
  extents.evict_ratio = budget->amount == Budget::Amount::evict_ratio && !budget->pyramid
                            ? budget->ratio_of(extents.layer)
                            : 1 - static_cast<double>(extents.keep) / static_cast<double>(tokens);
}

void DecoderLayer::show(const PolicyStep& step, SequenceId sequence, int layer,
                        std::int64_t new_tokens) {
  m_step = &step;
  m_sequence = sequence;
  m_has_scores = false;
  m_first_new = m_cache.tokens(sequence, layer);
  const std::vector<int>& heads = m_model.partition().heads(layer, m_model.rank());
  m_extents.layer = layer;
  m_extents.sinks = m_model.weights().layers[layer].sinks;
  m_extents.heads = heads;
  m_extents.tokens = m_first_new + new_tokens;
  m_extents.new_tokens = new_tokens;
  m_extents.question = step.question;
  m_extents.repeats_begin = step.repeats_begin;
  m_extents.repeats_end = step.repeats_end;
  m_extents.rows.resize(heads.size());
  for (int h = 0; h < static_cast<int>(heads.size()); ++h) {
    m_extents.rows[h] = (step.scores_all ? m_cache.rows(sequence, layer, h) : 0) + new_tokens;
  }
  set_keep(step.budget, m_counted, m_extents.tokens + step.removed_tokens, m_extents);
}

auto DecoderLayer::gather(int head, std::int64_t begin, std::int64_t count, bool values,
                          linalg::Vector& room) -> RowsView {
  const int dim = m_extents.head_dim;
  base::reserve_scratch(room, count * dim, "kvzap::policy::rows");
  const linalg::Matrix out(room.data(), count, dim);
  // Hidden rows precede all others.
  const std::int64_t hidden = m_step->scores_all ? 0 : m_cache.rows(m_sequence, layer(), head);
  cache::gather_rows(exec(), m_cache.layer(m_sequence, layer()), {head, hidden + begin, count},
                     values ? m_new_values : m_new_keys, values, out);
  // RoPE's dimensions of a row are no value.
  if (values && m_model.config().latent) clear_rotated(exec(), m_model.config(), out);
  return out;
}

auto DecoderLayer::positions(int head, std::int64_t begin, std::int64_t count) -> PositionView {
  base::reserve_scratch(m_scratch.positions, count, "kvzap::policy::positions");
  const Kokkos::View<std::int64_t*, MemorySpace> out(m_scratch.positions.data(), count);
  const std::int64_t hidden = m_step->scores_all ? 0 : m_cache.rows(m_sequence, layer(), head);
  cache::gather_positions(exec(), m_cache.layer(m_sequence, layer()), {head, hidden + begin, count},
                          m_first_new, out);
  return out;
}

auto DecoderLayer::cached_scores(int head) -> Kokkos::View<const float*, MemorySpace> {
  const std::int64_t most = std::max<std::int64_t>(0, most_rows() - m_extents.new_tokens);
  // Layers of other sequences share the memory.
  if ((!m_has_scores || m_scratch.cached_scores_of != this) && m_step->scores_all) {
    base::reserve_scratch(m_scratch.cached_scores, heads() * most, "kvzap::policy::cached_scores");
    m_cache.row_scores(exec(), m_sequence, layer(),
                       linalg::Matrix(m_scratch.cached_scores.data(), heads(), most));
    m_has_scores = true;
    m_scratch.cached_scores_of = this;
  }
  return Kokkos::View<const float*, MemorySpace>(m_scratch.cached_scores.data() + head * most,
                                                 m_step->scores_all ? cached_rows(head) : 0);
}

TokenBlock DecoderLayer::recent() {
  if (!m_step->recent) throw Error("policy: it asks for recent tokens without needing them");
  return m_step->recent->newest(exec(), layer(), m_extents.tokens);
}

void DecoderLayer::attention_mass(const TokenBlock& queries, MassReduction reduction,
                                  const MassView& mass, const MassFactors& factors) {
  if (!m_step->scores_all) {
    throw Error("policy: attention over all rows, where it is to judge new tokens by themselves");
  }
  const std::int64_t seen = queries.first + queries.count - m_first_new;
  AttentionSpan span;
  span.cached = m_cache.layer(m_sequence, layer());
  span.queries = queries.count;
  span.new_rows = seen;
  m_scratch.mass(exec(), span, queries.queries, m_new_keys.rows(0, seen), queries.log_sum_exp, mass,
                 {reduction, factors, m_extents.soft_cap});
}

auto DecoderLayer::output_weights(int query_head) -> RowsView {
  const auto& weights = m_model.weights().layers[layer()].o;
  const std::int64_t dim = m_extents.head_dim;
  const std::int64_t outputs = m_extents.hidden_size;
  base::reserve_scratch(m_scratch.output_weights, dim * outputs, "kvzap::policy::output_weights");
  const linalg::Matrix y(m_scratch.output_weights.data(), dim, outputs);
  if (m_output_weights) {
    ArrayView part = m_output_weights;  // (input, output)
    std::swap(part.strides[0], part.strides[2]);
    part.extents = {dim, 1, outputs};
    part.data = static_cast<char*>(part.data) +
                query_head * dim * part.strides[0] * static_cast<std::int64_t>(size_of(part.dtype));
    copy_array(exec(), part, y);
    return y;
  }
  if (weights.outputs() == 0) throw Error("policy: the model's output weights (W_O) are missing");
  if (m_model.partition().deals_projections()) {
    throw Error("policy: it reads output weights (W_O) without PolicyNeeds::output_weights");
  }
  if (m_model.config().latent) {
    m_scratch.latent.of_head(exec(), m_model.weights().layers[layer()], query_head, y);
  } else {
    take_inputs(exec(), weights, query_head * dim, y);
  }
  return y;
}

}  // namespace engine
}  // namespace kvzap
