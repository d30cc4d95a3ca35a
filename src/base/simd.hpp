// Which instruction set the explicit inner loops use, decided once when the program runs.
//
// A kernel's body is an always-inlined function. KVZAP_KERNEL wraps it in one plain function per
// instruction set, each compiled for that set alone, and in a dispatcher of the kernel's name. So
// the library runs on any processor of its architecture, and no other code is compiled for more
// than the build's flags allow.
#pragma once

#include <optional>
#include <string_view>

namespace kvzap::detail {

/// Ascending: each level can run what those before it can.
enum class SimdLevel {
  baseline,           // what the build's flags allow (SSE2 on x86-64); the only one elsewhere
  avx2,               // x86-64-v3: AVX2, FMA, F16C
  avx512,             // x86-64-v4: AVX-512 F, BW, CD, DQ, VL
  avx512_bf16,        // and its dot product of bf16 pairs
  amx_bf16_emulated,  // for tests: avx512_bf16, with arrays in place of amx_bf16's tile registers
  amx_emulated,       // for tests: the same of amx_fp16's
  amx_bf16,           // and AMX: tile registers, and products of tiles of bf16
  amx_fp16            // and products of tiles of f16
};

/// "baseline", "avx2", "avx512", "avx512_bf16", "amx_bf16" or "amx_fp16"; for tests also
/// "amx_bf16_emulated" and "amx_emulated".
const char* name_of(SimdLevel level);

/// The level of that name; for "amx" amx_fp16 if the processor has it, else amx_bf16. None if there
/// is no such level.
std::optional<SimdLevel> simd_level_named(std::string_view name);

/// The widest level that this processor has, and the system lets this process use: AMX's registers
/// are asked for when this is first called. Never an emulated one.
SimdLevel simd_level_of_processor();

/// Whether the processor can run a level; the emulated ones wherever it can run avx512_bf16.
bool processor_has(SimdLevel level);

/// The level in use: the processor's, or a lower one named by the environment variable KVZAP_SIMD
/// when first asked. Throws Error if that names no level, or one that the processor lacks.
SimdLevel simd_level();

/// Uses another level from now on, for tests and benchmarks; not while kernels run. Throws Error if
/// the processor lacks it.
void set_simd_level(SimdLevel level);

}  // namespace kvzap::detail

#define KVZAP_BODY static inline __attribute__((always_inline))

// CUDA compilers read neither target attributes nor all intrinsics. They are used where kernels run
// on a device, and there is no inner loop on the host whose speed matters.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__CUDACC__)
#define KVZAP_X86 1
// AMX's instructions are written as assembly, which needs an assembler that knows them (binutils
// 2.35, Clang's own), but no intrinsics: the compiler would not allocate tile registers anyway.
#if defined(__linux__) && ((defined(__clang__) && __clang_major__ >= 12) || __GNUC__ >= 11)
#define KVZAP_X86_TILES 1
#else
#define KVZAP_X86_TILES 0
#endif
// Clang uses whole registers without being asked to, and ignores all of a list that asks it to.
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
    const ::kvzap::detail::SimdLevel level = ::kvzap::detail::simd_level();                    \
    if (level >= ::kvzap::detail::SimdLevel::avx512) return name##_avx512 arguments;           \
    if (level == ::kvzap::detail::SimdLevel::avx2) return name##_avx2 arguments;               \
    return name##_baseline arguments;                                                          \
  }
#else
#define KVZAP_X86 0
#define KVZAP_X86_TILES 0
#define KVZAP_KERNEL(result, name, parameters, arguments) \
  result name parameters { return name##_body arguments; }
#endif
