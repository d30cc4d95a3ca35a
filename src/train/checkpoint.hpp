// What an unfinished training has left in its folder: folder/checkpoint/training.json says what is
// trained from what, layer-N.safetensors how far layer N is.
#pragma once

#include <filesystem>
#include <kvzap/lab/train.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace kvzap::detail {

/// A layer that is under way (MLP), or done.
struct LayerCheckpoint {
  std::optional<MlpTrainer::State> state;
  std::optional<TrainedLayer> trained;
};

/// Replaces a layer's checkpoint in one step. Throws Error, naming the file.
void write_checkpoint(const std::filesystem::path& folder, int layer,
                      const MlpTrainer::State& state);
void write_checkpoint(const std::filesystem::path& folder, int layer, const TrainedLayer& trained);
/// Empty if there is none. Throws Error, naming the file, for one that is damaged.
LayerCheckpoint read_checkpoint(const std::filesystem::path& folder, int layer);

/// Names of the fields in which two descriptions of a training differ, with both values:
/// "epochs is 15 there and 20 here".
std::vector<std::string> differences(const nlohmann::ordered_json& there,
                                     const nlohmann::ordered_json& here);

/// A layer's report as JSON, whole, and back. Values that are not finite are null.
nlohmann::ordered_json report_json(const LayerReport& report);
LayerReport report_from_json(const nlohmann::json& value);

/// folder/checkpoint
std::filesystem::path checkpoint_folder(const std::filesystem::path& folder);

}  // namespace kvzap::detail
