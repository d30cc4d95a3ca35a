#include <gtest/gtest.h>

#include <string>

#include "parallel/gpu_aware.hpp"

namespace {

using kvzap::parallel::GpuAnswers;
using kvzap::parallel::takes_device_memory;

TEST(GpuAwareMpi, EachBackendHasAnAnswerOfItsOwn) {
  const GpuAnswers cuda{true, false, false, false};
  EXPECT_TRUE(takes_device_memory("Cuda", cuda));
  EXPECT_FALSE(takes_device_memory("HIP", cuda));
  EXPECT_FALSE(takes_device_memory("SYCL", cuda));
  const GpuAnswers rocm{false, true, false, false};
  EXPECT_FALSE(takes_device_memory("Cuda", rocm));
  EXPECT_TRUE(takes_device_memory("HIP", rocm));
  EXPECT_FALSE(takes_device_memory("SYCL", rocm));
  const GpuAnswers level_zero{false, false, true, false};
  EXPECT_FALSE(takes_device_memory("Cuda", level_zero));
  EXPECT_FALSE(takes_device_memory("HIP", level_zero));
  EXPECT_TRUE(takes_device_memory("SYCL", level_zero));
}

TEST(GpuAwareMpi, WithoutAnAnswerDataGoesThroughTheHost) {
  GpuAnswers cuda_alone;
  cuda_alone.cuda = true;
  for (const std::string backend : {"HIP", "SYCL", "OpenMP", "Serial", "OpenMPTarget", ""}) {
    EXPECT_FALSE(takes_device_memory(backend, cuda_alone)) << backend;
    EXPECT_FALSE(takes_device_memory(backend, {})) << backend;
  }
  EXPECT_FALSE(takes_device_memory("Cuda", {}));
}

TEST(GpuAwareMpi, TheVariableCountsWhereMpiCannotBeAsked) {
  GpuAnswers answers;
  answers.variable = true;
  EXPECT_TRUE(takes_device_memory("Cuda", answers));
  EXPECT_TRUE(takes_device_memory("HIP", answers));
  EXPECT_FALSE(takes_device_memory("OpenMP", answers));
  answers.cuda = false;
  EXPECT_FALSE(takes_device_memory("Cuda", answers));
}

}  // namespace
