// Attention over rows of 16 bits with AMX: tiles of query rows times tiles of keys and values.
#pragma once

#include <cstdint>

#include "attention/host/decode_rows.hpp"

namespace kvzap::attention {

// Formats of rows in tiles, each with its AMX product. `parts`: number of tiles whose sum is a
// value. scales_queries: each query row is first multiplied by a power of two.

/// bfloat16 unchanged. Queries and exponentials are rounded to it (relative error 2^-9 each).
struct BfloatTiles {
  using Value = bfloat16;
  static constexpr int parts = 1;
  static constexpr bool scales_queries = false;
};

/// half unchanged, by the products of AMX-FP16. Queries and exponentials are rounded to half
/// (relative error 2^-11 each). A power of two first scales each query row so that its largest
/// finite value is near the largest of half. Then values down to 2^-28 of it keep 11 bits and none
/// overflows.
///
/// Exponentials are scaled so that the largest of a row's first 32 weighs 2^6; after the row's
/// shift was raised, the largest at that time does. Any other weighs at most 2^15. Exponentials
/// below 2^-20 of that largest one are rounded by up to 2^-31 of it: with 2^17 keys by at most
/// 2^-14 of all weights together. (The products take subnormal numbers unchanged: Intel's manual on
/// TDPFP16PS.)
struct HalfTiles {
  using Value = half;
  static constexpr int parts = 1;
  static constexpr bool scales_queries = true;
};

/// half on processors whose AMX multiplies only bfloat16. Every value is the sum of two bfloat16:
/// exact for rows, with a relative error of 2^-17 for queries and exponentials. The product of the
/// two low parts, at most 2^-17 of the whole, is left out.
struct SplitHalfTiles {
  using Value = half;
  static constexpr int parts = 2;
  static constexpr bool scales_queries = false;
};

/// Returns the query tokens of a tile, for spans of this length. Short spans have smaller tiles, so
/// that several threads have work.
std::int64_t amx_tile_tokens(int group, std::int64_t span_tokens);
std::int64_t amx_least_tile_tokens(int group);

/// Running softmax of a tile of query tokens over rows of one KV head. Each token has the `group`
/// query heads of that head. With the instruction sets amx_bf16 and amx_fp16, use it only within a
/// TileScope.
///
/// Queries and exponentials are rounded as the format says; the sum of weights uses the rounded
/// ones. Sums are float, of weights up to about 2^30 (half: 2^15). The result of a query row does
/// not depend on other rows of its tile, with one exception. If a value is not finite, and one row
/// of a block of 32 sees it and another does not, the order of sums changes for that block.
template <class Format>
class AmxPrefill {
 public:
  using Value = typename Format::Value;

  /// Whether the instruction set in use has this format.
  static bool available();
  /// Returns the floats of scratch space, a multiple of 16.
  static std::int64_t scratch_size(int group, int dim);

  /// scratch: aligned to 64 bytes.
  /// soft_cap: of scaled scores; 0: none.
  AmxPrefill(int group, int dim, float* scratch, float soft_cap = 0);

  /// Starts a new softmax. queries: (token, group, dim) with the given strides, unscaled; at most
  /// amx_tile_tokens. Token i sees the first visible + i >= 1 of the rows that follow.
  void begin(const float* queries, std::int64_t tokens, std::int64_t token_stride,
             std::int64_t head_stride, std::int64_t dim_stride, std::int64_t visible);
  /// Adds rows. They must stay unchanged until the next begin or the end of finish.
  void attend(const RowRun<Value>& run);
  /// Call it after the last row. Writes the output (token, group, dim), and the log-sum-exp (token,
  /// group) unless `lse` is null.
  void finish(float* output, std::int64_t token_stride, std::int64_t head_stride,
              std::int64_t dim_stride, float* lse = nullptr, std::int64_t lse_token_stride = 0,
              std::int64_t lse_head_stride = 0);
  /// Returns the same result as RowAttention, for a tile of one token: partial softmaxes, which can
  /// be merged with those over other rows. maximum (group): an unscaled score to which the weights
  /// are relative. weight (group): sum of exp(scaling * (score - maximum)). sums (group, dim): sum
  /// of the same times the value. If no row has any weight: -infinity, 0 and 0.
  void finish(float* maximum, float* weight, float* sums);

 private:
  template <class Tiles>
  struct Kernels;

  // Keys that a packed tile has.
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
  float m_scaling;  // of scores, for powers of 2
  float m_soft_cap;
  std::int64_t m_rows = 0;
  std::int64_t m_visible = 0;
  int m_staged = 0;     // rows that wait for their tile to be full
  bool m_first = true;  // only staged rows so far
  // Tiles are stored in the order of reading:
  // - queries [32 rows][step][part][row half]
  // - keys [32 keys][step][part][key half]
  // - values [step][32 keys][part][column half]
  // - scores [32 keys][row half][key half]
  // - weights [32 keys][part][row half]
  // - sums [32 rows][step][row half][column half]
  //
  // A word of a tile of keys has two dims of a key; one of values has two keys of a column.
  char* m_queries;
  char* m_keys;
  char* m_values;
  char* m_scores;
  char* m_weights;
  float* m_sums;
  float* m_totals;    // [row][16 partial sums of weights]
  float* m_shifts;    // [row], exponents of 2; NaN: only scores of -infinity so far
  float* m_scalings;  // [row], m_scaling divided by the power of two of the query
  Value* m_copies;    // of rows whose dim_stride is not 1: keys, then values
  Value* m_zeros;     // a row
  const Value* m_key_rows[tile_keys];
  const Value* m_value_rows[tile_keys];
};

/// Configures the calling thread's tile registers for AmxPrefill in its constructor and releases
/// them in its destructor, if the instruction set in use has them. Other libraries that use AMX
/// (oneDNN) configure them differently: make a TileScope in each parallel region.
class TileScope {
 public:
  TileScope();
  ~TileScope();
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;

 private:
  bool m_has_tiles;
};

}  // namespace kvzap::attention
