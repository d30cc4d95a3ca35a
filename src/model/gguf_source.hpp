// The tensors and metadata of a model as a GGUF file holds them, read from a folder or a GGUF file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <kvzap/model/model_config.hpp>
#include <memory>
#include <string>
#include <vector>

#include "gguf/block_formats.hpp"
#include "gguf/gguf_writer.hpp"

namespace kvzap::model {

/// A tensor in the order of values of GGUF files.
struct SourceTensor {
  /// GGUF's name.
  std::string name;
  /// Extents, slowest first.
  std::vector<std::int64_t> shape;
  /// "FILE: tensor NAME", for messages.
  std::string where;
  /// Widens rows first … end - 1 to `target`. Threads may call it at once.
  std::function<void(std::int64_t first, std::int64_t end, float* target)> read;
  /// Lets the system drop the tensor's pages from this process's memory.
  std::function<void()> release;
  /// The blocks in the source, if it holds them in this order; else nullptr.
  const gguf::BlockFormat* format = nullptr;
  const std::byte* blocks = nullptr;

  /// Values of a row, and rows of all leading extents.
  std::int64_t columns() const { return shape.back(); }
  std::int64_t rows() const;
};

/// A model to write. Its tensors read files that `files` keeps open.
struct GgufSource {
  std::vector<SourceTensor> tensors;
  std::int64_t n_layers = 0;
  /// Whether the embedding table is also the output head.
  bool is_tied = false;
  /// Query heads for each KV head.
  std::int64_t heads_per_group = 1;
  /// Experts of a layer; 0 for a dense model.
  std::int64_t n_experts = 0;
  /// Bytes of the files that hold the weights.
  std::uintmax_t file_bytes = 0;
  /// Adds all metadata, with this value of general.file_type.
  std::function<void(std::uint32_t file_type, gguf::GgufWriter& writer)> add_metadata;
  std::shared_ptr<const void> files;
};

/// Opens a folder or a GGUF file. Throws Error if it cannot be read, if a tensor is missing, has
/// another shape or an unsupported type, and for settings and tokenizers that GGUF cannot hold.
GgufSource open_gguf_source(const std::filesystem::path& model);

}  // namespace kvzap::model
