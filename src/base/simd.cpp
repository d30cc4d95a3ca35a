#include "base/simd.hpp"

#include <fmt/format.h>

#include <atomic>
#include <cstdlib>
#include <kvzap/types.hpp>
#include <string_view>

namespace kvzap::detail {
namespace {

constexpr SimdLevel levels[] = {SimdLevel::baseline, SimdLevel::avx2, SimdLevel::avx512,
                                SimdLevel::avx512_bf16};

SimdLevel checked(SimdLevel level, const char* asked_by) {
  const SimdLevel most = simd_level_of_processor();
  if (level > most) {
    throw Error(fmt::format("{} asks for the instruction set {}; this processor has {} at most",
                            asked_by, name_of(level), name_of(most)));
  }
  return level;
}

SimdLevel initial_level() {
  const char* asked = std::getenv("KVZAP_SIMD");
  if (!asked || !*asked) return simd_level_of_processor();
  for (SimdLevel level : levels) {
    if (std::string_view(asked) == name_of(level)) return checked(level, "KVZAP_SIMD");
  }
  throw Error(
      fmt::format("KVZAP_SIMD is \"{}\"; expected baseline, avx2, avx512 or avx512_bf16", asked));
}

std::atomic<SimdLevel>& current_level() {
  static std::atomic<SimdLevel> level{initial_level()};
  return level;
}

}  // namespace

const char* name_of(SimdLevel level) {
  switch (level) {
    case SimdLevel::baseline:
      return "baseline";
    case SimdLevel::avx2:
      return "avx2";
    case SimdLevel::avx512:
      return "avx512";
    case SimdLevel::avx512_bf16:
      return "avx512_bf16";
  }
  return "unknown";
}

SimdLevel simd_level_of_processor() {
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
  return __builtin_cpu_supports("avx512bf16") ? SimdLevel::avx512_bf16 : SimdLevel::avx512;
#else
  return SimdLevel::baseline;
#endif
}

SimdLevel simd_level() { return current_level().load(std::memory_order_relaxed); }

void set_simd_level(SimdLevel level) { current_level() = checked(level, "set_simd_level"); }

}  // namespace kvzap::detail
