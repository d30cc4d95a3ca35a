// The published folder of a surrogate.
#pragma once

#include <filesystem>
#include <kvzap/lab/train.hpp>
#include <string>
#include <vector>

namespace kvzap::train {

/// Files of a finished training.
inline constexpr const char* surrogate_files[] = {"model.safetensors", "config.json", "README.md",
                                                  "training.json"};

/// Writes the files, each in one step and model.safetensors first. `layers` must be in order. Does
/// not communicate. Throws Error, naming the file.
void write_surrogate_folder(const std::filesystem::path& folder,
                            const std::vector<SurrogateLayer>& layers, const TrainingReport& report,
                            const TrainingOptions& options, const PairsInfo& info);

/// Returns the description of a training: the fields that determine the result, by name.
std::string describe_training(const TrainingOptions& options, const PairsInfo& info);

}  // namespace kvzap::train
