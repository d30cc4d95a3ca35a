#include "base/byte_products.hpp"

#if KVZAP_X86_BYTE_PRODUCTS
#include <cpuid.h>
#endif

namespace kvzap::base {

const char* name_of(ByteProducts products) {
  switch (products) {
    case ByteProducts::portable:
      return "portable";
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
#if KVZAP_X86_BYTE_PRODUCTS
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  switch (products) {
    case ByteProducts::portable:
      return true;
    case ByteProducts::avx2:
      return processor_has(SimdLevel::avx2);
    case ByteProducts::avx_vnni: {
      constexpr unsigned avx_vnni = 1u << 4;
      if (!processor_has(SimdLevel::avx2) || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) {
        return false;
      }
      return eax >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & avx_vnni) != 0;
    }
    case ByteProducts::avx512_vnni:
      return processor_has(SimdLevel::avx512) && __builtin_cpu_supports("avx512vnni");
  }
  return false;
#else
  return products == ByteProducts::portable;
#endif
}

ByteProducts byte_products() {
  static const bool has_512 = processor_has(ByteProducts::avx512_vnni);
  static const bool has_256 = processor_has(ByteProducts::avx_vnni);
  const SimdLevel level = machine().simd();
  if (level < SimdLevel::avx2 || KVZAP_X86_BYTE_PRODUCTS == 0) return ByteProducts::portable;
  if (level >= SimdLevel::avx512 && has_512) return ByteProducts::avx512_vnni;
  return has_256 && level == simd_level_of_processor() ? ByteProducts::avx_vnni
                                                       : ByteProducts::avx2;
}

}  // namespace kvzap::base
