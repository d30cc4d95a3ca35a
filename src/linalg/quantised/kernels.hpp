// Products of a few rows of bytes with panels, and panels as values. Hosts only.
//
// The rows of x are rounded to bytes, in groups of 32 with a scale each. A group of a panel adds
//   scale_x * (scale * sum(byte * (code - centre)) + minimum * sum(byte)),
// where the sums are exact integers. Panels of floats are multiplied with x as it is.
//
// A group whose scale stands out in its row loses the most by rounding. What rounding leaves of
// such groups is rounded to bytes once more, as groups of their own, the rests: then x has 16 bits
// where it matters. Few groups stand out, so rests cost little.
#pragma once

#include <cstdint>
#include <kvzap/core/types.hpp>

#include "base/byte_products.hpp"
#include "linalg/host/row_span.hpp"
#include "linalg/quantised/matrix.hpp"

namespace kvzap::linalg::quantised {

enum class RowsAs { floats, bytes, bytes_and_rests };

/// A block of rows of x in bytes: of each group of 32 inputs all rows, one after the other, so that
/// kernels read a group's rows in address order. Arrays begin with the first row of group 0. For
/// panels of floats: `floats` instead, row after row.
struct ByteRows {
  std::int8_t* values = nullptr;        // 32 of each group and row
  float* scales = nullptr;              // a group's value of one
  float* totals = nullptr;              // scale * sum(byte) of a group
  std::int32_t* starts = nullptr;       // -sum(byte) of a group
  std::int32_t* half_starts = nullptr;  // the same of 16 inputs each, two of each group
  std::int64_t inputs = 0;
  std::int64_t rows = 0;  // of the block, from one group to the next
  float* floats = nullptr;
  // The rests follow the groups in the same arrays: that of group g is group groups() + g. Of each
  // group the rows that have one, and their number. Null: there are no rests.
  std::uint8_t* rest_rows = nullptr;
  std::uint8_t* rest_counts = nullptr;

  std::int64_t groups() const { return inputs / group_inputs; }
  /// The block from row m on.
  ByteRows row(std::int64_t m) const {
    ByteRows row = *this;
    if (floats != nullptr) {
      row.floats = floats + m * inputs;
      return row;
    }
    row.values = values + m * group_inputs;
    row.scales = scales + m;
    row.totals = totals + m;
    row.starts = starts + m;
    row.half_starts = half_starts + 2 * m;
    return row;
  }
  /// Bytes of one row in a buffer.
  static std::int64_t row_bytes(std::int64_t inputs, RowsAs as) {
    constexpr std::int64_t word = sizeof(float);
    if (as == RowsAs::floats) return inputs * word;
    const std::int64_t groups = inputs / group_inputs;
    const std::int64_t bytes = inputs + groups * 5 * word;
    return as == RowsAs::bytes ? bytes : 2 * bytes + 4 * ((2 * groups + 3) / 4);
  }
  /// Rows in a buffer that begins at a multiple of 4.
  static ByteRows at(std::uint8_t* buffer, std::int64_t rows, std::int64_t inputs, RowsAs as) {
    ByteRows all;
    all.inputs = inputs;
    all.rows = rows;
    if (as == RowsAs::floats) {
      all.floats = reinterpret_cast<float*>(buffer);
      return all;
    }
    const std::int64_t count = rows * all.groups() * (as == RowsAs::bytes ? 1 : 2);
    all.values = reinterpret_cast<std::int8_t*>(buffer);
    all.scales = reinterpret_cast<float*>(buffer + count * group_inputs);
    all.totals = all.scales + count;
    all.starts = reinterpret_cast<std::int32_t*>(all.totals + count);
    all.half_starts = all.starts + count;
    if (as == RowsAs::bytes_and_rests) {
      all.rest_rows = reinterpret_cast<std::uint8_t*>(all.half_starts + 2 * count);
      all.rest_counts = all.rest_rows + rows * all.groups();
    }
    return all;
  }
};

/// Rounds x (inputs) to the bytes of a block's first row: byte = round(x / scale), scale = max |x|
/// / 127. A group with a value that is not finite gets the scale NaN. If the block has rests, those
/// of groups with scale^2 > 2 mean(scale^2) of the row get a 254th of the scale, the others 0.
void round_to_bytes(const float* x, const ByteRows& row);
/// Lists the rests of a block whose rows are all rounded.
void list_rests(const ByteRows& block);

constexpr bool is_signed(CodeKind kind) {
  return kind == CodeKind::bytes || kind == CodeKind::table || is_float(kind);
}
constexpr bool has_minima(CodeKind kind) {
  return kind == CodeKind::nibbles || kind == CodeKind::five_bits;
}
/// Parts of a group that have scales of their own.
constexpr int parts_of_group(CodeKind kind) { return kind == CodeKind::six_bits ? 2 : 1; }
/// Coefficients of consecutive groups: of each part of a group 16 scales, then 16 minima, if any.
constexpr std::int64_t coefficients_of_group(CodeKind kind) {
  return panel_outputs * (has_minima(kind) ? 2 : parts_of_group(kind));
}
/// Groups whose coefficients are computed at once, of all panels together: at most 8 KiB.
inline constexpr std::int64_t chunk_groups = 64;
/// The most panels that kernels multiply at once.
inline constexpr int most_panels = 2;
/// Computes the coefficients of groups first … first + count - 1 of a panel; first is a multiple of
/// 8.
void widen_scales(const Panels& panels, std::int64_t panel, std::int64_t first, std::int64_t count,
                  float* coefficients);

/// Groups of one panel or of several consecutive ones, ready to be multiplied.
struct Chunk {
  const std::uint8_t* codes;
  const float* coefficients;
  std::int64_t first, count;  // groups
  const std::int8_t* table;
  int panels = 1;
  std::int64_t panel_bytes = 0;  // from the codes of a panel to those of the next

  /// From the coefficients of a panel to those of the next.
  std::int64_t coefficients_of_panel(CodeKind kind) const {
    return count * coefficients_of_group(kind);
  }
};

/// Kernels of AVX-512 and of floats prefetch codes this far ahead. On a core of a Xeon
/// with AMX (Sapphire Rapids) one row then reads Q4_0 at 17 GB/s and not at 11, Q8_0 at 14 and not
/// at 13; 2 or 8 KiB are slower.
inline constexpr std::int64_t prefetch_bytes = 4096;
/// The other kernels. With AVX2, one row of x from memory then multiplies 17.4 values of Q8_0 a
/// nanosecond on each of two cores of an AMD EPYC (Zen 3), not 14.9, and 33.0 of Q4_0, not 31.7.
/// Half the distance and twice are slower. (AVX-VNNI, NEON: not measured.)
inline constexpr std::int64_t near_prefetch_bytes = 1280;

/// The kernel for one kind of instructions.
struct AddChunk {
  /// Adds the products of a chunk with n_rows rows of x to sums (n_rows, outputs of the chunk), a
  /// multiple of 64 bytes.
  void (*add)(CodeKind kind, const Chunk& chunk, const ByteRows& x, int n_rows, float* sums);
  /// The panels that a chunk has for many rows, of at least `least_rows`. For fewer: one.
  int panels;
  std::int64_t least_rows;
  /// Whether it adds the rests of `least_rows` rows or more.
  bool takes_rests;

  int panels_at_once(std::int64_t n_rows) const { return n_rows < least_rows ? 1 : panels; }
};
/// Returns the one of these instructions, which the processor must have to run it.
AddChunk add_chunk_of(base::ByteProducts products);
/// Returns the one of base::byte_products().
AddChunk add_chunk_in_use();
/// The same for panels of floats and x.floats.
void add_chunk_float8(const Chunk& chunk, const ByteRows& x, int n_rows, float* sums);

/// The most rows that product() takes.
inline constexpr int most_rows = 96;
/// y(m, n) = x(m) W(n)^T + bias(n) for at most most_rows rows and the outputs n of `together`
/// panels from `panel` on, or of fewer at the section's end: 1, or what the kernel takes at once.
/// `y` and `bias` (or null) begin with the first output.
void product(const AddChunk& add_chunk, const Section& section, std::int64_t panel, int together,
             const ByteRows& x, const float* bias, RowSpan<float> y);

/// Outputs of a block of packed LinearWeights, in whose order values are unpacked.
inline constexpr int packed_outputs = 64;
/// The values of a chunk of floats, in the order of unpack().
void unpack_chunk_float8(const Chunk& chunk, float* target);

/// Values of a panel, in the order of one 64-output block of packed LinearWeights: value (input,
/// output) at target[input * 64 + output]; bf16: pairs of inputs together.
void unpack(const Panels& panels, std::int64_t panel, float* target);
void unpack(const Panels& panels, std::int64_t panel, bfloat16* target);

}  // namespace kvzap::linalg::quantised
