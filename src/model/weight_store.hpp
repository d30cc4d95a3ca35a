// The seam between files of weights and WeightSource. Each file format implements it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <kvzap/model/safetensors.hpp>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvzap::model {

/// Row-major values of a plain type, without gaps. Files guarantee no alignment.
struct PlainValues {
  const std::byte* data;
  DType dtype;
};

/// Inputs of a row in the order in which blocks hold them; -1: padding, of any value.
using InputOrder = std::vector<std::int32_t>;

/// One matrix or vector as a file stores it. A vector is one row. Valid while its store exists.
class StoredTensor {
 public:
  virtual ~StoredTensor() = default;
  /// Widens columns begin … end - 1 of rows row_begin … row_end - 1 to `target`, row after row
  /// without gaps. The ranges lie in the shape that WeightStore::at checked. Threads may call it at
  /// once.
  virtual void read(std::int64_t row_begin, std::int64_t row_end, std::int64_t begin,
                    std::int64_t end, float* target) const = 0;
  /// Returns the values if the file stores them as F32, F16 or BF16 in the order of rows. They are
  /// then copied or converted directly.
  virtual std::optional<PlainValues> plain() const { return std::nullopt; }
  /// Returns the name of the format, as GGUF names it, if the file stores rows in blocks; else "".
  virtual std::string_view block_format() const { return {}; }
  /// Returns the blocks of one row, which block_format() describes. `buffer` may hold them. Threads
  /// may call it at once, with a buffer each.
  virtual const std::byte* row_blocks(std::int64_t /*row*/,
                                      std::vector<std::byte>& /*buffer*/) const {
    return nullptr;
  }
  /// Returns the group of each input if groups are not whole blocks of a row, as with act-order;
  /// else nullptr. Such a tensor has ordered_blocks, whose blocks have one group each, and not
  /// row_blocks.
  virtual const std::vector<std::int32_t>* input_groups() const { return nullptr; }
  /// Returns the blocks of one row with its inputs in this order, as row_blocks does.
  virtual const std::byte* ordered_blocks(std::int64_t /*row*/, const InputOrder& /*order*/,
                                          std::vector<std::byte>& /*buffer*/) const {
    return nullptr;
  }
  /// Returns "FILE: tensor NAME", for messages.
  virtual std::string description() const = 0;
  /// Lets the system drop the tensor's pages from this process's memory. A later access reads the
  /// file again.
  virtual void release() const = 0;
};

/// The place of a matrix (rows, columns) in a tensor of shape (count, columns, rows), which stores
/// its rows as columns, or of a vector (rows) in a tensor of shape (count, rows).
struct TensorSlice {
  std::int64_t index = 0;
  /// 0: the matrix is the whole tensor, of shape (columns, rows); the vector is one of shape
  /// (rows).
  std::int64_t count = 1;
  /// The first half of the rows alternates with the second half in the file: r and r + rows / 2 are
  /// stored one after the other.
  bool alternates = false;
  /// The tensor has the shape (count, rows, columns).
  bool rows_first = false;
  /// The first two extents of the tensor are one.
  bool is_flat = false;
};

/// The weights of one model or surrogate.
class WeightStore {
 public:
  virtual ~WeightStore() = default;
  /// Returns the tensor that Hugging Face's checkpoints call `name`, such as
  /// "model.layers.0.self_attn.q_proj.weight". `shape` is (outputs, inputs) or (extent); rows of
  /// further leading extents follow one another. Throws Error if the tensor is missing, has
  /// another shape or an unsupported type.
  virtual std::unique_ptr<StoredTensor> at(std::string_view name,
                                           const std::vector<std::int64_t>& shape) const = 0;
  /// Opens a slice of the tensor `name` as a matrix (rows, columns); columns = 0: as a vector,
  /// which is read as a matrix of one column. Tensors of MXFP4 have the shape (count, rows,
  /// columns). Throws as at().
  virtual std::unique_ptr<StoredTensor> slice(const std::string& name, const TensorSlice& slice,
                                              std::int64_t rows, std::int64_t columns) const;
  /// Returns whether at() has this tensor, of any shape.
  virtual bool has(std::string_view name) const = 0;
};

/// The plain weights of a SafetensorsFolder.
class SafetensorsStore final : public WeightStore {
 public:
  explicit SafetensorsStore(SafetensorsFolder files) : m_files(std::move(files)) {}

  std::unique_ptr<StoredTensor> at(std::string_view name,
                                   const std::vector<std::int64_t>& shape) const override;
  bool has(std::string_view name) const override;
  const SafetensorsFolder& files() const { return m_files; }

 private:
  SafetensorsFolder m_files;
};

/// The tensors of another store under other names.
class RenamedStore final : public WeightStore {
 public:
  /// `stored_name` returns the name in `store`.
  RenamedStore(std::unique_ptr<WeightStore> store,
               std::function<std::string(std::string_view)> stored_name)
      : m_store(std::move(store)), m_stored_name(std::move(stored_name)) {}

  std::unique_ptr<StoredTensor> at(std::string_view name,
                                   const std::vector<std::int64_t>& shape) const override {
    return m_store->at(m_stored_name(name), shape);
  }
  bool has(std::string_view name) const override { return m_store->has(m_stored_name(name)); }

 private:
  std::unique_ptr<WeightStore> m_store;
  std::function<std::string(std::string_view)> m_stored_name;
};

/// Opens the weights of `model`, a folder, a .safetensors file or a .gguf file. Throws Error as
/// SafetensorsFolder::open and GgufStore, and for an unsupported quantization_config in the
/// folder's config.json.
std::unique_ptr<WeightStore> open_weights(const std::filesystem::path& model);

}  // namespace kvzap::model
