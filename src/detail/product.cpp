#include "detail/product.hpp"

#include "detail/cublas.hpp"

namespace kvzap::detail {

bool has_product_library() { return cublas::is_available; }

namespace {

template <class Value>
void plain_product(const ExecutionSpace& exec, const Product<Value>& p) {
  Kokkos::parallel_for(
      "kvzap::product::plain",
      Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>(exec, 0,
                                                                           p.batch * p.m * p.n),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t batch = i / (p.m * p.n);
        const std::int64_t row = i / p.n % p.m;
        const std::int64_t column = i % p.n;
        const Value* a = p.a + batch * p.a_step + row * p.a_stride;
        const Value* b = p.b + batch * p.b_step + column * (p.transposed ? p.b_stride : 1);
        const std::int64_t b_next = p.transposed ? 1 : p.b_stride;
        float sum = 0;
        for (std::int64_t k = 0; k < p.k; ++k) {
          sum += static_cast<float>(a[k]) * static_cast<float>(b[k * b_next]);
        }
        float& c = p.c[batch * p.c_step + row * p.c_stride + column];
        c = p.alpha * sum + (p.beta == 0 ? 0 : p.beta * c);
      });
}

}  // namespace

template <class Value>
void multiply(const ExecutionSpace& exec, const Product<Value>& product) {
  if (product.m == 0 || product.n == 0 || product.batch == 0) return;
#if defined(KOKKOS_ENABLE_CUDA)
  if (product.k > 0) return cublas::multiply(exec, product);
#endif
  plain_product(exec, product);
}

template void multiply(const ExecutionSpace&, const Product<float>&);
template void multiply(const ExecutionSpace&, const Product<half>&);
template void multiply(const ExecutionSpace&, const Product<bfloat16>&);

}  // namespace kvzap::detail
