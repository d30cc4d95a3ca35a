// What carries out this process's kernels: an instruction set of the host, or a device. Chosen
// once, at the first call.
#pragma once

#include <atomic>
#include <optional>
#include <string_view>

#include "base/kokkos_compat.hpp"

namespace kvzap::base {

/// Ascending: each level of an architecture can run the code of its levels before it.
enum class SimdLevel {
  baseline,           // the build's flags: SSE2 on x86-64, NEON on AArch64
  neon_bf16,          // AArch64: Armv8.6's dot products, of bf16 pairs (BF16) and bytes (I8MM)
  avx2,               // x86-64-v3: AVX2, FMA, F16C
  avx512,             // x86-64-v4: AVX-512 F, BW, CD, DQ, VL
  avx512_bf16,        // also the dot product of bf16 pairs
  amx_bf16_emulated,  // for tests: avx512_bf16, with arrays instead of amx_bf16's tile registers
  amx_emulated,       // for tests: the same for amx_fp16
  amx_bf16,           // also AMX: tile registers, and products of tiles of bf16
  amx_fp16            // also products of tiles of f16
};

/// Returns "baseline", "neon_bf16", "avx2", "avx512", "avx512_bf16", "amx_bf16" or "amx_fp16"; for
/// tests also "amx_bf16_emulated" and "amx_emulated".
const char* name_of(SimdLevel level);

/// Returns the level of that name, or nothing if there is none. "amx" means amx_fp16 if the
/// processor has it, otherwise amx_bf16.
std::optional<SimdLevel> simd_level_named(std::string_view name);

/// Returns the widest level that the processor has and the system lets this process use. The first
/// call requests AMX's registers. It is never an emulated level.
SimdLevel simd_level_of_processor();

/// Returns whether the processor can run a level. It can run the emulated levels if it can run
/// avx512_bf16.
bool processor_has(SimdLevel level);

/// Returns whether the processor's own prefetcher loads rows that are read once in memory order at
/// the memory's full rate: that of AMD's Zen 4 and older. This is not a question of instruction
/// sets.
bool prefetches_in_order();

/// The instruction set of the host's inner loops, and whether kernels run in their form for
/// devices.
class Machine {
 public:
  /// Chooses the processor's widest level, or a lower one that the environment variable KVZAP_SIMD
  /// names. Kernels run in their form for devices if the execution space is a device, and on a
  /// host, which has faster forms, if the environment has KVZAP_KERNELS=device; so tests reach the
  /// device code without a device. Throws Error if KVZAP_SIMD names no level or one that the
  /// processor lacks, if KVZAP_KERNELS is not "device", "host" or empty, or if the build lacks
  /// device kernels.
  Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  /// Returns the instruction set of the host's loops.
  SimdLevel simd() const { return m_simd.load(std::memory_order_relaxed); }
  /// Returns whether the host's loops may use the instructions of a level.
  bool has(SimdLevel level) const { return simd() >= level; }
  /// Returns whether kernels run as loops of the host.
  bool on_host() const { return runs_on_host && !m_device.load(std::memory_order_relaxed); }
  /// Returns whether kernels run in their form for devices.
  bool on_device() const { return !on_host(); }

  /// Selects another level, for tests and benchmarks. Do not call it while kernels run. Throws
  /// Error if the processor lacks it.
  void set_simd(SimdLevel level);
  /// Selects the form for hosts, or that for devices, for tests. Do not call it while kernels run.
  void set_device(bool device) { m_device = device; }

 private:
  std::atomic<SimdLevel> m_simd;
  std::atomic<bool> m_device;
};

/// Returns the machine of this process. Throws the errors of Machine's constructor.
inline Machine& machine() {
  static Machine one;
  return one;
}

}  // namespace kvzap::base
