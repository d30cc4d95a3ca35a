// Prefill attention on tensor cores: tiles of query rows against tiles of keys and values, with an
// online softmax in registers (FlashAttention-2, Dao, arXiv 2307.08691).
#pragma once

#include "attention/cuda/flash_quantised.hpp"

namespace kvzap::attention::cuda {

/// Attends the wide rows of a block: all rows of a head, or those after its quantised ones. All
/// threads call this. is_first: there are no quantised ones, so the sums begin here.
template <class Value, int D, bool is_first>
KVZAP_CUDA void attend_wide(const FlashSpan& span, const WideRows<Value>& rows,
                            FlashSums<D>& sums) {
  using Tiles = FlashTiles<D>;
  static_assert(Tiles::warps == 4 && Tiles::key_rows == 64);
  unsigned char* const memory = block_memory();
  const int thread = thread_of_block();
  TileBlock& block = Tiles::block(memory);
  const std::int32_t begin = block.wide.begin;

  const auto places = [&](std::int32_t first) {
    return TilePlaces<Value>(memory + Tiles::places_of(first), Tiles::key_rows);
  };
  // Finds the rows of the tile at `first`; returns whether any is not a sequence of vectors.
  const auto find = [&](std::int32_t first) {
    const std::int32_t row = first + thread;
    if (thread >= Tiles::key_rows) return false;
    const TilePlaces<Value> at = places(first);
    const auto* key = reinterpret_cast<const Value*>(rows.addresses);
    const Value* value = key;
    std::int64_t stride = 1;
    const bool is_whole = row >= block.wide.end ||
                          rows.find(span.rows, block_y_read_anew(), D, row, key, value, stride);
    at.keys[thread] = key;
    at.values[thread] = value;
    at.strides[thread] = stride;
    return !is_whole;
  };
  const auto copy_keys = [&](std::int32_t first, bool is_whole) {
    copy_rows<Value, D>(places(first).keys, places(first).strides, block.wide.end - first, is_whole,
                        memory + Tiles::keys_at);
    commit();
  };

  bool is_scattered = any_of_block(find(begin));
  copy_keys(begin, !is_scattered);
  load_query_rows<Value, D, false>(span, block_y(), block.first_row, memory);
  const SeenBy seen(span, block_y(), block.first_row);
  if (thread < Tiles::query_rows) Tiles::bounds(memory)[thread] = seen.bounds(thread);
  if (thread == 0) block.seen_by_all = {seen.last(Tiles::query_rows).begin, seen.bounds(0).end};
  if constexpr (is_first) sums.begin();
  wait_for_block();
  for (std::int32_t first = begin; first < block.wide.end; first += Tiles::key_rows) {
    const std::int32_t next = first + Tiles::key_rows;
    const bool is_masked = next > block.seen_by_all.end || first < block.seen_by_all.begin;
    wait<0>();
    wait_for_block();  // the keys are there, and the values of the last tile are read
    copy_rows<Value, D>(places(first).values, places(first).strides, block.wide.end - first,
                        !is_scattered, memory + Tiles::values_at);
    commit();
    const bool next_scattered = next < block.wide.end && find(next);
    float scores[Tiles::row_tiles][Tiles::key_rows / 8][4] = {};
    FlashSums<D>::template multiply_keys<Value>(memory, scores);
    sums.template weigh<Value>(scores, first, is_masked, span, memory);
    wait<0>();
    // The values are there, and the keys are read.
    is_scattered = any_of_block(next_scattered);
    if (next < block.wide.end) copy_keys(next, !is_scattered);
    const NonFiniteRows<Value, D> left_out{memory};
    if (is_masked && left_out.find()) {
      for (int r = 0; r < Tiles::key_rows; ++r) {
        if (left_out.has(r)) sums.template add_row<Value>(scores, r, first, memory);
      }
      left_out.clear();
    }
    sums.template multiply_values<Value, Tiles::values_at>(memory, scores);
  }
  wait<0>();  // a block without rows has copied zeros
}

/// The work of a block, (part of the rows of a tile of query rows, KV head). Parts are runs of
/// tiles: those of quantised rows, if there are any, then those of the others.
template <int D, bool quantised>
KVZAP_CUDA TileBlock work_of_block(const FlashSpan& span) {
  using Tiles = FlashTiles<D>;
  constexpr std::int32_t key_rows = Tiles::key_rows;
  const int head = block_y(), part = block_x() % span.parts;
  const int n_tiles = blocks_x() / span.parts;
  // Tiles that see most rows come first.
  const int first_row = (n_tiles - 1 - block_x() / span.parts) * Tiles::query_rows;
  const auto retained = static_cast<std::int32_t>(span.rows.retained[head]);
  const SeenBy seen(span, head, first_row);
  const std::int32_t end = seen.last(Tiles::query_rows).end;
  const std::int32_t begin = quantised ? retained : seen.bounds(0).begin / key_rows * key_rows;

  // Tiles of quantised rows and all tiles; the part's tiles.
  const int packed = quantised ? (retained + key_rows - 1) / key_rows : 0;
  const int all = packed + (end > begin ? (end - begin + key_rows - 1) / key_rows : 0);
  const auto first = static_cast<int>(std::int64_t{all} * part / span.parts);
  const auto last = static_cast<int>(std::int64_t{all} * (part + 1) / span.parts);
  const int first_wide = first > packed ? first - packed : 0;
  return {part,
          first_row,
          {first * key_rows, smaller(retained, last * key_rows)},
          {begin + first_wide * key_rows, smaller(end, begin + (last - packed) * key_rows)},
          {0, 0}};
}

template <class Value, int D, bool quantised>
KVZAP_CUDA_KERNEL(128, D <= 128 ? 2 : 1)
attend_tiles(KVZAP_CUDA_ARGUMENT FlashSpan span, KVZAP_CUDA_ARGUMENT WideRows<Value> rows,
             KVZAP_CUDA_ARGUMENT QuantisedPlaces pages) {
  TileBlock& block = FlashTiles<D>::block(block_memory());
  if (thread_of_block() == 0) block = work_of_block<D, quantised>(span);
  wait_for_block();
  FlashSums<D> sums;
  if constexpr (quantised) {
    if (block.packed.begin < block.packed.end) {
      attend_quantised<D>({span, pages, block_memory()}, sums);
    } else {
      sums.begin();
    }
  }
  if (!quantised || block.wide.begin < block.wide.end) {
    attend_wide<Value, D, !quantised>(span, rows, sums);
  }
  sums.store(span, block.part, block_y_read_anew(), block.first_row);
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
