#include "attention/host/quantised_attention.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "attention/host/row_blocks.hpp"
#include "attention/host/vector_math.hpp"
#include "attention/softmax.hpp"
#include "base/machine.hpp"
#include "linalg/host/rotated_rows.hpp"
#include "linalg/host/row_kernels.hpp"

#define KVZAP_LEVEL_BODY "attention/host/quantised_attention.inc"
#include "base/each_level.hpp"

namespace kvzap::attention {
namespace {

constexpr std::int64_t to_lines(std::int64_t floats) { return (floats + 15) / 16 * 16; }

// Of any type of rows: q4 has two padded parts.
constexpr std::int64_t most_columns(int dim) { return to_lines(dim) + 64; }

// Returns the codes of up to decode_block_rows rows from `first` on. Asks for their scales.
linalg::AheadBytes ask_for(const QuantisedRows& rows, std::int64_t first, std::int64_t count) {
  count = std::min<std::int64_t>(count, decode_block_rows);
  if (count <= 0) return {};
  const bfloat16* const scales = rows.scales + first;
  __builtin_prefetch(scales);
  __builtin_prefetch(scales + count - 1);
  const std::int64_t bytes = QuantisedRows::code_bytes(rows.type, rows.dim);
  return {rows.codes + first * bytes, count * bytes};
}

}  // namespace

std::int64_t QuantisedAttention::scratch_size(int group, int dim) {
  const std::int64_t columns = most_columns(dim);
  return columns + group * (2 * columns + decode_block_rows) + 4 * to_lines(group);
}

QuantisedAttention::QuantisedAttention(int group, int dim, const PageFormat& format, float* scratch,
                                       float soft_cap)
    : m_group(group),
      m_dim(dim),
      m_format(format),
      m_columns(linalg::packed_width(format.values, dim)),
      m_scaling(1.0f / std::sqrt(static_cast<float>(dim))),
      m_soft_cap(soft_cap / m_scaling) {
  const auto take = [&](std::int64_t floats) {
    float* const taken = scratch;
    scratch += floats;
    return taken;
  };
  m_row = take(most_columns(dim));
  m_queries = {reinterpret_cast<std::int16_t*>(take(group * most_columns(dim))),
               reinterpret_cast<std::int32_t*>(take(to_lines(group))), take(to_lines(group)),
               group};
  m_sums = take(group * most_columns(dim));
  m_scores = take(std::int64_t{group} * decode_block_rows);
  m_maximum = take(to_lines(group));
  m_weight = take(to_lines(group));
}

void QuantisedAttention::begin(const float* queries, std::int64_t head_stride,
                               std::int64_t dim_stride) {
  for (int q = 0; q < m_group; ++q) {
    for (int d = 0; d < m_dim; ++d) m_row[d] = queries[q * head_stride + d * dim_stride];
    linalg::rotate_row(m_row, m_dim);
    linalg::pack_query(m_format.keys, m_row, m_dim, m_queries, q);
  }
  std::fill_n(m_sums, std::int64_t{m_group} * m_columns, 0.0f);
  std::fill_n(m_maximum, m_group, minus_infinity);
  std::fill_n(m_weight, m_group, 0.0f);
  m_is_first = true;
}

void QuantisedAttention::attend(const Run& run, const Run& next) {
  const QuantisedRows& values = run.values;
  for (std::int64_t begin = run.first, left = run.rows; left > 0;) {
    const int count = static_cast<int>(std::min<std::int64_t>(decode_block_rows, left));
    left -= count;
    // Memory is asked for one block ahead: keys while keys are multiplied, then values.
    const Run& ahead = left > 0 ? run : next;
    const std::int64_t first_ahead = left > 0 ? begin + count : next.first;
    const std::int64_t rows_ahead = left > 0 ? left : next.rows;
    if (std::exchange(m_is_first, false)) {
      const linalg::AheadBytes own = ask_for(values, begin, count);
      for (std::int64_t i = 0; i < own.bytes; i += 64) __builtin_prefetch(own.begin + i, 0, 2);
    }
    linalg::score_quantised_rows(run.keys, begin, count, m_queries, m_scores, decode_block_rows,
                                 ask_for(ahead.keys, first_ahead, rows_ahead));
    for (int q = 0; q < m_group; ++q) {
      float* const scores = m_scores + std::int64_t{q} * decode_block_rows;
      if (m_soft_cap > 0) linalg::soft_cap(scores, count, m_soft_cap);
      const float maximum = std::max(m_maximum[q], linalg::max_of(scores, count));
      if (maximum > m_maximum[q]) {
        const float factor = std::exp((m_maximum[q] - maximum) * m_scaling);
        m_weight[q] *= factor;
        linalg::scale(m_sums + std::int64_t{q} * m_columns, m_columns, factor);
        m_maximum[q] = maximum;
      }
      m_weight[q] += KVZAP_AT_LEVEL(soften)(scores, values.scales + begin, count, shift_of(maximum),
                                            m_scaling);
    }
    linalg::accumulate_quantised_rows(values, begin, count, {m_scores, decode_block_rows, m_group},
                                      m_sums, ask_for(ahead.values, first_ahead, rows_ahead));
    begin += count;
  }
}

void QuantisedAttention::finish(float* maximum, float* weight, float* sums) const {
  std::copy_n(m_maximum, m_group, maximum);
  std::copy_n(m_weight, m_group, weight);
  for (int q = 0; q < m_group; ++q) {
    float* const target = sums + std::int64_t{q} * m_dim;
    const float* const own = m_sums + std::int64_t{q} * m_columns;
    for (int d = 0; d < m_dim; ++d) {
      target[d] = own[linalg::quantised_place(m_format.values, m_dim, d)];
    }
    linalg::rotate_row_back(target, m_dim);
  }
}

}  // namespace kvzap::attention
