// The formats with one scale for each block of 32 values.
#include "gguf/block_encoders.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <kvzap/core/types.hpp>

#include "base/simd.hpp"

namespace kvzap::gguf {
namespace {

constexpr int encoded_values = 32;  // of a block
using BlockTarget = std::uint8_t*;

KVZAP_BODY void put_half(float value, BlockTarget target) {
  const half rounded(value);
  std::memcpy(target, &rounded, sizeof(rounded));
}

/// Returns 1 / scale; 0 if that is infinite, which needs a scale that f16 rounds to zero.
KVZAP_BODY float inverse_scale(float scale) {
  constexpr float least = 3e-39f;
  return scale > -least && scale < least ? 0.0f : 1.0f / scale;
}

/// Without this barrier, compilers may fuse the multiplication that made the products with a later
/// addition. The result of a fused operation rounds to other integers than the reference.
KVZAP_BODY void keep_rounded(const float* products) {
  asm volatile("" : : "r"(products) : "memory");
}

/// Returns the value of the largest magnitude, the first of equal ones.
KVZAP_BODY float peak_of(const float* values) {
  std::int32_t magnitudes[encoded_values];
  std::int32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (int i = 0; i < encoded_values; ++i) {
    magnitudes[i] = static_cast<std::int32_t>(base::float_bits(values[i]) & 0x7fffffffu);
    largest = std::max(largest, magnitudes[i]);
  }
  int place = encoded_values - 1;
#pragma omp simd reduction(min : place)
  for (int i = 0; i < encoded_values; ++i) {
    place = std::min(place, magnitudes[i] == largest ? i : encoded_values - 1);
  }
  return values[place];
}

struct ValueRange {
  float least;
  float most;
};

KVZAP_BODY ValueRange range_of(const float* values) {
  // Integers with the order of the floats: maxima of integers vectorize.
  std::int32_t least = 0x7fffffff, most = -0x7fffffff;
#pragma omp simd reduction(min : least) reduction(max : most)
  for (int i = 0; i < encoded_values; ++i) {
    const auto bits = static_cast<std::int32_t>(base::float_bits(values[i]));
    const std::int32_t ordered = bits ^ ((bits >> 31) & 0x7fffffff);
    least = std::min(least, ordered);
    most = std::max(most, ordered);
  }
  const auto value_of = [](std::int32_t ordered) {
    return base::bits_float(static_cast<std::uint32_t>(ordered ^ ((ordered >> 31) & 0x7fffffff)));
  };
  return {value_of(least), value_of(most)};
}

/// integers[i] = products[i] + offset, truncated and at most `most`.
KVZAP_BODY void round_products(const float* products, float offset, int most,
                               std::uint8_t* integers) {
  keep_rounded(products);
#pragma omp simd
  for (int i = 0; i < encoded_values; ++i) {
    integers[i] = static_cast<std::uint8_t>(std::min(static_cast<int>(products[i] + offset), most));
  }
}

/// Writes the low four bits of integers i and i + 16 to byte i.
KVZAP_BODY void put_nibbles(const std::uint8_t* integers, BlockTarget target) {
#pragma omp simd
  for (int i = 0; i < encoded_values / 2; ++i) {
    target[i] = static_cast<std::uint8_t>((integers[i] & 15) | integers[i + 16] << 4);
  }
}

/// Writes the fifth bits of all integers to four bytes.
KVZAP_BODY void put_fifth_bits(const std::uint8_t* integers, BlockTarget target) {
  std::uint32_t bits = 0;
#pragma omp simd reduction(| : bits)
  for (int i = 0; i < encoded_values; ++i) {
    bits |= static_cast<std::uint32_t>(integers[i] >> 4) << i;
  }
  std::memcpy(target, &bits, sizeof(bits));
}

/// Q4_0 (levels = 16) and Q5_0 (32): scale * (q - levels / 2). The value of the largest magnitude
/// gets the most negative integer.
template <int levels>
KVZAP_BODY void encode_symmetric(const float* values, BlockTarget target) {
  constexpr int middle = levels / 2;
  const float scale = peak_of(values) / static_cast<float>(-middle);
  const float inverse = inverse_scale(scale);
  float products[encoded_values];
#pragma omp simd
  for (int i = 0; i < encoded_values; ++i) products[i] = values[i] * inverse;
  std::uint8_t integers[encoded_values];
  round_products(products, static_cast<float>(middle) + 0.5f, levels - 1, integers);
  put_half(scale, target);
  target += 2;
  if (levels == 32) {
    put_fifth_bits(integers, target);
    target += 4;
  }
  put_nibbles(integers, target);
}

/// Q4_1 (levels = 16) and Q5_1 (32): scale * q + minimum.
template <int levels>
KVZAP_BODY void encode_range(const float* values, BlockTarget target) {
  const ValueRange range = range_of(values);
  const float scale = (range.most - range.least) / static_cast<float>(levels - 1);
  const float inverse = inverse_scale(scale);
  float products[encoded_values];
#pragma omp simd
  for (int i = 0; i < encoded_values; ++i) products[i] = (values[i] - range.least) * inverse;
  std::uint8_t integers[encoded_values];
  round_products(products, 0.5f, levels - 1, integers);
  put_half(scale, target);
  put_half(range.least, target + 2);
  target += 4;
  if (levels == 32) {
    put_fifth_bits(integers, target);
    target += 4;
  }
  put_nibbles(integers, target);
}

/// Q8_0: scale * q, rounded half away from zero.
KVZAP_BODY void encode_bytes(const float* values, BlockTarget target) {
  const float peak = peak_of(values);
  const float scale = (peak < 0 ? -peak : peak) / 127.0f;
  const float inverse = inverse_scale(scale);
  float products[encoded_values];
#pragma omp simd
  for (int i = 0; i < encoded_values; ++i) products[i] = values[i] * inverse;
  keep_rounded(products);
  put_half(scale, target);
  target += 2;
#pragma omp simd
  for (int i = 0; i < encoded_values; ++i) {
    const int whole = static_cast<int>(products[i]);
    const float rest = products[i] - static_cast<float>(whole);
    const int up = rest >= 0.5f ? 1 : 0;
    const int down = rest <= -0.5f ? 1 : 0;
    target[i] = static_cast<std::uint8_t>(whole + up - down);
  }
}

/// MXFP4: a power of two times the nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6, with a sign; the
/// smaller of equally near ones. The largest magnitude lies from 4 to 8 of that power (OCP
/// Microscaling Formats 1.0, 6.3), so that it may be cut to 6.
KVZAP_BODY void encode_floats_of_4_bits(const float* values, BlockTarget target) {
  const float peak = peak_of(values);
  const float magnitude = peak < 0 ? -peak : peak;
  constexpr int bias = 127, largest_exponent = 2;
  int exponent = 0;
  if (magnitude > 0) {
    exponent =
        std::max(static_cast<int>(std::floor(std::log2(magnitude))) - largest_exponent + bias, 0);
  }
  const float scale =
      base::bits_float(exponent == 0 ? 0x00400000u : static_cast<std::uint32_t>(exponent) << 23);
  // (GCC 14 loses a list of initializers within the loop.)
  constexpr float borders[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
  std::uint8_t codes[encoded_values];
#pragma omp simd
  for (int i = 0; i < encoded_values; ++i) {
    const float size = values[i] < 0 ? -values[i] : values[i];
    int code = 0;
    for (const float border : borders) code += size > border * scale ? 1 : 0;
    codes[i] = static_cast<std::uint8_t>(code > 0 && values[i] < 0 ? code + 8 : code);
  }
  *target = static_cast<std::uint8_t>(exponent);
  put_nibbles(codes, target + 1);
}

template <class Value>
void encode_plain(const float* values, std::int64_t n_values, std::byte* target) {
  for (std::int64_t i = 0; i < n_values; ++i) {
    const Value value(values[i]);
    std::memcpy(target, &value, sizeof(value));
    target += sizeof(value);
  }
}

#define KVZAP_BLOCK_ENCODER(name, one, size)                                                   \
  KVZAP_BODY void name##_body(const float* values, std::int64_t n_blocks, std::byte* blocks) { \
    auto target = reinterpret_cast<BlockTarget>(blocks);                                       \
    for (std::int64_t i = 0; i < n_blocks; ++i) {                                              \
      one(values, target);                                                                     \
      values += encoded_values;                                                                \
      target += (size);                                                                        \
    }                                                                                          \
  }

KVZAP_BLOCK_ENCODER(encode_q4_0, encode_symmetric<16>, 18)
KVZAP_BLOCK_ENCODER(encode_q5_0, encode_symmetric<32>, 22)
KVZAP_BLOCK_ENCODER(encode_q4_1, encode_range<16>, 20)
KVZAP_BLOCK_ENCODER(encode_q5_1, encode_range<32>, 24)
KVZAP_BLOCK_ENCODER(encode_q8_0, encode_bytes, 34)
KVZAP_BLOCK_ENCODER(encode_mxfp4, encode_floats_of_4_bits, 17)
#undef KVZAP_BLOCK_ENCODER

}  // namespace

void encode_f32(const float* values, std::int64_t n_blocks, std::byte* blocks) {
  std::memcpy(blocks, values, static_cast<std::size_t>(n_blocks) * sizeof(float));
}

void encode_f16(const float* values, std::int64_t n_blocks, std::byte* blocks) {
  encode_plain<half>(values, n_blocks, blocks);
}

void encode_bf16(const float* values, std::int64_t n_blocks, std::byte* blocks) {
  encode_plain<bfloat16>(values, n_blocks, blocks);
}

#define KVZAP_ENCODER_KERNEL(name)                                                          \
  KVZAP_KERNEL(void, name, (const float* values, std::int64_t n_blocks, std::byte* blocks), \
               (values, n_blocks, blocks))

KVZAP_ENCODER_KERNEL(encode_q4_0)
KVZAP_ENCODER_KERNEL(encode_q4_1)
KVZAP_ENCODER_KERNEL(encode_q5_0)
KVZAP_ENCODER_KERNEL(encode_q5_1)
KVZAP_ENCODER_KERNEL(encode_q8_0)
KVZAP_ENCODER_KERNEL(encode_mxfp4)
#undef KVZAP_ENCODER_KERNEL

}  // namespace kvzap::gguf
