#include "train/lapack.hpp"

#include <fmt/format.h>

#include <cstddef>
#include <kvzap/types.hpp>
#include <limits>
#include <vector>

// LAPACK's Fortran names with 32-bit integers; the length of each text goes last.
extern "C" {
void dpotrf_(const char* uplo, const int* n, double* a, const int* lda, int* info, std::size_t);
void dpotrs_(const char* uplo, const int* n, const int* nrhs, const double* a, const int* lda,
             double* b, const int* ldb, int* info, std::size_t);
void dpocon_(const char* uplo, const int* n, const double* a, const int* lda, const double* anorm,
             double* rcond, double* work, int* iwork, int* info, std::size_t);
void dsyrk_(const char* uplo, const char* trans, const int* n, const int* k, const double* alpha,
            const double* a, const int* lda, const double* beta, double* c, const int* ldc,
            std::size_t, std::size_t);
double dlansy_(const char* norm, const char* uplo, const int* n, const double* a, const int* lda,
               double* work, std::size_t, std::size_t);
}

namespace kvzap::detail {

CholeskyResult solve_cholesky(double* a, std::int64_t n, std::int64_t stride, double* b,
                              std::int64_t rows) {
  if (stride > std::numeric_limits<int>::max() || rows > std::numeric_limits<int>::max()) {
    throw Error(fmt::format("a system of {} unknowns does not fit LAPACK's integers", n));
  }
  // The upper triangle, row after row, is the lower one column after column.
  const char* const lower = "L";
  const int size = static_cast<int>(n), lda = static_cast<int>(stride);
  const int right_sides = static_cast<int>(rows);
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
  dpotrs_(lower, &size, &right_sides, a, &lda, b, &size, &info, 1);
  if (info != 0) throw Error(fmt::format("LAPACK's dpotrs refuses argument {}", -info));
  return result;
}

void add_symmetric_products(const double* z, std::int64_t rows, std::int64_t columns,
                            double* sums) {
  const int n = static_cast<int>(columns), k = static_cast<int>(rows);
  const double one = 1;
  dsyrk_("L", "N", &n, &k, &one, z, &n, &one, sums, &n, 1, 1);
}

}  // namespace kvzap::detail
