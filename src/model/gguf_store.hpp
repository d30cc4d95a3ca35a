// The weights of a GGUF file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <kvzap/model/model_config.hpp>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "gguf/gguf_file.hpp"
#include "gguf/tensor_names.hpp"
#include "model/weight_store.hpp"

namespace kvzap::model {

/// The tensors of a GGUF file under the names and in the order of rows of Hugging Face's
/// checkpoints. The file holds the experts of a layer in one tensor for each of gate, up and down.
/// In most checkpoints, each expert has tensors of its own; in others, gate and up of all experts
/// are one tensor (gguf::fused_expert_names).
class GgufStore final : public WeightStore {
 public:
  /// Opens the file, all parts of a split one. Throws Error as GgufFile::open and
  /// ModelConfig::load.
  explicit GgufStore(const std::filesystem::path& file);

  std::unique_ptr<StoredTensor> at(std::string_view name,
                                   const std::vector<std::int64_t>& shape) const override;
  std::unique_ptr<StoredTensor> slice(const std::string& name, const TensorSlice& slice,
                                      std::int64_t rows, std::int64_t columns) const override;
  bool has(std::string_view name) const override;

 private:
  const gguf::TensorEntry* find(const gguf::TensorName& place) const;
  /// Returns the number of tensors that the file's tensor holds, one of which is at `place`.
  std::int64_t count_at(const gguf::TensorName& place) const;
  /// Opens the gate or the up projection of one expert, which the file has in one tensor; null: it
  /// does not.
  std::unique_ptr<StoredTensor> open_half(const gguf::TensorName& place,
                                          const std::vector<std::int64_t>& shape) const;
  /// Opens a tensor of delta_input_names().
  std::unique_ptr<StoredTensor> delta_inputs(std::string_view name,
                                             const std::vector<std::string>& places,
                                             const std::vector<std::int64_t>& shape) const;
  /// Opens the tensor at `place`, of this shape in the file. `head`: see m_interleaved_head.
  /// `is_vector`: its values become one vector.
  std::unique_ptr<StoredTensor> open(const gguf::TensorName& place,
                                     const std::vector<std::int64_t>& shape, std::int64_t head,
                                     bool is_vector = false) const;

  gguf::GgufFile m_file;
  const gguf::Architecture* m_architecture = nullptr;
  ModelConfig m_config;
  std::int64_t m_experts = 0;
  /// Values of a head if the file interleaves the halves of each head in the rows of queries and
  /// keys, else 0.
  std::int64_t m_interleaved_head = 0;
};

}  // namespace kvzap::model
