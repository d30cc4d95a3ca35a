// Rows of 8, 4, 3 or 2 bits: how a page can store keys and values that have left the ring.
#pragma once

#include <kvzap/core/types.hpp>

namespace kvzap {

/// How a page stores its keys, or its values. Quantised rows are rotated and have one scale each.
enum class RowType : std::uint8_t {
  wide,  // as they arrive
  q8,    // for each dimension a level from -127 to 127, plus 128
  q4,    // for each dimension the number of one of 16 levels
  q3,    // 3 bits for each dimension, of which two also choose the level of the dimension before
  q2     // 2 bits, which do so
};

/// The types of quantised rows, the widest first.
inline constexpr RowType quantised_types[] = {RowType::q8, RowType::q4, RowType::q3, RowType::q2};

/// Returns "wide", "q8", "q4", "q3" or "q2".
std::string_view name_of(RowType type);

/// The levels of q3 or q2: trellis-coded quantisation (Marcellin and Fischer, IEEE Transactions on
/// Communications 38, 1990) whose state is a window of the bits (QTIP, Tseng et al., arXiv
/// 2406.11235).
///
/// The number of a dimension's level has the dimension's lower two bits, then those of the next
/// dimension, then the dimension's third bit. So four neighbours of each level are within reach of
/// two bits, and the squared error on normal rows is that of 0.2 (q3) or 0.15 (q2) bits more.
struct RowTrellis {
  int bits;   // of a dimension
  float rms;  // the level that belongs to the root mean square of a normal distribution
  std::uint64_t words[4];  // the levels by their numbers, in single bytes, in 127ths of the largest

  /// Returns the levels of q3 or q2.
  KOKKOS_INLINE_FUNCTION static constexpr RowTrellis of(RowType type) {
    // Lloyd's iterations over normal rows: -124, 15, 72, … and -3, -50, -86, …
    return type == RowType::q2
               ? RowTrellis{2, 59.87f, {0x0ea741e1da480f84u, 0xba1ef0567ff2c023u, 0, 0}}
               : RowTrellis{3,
                            47.21f,
                            {0xf8c8e281e8aacefdu, 0xbce89cd4d6fdb7ebu, 0x7f29490f35112255u,
                             0x0b41f8211e630c36u}};
  }
  /// Returns the numbers of levels: 16 or 32.
  KOKKOS_INLINE_FUNCTION constexpr int count() const { return 4 << bits; }
  /// Returns the level with this number.
  KOKKOS_INLINE_FUNCTION constexpr int level(int number) const {
    const std::uint64_t low = number & 8 ? words[1] : words[0];
    const std::uint64_t high = number & 8 ? words[3] : words[2];
    const std::uint64_t word = number & 16 ? high : low;
    return static_cast<std::int8_t>((word >> (8 * (number & 7))) & 0xffu);
  }
};

/// How pages store their rows. Either both types are wide or none is.
struct PageFormat {
  RowType keys = RowType::wide;
  RowType values = RowType::wide;
  /// A row's value is its key, which pages and rings store once (latent attention). The model says
  /// so, not the name of a format; operator== ignores it. Both types are then the same.
  bool values_are_keys = false;

  KOKKOS_INLINE_FUNCTION bool quantised() const { return keys != RowType::wide; }
  /// Returns the vectors that a row has: a key and a value, or one that is both.
  KOKKOS_INLINE_FUNCTION constexpr int vectors() const { return values_are_keys ? 1 : 2; }
  /// Returns the format of rows as they arrive.
  PageFormat wide() const { return {RowType::wide, RowType::wide, values_are_keys}; }
  bool operator==(const PageFormat& other) const {
    return keys == other.keys && values == other.values;
  }
  bool operator!=(const PageFormat& other) const { return !(*this == other); }
};

/// Returns the name of a type, "q8,q4" for keys and values of two types or, for wide rows, the name
/// of `dtype`.
std::string name_of(const PageFormat& format, DType dtype);
/// Returns the format with this name: q8, q4, q3 or q2 for keys and values, two of them separated
/// by a comma, or the name of `dtype`, the type of a cache with wide rows. Throws Error for any
/// other text.
PageFormat page_format_from_name(const std::string& name, DType dtype);

/// The rotation of quantised rows: fixed signs of the dimensions, a Walsh-Hadamard transform of
/// each block of `block` dimensions, and a reflection that mixes the blocks. All three are
/// orthogonal and their own inverse. Rotated rows have no outlying dimensions, so one scale for
/// each row is enough (QuaRot, Ashkboos et al., arXiv 2404.00456; TurboQuant, Zandieh et al., arXiv
/// 2504.19874). Dot products of rotated rows equal those of the rows.
struct RowTurn {
  int dim;
  int block;  // the largest power of 2 that divides dim

  KOKKOS_INLINE_FUNCTION static RowTurn of(int dim) { return {dim, dim & -dim}; }
  KOKKOS_INLINE_FUNCTION int blocks() const { return dim / block; }
  /// Returns 1 / sqrt(block).
  KOKKOS_INLINE_FUNCTION float root() const {
    float root = 1;
    int n = block;
    for (; n >= 4; n /= 4) root *= 0.5f;
    return n == 2 ? root * 0.70710678f : root;
  }
  /// Returns the sign of a dimension: 1 or -1.
  KOKKOS_INLINE_FUNCTION static float sign(int d) {
    std::uint32_t hash = static_cast<std::uint32_t>(d) * 0x9e3779b1u;
    hash = (hash ^ (hash >> 15)) * 0x85ebca6bu;
    return ((hash >> 16) & 1u) != 0 ? -1.0f : 1.0f;
  }
  /// Returns the sign of an element of the Walsh-Hadamard matrix.
  KOKKOS_INLINE_FUNCTION static float walsh(int i, int j) {
    std::uint32_t odd = static_cast<std::uint32_t>(i & j);
    for (int shift = 16; shift > 0; shift /= 2) odd ^= odd >> shift;
    return (odd & 1u) != 0 ? -1.0f : 1.0f;
  }
};

/// The keys, or the values, of a page with quantised rows.
struct QuantisedRows {
  const std::uint8_t* codes = nullptr;  // (row, code_bytes)
  const bfloat16* scales = nullptr;     // (row)
  int dim = 1;
  RowType type = RowType::q8;

  /// Dimensions whose codes of 3 or 2 bits lie together.
  static constexpr int unit_dims = 32;

  /// Returns the bytes of a row's codes.
  KOKKOS_INLINE_FUNCTION static constexpr std::int64_t code_bytes(RowType type, int dim) {
    if (type == RowType::q8) return dim;
    if (type == RowType::q4) return (std::int64_t{dim} + 1) / 2;
    return std::int64_t{dim + unit_dims - 1} / unit_dims * unit_bytes(type);
  }
  /// Returns the bytes of a unit of 32 dimensions of q3 or q2: eight with the lower two bits of its
  /// codes, of dimensions i, i + 8, i + 16 and i + 24 in byte i, those of i lowest. With q3 four
  /// bytes follow with the third bits: of dimension i in bit i % 8 of byte i / 8.
  KOKKOS_INLINE_FUNCTION static constexpr int unit_bytes(RowType type) {
    return type == RowType::q2 ? 8 : 12;
  }
  /// Returns the dimension of a unit that is coded as its `place`-th: next in the order of bits.
  KOKKOS_INLINE_FUNCTION static constexpr int dim_of_place(int place) {
    return place % 4 * 8 + place / 4;
  }
  /// Returns the level of a code of 4 bits: the levels of least squared error for a normal
  /// distribution (Max, IRE Transactions on Information Theory 6, 1960), in 127ths of the largest.
  KOKKOS_INLINE_FUNCTION static constexpr int level(int code) {
    // 6, 18, 31, 44, 58, 75, 96 and 127 in single bytes.
    constexpr std::uint64_t levels = 0x7f604b3a2c1f1206u;
    const int magnitude = code >= 8 ? code - 8 : 7 - code;
    const int found = static_cast<int>((levels >> (8 * magnitude)) & 0xffu);
    return code >= 8 ? found : -found;
  }
  /// Returns the number (RowTrellis) of the level of dimension `i` of a unit of q3 or q2.
  KOKKOS_INLINE_FUNCTION static int number_at(RowType type, const std::uint8_t* unit, int i) {
    const int byte = i % 8;
    const int bits = unit[byte] | (byte < 7 ? unit[byte + 1] << 8 : 0);
    const int number = (bits >> (i / 8 * 2)) & 15;
    return type == RowType::q2 ? number : number | ((unit[8 + i / 8] >> byte) & 1) << 4;
  }
  /// Returns the level of dimension `d` of a rotated row. With 4 bits, byte j has dimension j in
  /// its lower half and dimension j + (dim + 1) / 2 in its upper half.
  KOKKOS_INLINE_FUNCTION int level_at(std::int64_t row, int d) const {
    const std::uint8_t* const own = codes + row * code_bytes(type, dim);
    if (type == RowType::q8) return static_cast<int>(own[d]) - 128;
    if (type == RowType::q4) {
      const int half = (dim + 1) / 2;
      return level(d < half ? own[d] & 15 : own[d - half] >> 4);
    }
    const std::uint8_t* const unit = own + d / unit_dims * unit_bytes(type);
    return RowTrellis::of(type).level(number_at(type, unit, d % unit_dims));
  }
  /// Returns dimension `d` of a row. Reads the whole row.
  KOKKOS_INLINE_FUNCTION float at(std::int64_t row, int d) const {
    const RowTurn turn = RowTurn::of(dim);
    const int blocks = turn.blocks();
    const int first = d / turn.block * turn.block;
    float sum = 0;
    for (int i = 0; i < turn.block; ++i) {
      int all = 0;
      if (blocks > 1) {
        for (int b = 0; b < blocks; ++b) all += level_at(row, b * turn.block + i);
      }
      float mixed = static_cast<float>(level_at(row, first + i));
      if (blocks > 1) mixed -= 2.0f * static_cast<float>(all) / static_cast<float>(blocks);
      sum += RowTurn::walsh(i, d - first) * mixed;
    }
    return static_cast<float>(scales[row]) * RowTurn::sign(d) * turn.root() * sum;
  }
};

/// The places of keys and values in a page with quantised rows: keys, their scales, values, their
/// scales.
struct QuantisedPage {
  PageFormat format;
  int rows = 1;  // of a full page
  int dim = 1;

  KOKKOS_INLINE_FUNCTION static std::int64_t aligned(std::int64_t bytes) {
    return (bytes + 31) / 32 * 32;
  }
  KOKKOS_INLINE_FUNCTION std::int64_t codes_of(RowType type) const {
    return aligned(rows * QuantisedRows::code_bytes(type, dim));
  }
  KOKKOS_INLINE_FUNCTION std::int64_t scale_bytes() const {
    return aligned(rows * static_cast<std::int64_t>(sizeof(bfloat16)));
  }
  KOKKOS_INLINE_FUNCTION std::int64_t values_at() const {
    return format.values_are_keys ? 0 : codes_of(format.keys) + scale_bytes();
  }
  /// Returns the bytes of a page. Kernels may read 32 bytes after the last codes.
  KOKKOS_INLINE_FUNCTION std::int64_t bytes() const {
    return values_at() + codes_of(format.values) + scale_bytes();
  }
  /// Returns the keys or values of the page at `address`.
  KOKKOS_INLINE_FUNCTION QuantisedRows at(std::uintptr_t address, bool values) const {
    const RowType type = values ? format.values : format.keys;
    const std::uintptr_t begin = address + (values ? values_at() : std::int64_t{0});
    return {reinterpret_cast<const std::uint8_t*>(begin),
            reinterpret_cast<const bfloat16*>(begin + codes_of(type)), dim, type};
  }
};

}  // namespace kvzap
