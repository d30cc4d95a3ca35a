// Prefill attention on tensor cores: tiles of query rows against tiles of keys and values, with an
// online softmax in registers (FlashAttention-2, Dao, arXiv 2307.08691).
#pragma once

#include "attention/cuda/flash_quantised.hpp"

namespace kvzap::attention::cuda {

/// Attends rows of type Value: all rows of a head, or those after its quantised ones. All threads
/// call this.
template <class Value, int D>
KVZAP_CUDA void attend_wide(const FlashSpan& span, const WideRows<Value>& rows, const SeenBy& seen,
                            int head, const TileRange& range, FlashSums<D>& sums) {
  using Tiles = FlashTiles<D>;
  static_assert(Tiles::warps == 4 && Tiles::key_rows == 64);
  unsigned char* const memory = block_memory();
  const int thread = thread_of_block(), n_tiles = range.count;
  const std::int32_t begin = range.begin, end = range.end, first_row = seen.first_row;
  const RowBounds of_first = seen.bounds(0);
  const RowBounds of_last = seen.bounds(smaller(Tiles::query_rows, span.count - first_row) - 1);

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

  bool is_scattered = any_of_block(n_tiles > 0 && find(0));
  if (n_tiles > 0) {
    copy_rows<Value, D>(places(0).keys, places(0).strides, rows_of(0), !is_scattered,
                        memory + Tiles::keys_at);
    commit();
  }
  load_query_rows<Value, D, false>(span, head, first_row, memory);
  wait_for_block();
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
    FlashSums<D>::template multiply_keys<Value>(memory, scores);
    sums.template weigh<Value>(scores, first, is_masked ? &seen : nullptr, span.soft_cap, memory);
    wait<0>();
    // The values are there, and the keys are read.
    is_scattered = any_of_block(next_scattered);
    if (i + 1 < n_tiles) {
      copy_rows<Value, D>(places(i + 1).keys, places(i + 1).strides, rows_of(i + 1), !is_scattered,
                          memory + Tiles::keys_at);
      commit();
    }
    const bool are_left_out = is_masked && take_out_rows<Value, D>(memory);
    sums.template multiply_values<Value, Tiles::values_at>(memory, scores);
    if (are_left_out) {
      const auto* const flags = reinterpret_cast<const unsigned*>(memory + Tiles::flags_at);
      for (int r = 0; r < rows_of(i); ++r) {
        if ((flags[r / 32] >> (r % 32) & 1u) == 0) continue;
        sums.template add_row<Value>(scores, r, first, seen, places(i).values[r],
                                     places(i).strides[r]);
      }
    }
  }
}

/// Block = (part of the rows of a tile of query rows, KV head). Parts are runs of tiles: those of
/// quantised rows, if there are any, then those of the others.
template <class Value, int D, bool quantised>
KVZAP_CUDA_KERNEL(128, D <= 128 ? 2 : 1)
attend_tiles(KVZAP_CUDA_ARGUMENT FlashSpan span, KVZAP_CUDA_ARGUMENT WideRows<Value> rows,
             KVZAP_CUDA_ARGUMENT QuantisedPlaces pages) {
  using Tiles = FlashTiles<D>;
  constexpr std::int32_t key_rows = Tiles::key_rows;
  const int head = block_y(), part = block_x() % span.parts;
  const int n_tiles = blocks_x() / span.parts;
  // Tiles that see most rows come first.
  const int first_row = (n_tiles - 1 - block_x() / span.parts) * Tiles::query_rows;
  const auto retained = static_cast<std::int32_t>(span.rows.retained[head]);
  const SeenBy seen{retained + span.rows.ring_rows, first_row, span};
  const std::int32_t end = seen.bounds(smaller(Tiles::query_rows, span.count - first_row) - 1).end;
  const std::int32_t begin = quantised ? retained : seen.bounds(0).begin / key_rows * key_rows;

  // Tiles of quantised rows and all tiles; the part's tiles.
  const int packed = quantised ? (retained + key_rows - 1) / key_rows : 0;
  const int all = packed + (end > begin ? (end - begin + key_rows - 1) / key_rows : 0);
  const auto first = static_cast<int>(std::int64_t{all} * part / span.parts);
  const auto last = static_cast<int>(std::int64_t{all} * (part + 1) / span.parts);
  FlashSums<D> sums;
  if constexpr (quantised) {
    if (first < packed && first < last) {
      attend_quantised<D>({span, pages, block_memory()}, head, first_row,
                          {first * key_rows, retained, smaller(last, packed) - first}, sums);
    }
  }
  const int first_wide = first > packed ? first - packed : 0;
  if (last - packed > first_wide) {
    attend_wide<Value, D>(span, rows, seen, head,
                          {begin + first_wide * key_rows, end, last - packed - first_wide}, sums);
  }
  sums.store(span, part, head, first_row);
}

/// Merges the parts of query rows: block = (four query rows, KV head).
template <int D>
KVZAP_CUDA_KERNEL(128, 1)
merge_tiles(KVZAP_CUDA_ARGUMENT FlashSpan span) {
  constexpr int values = (D + 31) / 32;
  const int lane = lane_of_warp(), head = block_y();
  const int row = block_x() * FlashTiles<D>::warps + warp_of_block();
  if (row >= span.count) return;
  const auto partial = [&](int part) { return span.partial_row(part, head, row); };
  float maximum = minus_infinity;
  for (int part = lane; part < span.parts; part += 32) {
    maximum = fmaxf(maximum, span.partial_weight(partial(part), D)[0]);
  }
  for (int step = 16; step > 0; step /= 2) {
    maximum = fmaxf(maximum, of_lane(maximum, lane ^ step));
  }
  const float shift = shift_of(maximum);
  float weight = 0;
  float sums[values] = {};
  KVZAP_UNROLL_BY_4
  for (int part = 0; part < span.parts; ++part) {
    const std::int64_t own = partial(part);
    const float* const of_row = span.partial_weight(own, D);
    const float factor = exp2_approximate(of_row[0] - shift);
    weight += factor * of_row[1];
    KVZAP_UNROLL
    for (int i = 0; i < values; ++i) {
      const int d = i * 32 + lane;
      if (D % 32 == 0 || d < D) sums[i] += factor * span.partials[own * D + d];
    }
  }
  const float inverse = inverse_of(weight);
  const ResultRow result(span, head, row);
  KVZAP_UNROLL
  for (int i = 0; i < values; ++i) {
    const int d = i * 32 + lane;
    if (D % 32 == 0 || d < D) result.output[d * span.output_strides.dim] = sums[i] * inverse;
  }
  if (result.lse && lane == 0) *result.lse = log_sum_exp(maximum * ln_2, weight);
}

}  // namespace kvzap::attention::cuda
