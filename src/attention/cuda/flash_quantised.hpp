// The quantised rows of prefill attention on tensor cores. Codes of 64 rows are copied to shared
// memory, where threads make a tile of levels of them, which are exact in half. Queries and sums
// are rotated as the rows are.
#pragma once

#include "attention/cuda/flash_sums.hpp"

namespace kvzap::attention::cuda {

/// Tiles of a head that a block attends: `count` tiles, of rows from `begin` on and before `end`.
struct TileRange {
  std::int32_t begin, end;
  int count;
};

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

/// Copies the codes of a tile's rows, which have `bytes` bytes each, one after the other.
template <int D, int bytes>
KVZAP_CUDA void copy_codes(const std::uint8_t* const* rows, int count, unsigned char* target) {
  constexpr int in_row = bytes / piece_bytes, pieces = FlashTiles<D>::key_rows * in_row;
  constexpr int threads = 32 * FlashTiles<D>::warps;
  const std::uint32_t address = shared_address(target);
  KVZAP_UNROLL
  for (int first = 0; first < pieces; first += threads) {
    const int i = first + thread_of_block(), r = i / in_row, piece = i % in_row;
    if (pieces % threads != 0 && i >= pieces) break;
    copy16(address + i * piece_bytes, rows[r] + (r < count ? piece * piece_bytes : 0), r < count);
  }
}

/// Makes a tile of levels of copied codes. logs: of rows; those of tiny values become 0. Null: none
/// does.
template <int D, RowType type>
KVZAP_CUDA void unpack_codes(const unsigned char* codes, const float* logs, unsigned char* tile) {
  using Tiles = FlashTiles<D>;
  constexpr int in_row = type == RowType::q4 ? D / 16 : D / 8;  // units of 8 bytes
  constexpr int units = Tiles::key_rows * in_row, threads = 32 * Tiles::warps;
  static_assert(units % threads == 0);
  KVZAP_UNROLL_BY_4
  for (int first = 0; first < units; first += threads) {
    const int i = first + thread_of_block(), r = i / in_row;
    const base::Bytes8 own = reinterpret_cast<const base::Bytes8*>(codes)[i];
    auto* const target = reinterpret_cast<base::Bytes16*>(tile + r * Tiles::pitch) + i % in_row;
    const bool is_zero = logs && logs[r] == least_log_scale;
    if constexpr (type == RowType::q8) {
      const Levels8 a(own.word[0]), b(own.word[1]);
      base::Bytes16 levels{{a.pair[0], a.pair[1], b.pair[0], b.pair[1]}};
      if (is_zero) levels = {{0, 0, 0, 0}};
      *target = levels;
    } else {
      // Levels4 pairs bytes 0 and 2.
      const Levels4 a(base::permute_bytes(own.word[0], 0, 0x3120));
      const Levels4 b(base::permute_bytes(own.word[1], 0, 0x3120));
      base::Bytes16 lower{{a.pair[0], a.pair[1], b.pair[0], b.pair[1]}};
      base::Bytes16 upper{{a.pair[2], a.pair[3], b.pair[2], b.pair[3]}};
      if (is_zero) lower = upper = {{0, 0, 0, 0}};
      target[0] = lower;
      target[in_row] = upper;
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

  KVZAP_CUDA CodePlaces places(int i) const {
    return {memory + Tiles::places_at + i % 2 * Tiles::place_bytes, Tiles::key_rows};
  }
  KVZAP_CUDA void copy(RowType type, const std::uint8_t* const* rows, int count) const {
    if (type == RowType::q8) {
      copy_codes<D, D>(rows, count, memory + codes_at);
    } else {
      copy_codes<D, D / 2>(rows, count, memory + codes_at);
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

/// Attends quantised rows of a head, which come before all others. All threads call this.
template <int D>
KVZAP_CUDA void attend_quantised(const CodeTiles<D>& codes, int head, int first_row,
                                 const TileRange& range, FlashSums<D>& sums) {
  using Tiles = FlashTiles<D>;
  const FlashSpan& span = codes.span;
  const PageFormat& format = codes.pages.format;
  const int thread = thread_of_block();
  const auto find = [&](int i) {
    if (thread >= Tiles::key_rows) return;
    codes.places(i).find(span, codes.pages, head, D, range.begin + i * Tiles::key_rows + thread,
                         range.end, thread);
  };
  const auto rows_of = [&](int i) {
    return smaller(Tiles::key_rows, range.end - range.begin - i * Tiles::key_rows);
  };
  load_query_rows<half, D, true>(span, head, first_row, codes.memory);
  find(0);
  wait_for_block();
  codes.copy(format.keys, codes.places(0).keys, rows_of(0));
  for (int i = 0; i < range.count; ++i) {
    const CodePlaces places = codes.places(i);
    codes.unpack(format.keys, nullptr);
    codes.copy(format.values, places.values, rows_of(i));
    if (i + 1 < range.count) find(i + 1);
    float scores[Tiles::row_tiles][Tiles::key_rows / 8][4] = {};
    FlashSums<D>::template multiply_keys<half>(codes.memory, scores);
    sums.weigh_quantised(scores, places.factors, span.soft_cap, codes.memory);
    codes.unpack(format.values, places.factors.logs);
    if (i + 1 < range.count) {
      codes.copy(format.keys, codes.places(i + 1).keys, rows_of(i + 1));
    }
    sums.template multiply_values<half, CodeTiles<D>::tile_at>(codes.memory, scores);
  }
  sums.rotate_back(codes.memory);
}

}  // namespace kvzap::attention::cuda
