// Weights of a linear map, in the layouts that the matrix products read.
#pragma once

#include <kvzap/core/types.hpp>
#include <memory>
#include <utility>

#include "linalg/quantised/matrix.hpp"

namespace kvzap::linalg {

/// Memory of values whose type is known at run time.
using Bytes = Kokkos::View<std::uint8_t*, MemorySpace>;
/// Plain weights (n, k), row after row.
template <class Value>
using WeightRows = Kokkos::View<Value**, Kokkos::LayoutRight, MemorySpace>;

/// How the values of weights follow one another.
enum class WeightLayout { rows, packed };

/// Weights W (outputs n, inputs k) of y = x W^T, plain in one of two layouts or quantised. Their
/// value type is known at run time. The rows layout is that of torch.nn.Linear: row after row,
/// without gaps.
///
/// The packed layout is made once at load. It consists of blocks of 64 outputs; a block stores
/// input after input (bf16: pair of inputs after pair), each for all 64 outputs. It is padded with
/// zeros to whole blocks of 64 outputs and 16 inputs (bf16: 32). Products with packed weights
/// rearrange nothing, whether x has one row or thousands.
///
/// Quantised weights stay in the blocks of their file, in panels (quantised::Matrix). dtype() is
/// then the type to which a device unpacks them.
class LinearWeights {
 public:
  static constexpr std::int64_t block_outputs = 64;

  LinearWeights() = default;
  /// Shares `values`, which has bytes_of(layout, dtype, outputs, inputs) bytes or more.
  LinearWeights(WeightLayout layout, DType dtype, std::int64_t outputs, std::int64_t inputs,
                Bytes values)
      : m_layout(layout),
        m_dtype(dtype),
        m_outputs(outputs),
        m_inputs(inputs),
        m_values(std::move(values)) {}
  /// Refers to memory of the caller, which must outlive the weights and all copies.
  template <class Value>
  LinearWeights(WeightLayout layout, std::int64_t outputs, std::int64_t inputs, Value* values)
      : LinearWeights(layout, DTypeOf<Value>::value, outputs, inputs,
                      Bytes(reinterpret_cast<std::uint8_t*>(values),
                            bytes_of(layout, DTypeOf<Value>::value, outputs, inputs))) {}
  /// Refers to rows (n, k) of the caller without gaps, which must outlive the weights.
  template <class Value>
  explicit LinearWeights(const WeightRows<Value>& rows)
      : LinearWeights(WeightLayout::rows, rows.extent(0), rows.extent(1), rows.data()) {
    if (m_outputs > 1 && static_cast<std::int64_t>(rows.stride(0)) != m_inputs) {
      throw Error("linear map: expected rows of weights without gaps");
    }
  }
  /// Shares quantised weights.
  LinearWeights(DType dtype, std::shared_ptr<const quantised::Matrix> quantised)
      : m_dtype(dtype),
        m_outputs(quantised->outputs()),
        m_inputs(quantised->inputs()),
        m_quantised(std::move(quantised)) {}

  /// Returns the inputs of a block of packed weights.
  static constexpr std::int64_t padded_inputs(DType dtype, std::int64_t inputs) {
    const std::int64_t together = dtype == DType::bf16 ? 32 : 16;
    return (inputs + together - 1) / together * together;
  }
  static std::int64_t bytes_of(WeightLayout layout, DType dtype, std::int64_t outputs,
                               std::int64_t inputs) {
    if (layout == WeightLayout::packed) {
      outputs = (outputs + block_outputs - 1) / block_outputs * block_outputs;
      inputs = padded_inputs(dtype, inputs);
    }
    return outputs * inputs * static_cast<std::int64_t>(size_of(dtype));
  }

  DType dtype() const { return m_dtype; }
  std::int64_t outputs() const { return m_outputs; }
  std::int64_t inputs() const { return m_inputs; }
  bool is_packed() const { return m_layout == WeightLayout::packed; }
  /// The weights if they are quantised, else null.
  const quantised::Matrix* quantised() const { return m_quantised.get(); }
  /// Returns plain or packed values; null if quantised. Value must be the type of dtype().
  template <class Value>
  Value* values() const {
    return reinterpret_cast<Value*>(m_values.data());
  }
  /// Returns plain rows (n, k), of the type of dtype(). Does not own.
  template <class Value>
  WeightRows<Value> rows() const {
    return WeightRows<Value>(values<Value>(), m_outputs, m_inputs);
  }
  /// Returns the memory of plain or packed values.
  const Bytes& memory() const { return m_values; }
  /// Returns the bytes held, padding included.
  std::size_t bytes() const {
    return m_values.size() + (m_quantised ? static_cast<std::size_t>(m_quantised->bytes()) : 0);
  }

 private:
  WeightLayout m_layout = WeightLayout::rows;
  DType m_dtype = DType::f32;
  std::int64_t m_outputs = 0;
  std::int64_t m_inputs = 0;
  Bytes m_values;
  std::shared_ptr<const quantised::Matrix> m_quantised;
};

}  // namespace kvzap::linalg
