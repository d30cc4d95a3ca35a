// Probabilities of tiles of keys on the host, reduced over all queries.
#pragma once

#include <cstdint>
#include <kvzap/core/quantised_rows.hpp>
#include <kvzap/core/types.hpp>

#include "attention/host/load_row.hpp"
#include "attention/host/tile_kernels.hpp"

namespace kvzap::attention {

/// The attention mass of a tile of one KV head's keys, from any number of queries. Needs the
/// instruction set avx2. It multiplies the same operands as FlashPrefill.
class TileMass {
 public:
  static bool available();
  /// Keys, and query rows (tokens times group), of a tile.
  static constexpr int tile_keys = 512;
  static constexpr int tile_rows = 96;
  /// Returns the floats of scratch space, a multiple of 16.
  static std::int64_t scratch_size(int dim);

  /// scratch: aligned to 64 bytes.
  TileMass(DType dtype, int dim, bool is_max, float* scratch, float soft_cap = 0);

  /// Removes all keys.
  void begin();
  /// Adds a key: dim values of the type of `dtype` that are dim_stride apart. At most tile_keys.
  template <class Value>
  void add_key(const Value* key, std::int64_t dim_stride) {
    load_operand(key, dim_stride, m_dim, m_pairs, m_rows + std::int64_t{m_count++} * m_words,
                 m_words);
  }
  /// Adds the key of a quantised row.
  void add_key(const QuantisedRows& keys, std::int64_t row);
  /// Call it after the last key.
  void pack();
  /// Adds one query row, which sees the first `limit` keys. row_factors: factors of the keys,
  /// contiguous, or null for 1.
  void add_query(const float* query, std::int64_t dim_stride, int limit, float lse, float factor,
                 const float* row_factors);
  /// Returns the mass of the keys.
  const float* finish();

 private:
  void reduce_queries();

  int m_dim;
  bool m_is_max;
  TileKernels m_kernels;
  bool m_pairs;
  float m_soft_cap;    // of unscaled scores; 0: none
  int m_words;         // 32-bit words of a row of queries or keys, a multiple of 16
  int m_count = 0;     // keys
  int m_waiting = 0;   // query rows whose tile is not full
  float* m_queries;    // [row][word]
  float* m_scores;     // [row][key]
  float* m_rows;       // [key][word]
  float* m_keys;       // [panel][word][key]
  float* m_tile_mass;  // [key], of a tile of queries
  float* m_mass;       // [key]
  struct Row {
    int limit;
    float lse, factor;
    const float* row_factors;
  };
  Row m_seen[tile_rows];
};

}  // namespace kvzap::attention
