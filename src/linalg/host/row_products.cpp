#include "linalg/host/row_products.hpp"

#include <algorithm>
#include <type_traits>

#include "base/vec.hpp"

// Within a block of rows that a kernel works on, offsets fit an int.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

namespace kvzap::linalg {
namespace {

/// Calls `run` with n_rows as a compile-time constant.
template <class Run>
void with_rows(int n_rows, const Run& run) {
  switch (n_rows) {
    case 1:
      return run(std::integral_constant<int, 1>{});
    case 2:
      return run(std::integral_constant<int, 2>{});
    case 3:
      return run(std::integral_constant<int, 3>{});
    case 4:
      return run(std::integral_constant<int, 4>{});
    case 5:
      return run(std::integral_constant<int, 5>{});
    case 6:
      return run(std::integral_constant<int, 6>{});
    case 7:
      return run(std::integral_constant<int, 7>{});
    case 8:
      return run(std::integral_constant<int, 8>{});
  }
}

/// Prefetches the lines of `count` values from `values` on. The addresses may lie after the
/// weights; they are not read.
template <class Value>
KVZAP_BODY void prefetch(const Value* values, std::int64_t count) {
  constexpr std::int64_t line = 64 / sizeof(Value);
  for (std::int64_t i = 0; i < count; i += line) {
    __builtin_prefetch(reinterpret_cast<const char*>(values + i), 0, 2);
  }
}

}  // namespace
}  // namespace kvzap::linalg

#define KVZAP_LEVEL_BODY "linalg/host/row_products.inc"
#include "base/each_level.hpp"

namespace kvzap::linalg {

// Value is a type. NOLINTBEGIN(bugprone-macro-parentheses)
#define KVZAP_SKINNY_PRODUCT(Value)                                                              \
  void skinny_product(RowSpan<const float> x, RowSpan<const Value> weights, std::int64_t inputs, \
                      float* y, std::int64_t y_stride) {                                         \
    KVZAP_AT_LEVEL(multiply<Value>)(x, weights, inputs, y, y_stride);                            \
  }
KVZAP_SKINNY_PRODUCT(float)
KVZAP_SKINNY_PRODUCT(half)
KVZAP_SKINNY_PRODUCT(bfloat16)
KVZAP_SKINNY_PRODUCT(RoundedFloat)
#undef KVZAP_SKINNY_PRODUCT
// NOLINTEND(bugprone-macro-parentheses)

void skinny_product([[maybe_unused]] RowSpan<const bfloat16> x,
                    [[maybe_unused]] RowSpan<const bfloat16> weights,
                    [[maybe_unused]] std::int64_t inputs, [[maybe_unused]] float* y,
                    [[maybe_unused]] std::int64_t y_stride) {
#if KVZAP_X86
  avx512_bf16::multiply_in_pairs<>(x, weights, inputs, y, y_stride);
#elif KVZAP_NEON
  neon_bf16::multiply_in_pairs<>(x, weights, inputs, y, y_stride);
#endif
}

}  // namespace kvzap::linalg

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
