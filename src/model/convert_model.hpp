// Converts a model's folder to a GGUF file and back, with weights of type bf16.
#pragma once

#include <filesystem>

namespace kvzap::model {

/// Throws Error if `target` exists, as a broken link too.
void refuse_existing(const std::filesystem::path& target);

/// Writes the model of `folder` to the GGUF file `file`: matrices as BF16, vectors as F32. Reads
/// and writes tensor by tensor. Throws Error if the folder cannot be read, for RoPE scaling and
/// tokenizers that the format cannot hold, and if the file exists or cannot be written. For one
/// process only.
void write_gguf(const std::filesystem::path& folder, const std::filesystem::path& file);

/// Writes the model of a GGUF file to the new folder `folder`: config.json,
/// generation_config.json, tokenizer.json, tokenizer_config.json and model.safetensors, all
/// weights as bf16. Throws Error likewise.
void write_folder(const std::filesystem::path& file, const std::filesystem::path& folder);

}  // namespace kvzap::model
