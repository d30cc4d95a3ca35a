// Pairs as training reads them: in blocks, without those that are not finite.
#pragma once

#include <cstdint>
#include <kvzap/lab/pairs.hpp>

namespace kvzap::detail {

/// Whether all `count` values are finite, told by their exponents.
template <class Value>
bool are_finite(const Value* values, std::int64_t count);

/// Pairs of a block that takes about 64 MiB in the type of `info`, at least 256.
std::int64_t pairs_of_block(const PairsInfo& info);

}  // namespace kvzap::detail
