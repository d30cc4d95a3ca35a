// Sums of products of hidden states and scores, from which ridge regression is solved.
#pragma once

#include <cstdint>
#include <kvzap/train.hpp>
#include <vector>

#include "train/mlp_kernels.hpp"

namespace kvzap::detail {

/// Z^T Z for rows z = (hidden state - shift, scores - their shift, 1): X^T X, X^T y, y^T y and all
/// sums at once. The shift takes away most of the means, which would otherwise cost the digits of
/// the covariances. With up to `double_inputs` inputs everything is double. Above, products of
/// 1,024 rows are summed in float and these sums in double, in a quarter of the time; where hidden
/// states hardly vary in some direction, so that X^T X + alpha has a condition number of 10^6,
/// coefficients then have three correct digits (predictions, more).
class NormalEquations {
 public:
  /// Rows of a block at most, whose products are summed in float above double_inputs. Shorter sums
  /// would be little better, and adding them up costs memory traffic.
  static constexpr std::int64_t block_rows = 4096;
  static constexpr std::int64_t double_inputs = 1024;
  /// Columns of a tile: only tiles on and above the diagonal are computed.
  static constexpr std::int64_t tile = 1024;

  /// shift (inputs + heads). Throws what an allocation throws.
  NormalEquations(std::int64_t inputs, std::int64_t heads, const std::vector<float>& shift);

  /// Adds the `rows` of a block, which lies where kernels run.
  template <class Value>
  void add(const ExecutionSpace& exec, const StoredRows<Value>& hidden, const ConstMatrix& scores,
           const Order& rows);

  /// Columns: inputs + heads + 1.
  std::int64_t columns() const { return m_inputs + m_heads + 1; }
  /// (columns, columns), row after row; its upper triangle is meaningful. On the host.
  Kokkos::View<double**, Kokkos::LayoutRight, Kokkos::HostSpace> sums() const;

  /// Floating-point operations of a block of so many rows, as computed in float.
  double flops(std::int64_t rows) const;

 private:
  using Sums = Kokkos::View<double**, Kokkos::LayoutRight, MemorySpace>;

  bool is_double() const { return m_inputs <= double_inputs; }

  std::int64_t m_inputs, m_heads;
  Vector m_shift;   // (inputs + heads)
  Sums m_double_z;  // (block_rows, columns), if everything is double; else
  Matrix m_z;       // (block_rows, columns, padded)
  Vector m_tile;    // scratch of a tile's products
  Sums m_sums;
};

}  // namespace kvzap::detail
