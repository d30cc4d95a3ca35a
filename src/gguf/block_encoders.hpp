// Rounds values to the block formats of GGUF files: the encoders behind BlockFormat::encode.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvzap::gguf {

/// Largest magnitude that every encoder takes: that of f16, the type of scales and minima.
constexpr float largest_encodable = 65504.0f;

// Each encoder rounds n_blocks * BlockFormat::values values to `blocks`, which needs no alignment.
// The values are finite, with magnitudes up to largest_encodable. Threads may call them at once.

// Plain types take every value, NaN and infinity included.
void encode_f32(const float* values, std::int64_t n_blocks, std::byte* blocks);
void encode_f16(const float* values, std::int64_t n_blocks, std::byte* blocks);
void encode_bf16(const float* values, std::int64_t n_blocks, std::byte* blocks);

// These give the bytes of the Python package gguf. A block has one scale, from its largest
// magnitude or its range.
void encode_q4_0(const float* values, std::int64_t n_blocks, std::byte* blocks);
void encode_q4_1(const float* values, std::int64_t n_blocks, std::byte* blocks);
void encode_q5_0(const float* values, std::int64_t n_blocks, std::byte* blocks);
void encode_q5_1(const float* values, std::int64_t n_blocks, std::byte* blocks);
void encode_q8_0(const float* values, std::int64_t n_blocks, std::byte* blocks);
void encode_mxfp4(const float* values, std::int64_t n_blocks, std::byte* blocks);

// These search the scale and minimum of each group of values for the least weighted squared error.
void encode_q4_k(const float* values, std::int64_t n_blocks, std::byte* blocks);
void encode_q5_k(const float* values, std::int64_t n_blocks, std::byte* blocks);
void encode_q6_k(const float* values, std::int64_t n_blocks, std::byte* blocks);
void encode_iq4_nl(const float* values, std::int64_t n_blocks, std::byte* blocks);

}  // namespace kvzap::gguf
