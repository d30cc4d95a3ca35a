// The metadata of a GGUF file that describe a model's computation.
#pragma once

#include <cstdint>
#include <filesystem>
#include <kvzap/model/model_config.hpp>
#include <string>
#include <vector>

#include "gguf/architectures.hpp"
#include "gguf/gguf_writer.hpp"

namespace kvzap::model {

/// Returns the architecture of files with this model. Throws Error if the format has none.
const gguf::Architecture& gguf_architecture(const ModelConfig& config,
                                            const std::filesystem::path& folder);

/// Adds the description of the model, with this value of general.file_type. Throws Error that names
/// config.json in `folder` for settings that the format cannot hold: some kinds of RoPE scaling,
/// and those that programs derive from the architecture alone.
void add_configuration(const ModelConfig& config, const std::filesystem::path& folder,
                       std::uint32_t file_type, gguf::GgufWriter& writer);

/// Factors that divide RoPE's frequencies, which files hold as a tensor.
struct RopeFactors {
  std::string name;
  std::vector<float> values;
};
std::vector<RopeFactors> rope_factors(const ModelConfig& config);

}  // namespace kvzap::model
