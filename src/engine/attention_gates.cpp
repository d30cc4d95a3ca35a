#include "engine/attention_gates.hpp"

#include <algorithm>

#include "base/host_threads.hpp"
#include "base/kokkos_compat.hpp"
#include "base/launch.hpp"
#include "base/machine.hpp"
#include "base/softplus.hpp"
#include "linalg/host/row_kernels.hpp"

namespace kvzap::engine {

using GateRange = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;

void apply_gates(const ExecutionSpace& exec, const linalg::ConstMatrix& gates, const GateRule& rule,
                 const linalg::Matrix& y) {
  const std::int64_t columns = y.extent(1);
  if (base::machine().on_host() && rule.dim == 1 && !rule.is_softplus) {
    return base::host_for("kvzap::step::gates", y.extent(0), columns, [=](std::int64_t i) {
      linalg::sigmoid_times(&gates(i, 0), &y(i, 0), &y(i, 0), columns);
    });
  }
  const auto factor = KOKKOS_LAMBDA(std::int64_t row, std::int64_t gate) {
    const float x = gates(row, gate);
    return rule.is_softplus ? base::softplus(x) : 1.0f / (1.0f + base::math::exp(-x));
  };
  if (base::machine().on_host()) {
    return base::host_for("kvzap::step::gates", y.extent(0), columns, [=](std::int64_t row) {
      for (std::int64_t c = 0; c < columns;) {
        const std::int64_t gate = (rule.skip + c) / rule.dim;
        const std::int64_t end = std::min(columns, (gate + 1) * rule.dim - rule.skip);
        const float factor_of_gate = factor(row, gate);
        for (; c < end; ++c) y(row, c) *= factor_of_gate;
      }
    });
  }
  base::parallel_for(
      "kvzap::step::gates", GateRange(exec, 0, y.extent(0) * columns),
      KOKKOS_LAMBDA(std::int64_t i) {
        y(i / columns, i % columns) *= factor(i / columns, (rule.skip + i % columns) / rule.dim);
      });
}

}  // namespace kvzap::engine
