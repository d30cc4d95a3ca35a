#include "linalg/product.hpp"

#include "linalg/device/cublas.hpp"

namespace kvzap::detail {

bool has_product_library() { return cublas::is_available; }

namespace {

// Columns of c that are summed up together.
constexpr std::int64_t columns_at_once = 16;

template <class Value>
void plain_product(const ExecutionSpace& exec, const Product<Value>& p) {
  const std::int64_t blocks = (p.n + columns_at_once - 1) / columns_at_once;
  Kokkos::parallel_for(
      "kvzap::product::plain",
      Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>(exec, 0,
                                                                           p.batch * p.m * blocks),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t batch = i / (p.m * blocks);
        const std::int64_t row = i / blocks % p.m;
        const std::int64_t first = i % blocks * columns_at_once;
        const int count =
            static_cast<int>(p.n - first < columns_at_once ? p.n - first : columns_at_once);
        const std::int64_t next_column = p.transposed ? p.b_stride : 1;
        const std::int64_t next_row = p.transposed ? 1 : p.b_stride;
        const std::int64_t next_a = p.a_transposed ? p.a_stride : 1;
        const Value* a = p.a + batch * p.a_step + row * (p.a_transposed ? 1 : p.a_stride);
        const Value* b = p.b + batch * p.b_step + first * next_column;
        float sums[columns_at_once];
        for (float& sum : sums) sum = 0;
        for (std::int64_t k = 0; k < p.k; ++k) {
          const float x = static_cast<float>(a[k * next_a]);
          for (int j = 0; j < count; ++j) {
            sums[j] += x * static_cast<float>(b[k * next_row + j * next_column]);
          }
        }
        float* c = p.c + batch * p.c_step + row * p.c_stride + first;
        for (int j = 0; j < count; ++j) {
          c[j] = p.alpha * sums[j] + (p.beta == 0 ? 0 : p.beta * c[j]);
        }
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
