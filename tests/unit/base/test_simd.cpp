#include <gtest/gtest.h>

#include "base/machine.hpp"
#include "unit/temporary_folder.hpp"

namespace {

using namespace kvzap::base;

TEST(Simd, LevelsAreNamed) {
  for (const SimdLevel level :
       {SimdLevel::baseline, SimdLevel::neon_bf16, SimdLevel::avx2, SimdLevel::avx512,
        SimdLevel::avx512_bf16, SimdLevel::amx_bf16_emulated, SimdLevel::amx_emulated,
        SimdLevel::amx_bf16, SimdLevel::amx_fp16}) {
    EXPECT_EQ(simd_level_named(name_of(level)), level);
  }
  EXPECT_EQ(simd_level_named("amx"),
            processor_has(SimdLevel::amx_fp16) ? SimdLevel::amx_fp16 : SimdLevel::amx_bf16);
  EXPECT_FALSE(simd_level_named("AMX"));
  EXPECT_FALSE(simd_level_named(""));
}

TEST(Simd, ALevelThatTheProcessorLacksIsRefused) {
  const SimdLevel before = machine().simd();
  const SimdLevel widest = simd_level_of_processor();
  EXPECT_NE(widest, SimdLevel::amx_emulated);
  EXPECT_NE(widest, SimdLevel::amx_bf16_emulated);
  EXPECT_TRUE(processor_has(widest));
  EXPECT_TRUE(processor_has(SimdLevel::baseline));
  for (const SimdLevel level : {SimdLevel::amx_emulated, SimdLevel::amx_bf16_emulated}) {
    EXPECT_EQ(processor_has(level), processor_has(SimdLevel::avx512_bf16));
  }
  for (const SimdLevel level : {SimdLevel::neon_bf16, SimdLevel::avx2, SimdLevel::avx512,
                                SimdLevel::amx_bf16, SimdLevel::amx_fp16}) {
    if (processor_has(level)) continue;
    kvzap::test::expect_error([&] { machine().set_simd(level); },
                              {name_of(level), name_of(widest)});
  }
  EXPECT_EQ(machine().simd(), before);
}

}  // namespace
