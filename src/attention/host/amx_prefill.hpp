// Attention over bfloat16 rows with AMX: tiles of query rows against tiles of keys and values.
#pragma once

#include <cstdint>

#include "attention/host/decode_rows.hpp"

namespace kvzap::detail {

/// Running softmax of a tile of query tokens, each with the `group` query heads of one KV head,
/// over rows of that head. Needs the instruction set amx_emulated or amx_bf16; with the latter it
/// is to be used within a TileScope.
///
/// Queries and exponentials are rounded to bfloat16 (relative error 2^-9 each); the weights that
/// are summed are the rounded ones. Sums are kept in float, of weights up to about 2^30. What a
/// query row gets does not depend on the others of its tile, except that a value which is not
/// finite, and which one of its block of 32 sees and another does not, changes the order of their
/// sums.
class AmxPrefill {
 public:
  /// Whether the instruction set in use suffices.
  static bool available();
  /// Query tokens of a tile of a span of so many. Of short spans tiles are smaller, so that there
  /// is work for several threads.
  static std::int64_t tile_tokens(int group, std::int64_t span_tokens);
  static std::int64_t least_tile_tokens(int group);
  /// Floats of scratch space, a multiple of 16.
  static std::int64_t scratch_size(int group, int dim);

  /// scratch: aligned to 64 bytes.
  AmxPrefill(int group, int dim, float* scratch);

  /// Forgets all rows. queries: (token, group, dim) with the given strides, unscaled; at most
  /// tile_tokens. Token i sees the first visible + i >= 1 of the rows that follow.
  void begin(const float* queries, std::int64_t tokens, std::int64_t token_stride,
             std::int64_t head_stride, std::int64_t dim_stride, std::int64_t visible);
  /// The rows must stay as they are until the next begin or the end of a finish.
  void attend(const RowRun<bfloat16>& run);
  /// Writes (token, group, dim) after the last row, and the log-sum-exp (token, group) unless `lse`
  /// is null.
  void finish(float* output, std::int64_t token_stride, std::int64_t head_stride,
              std::int64_t dim_stride, float* lse = nullptr, std::int64_t lse_token_stride = 0,
              std::int64_t lse_head_stride = 0);
  /// The same as RowAttention's, of a tile of one token: what a softmax over these rows and others
  /// is made of. maximum (group): some unscaled score, from which the weights are counted; weight
  /// (group): sum of exp(scaling * (score - maximum)); sums (group, dim): sum of the same times the
  /// value. Where nothing weighs anything, -infinity, 0 and 0.
  void finish(float* maximum, float* weight, float* sums);

 private:
  template <class Tiles>
  struct Kernels;

  // Keys that a tile is packed for.
  static constexpr int tile_keys = 512;

  void attend_staged();
  float* sums_of(std::int64_t row, int column_block) const;
  int limit_of(std::int64_t row) const;
  void copy_sums(std::int64_t row, float factor, float* target, std::int64_t dim_stride) const;
  float total_of(std::int64_t row) const;

  int m_group;
  int m_dim;
  int m_steps;  // of 32 dimensions
  [[maybe_unused]] bool m_emulated;
  float m_scaling;  // of scores, to the exponent of 2
  std::int64_t m_rows = 0;
  std::int64_t m_visible = 0;
  int m_staged = 0;     // rows that wait for their tile to be full
  bool m_first = true;  // no rows but the staged ones so far
  // Tiles lie as they are read: queries [32 rows][step][row half], keys [32 keys][step][key half],
  // values [step][32 keys][column half], scores [32 keys][row half][key half], weights [32 keys]
  // [row half], sums [32 rows][step][row half][column half]. A word of a tile of keys has two dims
  // of a key, one of values two keys of a column.
  char* m_queries;
  char* m_keys;
  char* m_values;
  char* m_scores;
  char* m_weights;
  float* m_sums;
  float* m_totals;     // [row][16 partial sums of weights]
  float* m_shifts;     // [row], exponents of 2; NaN: no score but -infinity seen yet
  bfloat16* m_copies;  // of rows whose dim_stride is not 1: keys, then values
  bfloat16* m_zeros;   // a row
  const bfloat16* m_key_rows[tile_keys];
  const bfloat16* m_value_rows[tile_keys];
};

/// Shapes the calling thread's tile registers for AmxPrefill while it lives, and releases them,
/// where the instruction set in use has them. Other libraries that use AMX (oneDNN) shape them for
/// themselves: to be made in each parallel region.
class TileScope {
 public:
  TileScope();
  ~TileScope();
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;

 private:
  bool m_has_tiles;
};

}  // namespace kvzap::detail
