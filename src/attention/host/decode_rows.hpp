// Decode attention on the host: the softmax of a group of query heads over rows of their KV head,
// in one pass over the rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <kvzap/core/ragged_layer.hpp>

#include "attention/host/vector_math.hpp"
#include "attention/softmax.hpp"
#include "base/machine.hpp"

// Within a block of rows that a kernel works on, offsets fit an int.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

namespace kvzap::attention {

// Rows whose scores are held at once: the running maximum is rescaled once for each block. With 128
// 16-bit values per row, the keys and the values of a block each fill half a level-1 cache.
constexpr int decode_block_rows = 64;

// Lanes of a block of queries in the running maximum and weight; narrower levels use the first.
constexpr int block_lanes = 16;

/// The query heads of a call of RowKernels::attend, in blocks.
struct Blocks {
  int count, dim, padded;
  float scaling;
  float soft_cap;  // of unscaled scores; 0: none
  const float* queries;
  float *scores, *maximum, *weight, *sums;
};

/// The kernels of an instruction set. Queries and sums have its order of dims.
template <class Value>
struct RowKernels {
  /// Adds a run's rows to blocks of `block_queries` (1, 2 or 4) query heads. maximum and weight:
  /// [block][block_lanes], where lane e belongs to query e % block_queries; sums: [query][padded].
  void (*attend)(int block_queries, const Blocks& blocks, const RowRun<Value>& run,
                 const RowRun<Value>& next);
  /// Puts 32 dims of query q among those of a block of `block_queries`, which begin at `first`.
  void (*put_query)(const float* dims, int block_queries, int q, float* queries,
                    std::int64_t first);
  /// Reads 32 dims of a query's sums.
  void (*take_sums)(const float* sums, float* dims);

  static const RowKernels* of(base::SimdLevel level);
};

/// Running softmax of `group` query heads over the rows added so far. Sums are float.
///
/// From avx2 on, the kernels block vectors of rows and query heads in registers. At avx512_bf16
/// with bfloat16 rows, queries and exponentials are rounded to bfloat16 (relative error 2^-9 each).
/// The sum of weights uses the rounded ones, so the result is always a weighted mean of the values.
template <class Value>
class RowAttention {
 public:
  /// Returns the floats of scratch space, a multiple of 16, for any instruction set.
  static std::int64_t scratch_size(int group, int dim) {
    const std::int64_t queries = whole(group, 4);
    // Space for queries and sums, scores, maximum and weight, and copies of keys and values.
    return 2 * queries * whole(dim, 32) + queries * decode_block_rows + 2 * whole(queries, 16) * 4 +
           2 * whole(decode_block_rows * static_cast<std::int64_t>(dim) * sizeof(Value) /
                         sizeof(float),
                     16);
  }

  /// scratch: aligned to 64 bytes.
  /// soft_cap: of scaled scores; 0: none.
  RowAttention(int group, int dim, float* scratch, float soft_cap = 0)
      : m_group(group),
        m_dim(dim),
        m_padded_dim(static_cast<int>(whole(dim, 32))),
        m_block_queries(group <= 2 ? group : 4),
        m_blocks((group + m_block_queries - 1) / m_block_queries),
        m_kernels(RowKernels<Value>::of(base::machine().simd())),
        m_scaling(1.0f / std::sqrt(static_cast<float>(dim))),
        m_soft_cap(soft_cap / m_scaling) {
    const std::int64_t queries = whole(group, 4);
    m_queries = scratch;
    m_sums = m_queries + queries * m_padded_dim;
    m_scores = m_sums + queries * m_padded_dim;
    m_maximum = m_scores + queries * decode_block_rows;
    m_weight = m_maximum + whole(queries, 16) * 4;
    m_rows = reinterpret_cast<Value*>(m_weight + whole(queries, 16) * 4);
  }

  /// Starts a new softmax. queries: (group, dim) with the given strides, unscaled.
  void begin(const float* queries, std::int64_t head_stride, std::int64_t dim_stride) {
    const int padded_group = m_blocks * m_block_queries;
    std::fill_n(m_sums, std::int64_t{padded_group} * m_padded_dim, 0.0f);
    std::fill_n(m_maximum, m_blocks * block_lanes, minus_infinity);
    std::fill_n(m_weight, m_blocks * block_lanes, 0.0f);
    for (int head = 0; head < padded_group; ++head) {
      const int q = head % m_block_queries;
      const std::int64_t block = std::int64_t{head - q} * m_padded_dim;
      for (int d = 0; d < m_padded_dim; d += 32) {
        const int count = head < m_group ? std::clamp(m_dim - d, 0, 32) : 0;
        const float* const source = queries + head * head_stride + d * dim_stride;
        float dims[32];
        for (int i = 0; i < count; ++i) dims[i] = source[i * dim_stride];
        std::fill(dims + count, dims + 32, 0.0f);
        m_kernels->put_query(dims, m_block_queries, q, m_queries, block + d * m_block_queries);
      }
    }
  }

  /// Adds rows. `next`: the rows of the following call (only a hint).
  void attend(const RowRun<Value>& run, const RowRun<Value>& next) {
    if (run.dim_stride != 1) {
      Value* const keys = m_rows;
      Value* const values = m_rows + std::int64_t{decode_block_rows} * m_dim;
      for (std::int64_t begin = 0; begin < run.rows; begin += decode_block_rows) {
        const std::int64_t rows = std::min<std::int64_t>(decode_block_rows, run.rows - begin);
        for (std::int64_t r = 0; r < rows; ++r) {
          const std::int64_t row = (begin + r) * run.row_stride;
          for (int d = 0; d < m_dim; ++d) {
            keys[r * m_dim + d] = run.keys[row + d * run.dim_stride];
            values[r * m_dim + d] = run.values[row + d * run.dim_stride];
          }
        }
        const RowRun<Value> copied{keys, values, rows, m_dim, 1};
        attend(copied, copied);
      }
      return;
    }
    const Blocks blocks{m_blocks,  m_dim,    m_padded_dim, m_scaling, m_soft_cap,
                        m_queries, m_scores, m_maximum,    m_weight,  m_sums};
    m_kernels->attend(m_block_queries, blocks, run, next.keys && next.dim_stride == 1 ? next : run);
  }

  /// Writes the partial softmax. maximum (group): largest unscaled score. weight (group): sum of
  /// exp(scaling * (score - maximum)). sums (group, dim): sum of the same times the value.
  void finish(float* maximum, float* weight, float* sums) const {
    for (int head = 0; head < m_group; ++head) {
      const int lanes = head / m_block_queries * block_lanes;
      const int q = head % m_block_queries;
      maximum[head] = m_maximum[lanes + q];
      float total = 0;
      for (int lane = q; lane < block_lanes; lane += m_block_queries) {
        total += m_weight[lanes + lane];
      }
      weight[head] = total;
      const float* own = m_sums + std::int64_t{head} * m_padded_dim;
      float* const target = sums + std::int64_t{head} * m_dim;
      for (int d = 0; d < m_dim; d += 32) {
        float dims[32];
        m_kernels->take_sums(own + d, dims);
        std::copy_n(dims, std::min(32, m_dim - d), target + d);
      }
    }
  }

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

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
