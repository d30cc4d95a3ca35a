// How commands load a model's weights, and tell models apart.
#pragma once

#include <filesystem>
#include <kvzap/model/model.hpp>
#include <memory>
#include <optional>
#include <string>

#include "commands/setup.hpp"

namespace kvzap::driver {

/// Tells models apart: the text files that decide on what a model computes, and of each file of
/// weights its name, its size, and parts of it, evenly spread. (Reading all of it would take longer
/// than loading this rank's share; training changes all tensors.)
std::string hash_of_model(const std::filesystem::path& folder, bool with_weights);

/// What hash_of_model covers, in two: config.json and weights, which decide on a cache's rows, and
/// what turns text into token ids. Empty where the folder has no such file.
struct ModelHashes {
  std::string model;
  std::string tokenizer;
};
ModelHashes hashes_of_model(const std::filesystem::path& folder, bool with_weights);

/// The same for a file or folder that a policy reads (PolicyParameter::Kind::file); of a folder,
/// for what policies read of it.
std::string hash_of_policy_file(const std::filesystem::path& file);

/// Throws Error if the folder lacks what is needed of *.safetensors and tokenizer.json, with the
/// options that do without.
void check_parts(const std::filesystem::path& folder, bool needs_weights, bool needs_tokenizer);

/// This rank's share of the weights. Collective.
template <class Value>
std::shared_ptr<const Model<Value>> load_model(const ModelSetup& setup,
                                               std::optional<std::uint64_t> random_weights,
                                               const Communicator& comm,
                                               const ProgressCallback& progress) {
  std::shared_ptr<const Model<Value>> model;
  comm.agree([&] {
    model = std::make_shared<const Model<Value>>(Model<Value>::load(
        setup.folder, setup.config, setup.partition, comm.rank(), random_weights, progress));
  });
  return model;
}

/// work(value) with a value of the type that --dtype names.
template <class Work>
auto with_value_type(DType dtype, const Work& work) {
  switch (dtype) {
    case DType::f32:
      return work(float{});
    case DType::f16:
      return work(half{});
    case DType::bf16:
      break;
  }
  return work(bfloat16{});
}

}  // namespace kvzap::driver
