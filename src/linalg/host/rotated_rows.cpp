#include "linalg/host/rotated_rows.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/simd.hpp"
#include "linalg/host/quantised_row_products.hpp"
#include "linalg/pack_row.hpp"
#if KVZAP_X86
#include <immintrin.h>
#endif

namespace kvzap::linalg {
namespace {

// Walsh-Hadamard transform of `n` values, a power of 2, without its factor.
KVZAP_BODY void transform(float* x, int n) {
  for (int half = 1; half < n; half *= 2) {
    if (half >= 8) {
      for (int i = 0; i < n; i += 2 * half) {
        float* const a = x + i;
        float* const b = x + i + half;
        for (int j = 0; j < half; ++j) {
          const float sum = a[j] + b[j];
          b[j] = a[j] - b[j];
          a[j] = sum;
        }
      }
    } else {
      for (int i = 0; i < n; i += 2 * half) {
        for (int j = i; j < i + half; ++j) {
          const float sum = x[j] + x[j + half];
          x[j + half] = x[j] - x[j + half];
          x[j] = sum;
        }
      }
    }
  }
}

// Subtracts from each of `blocks` blocks twice their mean.
KVZAP_BODY void reflect(float* x, int block, int blocks) {
  if (blocks == 1) return;
  for (int i = 0; i < block; ++i) {
    float sum = 0;
    for (int b = 0; b < blocks; ++b) sum += x[b * block + i];
    const float twice = 2.0f / static_cast<float>(blocks) * sum;
    for (int b = 0; b < blocks; ++b) x[b * block + i] -= twice;
  }
}

KVZAP_BODY void sign_and_scale(float* x, int dim, float factor) {
  for (int d = 0; d < dim; ++d) x[d] *= RowTurn::sign(d) * factor;
}

KVZAP_BODY void rotate_any_row_body(float* row, int dim, bool back) {
  const RowTurn turn = RowTurn::of(dim);
  const float factor = turn.root();
  if (back) {
    reflect(row, turn.block, turn.blocks());
  } else {
    sign_and_scale(row, dim, factor);
  }
  for (int b = 0; b < turn.blocks(); ++b) transform(row + b * turn.block, turn.block);
  if (back) {
    sign_and_scale(row, dim, factor);
  } else {
    reflect(row, turn.block, turn.blocks());
  }
}
KVZAP_KERNEL(void, rotate_any_row, (float* row, int dim, bool back), (row, dim, back))

// Returns the largest |value|, or NaN if a value is not finite.
KVZAP_BODY float largest_size(const float* row, int dim) {
  float largest = 0;
  float odd = 0;  // 0 * infinity and 0 * NaN are NaN
#pragma omp simd reduction(max : largest) reduction(+ : odd)
  for (int d = 0; d < dim; ++d) {
    const float size = std::fabs(row[d]);
    largest = size > largest ? size : largest;
    odd += 0.0f * row[d];
  }
  return largest + odd;
}

KVZAP_BODY bfloat16 rounded_up(float value) {
  bfloat16 rounded(value);
  if (static_cast<float>(rounded) < value) ++rounded.bits;
  return rounded;
}

KVZAP_BODY void quantise(const float* row, int dim, float inverse, std::uint8_t* codes) {
  for (int d = 0; d < dim; ++d) {
    const float level = std::nearbyintf(row[d] * inverse);
    const float inside = level > 127.0f ? 127.0f : level < -127.0f ? -127.0f : level;
    codes[d] = static_cast<std::uint8_t>(static_cast<int>(inside) + 128);
  }
}

// Sums over a row's products with its levels, for the scale of least squared error.
struct LevelSums {
  float with_row, with_self;
};

KVZAP_BODY LevelSums level_sums(const float* row, int dim, float inverse) {
  float with_row = 0, with_self = 0;
#pragma omp simd reduction(+ : with_row, with_self)
  for (int d = 0; d < dim; ++d) {
    const float size = std::fabs(row[d]) * inverse;
    auto level = static_cast<float>(QuantisedRows::level(8));
    for (int m = 1; m < magnitudes; ++m) {
      const auto step =
          static_cast<float>(QuantisedRows::level(8 + m) - QuantisedRows::level(7 + m));
      level += size > level_border(m) ? step : 0.0f;
    }
    with_row += size * level;
    with_self += level * level;
  }
  return {with_row, with_self};
}

// Writes the number of the level nearest to row[d] * inverse.
KVZAP_BODY void assign_levels(const float* row, int dim, float inverse, std::uint8_t* numbers) {
  for (int d = 0; d < dim; ++d) {
    const float size = std::fabs(row[d]) * inverse;
    int magnitude = 0;
    for (int m = 1; m < magnitudes; ++m) magnitude += size > level_border(m) ? 1 : 0;
    numbers[d] = static_cast<std::uint8_t>(row[d] < 0 ? 7 - magnitude : 8 + magnitude);
  }
}

KVZAP_BODY float inverse_scale(bfloat16 scale) {
  const float used = scale;
  return used > least_scale ? 1.0f / used : 0.0f;
}

// Returns the root mean square of a row with this largest size.
KVZAP_BODY float rms_of(const float* row, int dim, float largest) {
  const float by = largest > least_scale ? 1.0f / largest : 0.0f;
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int d = 0; d < dim; ++d) squares += row[d] * by * (row[d] * by);
  return largest * std::sqrt(squares / static_cast<float>(dim));
}

KVZAP_BODY void pack_levels(const float* row, int dim, float largest, std::uint8_t* codes,
                            bfloat16* scale) {
  const float middle = rms_of(row, dim, largest) / rms_level;
  float found = middle, best = 0;
  for (int c = 0; c < scale_candidates && middle > least_scale; ++c) {
    const float tried = middle * candidate_factor(c);
    const LevelSums sums = level_sums(row, dim, 1.0f / tried);
    // What the levels explain of the row's square, in units of middle squared.
    const float factor = candidate_factor(c) * sums.with_row / sums.with_self;
    const float explained = factor * factor * sums.with_self;
    if (explained > best) {
      best = explained;
      found = middle * factor;
    }
  }
  *scale = bfloat16(found);
  const float inverse = inverse_scale(*scale);
  const int half = (dim + 1) / 2;
  std::fill_n(codes, half, std::uint8_t{0x88});
  constexpr int most = 1024;  // dims whose numbers are held at once
  std::uint8_t numbers[most];
  for (int d = 0; d < dim; d += most) {
    const int count = std::min(most, dim - d);
    assign_levels(row + d, count, inverse, numbers);
    for (int i = 0; i < count; ++i) {
      const bool upper = d + i >= half;
      std::uint8_t& byte = codes[upper ? d + i - half : d + i];
      byte = static_cast<std::uint8_t>(upper ? (byte & 0x0f) | (numbers[i] << 4)
                                             : (byte & 0xf0) | numbers[i]);
    }
  }
}

#if KVZAP_X86
#include "linalg/host/trellis_avx2.inc"
#endif

template <RowType type>
KVZAP_BODY void pack_by_units(const float* row, int dim, float largest, std::uint8_t* codes,
                              bfloat16* scale) {
  constexpr int unit_dims = QuantisedRows::unit_dims;
  const float middle = rms_of(row, dim, largest) / RowTrellis::of(type).rms;
  *scale = bfloat16(pack_by_trellis(middle, [&](float inverse) {
#if KVZAP_X86
    if (base::machine().has(base::SimdLevel::avx2)) {
      return assign_row_avx2<type>(row, dim, inverse, codes);
    }
#endif
    LevelProducts products;
    for (int d = 0; d < dim; d += unit_dims) {
      products += assign_unit<type>([&](int i) { return row[d + i] * inverse; }, dim - d,
                                    codes + d / unit_dims * QuantisedRows::unit_bytes(type));
    }
    return products;
  }));
}

KVZAP_BODY void pack_rotated_body(RowType type, const float* row, int dim, std::uint8_t* codes,
                                  bfloat16* scale) {
  const float largest = largest_size(row, dim);
  if (!(largest <= std::numeric_limits<float>::max())) {
    std::fill_n(codes, QuantisedRows::code_bytes(type, dim),
                static_cast<std::uint8_t>(type == RowType::q4 ? 0x88 : 128));
    *scale = bfloat16(std::numeric_limits<float>::quiet_NaN());
  } else if (type == RowType::q2) {
    pack_by_units<RowType::q2>(row, dim, largest, codes, scale);
  } else if (type == RowType::q3) {
    pack_by_units<RowType::q3>(row, dim, largest, codes, scale);
  } else if (type == RowType::q4) {
    pack_levels(row, dim, largest, codes, scale);
  } else {
    *scale = rounded_up(largest / 127.0f);
    quantise(row, dim, inverse_scale(*scale), codes);
  }
}
KVZAP_KERNEL(void, pack_rotated,
             (RowType type, const float* row, int dim, std::uint8_t* codes, bfloat16* scale),
             (type, row, dim, codes, scale))

}  // namespace

void rotate_row(float* row, int dim) { rotate_any_row(row, dim, false); }
void rotate_row_back(float* row, int dim) { rotate_any_row(row, dim, true); }

void pack_row(RowType type, float* row, int dim, std::uint8_t* codes, bfloat16* scale) {
  rotate_row(row, dim);
  pack_rotated(type, row, dim, codes, scale);
}

void unpack_row(const QuantisedRows& rows, std::int64_t row, float* target, bool rotated) {
  widen_quantised_row(rows, row, target);
  if (!rotated) rotate_row_back(target, rows.dim);
}

}  // namespace kvzap::linalg
