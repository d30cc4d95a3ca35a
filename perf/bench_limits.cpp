// The limits to which the other programs compare, with their spread.
#include <fmt/format.h>

#include <memory>

#include "common.hpp"

namespace kvzap::perf {

void register_benchmarks(const Options& options) {
  const auto kernels = std::make_shared<std::unique_ptr<LimitKernels>>();
  const int repetitions = options.quick ? 5 : 15;
  // `work` of one rank in one pass; the counter `name` is per second over all ranks.
  const auto limit = [&](const std::string& name, double work, const char* unit,
                         double (LimitKernels::*pass)()) {
    add("limit/" + name, 1, repetitions, [=](benchmark::State& state) {
      if (!*kernels) *kernels = std::make_unique<LimitKernels>();
      double seconds = 0;
      for (auto _ : state) {
        seconds = (kernels->get()->*pass)();
        state.SetIterationTime(seconds);
      }
      state.counters[unit] = 1e-9 * work * world().size() / seconds;
    });
  };
  constexpr double bytes = LimitKernels::working_set;
  limit("read/512MiB_per_rank", bytes, "GB/s", &LimitKernels::read);
  limit("read_small_pages/512MiB_per_rank", bytes, "GB/s", &LimitKernels::read_small_pages);
  limit("copy/512MiB_per_rank", bytes, "GB/s", &LimitKernels::copy);
  limit("fresh/256MiB_per_rank", bytes / 2, "GB/s", &LimitKernels::fresh);
  limit("gemm_f32/1024x2048x2048", LimitKernels::gemm_flops, "GFLOP/s", &LimitKernels::gemm_f32);
  limit("gemm_bf16/1024x2048x2048", LimitKernels::gemm_flops, "GFLOP/s", &LimitKernels::gemm_bf16);
  limit("byte_dots", LimitKernels::byte_dots_flops(), "GFLOP/s", &LimitKernels::byte_dots);
  for (const std::size_t kib : {8, 4096}) {
    add(fmt::format("limit/all_reduce/{}KiB", kib), 1, repetitions, [=](benchmark::State& state) {
      if (!*kernels) *kernels = std::make_unique<LimitKernels>();
      double seconds = 0;
      for (auto _ : state) {
        seconds = (*kernels)->all_reduce(kib * 1024 / sizeof(float), kib < 64 ? 100 : 10);
        state.SetIterationTime(seconds);
      }
      state.counters["GB/s"] = 1e-9 * static_cast<double>(kib * 1024) / seconds;
    });
  }
}

}  // namespace kvzap::perf
