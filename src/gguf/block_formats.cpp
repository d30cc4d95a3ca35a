#include "gguf/block_formats.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <kvzap/core/types.hpp>

#include "base/simd.hpp"
#include "gguf/block_encoders.hpp"

// The arithmetic is that of the Python package gguf in single precision. Products of a scale and an
// integer are exact (at most 24 bits), so a fused multiplication and addition gives the same bits.

// Within a block, offsets fit an int.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

namespace kvzap::gguf {
namespace {

using Bytes = const std::uint8_t*;

constexpr int small_block = 32;
constexpr int large_block = 256;

KVZAP_BODY float half_at(Bytes source) {
  half value = {};
  std::memcpy(&value, source, sizeof(value));
  return static_cast<float>(value);
}

/// target[i] = scale * values[low nibble of source[i]]; the high nibbles follow the low ones.
KVZAP_BODY void look_up_nibbles(Bytes source, const float* values, float scale, float* target) {
  for (int i = 0; i < small_block / 2; ++i) {
    target[i] = scale * values[source[i] & 15];
    target[i + small_block / 2] = scale * values[source[i] >> 4];
  }
}

template <class Value>
struct Plain {
  static constexpr int values = 1;
  static constexpr int bytes = sizeof(Value);
  KVZAP_BODY void decode(Bytes block, float* target) {
    Value value = {};
    std::memcpy(&value, block, sizeof(Value));
    *target = static_cast<float>(value);
  }
};

struct Q4_0 {
  static constexpr int values = small_block;
  static constexpr int bytes = 18;  // f16 scale, 32 nibbles
  KVZAP_BODY void decode(Bytes block, float* target) {
    const float scale = half_at(block);
    const Bytes q = block + 2;
    for (int i = 0; i < 16; ++i) target[i] = scale * static_cast<float>((q[i] & 15) - 8);
    for (int i = 0; i < 16; ++i) target[i + 16] = scale * static_cast<float>((q[i] >> 4) - 8);
  }
};

struct Q4_1 {
  static constexpr int values = small_block;
  static constexpr int bytes = 20;  // f16 scale, f16 minimum, 32 nibbles
  KVZAP_BODY void decode(Bytes block, float* target) {
    const float scale = half_at(block);
    const float minimum = half_at(block + 2);
    const Bytes q = block + 4;
    for (int i = 0; i < 16; ++i) target[i] = scale * static_cast<float>(q[i] & 15) + minimum;
    for (int i = 0; i < 16; ++i) target[i + 16] = scale * static_cast<float>(q[i] >> 4) + minimum;
  }
};

/// target[i] = the 5-bit integer i: 32 high bits, then 32 nibbles.
KVZAP_BODY void five_bits(Bytes source, int* target) {
  std::uint32_t high = 0;
  std::memcpy(&high, source, sizeof(high));
  const Bytes q = source + 4;
  for (int i = 0; i < 16; ++i) {
    target[i] = (q[i] & 15) | static_cast<int>((high >> i & 1u) << 4);
  }
  for (int i = 0; i < 16; ++i) {
    target[i + 16] = (q[i] >> 4) | static_cast<int>((high >> (i + 16) & 1u) << 4);
  }
}

struct Q5_0 {
  static constexpr int values = small_block;
  static constexpr int bytes = 22;  // f16 scale, 32 high bits, 32 nibbles
  KVZAP_BODY void decode(Bytes block, float* target) {
    const float scale = half_at(block);
    int q[small_block];
    five_bits(block + 2, q);
    for (int i = 0; i < small_block; ++i) target[i] = scale * static_cast<float>(q[i] - 16);
  }
};

struct Q5_1 {
  static constexpr int values = small_block;
  static constexpr int bytes = 24;  // f16 scale, f16 minimum, 32 high bits, 32 nibbles
  KVZAP_BODY void decode(Bytes block, float* target) {
    const float scale = half_at(block);
    const float minimum = half_at(block + 2);
    int q[small_block];
    five_bits(block + 4, q);
    for (int i = 0; i < small_block; ++i) target[i] = scale * static_cast<float>(q[i]) + minimum;
  }
};

struct Q8_0 {
  static constexpr int values = small_block;
  static constexpr int bytes = 34;  // f16 scale, 32 signed bytes
  KVZAP_BODY void decode(Bytes block, float* target) {
    const float scale = half_at(block);
    const Bytes q = block + 2;
    for (int i = 0; i < small_block; ++i) {
      target[i] = scale * static_cast<float>(static_cast<std::int8_t>(q[i]));
    }
  }
};

// The formats "K" hold 256 values: groups of 16 or 32 have scales of 4 to 8 bits, which one or two
// f16 scales multiply.

struct Q2_K {
  static constexpr int values = large_block;
  static constexpr int bytes = 84;  // 16 scales and minima of 4 bits each, 256 x 2 bits, 2 f16
  KVZAP_BODY void decode(Bytes block, float* target) {
    const float scale = half_at(block + 80);
    const float minimum = half_at(block + 82);
    for (int group = 0; group < 16; ++group) {
      const float d = scale * static_cast<float>(block[group] & 15);
      const float m = minimum * static_cast<float>(block[group] >> 4);
      const Bytes q = block + 16 + group / 8 * 32 + group % 2 * 16;
      const int shift = group % 8 / 2 * 2;
      for (int i = 0; i < 16; ++i) {
        target[group * 16 + i] = d * static_cast<float>(q[i] >> shift & 3) - m;
      }
    }
  }
};

struct Q3_K {
  static constexpr int values = large_block;
  static constexpr int bytes = 110;  // 256 high bits, 256 x 2 bits, 16 scales of 6 bits, f16
  KVZAP_BODY void decode(Bytes block, float* target) {
    const Bytes scales = block + 96;
    const float scale = half_at(block + 108);
    for (int group = 0; group < 16; ++group) {
      const int low = scales[group % 8] >> (group / 8 * 4) & 15;
      const int high = scales[8 + group % 4] >> (group / 4 * 2) & 3;
      const float d = scale * static_cast<float>((low | high << 4) - 32);
      const Bytes q = block + 32 + group / 8 * 32 + group % 2 * 16;
      const Bytes mask = block + group % 2 * 16;
      const int shift = group % 8 / 2 * 2;
      const int bit = group / 2;
      for (int i = 0; i < 16; ++i) {
        const int value = (q[i] >> shift & 3) + (mask[i] >> bit & 1) * 4 - 4;
        target[group * 16 + i] = d * static_cast<float>(value);
      }
    }
  }
};

/// Scale and minimum of one of eight groups, 6 bits each, packed in 12 bytes.
struct GroupScale {
  int scale;
  int minimum;
};

KVZAP_BODY GroupScale group_scale(Bytes packed, int group) {
  if (group < 4) return {packed[group] & 63, packed[group + 4] & 63};
  return {(packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4,
          (packed[group + 4] >> 4) | (packed[group] >> 6) << 4};
}

struct Q4_K {
  static constexpr int values = large_block;
  static constexpr int bytes = 144;  // f16 scale, f16 minimum, 12 bytes of group scales, nibbles
  KVZAP_BODY void decode(Bytes block, float* target) {
    const float scale = half_at(block);
    const float minimum = half_at(block + 2);
    for (int group = 0; group < 8; ++group) {
      const GroupScale own = group_scale(block + 4, group);
      const float d = scale * static_cast<float>(own.scale);
      const float m = minimum * static_cast<float>(own.minimum);
      const Bytes q = block + 16 + group / 2 * 32;
      const int shift = group % 2 * 4;
      for (int i = 0; i < 32; ++i) {
        target[group * 32 + i] = d * static_cast<float>(q[i] >> shift & 15) - m;
      }
    }
  }
};

struct Q5_K {
  static constexpr int values = large_block;
  static constexpr int bytes = 176;  // as Q4_K, with 256 high bits before the nibbles
  KVZAP_BODY void decode(Bytes block, float* target) {
    const float scale = half_at(block);
    const float minimum = half_at(block + 2);
    const Bytes high = block + 16;
    for (int group = 0; group < 8; ++group) {
      const GroupScale own = group_scale(block + 4, group);
      const float d = scale * static_cast<float>(own.scale);
      const float m = minimum * static_cast<float>(own.minimum);
      const Bytes q = block + 48 + group / 2 * 32;
      const int shift = group % 2 * 4;
      for (int i = 0; i < 32; ++i) {
        const int value = (q[i] >> shift & 15) | (high[i] >> group & 1) << 4;
        target[group * 32 + i] = d * static_cast<float>(value) - m;
      }
    }
  }
};

struct Q6_K {
  static constexpr int values = large_block;
  static constexpr int bytes = 210;  // 256 nibbles, 256 x 2 high bits, 16 signed scales, f16
  KVZAP_BODY void decode(Bytes block, float* target) {
    const float scale = half_at(block + 208);
    for (int group = 0; group < 16; ++group) {
      const float d = scale * static_cast<float>(static_cast<std::int8_t>(block[192 + group]));
      const int quarter = group / 2 % 4;  // 32 of the 128 values that share bytes
      const Bytes q = block + group / 8 * 64 + quarter % 2 * 32 + group % 2 * 16;
      const Bytes high = block + 128 + group / 8 * 32 + group % 2 * 16;
      const int shift = quarter / 2 * 4;
      for (int i = 0; i < 16; ++i) {
        const int value = (q[i] >> shift & 15) | (high[i] >> (quarter * 2) & 3) << 4;
        target[group * 16 + i] = d * static_cast<float>(value - 32);
      }
    }
  }
};

struct IQ4_NL {
  static constexpr int values = small_block;
  static constexpr int bytes = 18;  // f16 scale, 32 nibbles: indices of a table
  KVZAP_BODY void decode(Bytes block, float* target) {
    static constexpr float table[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                        1,    13,   25,  38,  53,  69,  89,  113};
    look_up_nibbles(block + 2, table, half_at(block), target);
  }
};

struct MXFP4 {
  static constexpr int values = small_block;
  static constexpr int bytes = 17;  // exponent, 32 nibbles: floats of 1 + 2 + 1 bits
  KVZAP_BODY void decode(Bytes block, float* target) {
    // Twice the values, times half the scale, as gguf computes. Its scale of 2^-128 is subnormal.
    static constexpr float table[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const std::uint32_t exponent = block[0];
    const std::uint32_t bits = exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23;
    look_up_nibbles(block + 1, table, base::bits_float(bits), target);
  }
};

template <class Format>
KVZAP_BODY void decode_blocks(const std::byte* blocks, std::int64_t n_blocks, float* target) {
  auto block = reinterpret_cast<Bytes>(blocks);
  for (std::int64_t i = 0; i < n_blocks; ++i) {
    Format::decode(block, target);
    block += Format::bytes;
    target += Format::values;
  }
}

#define KVZAP_BLOCK_FORMAT(Format, name)                                                         \
  KVZAP_BODY void decode_##name##_body(const std::byte* blocks, std::int64_t n, float* target) { \
    decode_blocks<Format>(blocks, n, target);                                                    \
  }                                                                                              \
  KVZAP_KERNEL(void, decode_##name, (const std::byte* blocks, std::int64_t n, float* target),    \
               (blocks, n, target))                                                              \
  constexpr BlockFormat name##_format(std::uint32_t type, std::string_view text,                 \
                                      decltype(BlockFormat::encode) encode = nullptr) {          \
    return {type, text, Format::values, Format::bytes, decode_##name, encode};                   \
  }

KVZAP_BLOCK_FORMAT(Plain<float>, f32)
KVZAP_BLOCK_FORMAT(Plain<half>, f16)
KVZAP_BLOCK_FORMAT(Plain<bfloat16>, bf16)
KVZAP_BLOCK_FORMAT(Q4_0, q4_0)
KVZAP_BLOCK_FORMAT(Q4_1, q4_1)
KVZAP_BLOCK_FORMAT(Q5_0, q5_0)
KVZAP_BLOCK_FORMAT(Q5_1, q5_1)
KVZAP_BLOCK_FORMAT(Q8_0, q8_0)
KVZAP_BLOCK_FORMAT(Q2_K, q2_k)
KVZAP_BLOCK_FORMAT(Q3_K, q3_k)
KVZAP_BLOCK_FORMAT(Q4_K, q4_k)
KVZAP_BLOCK_FORMAT(Q5_K, q5_k)
KVZAP_BLOCK_FORMAT(Q6_K, q6_k)
KVZAP_BLOCK_FORMAT(IQ4_NL, iq4_nl)
KVZAP_BLOCK_FORMAT(MXFP4, mxfp4)
#undef KVZAP_BLOCK_FORMAT

template <class Matches>
const BlockFormat* find_format(const Matches& matches) {
  const auto& formats = block_formats();
  const auto found = std::find_if(formats.begin(), formats.end(), matches);
  return found == formats.end() ? nullptr : &*found;
}

}  // namespace

const std::vector<BlockFormat>& block_formats() {
  static const std::vector<BlockFormat> formats = {f32_format(0, "F32", encode_f32),
                                                   f16_format(1, "F16", encode_f16),
                                                   q4_0_format(2, "Q4_0", encode_q4_0),
                                                   q4_1_format(3, "Q4_1", encode_q4_1),
                                                   q5_0_format(6, "Q5_0", encode_q5_0),
                                                   q5_1_format(7, "Q5_1", encode_q5_1),
                                                   q8_0_format(8, "Q8_0", encode_q8_0),
                                                   q2_k_format(10, "Q2_K"),
                                                   q3_k_format(11, "Q3_K"),
                                                   q4_k_format(12, "Q4_K", encode_q4_k),
                                                   q5_k_format(13, "Q5_K", encode_q5_k),
                                                   q6_k_format(14, "Q6_K", encode_q6_k),
                                                   iq4_nl_format(20, "IQ4_NL", encode_iq4_nl),
                                                   bf16_format(30, "BF16", encode_bf16),
                                                   mxfp4_format(39, "MXFP4", encode_mxfp4)};
  return formats;
}

const BlockFormat* find_block_format(std::uint32_t type) {
  return find_format([&](const BlockFormat& format) { return format.type == type; });
}

const BlockFormat* find_block_format(std::string_view name) {
  return find_format([&](const BlockFormat& format) { return format.name == name; });
}

void decode_range(const BlockFormat& format, const std::byte* blocks, std::int64_t first,
                  std::int64_t end, float* target) {
  std::array<float, large_block> buffer = {};
  while (first < end) {
    const std::int64_t within = first % format.values;
    const std::byte* const block = blocks + first / format.values * format.bytes;
    const std::int64_t whole = (end - first) / format.values;
    std::int64_t count = whole * format.values;
    if (within == 0 && whole > 0) {
      format.decode(block, whole, target);
    } else {
      format.decode(block, 1, buffer.data());
      count = std::min(end - first, format.values - within);
      std::copy_n(buffer.data() + within, count, target);
    }
    first += count;
    target += count;
  }
}

}  // namespace kvzap::gguf

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
