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

/// One layer of a surrogate, in float, row-major. Linear if hidden is 0, otherwise
/// Linear-GELU(erf)-Linear.
struct SurrogateLayer {
  std::int64_t inputs = 0;
  std::int64_t hidden = 0;
  std::int64_t outputs = 0;
  // linear: (outputs, inputs), (outputs); MLP: (hidden, inputs), (hidden)
  std::vector<float> weight1, bias1;
  std::vector<float> weight2, bias2;  // MLP: (outputs, hidden), (outputs)
};

/// Split of the pairs into training and validation, chosen by the seed alone. Whole texts are
/// validated if the source knows its texts and has at least 1 / share of them, otherwise single
/// pairs. If share > 0, at least one text or pair is validated.
struct PairSplit {
  std::vector<bool> is_validation;  // by pair
  std::int64_t training = 0;
  std::int64_t validation = 0;
  bool by_text = false;
};
/// Splits the pairs. `share`: approximate fraction of validation pairs, in [0, 1). Throws Error if
/// it is outside this range, without pairs, or if no training pairs are left.
PairSplit split_pairs(const PairsInfo& info, double share, std::uint64_t seed);

/// Options of train_ridge.
struct RidgeOptions {
  double alpha = 1;  // scikit-learn's Ridge(alpha): |y - Xw - b|^2 + alpha |w|^2
};

/// Options of MlpTrainer.
struct MlpOptions {
  std::int64_t hidden = 0;  // 0: inputs / 8, at least 1
  int epochs = 15;
  double learning_rate = 5e-3;  // at first; cosine annealing over epochs, to 0
  std::int64_t batch = 512;
  double weight_decay = 0.01;  // AdamW; its other constants are torch's defaults
  double clip = 1;             // largest norm of a layer's gradient
  std::uint64_t seed = 0;
};

/// Results of a layer's training.
struct LayerReport {
  int layer = 0;
  /// By KV head: squared Pearson correlation on validation pairs. NaN if the oracle or the
  /// prediction does not vary, or without validation pairs.
  std::vector<double> r2;
  std::vector<double> mse_of_head;  // mean squared error on validation pairs; NaN without them
  double mse = 0;                   // on validation pairs, mean over heads; NaN without them
  double training_mse = 0;    // on training pairs; for an MLP, measured while the last epoch ran
  double seconds = 0;         // including reading, over all runs that trained the layer
  std::int64_t training = 0;  // pairs used
  std::int64_t validation = 0;
  std::int64_t dropped = 0;  // pairs that were left out because a value is not finite
  /// Linear: LAPACK's estimate of the condition number of X^T X + alpha, 1-norm; 0 for an MLP.
  double condition = 0;
  std::vector<double> epoch_mse;  // MLP: on training pairs, while the epoch ran
  /// Some validation pairs, evenly spread, for a scatter plot: (sample, KV head).
  std::vector<float> oracle, predicted;
};

/// A layer and its results.
struct TrainedLayer {
  SurrogateLayer surrogate;
  LayerReport report;
};

/// Called between blocks of pairs and between batches. Returns true to stop.
using StopRequest = std::function<bool()>;
/// Called between blocks and batches with the finished fraction of the layer's work, in [0, 1].
using LayerProgress = std::function<void(double share)>;

/// Most validation pairs of a layer that a report keeps for a plot.
inline constexpr std::int64_t max_plotted_pairs = 300;
/// Condition numbers above this cause a warning: fewer than 4 of 16 digits are left.
inline constexpr double ill_conditioned = 1e12;

/// Ridge regression of one layer by normal equations. With up to 1,024 inputs, sums are in double
/// in one pass over the training pairs. With more inputs, sums are in float over 4,096 pairs at a
/// time, and one or two passes then refine the solution in double. If float has too few digits for
/// that, everything is computed again in double. Memory: O(inputs^2). Returns nothing if `stop`
/// returned true. No communication. Throws Error, naming the layer, if the Cholesky factor does not
/// exist, and the errors of PairSource::read.
std::optional<TrainedLayer> train_ridge(const PairSource& source, int layer, const PairSplit& split,
                                        const RidgeOptions& options, const StopRequest& stop = {},
                                        const LayerProgress& progress = {});

/// Returns the bytes of memory that train_ridge needs for a layer of `info`.
std::int64_t ridge_bytes(const PairsInfo& info);

/// Trains one layer's MLP by AdamW (Loshchilov and Hutter, arXiv 1711.05101) with torch's defaults.
/// The loss is the mean squared error over the batch and the layer's KV heads. The gradient is
/// clipped by the layer's norm; kvpress' trainer clips by the norm of all layers together. The
/// result depends on source, options, layer and backend, but not on the number of ranks or on
/// interruptions.
class MlpTrainer {
 public:
  /// Reads the layer's pairs into memory, hidden states in their stored type. Initialises as
  /// torch.nn.Linear does. Throws Error for options out of range and exhausted memory, and the
  /// errors of PairSource::read.
  MlpTrainer(const PairSource& source, int layer, const PairSplit& split,
             const MlpOptions& options);
  MlpTrainer(const MlpTrainer&) = delete;
  MlpTrainer& operator=(const MlpTrainer&) = delete;
  ~MlpTrainer();

  /// The state that a checkpoint stores.
  struct State {
    std::int64_t epoch = 0;  // current epoch
    std::int64_t batch = 0;  // next batch of the epoch
    std::int64_t step = 0;   // batches so far
    double loss = 0;         // sum over the epoch's pairs so far
    double seconds = 0;
    std::vector<double> epoch_mse;
    std::vector<float> parameters, first_moment, second_moment;
  };
  State state() const;
  /// Continues from `state`. Throws Error if it does not fit.
  void restore(const State& state);

  /// Trains to the end of the epoch, or of the current batch once `stop` returns true. Returns
  /// whether the epoch is complete.
  bool run_epoch(const StopRequest& stop = {}, const LayerProgress& progress = {});
  bool is_done() const;
  /// Returns the current layer, and its results on the validation pairs.
  TrainedLayer result();

  /// Returns the bytes of memory needed for all pairs of a layer of `info`.
  static std::int64_t bytes(const PairsInfo& info, const MlpOptions& options);

  struct Impl;  // for each value type

 private:
  std::unique_ptr<Impl> m_impl;
};

/// Options of train_surrogate.
struct TrainingOptions {
  bool mlp = false;
  RidgeOptions ridge;
  MlpOptions mlp_options;
  double validation = 0.05;
  std::uint64_t seed = 0;    // of the split, and of an MLP
  DType dtype = DType::f32;  // of the published weights: f32 or bf16
  std::string pairs_file;    // for the model card
  std::string model_name;    // for the model card; empty: the name in the pairs
  std::string command;       // for the model card
  std::string version;
  bool resume = false;     // from the checkpoint in the folder, if any
  bool overwrite = false;  // replace a surrogate or checkpoint in the folder; never a model's files
};

/// Called with the progress of this rank's layers.
struct TrainingProgress {
  std::function<void(int layers_done, int layers, double share_of_layer)> update;
};

/// Result of train_surrogate.
struct TrainingReport {
  bool stopped = false;  // by request; the folder has a checkpoint
  std::vector<LayerReport> layers;
  double seconds = 0;  // of this run
  std::int64_t training = 0, validation = 0;
  bool split_by_text = false;
  std::vector<std::string> warnings;
};

/// Trains a surrogate of all layers, layer l on rank l modulo the number of ranks. Writes the
/// folder that `kvzap run --surrogate` and kvpress' KVzapModel.from_pretrained read: config.json,
/// model.safetensors, README.md, and training.json with the whole report.
///
/// Each layer has a checkpoint in folder/checkpoint. It is written after each epoch and when `stop`
/// returns true, and removed once the folder is complete. `resume` continues from it to the same
/// result, bit for bit, with any number of ranks. Collective; every rank gets the whole report.
/// Throws AgreedError for options out of range, a folder with other files, a checkpoint of other
/// options or pairs, and errors of reading, training and writing.
TrainingReport train_surrogate(const PairSource& source, const TrainingOptions& options,
                               const std::filesystem::path& folder, const Communicator& comm,
                               const StopRequest& stop = {}, const TrainingProgress& progress = {});

/// Returns the report as JSON text, as in training.json.
std::string training_json(const TrainingReport& report, const TrainingOptions& options,
                          const PairsInfo& info);

}  // namespace kvzap
