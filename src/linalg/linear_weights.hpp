// Weights of a linear map, in the layouts that the matrix products read.
#pragma once

#include <kvzap/core/types.hpp>
#include <memory>
#include <type_traits>
#include <utility>

#include "linalg/quantised/matrix.hpp"

namespace kvzap::linalg {

/// Weights W (outputs n, inputs k) of y = x W^T, in one of three layouts. The rows layout is that
/// of torch.nn.Linear: row after row.
///
/// The packed layout is made once at load. It consists of blocks of 64 outputs; a block stores
/// input after input (bf16: pair of inputs after pair), each for all 64 outputs. It is padded with
/// zeros to whole blocks of 64 outputs and 16 inputs (bf16: 32). Products with packed weights
/// rearrange nothing, whether x has one row or thousands.
///
/// Quantised weights stay in the blocks of their file, in panels (quantised::Matrix). Value is then
/// the type to which a device unpacks them.
template <class Value>
class LinearWeights {
 public:
  using Rows = Kokkos::View<Value**, Kokkos::LayoutRight, MemorySpace>;
  using Packed = Kokkos::View<Value*, MemorySpace>;
  static constexpr std::int64_t block_outputs = 64;
  static constexpr std::int64_t block_inputs = std::is_same_v<Value, bfloat16> ? 32 : 16;

  LinearWeights() = default;
  /// Shares `rows` (n, k).
  explicit LinearWeights(const Rows& rows)
      : m_outputs(rows.extent(0)), m_inputs(rows.extent(1)), m_rows(rows) {}
  /// Shares `packed`, whose size is packed_size(outputs, inputs).
  LinearWeights(std::int64_t outputs, std::int64_t inputs, const Packed& packed)
      : m_outputs(outputs), m_inputs(inputs), m_packed(packed) {}

  /// Shares quantised weights.
  explicit LinearWeights(std::shared_ptr<const quantised::Matrix> quantised)
      : m_outputs(quantised->outputs()),
        m_inputs(quantised->inputs()),
        m_quantised(std::move(quantised)) {}

  static std::int64_t packed_size(std::int64_t outputs, std::int64_t inputs) {
    return (outputs + block_outputs - 1) / block_outputs * block_outputs * padded_inputs(inputs);
  }
  static std::int64_t padded_inputs(std::int64_t inputs) {
    return (inputs + block_inputs - 1) / block_inputs * block_inputs;
  }

  std::int64_t outputs() const { return m_outputs; }
  std::int64_t inputs() const { return m_inputs; }
  bool is_packed() const { return m_packed.data() != nullptr; }
  /// The weights if they are quantised, else null.
  const quantised::Matrix* quantised() const { return m_quantised.get(); }
  /// (n, k); empty if packed or quantised.
  const Rows& rows() const { return m_rows; }
  const Packed& packed() const { return m_packed; }
  /// Returns the bytes held, padding included.
  std::size_t bytes() const {
    return (m_rows.size() + m_packed.size()) * sizeof(Value) +
           (m_quantised ? static_cast<std::size_t>(m_quantised->bytes()) : 0);
  }

 private:
  std::int64_t m_outputs = 0;
  std::int64_t m_inputs = 0;
  Rows m_rows;
  Packed m_packed;
  std::shared_ptr<const quantised::Matrix> m_quantised;
};

}  // namespace kvzap::linalg
