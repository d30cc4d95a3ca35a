// The folder of a surrogate as it is published.
#pragma once

#include <filesystem>
#include <kvzap/lab/train.hpp>
#include <string>
#include <vector>

namespace kvzap::detail {

/// Files that a finished training leaves in its folder.
inline constexpr const char* surrogate_files[] = {"model.safetensors", "config.json", "README.md",
                                                  "training.json"};

/// Writes them, each in one step, model.safetensors first. `layers` in order. One process alone.
/// Throws Error, naming the file.
void write_surrogate_folder(const std::filesystem::path& folder,
                            const std::vector<SurrogateLayer>& layers, const TrainingReport& report,
                            const TrainingOptions& options, const PairsInfo& info);

/// What is trained from what: the fields on which the result depends, by name.
std::string describe_training(const TrainingOptions& options, const PairsInfo& info);

}  // namespace kvzap::detail
