#include "attention/cuda/flash_launch.hpp"
#include "attention/cuda/tensor_cores.hpp"

namespace kvzap::attention::tensor_cores {
namespace {

// Bounds the floats of a span's partial results: those of as many blocks as run at once, or of the
// most parts of all query rows.
template <int D>
std::int64_t partial_floats(const AttentionExtents& extents) {
  const std::int64_t rows = extents.tokens * extents.group * extents.kv_heads;
  return std::min(cuda::blocks_at_once<D>() * cuda::FlashTiles<D>::query_rows,
                  cuda::most_flash_parts * rows) *
         (D + 2);
}

}  // namespace

std::size_t span_scratch_floats(DType dtype, const AttentionExtents& extents) {
  std::int64_t floats = 0;
  if (base::cuda::has_tensor_cores()) {
    with_wide_heads(dtype, extents.head_dim, [&](auto, auto dim) {
      floats = partial_floats<decltype(dim)::value>(extents);
      return true;
    });
  }
  return static_cast<std::size_t>(floats);
}

bool attend_span(const ExecutionSpace& exec, const AttentionSpan& span, const AttentionCall& call,
                 linalg::Vector& scratch) {
  // Its pages may be those of quantised rows as long as they have none.
  for (int head = 0; span.cached.format.quantised() && head < call.kv_heads; ++head) {
    if (span.cached.bounds(head) > 0) return attend_quantised_span(exec, span, call, scratch);
  }
  return with_wide_heads(call.dtype(), call.dim, [&](auto zero, auto dim) {
    return cuda::launch_tiles<decltype(zero), decltype(dim)::value, false>(exec, span, call,
                                                                           scratch);
  });
}

}  // namespace kvzap::attention::tensor_cores
