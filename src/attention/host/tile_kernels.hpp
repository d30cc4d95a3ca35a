// The matrix product of attention's tiles at the instruction set in use.
#pragma once

#include <cstdint>

namespace kvzap::attention {

/// The products of tiles and the sizes of their blocks. Words are floats, or pairs of bfloat16 if
/// `pairs`.
struct TileKernels {
  /// c (rows, columns) = factor * c + a (rows, steps) * b (steps, columns) of words; factor[r] for
  /// row r, 0 if null. b and c are aligned to 64 bytes.
  using Product = void (*)(int steps, const float* a, std::int64_t a_stride, const float* b,
                           float* c, std::int64_t c_stride, const float* factor);

  bool pairs = false;
  int rows = 1;
  int columns = 16;           // of a packed panel, a multiple of 16
  Product product = nullptr;  // of whole panels
  Product narrow = nullptr;   // of panels of 16 columns

  /// Packs rows of keys (padded_keys, words), aligned, into panels [panel][word][key] of `columns`
  /// keys.
  void (*pack)(const float* keys, int padded_keys, int words, float* target) = nullptr;
  /// If `pairs`: target[c] = the pair of even[c] and odd[c] for `columns` values, a multiple of 16.
  void (*pair_rows)(const float* even, const float* odd, int columns, float* target) = nullptr;
  /// Updates the running maximum of a row with `count` >= 1 scores. Replaces them by exponentials,
  /// and those after them up to `padded`, a multiple of 32, by 0; if `pairs`, as bfloat16 in the
  /// first half of the row. factor: rescales earlier weights and sums.
  void (*online_softmax_row)(float* scores, int count, int padded, float scaling, float* maximum,
                             float* weight, float* factor) = nullptr;
  /// mass[k] = sum or maximum of mass[k] and factor * row_factors[k] * exp(scaling * scores[k] -
  /// lse), for k < count. A NaN stays.
  void (*take_row)(const float* scores, int count, float scaling, float lse, float factor,
                   const float* row_factors, bool is_max, float* mass) = nullptr;
  /// mass[k] = sum or maximum of mass[k] and tile[k] for k < count; also for some k >= count.
  void (*take_tile)(const float* tile, int count, bool is_max, float* mass) = nullptr;

  /// Whether the instruction set in use has a product: AVX2 or above, or NEON.
  static bool available();
  /// Returns the products for rows of bfloat16, or of other types.
  static TileKernels of(bool bfloat_rows);
};

}  // namespace kvzap::attention
