#include "device_limits.hpp"

#include <Kokkos_Core.hpp>
#include <cstdint>

#include "limits.hpp"
#include "linalg/product.hpp"

namespace kvzap::perf {

namespace {

/// Random numbers of +-[1, 2), as float and as two of bf16: products of zeros would take less
/// power, and so run at a higher clock.
void fill(const ExecutionSpace& exec, const Kokkos::View<std::uint32_t*, MemorySpace>& words) {
  Kokkos::parallel_for(
      "kvzap::perf::fill", Kokkos::RangePolicy<ExecutionSpace>(exec, 0, words.size()),
      KOKKOS_LAMBDA(std::int64_t i) {
        auto bits = static_cast<std::uint32_t>(i) * 2654435761u;
        bits = (bits ^ (bits >> 15)) * 2246822519u;
        words(i) = 0x3f803f80u | ((bits ^ (bits >> 13)) & 0x807f807fu);
      });
}

}  // namespace

DeviceLimits::DeviceLimits()
    : m_memory(Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::perf::limits"),
               LimitKernels::working_set / sizeof(LaneValues)) {
  fill(m_exec, Kokkos::View<std::uint32_t*, MemorySpace>(
                   reinterpret_cast<std::uint32_t*>(m_memory.data()),
                   LimitKernels::working_set / sizeof(std::uint32_t)));
}

void DeviceLimits::read() {
  const auto memory = m_memory;
  float sum = 0;
  Kokkos::parallel_reduce(
      "kvzap::perf::read", Kokkos::RangePolicy<ExecutionSpace>(m_exec, 0, memory.size()),
      KOKKOS_LAMBDA(std::int64_t i, float& into) {
        const LaneValues values = memory(i);
        into += (values.x[0] + values.x[1]) + (values.x[2] + values.x[3]);
      },
      sum);
  m_exec.fence();
}

void DeviceLimits::copy() {
  const auto memory = m_memory;
  const auto half = static_cast<std::int64_t>(memory.size() / 2);
  Kokkos::parallel_for(
      "kvzap::perf::copy", Kokkos::RangePolicy<ExecutionSpace>(m_exec, 0, half),
      KOKKOS_LAMBDA(std::int64_t i) { memory(half + i) = memory(i); });
  m_exec.fence();
}

void DeviceLimits::multiply(DType dtype) {
  // Operands and result are parts of the working set.
  constexpr std::int64_t m = LimitKernels::gemm_m, n = LimitKernels::gemm_n,
                         k = LimitKernels::gemm_k;
  static_assert(sizeof(float) * (m * k + n * k + m * n) <= LimitKernels::working_set);
  auto* const memory = reinterpret_cast<float*>(m_memory.data());
  linalg::Product product;
  product.dtype = dtype;
  product.m = m;
  product.n = n;
  product.k = k;
  product.a = memory;
  product.a_stride = k;
  product.b = memory + m * k;
  product.b_stride = k;
  product.transposed = true;
  product.c = memory + m * k + n * k;
  product.c_stride = n;
  linalg::multiply(m_exec, product);
  m_exec.fence();
}

}  // namespace kvzap::perf
