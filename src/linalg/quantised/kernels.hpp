// Products of a few rows of bytes with panels, and panels as values. Hosts only.
//
// The rows of x are rounded to bytes, in groups of 32 with a scale each. A group of a panel adds
//   scale_x * (scale * sum(byte * code) + shift * sum(byte)),   shift = minimum - scale * offset,
// where the sums are exact integers. Panels of floats are multiplied with x as it is.
#pragma once

#include <cstdint>
#include <kvzap/core/types.hpp>

#include "base/byte_products.hpp"
#include "linalg/host/row_span.hpp"
#include "linalg/quantised/matrix.hpp"

namespace kvzap::linalg::quantised {

/// Rows of x in bytes. Extents of a row: `inputs` bytes, and inputs / 32 groups. For panels of
/// floats: `floats` instead, inputs of a row.
struct ByteRows {
  std::int8_t* values = nullptr;
  float* scales = nullptr;         // a group's value of one
  float* sums = nullptr;           // scale * sum(byte), two of each group: of 16 inputs each
  float* totals = nullptr;         // sum of both
  std::int32_t* starts = nullptr;  // -128 * sum(byte) of a group
  std::int64_t inputs = 0;
  float* floats = nullptr;

  std::int64_t groups() const { return inputs / group_inputs; }
  ByteRows row(std::int64_t m) const {
    ByteRows row;
    row.inputs = inputs;
    if (floats != nullptr) {
      row.floats = floats + m * inputs;
      return row;
    }
    row.values = values + m * inputs;
    row.scales = scales + m * groups();
    row.sums = sums + 2 * m * groups();
    row.totals = totals + m * groups();
    row.starts = starts + m * groups();
    return row;
  }
  /// Bytes of one row in a buffer.
  static std::int64_t row_bytes(std::int64_t inputs, bool by_floats) {
    constexpr std::int64_t word = sizeof(float);
    return by_floats ? inputs * word : inputs + inputs / group_inputs * 5 * word;
  }
  /// Rows in a buffer that begins at a multiple of 4.
  static ByteRows at(std::uint8_t* buffer, std::int64_t rows, std::int64_t inputs, bool by_floats) {
    ByteRows all;
    all.inputs = inputs;
    if (by_floats) {
      all.floats = reinterpret_cast<float*>(buffer);
      return all;
    }
    all.values = reinterpret_cast<std::int8_t*>(buffer);
    all.scales = reinterpret_cast<float*>(buffer + rows * inputs);
    all.sums = all.scales + rows * all.groups();
    all.totals = all.sums + 2 * rows * all.groups();
    all.starts = reinterpret_cast<std::int32_t*>(all.totals + rows * all.groups());
    return all;
  }
};

/// Rounds x (inputs) to the bytes of one row: byte = round(x / scale), scale = max |x| / 127. A
/// group with a value that is not finite gets the scale NaN.
void round_to_bytes(const float* x, const ByteRows& row);

/// Scale and shift of consecutive groups: of each group, and of each half if a scale has 16 inputs,
/// 16 scales and then, unless codes are signed, 16 shifts.
constexpr bool is_signed(CodeKind kind) {
  return kind == CodeKind::bytes || kind == CodeKind::table || is_float(kind);
}
constexpr std::int64_t coefficients_of_group(CodeKind kind) {
  return panel_outputs * (is_signed(kind) ? 1 : (kind == CodeKind::six_bits ? 4 : 2));
}
/// Groups whose coefficients are computed at once: at most 16 KiB.
inline constexpr std::int64_t chunk_groups = 64;
/// Computes the coefficients of groups first … first + count - 1 of a panel; first is a multiple of
/// 8.
void widen_scales(const Panels& panels, std::int64_t panel, std::int64_t first, std::int64_t count,
                  float* coefficients);

/// Groups of one panel, ready to be multiplied.
struct Chunk {
  const std::uint8_t* codes;
  const float* coefficients;
  std::int64_t first, count;  // groups
  const std::int8_t* table;
};

/// Kernels of AVX-512 and of floats prefetch codes this far ahead. On a core of a Xeon
/// with AMX (Sapphire Rapids) one row then reads Q4_0 at 17 GB/s and not at 11, Q8_0 at 14 and not
/// at 13; 2 or 8 KiB are slower.
inline constexpr std::int64_t prefetch_bytes = 4096;
/// The other kernels. With AVX2, one row of x from memory then multiplies 17.4 values of Q8_0 a
/// nanosecond on each of two cores of an AMD EPYC (Zen 3), not 14.9, and 33.0 of Q4_0, not 31.7.
/// Half the distance and twice are slower. (AVX-VNNI, NEON: not measured.)
inline constexpr std::int64_t near_prefetch_bytes = 1280;

/// Adds the products of a chunk with n_rows rows of x to sums (n_rows, 16), a multiple of 64 bytes.
using AddChunk = void (*)(CodeKind kind, const Chunk& chunk, const ByteRows& x, int n_rows,
                          float* sums);
/// Returns the one of these instructions, which the processor must have to run it.
AddChunk add_chunk_of(base::ByteProducts products);
/// Returns the one of base::byte_products().
AddChunk add_chunk_in_use();
/// The same for panels of floats and x.floats.
void add_chunk_float8(const Chunk& chunk, const ByteRows& x, int n_rows, float* sums);

/// The most rows that product() takes.
inline constexpr int most_rows = 96;
/// y(m, n) = x(m) W(n)^T + bias(n) for the outputs n of one panel and at most most_rows rows. `y`
/// and `bias` (or null) begin with the panel's first output.
void product(AddChunk add_chunk, const Section& section, std::int64_t panel, const ByteRows& x,
             const float* bias, RowSpan<float> y);

/// Outputs of a block of packed LinearWeights, in whose order values are unpacked.
inline constexpr int packed_outputs = 64;
/// The values of a chunk of floats, in the order of unpack().
void unpack_chunk_float8(const Chunk& chunk, float* target);

/// Values of a panel, in the order of one 64-output block of packed LinearWeights: value (input,
/// output) at target[input * 64 + output]; bf16: pairs of inputs together.
void unpack(const Panels& panels, std::int64_t panel, float* target);
void unpack(const Panels& panels, std::int64_t panel, bfloat16* target);

}  // namespace kvzap::linalg::quantised
