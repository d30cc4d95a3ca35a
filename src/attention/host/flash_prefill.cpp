#include "attention/host/flash_prefill.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention/call.hpp"
#include "attention/host/finite.hpp"
#include "attention/host/vector_math.hpp"
#include "attention/softmax.hpp"
#include "base/machine.hpp"
#include "linalg/host/quantised_row_products.hpp"
#include "linalg/host/rotated_rows.hpp"
#include "linalg/host/row_kernels.hpp"

// Within a block of rows that a kernel works on, offsets fit an int.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

namespace kvzap::attention {
namespace {

/// Rows of a tile (query tokens times group) and keys of a tile.
struct TileShape {
  std::int64_t rows;
  int keys;
};

/// With 128 dimensions, queries, scores, sums and quantised keys and values take half a level-2
/// cache of 1 MiB, and one packed panel half a level-1 cache. Processors without AVX-512 have 256
/// KiB or more, enough for the operands of one product.
TileShape tile_shape() {
  return base::machine().has(base::SimdLevel::avx512) ? TileShape{264, 128} : TileShape{192, 96};
}

std::int64_t padded_rows(int group) {
  return whole(std::max<std::int64_t>(tile_shape().rows, group), 12);
}

}  // namespace

bool FlashPrefill::available() { return TileKernels::available(); }

std::int64_t FlashPrefill::tile_tokens(int group) {
  return std::max<std::int64_t>(1, tile_shape().rows / group);
}

std::int64_t FlashPrefill::scratch_size(int group, int dim) {
  const std::int64_t padded = whole(dim, 16);
  const std::int64_t keys = tile_shape().keys;
  return padded_rows(group) * (2 * padded + keys) + 3 * whole(padded_rows(group), 16) +
         4 * keys * padded;
}

FlashPrefill::FlashPrefill(DType dtype, int group, int dim, float* scratch, float soft_cap)
    : m_group(group),
      m_dim(dim),
      m_tile_keys(tile_shape().keys),
      m_kernels(TileKernels::of(dtype == DType::bf16)),
      m_pairs(m_kernels.pairs),
      m_soft_cap(soft_cap * std::sqrt(static_cast<float>(dim))),
      m_words(static_cast<int>(m_pairs ? whole(whole(dim, 2) / 2, 16) : whole(dim, 16))),
      m_columns(static_cast<int>(whole(dim, 16))) {
  const std::int64_t rows = padded_rows(group);
  const std::int64_t padded = m_columns;
  const auto take = [&](std::int64_t count) {
    float* const taken = scratch;
    scratch += count;
    return taken;
  };
  m_queries = take(rows * padded);
  m_sums = take(rows * padded);
  m_scores = take(rows * m_tile_keys);
  m_maximum = take(whole(rows, 16));
  m_weight = take(whole(rows, 16));
  m_factor = take(whole(rows, 16));
  m_staging_keys = take(m_tile_keys * padded);
  m_staging_values = take(m_tile_keys * padded);
  m_keys = take(m_tile_keys * padded);
  m_values = take(m_tile_keys * padded);
}

void FlashPrefill::begin(const float* queries, std::int64_t tokens, std::int64_t token_stride,
                         std::int64_t head_stride, std::int64_t dim_stride, std::int64_t visible,
                         std::int64_t first_seen) {
  m_source = queries;
  m_token_stride = token_stride;
  m_head_stride = head_stride;
  m_dim_stride = dim_stride;
  m_tokens = tokens;
  m_visible = visible;
  m_first_seen = first_seen;
  m_staged = 0;
  const std::int64_t rows = tokens * m_group;
  const std::int64_t padded = whole(rows, m_kernels.rows);
  std::fill_n(m_queries, padded * m_words, 0.0f);
  std::fill_n(m_sums, padded * m_columns, 0.0f);
  std::fill_n(m_maximum, padded, minus_infinity);
  std::fill_n(m_weight, padded, 0.0f);
  std::fill_n(m_factor, padded, 1.0f);
  load_queries(false);
}

void FlashPrefill::load_queries(bool turned) {
  float* const query = m_scores;  // free between tiles
  for (std::int64_t row = 0; row < m_tokens * m_group; ++row) {
    const float* source = m_source + row / m_group * m_token_stride + row % m_group * m_head_stride;
    for (int d = 0; d < m_dim; ++d) query[d] = source[d * m_dim_stride];
    if (turned) linalg::rotate_row(query, m_dim);
    float* const target = m_queries + row * m_words;
    if (m_pairs) {
      linalg::narrow(query, reinterpret_cast<bfloat16*>(target), m_dim);
    } else {
      std::copy_n(query, m_dim, target);
    }
  }
}

void FlashPrefill::rotate_queries() { load_queries(true); }

void FlashPrefill::attend_quantised(const QuantisedRows& keys, const QuantisedRows& values,
                                    std::int64_t first, std::int64_t rows) {
  for (std::int64_t r = first; r < first + rows; ++r) {
    const auto stage = [&](const QuantisedRows& source, float* target, int words) {
      std::fill(target + m_dim * (m_pairs ? 0 : 1), target + words, 0.0f);
      linalg::widen_quantised_row(source, r, m_pairs ? m_scores : target);
      if (m_pairs) linalg::narrow(m_scores, reinterpret_cast<bfloat16*>(target), m_dim);
    };
    stage(keys, m_staging_keys + std::int64_t{m_staged} * m_words, m_words);
    stage(values, m_staging_values + std::int64_t{m_staged} * m_columns, m_columns);
    if (++m_staged == m_tile_keys) attend_staged();
  }
}

void FlashPrefill::rotate_back() {
  if (m_staged > 0) attend_staged();
  for (std::int64_t row = 0; row < m_tokens * m_group; ++row) {
    linalg::rotate_row_back(m_sums + row * m_columns, m_dim);
  }
  load_queries(false);
}

bool FlashPrefill::finite_values(int begin, int end) const {
  const float* const values = m_staging_values + std::int64_t{begin} * m_columns;
  const std::int64_t words = std::int64_t{end - begin} * m_columns;
  if (!m_pairs) return all_finite(values, words);
  return all_finite(reinterpret_cast<const bfloat16*>(values), 2 * words);
}

void FlashPrefill::add_values(std::int64_t row, int first, int limit) {
  if (limit == 0) return;
  float* const sums = m_sums + row * m_columns;
  const float* const weights = m_scores + row * m_tile_keys;
  for (int d = 0; d < m_dim; ++d) {
    float sum = sums[d] * m_factor[row];
    for (int k = first; k < limit; ++k) {
      const float* const values = m_staging_values + std::int64_t{k} * m_columns;
      if (m_pairs) {
        sum += static_cast<float>(reinterpret_cast<const bfloat16*>(weights)[k]) *
               static_cast<float>(reinterpret_cast<const bfloat16*>(values)[d]);
      } else {
        sum += weights[k] * values[d];
      }
    }
    sums[d] = sum;
  }
}

void FlashPrefill::attend_staged() {
  const int keys = m_staged;
  const int R = m_kernels.rows;
  const int width = m_kernels.columns;
  const int words = m_pairs ? (m_dim + 1) / 2 : m_dim;
  const int padded_keys = static_cast<int>(whole(keys, width));
  for (int k = keys; k < padded_keys; ++k) {
    std::fill_n(m_staging_keys + std::int64_t{k} * m_words, m_words, 0.0f);
    std::fill_n(m_staging_values + std::int64_t{k} * m_columns, m_columns, 0.0f);
  }
  m_kernels.pack(m_staging_keys, padded_keys, m_words, m_keys);
  const int steps_of_values = m_pairs ? padded_keys / 2 : padded_keys;
  // Full panels first, the rest in panels of one vector.
  const auto width_at = [&](int column) { return column + width <= m_columns ? width : 16; };
  for (int c = 0; c < m_columns; c += width_at(c)) {
    float* const panel = m_values + std::int64_t{c} * steps_of_values;
    const int own = width_at(c);
    for (int s = 0; s < steps_of_values; ++s) {
      if (m_pairs) {
        const float* even = m_staging_values + std::int64_t{2} * s * m_columns;
        m_kernels.pair_rows(even + c / 2, even + m_columns + c / 2, own, panel + s * own);
      } else {
        std::memcpy(panel + s * own, m_staging_values + std::int64_t{s} * m_columns + c,
                    own * sizeof(float));
      }
    }
  }

  const std::int64_t rows = m_tokens * m_group;
  // Returns the keys of the tile that a row's token sees.
  const auto limit_of = [&](std::int64_t row) {
    return static_cast<int>(std::clamp<std::int64_t>(m_visible + row / m_group, 0, keys));
  };
  // Returns the first of them.
  const auto first_of = [&](std::int64_t row) {
    return static_cast<int>(std::clamp<std::int64_t>(m_first_seen + row / m_group, 0, keys));
  };
  const auto last_limit = [&](std::int64_t row) { return limit_of(std::min(row + R, rows) - 1); };
  for (int k = 0; k < padded_keys; k += width) {
    for (std::int64_t row = 0; row < rows; row += R) {
      if (last_limit(row) <= k) continue;
      m_kernels.product(words, m_queries + row * m_words, m_words,
                        m_keys + std::int64_t{k} * m_words, m_scores + row * m_tile_keys + k,
                        m_tile_keys, nullptr);
    }
  }
  const float scaling = 1.0f / std::sqrt(static_cast<float>(m_dim));
  for (std::int64_t row = 0; row < rows; ++row) {
    const int limit = limit_of(row);
    const int padded = static_cast<int>(whole(last_limit(row / R * R), 32));
    float* const scores = m_scores + row * m_tile_keys;
    if (limit == 0) {
      m_factor[row] = 1;
      std::fill_n(scores, padded, 0.0f);
    } else {
      if (m_soft_cap > 0) linalg::soft_cap(scores, limit, m_soft_cap);
      std::fill_n(scores, first_of(row), minus_infinity);  // scores of weight 0
      m_kernels.online_softmax_row(scores, limit, padded, scaling, m_maximum + row, m_weight + row,
                                   m_factor + row);
    }
  }
  // The products multiply values that a row does not see by 0, which must give 0.
  const int seen_by_all = limit_of(0);
  const int hidden = first_of(rows - 1);
  if ((seen_by_all < keys && !finite_values(seen_by_all, keys)) ||
      (hidden > 0 && !finite_values(0, hidden))) {
    for (std::int64_t row = 0; row < rows; ++row) add_values(row, first_of(row), limit_of(row));
    pass_staged();
    return;
  }
  for (int c = 0; c < m_columns; c += width_at(c)) {
    const auto product = width_at(c) == width ? m_kernels.product : m_kernels.narrow;
    for (std::int64_t row = 0; row < rows; row += R) {
      const int limit = last_limit(row);
      if (limit == 0) continue;
      product(m_pairs ? (limit + 1) / 2 : limit, m_scores + row * m_tile_keys, m_tile_keys,
              m_values + std::int64_t{c} * steps_of_values, m_sums + row * m_columns + c, m_columns,
              m_factor + row);
    }
  }
  pass_staged();
}

void FlashPrefill::pass_staged() {
  m_visible -= m_staged;
  m_first_seen -= m_staged;
  m_staged = 0;
}

void FlashPrefill::finish(float* output, std::int64_t token_stride, std::int64_t head_stride,
                          std::int64_t dim_stride, float* lse, std::int64_t lse_token_stride,
                          std::int64_t lse_head_stride) {
  if (m_staged > 0) attend_staged();
  const float scaling = 1.0f / std::sqrt(static_cast<float>(m_dim));
  for (std::int64_t row = 0; row < m_tokens * m_group; ++row) {
    const std::int64_t token = row / m_group;
    const std::int64_t head = row % m_group;
    float* const target = output + token * token_stride + head * head_stride;
    const float inverse = inverse_of(m_weight[row]);
    for (int d = 0; d < m_dim; ++d) target[d * dim_stride] = m_sums[row * m_columns + d] * inverse;
    if (lse) {
      lse[token * lse_token_stride + head * lse_head_stride] =
          log_sum_exp(m_maximum[row] * scaling, m_weight[row]);
    }
  }
}

}  // namespace kvzap::attention

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
