#include "linalg/gemm.hpp"

#include <algorithm>

#include "base/kokkos_compat.hpp"
#include "base/launch.hpp"
#include "base/machine.hpp"
#include "linalg/host/blas_threads.hpp"
#include "linalg/host/onednn.hpp"
#include "linalg/product.hpp"
#if !defined(KOKKOS_ENABLE_CUDA)
#include <KokkosBlas3_gemm.hpp>
#endif

namespace kvzap::linalg {
namespace {

/// op(values)
struct Factor {
  ConstMatrix values;
  bool transposed;
};

#if defined(KOKKOS_ENABLE_CUDA)
void gemm(const ExecutionSpace& exec, float alpha, const Factor& a, const Factor& b, float beta,
          const Matrix& c) {
  Product product;
  product.m = c.extent(0);
  product.n = c.extent(1);
  product.k = a.values.extent(a.transposed ? 0 : 1);
  product.a_transposed = a.transposed;
  product.a = a.values.data();
  product.a_stride = a.values.stride(0);
  product.b = b.values.data();
  product.b_stride = b.values.stride(0);
  product.transposed = b.transposed;
  product.c = c.data();
  product.c_stride = c.stride(0);
  product.alpha = alpha;
  product.beta = beta;
  multiply(exec, product);
}
#else
// c (m, 1). Kokkos Kernels 4 turns such a product into a matrix-vector product and loses the stride
// of a column in a wider matrix.
void single_column(const ExecutionSpace& exec, float alpha, const Factor& left, const Factor& right,
                   float beta, const Matrix& c) {
  const ConstMatrix a = left.values, b = right.values;
  const bool a_transposed = left.transposed, b_transposed = right.transposed;
  const std::int64_t dim = a.extent(a_transposed ? 0 : 1);
  base::parallel_for(
      "kvzap::gemm::single_column",
      Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t> >(exec, 0, c.extent(0)),
      KOKKOS_LAMBDA(std::int64_t m) {
        float sum = 0;
        for (std::int64_t k = 0; k < dim; ++k) {
          sum += (a_transposed ? a(k, m) : a(m, k)) * (b_transposed ? b(0, k) : b(k, 0));
        }
        c(m, 0) = alpha * sum + (beta == 0 ? 0 : beta * c(m, 0));
      });
}

// Whether oneDNN computes a product better than the BLAS does: on a core of an AMD EPYC (Zen 5) at
// 200 to 250 GFLOP/s where OpenBLAS 0.3.21, which does not know the processor, reaches 97 to 120.
bool prefers_onednn(const Matrix& c, std::int64_t dim) {
  constexpr std::int64_t least_extent = 32;
  constexpr std::int64_t least_terms = std::int64_t{1} << 20;
  const auto rows = static_cast<std::int64_t>(c.extent(0));
  const auto columns = static_cast<std::int64_t>(c.extent(1));
  return base::runs_on_host && onednn::is_available() &&
         base::machine().has(base::SimdLevel::avx512) && std::min(rows, columns) >= least_extent &&
         rows * columns * dim >= least_terms;
}

void by_onednn(const ExecutionSpace& exec, float alpha, const Factor& a, const Factor& b,
               float beta, const Matrix& c) {
  base::fence(exec, "kvzap::gemm: the library's gemm does not run on the caller's instance");
  onednn::Gemm product = {};
  product.m = c.extent(0);
  product.n = c.extent(1);
  product.k = a.values.extent(a.transposed ? 0 : 1);
  product.alpha = alpha;
  product.a = a.values.data();
  product.a_stride = a.values.stride(0);
  product.a_transposed = a.transposed;
  product.b = b.values.data();
  product.b_stride = b.values.stride(0);
  product.b_transposed = b.transposed;
  product.beta = beta;
  product.c = c.data();
  product.c_stride = c.stride(0);
  base::launch([=] { onednn::multiply(product); });
}

// Kokkos Kernels 3.4 has no overload that takes an instance. Its gemm runs on the default instance,
// after the kernels launched there before.
void gemm(const ExecutionSpace& exec, float alpha, const Factor& a, const Factor& b, float beta,
          const Matrix& c) {
  if (c.extent(0) == 0 || c.extent(1) == 0) return;
  const char* const op_a = a.transposed ? "T" : "N";
  const char* const op_b = b.transposed ? "T" : "N";
  if (c.extent(1) == 1) return single_column(exec, alpha, a, b, beta, c);
  if (prefers_onednn(c, a.values.extent(a.transposed ? 0 : 1))) {
    return by_onednn(exec, alpha, a, b, beta, c);
  }
  expect_room_for_blas();
  base::launch([=] {
#if KOKKOS_VERSION >= 40000
    KokkosBlas::gemm(exec, op_a, op_b, alpha, a.values, b.values, beta, c);
#else
    base::fence(exec, "kvzap::gemm: the library's gemm does not run on the caller's instance");
    KokkosBlas::gemm(op_a, op_b, alpha, a.values, b.values, beta, c);
#endif
  });
}
#endif

}  // namespace

void multiply_nt(const ExecutionSpace& exec, float alpha, const ConstMatrix& a,
                 const ConstMatrix& b, float beta, const Matrix& c) {
  gemm(exec, alpha, {a, false}, {b, true}, beta, c);
}

void multiply_nn(const ExecutionSpace& exec, float alpha, const ConstMatrix& a,
                 const ConstMatrix& b, float beta, const Matrix& c) {
  gemm(exec, alpha, {a, false}, {b, false}, beta, c);
}

void multiply_tn(const ExecutionSpace& exec, float alpha, const ConstMatrix& a,
                 const ConstMatrix& b, float beta, const Matrix& c) {
  gemm(exec, alpha, {a, true}, {b, false}, beta, c);
}

void multiply_large(const ExecutionSpace& exec, Op op_a, const ConstMatrix& a, Op op_b,
                    const ConstMatrix& b, float beta, const Matrix& c) {
  const Factor left = {a, op_a == Op::transposed};
  const Factor right = {b, op_b == Op::transposed};
#if !defined(KOKKOS_ENABLE_CUDA)
  if (base::runs_on_host && onednn::is_available() && c.extent(0) > 0 && c.extent(1) > 0) {
    return by_onednn(exec, 1, left, right, beta, c);
  }
#endif
  gemm(exec, 1, left, right, beta, c);
}

}  // namespace kvzap::linalg
