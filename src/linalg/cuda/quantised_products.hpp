// Products of few rows with quantised weights by the tensor cores of NVIDIA's GPUs
// (base::cuda::has_tensor_cores).
#pragma once

#include "linalg/gemm.hpp"
#include "linalg/quantised/matrix.hpp"

namespace kvzap::linalg::tensor_cores {

/// Rows of x that a product takes.
inline constexpr std::int64_t most_rows = 16;

/// y (rows, outputs) = x (rows, inputs) W^T + bias, for 1 to most_rows rows whose inputs lie one
/// after the other in the order of panels. x is used as sums of two bf16, within 2^-17 of it; sums
/// are float. Returns false, and does nothing, if codes are floats. Does not wait.
bool multiply_quantised(const ExecutionSpace& exec, const ConstMatrix& x,
                        const quantised::Matrix& weights, const ConstVector& bias, const Matrix& y);

}  // namespace kvzap::linalg::tensor_cores
