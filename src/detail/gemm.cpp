#include "detail/gemm.hpp"

#include <KokkosBlas3_gemm.hpp>
#include <algorithm>

#include "detail/kokkos_compat.hpp"
#include "detail/row_kernels.hpp"
#include "detail/scratch.hpp"

namespace kvzap::detail {
namespace {

// Up to this many rows a product reads its weights at the speed of memory, and a gemm that packs
// them first would only be slower.
constexpr std::int64_t skinny_rows = 8;
// Widened weights of one panel: small enough to stay in the second-level cache.
constexpr std::int64_t panel_bytes = std::int64_t{1} << 20;

// c (m, 1). Kokkos Kernels 4 turns such a product into a matrix-vector one that loses the stride of
// a column in a wider matrix.
void single_column(const ExecutionSpace& exec, bool transposed, float alpha, const ConstMatrix& a,
                   const ConstMatrix& b, float beta, const Matrix& c) {
  const std::int64_t dim = a.extent(1);
  Kokkos::parallel_for(
      "kvzap::gemm::single_column",
      Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>(exec, 0, c.extent(0)),
      KOKKOS_LAMBDA(std::int64_t m) {
        float sum = 0;
        for (std::int64_t k = 0; k < dim; ++k) sum += a(m, k) * (transposed ? b(0, k) : b(k, 0));
        c(m, 0) = alpha * sum + (beta == 0 ? 0 : beta * c(m, 0));
      });
}

// Kokkos Kernels 3.4 has no overload that takes an instance: its gemm runs on the default one,
// after what was launched there before.
void gemm(const ExecutionSpace& exec, const char* op_b, float alpha, const ConstMatrix& a,
          const ConstMatrix& b, float beta, const Matrix& c) {
  if (c.extent(0) == 0 || c.extent(1) == 0) return;
  if (c.extent(1) == 1) return single_column(exec, *op_b == 'T', alpha, a, b, beta, c);
#if KOKKOS_VERSION >= 40000
  KokkosBlas::gemm(exec, "N", op_b, alpha, a, b, beta, c);
#else
  fence(exec, "kvzap::gemm: the library's gemm does not run on the caller's instance");
  KokkosBlas::gemm("N", op_b, alpha, a, b, beta, c);
#endif
}

template <class Value>
void skinny(const ExecutionSpace& exec, const ConstMatrix& x, const WeightMatrix<Value>& weights,
            const Matrix& y) {
  const std::int64_t rows = x.extent(0);
  const std::int64_t dim = x.extent(1);
  const std::int64_t outputs = weights.extent(0);
  if constexpr (runs_on_host) {
    constexpr std::int64_t block = 64;
    Kokkos::parallel_for(
        "kvzap::linear::skinny",
        Kokkos::RangePolicy<Kokkos::DefaultHostExecutionSpace>(0, (outputs + block - 1) / block),
        [=](std::int64_t i) {
          const std::int64_t begin = i * block;
          skinny_product(weights.data() + begin * weights.stride(0), weights.stride(0),
                         std::min(block, outputs - begin), x.data(), x.stride(0),
                         static_cast<int>(rows), dim, y.data() + begin, y.stride(0));
        });
  } else {
    using Team = Kokkos::TeamPolicy<ExecutionSpace>;
    Kokkos::parallel_for(
        "kvzap::linear::skinny", Team(exec, outputs, Kokkos::AUTO),
        KOKKOS_LAMBDA(const typename Team::member_type& team) {
          const std::int64_t n = team.league_rank();
          for (std::int64_t m = 0; m < rows; ++m) {
            float sum = 0;
            Kokkos::parallel_reduce(
                Kokkos::TeamThreadRange(team, dim),
                [&](std::int64_t k, float& partial) {
                  partial += static_cast<float>(weights(n, k)) * x(m, k);
                },
                sum);
            Kokkos::single(Kokkos::PerTeam(team), [&] { y(m, n) = sum; });
          }
        });
  }
}

template <class Value>
void widen_panel(const ExecutionSpace& exec, const WeightMatrix<Value>& weights, std::int64_t begin,
                 std::int64_t end, const Matrix& panel) {
  const std::int64_t dim = weights.extent(1);
  if constexpr (runs_on_host) {
    Kokkos::parallel_for("kvzap::linear::widen",
                         Kokkos::RangePolicy<Kokkos::DefaultHostExecutionSpace>(begin, end),
                         [=](std::int64_t n) { widen(&weights(n, 0), &panel(n - begin, 0), dim); });
  } else {
    Kokkos::parallel_for(
        "kvzap::linear::widen",
        Kokkos::MDRangePolicy<ExecutionSpace, Kokkos::Rank<2>>(exec, {begin, 0}, {end, dim}),
        KOKKOS_LAMBDA(std::int64_t n, std::int64_t k) {
          panel(n - begin, k) = static_cast<float>(weights(n, k));
        });
  }
}

}  // namespace

void multiply_nt(const ExecutionSpace& exec, float alpha, const ConstMatrix& a,
                 const ConstMatrix& b, float beta, const Matrix& c) {
  gemm(exec, "T", alpha, a, b, beta, c);
}

void multiply_nn(const ExecutionSpace& exec, float alpha, const ConstMatrix& a,
                 const ConstMatrix& b, float beta, const Matrix& c) {
  gemm(exec, "N", alpha, a, b, beta, c);
}

template <class Value>
void LinearMap::operator()(const ExecutionSpace& exec, const ConstMatrix& x,
                           const WeightMatrix<Value>& weights, const ConstVector& bias,
                           const Matrix& y) {
  const std::int64_t rows = x.extent(0);
  const std::int64_t outputs = weights.extent(0);
  const std::int64_t dim = weights.extent(1);
  if (rows == 0 || outputs == 0) return;
  if (dim == 0) {
    Kokkos::deep_copy(exec, y, 0.0f);  // a gemm with no inner extent leaves its result as it was
  } else if (rows <= skinny_rows) {
    skinny(exec, x, weights, y);
  } else if constexpr (std::is_same_v<Value, float>) {
    multiply_nt(exec, 1, x, weights, 0, y);
  } else {
    const std::int64_t panel_rows = std::min<std::int64_t>(
        outputs, std::max<std::int64_t>(16, panel_bytes / (sizeof(float) * dim)));
    reserve_scratch(m_panel, panel_rows * dim, "kvzap::linear::panel");
    for (std::int64_t begin = 0; begin < outputs; begin += panel_rows) {
      const std::int64_t end = std::min(begin + panel_rows, outputs);
      const Matrix panel(m_panel.data(), end - begin, dim);
      widen_panel(exec, weights, begin, end, panel);
      const Matrix columns = Kokkos::subview(y, Kokkos::ALL, std::make_pair(begin, end));
      multiply_nt(exec, 1, x, panel, 0, columns);
    }
  }
  if (bias.extent(0) > 0) {
    Kokkos::parallel_for(
        "kvzap::linear::bias",
        Kokkos::MDRangePolicy<ExecutionSpace, Kokkos::Rank<2>>(exec, {0, 0}, {rows, outputs}),
        KOKKOS_LAMBDA(std::int64_t m, std::int64_t n) { y(m, n) += bias(n); });
  }
}

template void LinearMap::operator()(const ExecutionSpace&, const ConstMatrix&,
                                    const WeightMatrix<float>&, const ConstVector&, const Matrix&);
template void LinearMap::operator()(const ExecutionSpace&, const ConstMatrix&,
                                    const WeightMatrix<half>&, const ConstVector&, const Matrix&);
template void LinearMap::operator()(const ExecutionSpace&, const ConstMatrix&,
                                    const WeightMatrix<bfloat16>&, const ConstVector&,
                                    const Matrix&);

}  // namespace kvzap::detail
