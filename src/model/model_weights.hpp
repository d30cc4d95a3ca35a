// The weights of a Model, in the layouts that the decoder multiplies.
#pragma once

#include <kvzap/model/model.hpp>
#include <vector>

#include "linalg/linear_weights.hpp"

namespace kvzap {

/// All matrices are (outputs, inputs), as in torch.nn.Linear. Those of the layers may be packed or
/// quantised, and so may an output head that is not tied. Maps of the same input form one matrix,
/// so that a step computes one product for them.
template <class Value>
struct Model<Value>::Weights {
  using Linear = linalg::LinearWeights<Value>;
  using Vector = Kokkos::View<float*, MemorySpace>;

  /// This rank's part of one layer's weights.
  struct Layer {
    Vector input_norm, attention_norm;  // (hidden)
    // Outputs of q, then k, then v: ((query heads + 2 KV heads) * dim, hidden). Their biases, or
    // empty.
    Linear qkv;
    Vector qkv_bias;
    Linear o;               // (hidden, query heads * dim)
    Vector o_bias;          // on rank 0 alone: it is added once, before the sum over ranks
    Vector q_norm, k_norm;  // (dim), or empty
    Linear gate_up;         // (2 * intermediate, hidden): gate, then up
    Vector gate_up_bias;    // or empty
    Linear down;            // (hidden, intermediate)
    Vector down_bias;       // on rank 0 alone
  };

  std::vector<Layer> layers;
  Vector final_norm;
  // The rows first_token … first_token + extent(0) - 1 of the vocabulary.
  Linear embedding;  // plain rows or quantised
  std::int64_t first_token = 0;
  Linear output_head;  // the same rows
};

}  // namespace kvzap
