// The walk over blocks of rows and its prefetching, shared by the decode kernels of all instruction
// sets.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/host/decode_rows.hpp"
#include "attention/host/vector_math.hpp"
#include "base/simd.hpp"
#include "linalg/host/row_kernels.hpp"

namespace kvzap::attention {

// Rows whose values are read from memory once and then again from the level-1 cache.
constexpr int near_rows = 16;

/// Rows that the processor's prefetcher loads without prefetch instructions. It follows only reads
/// nearly in memory order, this many bytes at a time.
inline int rows_in_order(int row_bytes, int bytes) {
  return std::clamp(bytes / row_bytes, 1, near_rows);
}

// Distance in bytes from reading to prefetching: many latencies of memory at its full rate.
// Prefetches into the level-2 cache, because a level-1 cache would lose lines before they are read.
constexpr std::int64_t prefetch_distance = 16384;

// Distance in bytes for kernels that read every row once in memory order. It is enough to lead the
// processor's prefetcher over the ends of memory pages. It is short enough to leave the prefetcher
// the few misses that a level-1 cache can have at once. Four times the distance is as good; sixteen
// times costs a third of the rate.
constexpr std::int64_t in_order_distance = 512;

/// Asks for the line that is in_order_distance after that of `row`.
// Of no target, so that it is inlined into kernels of any.
inline __attribute__((always_inline)) void prefetch_in_order(const void* row) {
  __builtin_prefetch(static_cast<const char*>(row) + in_order_distance, 0, 2);
}

/// Consecutive rows, as bytes.
struct Extent {
  const char* begin = nullptr;
  const char* end = nullptr;

  template <class Value>
  static Extent of(const Value* rows, std::int64_t count, std::int64_t stride) {
    return {reinterpret_cast<const char*>(rows),
            reinterpret_cast<const char*>(rows + count * stride)};
  }
};

/// Spreads prefetches over the steps of a kernel. Prefetches the memory that is read
/// prefetch_distance later, in ascending order: the rest of the kernel's current rows, then the
/// first of the next rows. Does nothing if `steps` is 0.
class Ahead {
 public:
  Ahead(Extent now, Extent later, std::int64_t steps) {
    const std::int64_t skipped = std::min<std::int64_t>(prefetch_distance, now.end - now.begin);
    const std::int64_t more = std::min<std::int64_t>(prefetch_distance, later.end - later.begin);
    m_now = {now.begin + skipped, now.end};
    m_later = {later.begin, later.begin + more};
    if (steps > 0) {
      m_lines = static_cast<int>((m_now.end - m_now.begin + more + 64 * steps - 1) / (64 * steps));
    }
  }
  // Of no target, so that it is inlined into kernels of any.
  inline __attribute__((always_inline)) void step() {
    for (int i = 0; i < m_lines; ++i) {
      if (m_now.begin >= m_now.end) {
        m_now = m_later;
        m_later = {};
        if (m_now.begin >= m_now.end) return;
      }
      __builtin_prefetch(m_now.begin, 0, 2);
      m_now.begin += 64;
    }
  }

 private:
  Extent m_now, m_later;
  int m_lines = 0;
};

/// Whether the processor's prefetcher continues from `run` into `next`: `next` is empty, begins at
/// the end of `run`, or begins close after it.
template <class Value>
bool is_behind(const RowRun<Value>& next, const RowRun<Value>& run) {
  if (next.rows == 0) return true;
  const auto end = reinterpret_cast<std::uintptr_t>(run.values + run.rows * run.row_stride);
  const auto begin = reinterpret_cast<std::uintptr_t>(next.keys);
  return begin >= end && begin - end < in_order_distance;
}

/// Processes a run's rows with blocks of G query heads, decode_block_rows at a time. Kernels
/// defines the operations on a block of rows and queries:
///   Value; always_prefetches(dim): whether to prefetch lines wherever they lie,
///   score_steps(rows), accumulate_steps(rows, dim): how often they step `ahead`,
///   queries_of(queries, block, padded): a block's queries,
///   score(keys, stride, rows, queries, dim, scores, ahead): computes scores of the rows, in the
///   kernels' own order,
///   softmax(scores, rows, scaling, maximum, weight, sums, padded): replaces scores by
///   exponentials, updates the running maximum and weight, and rescales the sums,
///   accumulate(values, stride, rows, weights, sums, padded, dim, ahead): adds weighted values.
template <class Kernels, int G>
void attend_blocks(const Blocks& blocks, const RowRun<typename Kernels::Value>& run,
                   const RowRun<typename Kernels::Value>& next) {
  using Value = typename Kernels::Value;
  const int dim = blocks.dim, padded = blocks.padded;
  // On AMD's Zen 4 and older the prefetcher loads rows that are read once in memory order at the
  // memory's full rate; prefetch instructions do not reach that rate. They help in three cases. The
  // next page lies elsewhere; or several queries read the keys and values of a block, which lie
  // apart (longer pages); or computing takes longer than reading. Other processors always need
  // them: without, 4 queries read bf16 at 0.73 of the rate that they have with them on a Xeon with
  // AMX (Sapphire Rapids), and at 0.56 on a Zen 5.
  const bool in_order = is_behind(next, run) && (G == 1 || run.rows <= decode_block_rows);
  const bool prefetches = Kernels::always_prefetches(dim) || blocks.count > 1 || !in_order ||
                          !base::prefetches_in_order();
  for (std::int64_t begin = 0; begin < run.rows; begin += decode_block_rows) {
    const int rows = static_cast<int>(std::min<std::int64_t>(decode_block_rows, run.rows - begin));
    const Value* keys = run.keys + begin * run.row_stride;
    const Value* values = run.values + begin * run.row_stride;
    const Extent key_bytes = Extent::of(keys, rows, run.row_stride);
    const Extent value_bytes = Extent::of(values, rows, run.row_stride);
    const std::int64_t count = prefetches ? blocks.count : 0;
    Ahead ahead(key_bytes, value_bytes, count * Kernels::score_steps(rows));
    for (int b = 0; b < blocks.count; ++b) {
      Kernels::score(keys, run.row_stride, rows, Kernels::queries_of(blocks.queries, b, padded),
                     dim, blocks.scores + std::int64_t{b} * G * decode_block_rows, ahead);
    }
    const std::int64_t left = run.rows - begin - decode_block_rows;
    const Extent next_bytes =
        left > 0 ? Extent::of(keys + decode_block_rows * run.row_stride,
                              std::min<std::int64_t>(left, decode_block_rows), run.row_stride)
                 : Extent::of(next.keys, std::min<std::int64_t>(next.rows, decode_block_rows),
                              next.row_stride);
    ahead = Ahead(value_bytes, next_bytes, count * Kernels::accumulate_steps(rows, dim));
    for (int b = 0; b < blocks.count; ++b) {
      float* scores = blocks.scores + std::int64_t{b} * G * decode_block_rows;
      float* sums = blocks.sums + std::int64_t{b} * G * padded;
      if (blocks.soft_cap > 0) {
        linalg::soft_cap(scores, std::int64_t{rows} * G, blocks.soft_cap);
      }
      Kernels::softmax(scores, rows, blocks.scaling, blocks.maximum + b * block_lanes,
                       blocks.weight + b * block_lanes, sums, padded);
      Kernels::accumulate(values, run.row_stride, rows, scores, sums, padded, dim, ahead);
    }
  }
}

/// Calls attend_blocks with the kernels of blocks of `block_queries` queries.
template <template <class, int> class KernelsOf, class Value>
void attend_blocks_of(int block_queries, const Blocks& blocks, const RowRun<Value>& run,
                      const RowRun<Value>& next) {
  switch (block_queries) {
    case 1:
      return attend_blocks<KernelsOf<Value, 1>, 1>(blocks, run, next);
    case 2:
      return attend_blocks<KernelsOf<Value, 2>, 2>(blocks, run, next);
    default:
      return attend_blocks<KernelsOf<Value, 4>, 4>(blocks, run, next);
  }
}

}  // namespace kvzap::attention
