#include "policy/inverse_factor.hpp"

#include <cmath>

namespace kvzap::policy {

bool invert_factor(const float* a, std::int64_t n, double diagonal, double least,
                   std::vector<double>& factor, float* inverse) {
  factor.assign(2 * n * n, 0.0);
  double* const rows = factor.data() + n * n;  // rows of the inverse
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t j = 0; j <= i; ++j) {
      double sum = 0.5 * (static_cast<double>(a[i * n + j]) + a[j * n + i]);
      if (i == j) sum += diagonal;
      for (std::int64_t k = 0; k < j; ++k) sum -= factor[i * n + k] * factor[j * n + k];
      if (i != j) {
        factor[i * n + j] = sum / factor[j * n + j];
        continue;
      }
      if (sum < least) sum = least;
      if (!(sum > 0 && std::isfinite(sum))) return false;
      factor[i * n + i] = std::sqrt(sum);
    }
  }
  // Computes row i of the inverse from the rows above it, so that the inner loops run along rows.
  for (std::int64_t i = 0; i < n; ++i) {
    double* const row = rows + i * n;
    for (std::int64_t k = 0; k < i; ++k) {
      const double by = factor[i * n + k];
      const double* const above = rows + k * n;
      for (std::int64_t j = 0; j <= k; ++j) row[j] -= by * above[j];
    }
    row[i] = 1;
    for (std::int64_t j = 0; j <= i; ++j) row[j] /= factor[i * n + i];
  }
  for (std::int64_t i = 0; i < n * n; ++i) inverse[i] = static_cast<float>(rows[i]);
  return true;
}

}  // namespace kvzap::policy
