// Dot products of bytes, a family of instructions beside the levels of simd.hpp.
#pragma once

#include "base/simd.hpp"

// Compilers that know AVX-VNNI.
#if KVZAP_X86 && ((defined(__clang__) && __clang_major__ >= 12) || __GNUC__ >= 11)
#define KVZAP_X86_BYTE_PRODUCTS 1
#else
#define KVZAP_X86_BYTE_PRODUCTS 0
#endif

namespace kvzap::base {

/// Ascending by speed. Each of them needs the system to save the registers it uses.
enum class ByteProducts {
  portable,    // the compiler's
  avx2,        // pairs of 16 bits, from SimdLevel::avx2 on
  avx_vnni,    // AVX-VNNI, on 32 bytes
  avx512_vnni  // AVX512-VNNI, from SimdLevel::avx512 on
};

/// Returns "portable", "AVX2", "AVX-VNNI" or "AVX512-VNNI".
const char* name_of(ByteProducts products);
/// Returns whether the processor and this build have them.
bool processor_has(ByteProducts products);
/// Returns the best ones at the machine's level. A level below the processor's excludes AVX-VNNI,
/// so that KVZAP_SIMD=avx2 shows a processor without it.
ByteProducts byte_products();

}  // namespace kvzap::base
