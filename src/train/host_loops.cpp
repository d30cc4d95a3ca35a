#include "train/host_loops.hpp"

#include <cmath>

#include "base/normal_tail.hpp"
#include "base/simd.hpp"

namespace kvzap::train {
namespace {

KVZAP_BODY void gelu_and_slope_body(float* values, const float* bias, float* activation,
                                    std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float x = values[i] + bias[i];
    const base::NormalTail normal = base::normal_tail(x);
    activation[i] = x * normal.below;
    values[i] = normal.below + x * (0.39894228f * normal.density);
  }
}

KVZAP_BODY void times_and_sum_body(float* values, const float* factors, float* sums,
                                   std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    values[i] *= factors[i];
    sums[i] += values[i];
  }
}

KVZAP_BODY double sum_of_squares_body(const float* values, std::int64_t count) {
  constexpr int lanes = 16;
  double sums[lanes] = {};
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    for (int j = 0; j < lanes; ++j) {
      const double x = values[i + j];
      sums[j] += x * x;
    }
  }
  double total = 0;
  for (; i < count; ++i) total += static_cast<double>(values[i]) * values[i];
  for (const double sum : sums) total += sum;
  return total;
}

KVZAP_BODY void adamw_body(float* parameters, const float* gradient, float scale, float* first,
                           float* second, const AdamStep& step, std::int64_t count) {
  // Copies, because the references could alias the output.
  const float beta2 = step.beta2, rest1 = 1.0f - step.beta1, rest2 = 1.0f - step.beta2;
  const float decay = step.decay, rate = step.rate, root = step.root, epsilon = step.epsilon;
  for (std::int64_t i = 0; i < count; ++i) {
    const float g = gradient[i] * scale;
    const float m = first[i] + rest1 * (g - first[i]);
    const float v = beta2 * second[i] + rest2 * g * g;
    first[i] = m;
    second[i] = v;
    parameters[i] = parameters[i] * decay - rate * m / (std::sqrt(v) * root + epsilon);
  }
}

KVZAP_BODY void subtract_body(float* target, const float* shift, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) target[i] -= shift[i];
}

KVZAP_BODY void add_to_double_body(const float* values, double* sums, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) sums[i] += values[i];
}

}  // namespace

KVZAP_KERNEL(void, gelu_and_slope,
             (float* values, const float* bias, float* activation, std::int64_t count),
             (values, bias, activation, count))
KVZAP_KERNEL(void, times_and_sum,
             (float* values, const float* factors, float* sums, std::int64_t count),
             (values, factors, sums, count))
KVZAP_KERNEL(double, sum_of_squares, (const float* values, std::int64_t count), (values, count))
KVZAP_KERNEL(void, adamw,
             (float* parameters, const float* gradient, float scale, float* first, float* second,
              const AdamStep& step, std::int64_t count),
             (parameters, gradient, scale, first, second, step, count))
KVZAP_KERNEL(void, subtract, (float* target, const float* shift, std::int64_t count),
             (target, shift, count))
KVZAP_KERNEL(void, add_to_double, (const float* values, double* sums, std::int64_t count),
             (values, sums, count))

}  // namespace kvzap::train
