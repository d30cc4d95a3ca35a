// Compiles the body of a kernel for each instruction set.
//
// The body of a kernel is an always-inlined function. KVZAP_KERNEL wraps it in one plain function
// for each instruction set, compiled for that set alone, and in a dispatcher with the kernel's
// name. So the library runs on any processor of its architecture. All other code is compiled for
// the build's flags alone.
#pragma once

#include "base/machine.hpp"

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

/// The function of a body (base/each_level.hpp) for the widest level in use without dot products.
#define KVZAP_AT_LEVEL(...)                                                             \
  (::kvzap::base::machine().has(::kvzap::base::SimdLevel::avx512) ? avx512::__VA_ARGS__ \
   : ::kvzap::base::machine().has(::kvzap::base::SimdLevel::avx2) ? avx2::__VA_ARGS__   \
                                                                  : baseline::__VA_ARGS__)

/// Defines `result name parameters` over `name_body arguments`, for every instruction set.
#define KVZAP_KERNEL(result, name, parameters, arguments)                                      \
  KVZAP_TARGET_AVX512 static result name##_avx512 parameters { return name##_body arguments; } \
  KVZAP_TARGET_AVX2 static result name##_avx2 parameters { return name##_body arguments; }     \
  static result name##_baseline parameters { return name##_body arguments; }                   \
  result name parameters {                                                                     \
    const ::kvzap::base::SimdLevel level = ::kvzap::base::machine().simd();                    \
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
#define KVZAP_AT_LEVEL(...) baseline::__VA_ARGS__
#define KVZAP_KERNEL(result, name, parameters, arguments) \
  result name parameters { return name##_body arguments; }
#endif
