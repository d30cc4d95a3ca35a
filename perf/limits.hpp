// The best rates that the machine can reach: the yardstick of every benchmark.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/kokkos_compat.hpp"

namespace kvzap::perf {

class DeviceLimits;

/// Rates that no kernel can exceed, with all ranks at work at the same time, summed over ranks.
/// Devices have read, copy and the products; for them fresh is copy, and byte_dots gemm_bf16.
enum class Limit {
  read,      // bytes/s: sum of a working set beyond the last-level cache, in huge pages
  copy,      // bytes/s, read + written, with streaming stores
  fresh,     // bytes/s, each byte counted once, copied into memory that was never touched
  gemm_f32,  // flop/s: product of gemm_m x gemm_n x gemm_k on each rank; without TF32 on devices
  // flop/s: the same with bf16 operands and an f32 result; f32's rate without such instructions
  gemm_bf16,
  // flop/s: dot products of registers of bytes (base::byte_products()) on each rank, no memory
  byte_dots
};

/// Returns the best rate of some passes. Collective.
double measure_limit(Limit limit, int passes);
/// Frees the memory of measure_limit. Call it before Kokkos ends.
void release_limits();

/// A limit measured before and after a benchmark, so that the two meet the machine in the same
/// state: its memory, above all, is shared with other programs. Collective.
class Yardstick {
 public:
  explicit Yardstick(Limit limit);
  /// Measures again. Returns the larger of the two rates.
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
  double copy();              // reads working_set / 2 on each rank and writes the same amount
  double fresh();             // copies working_set / 2 on each rank
  double gemm_f32();          // gemm_flops on each rank
  double gemm_bf16();         // gemm_flops on each rank
  double byte_dots();         // byte_dots_flops() on each rank
  static double byte_dots_flops();
  /// Sums `count` floats over ranks, in place, `times` times. Returns the seconds of one sum.
  double all_reduce(std::size_t count, int times);

  // A pass takes milliseconds, so that launching it does not count on a device.
  static constexpr std::size_t working_set = std::size_t{base::runs_on_host ? 512 : 4096} << 20;
  static constexpr std::int64_t gemm_m = base::runs_on_host ? 1024 : 8192;
  static constexpr std::int64_t gemm_n = base::runs_on_host ? 2048 : 8192;
  static constexpr std::int64_t gemm_k = gemm_n;
  static constexpr double gemm_flops = 2.0 * gemm_m * gemm_n * gemm_k;
  /// Returns whether the build has oneDNN. Without it, hosts measure products through Kokkos
  /// Kernels, and the limit of bf16 is that of f32.
  static bool has_onednn();

 private:
  struct Buffers;
  std::unique_ptr<Buffers> m_buffers;      // of hosts
  std::unique_ptr<DeviceLimits> m_device;  // else
};

}  // namespace kvzap::perf
