// What the machine can do at best: the yardstick of every benchmark.
#pragma once

#include <cstddef>
#include <memory>

namespace kvzap::perf {

/// Rates with all ranks at work at the same time, summed over ranks, measured in this process: the
/// best of several passes. No kernel can be faster.
struct Limits {
  double read_bytes_per_s;   // sum of a working set beyond the last-level cache
  double copy_bytes_per_s;   // read + written, with streaming stores
  double fresh_bytes_per_s;  // copied bytes, each counted once, into memory never touched before
  double f32_flops;          // product of 1024 x 2048 x 2048 on each rank
  double bf16_flops;         // the same with bf16 operands and an f32 result
};

/// Measured on the first call, which is collective.
const Limits& limits();

/// One pass over each limit. Every function is collective and returns the seconds of the slowest
/// rank.
class LimitKernels {
 public:
  LimitKernels();
  ~LimitKernels();

  double read();       // working_set bytes on each rank
  double copy();       // reads working_set / 2 on each rank and writes as much
  double fresh();      // copies working_set / 2 on each rank
  double gemm_f32();   // gemm_flops on each rank
  double gemm_bf16();  // gemm_flops on each rank
  /// Sum over ranks of `count` floats, in place, `times` in a row; returns the seconds of one.
  double all_reduce(std::size_t count, int times);

  static constexpr std::size_t working_set = std::size_t{512} << 20;
  static constexpr double gemm_flops = 2.0 * 1024 * 2048 * 2048;
  /// Without oneDNN, products are measured through Kokkos Kernels, and bf16's limit is f32's.
  static bool has_onednn();

 private:
  struct Buffers;
  std::unique_ptr<Buffers> m_buffers;
};

}  // namespace kvzap::perf
