#include "model/encoding_store.hpp"

#include <fmt/format.h>

#include <cmath>
#include <kvzap/core/types.hpp>
#include <limits>
#include <string>
#include <utility>

#include "gguf/block_encoders.hpp"
#include "gguf/block_formats.hpp"
#include "gguf/tensor_names.hpp"
#include "linalg/quantised/format.hpp"

namespace kvzap::model {
namespace {

class EncodedTensor final : public StoredTensor {
 public:
  EncodedTensor(std::unique_ptr<StoredTensor> stored, const gguf::BlockFormat& format,
                std::int64_t columns)
      : m_stored(std::move(stored)), m_format(format), m_columns(columns) {}

  void read(std::int64_t row_begin, std::int64_t row_end, std::int64_t begin, std::int64_t end,
            float* target) const override {
    std::vector<std::byte> buffer;
    for (std::int64_t row = row_begin; row < row_end; ++row) {
      gguf::decode_range(m_format, row_blocks(row, buffer), begin, end, target);
      target += end - begin;
    }
  }
  std::string_view block_format() const override { return m_format.name; }
  const std::byte* row_blocks(std::int64_t row, std::vector<std::byte>& buffer) const override {
    thread_local std::vector<float> values;
    values.resize(m_columns);
    m_stored->read(row, row + 1, 0, m_columns, values.data());
    for (std::int64_t i = 0; i < m_columns; ++i) {
      if (!(std::fabs(values[i]) <= gguf::largest_encodable)) {
        throw Error(
            fmt::format("{}: row {}, column {}: {} cannot be quantised; expected a finite "
                        "value up to {} in magnitude",
                        description(), row, i, values[i], gguf::largest_encodable));
      }
    }
    const std::int64_t blocks = m_columns / m_format.values;
    buffer.resize(blocks * m_format.bytes);
    m_format.encode(values.data(), blocks, buffer.data());
    return buffer.data();
  }
  std::string description() const override { return m_stored->description(); }
  void release() const override { m_stored->release(); }

 private:
  std::unique_ptr<StoredTensor> m_stored;
  const gguf::BlockFormat& m_format;
  std::int64_t m_columns;
};

template <class Format>
double bytes_of_value(const Format& format) {
  return static_cast<double>(format.bytes) / static_cast<double>(format.values);
}

/// Bytes of a value in stored blocks, whether or not products read them; infinite for plain values.
double stored_bytes(std::string_view format) {
  if (const auto* own = gguf::find_block_format(format)) return bytes_of_value(*own);
  if (const auto* own = linalg::quantised::find_format(format)) return bytes_of_value(*own);
  return std::numeric_limits<double>::infinity();
}

}  // namespace

EncodingStore::EncodingStore(std::unique_ptr<WeightStore> stored, const gguf::TypeMixture& mixture,
                             const ModelConfig& config)
    : m_stored(std::move(stored)),
      m_mixture(mixture),
      m_architecture(gguf::architecture_for_types(config.architecture, config.experts.has_value())),
      m_layers(config.num_hidden_layers),
      m_is_tied(config.tie_word_embeddings),
      m_heads_per_group(config.query_group()),
      m_experts(config.experts ? config.experts->count : 0) {}

std::unique_ptr<StoredTensor> EncodingStore::at(std::string_view name,
                                                const std::vector<std::int64_t>& shape) const {
  auto stored = m_stored->at(name, shape);
  return shape.size() == 2 ? encoded(name, shape, std::move(stored)) : std::move(stored);
}

std::unique_ptr<StoredTensor> EncodingStore::slice(const std::string& name,
                                                   const TensorSlice& slice, std::int64_t rows,
                                                   std::int64_t columns) const {
  auto stored = m_stored->slice(name, slice, rows, columns);
  return columns > 0 ? encoded(name, {rows, columns}, std::move(stored)) : std::move(stored);
}

std::unique_ptr<StoredTensor> EncodingStore::encoded(std::string_view name,
                                                     const std::vector<std::int64_t>& shape,
                                                     std::unique_ptr<StoredTensor> stored) const {
  const std::string in_file = gguf::first_gguf_name(*m_architecture, name);
  const auto* format = gguf::find_block_format(gguf::tensor_type(
      m_mixture, {in_file, m_layers, shape, m_is_tied, m_heads_per_group, m_experts}));
  if (format == nullptr || format->values == 1 || format->encode == nullptr) return stored;
  if (stored_bytes(stored->block_format()) <= bytes_of_value(*format)) return stored;
  return std::make_unique<EncodedTensor>(std::move(stored), *format, shape.back());
}

}  // namespace kvzap::model
