// Products and norms of the rows of a matrix.
#pragma once

#include <cstdint>

#include "linalg/gemm.hpp"

namespace kvzap::policy {

/// products[r] = sum_d a(r, d) * (b[r * b_stride + d] + by * v[d]). A null b counts as zeros.
void row_products(const ExecutionSpace& exec, const linalg::ConstMatrix& a, const float* b,
                  std::int64_t b_stride, const float* v, float by, float* products);
/// norms[r] = the Euclidean norm of a(r, :).
void row_norms(const ExecutionSpace& exec, const linalg::ConstMatrix& a, float* norms);

}  // namespace kvzap::policy
