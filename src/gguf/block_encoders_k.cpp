// The formats "K": groups of 16 or 32 values have integer scales, which f16 scales of the block of
// 256 values multiply.
//
// For each group, a search tries several steps between neighbouring integers, and fits the scale
// (and minimum) by weighted least squares to the integers of each. The integer scales are then the
// ones with the least error among the neighbours of the fitted ones.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <kvzap/core/types.hpp>

#include "base/simd.hpp"
#include "gguf/block_encoders.hpp"
#include "gguf/block_search.hpp"

// Within a block, offsets fit an int.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

namespace kvzap::gguf {
namespace {

constexpr int k_values = 256;  // of a block
constexpr int lanes = 16;      // candidates that a search tries

/// Writes a block's scale and returns it as f16 holds it. A scale that f16 would round to zero
/// becomes its least magnitude: integer scales of groups are then small, not meaningless.
KVZAP_BODY float put_scale(float value, std::uint8_t* target) {
  constexpr float least = 0x1p-24f;
  if (value > 0 && value < least) value = least;
  if (value < 0 && value > -least) value = -least;
  const half rounded(value);
  std::memcpy(target, &rounded, sizeof(rounded));
  return static_cast<float>(rounded);
}

KVZAP_BODY int clamped(int value, int least, int most) {
  return value < least ? least : value > most ? most : value;
}

/// Returns `place` truncated to an integer in [0, most]. Integers with the order of the floats do
/// the comparisons, because GCC makes branches of comparisons of floats, which do not vectorize.
KVZAP_BODY float integer_in(float place, int most) {
  const auto largest = static_cast<std::int32_t>(base::float_bits(static_cast<float>(most)));
  auto bits = static_cast<std::int32_t>(base::float_bits(place));
  bits = bits < 0 ? 0 : bits;
  bits = bits < largest ? bits : largest;
  return static_cast<float>(static_cast<int>(base::bits_float(static_cast<std::uint32_t>(bits))));
}

// --- Q4_K and Q5_K: scale * q - minimum, eight groups of 32 values ---

constexpr int affine_values = 32;  // of a group
constexpr int affine_groups = 8;
constexpr int most_scale = 63;  // scales and minima of groups have 6 bits

struct AffineFit {
  float scale = 0;
  float minimum = 0;
};

/// Weighted sums over a group: of the values above the least one, and for each candidate of q, q *
/// q and q * value.
struct AffineSums {
  float weight;
  float x;
  float q[lanes];
  float qq[lanes];
  float qx[lanes];
};

/// Returns the least-squares fit x = scale * q + offset to a candidate's integers, or a scale of -1
/// if these do not determine it. `least`: the value at x = 0; minima of groups are not negative, so
/// that the offset is at most -least.
KVZAP_BODY AffineFit solve_affine(const AffineSums& sums, int k, float least) {
  constexpr float of_rounding = 1e-5f;
  const float determinant = sums.weight * sums.qq[k] - sums.q[k] * sums.q[k];
  float offset = -least;
  if (determinant > of_rounding * sums.weight * sums.qq[k]) {
    offset = std::min(offset, (sums.qq[k] * sums.x - sums.q[k] * sums.qx[k]) / determinant);
  }
  if (!(sums.qq[k] > 0)) return {-1, 0};
  return {(sums.qx[k] - offset * sums.q[k]) / sums.qq[k], offset};
}

/// Returns the best fit of the integers 0 … levels - 1 to a group.
template <int levels>
KVZAP_BODY AffineFit fit_affine(const float* values, const float* weights) {
  float least = 0, most = values[0];
#pragma omp simd reduction(min : least) reduction(max : most)
  for (int i = 0; i < affine_values; ++i) {
    least = std::min(least, values[i]);
    most = std::max(most, values[i]);
  }
  const float unit = inverse_or_zero(most - least);
  if (unit == 0) return {0, -least};  // all values are equal
  // Sums of the values themselves would lose a small range beside a large minimum.
  float above[affine_values];
  float weight = 0, x = 0;
#pragma omp simd reduction(+ : weight, x)
  for (int i = 0; i < affine_values; ++i) {
    above[i] = values[i] - least;
    weight += weights[i];
    x += weights[i] * above[i];
  }
  AffineSums sums = {weight, x, {}, {}, {}};
  float inverse[lanes];
  for (int k = 0; k < lanes; ++k) {
    inverse[k] = (static_cast<float>(levels - 1) + 0.15f * static_cast<float>(k - 9)) * unit;
    const float own = inverse[k];
    float sum_q = 0, sum_qq = 0, sum_qx = 0;
#pragma omp simd reduction(+ : sum_q, sum_qq, sum_qx)
    for (int i = 0; i < affine_values; ++i) {
      const float q = integer_in(above[i] * own + 0.5f, levels - 1);
      const float product = weights[i] * q;
      sum_q += product;
      sum_qq += product * q;
      sum_qx += product * above[i];
    }
    sums.q[k] = sum_q;
    sums.qq[k] = sum_qq;
    sums.qx[k] = sum_qx;
  }
  AffineFit best = {1 / inverse[9], -least};
  float best_gain = 0;
  for (int k = 0; k < lanes; ++k) {
    const AffineFit fit = solve_affine(sums, k, least);
    const float scale = fit.scale, offset = fit.minimum;
    // By this the fit lowers the sum of squares.
    const float gain = 2 * (scale * sums.qx[k] + offset * x - scale * offset * sums.q[k]) -
                       scale * scale * sums.qq[k] - offset * offset * weight;
    if (scale > 0 && gain > best_gain) {
      best_gain = gain;
      best = {scale, -(least + offset)};
    }
  }
  return best;
}

struct AffineScale {
  int scale = 0;
  int minimum = 0;
};

KVZAP_BODY int nearest_scale(float quotient) {
  return static_cast<int>(integer_in(quotient + 0.5f, most_scale));
}

/// Returns the integer scale and minimum with the least error among the neighbours of `fit`.
template <int levels>
KVZAP_BODY AffineScale nearest_affine(const float* values, const float* weights, AffineFit fit,
                                      float d, float m) {
  const int scale = nearest_scale(fit.scale * inverse_or_zero(d));
  const int minimum = nearest_scale(fit.minimum * inverse_or_zero(m));
  AffineScale candidates[lanes];
  float scales[lanes], inverse[lanes], minima[lanes], errors[lanes];
  for (int k = 0; k < lanes; ++k) {
    const int choice = k % 15;  // the last lane repeats the first
    candidates[k] = {clamped(scale + choice / 5 - 1, 0, most_scale),
                     clamped(minimum + choice % 5 - 2, 0, most_scale)};
    scales[k] = d * static_cast<float>(candidates[k].scale);
    inverse[k] = inverse_or_zero(scales[k]);
    minima[k] = m * static_cast<float>(candidates[k].minimum);
  }
  for (int k = 0; k < lanes; ++k) {
    const float scale_k = scales[k], inverse_k = inverse[k], minimum_k = minima[k];
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < affine_values; ++i) {
      const float q = integer_in((values[i] + minimum_k) * inverse_k + 0.5f, levels - 1);
      const float error = scale_k * q - minimum_k - values[i];
      sum += weights[i] * error * error;
    }
    errors[k] = sum;
  }
  return candidates[std::min_element(errors, errors + lanes) - errors];
}

/// Writes the integers of a group.
template <int levels>
KVZAP_BODY void round_affine(const float* values, float scale, float minimum,
                             std::uint8_t* integers) {
  const float inverse = inverse_or_zero(scale);
#pragma omp simd
  for (int i = 0; i < affine_values; ++i) {
    integers[i] =
        static_cast<std::uint8_t>(integer_in((values[i] + minimum) * inverse + 0.5f, levels - 1));
  }
}

/// Fits the block's two scales to the integers, by weighted least squares.
KVZAP_BODY AffineFit fit_block(const float* values, const float* weights, const AffineScale* scales,
                               const std::uint8_t* integers) {
  double aa = 0, bb = 0, ab = 0, ax = 0, bx = 0;
  for (int group = 0; group < affine_groups; ++group) {
    const int first = group * affine_values;
    float weight = 0, q = 0, qq = 0, x = 0, qx = 0;
#pragma omp simd reduction(+ : weight, q, qq, x, qx)
    for (int i = first; i < first + affine_values; ++i) {
      const auto integer = static_cast<float>(integers[i]);
      weight += weights[i];
      q += weights[i] * integer;
      qq += weights[i] * integer * integer;
      x += weights[i] * values[i];
      qx += weights[i] * integer * values[i];
    }
    const double a = scales[group].scale, b = scales[group].minimum;
    aa += a * a * qq;
    bb += b * b * weight;
    ab += a * b * q;
    ax += a * qx;
    bx += b * x;
  }
  // values = d * (scale * q) - m * minimum
  const double determinant = aa * bb - ab * ab;
  if (!(determinant > 1e-9 * aa * bb)) return {-1, -1};
  return {static_cast<float>((bb * ax - ab * bx) / determinant),
          static_cast<float>((ab * ax - aa * bx) / determinant)};
}

KVZAP_BODY bool is_near(float refined, float scale) {
  return refined > 0.5f * scale && refined < 2 * scale;
}

struct AffineBlock {
  AffineScale scales[affine_groups];
  std::uint8_t integers[k_values];
};

template <int levels>
KVZAP_BODY void choose_affine(const float* values, const float* weights, const AffineFit* fits,
                              float d, float m, AffineBlock& block) {
  for (int group = 0; group < affine_groups; ++group) {
    const int first = group * affine_values;
    const AffineScale own =
        nearest_affine<levels>(values + first, weights + first, fits[group], d, m);
    block.scales[group] = own;
    round_affine<levels>(values + first, d * static_cast<float>(own.scale),
                         m * static_cast<float>(own.minimum), block.integers + first);
  }
}

KVZAP_BODY void put_group_scales(const AffineScale* scales, std::uint8_t* target) {
  for (int i = 0; i < 4; ++i) {
    const AffineScale low = scales[i], high = scales[i + 4];
    target[i] = static_cast<std::uint8_t>(low.scale | (high.scale >> 4) << 6);
    target[i + 4] = static_cast<std::uint8_t>(low.minimum | (high.minimum >> 4) << 6);
    target[i + 8] = static_cast<std::uint8_t>((high.scale & 15) | (high.minimum & 15) << 4);
  }
}

template <int levels>
KVZAP_BODY void encode_affine(const float* values, std::uint8_t* target) {
  float weights[k_values];
  AffineFit fits[affine_groups];
  AffineFit most;
  for (int group = 0; group < affine_groups; ++group) {
    const int first = group * affine_values;
    weigh<affine_values>(values + first, weights + first);
    fits[group] = fit_affine<levels>(values + first, weights + first);
    most.scale = std::max(most.scale, fits[group].scale);
    most.minimum = std::max(most.minimum, fits[group].minimum);
  }
  float d = put_scale(most.scale / most_scale, target);
  float m = put_scale(most.minimum / most_scale, target + 2);
  AffineBlock block;
  choose_affine<levels>(values, weights, fits, d, m, block);
  const AffineFit refined = fit_block(values, weights, block.scales, block.integers);
  // Farther scales come from sums that cancel.
  if (is_near(refined.scale, d) && is_near(refined.minimum, m)) {
    d = put_scale(refined.scale, target);
    m = put_scale(refined.minimum, target + 2);
    choose_affine<levels>(values, weights, fits, d, m, block);
  }
  put_group_scales(block.scales, target + 4);
  target += 16;
  if (levels == 32) {
    for (int i = 0; i < 32; ++i) {
      int bits = 0;
      for (int group = 0; group < 8; ++group) {
        bits |= (block.integers[group * 32 + i] >> 4) << group;
      }
      target[i] = static_cast<std::uint8_t>(bits);
    }
    target += 32;
  }
  for (int pair = 0; pair < 4; ++pair) {
    const std::uint8_t* const q = block.integers + pair * 64;
    for (int i = 0; i < 32; ++i) {
      target[pair * 32 + i] = static_cast<std::uint8_t>((q[i] & 15) | (q[i + 32] & 15) << 4);
    }
  }
}

// --- Q6_K: scale * q, 16 groups of 16 values ---

constexpr int linear_values = 16;  // of a group
constexpr int linear_groups = 16;
constexpr int half_levels = 32;  // q is in [-32, 31]

/// Returns the nearest q, plus 32.
KVZAP_BODY float linear_place(float quotient) {
  return integer_in(quotient + (half_levels + 0.5f), 2 * half_levels - 1);
}

/// Returns the best scale of the integers -32 … 31 for a group. It may be negative.
KVZAP_BODY float fit_linear(const float* values, const float* weights) {
  float peak = 0;
  for (int i = 0; i < linear_values; ++i) {
    if (std::fabs(values[i]) > std::fabs(peak)) peak = values[i];
  }
  const float unit = inverse_or_zero(peak);
  if (unit == 0) return 0;
  float inverse[lanes], qq[lanes], qx[lanes];
  for (int k = 0; k < lanes; ++k) {
    inverse[k] = (-static_cast<float>(half_levels) + 0.15f * static_cast<float>(k - 6)) * unit;
  }
  for (int k = 0; k < lanes; ++k) {
    const float own = inverse[k];
    float sum_qq = 0, sum_qx = 0;
#pragma omp simd reduction(+ : sum_qq, sum_qx)
    for (int i = 0; i < linear_values; ++i) {
      const float q = linear_place(values[i] * own) - half_levels;
      const float product = weights[i] * q;
      sum_qq += product * q;
      sum_qx += product * values[i];
    }
    qq[k] = sum_qq;
    qx[k] = sum_qx;
  }
  float best = 1 / inverse[6], best_gain = -1;
  for (int k = 0; k < lanes; ++k) {
    if (!(qq[k] > 0)) continue;
    const float gain = qx[k] * qx[k] / qq[k];
    if (gain > best_gain) {
      best_gain = gain;
      best = qx[k] / qq[k];
    }
  }
  return best;
}

/// Returns the integer scale with the least error among the neighbours of `fit`.
KVZAP_BODY int nearest_linear(const float* values, const float* weights, float fit, float d) {
  const int scale = static_cast<int>(std::lrint(fit * inverse_or_zero(d)));
  int candidates[lanes];
  float scales[lanes], inverse[lanes], errors[lanes];
  for (int k = 0; k < lanes; ++k) {
    candidates[k] = clamped(scale + k - lanes / 2, -128, 127);
    scales[k] = d * static_cast<float>(candidates[k]);
    inverse[k] = inverse_or_zero(scales[k]);
  }
  for (int k = 0; k < lanes; ++k) {
    const float scale_k = scales[k], own = inverse[k];
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < linear_values; ++i) {
      const float q = linear_place(values[i] * own) - half_levels;
      const float error = scale_k * q - values[i];
      sum += weights[i] * error * error;
    }
    errors[k] = sum;
  }
  return candidates[std::min_element(errors, errors + lanes) - errors];
}

KVZAP_BODY void round_linear(const float* values, float scale, std::uint8_t* integers) {
  const float inverse = inverse_or_zero(scale);
#pragma omp simd
  for (int i = 0; i < linear_values; ++i) {
    integers[i] = static_cast<std::uint8_t>(linear_place(values[i] * inverse));
  }
}

KVZAP_BODY void encode_linear(const float* values, std::uint8_t* target) {
  float weights[k_values], fits[linear_groups];
  float peak = 0;
  for (int group = 0; group < linear_groups; ++group) {
    const int first = group * linear_values;
    weigh<linear_values>(values + first, weights + first);
    fits[group] = fit_linear(values + first, weights + first);
    if (std::fabs(fits[group]) > std::fabs(peak)) peak = fits[group];
  }
  const float d = put_scale(peak / -128, target + 208);
  std::uint8_t integers[k_values];
  for (int group = 0; group < linear_groups; ++group) {
    const int first = group * linear_values;
    const int scale = nearest_linear(values + first, weights + first, fits[group], d);
    target[192 + group] = static_cast<std::uint8_t>(scale);
    round_linear(values + first, d * static_cast<float>(scale), integers + first);
  }
  for (int part = 0; part < 2; ++part) {
    const std::uint8_t* const q = integers + part * 128;
    for (int i = 0; i < 32; ++i) {
      const int a = q[i], b = q[i + 32], c = q[i + 64], e = q[i + 96];
      target[part * 64 + i] = static_cast<std::uint8_t>((a & 15) | (c & 15) << 4);
      target[part * 64 + 32 + i] = static_cast<std::uint8_t>((b & 15) | (e & 15) << 4);
      target[128 + part * 32 + i] =
          static_cast<std::uint8_t>(a >> 4 | (b >> 4) << 2 | (c >> 4) << 4 | (e >> 4) << 6);
    }
  }
}

#define KVZAP_K_ENCODER(name, one, size)                                                       \
  KVZAP_BODY void name##_body(const float* values, std::int64_t n_blocks, std::byte* blocks) { \
    auto target = reinterpret_cast<std::uint8_t*>(blocks);                                     \
    for (std::int64_t i = 0; i < n_blocks; ++i) {                                              \
      one(values, target);                                                                     \
      values += k_values;                                                                      \
      target += (size);                                                                        \
    }                                                                                          \
  }

KVZAP_K_ENCODER(encode_q4_k, encode_affine<16>, 144)
KVZAP_K_ENCODER(encode_q5_k, encode_affine<32>, 176)
KVZAP_K_ENCODER(encode_q6_k, encode_linear, 210)
#undef KVZAP_K_ENCODER

}  // namespace

#define KVZAP_K_KERNEL(name)                                                                \
  KVZAP_KERNEL(void, name, (const float* values, std::int64_t n_blocks, std::byte* blocks), \
               (values, n_blocks, blocks))

KVZAP_K_KERNEL(encode_q4_k)
KVZAP_K_KERNEL(encode_q5_k)
KVZAP_K_KERNEL(encode_q6_k)
#undef KVZAP_K_KERNEL

}  // namespace kvzap::gguf

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
