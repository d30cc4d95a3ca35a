// Decode attention on the host: the softmax of a group of query heads over rows of their KV head,
// in one pass over the rows.
#pragma once

#include <cstdint>
#include <kvzap/core/ragged_layer.hpp>

namespace kvzap::attention {

template <class Value>
struct RowKernels;

/// Running softmax of `group` query heads over the rows added so far. Sums are float.
///
/// From avx2 on, the kernels block vectors of rows and query heads in registers. At avx512_bf16
/// with bfloat16 rows, queries and exponentials are rounded to bfloat16 (relative error 2^-9 each).
/// The sum of weights uses the rounded ones, so the result is always a weighted mean of the values.
template <class Value>
class RowAttention {
 public:
  /// Returns the floats of scratch space, a multiple of 16, for any instruction set.
  static std::int64_t scratch_size(int group, int dim);

  /// scratch: aligned to 64 bytes.
  /// soft_cap: of scaled scores; 0: none.
  RowAttention(int group, int dim, float* scratch, float soft_cap = 0);

  /// Starts a new softmax. queries: (group, dim) with the given strides, unscaled.
  void begin(const float* queries, std::int64_t head_stride, std::int64_t dim_stride);
  /// Adds rows. `next`: the rows of the following call (only a hint).
  void attend(const RowRun<Value>& run, const RowRun<Value>& next);
  /// Writes the partial softmax. maximum (group): largest unscaled score. weight (group): sum of
  /// exp(scaling * (score - maximum)). sums (group, dim): sum of the same times the value.
  void finish(float* maximum, float* weight, float* sums) const;

 private:
  int m_group;
  int m_dim;
  int m_padded_dim;     // to whole vectors
  int m_block_queries;  // query heads held in registers at once
  int m_blocks;         // blocks of that size, the last one padded by zeros
  const RowKernels<Value>* m_kernels;
  float m_scaling;
  float m_soft_cap;  // of unscaled scores
  float* m_queries;
  float* m_scores;
  float* m_maximum;
  float* m_weight;
  float* m_sums;
  Value* m_rows;  // copies of rows whose dim_stride is not 1
};

}  // namespace kvzap::attention
