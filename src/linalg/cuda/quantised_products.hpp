// Products of few rows with quantised weights by the tensor cores of NVIDIA's GPUs
// (base::cuda::has_tensor_cores).
#pragma once

#include "linalg/device/chosen_products.hpp"
#include "linalg/gemm.hpp"
#include "linalg/quantised/matrix.hpp"

namespace kvzap::linalg::tensor_cores {

/// Rows of x that a product takes.
inline constexpr std::int64_t most_rows = 16;

/// Whether rows of x can be read in vectors of 16 bytes: they begin at multiples of 16 bytes and
/// have a multiple of 4 inputs.
bool has_vectors(const ConstMatrix& x);

/// y (rows, outputs) = x (rows, inputs) W^T + bias, for 1 to most_rows rows of vectors whose inputs
/// have the order of panels. x is used as sums of two bf16, within 2^-17 of it; an infinite one may
/// give NaN. Sums are float. Returns false, and does nothing, if codes are floats or if x has other
/// rows. Does not wait.
bool multiply_quantised(const ExecutionSpace& exec, const ConstMatrix& x,
                        const quantised::Matrix& weights, const ConstVector& bias, const Matrix& y);

/// A section of maps among which the device has chosen: see ChosenMaps.
struct ChosenSection {
  quantised::Panels panels;   // of each map, but for `data`
  const ChosenPlace* places;  // (map)
  const std::int64_t* chosen;
  std::int64_t share;
};
/// The same for each row of y alone, whose inputs are row i / share of x, with the section's
/// weights of map chosen[i], whose inputs are in order. y (choices, outputs of the section).
bool multiply_chosen(const ExecutionSpace& exec, const ConstMatrix& x, const ChosenSection& section,
                     const Matrix& y);

}  // namespace kvzap::linalg::tensor_cores
