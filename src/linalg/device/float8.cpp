#include "linalg/device/float8.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "base/launch.hpp"
#include "base/machine.hpp"
#include "linalg/device/cublas.hpp"

namespace kvzap::linalg {
namespace {

using Range = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;

// The reference of the library's products.
void plain_product(const ExecutionSpace& exec, const Float8Product& product) {
  const Float8Rows a = product.a, b = product.b;
  float* const c = product.c;
  const std::int64_t stride = product.c_stride;
  const bool has_blocks = product.has_blocks();
  base::parallel_for(
      "kvzap::product::float8", Range(exec, 0, a.rows * b.rows), KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t m = i / b.rows, n = i % b.rows;
        const std::uint8_t* const left = a.codes + m * a.inputs;
        const std::uint8_t* const right = b.codes + n * b.inputs;
        float sum = 0;
        for (std::int64_t l = 0; l < a.inputs / a.block; ++l) {
          float partial = 0;
          for (std::int64_t k = l * a.block; k < (l + 1) * a.block; ++k) {
            partial += e4m3_or_nan(left[k]) * e4m3_or_nan(right[k]);
          }
          sum +=
              has_blocks ? partial * a.scales[l * a.rows + m] * b.scales[l * b.rows + n] : partial;
        }
        c[m * stride + n] = sum;
      });
}

void clear_rows(const ExecutionSpace& exec, std::int64_t first, const Float8Rows& target) {
  const std::int64_t rows = target.rows, inputs = target.inputs, block = target.block;
  std::uint8_t* const codes = target.codes;
  float* const scales = target.scales;
  base::parallel_for(
      "kvzap::float8::clear", Range(exec, 0, (rows - first) * inputs),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t row = first + i / inputs, input = i % inputs;
        codes[row * inputs + input] = 0;
        if (input % block == 0) scales[input / block * rows + row] = 0;
      });
}

}  // namespace

bool wants_float8() {
  const char* const asked = std::getenv("KVZAP_FP8");
  const std::string_view name = asked ? asked : "";
  if (name.empty() || name == "off") return false;
  if (name == "on") return true;
  throw Error(fmt::format("KVZAP_FP8 is \"{}\"; expected on or off", name));
}

Float8Scales float8_scales([[maybe_unused]] const ExecutionSpace& exec,
                           const quantised::Matrix& weights) {
  if (!weights.has_floats() || !wants_float8()) return Float8Scales::none;
#if defined(KOKKOS_ENABLE_CUDA)
  const Float8Scales most = cublas::float8_scales(exec);
#else
  const Float8Scales most = !base::runs_on_host || !base::machine().on_device() ? Float8Scales::none
                            : weights.has_scales_of_outputs()                   ? Float8Scales::rows
                                                              : Float8Scales::blocks;
#endif
  if (most == Float8Scales::rows && !weights.has_scales_of_outputs()) return Float8Scales::none;
  return most;
}

bool has_float8_product([[maybe_unused]] const ExecutionSpace& exec,
                        [[maybe_unused]] const Float8Product& product) {
#if defined(KOKKOS_ENABLE_CUDA)
  return cublas::has_algorithm(exec, product);
#else
  return true;
#endif
}

void multiply(const ExecutionSpace& exec, const Float8Product& product) {
#if defined(KOKKOS_ENABLE_CUDA)
  if (cublas::has_algorithm(exec, product)) return cublas::multiply(exec, product);
#endif
  plain_product(exec, product);
}

void round_to_float8(const ExecutionSpace& exec,
                     const Kokkos::View<const float**, Kokkos::LayoutRight, MemorySpace>& x,
                     const Float8Rows& target) {
  using Team = Kokkos::TeamPolicy<ExecutionSpace>;
  const auto rows = static_cast<std::int64_t>(x.extent(0));
  const std::int64_t block = target.block, blocks = target.inputs / block;
  const Float8Rows to = target;
  base::parallel_for(
      "kvzap::float8::round", Team(exec, static_cast<int>(rows * blocks), Kokkos::AUTO),
      KOKKOS_LAMBDA(const typename Team::member_type& team) {
        const std::int64_t m = team.league_rank() / blocks, l = team.league_rank() % blocks;
        const std::int64_t first = l * block;
        float largest = 0;
        Kokkos::parallel_reduce(
            Kokkos::TeamThreadRange(team, block),
            [&](std::int64_t k, float& most) {
              const float magnitude = base::math::fabs(x(m, first + k));
              if (magnitude > most) most = magnitude;
            },
            Kokkos::Max<float>(largest));
        // Below this the factor would overflow; such values become zero.
        if (largest < 0x1p-100f) largest = 0x1p-100f;
        const float factor = float8_most / largest;
        std::uint8_t* const codes = to.codes + m * to.inputs + first;
        Kokkos::parallel_for(Kokkos::TeamThreadRange(team, block), [&](std::int64_t k) {
          codes[k] = e4m3_code(x(m, first + k) * factor);
        });
        Kokkos::single(Kokkos::PerTeam(team),
                       [&] { to.scales[l * to.rows + m] = largest / float8_most; });
      });
  if (rows < target.rows) clear_rows(exec, rows, target);
}

void copy_float8(const ExecutionSpace& exec, const quantised::Matrix& weights, std::int64_t begin,
                 const Float8Rows& target) {
  using quantised::group_inputs;
  using quantised::panel_outputs;
  const std::int64_t end = std::min(weights.outputs(), begin + target.rows);
  const Float8Rows to = target;
  const std::int64_t groups = target.inputs / group_inputs;
  for (const quantised::Section& section : weights.sections()) {
    const quantised::Panels panels = section.panels;
    const std::int64_t own = section.first;
    const std::int64_t first = std::max(begin, own);
    const std::int64_t count = std::min(end, own + section.outputs) - first;
    if (count <= 0) continue;
    // A thread copies the 32 inputs of an output: neighbours read neighbouring bytes.
    base::parallel_for(
        "kvzap::float8::copy", Range(exec, 0, groups * count), KOKKOS_LAMBDA(std::int64_t i) {
          const std::int64_t group = i / count, output = first + i % count;
          const std::int64_t panel = (output - own) / panel_outputs;
          const std::int64_t lane = (output - own) % panel_outputs;
          const std::uint8_t* const values = panels.data + panel * panels.panel_bytes();
          const std::uint8_t* const source =
              values + panels.scales_size() + group * code_bytes(panels.codes) + lane;
          const std::int64_t row = output - begin;
          std::uint8_t* const codes = to.codes + row * to.inputs + group * group_inputs;
          for (int k = 0; k < group_inputs; k += 4) {
            std::uint32_t word = 0;
            for (int j = 0; j < 4; ++j) {
              word |= std::uint32_t{source[(k + j) * panel_outputs]} << 8 * j;
            }
            *reinterpret_cast<std::uint32_t*>(codes + k) = word;
          }
          const std::int64_t input = group * group_inputs;
          if (input % to.block == 0) {
            const std::uint8_t* const scales =
                values + input / panels.block * scale_bytes(panels.scales);
            to.scales[input / to.block * to.rows + row] =
                reinterpret_cast<const float*>(scales)[lane];
          }
        });
  }
  if (end - begin < target.rows) clear_rows(exec, end - begin, target);
}

}  // namespace kvzap::linalg
