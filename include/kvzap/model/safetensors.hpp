// Reads *.safetensors files, sharded or not, memory-mapped and fully checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <kvzap/core/types.hpp>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace kvzap {

/// The location of one tensor in a mapped file.
struct TensorInfo {
  std::string name;
  /// Value type. Valid only if `is_weight` is true.
  DType dtype;
  /// Whether the value type is F32, F16 or BF16. Files may hold other types (I64, F8_E4M3, ...)
  /// beside weights.
  bool is_weight;
  /// The value type as written in the file, e.g. "BF16" or "I64".
  std::string stored_dtype;
  /// Extents, slowest first; empty for a scalar.
  std::vector<std::int64_t> shape;
  /// First byte of the little-endian, row-major values. The format guarantees no alignment: read
  /// values with memcpy, never through a cast pointer. Valid during the lifetime of the
  /// SafetensorsFolder.
  const std::byte* data;
  /// Bytes from `data` on: product of the shape times the value size.
  std::size_t bytes;
  /// Path of the file that holds the tensor.
  std::string file;
};

namespace files {
class MappedFile;
}  // namespace files

/// The tensors of a model folder, from one *.safetensors file or several. Move-only; moving keeps
/// data pointers valid.
class SafetensorsFolder {
 public:
  /// Maps the files of `folder` and checks their headers: every offset, size and shape. Later
  /// accesses stay within the files.
  ///
  /// With a model.safetensors.index.json, the folder has exactly the tensors that the index lists,
  /// from the files that it names. Otherwise it has the tensors of model.safetensors. If there is
  /// no such file, it has those of all *.safetensors, which must not share a tensor name. `folder`
  /// may also be the path of a single file, which is then read alone.
  ///
  /// Throws Error that names the file and the fault: no weights, a damaged or truncated file, or an
  /// index that names a missing file or tensor.
  static SafetensorsFolder open(const std::filesystem::path& folder);

  SafetensorsFolder(SafetensorsFolder&&) = default;
  SafetensorsFolder& operator=(SafetensorsFolder&&) = default;
  SafetensorsFolder(const SafetensorsFolder&) = delete;
  SafetensorsFolder& operator=(const SafetensorsFolder&) = delete;

  /// Returns the weight called `name`. Throws Error if it does not exist, if its value type is not
  /// F32, F16 or BF16, or if its shape is not `expected_shape`. The message names file, tensor,
  /// expected and found shape. The reference is valid while this object exists and is not moved.
  const TensorInfo& at(std::string_view name,
                       const std::vector<std::int64_t>& expected_shape) const;
  /// Returns the tensor called `name`, of any shape and value type, or nullptr.
  const TensorInfo* find(std::string_view name) const;
  /// Lets the system drop the tensor's pages from this process's memory. A later access reads the
  /// file again.
  void release(const TensorInfo& tensor) const;
  /// Returns the names of all tensors in lexicographic order.
  std::vector<std::string> names() const;

 private:
  using Tensors = std::map<std::string, TensorInfo, std::less<>>;

  SafetensorsFolder() = default;
  Tensors map_file(const std::filesystem::path& file);
  void open_index(const std::filesystem::path& folder, const std::filesystem::path& index);

  std::string m_path;
  std::vector<std::shared_ptr<const files::MappedFile>> m_files;
  Tensors m_tensors;
};

}  // namespace kvzap
