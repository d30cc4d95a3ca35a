// Sums of products of hidden states and scores, from which ridge regression is solved.
#pragma once

#include <cstdint>
#include <kvzap/lab/train.hpp>
#include <vector>

#include "train/mlp_kernels.hpp"

namespace kvzap::detail {

/// Z^T Z for rows z = (hidden state - shift, scores - their shift, 1): X^T X, X^T y, y^T y and all
/// sums at once. The shift takes away most of the means, which would otherwise cost the digits of
/// the covariances. With up to `double_inputs` inputs everything is double. Above, products of
/// `block_rows` rows are summed in float and these sums in double, in about half of the time. What
/// is solved from them is a first approximation: hidden states hardly vary in some directions,
/// where float sums leave two to three correct digits of the coefficients. train_ridge refines it.
class NormalEquations {
 public:
  /// Rows of a block at most, whose products are summed in float above double_inputs. Shorter sums
  /// would be little better, and adding them up costs memory traffic.
  static constexpr std::int64_t block_rows = 4096;
  static constexpr std::int64_t double_inputs = 1024;
  /// Columns of a tile: only tiles on and above the diagonal are computed.
  static constexpr std::int64_t tile = 1024;

  /// shift (inputs + heads); everything is double, whatever the size, if `always_double`. Throws
  /// what an allocation throws.
  NormalEquations(std::int64_t inputs, std::int64_t heads, const std::vector<float>& shift,
                  bool always_double = false);

  /// Adds the `rows` of a block, which lies where kernels run.
  template <class Value>
  void add(const ExecutionSpace& exec, const StoredRows<Value>& hidden, const ConstMatrix& scores,
           const Order& rows);

  /// Whether nothing was summed in float.
  bool is_double() const { return m_is_double; }
  /// Columns: inputs + heads + 1.
  std::int64_t columns() const { return m_inputs + m_heads + 1; }
  /// (columns, columns), row after row; its upper triangle is meaningful. On the host.
  Kokkos::View<double**, Kokkos::LayoutRight, Kokkos::HostSpace> sums() const;

  /// Floating-point operations of a block of so many rows, as computed in float.
  double flops(std::int64_t rows) const;

 private:
  using Sums = Kokkos::View<double**, Kokkos::LayoutRight, MemorySpace>;

  std::int64_t m_inputs, m_heads;
  bool m_is_double;
  Vector m_shift;   // (inputs + heads)
  Sums m_double_z;  // (block_rows, columns), if everything is double; else
  Matrix m_z;       // (block_rows, columns, padded)
  Vector m_tile;    // scratch of a tile's products
  Sums m_sums;
};

}  // namespace kvzap::detail
