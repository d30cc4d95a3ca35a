// The types that the library's templates are compiled for.
#pragma once

#include <kvzap/core/types.hpp>

/// MACRO(Value) for each type of weights and cached rows.
#define KVZAP_FOR_EACH_VALUE(MACRO) \
  MACRO(float)                      \
  MACRO(half)                       \
  MACRO(bfloat16)

/// MACRO(Value, order) for each kind of cache.
#define KVZAP_FOR_EACH_CACHE(MACRO)       \
  MACRO(float, PageOrder::token_major)    \
  MACRO(float, PageOrder::dim_major)      \
  MACRO(half, PageOrder::token_major)     \
  MACRO(half, PageOrder::dim_major)       \
  MACRO(bfloat16, PageOrder::token_major) \
  MACRO(bfloat16, PageOrder::dim_major)
