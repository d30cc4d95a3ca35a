// Arithmetic on the rows of a head that several policies share: norms, sums over rows, z-scores.
#pragma once

#include <kvzap/engine/policy.hpp>
#include <utility>
#include <vector>

#include "base/kokkos_compat.hpp"
#include "base/machine.hpp"

namespace kvzap::policy {

using PolicyRange = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;
/// Rows begin … begin + count - 1 of a head.
struct RowPart {
  std::int64_t begin = 0;
  std::int64_t count = 0;
};

/// Scores of some rows of one head.
using HeadScores = Kokkos::View<float*, Kokkos::LayoutStride, MemorySpace>;

/// Returns the scores of the rows begin … begin + count - 1 of a head.
inline HeadScores scores_of(const Policy::ScoreView& scores, int head, std::int64_t begin,
                            std::int64_t count) {
  return Kokkos::subview(scores, head, std::make_pair(begin, begin + count));
}

/// All rows of the heads on this rank.
std::vector<RowPart> whole_heads(const PolicyLayer& layer);

/// Columns of one work item. On a host it takes a run of columns that vectorizes. On a device each
/// thread has one column, so that neighbours read neighbouring values.
inline constexpr std::int64_t columns_per_item = base::runs_on_host ? 64 : 1;

/// sum_d a[d] * b[d]. Separate lanes let the compiler vectorize a sum that it may not reorder.
KOKKOS_INLINE_FUNCTION float dot(const float* a, const float* b, std::int64_t dim) {
  constexpr int lanes = 16;
  float sums[lanes];
  for (float& sum : sums) sum = 0;
  std::int64_t d = 0;
  for (; d + lanes <= dim; d += lanes) {
    for (int lane = 0; lane < lanes; ++lane) sums[lane] += a[d + lane] * b[d + lane];
  }
  float rest = 0;
  for (; d < dim; ++d) rest += a[d] * b[d];
  for (int half = lanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  }
  return sums[0] + rest;
}

KOKKOS_INLINE_FUNCTION float norm(const float* x, std::int64_t dim) {
  return base::math::sqrt(dot(x, x, dim));
}

/// Returns the largest of `count` values, and no NaN, to all threads of a team.
template <class Member>
KOKKOS_INLINE_FUNCTION float largest_of(const Member& team, const float* values,
                                        std::int64_t count) {
  float largest = 0;
  Kokkos::parallel_reduce(
      Kokkos::TeamThreadRange(team, count),
      [&](std::int64_t i, float& most) {
        if (values[i] > most) most = values[i];
      },
      Kokkos::Max<float>(largest));
  return largest;
}

/// values(i) = exp(scaling * (values(i) - largest)). Returns their sum, in Sum, to all threads of a
/// team, which then see the values.
template <class Sum, class Member>
KOKKOS_INLINE_FUNCTION Sum exponentials_of(const Member& team, float* values, std::int64_t count,
                                           float largest, float scaling = 1) {
  Sum sum = 0;
  Kokkos::parallel_reduce(
      Kokkos::TeamThreadRange(team, count),
      [&](std::int64_t i, Sum& partial) {
        values[i] = base::math::exp(scaling * (values[i] - largest));
        partial += static_cast<Sum>(values[i]);
      },
      sum);
  team.team_barrier();
  return sum;
}

/// inverse(r) = 1 / max(|rows(r, :)|, 1e-12)
void inverse_norms(const ExecutionSpace& exec, const PolicyLayer::RowsView& rows,
                   const Kokkos::View<float*, MemorySpace>& inverse);

/// Turns `count` vectors of logits (count, rows) into exponentials, and computes factors (count)
/// that make them probabilities, divided by `count`: the sum of factor * exponential over the
/// vectors is their mean softmax.
void soften(const ExecutionSpace& exec, float* logits, std::int64_t rows, std::int64_t count,
            const Kokkos::View<float*, MemorySpace>& factors);

/// Cosines and sines of RoPE, turns (count, 2, pairs), for the angles (first + stride * t) *
/// frequencies(d), in double; times `scale`.
void fill_turns(const ExecutionSpace& exec, std::int64_t first, std::int64_t stride,
                std::int64_t count, const Kokkos::View<const float*, MemorySpace>& frequencies,
                double scale, float* turns);

/// Sums over the rows of a head. Keeps scratch space.
class ColumnSums {
 public:
  using Sums = Kokkos::View<const double*, MemorySpace>;

  /// Returns (columns): sum_r factors(r) * rows(r, column), in double. Without factors (an empty
  /// view) it sums the rows themselves. Valid until the next call.
  Sums operator()(const ExecutionSpace& exec, const PolicyLayer::RowsView& rows,
                  const Kokkos::View<const float*, MemorySpace>& factors = {});

 private:
  Kokkos::View<double*, MemorySpace> m_partial;  // (block of rows, column)
  Kokkos::View<double*, MemorySpace> m_sums;
};

/// scores = (scores - mean) / max(standard deviation, 1e-6), over the parts of all heads of the
/// layer on all ranks together. The deviation is that of a sample (n - 1, as in torch), and 0 for
/// fewer than two rows. The result is the same for any number of ranks. Collective; waits for the
/// layer's exec.
void standardize(const PolicyLayer& layer, const std::vector<RowPart>& parts,
                 const Policy::ScoreView& scores);

}  // namespace kvzap::policy
