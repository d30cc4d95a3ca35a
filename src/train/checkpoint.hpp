// Checkpoint of an unfinished training. folder/checkpoint/training.json describes the training;
// layer-N.safetensors has the progress of layer N.
#pragma once

#include <filesystem>
#include <kvzap/lab/train.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "files/json_field.hpp"

namespace kvzap::train {

/// An unfinished layer (MLP), or a finished one.
struct LayerCheckpoint {
  std::optional<MlpTrainer::State> state;
  std::optional<TrainedLayer> trained;
};

/// Replaces a layer's checkpoint in one step. Throws Error that names the file.
void write_checkpoint(const std::filesystem::path& folder, int layer,
                      const MlpTrainer::State& state);
void write_checkpoint(const std::filesystem::path& folder, int layer, const TrainedLayer& trained);
/// Returns an empty checkpoint if there is none. Throws Error, naming the file, if it is damaged.
LayerCheckpoint read_checkpoint(const std::filesystem::path& folder, int layer);

/// Returns the fields in which two descriptions of a training differ, with both values: "epochs:
/// recorded 15, given 20".
std::vector<std::string> differences(const nlohmann::ordered_json& there,
                                     const nlohmann::ordered_json& here);

/// Lists the fields of a report but its samples: for its JSON and for messages.
template <class Report, class Visit>
void list_measures(Report& r, Visit& visit) {
  visit("layer", r.layer);
  visit("r2", r.r2);
  visit("mse", r.mse);
  visit("mse_of_head", r.mse_of_head);
  visit("training_mse", r.training_mse);
  visit("seconds", r.seconds);
  visit("training_pairs", r.training);
  visit("validation_pairs", r.validation);
  visit("dropped_pairs", r.dropped);
  visit("condition", r.condition);
  visit("epoch_mse", r.epoch_mse);
}

/// Convert a layer's report to JSON and back. Values that are not finite become null.
nlohmann::ordered_json report_json(const LayerReport& report);
LayerReport report_from_json(const files::JsonField& value);

/// Returns folder/checkpoint.
std::filesystem::path checkpoint_folder(const std::filesystem::path& folder);

}  // namespace kvzap::train
