#include "policy/row_protection.hpp"

#include <algorithm>
#include <limits>

namespace kvzap::policy {
namespace {

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
  // One thread does a binary search.
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
  // There may be no scores, or only NaN.
  if (largest <= std::numeric_limits<float>::lowest()) largest = 0;
  const auto value = static_cast<float>(largest + 1);
  for (int h = 0; h < layer.heads(); ++h) fill_rows(layer.exec(), scores, h, rows[h], value);
}

}  // namespace kvzap::policy
