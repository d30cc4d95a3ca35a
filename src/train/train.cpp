#include <fmt/format.h>

#include <algorithm>
#include <kvzap/lab/train.hpp>
#include <nlohmann/json.hpp>
#include <system_error>

#include "base/stopwatch.hpp"
#include "files/json_file.hpp"
#include "files/temporary_file.hpp"
#include "parallel/message.hpp"
#include "train/checkpoint.hpp"
#include "train/surrogate_folder.hpp"

namespace kvzap {

template <class Visit>
void list_fields(SurrogateLayer& s, Visit& visit) {
  visit("inputs", s.inputs);
  visit("hidden", s.hidden);
  visit("outputs", s.outputs);
  visit("weight1", s.weight1);
  visit("bias1", s.bias1);
  visit("weight2", s.weight2);
  visit("bias2", s.bias2);
}

template <class Visit>
void list_fields(LayerReport& r, Visit& visit) {
  train::list_measures(r, visit);
  visit("oracle", r.oracle);
  visit("predicted", r.predicted);
}

template <class Visit>
void list_fields(TrainedLayer& layer, Visit& visit) {
  visit("surrogate", layer.surrogate);
  visit("report", layer.report);
}

namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

fs::path description_file(const fs::path& folder) {
  return train::checkpoint_folder(folder) / "training.json";
}

// Throws Error, naming the differences, if the checkpoint belongs to another training.
void check_same_training(const fs::path& folder, const std::string& here) {
  const fs::path file = description_file(folder);
  const std::vector<std::string> found =
      train::differences(ordered_json(files::read_json_object(file)), files::parse_own_json(here));
  if (found.empty()) return;
  std::string list;
  for (const std::string& difference : found) list += (list.empty() ? "" : ", ") + difference;
  throw Error(fmt::format("{}: the checkpoint is of another training: {}; --overwrite starts again",
                          file.string(), list));
}

// Returns whether a folder has only checkpoints of layers and their description, including
// unfinished files.
bool has_checkpoints_alone(const fs::path& folder) {
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind("layer-", 0) != 0 && name.rfind("training.json", 0) != 0) return false;
  }
  return true;
}

// Throws Error if --overwrite would replace anything but a surrogate, for example a model, whose
// files have the same names.
void check_replaceable(const fs::path& folder, bool has_checkpoint) {
  const fs::path checkpoint = train::checkpoint_folder(folder);
  if (fs::exists(checkpoint) &&
      !(fs::is_directory(checkpoint) && has_checkpoints_alone(checkpoint))) {
    throw Error(
        fmt::format("{}: was not made by kvzap train and would be removed; give another folder",
                    checkpoint.string()));
  }
  const fs::path config = folder / "config.json";
  if (fs::exists(config)) {
    const nlohmann::json content = files::read_json_object(config);
    const auto type = content.find("model_type");
    if (type != content.end() && *type == "kvzap") return;
    throw Error(
        fmt::format("{}: belongs to no surrogate (model_type is {}) and would be "
                    "replaced; give another folder",
                    config.string(), type == content.end() ? "absent" : files::described(*type)));
  }
  if (has_checkpoint) return;  // a training was killed while it wrote the files
  for (const char* name : train::surrogate_files) {
    if (!fs::exists(folder / name)) continue;
    throw Error(
        fmt::format("{}: belongs to no surrogate (no config.json) and would be "
                    "replaced; give another folder",
                    (folder / name).string()));
  }
}

// Returns whether the folder is empty, or has only the files of a training that was killed at its
// start.
bool is_as_good_as_empty(const fs::path& folder) {
  const fs::path checkpoint = train::checkpoint_folder(folder);
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    if (entry.path() != checkpoint || !entry.is_directory()) return false;
    if (fs::exists(description_file(folder)) || !has_checkpoints_alone(checkpoint)) return false;
  }
  return true;
}

void begin_folder(const fs::path& folder, const TrainingOptions& options,
                  const std::string& description) {
  const std::string name = folder.string();
  std::error_code error;
  const fs::file_status status = fs::status(folder, error);
  if (fs::exists(status) && !fs::is_directory(status)) {
    throw Error(fmt::format("{}: exists and is not a folder", name));
  }
  const bool has_checkpoint = fs::exists(description_file(folder), error);
  const bool is_empty = !fs::exists(status) || is_as_good_as_empty(folder);
  if (options.resume && has_checkpoint) return check_same_training(folder, description);
  if (!is_empty && !options.overwrite) {
    if (options.resume) {
      throw Error(
          fmt::format("{}: has no checkpoint to resume from, but is not empty; --overwrite "
                      "starts again",
                      name));
    }
    throw Error(has_checkpoint
                    ? fmt::format("{}: has a checkpoint of an earlier training; --resume "
                                  "continues from it, --overwrite starts again",
                                  name)
                    : fmt::format("{}: the folder is not empty; --overwrite replaces the "
                                  "surrogate in it once the new one is complete",
                                  name));
  }
  if (!is_empty) check_replaceable(folder, has_checkpoint);
  fs::remove_all(train::checkpoint_folder(folder), error);
  if (!error) fs::create_directories(train::checkpoint_folder(folder), error);
  if (error) {
    throw Error(fmt::format("{}: cannot be prepared: {}", name, error.message()));
  }
  files::write_text(description_file(folder), description);
}

// Trains a layer from its checkpoint or from the start. Returns nothing if stopped.
std::optional<TrainedLayer> train_layer(const PairSource& source, int layer, const PairSplit& split,
                                        const TrainingOptions& options, const fs::path& folder,
                                        const StopRequest& stop, const LayerProgress& progress) {
  const train::LayerCheckpoint checkpoint = train::read_checkpoint(folder, layer);
  if (checkpoint.trained) return checkpoint.trained;
  std::optional<TrainedLayer> trained;
  if (!options.mlp) {
    trained = train_ridge(source, layer, split, options.ridge, stop, progress);
    if (!trained) return std::nullopt;
  } else {
    if (stop && stop()) return std::nullopt;
    MlpTrainer trainer(source, layer, split, options.mlp_options);
    if (checkpoint.state) trainer.restore(*checkpoint.state);
    while (!trainer.is_done()) {
      const bool is_whole = trainer.run_epoch(stop, progress);
      if (!trainer.is_done()) train::write_checkpoint(folder, layer, trainer.state());
      if (!is_whole || (!trainer.is_done() && stop && stop())) return std::nullopt;
    }
    trained = trainer.result();
  }
  train::write_checkpoint(folder, layer, *trained);
  return trained;
}

std::vector<std::string> warnings_of(const std::vector<LayerReport>& layers,
                                     const PairsInfo& info) {
  std::vector<std::string> warnings;
  std::int64_t dropped = 0;
  for (const LayerReport& layer : layers) {
    dropped += layer.dropped;
    if (layer.condition > ill_conditioned) {
      warnings.push_back(fmt::format(
          "layer {}: the system is ill-conditioned (condition number {:.1e}): its coefficients may "
          "have few correct digits; a larger ridge helps",
          layer.layer, layer.condition));
    }
  }
  if (dropped > 0) {
    warnings.push_back(fmt::format(
        "{} of {} pairs (over all layers) have a value that is not finite and were left out",
        dropped, info.pairs * static_cast<std::int64_t>(layers.size())));
  }
  if (!info.is_complete()) {
    warnings.push_back(
        fmt::format("the pairs are from {} of {} texts: kvzap collect has not finished", info.texts,
                    info.planned_texts));
  }
  return warnings;
}

}  // namespace

TrainingReport train_surrogate(const PairSource& source, const TrainingOptions& options,
                               const fs::path& folder, const Communicator& comm,
                               const StopRequest& stop, const TrainingProgress& progress) {
  const auto start = base::Clock::now();
  const PairsInfo& info = source.info();
  TrainingOptions own = options;
  own.mlp_options.seed = own.seed;
  PairSplit split;
  comm.agree([&] {
    if (own.dtype == DType::f16) throw Error("training: dtype is f16; expected f32 or bf16");
    split = split_pairs(info, own.validation, own.seed);
  });
  comm.agree_on_root([&] { begin_folder(folder, own, train::describe_training(own, info)); });

  TrainingReport report;
  report.training = split.training;
  report.validation = split.validation;
  report.split_by_text = split.by_text;
  std::vector<SurrogateLayer> surrogates;
  // Each rank trains one layer in a round. Layers have one size and take the same time.
  const int rounds = (info.layers + comm.size() - 1) / comm.size();
  for (int round = 0; round < rounds; ++round) {
    const int first = round * comm.size();
    const int layer = first + comm.rank();
    std::optional<TrainedLayer> trained;
    comm.agree([&] {
      if (layer >= info.layers) return;
      const LayerProgress share = [&](double part) {
        if (progress.update) progress.update(round, rounds, part);
      };
      trained = train_layer(source, layer, split, own, folder, stop, share);
    });
    // A rank stops all ranks if its layer is unfinished, or on a stop request while rounds are
    // left.
    const bool is_unfinished = layer < info.layers && !trained;
    const bool is_told = round + 1 < rounds && stop && stop();
    report.stopped = comm.all_reduce_max(std::int64_t{is_unfinished || is_told ? 1 : 0}) > 0;
    if (report.stopped) break;
    for (int l = first; l < std::min(first + comm.size(), info.layers); ++l) {
      TrainedLayer shared;
      if (l == layer) shared = std::move(*trained);
      parallel::broadcast(comm, l - first, shared);
      report.layers.push_back(std::move(shared.report));
      if (comm.is_root()) surrogates.push_back(std::move(shared.surrogate));
    }
  }
  report.seconds = base::seconds_since(start);
  report.warnings = warnings_of(report.layers, info);
  if (report.stopped) return report;
  comm.agree_on_root([&] {
    train::write_surrogate_folder(folder, surrogates, report, own, info);
    std::error_code error;
    fs::remove_all(train::checkpoint_folder(folder), error);
    if (error) {
      throw Error(
          fmt::format("{}: the surrogate is complete, but its checkpoint cannot be "
                      "removed: {}",
                      folder.string(), error.message()));
    }
  });
  return report;
}

}  // namespace kvzap
