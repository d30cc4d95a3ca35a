// A model's description as the metadata of a GGUF file, and config.json made from such metadata.
#pragma once

#include <cstdint>
#include <filesystem>
#include <kvzap/model/model_config.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "gguf/architectures.hpp"
#include "gguf/gguf_file.hpp"
#include "gguf/gguf_writer.hpp"
#include "gguf/model_file.hpp"

namespace kvzap::model {

/// Returns config.json. Throws Error for an architecture that is not one of gguf::architectures(),
/// for malformed or missing values, and for tensors and settings that the architecture does not
/// have.
nlohmann::json make_config(const gguf::GgufFile& file);

/// Returns config.json of a folder or, made from its metadata, of a GGUF file; nothing for a folder
/// without one. Throws the errors of gguf::read_model_object and of make_config.
std::optional<gguf::ModelFile> read_config(const std::filesystem::path& model);

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
