#include "policy/row_products.hpp"

#include <algorithm>

#include "base/host_threads.hpp"
#include "base/simd.hpp"
#include "policy/row_math.hpp"

namespace kvzap::policy {
namespace {

using linalg::ConstMatrix;

// StridedRows that one work item reads on a host.
constexpr std::int64_t slice_rows = 128;

struct StridedRows {
  const float* data;  // null: all rows are 0
  std::int64_t stride;
};

KVZAP_BODY void products_of_rows_body(const StridedRows& a, const StridedRows& b, const float* v,
                                      float by, std::int64_t dim, std::int64_t rows,
                                      float* products) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* const row = a.data + r * a.stride;
    float sum = 0;
    if (b.data) {
      const float* const other = b.data + r * b.stride;
#pragma omp simd reduction(+ : sum)
      for (std::int64_t d = 0; d < dim; ++d) sum += row[d] * (other[d] + by * v[d]);
    } else {
#pragma omp simd reduction(+ : sum)
      for (std::int64_t d = 0; d < dim; ++d) sum += row[d] * (by * v[d]);
    }
    products[r] = sum;
  }
}
KVZAP_KERNEL(void, products_of_rows,
             (const StridedRows& a, const StridedRows& b, const float* v, float by,
              std::int64_t dim, std::int64_t rows, float* products),
             (a, b, v, by, dim, rows, products))

KVZAP_BODY void norms_of_rows_body(const float* a, std::int64_t stride, std::int64_t dim,
                                   std::int64_t rows, float* norms) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* const row = a + r * stride;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t d = 0; d < dim; ++d) sum += row[d] * row[d];
    norms[r] = __builtin_sqrtf(sum);
  }
}
KVZAP_KERNEL(void, norms_of_rows,
             (const float* a, std::int64_t stride, std::int64_t dim, std::int64_t rows,
              float* norms),
             (a, stride, dim, rows, norms))

}  // namespace

void row_products(const ExecutionSpace& exec, const ConstMatrix& a, const float* b,
                  std::int64_t b_stride, const float* v, float by, float* products) {
  const auto rows = static_cast<std::int64_t>(a.extent(0));
  const auto dim = static_cast<std::int64_t>(a.extent(1));
  const auto stride = static_cast<std::int64_t>(a.stride(0));
  const float* const first = a.data();
  if (base::machine().on_host()) {
    base::host_for("kvzap::policy::row_products", (rows + slice_rows - 1) / slice_rows,
                   [=](std::int64_t i) {
                     const std::int64_t begin = i * slice_rows;
                     products_of_rows({first + begin * stride, stride},
                                      {b ? b + begin * b_stride : nullptr, b_stride}, v, by, dim,
                                      std::min(slice_rows, rows - begin), products + begin);
                   });
    return;
  }
  Kokkos::parallel_for(
      "kvzap::policy::row_products", PolicyRange(exec, 0, rows), KOKKOS_LAMBDA(std::int64_t r) {
        float sum = 0;
        for (std::int64_t d = 0; d < dim; ++d) {
          sum += first[r * stride + d] * ((b ? b[r * b_stride + d] : 0.0f) + by * v[d]);
        }
        products[r] = sum;
      });
}

void row_norms(const ExecutionSpace& exec, const ConstMatrix& a, float* norms) {
  const auto rows = static_cast<std::int64_t>(a.extent(0));
  const auto dim = static_cast<std::int64_t>(a.extent(1));
  const auto stride = static_cast<std::int64_t>(a.stride(0));
  const float* const first = a.data();
  if (base::machine().on_host()) {
    base::host_for("kvzap::policy::row_norms", (rows + slice_rows - 1) / slice_rows,
                   [=](std::int64_t i) {
                     const std::int64_t begin = i * slice_rows;
                     norms_of_rows(first + begin * stride, stride, dim,
                                   std::min(slice_rows, rows - begin), norms + begin);
                   });
    return;
  }
  Kokkos::parallel_for(
      "kvzap::policy::row_norms", PolicyRange(exec, 0, rows), KOKKOS_LAMBDA(std::int64_t r) {
        float sum = 0;
        for (std::int64_t d = 0; d < dim; ++d) {
          sum += first[r * stride + d] * first[r * stride + d];
        }
        norms[r] = base::math::sqrt(sum);
      });
}

}  // namespace kvzap::policy
