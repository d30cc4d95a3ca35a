// The weights of a GGUF file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string_view>
#include <vector>

#include "gguf/gguf_file.hpp"
#include "model/weight_store.hpp"

namespace kvzap::model {

/// The tensors of a GGUF file under the names and in the order of rows of Hugging Face's
/// checkpoints.
class GgufStore final : public WeightStore {
 public:
  /// Opens the file, all parts of a split one. Throws Error as GgufFile::open and make_config.
  explicit GgufStore(const std::filesystem::path& file);

  std::unique_ptr<StoredTensor> at(std::string_view name,
                                   const std::vector<std::int64_t>& shape) const override;
  bool has(std::string_view name) const override;

 private:
  gguf::GgufFile m_file;
  /// Values of a head if the file interleaves the halves of each head in the rows of queries and
  /// keys, else 0.
  std::int64_t m_interleaved_head = 0;
};

}  // namespace kvzap::model
