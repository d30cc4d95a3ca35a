// Kernels of a gated delta net between its two products. Each has a form for hosts and a form for
// devices.
#pragma once

#include <kvzap/core/types.hpp>
#include <kvzap/model/model_config.hpp>
#include <utility>

#include "engine/convolution.hpp"
#include "linalg/gemm.hpp"

namespace kvzap::engine {

/// A rank's part of a net: some key heads, with their value heads.
struct DeltaNet {
  DeltaNetConfig config;
  std::int64_t key_heads = 0;  // of this rank

  std::int64_t value_heads() const { return key_heads * config.group(); }
  std::int64_t channels() const { return key_heads * config.channels(); }
  std::int64_t values() const { return value_heads() * config.value_dim; }
  /// Columns of the products: see delta_in and delta_rates of Model::Weights::Layer.
  std::int64_t columns() const { return channels() + values(); }
  std::int64_t rates() const { return value_heads() * (has_rates() ? 1 + config.decays() : 0); }
  bool has_rates() const { return config.decays() > 0; }
  /// Column at which gates begin.
  std::int64_t gates() const { return channels(); }
};

/// A rank's part of a net's weights, as Model::Weights::Layer has them.
struct DeltaWeights {
  linalg::ConstVector convolution, decay_rates, decay_shifts, norm;
  float norm_eps = 0;
};

/// Tokens that pass the net: rows (token, DeltaNet::columns()) and rates (token, DeltaNet::rates())
/// of the products, and outputs (token, DeltaNet::values()) for the last product.
struct DeltaTokens {
  linalg::Matrix rows, rates, outputs;

  /// Returns tokens begin … end - 1.
  DeltaTokens part(std::int64_t begin, std::int64_t end) const {
    const auto own = std::make_pair(begin, end);
    return {Kokkos::subview(rows, own, Kokkos::ALL), Kokkos::subview(rates, own, Kokkos::ALL),
            Kokkos::subview(outputs, own, Kokkos::ALL)};
  }
};

using DeltaState = LayerState;

/// Lets a sequence's tokens pass the net. Overwrites their rows and rates; writes their outputs and
/// the state after them (key head, DeltaNetConfig::state_values()), which may be that before them.
/// Outputs of Kind::lightning lack their norm and gates.
void pass_delta_net(const ExecutionSpace& exec, const DeltaNet& net, const DeltaWeights& weights,
                    const DeltaTokens& tokens, const DeltaState& before, const DeltaState& after);

}  // namespace kvzap::engine
