// Reads GGUF files (versions 2 and 3, little-endian), memory-mapped and fully checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "files/mapped_file.hpp"
#include "gguf/block_formats.hpp"
#include "gguf/metadata.hpp"

namespace kvzap::gguf {

/// The location of one tensor in a mapped file.
struct TensorEntry {
  std::string name;
  /// Path of the file that holds the tensor.
  const std::string* file = nullptr;
  /// Extents, slowest first (GGUF stores them fastest first): rows, then columns.
  std::vector<std::int64_t> shape;
  /// The number of the type in the file.
  std::uint32_t type = 0;
  /// The type's blocks; nullptr if the type is unsupported.
  const BlockFormat* format = nullptr;
  /// First byte of the blocks. Valid during the lifetime of the GgufFile.
  const std::byte* data = nullptr;
  /// Bytes of all blocks; 0 if the type is unsupported.
  std::size_t bytes = 0;
};

/// A name of a tensor's type for messages: "Q4_1", or "number 16".
std::string type_name(const TensorEntry& tensor);

/// Returns the paths of all parts of a split file FILE-00001-of-00003.gguf, in order; any part may
/// be given. For another name, returns that path. Does not check that the files exist.
std::vector<std::filesystem::path> parts_of(const std::filesystem::path& file);

/// The metadata and tensors of a GGUF file or of all parts of a split one. Move-only; moving keeps
/// the addresses valid.
class GgufFile {
 public:
  /// Maps the file, and the other parts of a split file. Throws Error that names the file, the
  /// metadata key or the tensor, expected and found. It checks all counts, lengths, types and
  /// offsets: whatever it returns lies in the files.
  static GgufFile open(const std::filesystem::path& file);

  GgufFile(GgufFile&&) = default;
  GgufFile& operator=(GgufFile&&) = default;
  GgufFile(const GgufFile&) = delete;
  GgufFile& operator=(const GgufFile&) = delete;

  const Metadata& metadata() const { return m_metadata; }
  const std::map<std::string, TensorEntry, std::less<>>& tensors() const { return m_tensors; }
  /// Returns the tensor, or nullptr.
  const TensorEntry* find(std::string_view name) const;

 private:
  GgufFile() = default;
  Metadata read_part(const std::filesystem::path& file);
  void read_other_parts(const std::filesystem::path& file);

  // Pointers to their elements stay valid when the object moves.
  std::vector<std::unique_ptr<std::string>> m_names;
  std::vector<files::MappedFile> m_files;
  Metadata m_metadata;
  std::map<std::string, TensorEntry, std::less<>> m_tensors;
};

}  // namespace kvzap::gguf
