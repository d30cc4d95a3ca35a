// Replaces the kernels of this folder in builds without CUDA, or for devices below 8.0.
#include "attention/cuda/tensor_cores.hpp"

namespace kvzap::attention::tensor_cores {

bool attend_wide_parts(const ExecutionSpace&, const SplitSpans&, const CachedLayer&,
                       const AttentionCall&) {
  return false;
}
bool attend_quantised_parts(const ExecutionSpace&, const SplitSpans&, std::int64_t,
                            const CachedLayer&, const AttentionCall&) {
  return false;
}
bool attend_span(const ExecutionSpace&, const AttentionSpan&, const AttentionCall&,
                 linalg::Vector&) {
  return false;
}
std::size_t span_scratch_floats(DType, const AttentionExtents&) { return 0; }

}  // namespace kvzap::attention::tensor_cores
