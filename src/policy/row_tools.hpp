// What several policies do with rows once they are scored: find those of a window, and protect
// them.
#pragma once

#include <kvzap/engine/policy.hpp>
#include <utility>
#include <vector>

#include "linalg/gemm.hpp"
#include "policy/rows.hpp"

namespace kvzap::policy {

using RowRange = detail::PolicyRange;
/// One number per row of a head.
using RowVector = Kokkos::View<float*, MemorySpace>;

/// A range of rows of one head: [first, second).
using Rows = std::pair<std::int64_t, std::int64_t>;

/// Rows of a head at positions below `position`: those come first. Waits for the layer's instance.
std::int64_t rows_before(PolicyLayer& layer, int head, std::int64_t position);

/// scores(head, r) = value for the rows r of `rows`.
void fill_rows(const ExecutionSpace& exec, const Policy::ScoreView& scores, int head, Rows rows,
               float value);

/// Gives the rows rows[head] of each head one more than the largest score of all other rows of the
/// layer, over heads and ranks (1 if there are no others). All other scores are there; they are not
/// looked at if they are NaN. Collective, waits for the layer's instance.
void protect_rows(PolicyLayer& layer, const Policy::ScoreView& scores,
                  const std::vector<Rows>& rows);

/// products[r] = sum_d a(r, d) * (b[r * b_stride + d] + by * v[d]); b may be null, for zeros.
void row_products(const ExecutionSpace& exec, const detail::ConstMatrix& a, const float* b,
                  std::int64_t b_stride, const float* v, float by, float* products);
/// norms[r] = the Euclidean norm of a(r, :).
void row_norms(const ExecutionSpace& exec, const detail::ConstMatrix& a, float* norms);

}  // namespace kvzap::policy
