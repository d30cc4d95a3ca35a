#include "model/gguf_tensors.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "model/families/family.hpp"

namespace kvzap::model {
namespace {

class OffsetTensor final : public StoredTensor {
 public:
  OffsetTensor(std::unique_ptr<StoredTensor> tensor, float offset)
      : m_tensor(std::move(tensor)), m_offset(offset) {}

  void read(std::int64_t row_begin, std::int64_t row_end, std::int64_t begin, std::int64_t end,
            float* target) const override {
    m_tensor->read(row_begin, row_end, begin, end, target);
    std::for_each(target, target + (row_end - row_begin) * (end - begin),
                  [this](float& value) { value += m_offset; });
  }
  std::string description() const override { return m_tensor->description(); }
  void release() const override { m_tensor->release(); }

 private:
  std::unique_ptr<StoredTensor> m_tensor;
  float m_offset;
};

class JoinedRows final : public StoredTensor {
 public:
  JoinedRows(std::vector<std::unique_ptr<StoredTensor>> parts, std::int64_t rows, bool is_vector)
      : m_parts(std::move(parts)), m_rows(rows), m_is_vector(is_vector) {}

  void read(std::int64_t row_begin, std::int64_t row_end, std::int64_t begin, std::int64_t end,
            float* target) const override {
    while (row_begin < row_end) {
      const std::int64_t first = row_begin % m_rows;
      const std::int64_t last = std::min(m_rows, first + row_end - row_begin);
      const StoredTensor& part = part_of(row_begin);
      if (m_is_vector) {
        part.read(0, 1, first, last, target);
      } else {
        part.read(first, last, begin, end, target);
      }
      target += (last - first) * (end - begin);
      row_begin += last - first;
    }
  }

  std::string_view block_format() const override {
    const std::string_view format = m_parts.front()->block_format();
    const bool is_common = std::all_of(m_parts.begin(), m_parts.end(), [&](const auto& part) {
      return part->block_format() == format;
    });
    return is_common && !m_is_vector ? format : std::string_view();
  }
  const std::byte* row_blocks(std::int64_t row, std::vector<std::byte>& buffer) const override {
    return part_of(row).row_blocks(row % m_rows, buffer);
  }
  std::string description() const override { return m_parts.front()->description(); }
  void release() const override {
    for (const auto& part : m_parts) part->release();
  }

 private:
  const StoredTensor& part_of(std::int64_t row) const {
    return *m_parts[static_cast<std::size_t>(row / m_rows)];
  }

  std::vector<std::unique_ptr<StoredTensor>> m_parts;
  std::int64_t m_rows;
  bool m_is_vector;
};

class FusedExperts final : public StoredTensor {
 public:
  FusedExperts(std::vector<std::unique_ptr<StoredTensor>> experts, std::int64_t rows,
               std::int64_t columns, bool alternates)
      : m_experts(std::move(experts)),
        m_half(alternates ? rows / 2 : rows),
        m_columns(columns),
        m_alternates(alternates) {}

  void read(std::int64_t row_begin, std::int64_t row_end, std::int64_t begin, std::int64_t end,
            float* target) const override {
    std::vector<float> values;
    const std::int64_t width = end - begin;
    while (row_begin < row_end) {
      const std::int64_t first = row_begin % m_columns;
      const std::int64_t last = std::min(m_columns, first + row_end - row_begin);
      const StoredTensor& expert = *m_experts[static_cast<std::size_t>(row_begin / m_columns)];
      values.resize(static_cast<std::size_t>(last - first));
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t row = m_alternates ? i % 2 * m_half + i / 2 : i;
        expert.read(row, row + 1, first, last, values.data());
        for (std::int64_t c = 0; c < last - first; ++c) {
          target[c * width + i - begin] = values[static_cast<std::size_t>(c)];
        }
      }
      target += (last - first) * width;
      row_begin += last - first;
    }
  }
  std::string description() const override { return m_experts.front()->description(); }
  void release() const override {
    for (const auto& expert : m_experts) expert->release();
  }

 private:
  std::vector<std::unique_ptr<StoredTensor>> m_experts;
  std::int64_t m_half, m_columns;
  bool m_alternates;
};

}  // namespace

float added_in_gguf(const ModelConfig& config, std::string_view name) {
  constexpr std::string_view end = "norm.weight";
  const bool is_norm = name.size() >= end.size() && name.substr(name.size() - end.size()) == end;
  return is_norm && family_of(config).tensors.norms_add_one ? 1.0f : 0.0f;
}

std::unique_ptr<StoredTensor> with_offset(std::unique_ptr<StoredTensor> tensor, float offset) {
  if (offset == 0) return tensor;
  return std::make_unique<OffsetTensor>(std::move(tensor), offset);
}

std::unique_ptr<StoredTensor> joined_rows(std::vector<std::unique_ptr<StoredTensor>> parts,
                                          std::int64_t rows, bool is_vector) {
  return std::make_unique<JoinedRows>(std::move(parts), rows, is_vector);
}

std::unique_ptr<StoredTensor> fused_experts(std::vector<std::unique_ptr<StoredTensor>> experts,
                                            std::int64_t rows, std::int64_t columns,
                                            bool alternates) {
  return std::make_unique<FusedExperts>(std::move(experts), rows, columns, alternates);
}

}  // namespace kvzap::model
