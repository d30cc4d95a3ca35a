// Products with packed weights (LinearWeights) for AVX2: a few rows at the speed of memory, many at
// the speed of arithmetic. Call them only at SimdLevel::avx2 or above.
#pragma once

#include <cstdint>
#include <kvzap/core/types.hpp>

namespace kvzap::linalg::avx2 {

/// The same as packed_product (packed_kernels.hpp) of float rows, for weights of any type; `x` as
/// there. Subnormal weights keep their value.
void packed_product(const float* x, std::int64_t x_stride, int n_rows, const bfloat16* block,
                    std::int64_t padded_inputs, int outputs, float* y, std::int64_t y_stride);
void packed_product(const float* x, std::int64_t x_stride, int n_rows, const float* block,
                    std::int64_t padded_inputs, int outputs, float* y, std::int64_t y_stride);
void packed_product(const float* x, std::int64_t x_stride, int n_rows, const half* block,
                    std::int64_t padded_inputs, int outputs, float* y, std::int64_t y_stride);

/// Inputs that packed_gemm takes at once. A widened panel of these inputs and 16 outputs fills half
/// of a first-level cache of 32 KiB.
inline constexpr std::int64_t gemm_inputs = 256;
/// The most rows of x that packed_gemm takes. gemm_inputs inputs of each fit a second-level cache
/// of 256 KiB.
inline constexpr std::int64_t gemm_rows = 144;

/// y[m * y_stride + n] = sum_k x(m, k) * weights[n, k] + bias[n] (0 if bias is null) for n_rows <=
/// gemm_rows rows of x and the n < `outputs` <= 64 of one packed block. Sums are float. x is stored
/// in slices of gemm_inputs inputs: x(m, k) is at x[k / gemm_inputs * slice_stride + m *
/// gemm_inputs + k % gemm_inputs]. Zeros follow the last input up to `padded_inputs`.
void packed_gemm(const float* x, std::int64_t slice_stride, std::int64_t n_rows,
                 const bfloat16* block, std::int64_t padded_inputs, int outputs, const float* bias,
                 float* y, std::int64_t y_stride);
void packed_gemm(const float* x, std::int64_t slice_stride, std::int64_t n_rows, const float* block,
                 std::int64_t padded_inputs, int outputs, const float* bias, float* y,
                 std::int64_t y_stride);
void packed_gemm(const float* x, std::int64_t slice_stride, std::int64_t n_rows, const half* block,
                 std::int64_t padded_inputs, int outputs, const float* bias, float* y,
                 std::int64_t y_stride);

/// The same as pack_block (packed_kernels.hpp) for 32-bit words: floats, or pairs of bf16.
void pack_block(const bfloat16* rows, std::int64_t stride, int n_rows, std::int64_t inputs,
                std::int64_t padded_inputs, bfloat16* block);
void pack_block(const float* rows, std::int64_t stride, int n_rows, std::int64_t inputs,
                std::int64_t padded_inputs, float* block);

}  // namespace kvzap::linalg::avx2
