// Packs rows into 8, 4, 3 or 2 bits for each dimension, and unpacks them, on the host.
#pragma once

#include <kvzap/core/quantised_rows.hpp>
#include <vector>

namespace kvzap::linalg {

/// Space for one row, without an allocation for usual head_dims.
class RowBuffer {
 public:
  explicit RowBuffer(int dim) : m_more(dim > most ? dim : 0) {}
  float* data() { return m_more.empty() ? m_own : m_more.data(); }

 private:
  static constexpr int most = 512;
  float m_own[most];
  std::vector<float> m_more;
};

/// Rotates a row of `dim` values in place (RowTurn). Sums are float.
void rotate_row(float* row, int dim);
/// Rotates a row back.
void rotate_row_back(float* row, int dim);

/// Rotates a row in place, and writes its codes and its scale. For q8 the scale is the largest
/// |value| / 127, rounded up to bfloat16, so no value is off by more than half a scale. (Below
/// 1e-37 all codes are 128.) For q4 it is the best of eight by squared error, each fitted to the
/// levels that it assigns, for q3 and q2 the best of two. A row with a value that is not finite
/// gets the scale NaN.
void pack_row(RowType type, float* row, int dim, std::uint8_t* codes, bfloat16* scale);

/// Writes row `row` of a page, rotated back, to target (dim). `rotated`: leaves it rotated.
void unpack_row(const QuantisedRows& rows, std::int64_t row, float* target, bool rotated = false);

}  // namespace kvzap::linalg
