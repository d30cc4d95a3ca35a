#pragma once

#include "base/kokkos_compat.hpp"

namespace kvzap::base {

/// Returns log(1 + exp(x)) without an overflow of the exponential, on hosts and devices.
KOKKOS_INLINE_FUNCTION float softplus(float x) { return x > 20.0f ? x : math::log1p(math::exp(x)); }

}  // namespace kvzap::base
