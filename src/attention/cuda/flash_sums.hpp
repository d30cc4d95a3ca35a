// What a warp of attend_tiles keeps of its query rows, and how tiles of keys and values add to it.
#pragma once

#include "attention/cuda/split_tiles.hpp"
#include "attention/cuda/warp_loops.hpp"
#include "base/soft_cap.hpp"
#include "linalg/device/lane_rows.hpp"
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
  // A head's rows are split among so many blocks. Their results, unless there is one: sums (part,
  // head, query row, dim), then the largest score in powers of 2 and the sum of weights (part,
  // head, query row, 2).
  std::int32_t parts, heads;
  float* partials;

  KVZAP_CUDA std::int64_t partial_row(int part, int head, int row) const {
    return (std::int64_t{part} * heads + head) * count + row;
  }
  /// Returns the largest score and the sum of weights of a row of partials.
  KVZAP_CUDA float* partial_weight(std::int64_t row, int dim) const {
    return partials + std::int64_t{parts} * heads * count * dim + 2 * row;
  }
};

/// Tiles of a block: each of its warps has `row_tiles` times 16 query rows.
template <int D>
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
  // Two sets of places of rows: keys, values, distances of dimensions. For quantised rows: codes of
  // keys and of values, three factors.
  static constexpr int place_bytes = key_rows * 28;
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
  using Tiles = FlashTiles<D>;
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
/// rotates: as quantised rows are rotated, in the place of keys.
template <class Value, int D, bool rotates>
KVZAP_CUDA void load_query_rows(const FlashSpan& span, int head, int first_row,
                                unsigned char* memory) {
  using Tiles = FlashTiles<D>;
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
    }
    if constexpr (rotates) {
      float* const own = reinterpret_cast<float*>(memory + Tiles::keys_at) + warp * D;
      KVZAP_UNROLL
      for (int i = 0; i < (D + 31) / 32; ++i) {
        if (D % 32 == 0 || i * 32 + lane < D) own[i * 32 + lane] = x[i];
      }
      wait_for_warp();
      linalg::rotate_row(WarpLoops{}, own, D);
      KVZAP_UNROLL
      for (int i = 0; i < (D + 31) / 32; ++i) {
        if (D % 32 == 0 || i * 32 + lane < D) x[i] = own[i * 32 + lane];
      }
      wait_for_warp();
    }
    KVZAP_UNROLL
    for (int i = 0; i < (D + 31) / 32; ++i) largest = fmaxf(largest, fabsf(x[i]));
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

/// Where the result of a query row of a head belongs.
struct ResultRow {
  float* output;
  float* lse;  // may be null

  KVZAP_CUDA ResultRow(const FlashSpan& span, int head, int row) {
    const std::int64_t token = span.first_query + row / span.group;
    const std::int64_t query_head = std::int64_t{head * span.group + row % span.group};
    output = span.output + token * span.output_strides.row + query_head * span.output_strides.head;
    lse = span.lse ? span.lse + token * span.lse_row_stride + query_head * span.lse_head_stride
                   : nullptr;
  }
};

inline constexpr float log2_e = 1.44269504f;
inline constexpr float ln_2 = 0.693147181f;

/// Factors of the quantised rows of a tile in shared memory, (row): the scales of keys; the
/// logarithms to base 2 of the scales of values; the inverses of these scales.
struct RowFactors {
  float* keys;
  float* logs;
  float* inverses;
};

/// A warp's running softmax over the keys so far. Lane l knows rows l / 4 and l / 4 + 8 of each of
/// its tiles of 16 query rows.
template <int D>
struct FlashSums {
  using Tiles = FlashTiles<D>;
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

  /// What turns the scores of a lane's query row into powers of 2.
  template <class Value>
  KVZAP_CUDA static float to_power(int m, int i, const unsigned char* memory) {
    const float scale = log2_e / sqrtf(static_cast<float>(D));
    if constexpr (!std::is_same_v<Value, half>) return scale;
    return scale * reinterpret_cast<const float*>(memory + Tiles::unscale_at)[row_of(m, i)];
  }

  /// The elements of a lane's columns 8 n + 2 (l % 4) and the next.
  KVZAP_CUDA static FloatPair pair_of(const float* columns, int n) {
    const auto pair =
        *reinterpret_cast<const base::Bytes8*>(columns + 8 * n + 2 * (lane_of_warp() % 4));
    return {base::bits_float(pair.word[0]), base::bits_float(pair.word[1])};
  }

  /// Turns a lane's scores of one query row into weights relative to its largest score so far, and
  /// rescales its sums. to_power: what turns the scores into powers of 2. inverses: what weights
  /// count times in their sum, by column.
  template <bool has_inverses>
  KVZAP_CUDA void weigh_row(float (&scores)[tiles][Tiles::key_rows / 8][4], int m, int i,
                            float to_power, const float* inverses) {
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
      FloatPair times{1, 1};
      if constexpr (has_inverses) times = pair_of(inverses, n);
      KVZAP_UNROLL
      for (int e = 0; e < 2; ++e) {
        float& s = scores[m][n][2 * i + e];
        s = exp2_approximate(s * to_power - shift);
        sum += s * (e == 0 ? times.lower : times.upper);
      }
    }
    weight[m][i] = weight[m][i] * rescale + sum;
    KVZAP_UNROLL
    for (int n = 0; n < D / 8; ++n) {
      values[m][n][2 * i] *= rescale;
      values[m][n][2 * i + 1] *= rescale;
    }
  }

  /// scores = query rows x keys of a tile
  template <class Value>
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
  template <class Value>
  KVZAP_CUDA void weigh(float (&scores)[tiles][Tiles::key_rows / 8][4], std::int32_t first,
                        const SeenBy* seen, float soft_cap, const unsigned char* memory) {
    const int lane = lane_of_warp();
    KVZAP_UNROLL
    for (int m = 0; m < tiles; ++m) {
      KVZAP_UNROLL
      for (int i = 0; i < 2; ++i) {
        float factor = to_power<Value>(m, i, memory);
        if (soft_cap > 0) {
          factor *= 1 / log2_e;
          KVZAP_UNROLL
          for (int n = 0; n < Tiles::key_rows / 8; ++n) {
            KVZAP_UNROLL
            for (int e = 0; e < 2; ++e) {
              float& s = scores[m][n][2 * i + e];
              s = base::soft_capped(s * factor, soft_cap);
            }
          }
          factor = log2_e;
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
        weigh_row<false>(scores, m, i, factor, nullptr);
      }
    }
  }

  /// The same for quantised rows, which all query rows see. A weight includes its value's scale.
  KVZAP_CUDA void weigh_quantised(float (&scores)[tiles][Tiles::key_rows / 8][4],
                                  const RowFactors& factors, float soft_cap,
                                  const unsigned char* memory) {
    float of_row[tiles][2];
    KVZAP_UNROLL
    for (int m = 0; m < tiles; ++m) {
      KVZAP_UNROLL
      for (int i = 0; i < 2; ++i) of_row[m][i] = to_power<half>(m, i, memory);
    }
    const auto scale = [&](const auto& capped) {
      KVZAP_UNROLL
      for (int n = 0; n < Tiles::key_rows / 8; ++n) {
        const FloatPair keys = pair_of(factors.keys, n), logs = pair_of(factors.logs, n);
        KVZAP_UNROLL
        for (int m = 0; m < tiles; ++m) {
          KVZAP_UNROLL
          for (int i = 0; i < 4; ++i) {
            const float s = scores[m][n][i] * (i % 2 == 0 ? keys.lower : keys.upper);
            scores[m][n][i] = capped(s, of_row[m][i / 2]) + (i % 2 == 0 ? logs.lower : logs.upper);
          }
        }
      }
    };
    if (soft_cap > 0) {
      scale([&](float s, float factor) {
        return log2_e * base::soft_capped(s * factor * (1 / log2_e), soft_cap);
      });
    } else {
      scale([](float s, float factor) { return s * factor; });
    }
    KVZAP_UNROLL
    for (int m = 0; m < tiles; ++m) {
      KVZAP_UNROLL
      for (int i = 0; i < 2; ++i) weigh_row<true>(scores, m, i, 1, factors.inverses);
    }
  }

  /// values += weights x values of the tile at `place`
  template <class Value, int place>
  KVZAP_CUDA void multiply_values(const unsigned char* memory,
                                  const float (&weights)[tiles][Tiles::key_rows / 8][4]) {
    const int lane = lane_of_warp();
    const std::uint32_t value_at =
        shared_address(memory) + place + lane % 16 * Tiles::pitch + lane / 16 * piece_bytes;
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
  template <class Value>
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

  /// Rotates the sums of quantised rows back. All threads call this.
  KVZAP_CUDA void rotate_back(unsigned char* memory) {
    constexpr int stride = D + 8;  // neighbouring rows begin in different banks
    static_assert(Tiles::query_rows * stride * 4 <= Tiles::places_at);
    const int lane = lane_of_warp();
    auto* const rows = reinterpret_cast<float*>(memory);
    wait_for_block();  // all tiles are read
    const auto each = [&](const auto& body) {
      KVZAP_UNROLL
      for (int m = 0; m < tiles; ++m) {
        KVZAP_UNROLL
        for (int i = 0; i < 4; ++i) {
          KVZAP_UNROLL
          for (int n = 0; n < D / 8; ++n) {
            body(rows[row_of(m, i / 2) * stride + 8 * n + 2 * (lane % 4) + i % 2], values[m][n][i]);
          }
        }
      }
    };
    each([](float& place, const float& own) { place = own; });
    wait_for_warp();
    for (int r = 0; r < Tiles::warp_rows; ++r) {
      linalg::rotate_row_back(WarpLoops{}, rows + (warp_of_block() * Tiles::warp_rows + r) * stride,
                              D);
    }
    each([](const float& place, float& own) { own = place; });
    wait_for_block();  // the next tiles may come
  }

  /// Writes results, or those of a part of the rows to span.partials.
  KVZAP_CUDA void store(const FlashSpan& span, int part, int head, int first_row) const {
    const int lane = lane_of_warp();
    KVZAP_UNROLL
    for (int m = 0; m < tiles; ++m) {
      KVZAP_UNROLL
      for (int i = 0; i < 2; ++i) {
        const float sum = sum_of_four(weight[m][i]);
        const int row = first_row + row_of(m, i);
        if (row >= span.count) continue;
        float inverse = 1;
        float* target;
        std::int64_t stride = 1;
        if (span.parts > 1) {
          const std::int64_t own = span.partial_row(part, head, row);
          target = span.partials + own * D;
          if (lane % 4 == 0) {
            float* const of_row = span.partial_weight(own, D);
            of_row[0] = maximum[m][i];
            of_row[1] = sum;
          }
        } else {
          inverse = inverse_of(sum);
          const ResultRow result(span, head, row);
          target = result.output;
          stride = span.output_strides.dim;
          if (result.lse && lane % 4 == 0) *result.lse = log_sum_exp(maximum[m][i] * ln_2, sum);
        }
        KVZAP_UNROLL
        for (int n = 0; n < D / 8; ++n) {
          KVZAP_UNROLL
          for (int e = 0; e < 2; ++e) {
            const int d = 8 * n + 2 * (lane % 4) + e;
            target[d * stride] = values[m][n][2 * i + e] * inverse;
          }
        }
      }
    }
  }
};

/// Finds rows of a tile whose values are not all finite, as bits of two words in shared memory, and
/// puts zeros in their place. All threads call this; returns whether there are any.
template <class Value, int D>
KVZAP_CUDA bool take_out_rows(unsigned char* memory) {
  using Tiles = FlashTiles<D>;
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

}  // namespace kvzap::attention::cuda
