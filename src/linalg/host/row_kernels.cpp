#include "linalg/host/row_kernels.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/exp_nonpositive.hpp"
#include "base/normal_tail.hpp"
#include "base/simd.hpp"
#include "base/soft_cap.hpp"
#include "base/vec.hpp"

// Compilers, which do not know half, would not convert a vector by one instruction.
#define KVZAP_LEVEL_BODY "linalg/host/row_kernels.inc"
#include "base/each_level.hpp"

namespace kvzap::linalg {
namespace {

// Partial sums of a dot product: enough independent chains to hide the latency of an addition, and
// a whole number of vector registers in every instruction set.
constexpr int lanes = 32;

template <class Value>
KVZAP_BODY float dot(const Value* a, const float* b, std::int64_t count) {
  float partial[lanes] = {};
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    for (int l = 0; l < lanes; ++l) partial[l] += static_cast<float>(a[i + l]) * b[i + l];
  }
  float sum = 0;
  for (; i < count; ++i) sum += static_cast<float>(a[i]) * b[i];
  for (int width = lanes / 2; width > 0; width /= 2) {
    for (int l = 0; l < width; ++l) partial[l] += partial[l + width];
  }
  return sum + partial[0];
}

template <class Value>
KVZAP_BODY void widen_body(const Value* source, float* target, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) target[i] = static_cast<float>(source[i]);
}
// Keeps one maximum per lane, because Clang has no reduction for the maximum of floats.
KVZAP_BODY float max_of_body(const float* values, std::int64_t count) {
  float partial[lanes];
  for (float& p : partial) p = values[0];
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    for (int l = 0; l < lanes; ++l) {
      partial[l] = partial[l] < values[i + l] ? values[i + l] : partial[l];
    }
  }
  // Halves of the lanes, so that few steps wait for one another.
  for (int half = lanes / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) {
      partial[l] = partial[l] < partial[l + half] ? partial[l + half] : partial[l];
    }
  }
  float largest = partial[0];
  for (; i < count; ++i) largest = largest < values[i] ? values[i] : largest;
  return largest;
}

KVZAP_BODY float exp_shifted_body(float* values, std::int64_t count, float shift, float scaling) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < count; ++i) {
    values[i] = base::exp_nonpositive((values[i] - shift) * scaling);
    sum += values[i];
  }
  return sum;
}

KVZAP_BODY void scale_body(float* values, std::int64_t count, float factor) {
  for (std::int64_t i = 0; i < count; ++i) values[i] *= factor;
}

/// Rounds as the constructor of bfloat16 does, without a branch, so that loops vectorize.
KVZAP_BODY std::uint32_t bf16_bits(float value) {
  const std::uint32_t word = base::float_bits(value);
  const std::uint32_t rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
  const std::uint32_t quiet = (word >> 16) | 0x40u;
  const bool is_nan = (word & 0x7fffffffu) > 0x7f800000u;
  return is_nan ? quiet : rounded;
}

KVZAP_BODY void narrow_body(const float* source, bfloat16* target, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    target[i].bits = static_cast<std::uint16_t>(bf16_bits(source[i]));
  }
}

KVZAP_BODY void round_to_bf16_body(const float* source, float* target, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) target[i] = base::bits_float(bf16_bits(source[i]) << 16);
}

KVZAP_BODY void narrow_body(const float* source, float* target, std::int64_t count) {
  std::copy_n(source, count, target);
}

KVZAP_BODY void gelu_body(float* values, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) values[i] *= base::normal_tail(values[i]).below;
}

// From here on, results may replace an input. Without the pragma, a loop would check whether they
// do, and then not use vectors.
KVZAP_BODY void rms_norm_body(const float* input, const float* weight, float eps, float* output,
                              std::int64_t count) {
  const float factor = 1.0f / std::sqrt(dot(input, input, count) / static_cast<float>(count) + eps);
  if (weight == nullptr) {
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) output[i] = input[i] * factor;
    return;
  }
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) output[i] = input[i] * factor * weight[i];
}

KVZAP_BODY void layer_norm_body(const float* input, const float* weight, float eps, float* output,
                                std::int64_t count) {
  float partial[lanes] = {};
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    for (int l = 0; l < lanes; ++l) partial[l] += input[i + l];
  }
  float sum = 0;
  for (; i < count; ++i) sum += input[i];
  for (const float part : partial) sum += part;
  const float mean = sum / static_cast<float>(count);
#pragma omp simd
  for (i = 0; i < count; ++i) output[i] = input[i] - mean;
  rms_norm_body(output, weight, eps, output, count);
}

KVZAP_BODY void soft_cap_body(float* values, std::int64_t count, float cap) {
  const float inverse = 1.0f / cap;
  for (std::int64_t i = 0; i < count; ++i) {
    values[i] = cap * base::tanh_without_branches(values[i] * inverse);
  }
}

KVZAP_BODY void add_body(float* target, const float* summand, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) target[i] += summand[i];
}

KVZAP_BODY void rotate_body(float* x, const float* angles, int half) {
  for (int d = 0; d < half; ++d) {
    const float cosine = angles[2 * d];
    const float sine = angles[2 * d + 1];
    const float low = x[d];
    const float high = x[d + half];
    x[d] = low * cosine - high * sine;
    x[d + half] = high * cosine + low * sine;
  }
}

/// x / (1 + exp(-y)) for x >= -100; exp(-|y|) never overflows.
KVZAP_BODY float times_sigmoid(float x, float y) {
  const float e = base::exp_nonpositive(y < 0 ? y : -y);
  return x * (y < 0 ? e : 1.0f) / (1.0f + e);
}

KVZAP_BODY float silu_of(float x) {
  x = x < -100.0f ? -100.0f : x;  // its silu is 0 to within 2e-36
  return times_sigmoid(x, x);
}

KVZAP_BODY void silu_times_body(const float* gate, const float* up, float* target,
                                std::int64_t count) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) target[i] = silu_of(gate[i]) * up[i];
}

KVZAP_BODY void silu_body(float* values, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) values[i] = silu_of(values[i]);
}

KVZAP_BODY void sigmoid_times_body(const float* gate, const float* up, float* target,
                                   std::int64_t count) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) target[i] = times_sigmoid(up[i], gate[i]);
}

/// ln(1 + exp(x)) by ln(1 + e) = 2 artanh(z), z = e / (2 + e) <= 1/3, whose series has a relative
/// error below 1e-8.
KVZAP_BODY float softplus(float x) {
  const float e = base::exp_nonpositive(x < 0 ? x : -x);
  const float z = e / (2.0f + e), square = z * z;
  float series = 1.0f / 13;
  series = series * square + 1.0f / 11;
  series = series * square + 1.0f / 9;
  series = series * square + 1.0f / 7;
  series = series * square + 1.0f / 5;
  series = series * square + 1.0f / 3;
  return (x < 0 ? 0.0f : x) + 2.0f * z * (series * square + 1.0f);
}

KVZAP_BODY void softplus_decays_body(float* values, const float* shifts, float rate,
                                     std::int64_t count) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    values[i] = base::exp_nonpositive(-rate * softplus(values[i] + shifts[i]));
  }
}

KVZAP_BODY void bounded_decays_body(float* values, const float* shifts, float rate, float bound,
                                    std::int64_t count) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    values[i] = base::exp_nonpositive(times_sigmoid(bound, rate * (values[i] + shifts[i])));
  }
}

KVZAP_BODY float gelu_tanh_of(float x) {
  x = x < -100.0f ? -100.0f : x;  // its GELU is 0
  return times_sigmoid(x, gelu_scale * (x + gelu_cubic * x * x * x));
}

KVZAP_BODY void gelu_tanh_times_body(const float* gate, const float* up, float* target,
                                     std::int64_t count) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) target[i] = gelu_tanh_of(gate[i]) * up[i];
}

KVZAP_BODY void clamped_silu_times_body(const float* gate, const float* up, float limit,
                                        float* target, std::int64_t count) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    float g = gate[i] > limit ? limit : gate[i];
    g = g < -100.0f ? -100.0f : g;
    float u = up[i] > limit ? limit : up[i];
    u = u < -limit ? -limit : u;
    target[i] = times_sigmoid(g, clamped_silu_slope * g) * (u + 1.0f);
  }
}

KVZAP_BODY void gelu_tanh_body(float* values, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) values[i] = gelu_tanh_of(values[i]);
}

KVZAP_BODY void relu_squared_body(float* values, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float x = values[i] < 0 ? 0 : values[i];
    values[i] = x * x;
  }
}

KVZAP_BODY void multiply_body(float* target, const float* factors, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) target[i] *= factors[i];
}

KVZAP_BODY void multiply_limited_body(float* target, const float* factors, float limit,
                                      std::int64_t count) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    float factor = factors[i] > limit ? limit : factors[i];
    factor = factor < -limit ? -limit : factor;
    target[i] = (target[i] > limit ? limit : target[i]) * factor;
  }
}

KVZAP_BODY void xielu_body(float* values, std::int64_t count, const Xielu& parameters) {
  const auto [positive, negative, slope, limit] = parameters;
  for (std::int64_t i = 0; i < count; ++i) {
    const float x = values[i];
    // exp(y) - 1, without the cancellation near 0.
    const float half = base::tanh_without_branches(0.5f * (x > limit ? limit : x));
    const float below = negative * (2.0f * half / (1.0f - half) - x);
    values[i] = (x > 0 ? positive * x * x : below) + slope * x;
  }
}

}  // namespace

KVZAP_KERNEL(void, narrow, (const float* source, float* target, std::int64_t count),
             (source, target, count))
void narrow(const float* source, half* target, std::int64_t count) {
  KVZAP_AT_LEVEL(narrow_halves)(source, target, count);
}
void widen(const half* source, float* target, std::int64_t count) {
  KVZAP_AT_LEVEL(widen_halves)(source, target, count);
}
KVZAP_KERNEL(void, widen, (const float* source, float* target, std::int64_t count),
             (source, target, count))
KVZAP_KERNEL(void, widen, (const bfloat16* source, float* target, std::int64_t count),
             (source, target, count))
KVZAP_KERNEL(void, narrow, (const float* source, bfloat16* target, std::int64_t count),
             (source, target, count))
KVZAP_KERNEL(void, round_to_bf16, (const float* source, float* target, std::int64_t count),
             (source, target, count))

KVZAP_KERNEL(float, max_of, (const float* values, std::int64_t count), (values, count))
KVZAP_KERNEL(float, exp_shifted, (float* values, std::int64_t count, float shift, float scaling),
             (values, count, shift, scaling))
KVZAP_KERNEL(void, scale, (float* values, std::int64_t count, float factor),
             (values, count, factor))
KVZAP_KERNEL(void, gelu, (float* values, std::int64_t count), (values, count))
KVZAP_KERNEL(void, rms_norm,
             (const float* input, const float* weight, float eps, float* output,
              std::int64_t count),
             (input, weight, eps, output, count))
KVZAP_KERNEL(void, layer_norm,
             (const float* input, const float* weight, float eps, float* output,
              std::int64_t count),
             (input, weight, eps, output, count))
KVZAP_KERNEL(void, soft_cap, (float* values, std::int64_t count, float cap), (values, count, cap))
KVZAP_KERNEL(void, add, (float* target, const float* summand, std::int64_t count),
             (target, summand, count))
KVZAP_KERNEL(void, rotate, (float* x, const float* angles, int half), (x, angles, half))
KVZAP_KERNEL(void, silu_times,
             (const float* gate, const float* up, float* target, std::int64_t count),
             (gate, up, target, count))
KVZAP_KERNEL(void, silu, (float* values, std::int64_t count), (values, count))
KVZAP_KERNEL(void, sigmoid_times,
             (const float* gate, const float* up, float* target, std::int64_t count),
             (gate, up, target, count))
KVZAP_KERNEL(void, softplus_decays,
             (float* values, const float* shifts, float rate, std::int64_t count),
             (values, shifts, rate, count))
KVZAP_KERNEL(void, bounded_decays,
             (float* values, const float* shifts, float rate, float bound, std::int64_t count),
             (values, shifts, rate, bound, count))
KVZAP_KERNEL(void, gelu_tanh_times,
             (const float* gate, const float* up, float* target, std::int64_t count),
             (gate, up, target, count))
KVZAP_KERNEL(void, clamped_silu_times,
             (const float* gate, const float* up, float limit, float* target, std::int64_t count),
             (gate, up, limit, target, count))
KVZAP_KERNEL(void, gelu_tanh, (float* values, std::int64_t count), (values, count))
KVZAP_KERNEL(void, relu_squared, (float* values, std::int64_t count), (values, count))
KVZAP_KERNEL(void, multiply, (float* target, const float* factors, std::int64_t count),
             (target, factors, count))
KVZAP_KERNEL(void, multiply_limited,
             (float* target, const float* factors, float limit, std::int64_t count),
             (target, factors, limit, count))
KVZAP_KERNEL(void, xielu, (float* values, std::int64_t count, const Xielu& parameters),
             (values, count, parameters))

}  // namespace kvzap::linalg
