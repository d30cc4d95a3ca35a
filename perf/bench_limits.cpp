// The limits to which the other programs compare, with their spread.
#include <fmt/format.h>

#include <memory>
#include <string>

#include "base/machine.hpp"
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
  const bool on_host = base::machine().on_host();
  const std::string all = fmt::format("/{}MiB_per_rank", LimitKernels::working_set >> 20);
  const std::string half = fmt::format("/{}MiB_per_rank", LimitKernels::working_set >> 21);
  const std::string extents =
      fmt::format("/{}x{}x{}", LimitKernels::gemm_m, LimitKernels::gemm_n, LimitKernels::gemm_k);
  limit("read" + all, bytes, "GB/s", &LimitKernels::read);
  if (on_host) limit("read_small_pages" + all, bytes, "GB/s", &LimitKernels::read_small_pages);
  limit("copy" + all, bytes, "GB/s", &LimitKernels::copy);
  if (on_host) limit("fresh" + half, bytes / 2, "GB/s", &LimitKernels::fresh);
  limit("gemm_f32" + extents, LimitKernels::gemm_flops, "GFLOP/s", &LimitKernels::gemm_f32);
  limit("gemm_bf16" + extents, LimitKernels::gemm_flops, "GFLOP/s", &LimitKernels::gemm_bf16);
  if (on_host) {
    limit("byte_dots", LimitKernels::byte_dots_flops(), "GFLOP/s", &LimitKernels::byte_dots);
  }
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
