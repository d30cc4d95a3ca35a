// Training of surrogates (KVzap, arXiv 2601.07891, section 3), layer by layer, and the folder in
// which a surrogate is published. docs/guide/train.md describes its use.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <kvzap/core/communicator.hpp>
#include <kvzap/core/types.hpp>
#include <kvzap/lab/pairs.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvzap {

/// One layer of a surrogate, in float, row-major, as it is published. Linear if hidden is 0, else
/// Linear-GELU(erf)-Linear.
struct SurrogateLayer {
  std::int64_t inputs = 0;
  std::int64_t hidden = 0;
  std::int64_t outputs = 0;
  std::vector<float> weight1, bias1;  // linear: (outputs, inputs), (outputs); else (hidden, inputs)
  std::vector<float> weight2, bias2;  // MLP: (outputs, hidden), (outputs)
};

/// Which pairs are kept back to tell how good a surrogate is. Whole texts where the source knows
/// its texts and has at least 1 / share of them, else single pairs; chosen by the seed alone. If
/// share > 0, at least one text or pair is kept back.
struct PairSplit {
  std::vector<bool> is_validation;  // by pair
  std::int64_t training = 0;
  std::int64_t validation = 0;
  bool by_text = false;
};
/// `share` in [0, 1): of the pairs, about. Throws Error if it is outside, if there are no pairs, or
/// if nothing is left to train on.
PairSplit split_pairs(const PairsInfo& info, double share, std::uint64_t seed);

/// Of train_ridge.
struct RidgeOptions {
  double alpha = 1;  // scikit-learn's Ridge(alpha): |y - Xw - b|^2 + alpha |w|^2
};

/// Of MlpTrainer.
struct MlpOptions {
  std::int64_t hidden = 0;  // 0: inputs / 8, at least 1
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
  /// By KV head: squared Pearson correlation on validation pairs; NaN where the oracle or the
  /// prediction does not vary, or without validation pairs.
  std::vector<double> r2;
  std::vector<double> mse_of_head;  // mean squared error on validation pairs; NaN without
  double mse = 0;                   // on validation pairs, mean over heads; NaN without
  double training_mse = 0;          // of the last epoch, while it ran (MLP); of training pairs
  double seconds = 0;               // reading included, of all runs that took part
  std::int64_t training = 0;        // pairs that were used
  std::int64_t validation = 0;
  std::int64_t dropped = 0;  // pairs left out because a value of theirs is not finite
  /// Linear: LAPACK's estimate of the condition number of X^T X + alpha, 1-norm; 0 for an MLP.
  double condition = 0;
  std::vector<double> epoch_mse;  // MLP: of training pairs, while the epoch ran
  /// Some validation pairs, evenly spread, for a scatter plot: (sample, KV head).
  std::vector<float> oracle, predicted;
};

/// A layer, and how good it is.
struct TrainedLayer {
  SurrogateLayer surrogate;
  LayerReport report;
};

/// Asked between blocks of pairs and between batches: whether to end now.
using StopRequest = std::function<bool()>;
/// Told between blocks and batches which part of the layer's work is done, in [0, 1].
using LayerProgress = std::function<void(double share)>;

/// Most validation pairs of a layer that a report keeps for a plot.
inline constexpr std::int64_t max_plotted_pairs = 300;
/// A condition number above this is worth a warning: of 16 digits fewer than 4 are left.
inline constexpr double ill_conditioned = 1e12;

/// Ridge regression of one layer by normal equations. Up to 1,024 inputs: sums in double, one pass
/// over the training pairs. Above: sums in float over 4,096 pairs at a time, and one or two passes
/// more that refine the solution in double; if float has too few digits for that, all again in
/// double. Memory: O(inputs^2).
/// Nothing if `stop` said so. One process alone. Throws Error, naming the layer, for a system whose
/// Cholesky factor does not exist, and what PairSource::read throws.
std::optional<TrainedLayer> train_ridge(const PairSource& source, int layer, const PairSplit& split,
                                        const RidgeOptions& options, const StopRequest& stop = {},
                                        const LayerProgress& progress = {});

/// Bytes of memory that train_ridge takes for a layer of `info`.
std::int64_t ridge_bytes(const PairsInfo& info);

/// Training of one layer's MLP by AdamW (Loshchilov and Hutter, arXiv 1711.05101) as torch's
/// defaults have it; mean squared error over the batch and the layer's KV heads. The gradient is
/// clipped by the layer's norm, where kvpress' trainer clips by that of all layers together: so
/// layers depend on nothing but themselves. The result depends on source, options, layer and
/// backend alone: not on the number of ranks, nor on where training was interrupted.
class MlpTrainer {
 public:
  /// Reads the layer's pairs; hidden states stay in memory in the type they are stored in. Starts
  /// from torch.nn.Linear's initial distribution. Throws Error for options out of range, memory
  /// that is exhausted, and what PairSource::read throws.
  MlpTrainer(const PairSource& source, int layer, const PairSplit& split,
             const MlpOptions& options);
  MlpTrainer(const MlpTrainer&) = delete;
  MlpTrainer& operator=(const MlpTrainer&) = delete;
  ~MlpTrainer();

  /// All of a training that is not over: what a checkpoint holds.
  struct State {
    std::int64_t epoch = 0;  // that is under way
    std::int64_t batch = 0;  // next one of it
    std::int64_t step = 0;   // batches so far
    double loss = 0;         // sum over the epoch's pairs so far
    double seconds = 0;
    std::vector<double> epoch_mse;
    std::vector<float> parameters, first_moment, second_moment;
  };
  State state() const;
  /// Continues from there. Throws Error if it does not fit.
  void restore(const State& state);

  /// Trains to the end of the epoch, or to the end of a batch once `stop` says so. Returns whether
  /// the epoch is complete.
  bool run_epoch(const StopRequest& stop = {}, const LayerProgress& progress = {});
  bool is_done() const;
  /// The layer as it is now, and how good it is on the validation pairs.
  TrainedLayer result();

  /// Bytes of memory that a layer of `info` takes, all pairs of it in use.
  static std::int64_t bytes(const PairsInfo& info, const MlpOptions& options);

  struct Impl;  // for each value type

 private:
  std::unique_ptr<Impl> m_impl;
};

/// What is trained, from what, and where it goes.
struct TrainingOptions {
  bool mlp = false;
  RidgeOptions ridge;
  MlpOptions mlp_options;
  double validation = 0.05;
  std::uint64_t seed = 0;    // of the split; of an MLP too
  DType dtype = DType::f32;  // of the published weights: f32 or bf16
  std::string pairs_file;    // for the model card
  std::string model_name;    // for the model card; empty: as the pairs have it
  std::string command;       // for the model card
  std::string version;
  bool resume = false;     // go on from the checkpoint in the folder, if there is one
  bool overwrite = false;  // replace a surrogate or checkpoint in the folder; never a model's files
};

/// How far all layers together are; this rank's.
struct TrainingProgress {
  std::function<void(int layers_done, int layers, double share_of_layer)> update;
};

/// What train_surrogate did.
struct TrainingReport {
  bool stopped = false;  // by request; the folder has a checkpoint
  std::vector<LayerReport> layers;
  double seconds = 0;  // of this run
  std::int64_t training = 0, validation = 0;
  bool split_by_text = false;
  std::vector<std::string> warnings;
};

/// Trains a surrogate of all layers, layer l on rank l modulo the number of ranks, and writes the
/// folder that `kvzap run --surrogate` and kvpress' KVzapModel.from_pretrained read: config.json,
/// model.safetensors, README.md, and training.json with the whole report. Each layer has a
/// checkpoint in folder/checkpoint, written after each epoch and when `stop` says so, and removed
/// once the folder is complete; `resume` continues from it to the same result, bit for bit, with
/// any number of ranks. Collective; the report is whole on every rank. Throws AgreedError: for
/// options out of range, a folder that has something else in it, a checkpoint of other options or
/// pairs, and whatever reading, training or writing throws.
TrainingReport train_surrogate(const PairSource& source, const TrainingOptions& options,
                               const std::filesystem::path& folder, const Communicator& comm,
                               const StopRequest& stop = {}, const TrainingProgress& progress = {});

/// The report as JSON text: what training.json has in it.
std::string training_json(const TrainingReport& report, const TrainingOptions& options,
                          const PairsInfo& info);

}  // namespace kvzap
