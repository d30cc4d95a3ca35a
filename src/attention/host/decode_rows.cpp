#include "attention/host/decode_rows.hpp"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "attention/host/row_blocks.hpp"
#include "attention/host/vector_math.hpp"
#include "attention/softmax.hpp"
#include "base/machine.hpp"
#include "base/value_types.hpp"
#include "linalg/host/row_kernels.hpp"

// Within a block of rows that a kernel works on, offsets fit an int.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

#define KVZAP_LEVEL_BODY "attention/host/decode_kernels.inc"
#include "base/each_level.hpp"

namespace kvzap::attention {
namespace {

template <class Value>
const RowKernels<Value>* row_kernels_of([[maybe_unused]] base::SimdLevel level) {
#if KVZAP_X86
  if constexpr (std::is_same_v<Value, bfloat16>) {
    if (level >= base::SimdLevel::avx512_bf16) return &avx512_bf16::row_kernels<Value>;
  }
  if (level >= base::SimdLevel::avx512) return &avx512::row_kernels<Value>;
  if (level == base::SimdLevel::avx2) return &avx2::row_kernels<Value>;
#elif KVZAP_NEON
  if constexpr (std::is_same_v<Value, bfloat16>) {
    if (level >= base::SimdLevel::neon_bf16) return &neon_bf16::row_kernels<Value>;
  }
#endif
  return &baseline::row_kernels<Value>;
}

}  // namespace

template <class Value>
std::int64_t RowAttention<Value>::scratch_size(int group, int dim) {
  const std::int64_t queries = whole(group, 4);
  const std::int64_t padded = whole(dim, 32);
  // Space for queries and sums, scores, maximum and weight, and copies of keys and values.
  return 2 * queries * padded + queries * decode_block_rows + 2 * whole(queries, 16) * 4 +
         2 * whole(
                 decode_block_rows * static_cast<std::int64_t>(dim) * sizeof(Value) / sizeof(float),
                 16);
}

template <class Value>
RowAttention<Value>::RowAttention(int group, int dim, float* scratch, float soft_cap)
    : m_group(group),
      m_dim(dim),
      m_padded_dim(static_cast<int>(whole(dim, 32))),
      m_block_queries(group <= 2 ? group : 4),
      m_blocks((group + m_block_queries - 1) / m_block_queries),
      m_kernels(row_kernels_of<Value>(base::machine().simd())),
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

template <class Value>
void RowAttention<Value>::begin(const float* queries, std::int64_t head_stride,
                                std::int64_t dim_stride) {
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

template <class Value>
void RowAttention<Value>::attend(const RowRun<Value>& run, const RowRun<Value>& next) {
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
  const Blocks<Value> blocks{m_blocks,  m_dim,    m_padded_dim, m_scaling, m_soft_cap,
                             m_queries, m_scores, m_maximum,    m_weight,  m_sums};
  m_kernels->attend(m_block_queries, blocks, run, next.keys && next.dim_stride == 1 ? next : run);
}

template <class Value>
void RowAttention<Value>::finish(float* maximum, float* weight, float* sums) const {
  for (int head = 0; head < m_group; ++head) {
    const int lanes = head / m_block_queries * block_lanes;
    const int q = head % m_block_queries;
    maximum[head] = m_maximum[lanes + q];
    float total = 0;
    for (int lane = q; lane < block_lanes; lane += m_block_queries) total += m_weight[lanes + lane];
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

#define KVZAP_INSTANTIATE(Value) template class RowAttention<Value>;
KVZAP_FOR_EACH_VALUE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE

}  // namespace kvzap::attention

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
