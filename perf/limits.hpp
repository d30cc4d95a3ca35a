// What the machine can do at best: the yardstick of every benchmark.
#pragma once

#include <cstddef>
#include <memory>

namespace kvzap::perf {

/// Rates that no kernel can exceed, with all ranks at work at the same time, summed over ranks.
enum class Limit {
  read,      // bytes/s: sum of a working set beyond the last-level cache, in huge pages
  copy,      // bytes/s, read + written, with streaming stores
  fresh,     // bytes/s, each counted once, copied into memory never touched before
  gemm_f32,  // flop/s: product of 1024 x 2048 x 2048 on each rank
  gemm_bf16  // flop/s: the same with bf16 operands and an f32 result; without such instructions
             // gemm_f32
};

/// The best of some passes. Collective.
double measure_limit(Limit limit, int passes);
/// Frees what measure_limit works on; to be called before Kokkos ends.
void release_limits();

/// A limit measured before and after something else, so that the two meet the same state of the
/// machine: memory, above all, is shared with whoever else runs on it. Collective.
class Yardstick {
 public:
  explicit Yardstick(Limit limit);
  /// Measures again; the larger of both.
  double rate() const;

 private:
  static constexpr int passes = 3;
  Limit m_limit;
  double m_before;
};

/// One pass over each limit. Every function is collective and returns the seconds of the slowest
/// rank.
class LimitKernels {
 public:
  LimitKernels();
  ~LimitKernels();

  double read();  // working_set bytes on each rank, in the largest pages the system gives
  double read_small_pages();  // the same in its usual pages, as plain allocations have them
  double copy();              // reads working_set / 2 on each rank and writes as much
  double fresh();             // copies working_set / 2 on each rank
  double gemm_f32();          // gemm_flops on each rank
  double gemm_bf16();         // gemm_flops on each rank
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
