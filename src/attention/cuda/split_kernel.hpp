// Decode attention on tensor cores: a block of four warps attends one part of a head.
#pragma once

#include "attention/cuda/split_tiles.hpp"
#include "attention/cuda/warp_loops.hpp"
#include "attention/device/split_parts.hpp"
#include "base/soft_cap.hpp"
#include "linalg/device/lane_rows.hpp"
#include "linalg/rounded_rows.hpp"

namespace kvzap::attention::cuda {

// Query heads of a pass over a part. Products have 16 rows: the queries, and what their rounding
// leaves.
inline constexpr int heads_at_once = 8;
inline constexpr int warps = 4;
inline constexpr int stages = 2;  // tiles of a warp in shared memory

/// The queries of a launch and how their scores are scaled.
struct SplitQueries {
  const float* values;
  Strides strides;
  float soft_cap;  // 0: none
  int passes;      // over the group's heads
};

/// Shared memory of a block: tiles, in their place later the results of warps; then the rotated
/// queries (head, dim).
template <class Tiles>
struct SplitMemory {
  // Heads of a warp's results begin in different banks.
  static constexpr int result_stride = Tiles::dim + 8;
  static constexpr int tiles = warps * stages * Tiles::bytes;
  static constexpr int results = warps * heads_at_once * (result_stride + 2) * 4;
  static constexpr int queries_at = tiles > results ? tiles : results;
  static constexpr int bytes = queries_at + (Tiles::quantised ? heads_at_once * Tiles::dim * 4 : 0);
};

/// Rotates the queries of `own` heads, as quantised rows are rotated. All threads call this.
KVZAP_CUDA void rotate_queries(const float* first, const Strides& strides, int own, int dim,
                               float* target) {
  const WarpLoops loops;
  for (int g = warp_of_block(); g < own; g += warps) {
    float* const row = target + g * dim;
    loops.each(dim, [&](int d) { row[d] = first[g * strides.head + d * strides.dim]; });
    linalg::rotate_row(loops, row, dim);
  }
  wait_for_block();
}

/// A lane's parts of the queries of eight heads.
template <class Tiles>
struct QueryParts {
  std::uint32_t of_step[Tiles::dim / 16][4];
  float unscale = 1;

  /// row: the query of head lane / 4, or null if there is none.
  KVZAP_CUDA QueryParts(const float* row, std::int64_t stride, int lane) {
    float scale = 1;
    if constexpr (std::is_same_v<typename Tiles::Product, half>) {
      float largest = 0;
      for (int d = lane % 4; row && d < Tiles::dim; d += 4) {
        largest = fmaxf(largest, fabsf(row[d * stride]));
      }
      const int shift = linalg::half_shift(largest_of_four(largest));
      scale = linalg::power_of_two(shift);
      unscale = linalg::power_of_two(-shift);
    }
    KVZAP_UNROLL
    for (int step = 0; step < Tiles::dim / 16; ++step) {
      KVZAP_UNROLL
      for (int pair = 0; pair < 2; ++pair) {
        float x[2] = {0, 0};
        for (int e = 0; row && e < 2; ++e) {
          x[e] = row[Tiles::query_dim(step, pair, e, lane) * stride] * scale;
        }
        const SplitPair<typename Tiles::Product> split(x[0], x[1]);
        of_step[step][2 * pair] = split.upper;
        of_step[step][2 * pair + 1] = split.rest;
      }
    }
  }
};

/// What a warp has found so far for eight heads: lane l knows head l / 4.
template <class Tiles>
struct WarpSums {
  float values[Tiles::dim / 8][4] = {};
  float maximum = minus_infinity;
  float weight = 0;  // of a lane's own rows

  KVZAP_CUDA void add_tile(const unsigned char* tile, int lane, int rows,
                           const QueryParts<Tiles>& query, float scale, float soft_cap) {
    Scores scores = {};
    Tiles::add_scores(tile, lane, query.of_step, scores);
    float score[4];
    float largest = minus_infinity;
    KVZAP_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int row = i / 2 * 8 + 2 * (lane % 4) + i % 2;
      const float of_upper = scores[i / 2][i % 2];
      float s = is_finite(of_upper) ? of_upper + scores[i / 2][2 + i % 2] : of_upper;
      s *= query.unscale * scale * Tiles::key_factor(tile, row);
      if (soft_cap > 0) s = base::soft_capped(s, soft_cap);
      score[i] = row < rows ? s : minus_infinity;
      // A weight times the factor of its value is at most 1.
      largest = fmaxf(largest, score[i] + Tiles::log_value_factor(tile, row));
    }
    largest = fmaxf(maximum, largest_of_four(largest));
    const float shift = shift_of(largest);
    if (any_of_warp(largest > maximum)) {
      const float factor = base::math::exp(maximum - shift);
      maximum = largest;
      weight *= factor;
      KVZAP_UNROLL
      for (int n = 0; n < Tiles::dim / 8; ++n) {
        for (float& value : values[n]) value *= factor;
      }
    }
    Weights weights;
    KVZAP_UNROLL
    for (int n = 0; n < 2; ++n) {
      float own[2];
      KVZAP_UNROLL
      for (int e = 0; e < 2; ++e) {
        own[e] = base::math::exp(score[2 * n + e] - shift);
        weight += own[e];
        own[e] *= Tiles::value_factor(tile, n * 8 + 2 * (lane % 4) + e);
      }
      const SplitPair<typename Tiles::Product> split(own[0], own[1]);
      weights[2 * n] = split.upper;
      weights[2 * n + 1] = split.rest;
    }
    Tiles::add_values(tile, lane, weights, values);
  }
};

/// Writes the sums of all warps to a part's place, as AttendParts does.
template <class Tiles>
KVZAP_CUDA void store_part(const WarpSums<Tiles>& found, unsigned char* memory, int own, int group,
                           int first_head, float* partial) {
  constexpr int dim = Tiles::dim;
  const int warp = warp_of_block(), lane = lane_of_warp();
  constexpr int stride = SplitMemory<Tiles>::result_stride;
  auto* const sums = reinterpret_cast<float*>(memory);          // (warp, head, stride)
  float* const maxima = sums + warps * heads_at_once * stride;  // (warp, head)
  float* const weights = maxima + warps * heads_at_once;        // (warp, head)
  const float weight = sum_of_four(found.weight);
  wait_for_block();  // all tiles are read
  const int g = lane / 4;
  KVZAP_UNROLL
  for (int n = 0; n < dim / 8; ++n) {
    for (int e = 0; e < 2; ++e) {
      sums[(warp * heads_at_once + g) * stride + Tiles::value_dim(n, e, lane)] =
          found.values[n][e] + found.values[n][2 + e];
    }
  }
  if (lane % 4 == 0) {
    maxima[warp * heads_at_once + g] = found.maximum;
    weights[warp * heads_at_once + g] = weight;
  }
  wait_for_block();
  for (int i = thread_of_block(); i < own * dim; i += warps * 32) {
    const int head = i / dim;
    float largest = minus_infinity;
    for (int w = 0; w < warps; ++w) largest = fmaxf(largest, maxima[w * heads_at_once + head]);
    const float shift = shift_of(largest);
    float sum = 0, all_weight = 0;
    for (int w = 0; w < warps; ++w) {
      const float factor = base::math::exp(maxima[w * heads_at_once + head] - shift);
      sum += factor * sums[(w * heads_at_once + head) * stride + i % dim];
      all_weight += factor * weights[w * heads_at_once + head];
    }
    partial[(first_head + head) * dim + i % dim] = sum;
    if (i % dim == 0) {
      partial[group * dim + first_head + head] = largest;
      partial[group * dim + group + first_head + head] = all_weight;
    }
  }
}

/// One part and one pass over its query heads: block = (part, pass).
template <class Tiles>
KVZAP_CUDA_KERNEL(32 * warps, 1)
attend_parts(KVZAP_CUDA_ARGUMENT SplitSpans spans, KVZAP_CUDA_ARGUMENT Tiles tiles,
             KVZAP_CUDA_ARGUMENT SplitQueries queries) {
  unsigned char* const memory = block_memory();
  const int warp = warp_of_block(), lane = lane_of_warp();
  const int rank = block_x() / queries.passes;
  const int first_head = block_x() % queries.passes * heads_at_once;
  const SplitSpan span = spans[spans.template span_of<Tiles::quantised>(rank)];  // in registers
  const PartOfHead part(span, rank, Tiles::quantised);
  if (part.begin >= part.end) return;
  const int head = part.head, group = spans.group;
  const int own = group - first_head < heads_at_once ? group - first_head : heads_at_once;

  const auto n_tiles = static_cast<int>((part.end - part.begin + tile_rows - 1) / tile_rows);
  const int own_tiles = (n_tiles - warp + warps - 1) / warps;
  const auto find = [&](int i) {
    const std::int64_t row = part.begin + (i * warps + warp) * tile_rows + lane % tile_rows;
    return tiles.find(span, head, part.first_row + row, i < own_tiles && row < part.end);
  };
  unsigned char* const own_memory = memory + warp * stages * Tiles::bytes;
  // All places first: to find one takes several loads that wait for each other.
  typename Tiles::Row places[stages];
  KVZAP_UNROLL
  for (int i = 0; i < stages; ++i) places[i] = find(i);
  KVZAP_UNROLL
  for (int i = 0; i < stages; ++i) {
    if (i < own_tiles) tiles.copy(places[i], own_memory + i * Tiles::bytes, lane);
    commit();
  }
  const float* query_row = queries.values + span.query * queries.strides.row +
                           std::int64_t{head * group + first_head} * queries.strides.head;
  Strides strides = queries.strides;
  if constexpr (Tiles::quantised) {
    auto* const rotated = reinterpret_cast<float*>(memory + SplitMemory<Tiles>::queries_at);
    rotate_queries(query_row, strides, own, Tiles::dim, rotated);
    query_row = rotated;
    strides = {0, Tiles::dim, 1};
  }
  const QueryParts<Tiles> query(lane / 4 < own ? query_row + lane / 4 * strides.head : nullptr,
                                strides.dim, lane);
  const float scale = 1.0f / sqrtf(static_cast<float>(Tiles::dim));
  WarpSums<Tiles> found;
  for (int i = 0; i < own_tiles; ++i) {
    const typename Tiles::Row next = find(i + stages);
    wait<stages - 1>();
    wait_for_warp();
    const std::int64_t first = part.begin + (i * warps + warp) * tile_rows;
    const std::int64_t left = part.end - first;
    unsigned char* const tile = own_memory + i % stages * Tiles::bytes;
    found.add_tile(tile, lane, static_cast<int>(left < tile_rows ? left : tile_rows), query, scale,
                   queries.soft_cap);
    wait_for_warp();  // all lanes have read the tile
    if (i + stages < own_tiles) tiles.copy(next, tile, lane);
    commit();
  }
  wait<0>();
  store_part(found, memory, own, group, first_head,
             spans.partial(span, head, part.part, Tiles::quantised));
}

}  // namespace kvzap::attention::cuda
