#include "base/byte_products.hpp"

#if KVZAP_X86
#include <cpuid.h>
#elif KVZAP_NEON && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace kvzap::base {

const char* name_of(ByteProducts products) {
  switch (products) {
    case ByteProducts::portable:
      return "portable";
    case ByteProducts::neon_dot:
      return "DotProd";
    case ByteProducts::avx2:
      return "AVX2";
    case ByteProducts::avx_vnni:
      return "AVX-VNNI";
    case ByteProducts::avx512_vnni:
      return "AVX512-VNNI";
  }
  return "unknown";
}

bool processor_has([[maybe_unused]] ByteProducts products) {
  if (products == ByteProducts::portable) return true;
#if KVZAP_X86
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  switch (products) {
    case ByteProducts::avx2:
      return processor_has(SimdLevel::avx2);
    case ByteProducts::avx_vnni: {
      constexpr unsigned avx_vnni = 1u << 4;
      if (!KVZAP_AVX_VNNI || !processor_has(SimdLevel::avx2) ||
          !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) {
        return false;
      }
      return eax >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & avx_vnni) != 0;
    }
    case ByteProducts::avx512_vnni:
      return processor_has(SimdLevel::avx512) && __builtin_cpu_supports("avx512vnni");
    default:
      return false;
  }
#elif KVZAP_NEON && defined(__linux__)
  constexpr unsigned long dotprod = 1ul << 20;  // asm/hwcap.h
  return products == ByteProducts::neon_dot && (getauxval(AT_HWCAP) & dotprod) != 0;
#else
  return false;
#endif
}

ByteProducts byte_products() {
  static const bool has_512 = processor_has(ByteProducts::avx512_vnni);
  static const bool has_256 = processor_has(ByteProducts::avx_vnni);
  static const bool has_dot = processor_has(ByteProducts::neon_dot);
  const SimdLevel level = machine().simd();
  const bool is_highest = level == simd_level_of_processor();
  if (level < SimdLevel::avx2) {
    return has_dot && is_highest ? ByteProducts::neon_dot : ByteProducts::portable;
  }
  if (level >= SimdLevel::avx512 && has_512) return ByteProducts::avx512_vnni;
  return has_256 && is_highest ? ByteProducts::avx_vnni : ByteProducts::avx2;
}

}  // namespace kvzap::base
