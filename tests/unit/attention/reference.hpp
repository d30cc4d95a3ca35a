// What attention is compared with. Apart from the cases, so that it can be optimized where they are
// not: see tests/CMakeLists.txt.
#pragma once

#include <cstddef>
#include <vector>

namespace kvzap::test::attention {

/// Softmax attention in double precision, with the meaning of NaN and infinity that Attention
/// documents: of one query (dim) over the first `visible` of the keys and values (row, dim). Gives
/// the output and the weights, the latter all 0 where nothing is visible; returns the log-sum-exp.
double solve_query(const double* query, const double* keys, const double* values,
                   std::size_t visible, int dim, std::vector<double>& output,
                   std::vector<double>& weights, double soft_cap = 0);

}  // namespace kvzap::test::attention
