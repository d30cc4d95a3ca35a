// Products of query heads with quantised rows of a page, and sums of its weighted values, on the
// host.
#pragma once

#include <kvzap/core/quantised_rows.hpp>

#include "linalg/host/row_span.hpp"

namespace kvzap::linalg {

/// Query heads as products with quantised keys take them: rotated and rounded to whole numbers.
///
/// A query's numbers are at most 32,767 and so small that no sum of products overflows; each is
/// off by at most half a scale. Products are sums of whole numbers, the same for every instruction
/// set.
struct QuantisedQueries {
  std::int16_t* numbers;  // (query, packed_width), in the order of query_place
  std::int32_t* sums;     // (query), 128 times the sum of the numbers
  float* scales;          // (query)
  int count;
};

/// Returns the elements of a query, or of a sum of weighted values, for rows of this type: dims in
/// order, in two parts for q4, each part padded to a multiple of 32.
constexpr int packed_width(RowType type, int dim) {
  const auto whole = [](int n) { return (n + 31) / 32 * 32; };
  return type == RowType::q4 ? 2 * whole((dim + 1) / 2) : whole(dim);
}
/// Returns the place of a dimension in a sum of weighted values.
constexpr int quantised_place(RowType type, int dim, int d) {
  const int half = (dim + 1) / 2;
  return type == RowType::q4 && d >= half ? (half + 31) / 32 * 32 + d - half : d;
}
/// Returns the place of a dimension in a query: of 32, those from 8 and from 16 on change places,
/// as unpacking leaves them in a key.
constexpr int query_place(RowType type, int dim, int d) {
  const int place = quantised_place(type, dim, d);
  const int eighth = place / 8 % 4;
  return eighth == 1 ? place + 8 : eighth == 2 ? place - 8 : place;
}

/// Memory that a kernel asks for while it works: the rows that follow its own.
struct AheadBytes {
  const std::uint8_t* begin = nullptr;
  std::int64_t bytes = 0;
};

/// target[d] = scale * level of dimension d of a row
void widen_quantised_row(const QuantisedRows& rows, std::int64_t row, float* target);

/// Rounds a rotated query (dim) to query `index` of `target`.
void pack_query(RowType type, const float* query, int dim, const QuantisedQueries& target,
                int index);

/// scores[q * stride + i] = scale of row * scale of query * product of their numbers, for the rows
/// first … first + rows - 1, at most 64. Scores up to the next multiple of 8 rows are overwritten.
void score_quantised_rows(const QuantisedRows& keys, std::int64_t first, int rows,
                          const QuantisedQueries& queries, float* scores, int stride,
                          const AheadBytes& ahead = {});

/// sums[q * packed_width + place of d] += weights(q, i) * level of dimension d of row first + i, at
/// most 64 rows. The weights, 0 or more, include the scales of the rows. They are
/// rounded to 15 bits of the largest one with AVX2, unless one of the four queries of a block is
/// not finite.
void accumulate_quantised_rows(const QuantisedRows& values, std::int64_t first, int rows,
                               RowSpan<const float> weights, float* sums,
                               const AheadBytes& ahead = {});

}  // namespace kvzap::linalg
