// Dot products of bytes, a family of instructions beside the levels of simd.hpp.
#pragma once

#include "base/simd.hpp"

// Compilers that know AVX-VNNI.
#if KVZAP_X86 && ((defined(__clang__) && __clang_major__ >= 12) || __GNUC__ >= 11)
#define KVZAP_AVX_VNNI 1
#define KVZAP_TARGET_AVX_VNNI __attribute__((target(KVZAP_AVX2 ",avxvnni")))
#else
#define KVZAP_AVX_VNNI 0
#endif
#if KVZAP_X86
#define KVZAP_TARGET_AVX512_VNNI \
  __attribute__((target(KVZAP_AVX512 ",avx512vnni" KVZAP_WHOLE_REGISTERS)))
#elif KVZAP_NEON
#define KVZAP_TARGET_NEON_DOT __attribute__((target("arch=armv8.2-a+dotprod")))
#endif

namespace kvzap::base {

/// Ascending by speed. Each of them needs the system to save the registers it uses.
enum class ByteProducts {
  portable,    // of the baseline: SSE2, NEON, or what the compiler makes of its vector types
  neon_dot,    // AArch64: the dot products of Armv8.2 (DotProd)
  avx2,        // pairs of 16 bits, from SimdLevel::avx2 on
  avx_vnni,    // AVX-VNNI, on 32 bytes
  avx512_vnni  // AVX512-VNNI, from SimdLevel::avx512 on
};

/// Returns "portable", "DotProd", "AVX2", "AVX-VNNI" or "AVX512-VNNI".
const char* name_of(ByteProducts products);
/// Returns whether the processor and this build have them.
bool processor_has(ByteProducts products);
/// Returns the best ones at the machine's level. A level below the processor's excludes AVX-VNNI
/// and DotProd, so that KVZAP_SIMD=avx2 shows a processor without AVX-VNNI.
ByteProducts byte_products();

}  // namespace kvzap::base
