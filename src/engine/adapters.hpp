// Maps of low rank that layers add to the maps of a shared block.
#pragma once

#include "engine/step.hpp"

namespace kvzap::engine {

/// Adds out_p in_p x to the output of each part p of a product (LoRA, Hu et al., arXiv 2106.09685).
/// All ranks compute in x, each the rows of out that it has of the product.
class Adapters {
 public:
  using Weights = Model::Weights::Adapter;

  /// Reserves the memory of a step for these weights.
  void reserve(const Step& step, const Weights& weights);
  void release() { m_latents = m_outputs = {}; }
  /// y (row, outputs of all parts) += the adapter's output for x (row, input). `rounded`: x
  /// rounded, or empty. Does nothing without weights.
  void add(Step& step, const Weights& weights, const linalg::Matrix& x,
           const linalg::RoundedRows& rounded, const linalg::Matrix& y);

 private:
  linalg::Vector m_latents, m_outputs;
};

}  // namespace kvzap::engine
