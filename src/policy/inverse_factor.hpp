// Small symmetric systems of policies, solved on the host.
#pragma once

#include <cstdint>
#include <vector>

namespace kvzap::policy {

/// Computes the inverse of the Cholesky factor L of a (n, n) + diagonal * I in double: inverse (n,
/// n) = L^-1, row after row; it may be `a` itself. The two triangles of `a` are averaged. A pivot
/// below `least` counts as `least`, for matrices whose pivots can be smaller only through rounding.
/// Returns false and leaves `inverse` unchanged if a pivot is not a positive number. `factor` is
/// scratch.
bool invert_factor(const float* a, std::int64_t n, double diagonal, double least,
                   std::vector<double>& factor, float* inverse);

}  // namespace kvzap::policy
