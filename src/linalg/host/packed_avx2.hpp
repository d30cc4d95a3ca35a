// Products with packed weights (LinearWeights) on processors with AVX2: a few rows at the speed of
// memory, many at that of arithmetic. To be called at SimdLevel::avx2 or above alone.
#pragma once

#include <cstdint>
#include <kvzap/core/types.hpp>

namespace kvzap::detail::avx2 {

/// packed_product (packed_kernels.hpp) of float rows, whatever type the weights have; `x` as there.
/// Subnormal weights count as what they are.
void packed_product(const float* x, std::int64_t x_stride, int n_rows, const bfloat16* block,
                    std::int64_t padded_inputs, int outputs, float* y, std::int64_t y_stride);
void packed_product(const float* x, std::int64_t x_stride, int n_rows, const float* block,
                    std::int64_t padded_inputs, int outputs, float* y, std::int64_t y_stride);
void packed_product(const float* x, std::int64_t x_stride, int n_rows, const half* block,
                    std::int64_t padded_inputs, int outputs, float* y, std::int64_t y_stride);

/// Inputs that packed_gemm takes at once: a panel of so many by 16 outputs, widened, fills half of
/// a first-level cache of 32 KiB.
inline constexpr std::int64_t gemm_inputs = 256;
/// The most rows of x that packed_gemm takes: with gemm_inputs of each they fit a second-level
/// cache of 256 KiB.
inline constexpr std::int64_t gemm_rows = 144;

/// y[m * y_stride + n] = sum_k x(m, k) * weights[n, k] + bias[n] (0 if bias is null) for n_rows
/// <= gemm_rows rows of x and the n < `outputs` <= 64 of one packed block, accumulated in float. x
/// lies in slices of gemm_inputs inputs, x(m, k) at x[k / gemm_inputs * slice_stride + m *
/// gemm_inputs + k % gemm_inputs], with zeros from the last input to `padded_inputs`.
void packed_gemm(const float* x, std::int64_t slice_stride, std::int64_t n_rows,
                 const bfloat16* block, std::int64_t padded_inputs, int outputs, const float* bias,
                 float* y, std::int64_t y_stride);
void packed_gemm(const float* x, std::int64_t slice_stride, std::int64_t n_rows, const float* block,
                 std::int64_t padded_inputs, int outputs, const float* bias, float* y,
                 std::int64_t y_stride);
void packed_gemm(const float* x, std::int64_t slice_stride, std::int64_t n_rows, const half* block,
                 std::int64_t padded_inputs, int outputs, const float* bias, float* y,
                 std::int64_t y_stride);

/// pack_block (packed_kernels.hpp) of 32-bit words: floats, or pairs of bf16.
void pack_block(const bfloat16* rows, std::int64_t stride, int n_rows, std::int64_t inputs,
                std::int64_t padded_inputs, bfloat16* block);
void pack_block(const float* rows, std::int64_t stride, int n_rows, std::int64_t inputs,
                std::int64_t padded_inputs, float* block);

}  // namespace kvzap::detail::avx2
