#include "policy/row_tools.hpp"

#include <algorithm>
#include <limits>

#include "base/host_threads.hpp"
#include "base/simd.hpp"

namespace kvzap::policy {
namespace {

using detail::ConstMatrix;

// Rows that one work item of a host reads.
constexpr std::int64_t slice_rows = 128;

KVZAP_BODY void products_of_rows_body(const float* a, std::int64_t a_stride, const float* b,
                                      std::int64_t b_stride, const float* v, float by,
                                      std::int64_t dim, std::int64_t rows, float* products) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* const row = a + r * a_stride;
    float sum = 0;
    if (b) {
      const float* const other = b + r * b_stride;
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
             (const float* a, std::int64_t a_stride, const float* b, std::int64_t b_stride,
              const float* v, float by, std::int64_t dim, std::int64_t rows, float* products),
             (a, a_stride, b, b_stride, v, by, dim, rows, products))

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

void max_of_rows(const ExecutionSpace& exec, const Policy::ScoreView& scores, int head, Rows rows,
                 double& largest) {
  if (rows.first >= rows.second) return;
  float found = 0;
  Kokkos::parallel_reduce(
      "kvzap::policy::max_of_rows", RowRange(exec, rows.first, rows.second),
      KOKKOS_LAMBDA(std::int64_t r, float& most) {
        if (scores(head, r) > most) most = scores(head, r);
      },
      Kokkos::Max<float>(found));
  largest = std::max<double>(largest, found);
}

std::int64_t lower_bound(const ExecutionSpace& exec, const PolicyLayer::PositionView& positions,
                         std::int64_t position) {
  const auto count = static_cast<std::int64_t>(positions.extent(0));
  std::int64_t found = 0;
  // One thread: a binary search.
  Kokkos::parallel_reduce(
      "kvzap::policy::rows_before", RowRange(exec, 0, 1),
      KOKKOS_LAMBDA(std::int64_t, std::int64_t & result) {
        std::int64_t begin = 0;
        std::int64_t end = count;
        while (begin < end) {
          const std::int64_t middle = begin + (end - begin) / 2;
          if (positions(middle) < position) {
            begin = middle + 1;
          } else {
            end = middle;
          }
        }
        result += begin;
      },
      found);
  return found;
}

}  // namespace

void row_products(const ExecutionSpace& exec, const ConstMatrix& a, const float* b,
                  std::int64_t b_stride, const float* v, float by, float* products) {
  const auto rows = static_cast<std::int64_t>(a.extent(0));
  const auto dim = static_cast<std::int64_t>(a.extent(1));
  const auto stride = static_cast<std::int64_t>(a.stride(0));
  const float* const first = a.data();
  if (detail::uses_host_kernels()) {
    detail::host_for("kvzap::policy::row_products", (rows + slice_rows - 1) / slice_rows,
                     [=](std::int64_t i) {
                       const std::int64_t begin = i * slice_rows;
                       products_of_rows(first + begin * stride, stride,
                                        b ? b + begin * b_stride : nullptr, b_stride, v, by, dim,
                                        std::min(slice_rows, rows - begin), products + begin);
                     });
    return;
  }
  Kokkos::parallel_for(
      "kvzap::policy::row_products", RowRange(exec, 0, rows), KOKKOS_LAMBDA(std::int64_t r) {
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
  if (detail::uses_host_kernels()) {
    detail::host_for("kvzap::policy::row_norms", (rows + slice_rows - 1) / slice_rows,
                     [=](std::int64_t i) {
                       const std::int64_t begin = i * slice_rows;
                       norms_of_rows(first + begin * stride, stride, dim,
                                     std::min(slice_rows, rows - begin), norms + begin);
                     });
    return;
  }
  Kokkos::parallel_for(
      "kvzap::policy::row_norms", RowRange(exec, 0, rows), KOKKOS_LAMBDA(std::int64_t r) {
        float sum = 0;
        for (std::int64_t d = 0; d < dim; ++d) {
          sum += first[r * stride + d] * first[r * stride + d];
        }
        norms[r] = detail::math::sqrt(sum);
      });
}

std::int64_t rows_before(PolicyLayer& layer, int head, std::int64_t position) {
  return lower_bound(layer.exec(), layer.positions(head), position);
}

void fill_rows(const ExecutionSpace& exec, const Policy::ScoreView& scores, int head, Rows rows,
               float value) {
  Kokkos::parallel_for(
      "kvzap::policy::fill_rows", RowRange(exec, rows.first, rows.second),
      KOKKOS_LAMBDA(std::int64_t r) { scores(head, r) = value; });
}

void protect_rows(PolicyLayer& layer, const Policy::ScoreView& scores,
                  const std::vector<Rows>& rows) {
  double largest = -std::numeric_limits<double>::infinity();
  for (int h = 0; h < layer.heads(); ++h) {
    max_of_rows(layer.exec(), scores, h, {0, rows[h].first}, largest);
    max_of_rows(layer.exec(), scores, h, {rows[h].second, layer.rows(h)}, largest);
  }
  layer.comm().all_reduce_max(&largest, 1);
  // What a maximum over no score at all is, or over NaN alone.
  if (largest <= std::numeric_limits<float>::lowest()) largest = 0;
  const auto value = static_cast<float>(largest + 1);
  for (int h = 0; h < layer.heads(); ++h) fill_rows(layer.exec(), scores, h, rows[h], value);
}

}  // namespace kvzap::policy
