// The instruction set of the explicit inner loops, chosen once at run time.
//
// The body of a kernel is an always-inlined function. KVZAP_KERNEL wraps it in one plain function
// for each instruction set, compiled for that set alone, and in a dispatcher with the kernel's
// name. So the library runs on any processor of its architecture. All other code is compiled for
// the build's flags alone.
#pragma once

#include <optional>
#include <string_view>

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

/// Returns whether the processor is AMD's. Which memory its prefetcher loads by itself is not a
/// question of instruction sets.
bool is_amd();

/// Returns the level in use: the processor's level, or a lower one that the environment variable
/// KVZAP_SIMD names at the first call. Throws Error if the variable names no level, or a level that
/// the processor lacks.
SimdLevel simd_level();

/// Selects another level from now on, for tests and benchmarks. Do not call it while kernels run.
/// Throws Error if the processor lacks it.
void set_simd_level(SimdLevel level);

}  // namespace kvzap::base

#define KVZAP_BODY static inline __attribute__((always_inline))

// CUDA compilers read neither target attributes nor all intrinsics. Builds with them run kernels on
// a device, so the speed of inner loops on the host does not matter there.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__CUDACC__)
#define KVZAP_X86 1
#define KVZAP_NEON 0
// AMX's instructions are written as inline assembly, which needs an assembler that knows them
// (binutils 2.35, or Clang's own). Intrinsics would not help: the compiler does not allocate tile
// registers.
#if defined(__linux__) && ((defined(__clang__) && __clang_major__ >= 12) || __GNUC__ >= 11)
#define KVZAP_X86_TILES 1
#else
#define KVZAP_X86_TILES 0
#endif
// Clang uses whole registers by default, and ignores an attribute list that asks for them.
#if defined(__clang__)
#define KVZAP_WHOLE_REGISTERS
#else
#define KVZAP_WHOLE_REGISTERS ",prefer-vector-width=512"
#endif
#define KVZAP_AVX2 "avx2,fma,f16c,bmi,bmi2"
#define KVZAP_AVX512 KVZAP_AVX2 ",avx512f,avx512bw,avx512cd,avx512dq,avx512vl"
#define KVZAP_TARGET_AVX2 __attribute__((target(KVZAP_AVX2)))
#define KVZAP_TARGET_AVX512 __attribute__((target(KVZAP_AVX512 KVZAP_WHOLE_REGISTERS)))
#define KVZAP_TARGET_AVX512_BF16 \
  __attribute__((target(KVZAP_AVX512 ",avx512bf16" KVZAP_WHOLE_REGISTERS)))

/// Defines `result name parameters` over `name_body arguments`, for every instruction set.
#define KVZAP_KERNEL(result, name, parameters, arguments)                                      \
  KVZAP_TARGET_AVX512 static result name##_avx512 parameters { return name##_body arguments; } \
  KVZAP_TARGET_AVX2 static result name##_avx2 parameters { return name##_body arguments; }     \
  static result name##_baseline parameters { return name##_body arguments; }                   \
  result name parameters {                                                                     \
    const ::kvzap::base::SimdLevel level = ::kvzap::base::simd_level();                        \
    if (level >= ::kvzap::base::SimdLevel::avx512) return name##_avx512 arguments;             \
    if (level == ::kvzap::base::SimdLevel::avx2) return name##_avx2 arguments;                 \
    return name##_baseline arguments;                                                          \
  }
#else
#define KVZAP_X86 0
#define KVZAP_X86_TILES 0
#if defined(__aarch64__) && defined(__GNUC__) && !defined(__CUDACC__)
#define KVZAP_NEON 1
#define KVZAP_TARGET_NEON_BF16 __attribute__((target("arch=armv8.2-a+dotprod+i8mm+bf16")))
#else
#define KVZAP_NEON 0
#endif
#define KVZAP_KERNEL(result, name, parameters, arguments) \
  result name parameters { return name##_body arguments; }
#endif
