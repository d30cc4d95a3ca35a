#include "model/gguf_store.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <kvzap/core/types.hpp>
#include <optional>
#include <string>
#include <utility>

#include "base/mapped_pages.hpp"
#include "gguf/made_files.hpp"
#include "gguf/tensor_names.hpp"

namespace kvzap::model {
namespace {

/// The format's RoPE of the architecture llama turns neighbouring values, that of Hugging Face
/// value i of a head with value i + head / 2. Converters reorder the rows that make queries and
/// keys. Returns the row of the file that holds a row of Hugging Face's order.
std::int64_t stored_row(std::int64_t row, std::int64_t head) {
  if (head == 0) return row;
  const std::int64_t half = head / 2;
  const std::int64_t in_head = row % head;
  return row - in_head + in_head % half * 2 + in_head / half;
}

class GgufTensor final : public StoredTensor {
 public:
  GgufTensor(const gguf::TensorEntry& entry, std::int64_t interleaved_head)
      : m_entry(entry), m_head(interleaved_head), m_columns(entry.shape.back()) {}

  void read(std::int64_t row_begin, std::int64_t row_end, std::int64_t begin, std::int64_t end,
            float* target) const override {
    if (m_entry.shape.size() == 1) return read_vector(begin, end, target);
    if (m_head == 0 && begin == 0 && end == m_columns) {
      return decode(row_begin, 0, (row_end - row_begin) * m_columns, target);
    }
    for (std::int64_t row = row_begin; row < row_end; ++row) {
      decode(stored_row(row, m_head), begin, end, target);
      target += end - begin;
    }
  }

  std::optional<PlainValues> plain() const override {
    if (m_head != 0) return std::nullopt;
    if (m_entry.format->name == "F32") return PlainValues{m_entry.data, DType::f32};
    if (m_entry.format->name == "F16") return PlainValues{m_entry.data, DType::f16};
    if (m_entry.format->name == "BF16") return PlainValues{m_entry.data, DType::bf16};
    return std::nullopt;
  }

  std::string_view block_format() const override {
    return m_entry.format->values > 1 && m_entry.shape.size() > 1 ? m_entry.format->name
                                                                  : std::string_view();
  }
  const std::byte* row_blocks(std::int64_t row, std::vector<std::byte>& /*buffer*/) const override {
    return m_entry.data + stored_row(row, m_head) * row_bytes();
  }

  std::string description() const override {
    return fmt::format("{}: tensor {}", *m_entry.file, m_entry.name);
  }
  void release() const override { base::release_pages(m_entry.data, m_entry.bytes); }

 private:
  /// Decodes values begin … end - 1, counted from the begin of a stored row.
  void decode(std::int64_t row, std::int64_t begin, std::int64_t end, float* target) const {
    gguf::decode_range(*m_entry.format, m_entry.data + row * row_bytes(), begin, end, target);
  }

  std::int64_t row_bytes() const {
    return m_columns / m_entry.format->values * m_entry.format->bytes;
  }

  void read_vector(std::int64_t begin, std::int64_t end, float* target) const {
    if (m_head == 0) return decode(0, begin, end, target);
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t stored = stored_row(i, m_head);
      decode(0, stored, stored + 1, target++);
    }
  }

  const gguf::TensorEntry& m_entry;
  std::int64_t m_head;
  std::int64_t m_columns;
};

bool makes_queries_or_keys(std::string_view name) {
  return name.find(".self_attn.q_proj.") != name.npos ||
         name.find(".self_attn.k_proj.") != name.npos;
}

}  // namespace

GgufStore::GgufStore(const std::filesystem::path& file) : m_file(gguf::GgufFile::open(file)) {
  const nlohmann::json config = gguf::make_config(m_file);
  if (config["model_type"] == "llama") m_interleaved_head = config["head_dim"].get<std::int64_t>();
}

std::unique_ptr<StoredTensor> GgufStore::at(std::string_view name,
                                            const std::vector<std::int64_t>& shape) const {
  const auto own_name = gguf::gguf_name(name);
  const gguf::TensorEntry* const entry = own_name ? m_file.find(*own_name) : nullptr;
  if (entry == nullptr) {
    throw Error(fmt::format("{}: tensor '{}' of shape [{}] is missing", m_file.metadata().file(),
                            own_name.value_or(std::string(name)), fmt::join(shape, ", ")));
  }
  const std::string where = fmt::format("{}: tensor '{}'", *entry->file, entry->name);
  if (entry->format == nullptr) {
    std::string names;
    for (const gguf::BlockFormat& format : gguf::block_formats()) {
      names += fmt::format("{}{}", names.empty() ? "" : ", ", format.name);
    }
    throw Error(fmt::format("{}: expected one of the types {}, found type {}", where, names,
                            gguf::type_name(*entry)));
  }
  if (entry->shape != shape) {
    throw Error(fmt::format("{}: expected shape [{}], found [{}]", where, fmt::join(shape, ", "),
                            fmt::join(entry->shape, ", ")));
  }
  return std::make_unique<GgufTensor>(*entry, makes_queries_or_keys(name) ? m_interleaved_head : 0);
}

bool GgufStore::has(std::string_view name) const {
  const auto own_name = gguf::gguf_name(name);
  return own_name && m_file.find(*own_name) != nullptr;
}

}  // namespace kvzap::model
