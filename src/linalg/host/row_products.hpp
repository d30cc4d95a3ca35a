// Products of a few rows with plain rows of weights, for several instruction sets. Each weight is
// read from memory once.
#pragma once

#include <cstdint>
#include <kvzap/core/types.hpp>

#include "linalg/host/row_span.hpp"

namespace kvzap::linalg {

/// The most rows that the products take.
inline constexpr int skinny_product_rows = 8;

/// y[m * y_stride + n] = sum_k x(m, k) * weights(n, k) for k < `inputs` and at most
/// skinny_product_rows rows of x, accumulated in float. x is read fastest if its rows are not a
/// multiple of 4 KiB apart.
void skinny_product(RowSpan<const float> x, RowSpan<const float> weights, std::int64_t inputs,
                    float* y, std::int64_t y_stride);
void skinny_product(RowSpan<const float> x, RowSpan<const half> weights, std::int64_t inputs,
                    float* y, std::int64_t y_stride);
void skinny_product(RowSpan<const float> x, RowSpan<const bfloat16> weights, std::int64_t inputs,
                    float* y, std::int64_t y_stride);

/// A float that a product first rounds to bf16; NaN stays NaN.
struct RoundedFloat {
  float value;
  explicit operator float() const { return static_cast<float>(bfloat16(value)); }
};

/// The same with weights that the product rounds.
void skinny_product(RowSpan<const float> x, RowSpan<const RoundedFloat> weights,
                    std::int64_t inputs, float* y, std::int64_t y_stride);

/// The same by dot products of bf16 pairs, which count subnormal values as zero on x86. Needs
/// SimdLevel::avx512_bf16 or above, or neon_bf16.
void skinny_product(RowSpan<const bfloat16> x, RowSpan<const bfloat16> weights, std::int64_t inputs,
                    float* y, std::int64_t y_stride);

}  // namespace kvzap::linalg
