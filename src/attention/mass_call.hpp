// The views of a call of AttentionMass, as all its implementations take them.
#pragma once

#include <kvzap/core/attention_mass.hpp>

#include "attention/call.hpp"

namespace kvzap::attention {

/// The views of one call, checked to fit each other, and sizes derived from them.
struct MassCall : MassOptions {
  Attention::QueryView queries;
  ConstArrayView new_keys;
  LogSumExpView lse;
  AttentionMass::MassView mass;
  int kv_heads = 0;  // > 0
  int group = 1;
  int dim = 1;

  DType dtype() const { return new_keys.dtype; }
};

/// Adds `p` to `mass`; with is_max, keeps the larger of the two. A NaN stays.
KOKKOS_INLINE_FUNCTION void take_mass(float p, bool is_max, float& mass) {
  if (!is_max) {
    mass += p;
  } else if (p > mass || p != p) {
    mass = p;
  }
}

}  // namespace kvzap::attention
