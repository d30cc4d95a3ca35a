// The one door to matrix products: which library or kernel does the work is decided here.
#pragma once

#include <kvzap/types.hpp>

namespace kvzap::detail {

using Matrix = Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>;
using ConstMatrix = Kokkos::View<const float**, Kokkos::LayoutRight, MemorySpace>;
using Vector = Kokkos::View<float*, MemorySpace>;
using ConstVector = Kokkos::View<const float*, MemorySpace>;
template <class Value>
using WeightMatrix = Kokkos::View<const Value**, Kokkos::LayoutRight, MemorySpace>;

/// c (m, n) = alpha * a (m, k) * b (n, k)^T + beta * c
void multiply_nt(const ExecutionSpace& exec, float alpha, const ConstMatrix& a,
                 const ConstMatrix& b, float beta, const Matrix& c);
/// c (m, n) = alpha * a (m, k) * b (k, n) + beta * c
void multiply_nn(const ExecutionSpace& exec, float alpha, const ConstMatrix& a,
                 const ConstMatrix& b, float beta, const Matrix& c);

/// y = x W^T + bias as torch.nn.Linear has it, accumulated in float whatever W is stored in.
/// The object keeps the scratch space in which 16-bit weights are widened panel by panel.
class LinearMap {
 public:
  /// x (m, k), weights (n, k), bias (n) or empty, y (m, n).
  template <class Value>
  void operator()(const ExecutionSpace& exec, const ConstMatrix& x,
                  const WeightMatrix<Value>& weights, const ConstVector& bias, const Matrix& y);

 private:
  Vector m_panel;
};

}  // namespace kvzap::detail
