// Inner loops over rows on the host, compiled for several instruction sets; the program chooses one
// at start. The portable Kokkos kernels beside them compute the same on any backend.
#pragma once

#include <cstdint>
#include <kvzap/core/types.hpp>

namespace kvzap::linalg {

/// target[i] = float(source[i])
void widen(const float* source, float* target, std::int64_t count);
void widen(const half* source, float* target, std::int64_t count);
void widen(const bfloat16* source, float* target, std::int64_t count);

/// target[i] = Value(source[i]), rounded to nearest even.
void narrow(const float* source, float* target, std::int64_t count);
void narrow(const float* source, half* target, std::int64_t count);
void narrow(const float* source, bfloat16* target, std::int64_t count);
/// target[i] = float(bfloat16(source[i])), rounded to nearest even.
void round_to_bf16(const float* source, float* target, std::int64_t count);

/// Returns the largest of `count` >= 1 values.
float max_of(const float* values, std::int64_t count);
/// values[i] = exp(scaling * (values[i] - shift)) for values[i] <= shift and scaling > 0; returns
/// their sum. The error is within 2 units in the last place of the exponential of the rounded
/// argument. NaN gives NaN.
float exp_shifted(float* values, std::int64_t count, float shift, float scaling = 1);
/// values[i] *= factor
void scale(float* values, std::int64_t count, float factor);
/// values[i] = x / 2 * (1 + erf(x / sqrt(2))), the exact GELU (Hendrycks and Gimpel, arXiv
/// 1606.08415), to within 3e-7 * (1 + |x|).
void gelu(float* values, std::int64_t count);
/// values[i] = cap * tanh(values[i] / cap), within 4 units in the last place. NaN stays.
void soft_cap(float* values, std::int64_t count, float cap);
/// output[i] = input[i] / sqrt(mean(input^2) + eps) * weight[i] (Zhang and Sennrich, arXiv
/// 1910.07467); input and output may be the same. weight: null for 1.
void rms_norm(const float* input, const float* weight, float eps, float* output,
              std::int64_t count);
/// The same of input less its mean (Ba et al., arXiv 1607.06450).
void layer_norm(const float* input, const float* weight, float eps, float* output,
                std::int64_t count);
/// target[i] += summand[i]
void add(float* target, const float* summand, std::int64_t count);
/// Rotates x[d] with x[d + half] by the angle of cosine angles[2 * d] and sine angles[2 * d + 1],
/// for d < half.
void rotate(float* x, const float* angles, int half);
/// target[i] = silu(gate[i]) * up[i], with silu(x) = x / (1 + exp(-x))
void silu_times(const float* gate, const float* up, float* target, std::int64_t count);
/// values[i] = silu(values[i])
void silu(float* values, std::int64_t count);
/// values[i] = exp(-rate * ln(1 + exp(x))), x = values[i] + shifts[i], rate >= 0: decays of
/// Mamba-2 (arXiv 2405.21060) and gated delta nets (arXiv 2412.06464)
void softplus_decays(float* values, const float* shifts, float rate, std::int64_t count);
/// values[i] = exp(bound / (1 + exp(-rate * x))), x = values[i] + shifts[i], bound <= 0
void bounded_decays(float* values, const float* shifts, float rate, float bound,
                    std::int64_t count);
/// target[i] = up[i] / (1 + exp(-gate[i]))
void sigmoid_times(const float* gate, const float* up, float* target, std::int64_t count);
/// The GELU by tanh is x / (1 + exp(-y)), y = gelu_scale * (x + gelu_cubic * x^3).
inline constexpr float gelu_scale = 1.59576912f;  // 2 sqrt(2 / pi)
inline constexpr float gelu_cubic = 0.044715f;
/// target[i] = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))) * up[i], x = gate[i]
void gelu_tanh_times(const float* gate, const float* up, float* target, std::int64_t count);
inline constexpr float clamped_silu_slope = 1.702f;
/// target[i] = g / (1 + exp(-1.702 * g)) * (u + 1), g = min(gate[i], limit), u = up[i] clamped to
/// [-limit, limit]
void clamped_silu_times(const float* gate, const float* up, float limit, float* target,
                        std::int64_t count);
/// values[i] = the GELU by tanh of values[i]
void gelu_tanh(float* values, std::int64_t count);
/// values[i] = max(values[i], 0)^2
void relu_squared(float* values, std::int64_t count);
/// target[i] *= factors[i]
void multiply(float* target, const float* factors, std::int64_t count);
/// target[i] = min(target[i], limit) * f, f = factors[i] clamped to [-limit, limit]
void multiply_limited(float* target, const float* factors, float limit, std::int64_t count);

/// Parameters of xIELU.
struct Xielu {
  float positive = 0, negative = 0;  // factors of the nonlinear parts
  float slope = 0;                   // of the linear part
  float limit = 0;                   // of the exponent, at most 0
};
/// values[i] = positive * x^2 + slope * x for x > 0, else negative * (exp(min(x, limit)) - 1 - x) +
/// slope * x (Huang and Schlag, arXiv 2411.13010, equation 8).
void xielu(float* values, std::int64_t count, const Xielu& parameters);

}  // namespace kvzap::linalg
