// The quantised rows of prefill attention on tensor cores. Codes of 64 rows are copied to shared
// memory, where threads make a tile of levels of them, which are exact in half. Queries and sums
// are rotated as the rows are.
#pragma once

#include "attention/cuda/flash_sums.hpp"

namespace kvzap::attention::cuda {

/// Values smaller than this power of 2, in a row's largest, count as 0.
inline constexpr float least_log_scale = -60;

/// Where quantised rows of a tile are, and their factors: in shared memory.
struct CodePlaces {
  const std::uint8_t** keys;
  const std::uint8_t** values;
  RowFactors factors;

  KVZAP_CUDA CodePlaces(unsigned char* at, int rows)
      : keys(reinterpret_cast<const std::uint8_t**>(at)), values(keys + rows) {
    auto* const floats = reinterpret_cast<float*>(values + rows);
    factors = {floats, floats + rows, floats + 2 * rows};
  }

  /// Finds row `row` of a head, as row r of the tile. Rows from `end` on weigh nothing.
  KVZAP_CUDA void find(const FlashSpan& span, const QuantisedPlaces& pages, int head, int dim,
                       std::int64_t row, std::int64_t end, int r) const {
    const auto* key = reinterpret_cast<const std::uint8_t*>(pages.addresses);
    const std::uint8_t* value = key;
    RowScales scales{0, 0};
    float log = minus_infinity, inverse = 0;
    if (row < end) {
      pages.find(span.rows, head, dim, row, key, value, scales);
      log = scales.value <= 0x1p-60f ? least_log_scale : base::math::log2(scales.value);
      inverse = base::math::exp2(-log);
    }
    keys[r] = key;
    values[r] = value;
    factors.keys[r] = scales.key;
    factors.logs[r] = log;
    factors.inverses[r] = inverse;
  }
};

/// Makes a tile of levels of copied codes. logs: of rows; those of tiny values become 0. Null: none
/// does. A thread has the same units of all its rows, as in copy_pieces.
template <int D, RowType type>
KVZAP_CUDA void unpack_codes(const unsigned char* codes, const float* logs, unsigned char* tile) {
  using Tiles = FlashTiles<D>;
  constexpr int in_row = type == RowType::q4 ? D / 16 : D / 8;      // units of 8 bytes
  constexpr int of_row = in_row % 16 == 0 ? 16 : in_row & -in_row;  // threads
  constexpr int at_once = 32 * Tiles::warps / of_row;
  static_assert(Tiles::key_rows % at_once == 0);
  const int thread = thread_read_anew(), own_row = thread / of_row, own_unit = thread % of_row;
  const auto* const source =
      reinterpret_cast<const base::Bytes8*>(codes) + own_row * in_row + own_unit;
  unsigned char* const target = tile + own_row * Tiles::pitch + own_unit * sizeof(base::Bytes16);
  KVZAP_UNROLL_BY_4
  for (int first = 0; first < Tiles::key_rows; first += at_once) {
    const bool is_zero = logs && logs[first + own_row] == least_log_scale;
    KVZAP_UNROLL
    for (int unit = 0; unit < in_row; unit += of_row) {
      const base::Bytes8 own = source[first * in_row + unit];
      auto* const levels = reinterpret_cast<base::Bytes16*>(target + first * Tiles::pitch) + unit;
      if constexpr (type == RowType::q8) {
        const Levels8 a(own.word[0]), b(own.word[1]);
        base::Bytes16 all{{a.pair[0], a.pair[1], b.pair[0], b.pair[1]}};
        if (is_zero) all = {{0, 0, 0, 0}};
        *levels = all;
      } else {
        // Levels4 pairs bytes 0 and 2.
        const Levels4 a(base::permute_bytes(own.word[0], 0, 0x3120));
        const Levels4 b(base::permute_bytes(own.word[1], 0, 0x3120));
        base::Bytes16 lower{{a.pair[0], a.pair[1], b.pair[0], b.pair[1]}};
        base::Bytes16 upper{{a.pair[2], a.pair[3], b.pair[2], b.pair[3]}};
        if (is_zero) lower = upper = {{0, 0, 0, 0}};
        levels[0] = lower;
        levels[in_row] = upper;
      }
    }
  }
}

/// Copies and unpacks rows of the type that a format has.
template <int D>
struct CodeTiles {
  const FlashSpan& span;
  const QuantisedPlaces& pages;
  unsigned char* memory;

  using Tiles = FlashTiles<D>;
  // A tile of levels, in the place of keys, serves keys and then values. Codes have that of values.
  static constexpr int tile_at = Tiles::keys_at, codes_at = Tiles::values_at;
  static_assert(D % 32 == 0 && Tiles::places_at - codes_at >= Tiles::key_rows * D);

  KVZAP_CUDA CodePlaces places(std::int32_t first) const {
    return {memory + Tiles::places_of(first), Tiles::key_rows};
  }
  KVZAP_CUDA void copy(RowType type, const std::uint8_t* const* rows, int count) const {
    if (type == RowType::q8) {
      copy_pieces<D, D / piece_bytes, D>(thread_read_anew(), rows, count, memory + codes_at);
    } else {
      copy_pieces<D, D / 2 / piece_bytes, D / 2>(thread_read_anew(), rows, count,
                                                 memory + codes_at);
    }
    commit();
  }
  /// Waits for copied codes and unpacks them. All threads call this.
  KVZAP_CUDA void unpack(RowType type, const float* logs) const {
    wait<0>();
    wait_for_block();  // the codes are there, and the tile is read
    if (type == RowType::q8) {
      unpack_codes<D, RowType::q8>(memory + codes_at, logs, memory + tile_at);
    } else {
      unpack_codes<D, RowType::q4>(memory + codes_at, logs, memory + tile_at);
    }
    wait_for_block();
  }
};

/// Attends the quantised rows of a block, which come before all others: the sums begin here. All
/// threads call this.
template <int D>
KVZAP_CUDA void attend_quantised(const CodeTiles<D>& codes, FlashSums<D>& sums) {
  using Tiles = FlashTiles<D>;
  const FlashSpan& span = codes.span;
  const PageFormat& format = codes.pages.format;
  const TileBlock& block = Tiles::block(codes.memory);
  const std::int32_t begin = block.packed.begin;
  const auto find = [&](std::int32_t first) {
    const int thread = thread_read_anew();
    if (thread >= Tiles::key_rows) return;
    codes.places(first).find(span, codes.pages, block_y_read_anew(), D, first + thread,
                             block.packed.end, thread);
  };
  const auto copy_keys = [&](std::int32_t first) {
    codes.copy(format.keys, codes.places(first).keys, block.packed.end - first);
  };
  load_query_rows<half, D, true>(span, block_y(), block.first_row, codes.memory);
  find(begin);
  wait_for_block();
  copy_keys(begin);
  sums.begin();
  for (std::int32_t first = begin; first < block.packed.end; first += Tiles::key_rows) {
    const std::int32_t next = first + Tiles::key_rows;
    const CodePlaces places = codes.places(first);
    codes.unpack(format.keys, nullptr);
    codes.copy(format.values, places.values, block.packed.end - first);
    if (next < block.packed.end) find(next);
    float scores[Tiles::row_tiles][Tiles::key_rows / 8][4] = {};
    FlashSums<D>::template multiply_keys<half>(codes.memory, scores);
    sums.weigh_quantised(scores, places.factors, span, codes.memory);
    codes.unpack(format.values, places.factors.logs);
    if (next < block.packed.end) copy_keys(next);
    sums.template multiply_values<half, CodeTiles<D>::tile_at>(codes.memory, scores);
  }
  sums.rotate_back(codes.memory);
}

}  // namespace kvzap::attention::cuda
