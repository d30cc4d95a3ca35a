// The JSON files of a model: read from a folder, or made from the metadata of a GGUF file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace kvzap::gguf {

/// A parsed file of a model.
struct ModelFile {
  nlohmann::json content;
  /// Its name in messages: "FOLDER/config.json" or "FILE.gguf (config.json)".
  std::string where;
};

/// Returns whether the name has GGUF's extension, or is that of a file with GGUF's first bytes, and
/// is not that of a folder.
bool is_gguf(const std::filesystem::path& model);

/// Returns the name in messages of a file that `model` (a folder or a GGUF file) has or lacks.
std::string name_of_model_file(const std::filesystem::path& model, std::string_view name);

/// Returns the parsed file `name` of a model's folder. For a GGUF file it returns the content that
/// a folder would have: generation_config.json, tokenizer.json or tokenizer_config.json
/// (config.json: model::read_config). Returns nothing if the model has no such file. Throws Error
/// if the file is not JSON, is larger than `max_bytes` or cannot be read, and the errors of
/// GgufFile and of the function that makes the content.
std::optional<ModelFile> read_model_file(const std::filesystem::path& model, std::string_view name,
                                         std::uintmax_t max_bytes = 64u << 20);

/// Calls read_model_file and also throws Error if the content is not an object.
std::optional<ModelFile> read_model_object(const std::filesystem::path& model,
                                           std::string_view name);

/// Returns whether read_model_file finds the file. Does not check its content.
bool has_model_file(const std::filesystem::path& model, std::string_view name);

}  // namespace kvzap::gguf
