// Exponentials, activation functions and norms of one row in the first-level cache, in place, as
// prefill, policies and surrogates use them; each begins with a copy of the row. A loop that the
// compiler left without vectors shows here: it has a tenth of the share.
#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "common.hpp"
#include "linalg/host/row_kernels.hpp"

namespace kvzap::perf {
namespace {

constexpr std::int64_t row = 1536;  // three arrays fit in 32 KiB
constexpr std::int64_t rows = 4096;
/// Operations of base::exp_nonpositive, comparisons left out.
constexpr double exp_flops = 22;

struct Kernel {
  const char* name;
  double flops;  // of one value
  void (*run)(float* values, float* others);
};

constexpr Kernel kernels[] = {
    {"exp_shifted", exp_flops + 3,
     [](float* values, float*) { linalg::exp_shifted(values, row, 1.0f, 0.125f); }},
    {"silu_times", exp_flops + 4,
     [](float* values, float* others) { linalg::silu_times(values, others, values, row); }},
    {"gelu_tanh_times", exp_flops + 9,
     [](float* values, float* others) { linalg::gelu_tanh_times(values, others, values, row); }},
    {"gelu", exp_flops + 18, [](float* values, float*) { linalg::gelu(values, row); }},
    {"rms_norm", 4,
     [](float* values, float* others) { linalg::rms_norm(values, others, 1e-6f, values, row); }},
};

}  // namespace

void register_benchmarks(const Options& options) {
  for (const Kernel& kernel : kernels) {
    add(fmt::format("rows/{}/values:{}", kernel.name, row), 1, options.quick ? 3 : 5,
        [&kernel](benchmark::State& state) {
          const Yardstick limit(Limit::gemm_f32);
          std::vector<float> source(row), values(row), others(row, 0.9f);
          for (std::size_t i = 0; i < source.size(); ++i) {
            source[i] = 0.01f * static_cast<float>(i % 97) - 0.9f;
          }
          const double seconds = time_iterations(state, [&] {
            for (std::int64_t i = 0; i < rows; ++i) {
              std::copy(source.begin(), source.end(), values.begin());
              kernel.run(values.data(), others.data());
            }
          });
          report_flops(state, seconds,
                       kernel.flops * static_cast<double>(row * rows) * world().size(), limit);
        });
  }
}

}  // namespace kvzap::perf
