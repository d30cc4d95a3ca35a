// The types that the library's templates are compiled for.
#pragma once

#include <kvzap/core/types.hpp>

/// MACRO(Value) for each type of weights and cached rows.
#define KVZAP_FOR_EACH_VALUE(MACRO) \
  MACRO(float)                      \
  MACRO(half)                       \
  MACRO(bfloat16)
