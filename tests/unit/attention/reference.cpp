#include "unit/attention/reference.hpp"

#include <cmath>

namespace kvzap::test::attention {

double solve_query(const double* query, const double* keys, const double* values,
                   std::size_t visible, int dim, std::vector<double>& output,
                   std::vector<double>& weights, double soft_cap) {
  weights.assign(visible, 0);
  output.assign(dim, 0);
  double maximum = -INFINITY;
  for (std::size_t r = 0; r < visible; ++r) {
    double score = 0;
    for (int d = 0; d < dim; ++d) score += query[d] * keys[r * dim + d];
    weights[r] = score / std::sqrt(double(dim));
    if (soft_cap > 0) weights[r] = soft_cap * std::tanh(weights[r] / soft_cap);
    if (weights[r] > maximum) maximum = weights[r];
  }
  const double shift = maximum == -INFINITY ? 0 : maximum;
  double sum = 0;
  for (double& weight : weights) sum += weight = std::exp(weight - shift);
  double* const result = output.data();
  for (std::size_t r = 0; r < visible; ++r) {
    weights[r] = sum == 0 ? 0 : weights[r] / sum;
    for (int d = 0; d < dim; ++d) result[d] += weights[r] * values[r * dim + d];
  }
  return sum == 0 ? -INFINITY : shift + std::log(sum);
}

}  // namespace kvzap::test::attention
