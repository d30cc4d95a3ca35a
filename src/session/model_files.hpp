// Files of a model folder: weights, and hashes that tell models and tokenizers apart.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace kvzap::detail {

/// The folder's *.safetensors files, sorted by name.
std::vector<std::filesystem::path> weight_files(const std::filesystem::path& folder);

/// Tells models apart: the text files that decide on what a model computes, and of each file of
/// weights its name, its size, and parts of it, evenly spread. (Reading all of it would take longer
/// than loading this rank's share; training changes all tensors.)
std::string hash_of_model(const std::filesystem::path& folder, bool with_weights);

/// What hash_of_model covers, in three: config.json and weights, which decide on a cache's rows;
/// the files that turn text into token ids; generation_config.json, which decides where answers
/// end. Empty where the folder has no such file.
struct ModelHashes {
  std::string model;
  std::string tokenizer;
  std::string generation;
};
ModelHashes hashes_of_model(const std::filesystem::path& folder, bool with_weights);

/// The same for a file or folder that a policy reads (PolicyParameter::Kind::file); of a folder,
/// for what policies read of it.
std::string hash_of_policy_file(const std::filesystem::path& file);

}  // namespace kvzap::detail
