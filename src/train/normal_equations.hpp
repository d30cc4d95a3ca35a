// Sums of products of hidden states and scores, for ridge regression.
#pragma once

#include <cstdint>
#include <kvzap/lab/train.hpp>
#include <vector>

#include "train/mlp_kernels.hpp"

namespace kvzap::train {

/// Z^T Z for rows z = (hidden state - shift, scores - their shift, 1). It contains X^T X, X^T y,
/// y^T y and all sums. The shift removes most of the means, which would otherwise cost digits of
/// the covariances.
///
/// With up to `double_inputs` inputs all sums are in double. With more inputs, products of
/// `block_rows` rows are summed in float and these sums in double, in about half of the time. The
/// solution is then a first approximation, which train_ridge refines: hidden states hardly vary in
/// some directions, where float sums leave two to three correct digits of the coefficients.
class NormalEquations {
 public:
  /// Rows whose products are summed in float above `double_inputs`. Shorter blocks are hardly more
  /// accurate, and adding them costs memory traffic.
  static constexpr std::int64_t block_rows = 4096;
  static constexpr std::int64_t double_inputs = 1024;
  /// Columns of a tile. Only tiles on and above the diagonal are computed.
  static constexpr std::int64_t tile = 1024;

  /// shift: (inputs + heads). All sums are in double if `always_double`. Throws if memory is
  /// exhausted.
  NormalEquations(std::int64_t inputs, std::int64_t heads, const std::vector<float>& shift,
                  bool always_double = false);

  /// Adds the first `rows` rows of a block in kernel memory.
  void add(const ExecutionSpace& exec, const ConstArrayView& hidden,
           const linalg::ConstMatrix& scores, const Order& rows);

  /// Whether all sums are in double.
  bool is_double() const { return m_is_double; }
  /// Columns: inputs + heads + 1.
  std::int64_t columns() const { return m_inputs + m_heads + 1; }
  /// (columns, columns), row-major, on the host. Only the upper triangle is set.
  Kokkos::View<double**, Kokkos::LayoutRight, Kokkos::HostSpace> sums() const;

  /// Floating-point operations for a block of `rows` rows in float.
  double flops(std::int64_t rows) const;

 private:
  using Sums = Kokkos::View<double**, Kokkos::LayoutRight, MemorySpace>;

  std::int64_t m_inputs, m_heads;
  bool m_is_double;
  linalg::Vector m_shift;  // (inputs + heads)
  Sums m_double_z;         // (block_rows, columns), if all sums are in double; otherwise empty
  linalg::Matrix m_z;      // (block_rows, padded columns), if sums are in float
  linalg::Vector m_tile;   // scratch of a tile's products
  Sums m_sums;
};

}  // namespace kvzap::train
