#include "attention/cuda/flash_kernel.hpp"
#include "attention/cuda/tensor_cores.hpp"
#include "base/cuda/has_tensor_cores.hpp"
#include "base/cuda/launch.hpp"

namespace kvzap::attention::tensor_cores {
namespace {

cuda::FlashSpan span_of(const AttentionSpan& span, const AttentionCall& call) {
  cuda::FlashSpan found{};
  found.rows = place_of(span);
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
  return found;
}

template <class Value, int D>
bool launch_tiles(const ExecutionSpace& exec, const AttentionSpan& span,
                  const AttentionCall& call) {
  using Tiles = cuda::FlashTiles<Value, D>;
  if (Tiles::bytes > base::cuda::most_block_memory()) return false;
  static std::atomic<bool> is_prepared{false};
  const std::int64_t tiles =
      (span.queries * call.group + Tiles::query_rows - 1) / Tiles::query_rows;
  base::cuda::launch(exec, is_prepared, cuda::attend_tiles<Value, D>,
                     {tiles, call.kv_heads, 32 * Tiles::warps, Tiles::bytes}, span_of(span, call),
                     wide_rows_of<Value>(span.cached, call));
  return true;
}

}  // namespace

bool attend_span(const ExecutionSpace& exec, const AttentionSpan& span, const AttentionCall& call) {
  // Its pages may be those of quantised rows as long as they have none.
  for (int head = 0; span.cached.format.quantised() && head < call.kv_heads; ++head) {
    if (span.cached.bounds(head) > 0) return false;
  }
  return with_wide_heads(call.dtype(), call.dim, [&](auto zero, auto dim) {
    return launch_tiles<decltype(zero), decltype(dim)::value>(exec, span, call);
  });
}

}  // namespace kvzap::attention::tensor_cores
