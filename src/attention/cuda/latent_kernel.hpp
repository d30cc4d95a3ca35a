// Decode attention over latents on tensor cores: rows are stored once, as keys and as values, and
// many query heads share them. A block of eight warps attends one part of a head.
#pragma once

#include "attention/cuda/split_kernel.hpp"

namespace kvzap::attention::cuda {

/// Rows of D dimensions of type V, which is half or bfloat16, for up to 16 T query heads at once.
///
/// Each warp has some dimensions: it copies them to shared memory, multiplies them by these
/// dimensions of the queries, which stay in registers, and adds weighted values. So it waits for
/// its own copies alone, and a tile is read once for scores and once for values.
template <class V, int D, int T>
struct LatentTiles {
  using Value = V;
  static constexpr int dim = D, head_tiles = T, heads = 16 * T;
  static constexpr int warps = 8, threads = 32 * warps;
  static constexpr int stages = 6;  // tiles in shared memory: three in use, the others on their way
  // Steps of 16 dimensions: each warp has `whole` neighbouring ones, and the first `left` warps
  // have another one. (Four of them, of 576 or 320 dimensions, run on different schedulers.)
  static constexpr int whole = D / 16 / warps, left = D / 16 % warps;
  static constexpr int steps = whole + (left > 0 ? 1 : 0);
  static_assert(D % 16 == 0 && 32 % (2 * whole) == 0 && tile_rows % (32 / (2 * whole)) == 0);
  static_assert(stages % 2 == 0);  // lanes find the rows of two tiles

  static constexpr int pitch = pitch_of(2 * D);
  static constexpr int tile_bytes = tile_rows * pitch;
  // Scores of a warp's dimensions: (8 rows, head, row); the gap puts both halves of a head's rows
  // in different banks.
  static constexpr int half_floats = 8 * heads + 16;
  static constexpr int scores_at = stages * tile_bytes;
  static constexpr int scores_bytes = warps * 2 * half_floats * 4;
  // Weights in two terms: (term, head, row).
  static constexpr int weight_pitch = pitch_of(2 * tile_rows);
  static constexpr int term_bytes = heads * weight_pitch;
  static constexpr int weights_at = scores_at + 2 * scores_bytes;
  static constexpr int factors_at = weights_at + 2 * 2 * term_bytes;  // of earlier sums: (head)
  static constexpr int span_at = factors_at + 2 * heads * 4;
  static constexpr int bytes = span_at + (sizeof(SplitSpan) + 15) / 16 * 16;

  WideRows<Value> rows;

  KVZAP_CUDA static bool has_step(int step, int warp) { return step < whole || warp < left; }
  /// The first dimension of a warp's step.
  KVZAP_CUDA static int first_dim(int step, int warp) {
    return 16 * (step < whole ? warp * whole + step : warps * whole + warp);
  }

  /// Returns the place of a row in device memory, or null if it is no sequence of vectors.
  KVZAP_CUDA const Value* find(const SplitSpan& span, int head, std::int64_t row,
                               bool exists) const {
    // An address that may be read, for rows that do not exist.
    const auto* key = reinterpret_cast<const Value*>(rows.addresses);
    const Value* value = nullptr;
    std::int64_t stride = 1;
    return !exists || rows.find(span, head, D, row, key, value, stride) ? key : nullptr;
  }

  /// Copies a warp's dimensions of 16 rows, whose places lanes `lanes` and the next ones have. The
  /// first `count` rows exist.
  KVZAP_CUDA static void copy(const Value* own_key, int lanes, int count, unsigned char* tile,
                              int warp, int lane) {
    const std::uint32_t target = shared_address(tile);
    const auto copy_piece = [&](int r, int d) {
      const Value* const key = of_lane(own_key, lanes + r);
      copy16(target + r * pitch + 2 * d, r < count ? key + d : key, r < count);
    };
    constexpr int in_row = 2 * whole, at_once = 32 / in_row;
    const int own_row = lane / in_row, own_dim = first_dim(0, warp) + lane % in_row * 8;
    KVZAP_UNROLL
    for (int r = 0; r < tile_rows; r += at_once) copy_piece(r + own_row, own_dim);
    if (warp < left) copy_piece(lane / 2, first_dim(whole, warp) + lane % 2 * 8);
  }
  /// The same for any 16 rows from `first` on: value by value.
  KVZAP_CUDA void copy_values(const SplitSpan& span, int head, std::int64_t first, int count,
                              unsigned char* tile, int warp, int lane) const {
    for (int r = 0; r < tile_rows; ++r) {
      const Value* key = nullptr;
      const Value* value = nullptr;
      std::int64_t stride = 1;
      if (r < count) rows.find(span, head, D, first + r, key, value, stride);
      auto* const target = reinterpret_cast<std::uint16_t*>(tile + r * pitch);
      for (int i = lane; i < 16 * steps; i += 32) {
        if (!has_step(i / 16, warp)) continue;
        const int d = first_dim(i / 16, warp) + i % 16;
        target[d] = r < count ? key[d * stride].bits : 0;
      }
    }
  }
};

/// Two neighbouring floats, read and written as one.
struct alignas(8) TwoFloats {
  float first, second;
};

/// A warp's dimensions of the queries, in two terms: lane l has heads l / 4 and l / 4 + 8 of each
/// tile.
template <class Tiles>
struct LatentQueries {
  std::uint32_t upper[Tiles::head_tiles][Tiles::steps][4];
  std::uint32_t rest[Tiles::head_tiles][Tiles::steps][4];
  float unscale[Tiles::head_tiles][2];

  /// first: the query of the first of `own` heads.
  KVZAP_CUDA LatentQueries(const float* first, const Strides& strides, int own, int warp,
                           int lane) {
    using Value = typename Tiles::Value;
    KVZAP_UNROLL
    for (int t = 0; t < Tiles::head_tiles; ++t) {
      KVZAP_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int head = 16 * t + 8 * i + lane / 4;
        const float* const row = first + head * strides.head;
        float x[Tiles::steps][4];
        float largest = 0;
        KVZAP_UNROLL
        for (int step = 0; step < Tiles::steps; ++step) {
          const bool exists = head < own && Tiles::has_step(step, warp);
          const int d = Tiles::first_dim(step, warp) + 2 * (lane % 4);
          KVZAP_UNROLL
          for (int e = 0; e < 4; ++e) {
            x[step][e] = exists ? row[(d + e / 2 * 8 + e % 2) * strides.dim] : 0.0f;
            largest = fmaxf(largest, fabsf(x[step][e]));
          }
        }
        float scale = 1;
        unscale[t][i] = 1;
        if constexpr (std::is_same_v<Value, half>) {
          // Warps may scale their dimensions differently.
          const int shift = linalg::half_shift(largest_of_four(largest));
          scale = linalg::power_of_two(shift);
          unscale[t][i] = linalg::power_of_two(-shift);
        }
        KVZAP_UNROLL
        for (int step = 0; step < Tiles::steps; ++step) {
          KVZAP_UNROLL
          for (int pair = 0; pair < 2; ++pair) {
            const SplitPair<Value> split(x[step][2 * pair] * scale, x[step][2 * pair + 1] * scale);
            upper[t][step][2 * pair + i] = split.upper;
            rest[t][step][2 * pair + i] = split.rest;
          }
        }
      }
    }
  }

  /// Writes the scores of a tile of rows by a warp's dimensions.
  KVZAP_CUDA void score(const unsigned char* tile, float* scores, int warp, int lane) const {
    using Value = typename Tiles::Value;
    const std::uint32_t at = shared_address(tile) + (lane / 16 * 8 + lane % 8) * Tiles::pitch +
                             lane / 8 % 2 * piece_bytes;
    // Few products wait for each other where there are registers for more sums.
    constexpr int chains = Tiles::head_tiles == 1 ? 2 : 1;
    float sums[chains][Tiles::head_tiles][2][4] = {};  // of 8 rows each
    KVZAP_UNROLL
    for (int step = 0; step < Tiles::steps; ++step) {
      if (!Tiles::has_step(step, warp)) continue;
      std::uint32_t keys[4];
      load_matrices<false>(keys, at + 2 * Tiles::first_dim(step, warp));
      KVZAP_UNROLL
      for (int t = 0; t < Tiles::head_tiles; ++t) {
        KVZAP_UNROLL
        for (int n = 0; n < 2; ++n) {
          multiply<Value>(sums[0][t][n], upper[t][step], keys[2 * n], keys[2 * n + 1]);
          multiply<Value>(sums[chains - 1][t][n], rest[t][step], keys[2 * n], keys[2 * n + 1]);
        }
      }
    }
    float zero = 0;  // unless a score is not finite
    KVZAP_UNROLL
    for (int j = 0; j < 8 * Tiles::head_tiles; ++j) {
      float& sum = sums[0][j / 8][j / 4 % 2][j % 4];
      if constexpr (chains == 2) sum += sums[1][j / 8][j / 4 % 2][j % 4];
      zero += 0.0f * sum;
    }
    if (any_of_warp(zero != 0)) {
      KVZAP_UNROLL
      for (int j = 0; j < 2 * Tiles::head_tiles; ++j) {
        replace_infinite(at, j / 2, j % 2, warp, sums[0][j / 2][j % 2]);
      }
    }
    KVZAP_UNROLL
    for (int t = 0; t < Tiles::head_tiles; ++t) {
      KVZAP_UNROLL
      for (int n = 0; n < 2; ++n) {
        KVZAP_UNROLL
        for (int i = 0; i < 2; ++i) {
          const float(&own)[4] = sums[0][t][n];
          const int head = 16 * t + 8 * i + lane / 4;
          *reinterpret_cast<TwoFloats*>(scores + n * Tiles::half_floats + head * 8 +
                                        2 * (lane % 4)) = {unscale[t][i] * own[2 * i],
                                                           unscale[t][i] * own[2 * i + 1]};
        }
      }
    }
  }

 private:
  /// Makes scores of 8 rows that are not finite those of the upper terms alone: a rest times
  /// infinity may be NaN.
  KVZAP_CUDA void replace_infinite(std::uint32_t at, int t, int n, int warp,
                                   float (&scores)[4]) const {
    using Value = typename Tiles::Value;
    float of_upper[4] = {};
    KVZAP_UNROLL
    for (int step = 0; step < Tiles::steps; ++step) {
      if (!Tiles::has_step(step, warp)) continue;
      std::uint32_t keys[4];
      load_matrices<false>(keys, at + 2 * Tiles::first_dim(step, warp));
      multiply<Value>(of_upper, upper[t][step], keys[2 * n], keys[2 * n + 1]);
    }
    KVZAP_UNROLL
    for (int e = 0; e < 4; ++e) {
      if (!is_finite(scores[e])) scores[e] = of_upper[e];
    }
  }
};

/// The softmax of a head so far, which eight lanes share: each weighs two rows of a tile. The last
/// warps do this: the first ones may have more dimensions.
template <class Tiles>
struct LatentSoftmax {
  static constexpr int first_thread = Tiles::threads - 8 * Tiles::heads;

  float maximum = minus_infinity;
  float weight = 0;  // of a lane's own rows

  KVZAP_CUDA static bool is_here() { return thread_of_block() >= first_thread; }
  KVZAP_CUDA static int head() { return (thread_of_block() - first_thread) / 8; }
  KVZAP_CUDA static int pair() { return thread_of_block() % 8; }

  /// Turns the sums of all warps' scores into weights relative to the largest score so far.
  /// Buffers of scores, weights and factors take turns: parity.
  KVZAP_CUDA void weigh(unsigned char* memory, int parity, int rows, float scale, float soft_cap) {
    using Value = typename Tiles::Value;
    const int own_head = head(), own_pair = pair();
    const float* const scores =
        reinterpret_cast<const float*>(memory + Tiles::scores_at + parity * Tiles::scores_bytes) +
        own_pair / 4 * Tiles::half_floats + own_head * 8 + 2 * (own_pair % 4);
    float score[2] = {0, 0};
    KVZAP_UNROLL
    for (int w = 0; w < Tiles::warps; ++w) {
      const TwoFloats part =
          *reinterpret_cast<const TwoFloats*>(scores + w * 2 * Tiles::half_floats);
      score[0] += part.first;
      score[1] += part.second;
    }
    KVZAP_UNROLL
    for (int e = 0; e < 2; ++e) {
      score[e] *= scale;
      if (soft_cap > 0) score[e] = base::soft_capped(score[e], soft_cap);
      if (2 * own_pair + e >= rows) score[e] = minus_infinity;
    }
    float largest = largest_of_four(fmaxf(score[0], score[1]));
    largest = fmaxf(maximum, fmaxf(largest, of_lane(largest, lane_of_warp() ^ 4)));
    const float shift = shift_of(largest);
    const float factor = largest > maximum ? base::math::exp(maximum - shift) : 1.0f;
    maximum = largest;
    score[0] = base::math::exp(score[0] - shift);
    score[1] = base::math::exp(score[1] - shift);
    weight = weight * factor + (score[0] + score[1]);
    const SplitPair<Value> split(score[0], score[1]);
    unsigned char* const weights = memory + Tiles::weights_at + parity * 2 * Tiles::term_bytes +
                                   own_head * Tiles::weight_pitch + own_pair * 4;
    *reinterpret_cast<std::uint32_t*>(weights) = split.upper;
    *reinterpret_cast<std::uint32_t*>(weights + Tiles::term_bytes) = split.rest;
    if (own_pair == 0) {
      reinterpret_cast<float*>(memory + Tiles::factors_at)[parity * Tiles::heads + own_head] =
          factor;
    }
  }

  /// Writes maximum and weight of `own` heads to a part's place, as AttendParts does.
  KVZAP_CUDA void store(int own, int group, int first_head, int dim, float* partial) const {
    const float of_four = sum_of_four(weight);
    const float all = of_four + of_lane(of_four, lane_of_warp() ^ 4);
    if (pair() > 0 || head() >= own) return;
    partial[group * dim + first_head + head()] = maximum;
    partial[group * dim + group + first_head + head()] = all;
  }
};

/// A warp's dimensions of the weighted sums so far.
template <class Tiles>
struct LatentSums {
  float values[Tiles::head_tiles][Tiles::steps][2][4] = {};

  KVZAP_CUDA void add_tile(const unsigned char* tile, const unsigned char* memory, int parity,
                           int warp, int lane) {
    using Value = typename Tiles::Value;
    const float* const factors =
        reinterpret_cast<const float*>(memory + Tiles::factors_at) + parity * Tiles::heads;
    float factor[Tiles::head_tiles][2];
    bool changes = false;
    KVZAP_UNROLL
    for (int t = 0; t < Tiles::head_tiles; ++t) {
      KVZAP_UNROLL
      for (int i = 0; i < 2; ++i) {
        factor[t][i] = factors[16 * t + 8 * i + lane / 4];
        changes = changes || factor[t][i] != 1;
      }
    }
    if (any_of_warp(changes)) {
      KVZAP_UNROLL
      for (int t = 0; t < Tiles::head_tiles; ++t) {
        KVZAP_UNROLL
        for (int i = 0; i < 8 * Tiles::steps; ++i) {
          values[t][i / 8][i / 4 % 2][i % 4] *= factor[t][i % 4 / 2];
        }
      }
    }
    const std::uint32_t weights_at =
        shared_address(memory + Tiles::weights_at + parity * 2 * Tiles::term_bytes) +
        lane % 16 * Tiles::weight_pitch + lane / 16 * piece_bytes;
    std::uint32_t upper[Tiles::head_tiles][4], rest[Tiles::head_tiles][4];
    KVZAP_UNROLL
    for (int t = 0; t < Tiles::head_tiles; ++t) {
      load_matrices<false>(upper[t], weights_at + 16 * t * Tiles::weight_pitch);
      load_matrices<false>(rest[t], weights_at + 16 * t * Tiles::weight_pitch + Tiles::term_bytes);
    }
    const std::uint32_t at = shared_address(tile) + (lane / 8 % 2 * 8 + lane % 8) * Tiles::pitch +
                             lane / 16 * piece_bytes;
    KVZAP_UNROLL
    for (int step = 0; step < Tiles::steps; ++step) {
      if (!Tiles::has_step(step, warp)) continue;
      std::uint32_t rows[4];
      load_matrices<true>(rows, at + 2 * Tiles::first_dim(step, warp));
      KVZAP_UNROLL
      for (int t = 0; t < Tiles::head_tiles; ++t) {
        KVZAP_UNROLL
        for (int n = 0; n < 2; ++n) {
          multiply<Value>(values[t][step][n], upper[t], rows[2 * n], rows[2 * n + 1]);
          multiply<Value>(values[t][step][n], rest[t], rows[2 * n], rows[2 * n + 1]);
        }
      }
    }
  }

  /// Writes the sums of `own` heads to a part's place; target: of the first of them.
  KVZAP_CUDA void store(int own, float* target, int warp, int lane) const {
    KVZAP_UNROLL
    for (int t = 0; t < Tiles::head_tiles; ++t) {
      KVZAP_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int head = 16 * t + 8 * i + lane / 4;
        KVZAP_UNROLL
        for (int step = 0; step < Tiles::steps; ++step) {
          if (head >= own || !Tiles::has_step(step, warp)) continue;
          float* const sums =
              target + head * Tiles::dim + Tiles::first_dim(step, warp) + 2 * (lane % 4);
          KVZAP_UNROLL
          for (int n = 0; n < 2; ++n) {
            const float(&pair)[4] = values[t][step][n];
            *reinterpret_cast<TwoFloats*>(sums + 8 * n) = {pair[2 * i], pair[2 * i + 1]};
          }
        }
      }
    }
  }
};

/// One part and one pass over its query heads: block = (part, pass).
///
/// Warps meet once a tile. Then some lanes weigh tile i while their warp goes on: all score tile
/// i + 1 and add the values of tile i - 1.
template <class Tiles>
KVZAP_CUDA_KERNEL(Tiles::threads, 1)
attend_latents(KVZAP_CUDA_ARGUMENT SplitSpans spans, KVZAP_CUDA_ARGUMENT Tiles tiles,
               KVZAP_CUDA_ARGUMENT SplitQueries queries) {
  constexpr int n_stages = Tiles::stages;
  unsigned char* const memory = block_memory();
  const int warp = warp_of_block(), lane = lane_of_warp();
  const int rank = block_x() / queries.passes;
  const int first_head = block_x() % queries.passes * Tiles::heads;
  const SplitSpan span = spans[spans.template span_of<false>(rank)];  // in registers
  // Later finds read it here: queries and sums need the registers.
  auto& span_of_later = *reinterpret_cast<SplitSpan*>(memory + Tiles::span_at);
  if (thread_of_block() == 0) span_of_later = span;
  const PartOfHead part(span, rank, false);
  if (part.begin >= part.end) return;
  const int head = part.head, group = spans.group;
  const int own = group - first_head < Tiles::heads ? group - first_head : Tiles::heads;

  const auto n_rows = static_cast<int>(part.end - part.begin);
  const int n_tiles = (n_rows + tile_rows - 1) / tile_rows;
  const std::int64_t first_row = part.first_row + part.begin;
  // Lanes find the rows of tiles i and i + 1.
  const auto find = [&](const SplitSpan& own_span, int i) {
    const int row = i * tile_rows + lane;
    return tiles.find(own_span, head, first_row + row, row < n_rows);
  };
  const auto copy = [&](const SplitSpan& own_span, const typename Tiles::Value* key, int i,
                        int slot) {
    if (i < n_tiles) {
      unsigned char* const tile = memory + slot * Tiles::tile_bytes;
      const int count = n_rows - i * tile_rows;
      if (all_of_warp(key != nullptr)) {
        Tiles::copy(key, i % 2 * tile_rows, count, tile, warp, lane);
      } else {
        tiles.copy_values(own_span, head, first_row + i * tile_rows, count, tile, warp, lane);
      }
    }
    commit();
  };
  // All places first: to find one takes several loads that wait for each other.
  const typename Tiles::Value* places[n_stages / 2];
  KVZAP_UNROLL
  for (int i = 0; i < n_stages / 2; ++i) places[i] = find(span, 2 * i);
  for (int i = 0; i < n_stages; ++i) {
    copy(span, places[0], i, i);
    KVZAP_UNROLL
    for (int j = 1; j < n_stages / 2; ++j) places[j - 1] = i % 2 == 1 ? places[j] : places[j - 1];
  }
  const LatentQueries<Tiles> query(
      queries.values + span.query * queries.strides.row +
          std::int64_t{head * group + first_head} * queries.strides.head,
      queries.strides, own, warp, lane);
  const float scale = 1.0f / sqrtf(static_cast<float>(Tiles::dim));
  LatentSoftmax<Tiles> softmax;
  LatentSums<Tiles> sums;
  const typename Tiles::Value* place = nullptr;
  int next_slot = 0;
  for (int i = -1; i <= n_tiles; ++i) {
    const int last = i - 1, next = i + 1, further = last + n_stages;
    const int last_slot = next_slot >= 2 ? next_slot - 2 : next_slot - 2 + n_stages;
    if (last >= 0 && further % 2 == 0) place = find(span_of_later, further);
    // Copies of this warp: group t has tile t.
    if (i < 0) {
      wait<n_stages - 1>();
    } else if (i == 0) {
      wait<n_stages - 2>();
    } else {
      wait<n_stages - 3>();
    }
    // Now all have scored tile i and weighed the last one, and tile `next` is there.
    wait_for_block();
    if (i >= 0 && i < n_tiles && LatentSoftmax<Tiles>::is_here()) {
      softmax.weigh(memory, i % 2, n_rows - i * tile_rows, scale, queries.soft_cap);
    }
    if (next < n_tiles) {
      auto* const scores =
          reinterpret_cast<float*>(memory + Tiles::scores_at + next % 2 * Tiles::scores_bytes) +
          warp * 2 * Tiles::half_floats;
      query.score(memory + next_slot * Tiles::tile_bytes, scores, warp, lane);
    }
    next_slot = next_slot + 1 < n_stages ? next_slot + 1 : 0;
    if (last < 0) continue;
    sums.add_tile(memory + last_slot * Tiles::tile_bytes, memory, last % 2, warp, lane);
    wait_for_warp();  // all lanes have read the tile
    copy(span_of_later, place, further, last_slot);
  }
  // That of SplitSpans::partial: `rank` counts wide parts.
  float* const partial = spans.partials + rank * SplitSpans::part_floats(group, Tiles::dim);
  sums.store(own, partial + std::int64_t{first_head} * Tiles::dim, warp, lane);
  if (LatentSoftmax<Tiles>::is_here()) softmax.store(own, group, first_head, Tiles::dim, partial);
}

}  // namespace kvzap::attention::cuda
