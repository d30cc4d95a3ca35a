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
  bool by_avx2 = false;
  int rows = 1;
  int columns = 16;           // of a packed panel, a multiple of 16
  Product product = nullptr;  // of whole panels
  Product narrow = nullptr;   // of panels of 16 columns

  /// Whether the instruction set in use has a product: from avx2 on.
  static bool available();
  /// Returns the products for rows of bfloat16, or of other types.
  static TileKernels of(bool bfloat_rows);

  /// Packs rows of keys (padded_keys, words), aligned, into panels [panel][word][key] of `columns`
  /// keys.
  void pack(const float* keys, int padded_keys, int words, float* target) const;
};

}  // namespace kvzap::attention
