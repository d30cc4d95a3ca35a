// The views of a call of AttentionMass, as all its implementations take them.
#pragma once

#include <kvzap/core/attention_mass.hpp>

#include "attention/call.hpp"

namespace kvzap::attention {

/// The views of one call, checked to fit each other, and sizes derived from them. NewRows: as in
/// BasicCall.
template <class NewRows>
struct BasicMassCall {
  Attention::QueryView queries;
  NewRows new_keys;
  LogSumExpView lse;
  AttentionMass::MassView mass;
  MassFactors factors;
  MassReduction reduction = MassReduction::sum;
  int kv_heads = 0;  // > 0
  int group = 1;
  int dim = 1;
  float soft_cap = 0;

  template <class Value>
  BasicMassCall<RowsView<Value>> as() const {
    return {
        queries, new_keys.template as<Value>(), lse, mass, factors, reduction, kv_heads, group, dim,
        soft_cap};
  }
};
template <class Value>
using MassCall = BasicMassCall<RowsView<Value>>;

/// Adds `p` to `mass`; with is_max, keeps the larger of the two. A NaN stays.
KOKKOS_INLINE_FUNCTION void take_mass(float p, bool is_max, float& mass) {
  if (!is_max) {
    mass += p;
  } else if (p > mass || p != p) {
    mass = p;
  }
}

}  // namespace kvzap::attention
