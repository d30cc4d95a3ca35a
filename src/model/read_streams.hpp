// Weights of parts that a few families have around the usual ones of a layer: inputs of each layer,
// several residual streams, experts beside a dense part.
#pragma once

#include <kvzap/core/head_partition.hpp>
#include <string>

#include "model/model_weights.hpp"
#include "model/weights.hpp"

namespace kvzap::model {

/// Reads parts of a layer whose tensors' names begin with `prefix`, such as "model.layers.3.".
class StreamReader {
 public:
  StreamReader(const WeightSource& source, const ModelConfig& config, int ranks, int rank)
      : m_source(source), m_config(config), m_ranks(ranks), m_rank(rank) {}

  /// The maps of all layers' inputs, and those of the streams.
  void read(Model::Weights& weights) const;
  void read(std::int64_t layer, const std::string& prefix, Model::Weights::Layer& weights) const;

 private:
  using Linear = Model::Weights::Linear;
  using Norm = Model::Weights::Norm;

  /// A whole map (outputs, inputs), and a norm of `size` values.
  Linear whole(const std::string& name, std::int64_t outputs, std::int64_t inputs) const;
  Norm norm(const std::string& name, std::int64_t size) const;
  Model::Weights::LayerInputs layer_inputs(std::int64_t layer, const std::string& prefix) const;
  Model::Weights::AltUp alt_up(const std::string& prefix) const;
  void read_experts(const std::string& prefix, Model::Weights::Layer& weights) const;

  const WeightSource& m_source;
  const ModelConfig& m_config;
  int m_ranks, m_rank;
};

}  // namespace kvzap::model
