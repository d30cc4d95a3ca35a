// Prefill attention on tensor cores: tiles of query rows against tiles of keys and values, with an
// online softmax in registers (FlashAttention-2, Dao, arXiv 2307.08691).
#pragma once

#include "attention/cuda/split_tiles.hpp"
#include "base/soft_cap.hpp"
#include "linalg/rounded_rows.hpp"

namespace kvzap::attention::cuda {

/// One span. Query row r is token r / group with query head r % group of a KV head.
struct FlashSpan {
  SplitSpan rows;  // of the span, with all of its new rows
  const float* queries;
  Strides query_strides;
  float* output;
  Strides output_strides;
  float* lse;  // may be null
  std::int64_t lse_row_stride, lse_head_stride;
  std::int32_t first_query, count;     // query rows: tokens * group
  std::int32_t first_seen, more_seen;  // new rows that token 0 sees; that each later one adds
  std::int32_t window;                 // 0: none
  std::int32_t group;
  float soft_cap;  // 0: none
};

/// Tiles of a block: each of its warps has `row_tiles` times 16 query rows.
template <class Value, int D>
struct FlashTiles {
  static constexpr int warps = 4;
  static constexpr int row_tiles = D <= 128 ? 2 : 1;
  static constexpr int warp_rows = 16 * row_tiles;
  static constexpr int query_rows = warps * warp_rows;
  static constexpr int key_rows = 64;
  static constexpr int pitch = pitch_of(2 * D);
  static constexpr int keys_at = query_rows * pitch;
  static constexpr int values_at = keys_at + key_rows * pitch;
  static constexpr int places_at = values_at + key_rows * pitch;
  // Two sets of places of rows: keys, values, distances of dimensions.
  static constexpr int place_bytes = key_rows * 24;
  static constexpr int unscale_at = places_at + 2 * place_bytes;
  static constexpr int flags_at = unscale_at + query_rows * 4;
  static constexpr int bytes = flags_at + 16;
};

/// Where the rows of one tile are: in shared memory.
template <class Value>
struct TilePlaces {
  const Value** keys;
  const Value** values;
  std::int64_t* strides;

  KVZAP_CUDA TilePlaces(unsigned char* at, int rows)
      : keys(reinterpret_cast<const Value**>(at)),
        values(keys + rows),
        strides(reinterpret_cast<std::int64_t*>(values + rows)) {}
};

/// Copies rows of a tile, or zeros for those that do not exist.
template <class Value, int D>
KVZAP_CUDA void copy_rows(const Value* const* rows, const std::int64_t* strides, int count,
                          bool is_whole, unsigned char* target) {
  using Tiles = FlashTiles<Value, D>;
  constexpr int in_row = 2 * D / piece_bytes, threads = 32 * Tiles::warps;
  const int thread = thread_of_block();
  if (is_whole) {
    const std::uint32_t address = shared_address(target);
    KVZAP_UNROLL
    for (int first = 0; first < Tiles::key_rows * in_row; first += threads) {
      const int i = first + thread, r = i / in_row, piece = i % in_row;
      if (Tiles::key_rows * in_row % threads != 0 && r >= Tiles::key_rows) break;
      copy16(address + r * Tiles::pitch + piece * piece_bytes,
             rows[r] + (r < count ? piece * 8 : 0), r < count);
    }
  } else {
    for (int i = thread; i < Tiles::key_rows * D; i += threads) {
      const int r = i / D, d = i % D;
      reinterpret_cast<std::uint16_t*>(target + r * Tiles::pitch)[d] =
          r < count ? rows[r][d * strides[r]].bits : std::uint16_t{0};
    }
  }
}

/// Rounds a warp's query rows to Value, scaled by powers of 2 for half, into shared memory.
template <class Value, int D>
KVZAP_CUDA void load_query_rows(const FlashSpan& span, int head, int first_row,
                                unsigned char* memory) {
  using Tiles = FlashTiles<Value, D>;
  const int warp = warp_of_block(), lane = lane_of_warp();
  auto* const unscale = reinterpret_cast<float*>(memory + Tiles::unscale_at);
  KVZAP_UNROLL_BY_4
  for (int r = warp * Tiles::warp_rows; r < (warp + 1) * Tiles::warp_rows; ++r) {
    const int row = first_row + r;
    const bool exists = row < span.count;
    const float* const query =
        span.queries + (span.first_query + row / span.group) * span.query_strides.row +
        std::int64_t{head * span.group + row % span.group} * span.query_strides.head;
    float x[(D + 31) / 32];
    float largest = 0;
    KVZAP_UNROLL
    for (int i = 0; i < (D + 31) / 32; ++i) {
      const int d = i * 32 + lane;
      x[i] = exists && d < D ? query[d * span.query_strides.dim] : 0.0f;
      largest = fmaxf(largest, fabsf(x[i]));
    }
    float scale = 1, back = 1;
    if constexpr (std::is_same_v<Value, half>) {
      for (int step = 16; step > 0; step /= 2) {
        largest = fmaxf(largest, of_lane(largest, lane ^ step));
      }
      const int shift = linalg::half_shift(largest);
      scale = linalg::power_of_two(shift);
      back = linalg::power_of_two(-shift);
    }
    if (lane == 0) unscale[r] = back;
    auto* const target = reinterpret_cast<std::uint16_t*>(memory + r * Tiles::pitch);
    KVZAP_UNROLL
    for (int i = 0; i < (D + 31) / 32; ++i) {
      const int d = i * 32 + lane;
      if (D % 32 == 0 || d < D) target[d] = Value(x[i] * scale).bits;
    }
  }
}

KVZAP_CUDA std::int32_t smaller(std::int32_t a, std::int32_t b) { return a < b ? a : b; }

struct RowBounds {
  std::int32_t begin, end;
};

/// The rows of a head that the query rows of a block see.
struct SeenBy {
  std::int32_t cached;  // the head's rows before the new ones
  std::int32_t first_row;
  const FlashSpan& span;

  KVZAP_CUDA RowBounds bounds(int own_row) const {
    const int row = first_row + own_row;
    if (row >= span.count) return {0, 0};
    const std::int32_t seen = span.first_seen + span.more_seen * (row / span.group);
    return {span.window > 0 && seen > span.window ? seen - span.window : 0, cached + seen};
  }
};

/// A warp's running softmax over the keys so far. Lane l knows rows l / 4 and l / 4 + 8 of each of
/// its tiles of 16 query rows.
template <class Value, int D>
struct FlashSums {
  using Tiles = FlashTiles<Value, D>;
  static constexpr int tiles = Tiles::row_tiles;

  float values[tiles][D / 8][4] = {};
  float maximum[tiles][2];  // of scores in powers of 2
  float weight[tiles][2] = {};

  KVZAP_CUDA FlashSums() {
    KVZAP_UNROLL
    for (int m = 0; m < tiles; ++m) maximum[m][0] = maximum[m][1] = minus_infinity;
  }

  /// A lane's query row i of tile m, counted in its block.
  KVZAP_CUDA static int row_of(int m, int i) {
    return warp_of_block() * Tiles::warp_rows + m * 16 + i * 8 + lane_of_warp() / 4;
  }

  /// scores = query rows x keys of a tile
  KVZAP_CUDA static void multiply_keys(const unsigned char* memory,
                                       float (&scores)[tiles][Tiles::key_rows / 8][4]) {
    const int warp = warp_of_block(), lane = lane_of_warp();
    const std::uint32_t base = shared_address(memory);
    const std::uint32_t query_at =
        base + (warp * Tiles::warp_rows + lane % 16) * Tiles::pitch + lane / 16 * piece_bytes;
    const std::uint32_t key_at = base + Tiles::keys_at + (lane / 16 * 8 + lane % 8) * Tiles::pitch +
                                 lane / 8 % 2 * piece_bytes;
    KVZAP_UNROLL
    for (int step = 0; step < D / 16; ++step) {
      std::uint32_t query[tiles][4];
      KVZAP_UNROLL
      for (int m = 0; m < tiles; ++m) {
        load_matrices<false>(query[m], query_at + m * 16 * Tiles::pitch + step * 32);
      }
      KVZAP_UNROLL
      for (int n = 0; n < Tiles::key_rows / 16; ++n) {
        std::uint32_t keys[4];
        load_matrices<false>(keys, key_at + n * 16 * Tiles::pitch + step * 32);
        KVZAP_UNROLL
        for (int m = 0; m < tiles; ++m) {
          multiply<Value>(scores[m][2 * n], query[m], keys[0], keys[1]);
          multiply<Value>(scores[m][2 * n + 1], query[m], keys[2], keys[3]);
        }
      }
    }
  }

  /// Turns scores into weights relative to the largest score so far, and rescales the sums. seen:
  /// if some query rows do not see all rows of the tile, which begins at row `first`.
  KVZAP_CUDA void weigh(float (&scores)[tiles][Tiles::key_rows / 8][4], std::int32_t first,
                        const SeenBy* seen, float soft_cap, const unsigned char* memory) {
    const int lane = lane_of_warp();
    constexpr float log2_e = 1.44269504f;
    KVZAP_UNROLL
    for (int m = 0; m < tiles; ++m) {
      KVZAP_UNROLL
      for (int i = 0; i < 2; ++i) {
        float to_power = log2_e / sqrtf(static_cast<float>(D));
        if constexpr (std::is_same_v<Value, half>) {
          to_power *= reinterpret_cast<const float*>(memory + Tiles::unscale_at)[row_of(m, i)];
        }
        if (soft_cap > 0) {
          const float factor = to_power / log2_e;
          KVZAP_UNROLL
          for (int n = 0; n < Tiles::key_rows / 8; ++n) {
            KVZAP_UNROLL
            for (int e = 0; e < 2; ++e) {
              float& s = scores[m][n][2 * i + e];
              s = base::soft_capped(s * factor, soft_cap);
            }
          }
          to_power = log2_e;
        }
        if (seen) {
          const RowBounds bounds = seen->bounds(row_of(m, i));
          const std::int32_t begin = bounds.begin - first - 2 * (lane % 4);
          const std::int32_t end = bounds.end - first - 2 * (lane % 4);
          KVZAP_UNROLL
          for (int n = 0; n < Tiles::key_rows / 8; ++n) {
            KVZAP_UNROLL
            for (int e = 0; e < 2; ++e) {
              if (8 * n + e < begin || 8 * n + e >= end) {
                scores[m][n][2 * i + e] = minus_infinity;
              }
            }
          }
        }
        float largest = minus_infinity;
        KVZAP_UNROLL
        for (int n = 0; n < Tiles::key_rows / 8; ++n) {
          largest = fmaxf(largest, fmaxf(scores[m][n][2 * i], scores[m][n][2 * i + 1]));
        }
        largest = fmaxf(maximum[m][i], largest_of_four(largest) * to_power);
        const float shift = shift_of(largest);
        const float rescale = exp2_approximate(maximum[m][i] - shift);
        maximum[m][i] = largest;
        float sum = 0;
        KVZAP_UNROLL
        for (int n = 0; n < Tiles::key_rows / 8; ++n) {
          KVZAP_UNROLL
          for (int e = 0; e < 2; ++e) {
            float& s = scores[m][n][2 * i + e];
            s = exp2_approximate(s * to_power - shift);
            sum += s;
          }
        }
        weight[m][i] = weight[m][i] * rescale + sum;
        KVZAP_UNROLL
        for (int n = 0; n < D / 8; ++n) {
          values[m][n][2 * i] *= rescale;
          values[m][n][2 * i + 1] *= rescale;
        }
      }
    }
  }

  /// values += weights x values of a tile
  KVZAP_CUDA void multiply_values(const unsigned char* memory,
                                  const float (&weights)[tiles][Tiles::key_rows / 8][4]) {
    const int lane = lane_of_warp();
    const std::uint32_t value_at = shared_address(memory) + Tiles::values_at +
                                   lane % 16 * Tiles::pitch + lane / 16 * piece_bytes;
    KVZAP_UNROLL
    for (int k = 0; k < Tiles::key_rows / 16; ++k) {
      std::uint32_t rounded[tiles][4];
      KVZAP_UNROLL
      for (int m = 0; m < tiles; ++m) {
        KVZAP_UNROLL
        for (int j = 0; j < 2; ++j) {
          const float(&pair)[4] = weights[m][2 * k + j];
          rounded[m][2 * j] = rounded_pair<Value>(pair[0], pair[1]);
          rounded[m][2 * j + 1] = rounded_pair<Value>(pair[2], pair[3]);
        }
      }
      KVZAP_UNROLL
      for (int n = 0; n < D / 16; ++n) {
        std::uint32_t tile[4];
        load_matrices<true>(tile, value_at + k * 16 * Tiles::pitch + n * 32);
        KVZAP_UNROLL
        for (int m = 0; m < tiles; ++m) {
          multiply<Value>(values[m][2 * n], rounded[m], tile[0], tile[1]);
          multiply<Value>(values[m][2 * n + 1], rounded[m], tile[2], tile[3]);
        }
      }
    }
  }

  /// Adds the values of one row, which is left out of the products, for the query rows that see it:
  /// a weight of 0 times a value that is not finite would reach the others.
  KVZAP_CUDA void add_row(const float (&weights)[tiles][Tiles::key_rows / 8][4], int own,
                          std::int32_t first, const SeenBy& seen, const Value* row,
                          std::int64_t stride) {
    const int lane = lane_of_warp();
    KVZAP_UNROLL
    for (int m = 0; m < tiles; ++m) {
      KVZAP_UNROLL
      for (int i = 0; i < 2; ++i) {
        std::uint32_t bits = 0;  // of the lane's weight for the row, picked without an address
        KVZAP_UNROLL
        for (int n = 0; n < Tiles::key_rows / 8; ++n) {
          KVZAP_UNROLL
          for (int e = 0; e < 2; ++e) {
            const std::uint32_t is_own = n == own / 8 && e == own % 2 ? ~0u : 0u;
            bits |= base::float_bits(weights[m][n][2 * i + e]) & is_own;
          }
        }
        const float weight_of_row = base::bits_float(of_lane(bits, lane / 4 * 4 + own % 8 / 2));
        const RowBounds bounds = seen.bounds(row_of(m, i));
        if (first + own < bounds.begin || first + own >= bounds.end) continue;
        KVZAP_UNROLL
        for (int n = 0; n < D / 8; ++n) {
          KVZAP_UNROLL
          for (int e = 0; e < 2; ++e) {
            const int d = 8 * n + 2 * (lane % 4) + e;
            values[m][n][2 * i + e] += weight_of_row * static_cast<float>(row[d * stride]);
          }
        }
      }
    }
  }

  KVZAP_CUDA void store(const FlashSpan& span, int head, int first_row) const {
    const int lane = lane_of_warp();
    constexpr float ln_2 = 0.693147181f;
    KVZAP_UNROLL
    for (int m = 0; m < tiles; ++m) {
      KVZAP_UNROLL
      for (int i = 0; i < 2; ++i) {
        const float sum = sum_of_four(weight[m][i]);
        const int row = first_row + row_of(m, i);
        if (row >= span.count) continue;
        const float inverse = inverse_of(sum);
        const std::int64_t token = span.first_query + row / span.group;
        const std::int64_t query_head = std::int64_t{head * span.group + row % span.group};
        float* const target =
            span.output + token * span.output_strides.row + query_head * span.output_strides.head;
        KVZAP_UNROLL
        for (int n = 0; n < D / 8; ++n) {
          KVZAP_UNROLL
          for (int e = 0; e < 2; ++e) {
            const int d = 8 * n + 2 * (lane % 4) + e;
            target[d * span.output_strides.dim] = values[m][n][2 * i + e] * inverse;
          }
        }
        if (span.lse && lane % 4 == 0) {
          span.lse[token * span.lse_row_stride + query_head * span.lse_head_stride] =
              log_sum_exp(maximum[m][i] * ln_2, sum);
        }
      }
    }
  }
};

/// Finds rows of a tile whose values are not all finite, as bits of two words in shared memory, and
/// puts zeros in their place. All threads call this; returns whether there are any.
template <class Value, int D>
KVZAP_CUDA bool take_out_rows(unsigned char* memory) {
  using Tiles = FlashTiles<Value, D>;
  auto* const flags = reinterpret_cast<unsigned*>(memory + Tiles::flags_at);
  const int thread = thread_of_block();
  if (thread < 2) flags[thread] = 0;
  wait_for_block();
  // Two threads scan a row.
  const int r = thread / 2;
  auto* const row = reinterpret_cast<std::uint32_t*>(memory + Tiles::values_at + r * Tiles::pitch) +
                    thread % 2 * (D / 4);
  constexpr std::uint32_t exponent = std::is_same_v<Value, half> ? 0x7c00u : 0x7f80u;
  bool found = false;
  for (int i = 0; i < D / 4; ++i) {
    const std::uint32_t both = row[i];
    if ((both & exponent) == exponent || (both >> 16 & exponent) == exponent) found = true;
  }
  if (found) set_bits(flags + r / 32, 1u << (r % 32));
  if (!any_of_block(found)) return false;
  if ((flags[r / 32] >> (r % 32) & 1u) != 0) {
    for (int i = 0; i < D / 4; ++i) row[i] = 0;
  }
  wait_for_block();
  return true;
}

/// Block = (tile of query rows, KV head).
template <class Value, int D>
KVZAP_CUDA_KERNEL(128, D <= 128 ? 2 : 1)
attend_tiles(KVZAP_CUDA_ARGUMENT FlashSpan span, KVZAP_CUDA_ARGUMENT WideRows<Value> rows) {
  using Tiles = FlashTiles<Value, D>;
  static_assert(Tiles::warps == 4 && Tiles::key_rows == 64);
  unsigned char* const memory = block_memory();
  const int thread = thread_of_block();
  const int head = block_y();
  // Tiles that see most rows come first.
  const int first_row = (blocks_x() - 1 - block_x()) * Tiles::query_rows;
  const auto cached = static_cast<std::int32_t>(span.rows.retained[head]) + span.rows.ring_rows;
  const SeenBy seen{cached, first_row, span};
  const RowBounds of_first = seen.bounds(0);
  const RowBounds of_last = seen.bounds(smaller(Tiles::query_rows, span.count - first_row) - 1);
  const std::int32_t end = of_last.end;
  const std::int32_t begin = of_first.begin / Tiles::key_rows * Tiles::key_rows;

  const auto places = [&](int i) {
    return TilePlaces<Value>(memory + Tiles::places_at + i % 2 * Tiles::place_bytes,
                             Tiles::key_rows);
  };
  // Finds the rows of tile i; returns whether any is not a sequence of vectors.
  const auto find = [&](int i) {
    const std::int32_t row = begin + i * Tiles::key_rows + thread;
    if (thread >= Tiles::key_rows) return false;
    const TilePlaces<Value> at = places(i);
    const auto* key = reinterpret_cast<const Value*>(rows.addresses);
    const Value* value = key;
    std::int64_t stride = 1;
    const bool is_whole = row >= end || rows.find(span.rows, head, D, row, key, value, stride);
    at.keys[thread] = key;
    at.values[thread] = value;
    at.strides[thread] = stride;
    return !is_whole;
  };
  const auto rows_of = [&](int i) {
    return smaller(Tiles::key_rows, end - begin - i * Tiles::key_rows);
  };

  const int n_tiles = end > begin ? (end - begin + Tiles::key_rows - 1) / Tiles::key_rows : 0;
  bool is_scattered = any_of_block(n_tiles > 0 && find(0));
  if (n_tiles > 0) {
    copy_rows<Value, D>(places(0).keys, places(0).strides, rows_of(0), !is_scattered,
                        memory + Tiles::keys_at);
    commit();
  }
  load_query_rows<Value, D>(span, head, first_row, memory);
  wait_for_block();
  FlashSums<Value, D> sums;
  for (int i = 0; i < n_tiles; ++i) {
    const std::int32_t first = begin + i * Tiles::key_rows;
    const bool is_masked = first + Tiles::key_rows > of_first.end || first < of_last.begin;
    wait<0>();
    wait_for_block();  // the keys are there, and the values of the last tile are read
    copy_rows<Value, D>(places(i).values, places(i).strides, rows_of(i), !is_scattered,
                        memory + Tiles::values_at);
    commit();
    const bool next_scattered = i + 1 < n_tiles && find(i + 1);
    float scores[Tiles::row_tiles][Tiles::key_rows / 8][4] = {};
    sums.multiply_keys(memory, scores);
    sums.weigh(scores, first, is_masked ? &seen : nullptr, span.soft_cap, memory);
    wait<0>();
    // The values are there, and the keys are read.
    is_scattered = any_of_block(next_scattered);
    if (i + 1 < n_tiles) {
      copy_rows<Value, D>(places(i + 1).keys, places(i + 1).strides, rows_of(i + 1), !is_scattered,
                          memory + Tiles::keys_at);
      commit();
    }
    const bool are_left_out = is_masked && take_out_rows<Value, D>(memory);
    sums.multiply_values(memory, scores);
    if (are_left_out) {
      const auto* const flags = reinterpret_cast<const unsigned*>(memory + Tiles::flags_at);
      for (int r = 0; r < rows_of(i); ++r) {
        if ((flags[r / 32] >> (r % 32) & 1u) == 0) continue;
        sums.add_row(scores, r, first, seen, places(i).values[r], places(i).strides[r]);
      }
    }
  }
  sums.store(span, head, first_row);
}

}  // namespace kvzap::attention::cuda
