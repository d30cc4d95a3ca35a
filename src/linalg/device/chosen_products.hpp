// Products of few rows on a device, each with one of many maps that the device itself has chosen.
#pragma once

#include <cstdint>
#include <vector>

#include "linalg/gemm.hpp"
#include "linalg/quantised/matrix.hpp"

namespace kvzap::linalg {

/// Where the weights and the bias of one of several maps lie.
struct ChosenPlace {
  const void* weights;          // plain rows, or the panels of a section
  const float* bias;            // or null
  const std::int32_t* columns;  // quantised::Places::data
};

/// Maps of one size among which a kernel chooses. Refers to their weights, which must outlive it.
class ChosenMaps {
 public:
  ChosenMaps() = default;
  /// maps (map): weights (n, k) that serve(). biases (map): (n) each, or all empty.
  ChosenMaps(const std::vector<const LinearWeights*>& maps, const std::vector<ConstVector>& biases);

  /// Whether kernels should choose among these maps: all are plain, or all have quantised sections
  /// of the same formats, and one size and type. Integers whose inputs are not in order are left to
  /// products of one map, for which rows are spread so that tensor cores can take them.
  static bool serve(const std::vector<const LinearWeights*>& maps);

  /// y(i, n) = W(n, :) x(i / share, :) + bias(n), W and bias of map chosen(i).
  ///
  /// x (rows / share, k), chosen (rows), y (rows, n). x is rounded to bf16 if the weights are plain
  /// bf16, and used as float if they are quantised, as in other products. A map is read once for
  /// each row that chose it.
  void operator()(const ExecutionSpace& exec, const ConstMatrix& x, std::int64_t share,
                  const Kokkos::View<const std::int64_t*, MemorySpace>& chosen,
                  const Matrix& y) const;

 private:
  /// Outputs from `first` on: all of plain maps, or a section of quantised ones, whose panels have
  /// no data of their own.
  struct Section {
    quantised::Panels panels;
    std::int64_t first = 0, outputs = 0;
    Kokkos::View<ChosenPlace*, MemorySpace> places;  // (map)
  };

  DType m_dtype = DType::f32;
  std::int64_t m_inputs = 0;
  bool m_is_quantised = false;
  bool m_are_in_order = true;  // all quantised inputs are the columns of x
  std::vector<Section> m_sections;
};

}  // namespace kvzap::linalg
