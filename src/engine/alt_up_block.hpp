// Several residual streams around the layers.
#pragma once

#include "engine/mixers.hpp"
#include "engine/stream_kernels.hpp"

namespace kvzap::engine {

/// Alternating updates (AltUpConfig): Step::h is the active stream while a layer runs. All ranks
/// compute the same. Its functions are called within Step::locally.
class AltUpBlock final : public LayerBlock {
 public:
  void reserve(Step& step) override;
  void release() override;

  /// Makes the streams of the step's tokens from their embedding.
  void make_streams(Step& step);
  /// Mixes the streams before a layer.
  void predict(Step& step, int layer, const RowRange& rows);
  /// Keeps x (row, hidden_size), a layer's normed input, plus its map of low rank.
  void augment(Step& step, int layer, const linalg::Matrix& x);
  /// h = (h + of_tokens + what augment has kept) / sqrt(2)
  void add_augmented(Step& step, const linalg::Matrix& of_tokens, const linalg::Matrix& h);
  /// Corrects the streams after a layer, whose output is in Step::h. That becomes the active
  /// stream, scaled for the layer's inputs.
  void correct(Step& step, int layer, const RowRange& rows);
  /// Adds y (row, hidden_size) to all streams but the first.
  void add_to_others(Step& step, const RowRange& rows, const linalg::Matrix& y);
  /// Sets Step::h to the input of the final norm, for the rows whose outputs are asked for.
  void join_streams(Step& step);

 private:
  StreamRows streams(const Step& step, const RowRange& rows) const;
  linalg::Matrix stream(const Step& step, std::int64_t stream, const RowRange& rows) const;
  linalg::Matrix route(Step& step, int layer, const linalg::Matrix& x);

  linalg::Vector m_streams;    // (stream, token, hidden_size)
  linalg::Vector m_normed;     // (row, hidden_size), and other rows of this size
  linalg::Vector m_augmented;  // (row, hidden_size)
  linalg::Vector m_ranked;     // (row, rank of the map)
  linalg::Vector m_routed;     // (row, stream)
  linalg::Vector m_factors;    // (row, stream * stream)
};

}  // namespace kvzap::engine
