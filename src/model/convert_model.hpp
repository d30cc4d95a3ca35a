// Converts a model's folder to a GGUF file and back, with weights of type bf16.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace kvzap::model {

/// Throws Error if `target` exists, as a broken link too.
void refuse_existing(const std::filesystem::path& target);

/// Called with the values written so far, and those of the whole model. An exception ends the work,
/// which then leaves nothing behind.
using ConvertProgress = std::function<void(std::int64_t done, std::int64_t total)>;

struct ModelCheck {
  std::string refusal;                // the error with which kvzap refuses to run it; "": it runs
  std::vector<std::string> warnings;  // those of its config
};

/// Checks config, tokenizer and the shapes of all tensors of a model, a folder or a GGUF file.
ModelCheck check_to_run(const std::filesystem::path& model);

/// Writes the model of `folder` to the GGUF file `file`: matrices as BF16, vectors as F32. Reads
/// and writes tensor by tensor. Throws Error if the folder cannot be read, for RoPE scaling and
/// tokenizers that the format cannot hold, and if the file exists or cannot be written. For one
/// process only.
std::vector<std::string> write_gguf(const std::filesystem::path& folder,
                                    const std::filesystem::path& file,
                                    const ConvertProgress& progress = {});

/// Writes the model of a GGUF file to the new folder `folder`: config.json,
/// generation_config.json, tokenizer.json, tokenizer_config.json and model.safetensors, all
/// weights as bf16. The folder appears once it is complete. Throws Error likewise.
void write_folder(const std::filesystem::path& file, const std::filesystem::path& folder,
                  const ConvertProgress& progress = {});

}  // namespace kvzap::model
