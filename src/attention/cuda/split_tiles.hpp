// Sixteen rows of a head at a time in shared memory, as decode attention on tensor cores reads
// them.
#pragma once

#include "attention/device/split_rows.hpp"
#include "attention/softmax.hpp"
#include "base/byte_permute.hpp"
#include "base/cuda/tiles.hpp"

namespace kvzap::attention::cuda {

using namespace base::cuda;  // NOLINT(google-build-using-namespace): all of these kernels' words

inline constexpr int tile_rows = 16;
inline constexpr int piece_bytes = 16;  // of one copy to shared memory

/// Bytes between rows of `bytes` bytes in shared memory: an odd number of pieces, so that eight
/// rows begin in different banks.
KOKKOS_INLINE_FUNCTION constexpr int pitch_of(int bytes) {
  return (bytes / piece_bytes + 1 - bytes / piece_bytes % 2) * piece_bytes;
}

/// The scores of 16 rows: of lane l for query l / 4 in the first two of four elements, and for the
/// rests of the query in the last two; rows 2 (l % 4) and the next, and those 8 further.
using Scores = float[2][4];
/// Weights in the layout of Scores, as a multiplicand.
using Weights = std::uint32_t[4];

/// Copies 16 rows of `pieces` pieces of each array, with `pitch` bytes between rows in shared
/// memory, and zeros for those that do not exist. Lane r knows row r. Up to eight lanes share a
/// row, and each has the same pieces of all its rows, so that it asks for few addresses.
template <int pieces, int pitch, int arrays, class Element>
KVZAP_CUDA void copy_warp_rows(const Element* const (&rows)[arrays], bool exists,
                               std::uint32_t target, int lane) {
  constexpr int of_row = pieces % 8 == 0 ? 8 : pieces % 4 == 0 ? 4 : 2;
  constexpr int at_once = 32 / of_row, in_piece = piece_bytes / sizeof(Element);
  static_assert(pieces % 2 == 0 && tile_rows % at_once == 0);
  const std::uint32_t address = target + lane / of_row * pitch + lane % of_row * piece_bytes;
  KVZAP_UNROLL
  for (int first = 0; first < tile_rows; first += at_once) {
    const int r = first + lane / of_row;
    const bool is_there = of_lane(exists, r);
    KVZAP_UNROLL
    for (int array = 0; array < arrays; ++array) {
      const Element* const source = of_lane(rows[array], r) + lane % of_row * in_piece;
      KVZAP_UNROLL
      for (int piece = 0; piece < pieces; piece += of_row) {
        copy16(address + (array * tile_rows + first) * pitch + piece * piece_bytes,
               source + piece * in_piece, is_there);
      }
    }
  }
}

/// Tiles of rows of type Value, which is half or bfloat16.
template <class Value, int D>
struct WideTiles {
  using Product = Value;
  static constexpr int dim = D;
  static constexpr bool quantised = false;
  static constexpr int row_bytes = 2 * D;
  static constexpr int pitch = pitch_of(row_bytes);
  static constexpr int bytes = 2 * tile_rows * pitch;  // of a tile in shared memory

  WideRows<Value> rows;

  /// The place of a lane's row, in device memory.
  struct Row {
    const Value* key;
    const Value* value;
    std::int64_t stride;
    bool exists, is_whole;
  };

  KVZAP_CUDA Row find(const SplitSpan& span, int head, std::int64_t row, bool exists) const {
    // An address that may be read, for rows that do not exist.
    const auto* const any = reinterpret_cast<const Value*>(rows.addresses);
    Row found{any, any, 1, exists, true};
    if (exists)
      found.is_whole = rows.find(span, head, D, row, found.key, found.value, found.stride);
    return found;
  }

  KVZAP_CUDA void copy(const Row& row, unsigned char* tile, int lane) const {
    if (all_of_warp(row.is_whole)) {
      const Value* const both[] = {row.key, row.value};
      copy_warp_rows<row_bytes / piece_bytes, pitch>(both, row.exists, shared_address(tile), lane);
    } else {
      for (int r = 0; r < tile_rows; ++r) {
        const Value* const key = of_lane(row.key, r);
        const Value* const value = of_lane(row.value, r);
        const auto stride =
            static_cast<std::int64_t>(of_lane(static_cast<long long>(row.stride), r));
        const bool exists = of_lane(row.exists, r);
        auto* const keys = reinterpret_cast<std::uint16_t*>(tile + r * pitch);
        auto* const values = reinterpret_cast<std::uint16_t*>(tile + (tile_rows + r) * pitch);
        for (int d = lane; d < D; d += 32) {
          keys[d] = exists ? key[d * stride].bits : 0;
          values[d] = exists ? value[d * stride].bits : 0;
        }
      }
    }
  }

  /// The dimension that element `e` of pair `pair` of a lane's part of a query has, in step `step`
  /// of 16 dimensions.
  KVZAP_CUDA static int query_dim(int step, int pair, int e, int lane) {
    return 16 * step + 8 * pair + 2 * (lane % 4) + e;
  }
  KVZAP_CUDA static void add_scores(const unsigned char* tile, int lane,
                                    const std::uint32_t (&query)[D / 16][4], Scores& scores) {
    const std::uint32_t at =
        shared_address(tile) + (lane / 16 * 8 + lane % 8) * pitch + lane / 8 % 2 * piece_bytes;
    KVZAP_UNROLL
    for (int step = 0; step < D / 16; ++step) {
      std::uint32_t keys[4];
      load_matrices<false>(keys, at + step * 32);
      multiply<Value>(scores[0], query[step], keys[0], keys[1]);
      multiply<Value>(scores[1], query[step], keys[2], keys[3]);
    }
  }
  KVZAP_CUDA static float key_factor(const unsigned char* /*tile*/, int /*row*/) { return 1; }
  KVZAP_CUDA static float value_factor(const unsigned char* /*tile*/, int /*row*/) { return 1; }
  KVZAP_CUDA static float log_value_factor(const unsigned char* /*tile*/, int /*row*/) { return 0; }
  KVZAP_CUDA static void add_values(const unsigned char* tile, int lane, const Weights& weights,
                                    float (&sums)[D / 8][4]) {
    const std::uint32_t at = shared_address(tile) +
                             (tile_rows + lane / 8 % 2 * 8 + lane % 8) * pitch +
                             lane / 16 * piece_bytes;
    KVZAP_UNROLL
    for (int step = 0; step < D / 16; ++step) {
      std::uint32_t values[4];
      load_matrices<true>(values, at + step * 32);
      multiply<Value>(sums[2 * step], weights, values[0], values[1]);
      multiply<Value>(sums[2 * step + 1], weights, values[2], values[3]);
    }
  }
  /// The dimension of element `e` of a lane's sums `n`.
  KVZAP_CUDA static int value_dim(int n, int e, int lane) { return 8 * n + 2 * (lane % 4) + e; }
};

/// The levels of four codes of 8 bits as pairs of half.
struct Levels8 {
  std::uint32_t pair[2];
  KVZAP_CUDA explicit Levels8(std::uint32_t codes) {
    // 0x6400 + code is 1024 + code in half, and 0x6480 is 1152.
    pair[0] =
        difference_of_pairs<half>(base::permute_bytes(codes, 0x64646464u, 0x4140), 0x64806480u);
    pair[1] =
        difference_of_pairs<half>(base::permute_bytes(codes, 0x64646464u, 0x4342), 0x64806480u);
  }
};

/// The levels of eight codes of 4 bits as pairs of half: of the lower codes of bytes 0 and 2, 1 and
/// 3, and of the upper codes of these.
struct Levels4 {
  std::uint32_t pair[4];
  KVZAP_CUDA explicit Levels4(std::uint32_t codes) {
    // The levels below 0 are those above, in reverse.
    const std::uint32_t negative = ~codes & 0x88888888u;
    const std::uint32_t sizes = (codes ^ (negative - (negative >> 3))) & 0x77777777u;
    const std::uint32_t even = base::permute_bytes(sizes, 0, 0x3120);  // bytes 0, 2, 1, 3
    // The lower and the upper bytes of 6, 18, 31, 44, 58, 75, 96 and 127 in half.
    const std::uint32_t low02 = base::permute_bytes(0x80c08000u, 0xf000b040u, even & 0xffffu);
    const std::uint32_t low13 = base::permute_bytes(0x80c08000u, 0xf000b040u, even >> 16);
    const std::uint32_t high02 = base::permute_bytes(0x514f4c46u, 0x57565453u, even & 0xffffu);
    const std::uint32_t high13 = base::permute_bytes(0x514f4c46u, 0x57565453u, even >> 16);
    // In negative, the signs of a pair are 16 bits apart, as a pair needs them.
    pair[0] = base::permute_bytes(low02, high02, 0x6240) ^ ((negative << 12) & 0x80008000u);
    pair[1] = base::permute_bytes(low13, high13, 0x6240) ^ ((negative << 4) & 0x80008000u);
    pair[2] = base::permute_bytes(low02, high02, 0x7351) ^ ((negative << 8) & 0x80008000u);
    pair[3] = base::permute_bytes(low13, high13, 0x7351) ^ (negative & 0x80008000u);
  }
};

/// Tiles of quantised rows. Levels and weights are multiplied as half, which holds all levels.
template <RowType keys, RowType values, int D>
struct QuantisedTiles {
  using Product = half;
  static constexpr int dim = D;
  static constexpr bool quantised = true;
  static constexpr int key_bytes = keys == RowType::q4 ? D / 2 : D;
  static constexpr int value_bytes = values == RowType::q4 ? D / 2 : D;
  static constexpr int key_pitch = pitch_of(key_bytes), value_pitch = pitch_of(value_bytes);
  static constexpr int values_at = tile_rows * key_pitch;
  static constexpr int factors_at = values_at + tile_rows * value_pitch;
  static constexpr int bytes = factors_at + 3 * 4 * tile_rows;

  QuantisedCodes<keys, values> rows;

  struct Row {
    const std::uint8_t* key;
    const std::uint8_t* value;
    RowScales scales;
    bool exists;
  };

  KVZAP_CUDA Row find(const SplitSpan& span, int head, std::int64_t row, bool exists) const {
    const auto* const any = reinterpret_cast<const std::uint8_t*>(rows.addresses);
    Row found{any, any, {0, 0}, exists};
    if (exists) rows.find(span, head, D, row, found.key, found.value, found.scales);
    return found;
  }
  KVZAP_CUDA void copy(const Row& row, unsigned char* tile, int lane) const {
    const std::uint32_t target = shared_address(tile);
    const std::uint8_t* const of_keys[] = {row.key};
    const std::uint8_t* const of_values[] = {row.value};
    copy_warp_rows<key_bytes / piece_bytes, key_pitch>(of_keys, row.exists, target, lane);
    copy_warp_rows<value_bytes / piece_bytes, value_pitch>(of_values, row.exists,
                                                           target + values_at, lane);
    if (lane < tile_rows) {
      auto* const factors = reinterpret_cast<float*>(tile + factors_at);
      factors[lane] = row.scales.key;
      factors[tile_rows + lane] = row.scales.value;
      // At least -30: weights of rows with tiny values are at most e^30.
      factors[2 * tile_rows + lane] = fmaxf(base::math::log(row.scales.value), -30.0f);
    }
  }

  /// A word of codes has 4 dimensions, or 4 of the lower half and 4 of the upper half.
  KVZAP_CUDA static int query_dim(int step, int pair, int e, int lane) {
    return 16 * step + 4 * (lane % 4) + (keys == RowType::q8 ? 2 * pair + e : pair + 2 * e);
  }
  KVZAP_CUDA static void add_scores(const unsigned char* tile, int lane,
                                    const std::uint32_t (&query)[D / 16][4], Scores& scores) {
    const unsigned char* const row = tile + lane / 4 * key_pitch + 4 * (lane % 4);
    KVZAP_UNROLL
    for (int n = 0; n < 2; ++n) {
      KVZAP_UNROLL
      for (int word = 0; word < key_bytes / 16; ++word) {
        const std::uint32_t codes =
            *reinterpret_cast<const std::uint32_t*>(row + n * 8 * key_pitch + word * 16);
        if constexpr (keys == RowType::q8) {
          const Levels8 levels(codes);
          multiply<half>(scores[n], query[word], levels.pair[0], levels.pair[1]);
        } else {
          const Levels4 levels(codes);
          multiply<half>(scores[n], query[word], levels.pair[0], levels.pair[1]);
          multiply<half>(scores[n], query[word + D / 32], levels.pair[2], levels.pair[3]);
        }
      }
    }
  }
  KVZAP_CUDA static float factor(const unsigned char* tile, int kind, int row) {
    return reinterpret_cast<const float*>(tile + factors_at)[kind * tile_rows + row];
  }
  KVZAP_CUDA static float key_factor(const unsigned char* tile, int row) {
    return factor(tile, 0, row);
  }
  KVZAP_CUDA static float value_factor(const unsigned char* tile, int row) {
    return factor(tile, 1, row);
  }
  KVZAP_CUDA static float log_value_factor(const unsigned char* tile, int row) {
    return factor(tile, 2, row);
  }

  /// A lane's columns of eight sums (q4: sixteen): four dimensions of a word of each of its rows.
  KVZAP_CUDA static void add_values(const unsigned char* tile, int lane, const Weights& weights,
                                    float (&sums)[D / 8][4]) {
    const unsigned char* const row = tile + values_at + 2 * (lane % 4) * value_pitch + lane / 4 * 4;
    KVZAP_UNROLL
    for (int word = 0; word < value_bytes / 32; ++word) {
      std::uint32_t codes[4];
      KVZAP_UNROLL
      for (int r = 0; r < 4; ++r) {
        codes[r] = *reinterpret_cast<const std::uint32_t*>(row + (r / 2 * 8 + r % 2) * value_pitch +
                                                           word * 32);
      }
      // Bytes of pairs of rows, of dimensions 0 and 1, then of 2 and 3, as levels pair them.
      constexpr bool is_q8 = values == RowType::q8;
      constexpr std::uint32_t of_first = is_q8 ? 0x5140u : 0x5410u;
      constexpr std::uint32_t of_second = is_q8 ? 0x7362u : 0x7632u;
      const std::uint32_t first[2] = {base::permute_bytes(codes[0], codes[1], of_first),
                                      base::permute_bytes(codes[2], codes[3], of_first)};
      const std::uint32_t second[2] = {base::permute_bytes(codes[0], codes[1], of_second),
                                       base::permute_bytes(codes[2], codes[3], of_second)};
      if constexpr (is_q8) {
        const Levels8 a(first[0]), b(first[1]), c(second[0]), d(second[1]);
        KVZAP_UNROLL
        for (int i = 0; i < 2; ++i) {
          multiply<half>(sums[4 * word + i], weights, a.pair[i], b.pair[i]);
          multiply<half>(sums[4 * word + 2 + i], weights, c.pair[i], d.pair[i]);
        }
      } else {
        const Levels4 a(first[0]), b(first[1]), c(second[0]), d(second[1]);
        KVZAP_UNROLL
        for (int upper = 0; upper < 2; ++upper) {
          const int n = upper * (D / 16) + 4 * word;
          KVZAP_UNROLL
          for (int i = 0; i < 2; ++i) {
            multiply<half>(sums[n + i], weights, a.pair[2 * upper + i], b.pair[2 * upper + i]);
            multiply<half>(sums[n + 2 + i], weights, c.pair[2 * upper + i], d.pair[2 * upper + i]);
          }
        }
      }
    }
  }
  KVZAP_CUDA static int value_dim(int n, int e, int lane) {
    const int part_dims = values == RowType::q4 ? D / 2 : D;
    const int within = n % (part_dims / 8);  // sums of this half
    return n / (part_dims / 8) * part_dims + within / 4 * 32 + 4 * (2 * (lane % 4) + e) +
           within % 4;
  }
};

}  // namespace kvzap::attention::cuda
