#include "train/lapack.hpp"

#include <fmt/format.h>

#include <cstddef>
#include <kvzap/core/types.hpp>
#include <limits>
#include <vector>

#include "linalg/host/blas_threads.hpp"

// LAPACK's Fortran names with 32-bit integers. The lengths of text arguments come last.
extern "C" {
void dpotrf_(const char* uplo, const int* n, double* a, const int* lda, int* info, std::size_t);
void dpotrs_(const char* uplo, const int* n, const int* nrhs, const double* a, const int* lda,
             double* b, const int* ldb, int* info, std::size_t);
void dpocon_(const char* uplo, const int* n, const double* a, const int* lda, const double* anorm,
             double* rcond, double* work, int* iwork, int* info, std::size_t);
void dsyrk_(const char* uplo, const char* trans, const int* n, const int* k, const double* alpha,
            const double* a, const int* lda, const double* beta, double* c, const int* ldc,
            std::size_t, std::size_t);
void dgemm_(const char* transa, const char* transb, const int* m, const int* n, const int* k,
            const double* alpha, const double* a, const int* lda, const double* b, const int* ldb,
            const double* beta, double* c, const int* ldc, std::size_t, std::size_t);
double dlansy_(const char* norm, const char* uplo, const int* n, const double* a, const int* lda,
               double* work, std::size_t, std::size_t);
}

namespace kvzap::train {

CholeskyResult solve_cholesky(double* a, std::int64_t n, std::int64_t stride, double* b,
                              std::int64_t rows) {
  if (stride > std::numeric_limits<int>::max() || rows > std::numeric_limits<int>::max()) {
    throw Error(fmt::format("a system of {} unknowns does not fit LAPACK's integers", n));
  }
  linalg::expect_room_for_blas();
  // The row-major upper triangle is the column-major lower one.
  const char* const lower = "L";
  const int size = static_cast<int>(n), lda = static_cast<int>(stride);
  std::vector<double> work(static_cast<std::size_t>(3 * n));
  std::vector<int> integers(static_cast<std::size_t>(n));
  const double norm = dlansy_("1", lower, &size, a, &lda, work.data(), 1, 1);

  CholeskyResult result;
  int info = 0;
  dpotrf_(lower, &size, a, &lda, &info, 1);
  if (info != 0) {
    result.failed_pivot = info;
    return result;
  }
  double reciprocal = 0;
  dpocon_(lower, &size, a, &lda, &norm, &reciprocal, work.data(), integers.data(), &info, 1);
  result.condition = reciprocal > 0 ? 1 / reciprocal : std::numeric_limits<double>::infinity();
  solve_factored(a, n, stride, b, rows);
  return result;
}

void solve_factored(const double* factor, std::int64_t n, std::int64_t stride, double* b,
                    std::int64_t rows) {
  const int size = static_cast<int>(n), lda = static_cast<int>(stride);
  const int right_sides = static_cast<int>(rows);
  int info = 0;
  dpotrs_("L", &size, &right_sides, factor, &lda, b, &size, &info, 1);
  if (info != 0) throw Error(fmt::format("LAPACK's dpotrs refuses argument {}", -info));
}

void add_residuals(const double* z, std::int64_t rows, std::int64_t inputs, const double* w,
                   std::int64_t heads, double* errors, double* sums) {
  linalg::expect_room_for_blas();
  const int count = static_cast<int>(rows), n = static_cast<int>(inputs);
  const int h = static_cast<int>(heads);
  const double one = 1, minus_one = -1;
  // A row-major matrix is the transpose of the column-major one.
  dgemm_("T", "N", &h, &count, &n, &minus_one, w, &n, z, &n, &one, errors, &h, 1, 1);
  dgemm_("N", "T", &n, &h, &count, &one, z, &n, errors, &h, &one, sums, &n, 1, 1);
}

void add_symmetric_products(const double* z, std::int64_t rows, std::int64_t columns,
                            double* sums) {
  linalg::expect_room_for_blas();
  const int n = static_cast<int>(columns), k = static_cast<int>(rows);
  const double one = 1;
  dsyrk_("L", "N", &n, &k, &one, z, &n, &one, sums, &n, 1, 1);
}

}  // namespace kvzap::train
