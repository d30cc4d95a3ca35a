// Files of a model: weights, and hashes that distinguish models and tokenizers.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace kvzap::session {

/// Returns a folder's *.safetensors files, sorted by name, or the parts of a GGUF file.
std::vector<std::filesystem::path> weight_files(const std::filesystem::path& model);

/// Returns whether weights may be stored in fewer bits than a value type has: in a GGUF file, or in
/// a folder with weights whose config.json has a quantization_config.
bool has_quantised_weights(const std::filesystem::path& model);

/// Returns a hash that distinguishes models. It covers the text files that affect the results of a
/// model. Of each file of weights it covers the name, the size and evenly spaced parts. (Reading
/// all weights would take longer than loading this rank's share, and training changes all tensors.)
/// For a GGUF file, the texts made from its metadata stand for the text files.
std::string hash_of_model(const std::filesystem::path& model, bool with_weights);

/// The files of hash_of_model in three groups. First, config.json and weights, which determine the
/// rows of a cache. Second, the files that turn text into token ids. Third, generation_config.json,
/// which determines the end of answers. A hash is empty if the folder has no such file.
struct ModelHashes {
  std::string model;
  std::string tokenizer;
  std::string generation;
};
ModelHashes hashes_of_model(const std::filesystem::path& model, bool with_weights);

/// Returns the same hash of a file or folder that a policy reads (PolicyParameter::Kind::file). For
/// a folder, it covers the files that policies read.
std::string hash_of_policy_file(const std::filesystem::path& file);

}  // namespace kvzap::session
