// Finds windows of rows that scores must not evict, and protects these rows.
#pragma once

#include <kvzap/engine/policy.hpp>
#include <utility>
#include <vector>

#include "policy/row_math.hpp"

namespace kvzap::policy {

using RowRange = PolicyRange;
/// One number per row of a head.
using RowVector = Kokkos::View<float*, MemorySpace>;

/// A range of rows of one head: [first, second).
using Rows = std::pair<std::int64_t, std::int64_t>;

/// Returns the number of rows of a head at positions below `position`. These rows come first. Waits
/// for the layer's instance.
std::int64_t rows_before(PolicyLayer& layer, int head, std::int64_t position);

/// scores(head, r) = value for the rows r of `rows`.
void fill_rows(const ExecutionSpace& exec, const Policy::ScoreView& scores, int head, Rows rows,
               float value);

/// Gives the rows rows[head] of each head a score one above the largest score of the layer's other
/// rows, over heads and ranks (1 if there are no others). Scores of the other rows must be set; NaN
/// is ignored. Collective; waits for the layer's instance.
void protect_rows(PolicyLayer& layer, const Policy::ScoreView& scores,
                  const std::vector<Rows>& rows);

}  // namespace kvzap::policy
