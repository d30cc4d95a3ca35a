// Memory-mapped, fully checked reading of *.safetensors files, sharded or not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <kvzap/core/types.hpp>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace kvzap {

/// Where one tensor lies in a mapped file.
struct TensorInfo {
  std::string name;
  /// Value type. Meaningful only where `is_weight` is true.
  DType dtype;
  /// The value type is F32, F16 or BF16. Files may hold others (I64, F8_E4M3, ...) beside weights.
  bool is_weight;
  /// The value type as the file spells it, e.g. "BF16" or "I64".
  std::string stored_dtype;
  /// Extents, slowest first; empty for a scalar.
  std::vector<std::int64_t> shape;
  /// First byte of the little-endian, row-major values. The format promises no alignment: read
  /// values with memcpy, never through a cast pointer. Valid as long as the SafetensorsFolder
  /// lives.
  const std::byte* data;
  /// Bytes from `data` on: product of shape times value size.
  std::size_t bytes;
  /// Path of the file that holds it.
  std::string file;
};

namespace detail {

/// A whole file mapped read-only. Shortening the file while it is mapped ends the process (SIGBUS),
/// as with every mapping.
class MappedFile {
 public:
  /// Throws Error if `file` is not a regular file, is empty or cannot be mapped.
  explicit MappedFile(const std::filesystem::path& file);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::byte* data() const { return m_data; }
  std::size_t size() const { return m_size; }

 private:
  std::byte* m_data = nullptr;
  std::size_t m_size = 0;
};

}  // namespace detail

/// The tensors of a model folder: one *.safetensors file or several. Move-only; moving keeps data
/// pointers valid.
class SafetensorsFolder {
 public:
  /// Maps the files of `folder` and checks their headers: every offset, size and shape, so that no
  /// later access can leave the file.
  ///
  /// With a model.safetensors.index.json, exactly the tensors it lists, from the files it names;
  /// else model.safetensors; else all *.safetensors of the folder, which must not share a tensor
  /// name. `folder` may also be the path of a single file, which is then read alone.
  ///
  /// Throws Error naming the file and what is wrong: no weights, a damaged or truncated file, an
  /// index that names what is not there.
  static SafetensorsFolder open(const std::filesystem::path& folder);

  SafetensorsFolder(SafetensorsFolder&&) = default;
  SafetensorsFolder& operator=(SafetensorsFolder&&) = default;
  SafetensorsFolder(const SafetensorsFolder&) = delete;
  SafetensorsFolder& operator=(const SafetensorsFolder&) = delete;

  /// The weight called `name`. Throws Error if there is none, if its value type is not F32, F16 or
  /// BF16, or if its shape is not `expected_shape`; the message names file, tensor, what was
  /// expected and what was found. The reference is valid as long as this object lives unmoved.
  const TensorInfo& at(std::string_view name,
                       const std::vector<std::int64_t>& expected_shape) const;
  /// The tensor called `name`, of any shape and value type, or nullptr.
  const TensorInfo* find(std::string_view name) const;
  /// Tells the system that the tensor's pages need not stay in this process's memory. Reading it
  /// again works, but reads the file again.
  void release(const TensorInfo& tensor) const;
  /// Names of all tensors in lexicographic order.
  std::vector<std::string> names() const;

 private:
  using Tensors = std::map<std::string, TensorInfo, std::less<>>;

  SafetensorsFolder() = default;
  Tensors map_file(const std::filesystem::path& file);
  void open_index(const std::filesystem::path& folder, const std::filesystem::path& index);

  std::string m_path;
  std::vector<detail::MappedFile> m_files;
  Tensors m_tensors;
};

}  // namespace kvzap
