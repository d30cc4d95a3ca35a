// Writes GGUF files (version 3, little-endian).
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gguf/block_formats.hpp"
#include "gguf/metadata.hpp"

namespace kvzap::gguf {

/// The metadata and tensors of one file, in the order of the calls. The values of tensors follow
/// when the file is written, so that they need not be in memory at once.
class GgufWriter {
 public:
  void add_u32(std::string_view key, std::uint32_t value);
  void add_f32(std::string_view key, float value);
  void add_flag(std::string_view key, bool value);
  void add_string(std::string_view key, std::string_view text);
  void add_strings(std::string_view key, const std::vector<std::string>& texts);
  void add_flags(std::string_view key, const std::vector<bool>& values);
  void add_i32s(std::string_view key, const std::vector<std::int32_t>& values);
  void add_f32s(std::string_view key, const std::vector<float>& values);

  /// Adds a value of another file as it is.
  void add_copy(std::string_view key, const MetadataValue& value);

  /// Says what readers of the file will do in another way than those of its source.
  void add_warning(std::string text) { m_warnings.push_back(std::move(text)); }
  const std::vector<std::string>& warnings() const { return m_warnings; }

  /// Adds a tensor. `shape`: extents, slowest first; each row holds whole blocks of `format`.
  /// Throws Error for other shapes.
  void add_tensor(std::string_view name, const std::vector<std::int64_t>& shape,
                  const BlockFormat& format);

  /// Appends blocks to the tensor that is written.
  using Sink = std::function<void(const void* blocks, std::size_t bytes)>;
  /// Writes all blocks of the tensor of this index, in order, to the sink.
  using Fill = std::function<void(std::size_t index, const Sink& sink)>;

  /// Writes the file and calls `fill` once for each tensor. The new file replaces an existing one
  /// in one step, once it is complete and on disk. For one process only. Throws Error that names
  /// the file if it cannot be written, or if `fill` writes another number of bytes than the
  /// tensor has.
  void write(const std::filesystem::path& file, const Fill& fill) const;

 private:
  struct Tensor {
    std::string name;
    std::uint64_t bytes;
  };

  std::uint64_t m_values = 0;
  std::string m_metadata;  // as the file stores it
  std::string m_infos;     // likewise
  std::vector<Tensor> m_tensors;
  std::uint64_t m_data_bytes = 0;
  std::vector<std::string> m_warnings;
};

}  // namespace kvzap::gguf
