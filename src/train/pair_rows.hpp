// Training reads pairs in blocks and skips pairs that are not finite.
#pragma once

#include <cstdint>
#include <kvzap/lab/pairs.hpp>

namespace kvzap::train {

/// Returns whether all `count` values are finite. Looks at their exponents only.
bool are_finite(DType dtype, const void* values, std::int64_t count);

/// Returns the number of pairs in a block of about 64 MiB in the type of `info`; at least 256.
std::int64_t pairs_of_block(const PairsInfo& info);

}  // namespace kvzap::train
