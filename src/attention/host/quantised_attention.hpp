// Decode attention over quantised rows on the host: the softmax of a group of query heads over rows
// of 8 to 2 bits of their KV head, in one pass over the rows.
#pragma once

#include <kvzap/core/quantised_rows.hpp>

#include "linalg/host/quantised_row_products.hpp"

namespace kvzap::attention {

/// Running softmax of `group` query heads over the quantised rows added so far, as RowAttention.
///
/// Queries are rotated as the rows are, and rounded to 16 bits: each value of a rotated query is
/// off by at most 2^-16 of the largest one. Products of keys are sums of whole numbers. With AVX2,
/// weights are rounded to 15 bits of the largest one of 64 rows; otherwise sums of values are
/// float. A query with a value that is not finite gets the result NaN.
class QuantisedAttention {
 public:
  /// Returns the floats of scratch space, a multiple of 16.
  static std::int64_t scratch_size(int group, int dim);

  /// scratch: aligned to 64 bytes. soft_cap: of scaled scores; 0: none.
  QuantisedAttention(int group, int dim, const PageFormat& format, float* scratch, float soft_cap);

  /// Starts a new softmax. queries: (group, dim) with the given strides, unscaled.
  void begin(const float* queries, std::int64_t head_stride, std::int64_t dim_stride);
  /// Rows first … first + rows - 1 of a page.
  struct Run {
    QuantisedRows keys, values;
    std::int64_t first = 0;
    std::int64_t rows = 0;
  };
  /// Adds rows. `next`: the rows of the following call (only a hint; may be none).
  void attend(const Run& run, const Run& next);
  /// Writes the partial softmax, rotated back, as RowAttention::finish does.
  void finish(float* maximum, float* weight, float* sums) const;

 private:
  int m_group;
  int m_dim;
  PageFormat m_format;
  int m_columns;  // of the sums
  float m_scaling;
  float m_soft_cap;        // of unscaled scores
  bool m_is_first = true;  // no rows were added
  float* m_row;            // one query or value
  linalg::QuantisedQueries m_queries;
  float* m_scores;   // (query head, row)
  float* m_maximum;  // (query head)
  float* m_weight;   // (query head)
  float* m_sums;     // (query head, column)
};

}  // namespace kvzap::attention
