// Small symmetric systems of policies, on the host.
#pragma once

#include <cstdint>
#include <vector>

namespace kvzap::detail {

/// Inverts the Cholesky factor L of a (n, n) + diagonal * I, whose two triangles are averaged, in
/// double: inverse (n, n) = L^-1, row after row; it may be `a` itself. A pivot below `least` counts
/// as `least`, for matrices whose pivots can only be less by rounding. False, and `inverse` is left
/// as it is, if a pivot is not a positive number. `factor` is scratch.
bool invert_factor(const float* a, std::int64_t n, double diagonal, double least,
                   std::vector<double>& factor, float* inverse);

}  // namespace kvzap::detail
