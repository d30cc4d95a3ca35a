// Products of a few rows with packed weights (LinearWeights) at the speed of memory: AVX-512, for
// bf16 with its dot product, or AVX2. To be called at SimdLevel::avx2 or above alone.
#pragma once

#include <cstdint>
#include <kvzap/core/types.hpp>

namespace kvzap::detail {

/// Whether the functions below exist in this build (x86-64 and a compiler that knows the
/// instructions).
bool has_packed_kernels();

/// The most rows that packed_product takes.
inline constexpr int packed_product_rows = 16;

/// y[m * y_stride + n] = sum_k x[m * x_stride + k] * weights[n, k] for the n < `outputs` <= 64 of
/// one packed block and n_rows <= packed_product_rows rows of x, accumulated in float (with x in
/// bf16, subnormal values count as zero). x has `padded_inputs` values per row, zeros in the
/// padding; it is read fastest if rows do not lie a multiple of 4 KiB apart. With x in bf16 at
/// SimdLevel::avx512_bf16 or above alone.
void packed_product(const bfloat16* x, std::int64_t x_stride, int n_rows, const bfloat16* block,
                    std::int64_t padded_inputs, int outputs, float* y, std::int64_t y_stride);
void packed_product(const float* x, std::int64_t x_stride, int n_rows, const float* block,
                    std::int64_t padded_inputs, int outputs, float* y, std::int64_t y_stride);
void packed_product(const float* x, std::int64_t x_stride, int n_rows, const half* block,
                    std::int64_t padded_inputs, int outputs, float* y, std::int64_t y_stride);
void packed_product(const float* x, std::int64_t x_stride, int n_rows, const bfloat16* block,
                    std::int64_t padded_inputs, int outputs, float* y, std::int64_t y_stride);

/// Packs one block: rows (n_rows <= 64, inputs) of stride `stride` into `block`, with zeros where
/// there is no row or input.
void pack_block(const bfloat16* rows, std::int64_t stride, int n_rows, std::int64_t inputs,
                std::int64_t padded_inputs, bfloat16* block);
void pack_block(const float* rows, std::int64_t stride, int n_rows, std::int64_t inputs,
                std::int64_t padded_inputs, float* block);
void pack_block(const half* rows, std::int64_t stride, int n_rows, std::int64_t inputs,
                std::int64_t padded_inputs, half* block);

/// target (padded_inputs, 64) = float(block), input after input, for a packed block.
void widen_block(const bfloat16* block, std::int64_t padded_inputs, float* target);
void widen_block(const half* block, std::int64_t padded_inputs, float* target);

/// The same block in the order in which bf16 is packed, pair of inputs after pair, with zeros
/// behind up to `paired_inputs`, a multiple of 32. At SimdLevel::avx512 or above alone, as is the
/// next.
void pair_block(const half* block, std::int64_t padded_inputs, std::int64_t paired_inputs,
                half* target);

/// target[i] = half(2^s source[i]) for i < count, where 2^s brings the largest finite magnitude to
/// at least 2^14 and below 2^15: nothing finite overflows, and values down to 2^-28 of the largest
/// keep 11 bits. Returns 2^-s.
float scale_to_half(const float* source, std::int64_t count, half* target);

}  // namespace kvzap::detail
