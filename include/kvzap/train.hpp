// Training of surrogates (KVzap, arXiv 2601.07891, section 3), layer by layer.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <kvzap/pairs.hpp>
#include <kvzap/types.hpp>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace kvzap {

/// One layer of a surrogate, in float, row-major, as it is published. Linear if hidden is 0.
struct SurrogateLayer {
  std::int64_t inputs = 0;
  std::int64_t hidden = 0;
  std::int64_t outputs = 0;
  std::vector<float> weight1, bias1;  // linear: (outputs, inputs), (outputs); else (hidden, inputs)
  std::vector<float> weight2, bias2;  // MLP: (outputs, hidden), (outputs)
};

/// Which pairs are kept back to tell how good a surrogate is. Whole texts where the source knows
/// its texts and has enough of them, else single pairs; chosen by the seed alone.
struct PairSplit {
  std::vector<bool> is_validation;  // by pair
  std::int64_t training = 0;
  std::int64_t validation = 0;
};
/// `share` in [0, 1): of the pairs, about. Throws Error if nothing is left to train on.
PairSplit split_pairs(const PairsInfo& info, double share, std::uint64_t seed);

struct RidgeOptions {
  double alpha = 1;  // scikit-learn's Ridge(alpha): |y - Xw - b|^2 + alpha |w|^2
};

struct MlpOptions {
  std::int64_t hidden = 0;  // 0: inputs / 8
  int epochs = 15;
  double learning_rate = 5e-3;  // at first; cosine annealing over epochs, to 0
  std::int64_t batch = 512;
  double weight_decay = 0.01;  // AdamW; its other constants are torch's defaults
  double clip = 1;             // largest norm of a layer's gradient
  std::uint64_t seed = 0;
};

/// How a layer's training went.
struct LayerReport {
  int layer = 0;
  std::vector<double> r2;  // by KV head: squared Pearson correlation on validation pairs
  std::vector<double> mse_of_head;
  double mse = 0;                 // on validation pairs
  double training_mse = 0;        // of the last epoch (MLP), of the training pairs (linear)
  double seconds = 0;             // reading included
  std::int64_t dropped = 0;       // pairs left out because a value of theirs is not finite
  double condition = 0;           // linear: estimate for the system's matrix, 1-norm
  std::vector<double> epoch_mse;  // MLP
  /// Some validation pairs, for a scatter plot: (sample, KV head).
  std::vector<float> oracle, predicted;
};

}  // namespace kvzap
