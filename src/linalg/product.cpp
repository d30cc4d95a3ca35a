#include "linalg/product.hpp"

#include <kvzap/core/array_view.hpp>

#include "base/kokkos_compat.hpp"
#include "base/launch.hpp"
#include "linalg/device/cublas.hpp"
#include "linalg/host/row_kernels.hpp"

namespace kvzap::linalg {

bool has_product_library() { return cublas::is_available; }

bool has_fused_product([[maybe_unused]] const ExecutionSpace& exec,
                       [[maybe_unused]] const Product& product) {
#if defined(KOKKOS_ENABLE_CUDA)
  return cublas::has_algorithm(exec, product);
#else
  return true;
#endif
}

namespace {

// Columns of c that are summed together.
constexpr std::int64_t columns_at_once = 16;

/// sums[j] = a · column j of b, for `count` columns of k contiguous elements, b_stride apart. Sums
/// are independent in groups of four, so that additions do not wait for one another.
template <class Value>
KOKKOS_INLINE_FUNCTION void dots(const Value* a, const Value* b, std::int64_t b_stride,
                                 std::int64_t k, int count, float* sums) {
  int j = 0;
  for (; j + 4 <= count; j += 4) {
    const Value* const b0 = b + j * b_stride;
    const Value* const b1 = b0 + b_stride;
    const Value* const b2 = b1 + b_stride;
    const Value* const b3 = b2 + b_stride;
    float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
    for (std::int64_t i = 0; i < k; ++i) {
      const float x = static_cast<float>(a[i]);
      s0 += x * static_cast<float>(b0[i]);
      s1 += x * static_cast<float>(b1[i]);
      s2 += x * static_cast<float>(b2[i]);
      s3 += x * static_cast<float>(b3[i]);
    }
    sums[j] = s0;
    sums[j + 1] = s1;
    sums[j + 2] = s2;
    sums[j + 3] = s3;
  }
  for (; j < count; ++j) {
    const Value* const column = b + j * b_stride;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t i = 0; i < k; ++i) {
      sum += static_cast<float>(a[i]) * static_cast<float>(column[i]);
    }
    sums[j] = sum;
  }
}

KOKKOS_INLINE_FUNCTION float finished(Epilogue epilogue, float sum) {
  if (epilogue == Epilogue::none) return sum;
  if (epilogue == Epilogue::relu) return sum < 0 ? 0.0f : sum;
  // (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y)).
  const float y = gelu_scale * (sum + gelu_cubic * sum * sum * sum);
  return sum / (1.0f + base::math::exp(-y));
}

template <class Value, class Result>
void plain_product(const ExecutionSpace& exec, const Product& p) {
  const auto* const all_a = static_cast<const Value*>(p.a);
  const auto* const all_b = static_cast<const Value*>(p.b);
  auto* const all_c = static_cast<Result*>(p.c);
  const auto* const bias = static_cast<const Result*>(p.bias);
  const std::int64_t blocks = (p.n + columns_at_once - 1) / columns_at_once;
  base::parallel_for(
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
        const Value* a = all_a + batch * p.a_step + row * (p.a_transposed ? 1 : p.a_stride);
        const Value* b = all_b + batch * p.b_step + first * next_column;
        float sums[columns_at_once];
        for (float& sum : sums) sum = 0;
        // Contiguous elements are read along memory. Otherwise hosts, which run this kernel in
        // tests, would spend most of their time here.
        if (p.transposed && !p.a_transposed) {
          dots(a, b, p.b_stride, p.k, count, sums);
        } else if (!p.transposed && count == columns_at_once) {
          for (std::int64_t k = 0; k < p.k; ++k) {
            const float x = static_cast<float>(a[k * next_a]);
            const Value* b_row = b + k * p.b_stride;
            for (int j = 0; j < columns_at_once; ++j) sums[j] += x * static_cast<float>(b_row[j]);
          }
        } else {
          for (std::int64_t k = 0; k < p.k; ++k) {
            const float x = static_cast<float>(a[k * next_a]);
            for (int j = 0; j < count; ++j) {
              sums[j] += x * static_cast<float>(b[k * next_row + j * next_column]);
            }
          }
        }
        Result* c = all_c + batch * p.c_step + row * p.c_stride + first;
        for (int j = 0; j < count; ++j) {
          const float kept = p.beta == 0 ? 0 : p.beta * static_cast<float>(c[j]);
          const float added = bias == nullptr ? kept : kept + static_cast<float>(bias[first + j]);
          c[j] = Result(finished(p.epilogue, p.alpha * sums[j] + added));
        }
      });
}

}  // namespace

void multiply(const ExecutionSpace& exec, const Product& product) {
  if (product.m == 0 || product.n == 0 || product.batch == 0) return;
#if defined(KOKKOS_ENABLE_CUDA)
  if (product.k > 0) return cublas::multiply(exec, product);
#endif
  if (product.c_dtype == DType::bf16) return plain_product<bfloat16, bfloat16>(exec, product);
  with_value_type(product.dtype,
                  [&](auto zero) { plain_product<decltype(zero), float>(exec, product); });
}

}  // namespace kvzap::linalg
