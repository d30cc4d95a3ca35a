// Products of a few rows with bf16 weights at the speed of memory: AVX-512 with its bf16 dot
// product. To be called at SimdLevel::avx512_bf16 alone; elsewhere row_kernels does the work.
#pragma once

#include <cstdint>
#include <kvzap/types.hpp>

namespace kvzap::detail {

/// Whether the three functions below exist in this build (x86-64 and a compiler that knows the
/// instructions).
bool has_bf16_kernels();

/// y[m * y_stride + n] = sum_k x[m * x_stride + k] * weights[n * weights_stride + k] for n_rows <=
/// 8 rows of x, accumulated in float. Subnormal values count as zero.
void bf16_product_rows(const bfloat16* x, std::int64_t x_stride, int n_rows,
                       const bfloat16* weights, std::int64_t weights_stride, std::int64_t outputs,
                       std::int64_t inputs, float* y, std::int64_t y_stride);

/// The same for one block of 64 outputs of packed weights (LinearWeights) and n_rows <= 16, of
/// which `outputs` <= 64 are stored. x has `padded_inputs` values per row, zeros in the padding.
void bf16_product_packed(const bfloat16* x, std::int64_t x_stride, int n_rows,
                         const bfloat16* block, std::int64_t padded_inputs, int outputs, float* y,
                         std::int64_t y_stride);

/// Packs one block: rows (n_rows <= 64, inputs) of stride `stride` into `block`, with zeros where
/// there is no row or input.
void bf16_pack_block(const bfloat16* rows, std::int64_t stride, int n_rows, std::int64_t inputs,
                     std::int64_t padded_inputs, bfloat16* block);

}  // namespace kvzap::detail
