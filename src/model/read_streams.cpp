#include "model/read_streams.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace kvzap::model {

auto StreamReader::whole(const std::string& name, std::int64_t outputs, std::int64_t inputs) const
    -> Linear {
  return m_source.linear({{name + ".weight", outputs, {{0, outputs}}}}, inputs, {{0, inputs}});
}

auto StreamReader::norm(const std::string& name, std::int64_t size) const -> Norm {
  return {m_source.vector({{name + ".weight", size, {{0, size}}}}), {}};
}

void StreamReader::read(Model::Weights& weights) const {
  const std::int64_t hidden = m_config.hidden_size;
  if (m_config.layer_inputs) {
    weights.inputs_norm =
        norm("model.per_layer_projection_norm", m_config.layer_inputs->size).weight;
  }
  for (std::int64_t s = 0; m_config.alt_up && s + 1 < m_config.alt_up->streams; ++s) {
    weights.stream_in.push_back(
        whole(fmt::format("model.altup_projections.{}", s), hidden, hidden));
    weights.stream_out.push_back(
        whole(fmt::format("model.altup_unembed_projections.{}", s), hidden, hidden));
  }
}

void StreamReader::read(std::int64_t layer, const std::string& prefix,
                        Model::Weights::Layer& weights) const {
  if (m_config.layer_inputs) weights.inputs = layer_inputs(layer, prefix);
  if (m_config.alt_up) weights.alt_up = alt_up(prefix);
  if (m_config.layer(layer).has_experts && m_config.experts->beside_dense) {
    read_experts(prefix, weights);
  }
  if (m_config.scales_layers) {
    weights.scale = m_source.value({prefix + "layer_scalar", 1, {{0, 1}}});
  }
}

// The tables and projections of all layers are one tensor each, with a slice for each layer.
Model::Weights::LayerInputs StreamReader::layer_inputs(std::int64_t layer,
                                                       const std::string& prefix) const {
  const auto [size, vocabulary] = *m_config.layer_inputs;
  const std::int64_t hidden = m_config.hidden_size, first = layer * size;
  // Also of layers that are not run (ModelSetup::all_layers).
  const std::int64_t all = size * std::max(m_config.num_hidden_layers,
                                           static_cast<std::int64_t>(m_config.layers.size()));
  const auto [begin, end] = even_range(size, m_ranks, m_rank);
  const Ranges own = {{begin, end}}, of_hidden = {{0, hidden}};
  Model::Weights::LayerInputs result;
  result.table =
      m_source.table({{"model.embed_tokens_per_layer.weight", vocabulary, {{0, vocabulary}}}}, all,
                     {{first + begin, first + end}});
  result.projection =
      m_source.linear({{"model.per_layer_model_projection.weight", all, {{first, first + size}}}},
                      hidden, of_hidden);
  result.gate =
      m_source.linear({{prefix + "per_layer_input_gate.weight", size, own}}, hidden, of_hidden);
  result.out =
      m_source.linear({{prefix + "per_layer_projection.weight", hidden, of_hidden}}, size, own);
  result.norm = norm(prefix + "post_per_layer_input_norm", hidden);
  return result;
}

Model::Weights::AltUp StreamReader::alt_up(const std::string& prefix) const {
  const AltUpConfig& config = *m_config.alt_up;
  const std::int64_t hidden = m_config.hidden_size, streams = config.streams;
  Model::Weights::AltUp result;
  result.router_norm = norm(prefix + "altup.router_norm", hidden);
  result.router = whole(prefix + "altup.modality_router", streams, hidden);
  result.prediction = whole(prefix + "altup.prediction_coefs", streams * streams, streams);
  result.correction = whole(prefix + "altup.correction_coefs", streams, streams);
  // The file has it even if the model does not use it.
  result.scale = m_source.vector({{prefix + "altup.correct_output_scale", hidden, {{0, hidden}}}});
  result.laurel_in = whole(prefix + "laurel.linear_left", config.laurel_rank, hidden);
  result.laurel_out = whole(prefix + "laurel.linear_right", hidden, config.laurel_rank);
  result.laurel_norm = norm(prefix + "laurel.post_laurel_norm", hidden);
  return result;
}

void StreamReader::read_experts(const std::string& prefix, Model::Weights::Layer& weights) const {
  const std::int64_t hidden = m_config.hidden_size, experts = m_config.experts->count;
  weights.dense_out = norm(prefix + "post_feedforward_layernorm_1", hidden);
  weights.experts_in = norm(prefix + "pre_feedforward_layernorm_2", hidden);
  weights.experts_out = norm(prefix + "post_feedforward_layernorm_2", hidden);
  weights.expert_scales =
      m_source.vector({{prefix + "router.per_expert_scale", experts, {{0, experts}}}});
  weights.router_in.weight = m_source.vector({{prefix + "router.scale", hidden, {{0, hidden}}}});
  // The router's input is divided by the root of its size.
  const auto host =
      Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), weights.router_in.weight);
  const auto factor = static_cast<float>(1 / std::sqrt(static_cast<double>(hidden)));
  for (std::size_t i = 0; i < host.size(); ++i) host(i) *= factor;
  Kokkos::deep_copy(weights.router_in.weight, host);
}

}  // namespace kvzap::model
