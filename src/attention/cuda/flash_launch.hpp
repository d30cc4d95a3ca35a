// Launches of attend_tiles.
#pragma once

#include <algorithm>

#include "attention/cuda/flash_kernel.hpp"
#include "base/cuda/has_tensor_cores.hpp"
#include "base/cuda/launch.hpp"
#include "base/scratch.hpp"
#include "linalg/gemm.hpp"

namespace kvzap::attention::cuda {

inline FlashSpan flash_span_of(const AttentionSpan& span, const AttentionCall& call) {
  FlashSpan found{};
  found.rows = place_of(span);
  // (As SplitSpan::quantised_rows asks.)
  found.rows.quantised_parts = span.cached.format.quantised() ? 1 : 0;
  found.queries = call.queries.data();
  found.query_strides = strides_of(call.queries);
  found.output = call.output.data();
  found.output_strides = strides_of(call.output);
  if (call.wants_lse()) {
    found.lse = call.lse.data();
    found.lse_row_stride = static_cast<std::int64_t>(call.lse.stride(0));
    found.lse_head_stride = static_cast<std::int64_t>(call.lse.stride(1));
  }
  found.first_query = static_cast<std::int32_t>(span.first_query);
  found.count = static_cast<std::int32_t>(span.queries * call.group);
  found.first_seen = static_cast<std::int32_t>(span.seen_new_rows(0));
  found.more_seen = span.new_rows > 0 ? 1 : 0;
  found.window = static_cast<std::int32_t>(span.window);
  found.group = call.group;
  found.soft_cap = call.soft_cap;
  found.inverse_cap = call.soft_cap > 0 ? 1.0f / call.soft_cap : 0.0f;
  found.heads = call.kv_heads;
  return found;
}

/// Parts of a head: bounds the memory for parts.
inline constexpr std::int64_t most_flash_parts = 128;

/// Blocks that run at once: each multiprocessor has registers for two, and hardly more shared
/// memory than a block may have. The system takes 1 KiB of it for each block.
template <int D>
std::int64_t blocks_at_once() {
  constexpr int of_system = 1024;
  const int fit = (most_block_memory() + of_system) / (FlashTiles<D>::bytes + of_system);
  return std::int64_t{base::cuda::multiprocessors()} * std::clamp(fit, 1, 2);
}

/// Returns the parts of a head's rows: as many as there are free multiprocessors, each of some
/// tiles. The span alone decides, so results do not depend on other spans.
template <int D>
std::int32_t flash_parts(const AttentionSpan& span, std::int64_t blocks, int kv_heads) {
  // The merge is one more launch, which fewer rows do not make up for.
  constexpr std::int64_t least_tiles = 4, least_rows = 1024;
  std::int64_t rows = 0;
  for (int head = 0; head < kv_heads; ++head) rows = std::max(rows, span.cached.bounds(head));
  rows += span.cached.ring_rows() + span.new_rows;
  if (span.window > 0) rows = std::min(rows, span.window + span.queries);
  if (rows < least_rows) return 1;
  const std::int64_t by_rows = rows / (FlashTiles<D>::key_rows * least_tiles);
  return static_cast<std::int32_t>(std::max<std::int64_t>(
      1, std::min({blocks_at_once<D>() / blocks, by_rows, most_flash_parts})));
}

/// Launches attend_tiles for one span. Returns false if the device has too little shared memory.
template <class Value, int D, bool quantised>
bool launch_tiles(const ExecutionSpace& exec, const AttentionSpan& span, const AttentionCall& call,
                  linalg::Vector& partials) {
  using Tiles = FlashTiles<D>;
  if (Tiles::bytes > most_block_memory()) return false;
  FlashSpan launched = flash_span_of(span, call);
  const std::int64_t tiles = (launched.count + Tiles::query_rows - 1) / Tiles::query_rows;
  launched.parts = flash_parts<D>(span, tiles * call.kv_heads, call.kv_heads);
  if (launched.parts > 1) {
    const std::int64_t rows = std::int64_t{launched.parts} * call.kv_heads * launched.count;
    base::reserve_scratch(partials, rows * (D + 2), "kvzap::attention::tile_partials");
    launched.partials = partials.data();
  }
  const QuantisedPlaces pages{span.cached.format, span.cached.addresses.data(),
                              span.cached.page_rows};
  static std::atomic<bool> is_prepared{false};
  base::cuda::launch(exec, is_prepared, attend_tiles<Value, D, quantised>,
                     {tiles * launched.parts, call.kv_heads, 32 * Tiles::warps, Tiles::bytes},
                     launched, wide_rows_of<Value>(span.cached, call), pages);
  if (launched.parts > 1) {
    static std::atomic<bool> merge_is_prepared{false};
    base::cuda::launch(
        exec, merge_is_prepared, merge_tiles<D>,
        {(launched.count + Tiles::warps - 1) / Tiles::warps, call.kv_heads, 32 * Tiles::warps, 0},
        launched);
  }
  return true;
}

}  // namespace kvzap::attention::cuda
