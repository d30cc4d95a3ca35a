#include "linalg/quantised/format.hpp"

#include <cstring>

// Within a block, offsets fit an int.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

namespace kvzap::linalg::quantised {
namespace {

using Bytes = const std::uint8_t*;

constexpr std::int8_t table_of_iq4_nl[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                             1,    13,   25,  38,  53,  69,  89,  113};
constexpr std::int8_t table_of_mxfp4[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                            0, -1, -2, -3, -4, -6, -8, -12};

std::uint16_t word_at(Bytes source) {
  std::uint16_t word = 0;
  std::memcpy(&word, source, sizeof(word));
  return word;
}

/// 16 low nibbles, then 16 high ones.
void split_nibbles(Bytes source, std::uint8_t* codes) {
  for (int i = 0; i < 16; ++i) codes[i] = source[i] & 15;
  for (int i = 0; i < 16; ++i) codes[i + 16] = source[i] >> 4;
}

void split_five_bits(Bytes source, std::uint8_t* codes) {
  std::uint32_t high = 0;
  std::memcpy(&high, source, sizeof(high));
  split_nibbles(source + 4, codes);
  for (int i = 0; i < 32; ++i) codes[i] |= static_cast<std::uint8_t>((high >> i & 1u) << 4);
}

/// A scale and nibbles: Q4_0, IQ4_NL.
void split_scaled(Bytes block, SplitBlock& parts) {
  parts.scale = word_at(block);
  split_nibbles(block + 2, parts.codes.data());
}

void split_q4_1(Bytes block, SplitBlock& parts) {
  parts.scale = word_at(block);
  parts.minimum = word_at(block + 2);
  split_nibbles(block + 4, parts.codes.data());
}

void split_q5_0(Bytes block, SplitBlock& parts) {
  parts.scale = word_at(block);
  split_five_bits(block + 2, parts.codes.data());
}

void split_q5_1(Bytes block, SplitBlock& parts) {
  parts.scale = word_at(block);
  parts.minimum = word_at(block + 2);
  split_five_bits(block + 4, parts.codes.data());
}

void split_q8_0(Bytes block, SplitBlock& parts) {
  parts.scale = word_at(block);
  std::memcpy(parts.codes.data(), block + 2, 32);
}

void split_mxfp4(Bytes block, SplitBlock& parts) {
  parts.scale = block[0];
  split_nibbles(block + 1, parts.codes.data());
}

void split_int4(Bytes block, SplitBlock& parts) {
  parts.scale = word_at(block);
  parts.minimum = block[2];
  split_nibbles(block + 3, parts.codes.data());
}

void split_f8(Bytes block, SplitBlock& parts) {
  parts.scale = word_at(block);
  parts.minimum = word_at(block + 2);
  std::memcpy(parts.codes.data(), block + 4, 128);
}

/// Scales and minima of 6 bits, packed in 12 bytes: Q4_K, Q5_K.
void split_group_scales(Bytes packed, SplitBlock& parts) {
  for (int i = 0; i < 4; ++i) {
    parts.group_scales[i] = packed[i] & 63;
    parts.group_minima[i] = packed[i + 4] & 63;
    parts.group_scales[i + 4] =
        static_cast<std::uint8_t>((packed[i + 8] & 15) | (packed[i] >> 6) << 4);
    parts.group_minima[i + 4] =
        static_cast<std::uint8_t>((packed[i + 8] >> 4) | (packed[i + 4] >> 6) << 4);
  }
}

void split_k_nibbles(Bytes source, std::uint8_t* codes) {
  for (int pair = 0; pair < 4; ++pair) {
    for (int i = 0; i < 32; ++i) codes[pair * 64 + i] = source[pair * 32 + i] & 15;
    for (int i = 0; i < 32; ++i) codes[pair * 64 + 32 + i] = source[pair * 32 + i] >> 4;
  }
}

void split_q4_k(Bytes block, SplitBlock& parts) {
  parts.scale = word_at(block);
  parts.minimum = word_at(block + 2);
  split_group_scales(block + 4, parts);
  split_k_nibbles(block + 16, parts.codes.data());
}

void split_q5_k(Bytes block, SplitBlock& parts) {
  parts.scale = word_at(block);
  parts.minimum = word_at(block + 2);
  split_group_scales(block + 4, parts);
  split_k_nibbles(block + 48, parts.codes.data());
  for (int group = 0; group < 8; ++group) {
    for (int i = 0; i < 32; ++i) {
      parts.codes[group * 32 + i] |= static_cast<std::uint8_t>((block[16 + i] >> group & 1) << 4);
    }
  }
}

void split_q6_k(Bytes block, SplitBlock& parts) {
  parts.scale = word_at(block + 208);
  std::memcpy(parts.group_scales.data(), block + 192, 16);
  for (int part = 0; part < 2; ++part) {
    const Bytes low = block + part * 64;
    const Bytes high = block + 128 + part * 32;
    std::uint8_t* const codes = parts.codes.data() + part * 128;
    for (int quarter = 0; quarter < 4; ++quarter) {
      const int shift = quarter / 2 * 4;
      for (int i = 0; i < 32; ++i) {
        codes[quarter * 32 + i] = static_cast<std::uint8_t>(
            (low[quarter % 2 * 32 + i] >> shift & 15) | (high[i] >> (quarter * 2) & 3) << 4);
      }
    }
  }
}

constexpr Format formats[] = {
    {"Q4_0", CodeKind::centred_nibbles, ScaleKind::half, 32, 18, nullptr, split_scaled},
    {"Q4_1", CodeKind::nibbles, ScaleKind::half_minimum, 32, 20, nullptr, split_q4_1},
    {"Q5_0", CodeKind::centred_five_bits, ScaleKind::half, 32, 22, nullptr, split_q5_0},
    {"Q5_1", CodeKind::five_bits, ScaleKind::half_minimum, 32, 24, nullptr, split_q5_1},
    {"Q8_0", CodeKind::bytes, ScaleKind::half, 32, 34, nullptr, split_q8_0},
    {"Q4_K", CodeKind::nibbles, ScaleKind::group_minimum, 256, 144, nullptr, split_q4_k},
    {"Q5_K", CodeKind::five_bits, ScaleKind::group_minimum, 256, 176, nullptr, split_q5_k},
    {"Q6_K", CodeKind::six_bits, ScaleKind::group_of_16, 256, 210, nullptr, split_q6_k},
    {"IQ4_NL", CodeKind::table, ScaleKind::half, 32, 18, table_of_iq4_nl, split_scaled},
    {"MXFP4", CodeKind::table, ScaleKind::exponent, 32, 17, table_of_mxfp4, split_mxfp4},
    {"INT4", CodeKind::nibbles, ScaleKind::half_zero, 32, 19, nullptr, split_int4},
    {"F8_E4M3", CodeKind::float8, ScaleKind::single, 128, 132, nullptr, split_f8}};

}  // namespace

const Format* find_format(std::string_view name) {
  for (const Format& format : formats) {
    if (format.name == name) return &format;
  }
  return nullptr;
}

}  // namespace kvzap::linalg::quantised

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
