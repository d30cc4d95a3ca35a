// Attention over rows of 16 bits with AMX: tiles of query rows against tiles of keys and values.
#pragma once

#include <cstdint>

#include "attention/host/decode_rows.hpp"

namespace kvzap::detail {

// What tiles of rows hold, and which of AMX's products takes them. `parts`: tiles that a value is
// the sum of. scales_queries: whether a query row is multiplied by a power of two first.

/// bfloat16 as it is. Queries and exponentials are rounded to it (relative error 2^-9 each).
struct BfloatTiles {
  using Value = bfloat16;
  static constexpr int parts = 1;
  static constexpr bool scales_queries = false;
};

/// half as it is, by the products of AMX-FP16. Queries and exponentials are rounded to half
/// (relative error 2^-11 each): query rows after a power of two has brought their largest finite
/// value near the largest of half, so that values down to 2^-28 of it keep 11 bits and none
/// overflows; exponentials where the largest of a row's first 32, or of what the row's shift was
/// last raised to, weighs 2^6 and any other at most 2^15. Those below 2^-20 of that largest one
/// are rounded by up to 2^-31 of it: with 2^17 keys by 2^-14 of all weights together at the most.
/// (The products take subnormal numbers as they are: Intel's manual on TDPFP16PS.)
struct HalfTiles {
  using Value = half;
  static constexpr int parts = 1;
  static constexpr bool scales_queries = true;
};

/// half where AMX has products of bfloat16 alone: every value is the sum of two bfloat16, which for
/// rows is exact and for queries and exponentials leaves a relative error of 2^-17. Of the four
/// products that of the two low parts, at most 2^-17 of the whole, is left out.
struct SplitHalfTiles {
  using Value = half;
  static constexpr int parts = 2;
  static constexpr bool scales_queries = false;
};

/// Query tokens of a tile of a span of so many. Of short spans tiles are smaller, so that there is
/// work for several threads.
std::int64_t amx_tile_tokens(int group, std::int64_t span_tokens);
std::int64_t amx_least_tile_tokens(int group);

/// Running softmax of a tile of query tokens, each with the `group` query heads of one KV head,
/// over rows of that head. With the instruction sets amx_bf16 and amx_fp16 it is to be used within
/// a TileScope.
///
/// Queries and exponentials are rounded as the format says; the weights that are summed are the
/// rounded ones. Sums are kept in float, of weights up to about 2^30 (half: 2^15). What a query row
/// gets does not depend on the others of its tile, except that a value which is not finite, and
/// which one of its block of 32 sees and another does not, changes the order of their sums.
template <class Format>
class AmxPrefill {
 public:
  using Value = typename Format::Value;

  /// Whether rows take this format with the instruction set in use.
  static bool available();
  /// Floats of scratch space, a multiple of 16.
  static std::int64_t scratch_size(int group, int dim);

  /// scratch: aligned to 64 bytes.
  AmxPrefill(int group, int dim, float* scratch);

  /// Forgets all rows. queries: (token, group, dim) with the given strides, unscaled; at most
  /// amx_tile_tokens. Token i sees the first visible + i >= 1 of the rows that follow.
  void begin(const float* queries, std::int64_t tokens, std::int64_t token_stride,
             std::int64_t head_stride, std::int64_t dim_stride, std::int64_t visible);
  /// The rows must stay as they are until the next begin or the end of a finish.
  void attend(const RowRun<Value>& run);
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
  float scaling_of(std::int64_t row) const {
    return Format::scales_queries ? m_scalings[row] : m_scaling;
  }

  int m_group;
  int m_dim;
  int m_steps;  // of 32 dimensions
  [[maybe_unused]] bool m_emulated;
  float m_scaling;  // of scores, to the exponent of 2
  std::int64_t m_rows = 0;
  std::int64_t m_visible = 0;
  int m_staged = 0;     // rows that wait for their tile to be full
  bool m_first = true;  // no rows but the staged ones so far
  // Tiles lie as they are read: queries [32 rows][step][part][row half], keys [32 keys][step][part]
  // [key half], values [step][32 keys][part][column half], scores [32 keys][row half][key half],
  // weights [32 keys][part][row half], sums [32 rows][step][row half][column half]. A word of a
  // tile of keys has two dims of a key, one of values two keys of a column.
  char* m_queries;
  char* m_keys;
  char* m_values;
  char* m_scores;
  char* m_weights;
  float* m_sums;
  float* m_totals;    // [row][16 partial sums of weights]
  float* m_shifts;    // [row], exponents of 2; NaN: no score but -infinity seen yet
  float* m_scalings;  // [row], m_scaling over the power of two that the query was multiplied by
  Value* m_copies;    // of rows whose dim_stride is not 1: keys, then values
  Value* m_zeros;     // a row
  const Value* m_key_rows[tile_keys];
  const Value* m_value_rows[tile_keys];
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
