#include "base/machine.hpp"

#include <fmt/format.h>

#include <cstdlib>
#include <kvzap/config.hpp>
#include <kvzap/core/types.hpp>
#include <string_view>

#include "base/simd.hpp"

#if KVZAP_NEON && defined(__linux__)
#include <sys/auxv.h>
#endif
#if KVZAP_X86
#include <cpuid.h>
#endif
#if KVZAP_X86_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvzap::base {
namespace {

constexpr SimdLevel levels[] = {
    SimdLevel::baseline,     SimdLevel::neon_bf16,   SimdLevel::avx2,
    SimdLevel::avx512,       SimdLevel::avx512_bf16, SimdLevel::amx_bf16_emulated,
    SimdLevel::amx_emulated, SimdLevel::amx_bf16,    SimdLevel::amx_fp16};

SimdLevel checked(SimdLevel level, const char* asked_by) {
  if (!processor_has(level)) {
    throw Error(fmt::format("{} asks for the instruction set {}; this processor has {} at most",
                            asked_by, name_of(level), name_of(simd_level_of_processor())));
  }
  return level;
}

SimdLevel initial_level() {
  const char* asked = std::getenv("KVZAP_SIMD");
  if (!asked || !*asked) return simd_level_of_processor();
  if (const auto level = simd_level_named(asked)) return checked(*level, "KVZAP_SIMD");
  throw Error(fmt::format(
      "KVZAP_SIMD is \"{}\"; expected {}", asked,
      KVZAP_NEON ? "baseline or neon_bf16" : "baseline, avx2, avx512, avx512_bf16 or amx"));
}

#if KVZAP_X86_TILES
/// Returns the level of the processor's tile registers, and enables them for this process and its
/// threads; avx512_bf16 if there are none for bf16. Linux requires a request, because each thread's
/// state grows by 8 KiB (see Documentation/arch/x86/xstate.rst). It refuses if it does not save
/// these registers, or if a thread's alternate signal stack has no room for them.
SimdLevel level_with_tiles() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return SimdLevel::avx512_bf16;
  const unsigned subleaves = eax;
  constexpr unsigned amx_bf16 = 1u << 22, amx_tile = 1u << 24;
  if ((edx & amx_bf16) == 0 || (edx & amx_tile) == 0) return SimdLevel::avx512_bf16;
  constexpr long arch_req_xcomp_perm = 0x1023, xfeature_xtiledata = 18;
  if (syscall(SYS_arch_prctl, arch_req_xcomp_perm, xfeature_xtiledata) != 0) {
    return SimdLevel::avx512_bf16;
  }
  constexpr unsigned amx_fp16 = 1u << 21;
  const bool has_fp16 =
      subleaves >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & amx_fp16) != 0;
  return has_fp16 ? SimdLevel::amx_fp16 : SimdLevel::amx_bf16;
}
#endif

SimdLevel widest_level() {
#if KVZAP_X86
  // The compiler's run-time support also checks that the system saves the wide registers.
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  if (!avx2) return SimdLevel::baseline;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (!avx512) return SimdLevel::avx2;
  if (!__builtin_cpu_supports("avx512bf16")) return SimdLevel::avx512;
#if KVZAP_X86_TILES && defined(KVZAP_TILES_ARE_TRAPPED)
  // tests/tiles carries out all of AMX or nothing: a processor's own tiles would not reach it.
  const SimdLevel own = level_with_tiles();
  return own == SimdLevel::avx512_bf16 ? SimdLevel::amx_fp16 : own;
#elif KVZAP_X86_TILES
  return level_with_tiles();
#else
  return SimdLevel::avx512_bf16;
#endif
#elif KVZAP_NEON && defined(__linux__)
  constexpr unsigned long dotprod = 1ul << 20, i8mm = 1ul << 13, bf16 = 1ul << 14;  // asm/hwcap.h
  const unsigned long more = getauxval(AT_HWCAP2);
  const bool has_all =
      (getauxval(AT_HWCAP) & dotprod) != 0 && (more & i8mm) != 0 && (more & bf16) != 0;
  return has_all ? SimdLevel::neon_bf16 : SimdLevel::baseline;
#else
  return SimdLevel::baseline;
#endif
}

bool device_at_start() {
  const char* asked = std::getenv("KVZAP_KERNELS");
  const std::string_view name = asked ? asked : "";
  if (!name.empty() && name != "device" && name != "host") {
    throw Error(fmt::format("KVZAP_KERNELS is \"{}\"; expected host or device", name));
  }
  if (name == "device" && !KVZAP_HAVE_DEVICE_KERNELS) {
    throw Error(
        "KVZAP_KERNELS is \"device\"; this build has no device kernels: configure it with "
        "KVZAP_DEVICE_KERNELS_ON_HOST=ON");
  }
  return name == "device";
}

}  // namespace

const char* name_of(SimdLevel level) {
  switch (level) {
    case SimdLevel::baseline:
      return "baseline";
    case SimdLevel::neon_bf16:
      return "neon_bf16";
    case SimdLevel::avx2:
      return "avx2";
    case SimdLevel::avx512:
      return "avx512";
    case SimdLevel::avx512_bf16:
      return "avx512_bf16";
    case SimdLevel::amx_bf16_emulated:
      return "amx_bf16_emulated";
    case SimdLevel::amx_emulated:
      return "amx_emulated";
    case SimdLevel::amx_bf16:
      return "amx_bf16";
    case SimdLevel::amx_fp16:
      return "amx_fp16";
  }
  return "unknown";
}

std::optional<SimdLevel> simd_level_named(std::string_view name) {
  if (name == "amx") {
    return processor_has(SimdLevel::amx_fp16) ? SimdLevel::amx_fp16 : SimdLevel::amx_bf16;
  }
  for (SimdLevel level : levels) {
    if (name == name_of(level)) return level;
  }
  return std::nullopt;
}

SimdLevel simd_level_of_processor() {
  static const SimdLevel level = widest_level();
  return level;
}

bool processor_has(SimdLevel level) {
  const bool emulated = level == SimdLevel::amx_emulated || level == SimdLevel::amx_bf16_emulated;
  if (KVZAP_X86 && level == SimdLevel::neon_bf16) return false;
  return (emulated ? SimdLevel::avx512_bf16 : level) <= simd_level_of_processor();
}

bool prefetches_in_order() {
#if KVZAP_X86
  static const bool zen4_or_older = [] {
    __builtin_cpu_init();
    unsigned a = 0, b, c, d;
    if (!__builtin_cpu_is("amd") || !__get_cpuid(1, &a, &b, &c, &d)) return false;
    const unsigned family = (a >> 8 & 0xf) + (a >> 20 & 0xff);
    return family <= 0x19;
  }();
  return zen4_or_older;
#else
  return false;
#endif
}

Machine::Machine() : m_simd(initial_level()), m_device(device_at_start()) {}

void Machine::set_simd(SimdLevel level) { m_simd = checked(level, "set_simd"); }

}  // namespace kvzap::base
