// This rank's weights from the tensors of a checkpoint, by the description of the model.
#pragma once

#include <kvzap/core/head_partition.hpp>
#include <kvzap/model/model.hpp>
#include <memory>

#include "model/model_weights.hpp"
#include "model/weights.hpp"

namespace kvzap::model {

/// Reads the part of `rank`. Throws Error that names file and tensor.
std::shared_ptr<Model::Weights> read_weights(const WeightSource& source, const ModelConfig& config,
                                             const HeadPartition& partition, int rank,
                                             const ProgressCallback& progress);

/// A tensor of a model.
struct NamedTensor {
  std::string name;                 // of Hugging Face
  std::vector<std::int64_t> shape;  // (outputs, inputs) or (extent)
};

/// Returns the tensors that a model of this configuration has: those that read_weights reads.
std::vector<NamedTensor> tensors_of(const ModelConfig& config);

}  // namespace kvzap::model
