// Attention by the tensor cores of NVIDIA's GPUs (base::cuda::has_tensor_cores): the kernels of
// decode and prefill for rows of 16, 8 and 4 bits. Other devices, types and head sizes use the
// portable kernels of attention/device.
#pragma once

#include <type_traits>

#include "attention/call.hpp"
#include "attention/device/split_parts.hpp"
#include "linalg/gemm.hpp"

namespace kvzap::attention::tensor_cores {

/// Returns work(std::integral_constant of `dim`) if `dim` is one of `dims`, otherwise false.
template <int... dims, class Work>
bool with_head_dim(int dim, const Work& work) {
  return ((dim == dims && work(std::integral_constant<int, dims>())) || ...);
}
/// The same for the sizes and types of heads in 16 bits: work(zero of the type, size).
template <class Work>
bool with_wide_heads(DType dtype, int dim, const Work& work) {
  return with_value_type(dtype, [&](auto zero) {
    if constexpr (std::is_same_v<decltype(zero), float>) {
      return false;
    } else {
      return with_head_dim<64, 80, 96, 128, 256>(dim, [&](auto size) { return work(zero, size); });
    }
  });
}

/// Attends the parts of wide rows as attend_groups does. Returns false, and does nothing, if there
/// is no kernel for the type and size of heads (f16 and bf16 of 64, 80, 96, 128 or 256 dimensions,
/// and latents) or if the device has too little shared memory.
bool attend_wide_parts(const ExecutionSpace& exec, const SplitSpans& spans,
                       const CachedLayer& cached, const AttentionCall& call);
/// The same for rows whose values are their keys (latent attention), of 576 dimensions (DeepSeek
/// and its kin), 320 (Mistral 4) or 288 (MiniCPM3).
bool attend_latent_parts(const ExecutionSpace& exec, const SplitSpans& spans,
                         const CachedLayer& cached, const AttentionCall& call);
/// The same for parts of quantised rows. Heads have 64, 128 or 256 dimensions, with 8 bits also 96.
bool attend_quantised_parts(const ExecutionSpace& exec, const SplitSpans& spans, std::int64_t parts,
                            const CachedLayer& cached, const AttentionCall& call);

/// Computes one span of any number of query tokens. Returns false, and does nothing, if it sees
/// rows of 3 or 2 bits, if there is no kernel for the type and size of heads (those of
/// attend_wide_parts; with quantised rows 64, 96, 128 or 256 dimensions) or if the device has too
/// little shared memory. Few query tokens over many rows take scratch space for parts of the rows;
/// it waits if `scratch` has to grow.
bool attend_span(const ExecutionSpace& exec, const AttentionSpan& span, const AttentionCall& call,
                 linalg::Vector& scratch);
/// The same for a span that sees quantised rows.
bool attend_quantised_span(const ExecutionSpace& exec, const AttentionSpan& span,
                           const AttentionCall& call, linalg::Vector& scratch);
/// Returns the most floats of scratch space that attend_span takes.
std::size_t span_scratch_floats(DType dtype, const AttentionExtents& extents);

}  // namespace kvzap::attention::tensor_cores
