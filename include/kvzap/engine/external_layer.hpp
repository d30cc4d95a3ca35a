// A layer of a model that runs outside of the library, such as one of transformers.
#pragma once

#include <kvzap/core/array_view.hpp>

namespace kvzap {

/// Attention of one layer, for the tokens that a step adds to one sequence.
struct ExternalLayer {
  /// (token, query head, head_dim): after RoPE, unscaled. Query head q reads KV head q / group.
  ArrayView queries;
  /// (token, KV head, head_dim): keys after RoPE, values.
  ArrayView keys, values;
  /// (token, query head, head_dim): written.
  ArrayView output;
  /// (token, hidden_size): the input of attention, after the norm. Only scorers and some policies
  /// read it: see Engine::needs_hidden.
  ArrayView hidden;
  /// (hidden_size, query heads * head_dim): W_O. Few policies read it; absent if the model has
  /// weights.
  ArrayView output_weights;
  /// (1, query heads): logits of attention sinks (ModelConfig::has_sinks); the same in all spans.
  ArrayView sinks;
};

}  // namespace kvzap
