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
  float soft_cap, inverse_cap;  // 0: none
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

KVZAP_CUDA std::int32_t smaller(std::int32_t a, std::int32_t b) { return a < b ? a : b; }

struct RowBounds {
  std::int32_t begin, end;
};

/// The work of a block. It is in shared memory, and read once a tile or at the end: the sums take
/// the registers.
struct TileBlock {
  std::int32_t part, first_row;
  RowBounds packed, wide;  // the rows of its tiles, quantised and others
  RowBounds seen_by_all;   // of the others: those that all of its query rows see
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
  static constexpr int bounds_at = unscale_at + query_rows * 4;  // RowBounds of query rows
  static constexpr int flags_at = bounds_at + query_rows * 8;
  static constexpr int block_at = flags_at + 8;
  static constexpr int bytes = block_at + 40;
  static_assert(sizeof(TileBlock) == 32 && bytes % 16 == 0);

  KVZAP_CUDA static TileBlock& block(unsigned char* memory) {
    return *reinterpret_cast<TileBlock*>(memory + block_at);
  }
  KVZAP_CUDA static RowBounds* bounds(unsigned char* memory) {
    return reinterpret_cast<RowBounds*>(memory + bounds_at);
  }
  /// Where the places of the rows of the tile at row `first` are: neighbouring tiles have two sets.
  KVZAP_CUDA static int places_of(std::int32_t first) {
    return places_at + first / key_rows % 2 * place_bytes;
  }
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

/// Copies `count` rows of a tile, each of `pieces` pieces, and zeros for its other rows.
/// Neighbouring threads copy neighbouring pieces. A thread has the same pieces of all its rows, so
/// that it keeps one address.
template <int D, int pieces, int pitch, class Element>
KVZAP_CUDA void copy_pieces(int thread, const Element* const* rows, int count,
                            unsigned char* target) {
  constexpr int key_rows = FlashTiles<D>::key_rows, threads = 32 * FlashTiles<D>::warps;
  constexpr int of_row = pieces % 8 == 0 ? 8 : pieces % 4 == 0 ? 4 : pieces;  // threads
  constexpr int at_once = threads / of_row, in_piece = piece_bytes / sizeof(Element);
  const int own_row = thread / of_row, own_piece = thread % of_row;
  if (threads % of_row != 0 && own_row >= at_once) return;
  const std::uint32_t address = shared_address(target) + own_row * pitch + own_piece * piece_bytes;
  KVZAP_UNROLL
  for (int first = 0; first < key_rows; first += at_once) {
    const int r = first + own_row;
    if (key_rows % at_once != 0 && r >= key_rows) break;
    const Element* const source = rows[r] + own_piece * in_piece;
    KVZAP_UNROLL
    for (int piece = 0; piece < pieces; piece += of_row) {
      copy16(address + first * pitch + piece * piece_bytes, source + piece * in_piece, r < count);
    }
  }
}

/// Copies rows of a tile, or zeros for those that do not exist.
template <class Value, int D>
KVZAP_CUDA void copy_rows(const Value* const* rows, const std::int64_t* strides, int count,
                          bool is_whole, unsigned char* target) {
  using Tiles = FlashTiles<D>;
  if (is_whole) {
    copy_pieces<D, 2 * D / piece_bytes, Tiles::pitch>(thread_of_block(), rows, count, target);
  } else {
    const int thread = thread_read_anew();
    for (int r = thread / 32; r < Tiles::key_rows; r += Tiles::warps) {
      auto* const row = reinterpret_cast<std::uint16_t*>(target + r * Tiles::pitch);
      for (int d = thread % 32; d < D; d += 32) {
        row[d] = r < count ? rows[r][d * strides[r]].bits : std::uint16_t{0};
      }
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

/// The rows of a head that the query rows of a block see.
struct SeenBy {
  const FlashSpan& span;
  std::int32_t cached;  // the head's rows before the new ones
  std::int32_t first_row;

  KVZAP_CUDA SeenBy(const FlashSpan& of, int head, std::int32_t row)
      : span(of),
        cached(static_cast<std::int32_t>(of.rows.retained[head]) + of.rows.ring_rows),
        first_row(row) {}

  KVZAP_CUDA RowBounds bounds(int own_row) const {
    const int row = first_row + own_row;
    if (row >= span.count) return {0, 0};
    const std::int32_t seen = span.first_seen + span.more_seen * (row / span.group);
    return {span.window > 0 && seen > span.window ? seen - span.window : 0, cached + seen};
  }
  /// Of the last of `rows` query rows that exists.
  KVZAP_CUDA RowBounds last(int rows) const {
    return bounds(smaller(rows, span.count - first_row) - 1);
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

  float values[tiles][D / 8][4];
  float maximum[tiles][2];  // of scores in powers of 2
  float weight[tiles][2];

  /// Sums of no rows.
  KVZAP_CUDA void begin() {
    KVZAP_UNROLL
    for (int m = 0; m < tiles; ++m) {
      KVZAP_UNROLL
      for (int i = 0; i < 2; ++i) {
        maximum[m][i] = minus_infinity;
        weight[m][i] = 0;
      }
      KVZAP_UNROLL
      for (int n = 0; n < D / 8; ++n) {
        KVZAP_UNROLL
        for (float& value : values[m][n]) value = 0;
      }
    }
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

  /// Turns scores into weights relative to the largest score so far, and rescales the sums.
  /// is_masked: some query rows do not see all rows of the tile, which begins at row `first`.
  template <class Value>
  KVZAP_CUDA void weigh(float (&scores)[tiles][Tiles::key_rows / 8][4], std::int32_t first,
                        bool is_masked, const FlashSpan& span, unsigned char* memory) {
    const int lane = lane_of_warp();
    KVZAP_UNROLL
    for (int m = 0; m < tiles; ++m) {
      KVZAP_UNROLL
      for (int i = 0; i < 2; ++i) {
        float factor = to_power<Value>(m, i, memory);
        if (span.soft_cap > 0) {
          factor *= 1 / log2_e;
          KVZAP_UNROLL
          for (int n = 0; n < Tiles::key_rows / 8; ++n) {
            KVZAP_UNROLL
            for (int e = 0; e < 2; ++e) {
              float& s = scores[m][n][2 * i + e];
              s = base::soft_capped(s * factor, span.soft_cap, span.inverse_cap);
            }
          }
          factor = log2_e;
        }
        if (is_masked) {
          const RowBounds bounds = Tiles::bounds(memory)[row_of(m, i)];
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
                                  const RowFactors& factors, const FlashSpan& span,
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
    if (span.soft_cap > 0) {
      scale([&](float s, float factor) {
        return log2_e *
               base::soft_capped(s * factor * (1 / log2_e), span.soft_cap, span.inverse_cap);
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

  /// Adds the values of row `own` of a tile for the query rows that see it: products leave the row
  /// out, where a weight of 0 times a value that is not finite would reach the others.
  template <class Value>
  KVZAP_CUDA void add_row(const float (&weights)[tiles][Tiles::key_rows / 8][4], int own,
                          std::int32_t first, unsigned char* memory) {
    const int lane = lane_of_warp();
    float of_row[tiles][2];
    bool is_seen[tiles][2];
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
        of_row[m][i] = base::bits_float(of_lane(bits, lane / 4 * 4 + own % 8 / 2));
        const RowBounds bounds = Tiles::bounds(memory)[row_of(m, i)];
        is_seen[m][i] = first + own >= bounds.begin && first + own < bounds.end;
      }
    }
    const unsigned char* const row =
        memory + Tiles::values_at + own * Tiles::pitch + 4 * (lane % 4);
    KVZAP_UNROLL
    for (int n = 0; n < D / 8; ++n) {
      const FloatPair pair =
          floats_of<Value>(*reinterpret_cast<const std::uint32_t*>(row + n * piece_bytes));
      KVZAP_UNROLL
      for (int m = 0; m < tiles; ++m) {
        KVZAP_UNROLL
        for (int i = 0; i < 2; ++i) {
          if (!is_seen[m][i]) continue;
          values[m][n][2 * i] += of_row[m][i] * pair.lower;
          values[m][n][2 * i + 1] += of_row[m][i] * pair.upper;
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

/// The rows of a tile whose values are not all finite: bits of two words in shared memory, which
/// two threads a row find.
template <class Value, int D>
struct NonFiniteRows {
  using Tiles = FlashTiles<D>;
  unsigned char* memory;

  KVZAP_CUDA unsigned* flags() const {
    return reinterpret_cast<unsigned*>(memory + Tiles::flags_at);
  }
  KVZAP_CUDA bool has(int r) const { return (flags()[r / 32] >> (r % 32) & 1u) != 0; }
  /// A thread's half of its row, in pairs.
  KVZAP_CUDA std::uint32_t* own_half() const {
    const int thread = thread_read_anew();
    return reinterpret_cast<std::uint32_t*>(memory + Tiles::values_at + thread / 2 * Tiles::pitch) +
           thread % 2 * (D / 4);
  }

  /// Returns whether there are any. All threads call this.
  KVZAP_CUDA bool find() const {
    const int thread = thread_read_anew();
    if (thread < 2) flags()[thread] = 0;
    wait_for_block();
    constexpr std::uint32_t exponent = std::is_same_v<Value, half> ? 0x7c00u : 0x7f80u;
    bool found = false;
    const std::uint32_t* const own = own_half();
    for (int i = 0; i < D / 4; ++i) {
      const std::uint32_t both = own[i];
      if ((both & exponent) == exponent || (both >> 16 & exponent) == exponent) found = true;
    }
    const int r = thread_read_anew() / 2;
    if (found) set_bits(flags() + r / 32, 1u << (r % 32));
    return any_of_block(found);
  }
  /// Puts zeros in their place. All threads call this.
  KVZAP_CUDA void clear() const {
    wait_for_block();  // they are read
    if (has(thread_read_anew() / 2)) {
      std::uint32_t* const own = own_half();
      for (int i = 0; i < D / 4; ++i) own[i] = 0;
    }
    wait_for_block();
  }
};

}  // namespace kvzap::attention::cuda
