// What training asks of BLAS and LAPACK in double, on the host.
#pragma once

#include <cstdint>

namespace kvzap::detail {

/// What became of a system.
struct CholeskyResult {
  std::int64_t failed_pivot = 0;  // 1-based; 0: none
  double condition = 0;           // estimate, 1-norm; infinite if the factor is singular
};

/// Solves a X = b for the symmetric positive definite `a` (n, n), row after row with `stride`, of
/// which the upper triangle is read and replaced by the factor. b (rows, n), row after row: row r
/// is replaced by the solution of its right-hand side. If a pivot fails, b is left as it is. Throws
/// Error for n beyond LAPACK's integers.
CholeskyResult solve_cholesky(double* a, std::int64_t n, std::int64_t stride, double* b,
                              std::int64_t rows);

/// The same with a factor that solve_cholesky has left.
void solve_factored(const double* factor, std::int64_t n, std::int64_t stride, double* b,
                    std::int64_t rows);

/// errors (rows, heads) -= z w^T, then sums (heads, inputs) += errors^T z, for z (rows, inputs) and
/// w (heads, inputs); all row after row.
void add_residuals(const double* z, std::int64_t rows, std::int64_t inputs, const double* w,
                   std::int64_t heads, double* errors, double* sums);

/// sums (columns, columns) += z^T z for z (rows, columns), both row after row; the upper triangle
/// alone is computed.
void add_symmetric_products(const double* z, std::int64_t rows, std::int64_t columns, double* sums);

}  // namespace kvzap::detail
