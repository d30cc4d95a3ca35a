// Prefill attention on the host: tiles of query tokens times tiles of rows, by matrix products that
// are blocked for registers and caches.
#pragma once

#include <cstdint>
#include <kvzap/core/ragged_layer.hpp>

#include "attention/host/load_row.hpp"
#include "attention/host/tile_kernels.hpp"

namespace kvzap::attention {

/// Running softmax of a tile of query tokens over rows of one KV head. Each token has the `group`
/// query heads of that head. Needs the instruction set avx2.
///
/// At avx512_bf16 with bfloat16 rows, queries and exponentials are rounded to bfloat16 (relative
/// error 2^-9 each) and multiplied in pairs; the sum of weights uses the rounded ones. Otherwise
/// rows are widened to float. Sums are float.
class FlashPrefill {
 public:
  /// Whether the instruction set in use suffices.
  static bool available();
  /// Returns the query tokens of a tile.
  static std::int64_t tile_tokens(int group);
  /// Returns the floats of scratch space, a multiple of 16.
  static std::int64_t scratch_size(int group, int dim);

  /// scratch: aligned to 64 bytes.
  /// soft_cap: of scaled scores; 0: none.
  FlashPrefill(DType dtype, int group, int dim, float* scratch, float soft_cap = 0);

  /// Starts a new softmax. queries: (token, group, dim) with the given strides, unscaled; at most
  /// tile_tokens. Token i sees the first visible + i of the rows that follow, less those before row
  /// first_seen + i.
  void begin(const float* queries, std::int64_t tokens, std::int64_t token_stride,
             std::int64_t head_stride, std::int64_t dim_stride, std::int64_t visible,
             std::int64_t first_seen);
  /// Adds rows, whose Value is the type of `dtype`.
  template <class Value>
  void attend(const RowRun<Value>& run) {
    // Rows ahead that are asked for: the processor's own prefetching begins anew in each page.
    constexpr std::int64_t ahead = 8;
    for (std::int64_t r = 0; r < run.rows; ++r) {
      const bool asks = run.dim_stride == 1 && r + ahead < run.rows;
      const auto stage = [&](const Value* source, float* target, int words) {
        for (int d = 0; asks && d < m_dim; d += 64 / static_cast<int>(sizeof(Value))) {
          __builtin_prefetch(source + ahead * run.row_stride + d);
        }
        load_operand(source, run.dim_stride, m_dim, m_pairs, target, words);
      };
      stage(run.keys + r * run.row_stride, m_staging_keys + std::int64_t{m_staged} * m_words,
            m_words);
      stage(run.values + r * run.row_stride, m_staging_values + std::int64_t{m_staged} * m_columns,
            m_columns);
      if (++m_staged == m_tile_keys) attend_staged();
    }
  }

  /// Rotates the queries of begin (RowTurn): the rows that follow are quantised.
  void rotate_queries();
  /// Adds the quantised rows first … first + rows - 1 of a page.
  void attend_quantised(const QuantisedRows& keys, const QuantisedRows& values, std::int64_t first,
                        std::int64_t rows);
  /// Rotates the queries and the sums so far back: no quantised row follows.
  void rotate_back();

  /// Call it after the last row. Writes the output (token, group, dim), and the log-sum-exp (token,
  /// group) unless `lse` is null.
  void finish(float* output, std::int64_t token_stride, std::int64_t head_stride,
              std::int64_t dim_stride, float* lse = nullptr, std::int64_t lse_token_stride = 0,
              std::int64_t lse_head_stride = 0);

 private:
  void load_queries(bool turned);
  void attend_staged();
  /// Counts rows from the end of the staged ones on.
  void pass_staged();
  bool finite_values(int begin, int end) const;
  /// Weighted sums of a row over exactly the staged values that it sees.
  void add_values(std::int64_t row, int first, int limit);

  int m_group;
  int m_dim;
  int m_tile_keys;
  TileKernels m_kernels;
  bool m_pairs;
  float m_soft_cap;  // of unscaled scores
  int m_words;       // 32-bit words of a row of queries or keys, a multiple of 16
  int m_columns;     // of the sums, a multiple of 16
  // The queries of begin, and their strides.
  const float* m_source = nullptr;
  std::int64_t m_token_stride = 0, m_head_stride = 0, m_dim_stride = 1;
  std::int64_t m_tokens = 0;
  std::int64_t m_visible = 0;
  std::int64_t m_first_seen = 0;
  int m_staged = 0;         // rows that wait for their tile to be full
  float* m_queries;         // [row][word]
  float* m_scores;          // [row][key]
  float* m_sums;            // [row][column]
  float* m_maximum;         // [row]
  float* m_weight;          // [row]
  float* m_factor;          // [row]
  float* m_staging_keys;    // [key][word]
  float* m_staging_values;  // [key][column]
  float* m_keys;            // [panel][word][key]
  float* m_values;          // [panel][key or pair][column]
};

}  // namespace kvzap::attention
