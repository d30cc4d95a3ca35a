// BLAS and LAPACK in double, on the host, for training.
#pragma once

#include <cstdint>

namespace kvzap::train {

/// Result of a factorization.
struct CholeskyResult {
  std::int64_t failed_pivot = 0;  // 1-based; 0: none
  double condition = 0;           // estimate in the 1-norm; infinite if the factor is singular
};

/// Solves a X = b for a symmetric positive definite `a` (n, n), row-major with `stride`. Reads the
/// upper triangle of `a` and replaces it by the factor. Each row of b (rows, n), row-major, is a
/// right-hand side and is replaced by its solution. If a pivot fails, b is unchanged. Throws Error
/// if n exceeds LAPACK's integers.
CholeskyResult solve_cholesky(double* a, std::int64_t n, std::int64_t stride, double* b,
                              std::int64_t rows);

/// Solves with a factor that solve_cholesky computed.
void solve_factored(const double* factor, std::int64_t n, std::int64_t stride, double* b,
                    std::int64_t rows);

/// Computes errors (rows, heads) -= z w^T, then sums (heads, inputs) += errors^T z, for z (rows,
/// inputs) and w (heads, inputs). All are row-major.
void add_residuals(const double* z, std::int64_t rows, std::int64_t inputs, const double* w,
                   std::int64_t heads, double* errors, double* sums);

/// Computes sums (columns, columns) += z^T z for z (rows, columns), both row-major. Computes only
/// the upper triangle.
void add_symmetric_products(const double* z, std::int64_t rows, std::int64_t columns, double* sums);

}  // namespace kvzap::train
