#include "model/weight_slice.hpp"

#include <algorithm>
#include <utility>
#include <vector>

namespace kvzap::model {
namespace {

class SlicedTensor final : public StoredTensor {
 public:
  SlicedTensor(std::unique_ptr<StoredTensor> tensor, const TensorSlice& slice, std::int64_t rows,
               std::int64_t columns, bool is_transposed)
      : m_tensor(std::move(tensor)),
        m_first(slice.index * (is_transposed ? columns : rows)),
        m_half(slice.alternates ? rows / 2 : rows),
        m_step(slice.alternates ? 2 : 1),
        m_is_transposed(is_transposed) {}

  void read(std::int64_t row_begin, std::int64_t row_end, std::int64_t begin, std::int64_t end,
            float* target) const override {
    // Rows of both halves, one half after the other.
    if (row_begin < m_half && row_end > m_half) {
      read(row_begin, m_half, begin, end, target);
      read(m_half, row_end, begin, end, target + (m_half - row_begin) * (end - begin));
      return;
    }
    if (m_is_transposed) return read_columns(row_begin, row_end, begin, end, target);
    for (std::int64_t row = row_begin; row < row_end; ++row, target += end - begin) {
      const std::int64_t stored = m_first + stored_row(row);
      m_tensor->read(stored, stored + 1, begin, end, target);
    }
  }

  std::string_view block_format() const override {
    return m_is_transposed ? std::string_view() : m_tensor->block_format();
  }
  const std::byte* row_blocks(std::int64_t row, std::vector<std::byte>& buffer) const override {
    return m_tensor->row_blocks(m_first + stored_row(row), buffer);
  }
  const std::vector<std::int32_t>* input_groups() const override {
    return m_is_transposed ? nullptr : m_tensor->input_groups();
  }
  const std::byte* ordered_blocks(std::int64_t row, const InputOrder& order,
                                  std::vector<std::byte>& buffer) const override {
    return m_tensor->ordered_blocks(m_first + stored_row(row), order, buffer);
  }
  std::string description() const override { return m_tensor->description(); }
  void release() const override { m_tensor->release(); }

 private:
  std::int64_t stored_row(std::int64_t row) const {
    return row < m_half ? m_step * row : m_step * (row - m_half) + 1;
  }

  void read_columns(std::int64_t row_begin, std::int64_t row_end, std::int64_t begin,
                    std::int64_t end, float* target) const {
    if (row_begin >= row_end) return;
    thread_local std::vector<float> stored;
    const std::int64_t first = stored_row(row_begin);
    const std::int64_t width = stored_row(row_end - 1) + 1 - first;
    const std::int64_t columns = end - begin;
    stored.resize(static_cast<std::size_t>(width * columns));
    m_tensor->read(m_first + begin, m_first + end, first, first + width, stored.data());
    for (std::int64_t row = 0; row < row_end - row_begin; ++row) {
      const float* const source = stored.data() + m_step * row;
      for (std::int64_t c = 0; c < columns; ++c) target[row * columns + c] = source[c * width];
    }
  }

  std::unique_ptr<StoredTensor> m_tensor;
  std::int64_t m_first;  // row of the tensor, whose leading extents follow one another
  std::int64_t m_half, m_step;
  bool m_is_transposed;
};

}  // namespace

std::unique_ptr<StoredTensor> open_slice(const WeightStore& store, const std::string& name,
                                         const TensorSlice& slice, std::int64_t rows,
                                         std::int64_t columns) {
  if (columns == 0) {
    std::vector<std::int64_t> shape = {rows};
    if (slice.count > 0) shape.insert(shape.begin(), slice.count);
    return std::make_unique<SlicedTensor>(store.at(name, shape), slice, rows, 1, true);
  }
  const bool is_transposed = !slice.rows_first && !store.has(name + "_blocks");
  std::vector<std::int64_t> shape = {rows, columns};
  if (is_transposed) std::swap(shape[0], shape[1]);
  if (slice.is_flat) {
    shape[0] *= slice.count;
  } else if (slice.count > 0) {
    shape.insert(shape.begin(), slice.count);
  }
  return std::make_unique<SlicedTensor>(store.at(name, shape), slice, rows, columns, is_transposed);
}

std::unique_ptr<StoredTensor> WeightStore::slice(const std::string& name, const TensorSlice& slice,
                                                 std::int64_t rows, std::int64_t columns) const {
  return open_slice(*this, name, slice, rows, columns);
}

}  // namespace kvzap::model
