// Inner loops of training on the host for several instruction sets. The program selects one set
// when it starts. The Kokkos kernels in mlp_kernels.cpp compute the same on any backend.
#pragma once

#include <cstdint>

namespace kvzap::train {

/// With x = values[i] + bias[i], sets activation[i] = gelu(x), within 3e-7 * (1 + |x|) of the exact
/// value. Sets values[i] = gelu'(x) = Phi(x) + x phi(x), within 4e-7 * (1 + |x|).
void gelu_and_slope(float* values, const float* bias, float* activation, std::int64_t count);

/// values[i] *= factors[i]; sums[i] += values[i]
void times_and_sum(float* values, const float* factors, float* sums, std::int64_t count);

/// Returns the sum of squares in double. The order of summation depends only on `count`.
double sum_of_squares(const float* values, std::int64_t count);

/// Constants of one step of AdamW.
struct AdamStep {
  float decay;  // 1 - rate * weight decay
  float rate;   // learning rate / (1 - beta1^t)
  float root;   // 1 / sqrt(1 - beta2^t)
  float beta1 = 0.9f, beta2 = 0.999f, epsilon = 1e-8f;
};

/// Takes one step of AdamW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2) in torch's form.
/// Multiplies the gradient by `scale` first.
void adamw(float* parameters, const float* gradient, float scale, float* first, float* second,
           const AdamStep& step, std::int64_t count);

/// target[i] = source[i] - shift[i]
void subtract(float* target, const float* shift, std::int64_t count);

/// sums[i] += values[i]
void add_to_double(const float* values, double* sums, std::int64_t count);

}  // namespace kvzap::train
