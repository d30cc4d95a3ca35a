#include "attention/host/tile_mass.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention/host/vector_math.hpp"
#include "attention/softmax.hpp"
#include "linalg/host/rotated_rows.hpp"
#include "linalg/host/row_kernels.hpp"

// Within a block of rows that a kernel works on, offsets fit an int.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

namespace kvzap::attention {

bool TileMass::available() { return TileKernels::available(); }

std::int64_t TileMass::scratch_size(int dim) {
  const std::int64_t words = whole(dim, 16);
  return tile_rows * (words + tile_keys) + 2 * tile_keys * words + 2 * tile_keys;
}

TileMass::TileMass(DType dtype, int dim, bool is_max, float* scratch, float soft_cap)
    : m_dim(dim),
      m_is_max(is_max),
      m_kernels(TileKernels::of(dtype == DType::bf16)),
      m_pairs(m_kernels.pairs),
      m_soft_cap(soft_cap * std::sqrt(static_cast<float>(dim))),
      m_words(static_cast<int>(m_pairs ? whole(whole(dim, 2) / 2, 16) : whole(dim, 16))) {
  const auto take = [&](std::int64_t count) {
    float* const taken = scratch;
    scratch += count;
    return taken;
  };
  m_queries = take(tile_rows * m_words);
  m_scores = take(tile_rows * tile_keys);
  m_rows = take(tile_keys * m_words);
  m_keys = take(tile_keys * m_words);
  m_tile_mass = take(tile_keys);
  m_mass = take(tile_keys);
}

void TileMass::begin() {
  m_count = 0;
  m_waiting = 0;
  std::fill_n(m_mass, tile_keys, 0.0f);
}

void TileMass::add_key(const QuantisedRows& keys, std::int64_t row) {
  float* const target = m_rows + std::int64_t{m_count++} * m_words;
  float* const key = m_pairs ? m_scores : target;  // m_scores is free until pack
  std::fill(target + m_dim * (m_pairs ? 0 : 1), target + m_words, 0.0f);
  linalg::unpack_row(keys, row, key);
  if (m_pairs) linalg::narrow(key, reinterpret_cast<bfloat16*>(target), m_dim);
}

void TileMass::pack() {
  const int width = m_kernels.columns;
  const int padded = static_cast<int>(whole(m_count, width));
  std::fill(m_rows + std::int64_t{m_count} * m_words, m_rows + std::int64_t{padded} * m_words,
            0.0f);
  m_kernels.pack(m_rows, padded, m_words, m_keys);
}

void TileMass::add_query(const float* query, std::int64_t dim_stride, int limit, float lse,
                         float factor, const float* row_factors) {
  // Without any weight there are no probabilities.
  if (limit <= 0 || lse == minus_infinity) return;
  float* const target = m_queries + std::int64_t{m_waiting} * m_words;
  if (m_pairs) {
    bfloat16* const row = reinterpret_cast<bfloat16*>(target);
    if (dim_stride == 1) {
      linalg::narrow(query, row, m_dim);
    } else {
      for (int d = 0; d < m_dim; ++d) row[d] = bfloat16(query[d * dim_stride]);
    }
    std::memset(row + m_dim, 0, m_words * sizeof(float) - m_dim * sizeof(bfloat16));
  } else {
    for (int d = 0; d < m_dim; ++d) target[d] = query[d * dim_stride];
    std::fill(target + m_dim, target + m_words, 0.0f);
  }
  m_seen[m_waiting++] = {limit, lse, factor, row_factors};
  if (m_waiting == tile_rows) reduce_queries();
}

void TileMass::reduce_queries() {
  const int R = m_kernels.rows;
  const int width = m_kernels.columns;
  const int words = m_pairs ? (m_dim + 1) / 2 : m_dim;
  const int rows = static_cast<int>(whole(m_waiting, R));
  std::fill(m_queries + std::int64_t{m_waiting} * m_words, m_queries + std::int64_t{rows} * m_words,
            0.0f);
  for (int k = 0; k < m_count; k += width) {
    for (int row = 0; row < rows; row += R) {
      // Later rows see more keys.
      if (m_seen[std::min(row + R, m_waiting) - 1].limit <= k) continue;
      m_kernels.product(words, m_queries + row * m_words, m_words,
                        m_keys + std::int64_t{k} * m_words, m_scores + row * tile_keys + k,
                        tile_keys, nullptr);
    }
  }
  const float scaling = 1.0f / std::sqrt(static_cast<float>(m_dim));
  std::fill_n(m_tile_mass, tile_keys, 0.0f);
  for (int row = 0; row < m_waiting; ++row) {
    const Row& seen = m_seen[row];
    if (m_soft_cap > 0) linalg::soft_cap(m_scores + row * tile_keys, seen.limit, m_soft_cap);
    m_kernels.take_row(m_scores + row * tile_keys, seen.limit, scaling, seen.lse, seen.factor,
                       seen.row_factors, m_is_max, m_tile_mass);
  }
  m_kernels.take_tile(m_tile_mass, m_count, m_is_max, m_mass);
  m_waiting = 0;
}

const float* TileMass::finish() {
  if (m_waiting > 0) reduce_queries();
  return m_mass;
}

}  // namespace kvzap::attention

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
