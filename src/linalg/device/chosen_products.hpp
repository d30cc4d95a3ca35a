// Products of few rows on a device, each with one of many maps that the device itself has chosen.
#pragma once

#include <cstdint>
#include <vector>

#include "linalg/gemm.hpp"

namespace kvzap::linalg {

/// Maps of one size among which a kernel chooses. Refers to plain weights, which must outlive it.
class ChosenMaps {
 public:
  /// Where a map's weights and bias lie.
  struct Place {
    const void* weights;
    const float* bias;  // or null
  };

  ChosenMaps() = default;
  /// maps (map): plain weights (n, k), all of one size and type. biases (map): (n) each, or all
  /// empty.
  ChosenMaps(const std::vector<const LinearWeights*>& maps, const std::vector<ConstVector>& biases);

  /// y(i, n) = W(n, :) x(i / share, :) + bias(n), W and bias of map chosen(i).
  ///
  /// x (rows / share, k), chosen (rows), y (rows, n). x is rounded to bf16 if the weights are bf16,
  /// as in other products. A thread computes an output of a row, so a map is read once for each
  /// row that chose it.
  void operator()(const ExecutionSpace& exec, const ConstMatrix& x, std::int64_t share,
                  const Kokkos::View<const std::int64_t*, MemorySpace>& chosen,
                  const Matrix& y) const;

 private:
  DType m_dtype = DType::f32;
  std::int64_t m_outputs = 0, m_inputs = 0;
  Kokkos::View<Place*, MemorySpace> m_places;  // (map)
};

}  // namespace kvzap::linalg
