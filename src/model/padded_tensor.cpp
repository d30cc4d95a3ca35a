#include "model/padded_tensor.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "linalg/quantised/format.hpp"

namespace kvzap::model {
namespace {

class PaddedTensor final : public StoredTensor {
 public:
  PaddedTensor(std::unique_ptr<StoredTensor> tensor, const HeadPadding& padding,
               std::int64_t columns)
      : m_tensor(std::move(tensor)), m_padding(padding), m_columns(columns) {
    const auto* const format = linalg::quantised::find_format(m_tensor->block_format());
    if (format == nullptr || m_columns == 0) return;
    m_values = format->values;
    m_bytes = format->bytes;
    if (!of_columns()) return;
    // A block with padding would need codes for zeros beside others.
    if (m_padding.stored % m_values != 0 || m_padding.padded % m_values != 0) m_values = 0;
    if (m_tensor->input_groups() != nullptr) m_values = 0;
  }

  void read(std::int64_t row_begin, std::int64_t row_end, std::int64_t begin, std::int64_t end,
            float* target) const override {
    for (std::int64_t row = row_begin; row < row_end; ++row, target += end - begin) {
      if (of_columns()) {
        read_columns(row, begin, end, target);
      } else if (const std::int64_t stored = stored_place(row); stored >= 0) {
        m_tensor->read(stored, stored + 1, begin, end, target);
      } else {
        std::fill_n(target, end - begin, 0.0f);
      }
    }
  }

  std::string_view block_format() const override {
    return m_values == 0 ? std::string_view() : m_tensor->block_format();
  }
  const std::byte* row_blocks(std::int64_t row, std::vector<std::byte>& buffer) const override {
    if (!of_columns()) {
      const std::int64_t stored = stored_place(row);
      return stored >= 0 ? m_tensor->row_blocks(stored, buffer) : zeros(m_columns, buffer);
    }
    std::vector<std::byte> own;
    const std::byte* source = m_tensor->row_blocks(row, own);
    zeros(m_columns, buffer);
    const std::int64_t head = m_padding.stored / m_values * m_bytes;
    const std::int64_t step = m_padding.padded / m_values * m_bytes;
    for (auto* target = buffer.data(); target < buffer.data() + buffer.size(); target += step) {
      std::copy_n(source, head, target);
      source += head;
    }
    return buffer.data();
  }
  const std::vector<std::int32_t>* input_groups() const override {
    return of_columns() ? nullptr : m_tensor->input_groups();
  }
  const std::byte* ordered_blocks(std::int64_t row, const InputOrder& order,
                                  std::vector<std::byte>& buffer) const override {
    const std::int64_t stored = stored_place(row);
    return stored >= 0 ? m_tensor->ordered_blocks(stored, order, buffer)
                       : zeros(static_cast<std::int64_t>(order.size()), buffer);
  }
  std::string description() const override { return m_tensor->description(); }
  void release() const override { m_tensor->release(); }

 private:
  // A vector is one row.
  bool of_columns() const { return m_padding.of_columns || m_columns == 0; }

  /// Returns the place in the file of a row or column; -1: it is padding.
  std::int64_t stored_place(std::int64_t place) const {
    const std::int64_t head = place / m_padding.padded, inside = place % m_padding.padded;
    return inside < m_padding.stored ? head * m_padding.stored + inside : -1;
  }

  void read_columns(std::int64_t row, std::int64_t begin, std::int64_t end, float* target) const {
    while (begin < end) {
      const std::int64_t inside = begin % m_padding.padded, stored = stored_place(begin);
      const std::int64_t room = (stored >= 0 ? m_padding.stored : m_padding.padded) - inside;
      const std::int64_t count = std::min(room, end - begin);
      if (stored >= 0) {
        m_tensor->read(row, row + 1, stored, stored + count, target);
      } else {
        std::fill_n(target, count, 0.0f);
      }
      begin += count;
      target += count;
    }
  }

  /// Fills the buffer with blocks of zeros: in all formats bytes of 0 mean values of 0.
  const std::byte* zeros(std::int64_t values, std::vector<std::byte>& buffer) const {
    buffer.assign(static_cast<std::size_t>(values / m_values * m_bytes), std::byte{0});
    return buffer.data();
  }

  std::unique_ptr<StoredTensor> m_tensor;
  HeadPadding m_padding;
  std::int64_t m_columns;
  std::int64_t m_values = 0, m_bytes = 0;  // of a block; 0: it is read as plain values
};

}  // namespace

std::unique_ptr<StoredTensor> pad_heads(std::unique_ptr<StoredTensor> tensor,
                                        const HeadPadding& padding, std::int64_t columns) {
  return std::make_unique<PaddedTensor>(std::move(tensor), padding, columns);
}

}  // namespace kvzap::model
