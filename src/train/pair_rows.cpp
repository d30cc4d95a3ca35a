#include "train/pair_rows.hpp"

#include <algorithm>
#include <cstring>
#include <kvzap/core/array_view.hpp>
#include <type_traits>

namespace kvzap::train {
namespace {

template <class Value>
bool are_all_finite(const Value* values, std::int64_t count) {
  using Word = std::conditional_t<sizeof(Value) == 2, std::uint16_t, std::uint32_t>;
  constexpr auto exponent = static_cast<Word>(std::is_same_v<Value, float>      ? 0x7f800000u
                                              : std::is_same_v<Value, bfloat16> ? 0x7f80u
                                                                                : 0x7c00u);
  Word found = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    Word word;
    std::memcpy(&word, values + i, sizeof(word));
    found = static_cast<Word>(found | static_cast<Word>((word & exponent) == exponent));
  }
  return found == 0;
}

}  // namespace

bool are_finite(DType dtype, const void* values, std::int64_t count) {
  return with_value_type(dtype, [&](auto zero) {
    return are_all_finite(static_cast<const decltype(zero)*>(values), count);
  });
}

std::int64_t pairs_of_block(const PairsInfo& info) {
  constexpr std::int64_t bytes = std::int64_t{64} << 20;
  const auto pair = static_cast<std::int64_t>(size_of(info.dtype)) * info.hidden_size;
  return std::max<std::int64_t>(256, bytes / std::max<std::int64_t>(pair, 1));
}

}  // namespace kvzap::train
