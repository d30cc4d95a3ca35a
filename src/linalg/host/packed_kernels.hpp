// Products with packed weights (LinearWeights) at the speed of memory, by AVX-512 (bf16: by its dot
// product), AVX2 or NEON (bf16: by Armv8.6's dot product). Call them only if has_packed_kernels().
#pragma once

#include <cstdint>
#include <kvzap/core/types.hpp>

#include "linalg/host/row_span.hpp"

namespace kvzap::linalg {

/// Whether the machine's instruction set has the functions below: AVX2 or above, or NEON.
bool has_packed_kernels();

/// The most rows that packed_product takes.
inline constexpr int packed_product_rows = 64;

/// y[m * y_stride + n] = sum_k x(m, k) * weights[n, k] for the n < `outputs` <= 64 of one packed
/// block and at most packed_product_rows rows of x, accumulated in float. A row of x has
/// `padded_inputs` values, with zeros in the padding. It is read fastest if rows are not a multiple
/// of 4 KiB apart. x in bf16 needs SimdLevel::avx512_bf16, where subnormal values count as zero, or
/// neon_bf16.
void packed_product(RowSpan<const bfloat16> x, const bfloat16* block, std::int64_t padded_inputs,
                    int outputs, float* y, std::int64_t y_stride);
void packed_product(RowSpan<const float> x, const float* block, std::int64_t padded_inputs,
                    int outputs, float* y, std::int64_t y_stride);
void packed_product(RowSpan<const float> x, const half* block, std::int64_t padded_inputs,
                    int outputs, float* y, std::int64_t y_stride);
void packed_product(RowSpan<const float> x, const bfloat16* block, std::int64_t padded_inputs,
                    int outputs, float* y, std::int64_t y_stride);

/// Inputs that packed_gemm takes at once. A widened panel of these inputs and 16 outputs fills half
/// of a first-level cache of 32 KiB.
inline constexpr std::int64_t gemm_inputs = 256;
/// The most rows of x that packed_gemm takes. gemm_inputs inputs of each fit a second-level cache
/// of 256 KiB.
inline constexpr std::int64_t gemm_rows = 144;

/// y[m * y_stride + n] = sum_k x(m, k) * weights[n, k] + bias[n] (0 if bias is null) for at most
/// gemm_rows rows of x and the n < `outputs` <= 64 of one packed block. Sums are float. x is stored
/// in slices of gemm_inputs inputs, x.stride apart: x(m, k) is at x.data[k / gemm_inputs * x.stride
/// + m * gemm_inputs + k % gemm_inputs]. Zeros follow the last input up to `padded_inputs`.
void packed_gemm(RowSpan<const float> x, const bfloat16* block, std::int64_t padded_inputs,
                 int outputs, const float* bias, float* y, std::int64_t y_stride);
void packed_gemm(RowSpan<const float> x, const float* block, std::int64_t padded_inputs,
                 int outputs, const float* bias, float* y, std::int64_t y_stride);
void packed_gemm(RowSpan<const float> x, const half* block, std::int64_t padded_inputs, int outputs,
                 const float* bias, float* y, std::int64_t y_stride);

/// Packs one block: rows (n_rows <= 64, inputs) of stride `stride` into `block`, with zeros for
/// missing rows and inputs.
void pack_block(const bfloat16* rows, std::int64_t stride, int n_rows, std::int64_t inputs,
                std::int64_t padded_inputs, bfloat16* block);
void pack_block(const float* rows, std::int64_t stride, int n_rows, std::int64_t inputs,
                std::int64_t padded_inputs, float* block);
void pack_block(const half* rows, std::int64_t stride, int n_rows, std::int64_t inputs,
                std::int64_t padded_inputs, half* block);

/// target (padded_inputs, 64) = float(block), input after input, for a packed block.
void widen_block(const bfloat16* block, std::int64_t padded_inputs, float* target);
void widen_block(const half* block, std::int64_t padded_inputs, float* target);

/// Rearranges the block to the packed order of bf16, pair of inputs after pair, with zeros up to
/// `paired_inputs`, a multiple of 32. This function and the next need SimdLevel::avx512 or above.
void pair_block(const half* block, std::int64_t padded_inputs, std::int64_t paired_inputs,
                half* target);

/// target[i] = half(2^s source[i]) for i < count. 2^s scales the largest finite magnitude to [2^14,
/// 2^15): no finite value overflows, and values down to 2^-28 of the largest keep 11 bits. Returns
/// 2^-s.
float scale_to_half(const float* source, std::int64_t count, half* target);

}  // namespace kvzap::linalg
