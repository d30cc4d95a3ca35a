// Kernels of a state space between its two products. Each has a form for hosts and a form for
// devices.
#pragma once

#include <kvzap/model/model_config.hpp>
#include <utility>

#include "engine/convolution.hpp"
#include "linalg/gemm.hpp"

namespace kvzap::engine {

/// A rank's part of a state space: some heads, and the groups that these belong to.
struct StateSpace {
  StateSpaceConfig config;
  std::int64_t heads = 0, groups = 0;  // of this rank

  std::int64_t values() const { return heads * config.head_dim; }
  /// Channels of the convolution: x of each head, then B and C of each group.
  std::int64_t channels() const { return values() + 2 * groups * config.state_dim; }
  /// Columns of the first product: the channels, then z and d of each head.
  std::int64_t columns() const { return channels() + values() + heads; }
  std::int64_t gates() const { return channels(); }
  std::int64_t steps() const { return channels() + values(); }
};

/// A rank's part of a state space's weights, as Model::Weights::Layer has them.
struct SpaceWeights {
  linalg::ConstVector convolution, convolution_bias;
  linalg::ConstVector rates, shifts, skips, norm;
  ConstIndices first_heads;  // (group + 1)
  ConstIndices group;        // (head)
  ConstIndices numbers;      // (group)
};

/// Tokens that pass the state space: rows (token, StateSpace::columns()) of the product, decays
/// (token, head), and outputs (token, StateSpace::values()) for the last product.
struct SpaceTokens {
  linalg::Matrix rows, decays, outputs;

  /// Returns tokens begin … end - 1.
  SpaceTokens part(std::int64_t begin, std::int64_t end) const {
    const auto own = std::make_pair(begin, end);
    return {Kokkos::subview(rows, own, Kokkos::ALL), Kokkos::subview(decays, own, Kokkos::ALL),
            Kokkos::subview(outputs, own, Kokkos::ALL)};
  }
};

/// Multiplies the product by the factors of StateSpaceConfig::in_multipliers.
void scale_projections(const ExecutionSpace& exec, const StateSpace& space,
                       const linalg::Matrix& rows);

/// Lets a sequence's tokens pass the convolution and the recurrence. Overwrites their rows, except
/// gates, and decays; writes their outputs and the state after them (head,
/// StateSpaceConfig::state_values()), which may be that before them.
void pass_state_space(const ExecutionSpace& exec, const StateSpace& space,
                      const SpaceWeights& weights, const SpaceTokens& tokens,
                      const LayerState& before, const LayerState& after);

/// Multiplies the outputs by silu of their gates.
void gate_outputs(const ExecutionSpace& exec, const StateSpace& space, const SpaceTokens& tokens);

/// sums (token, group of all ranks) = sums of squares of this rank's outputs in each group.
void sum_groups(const ExecutionSpace& exec, const StateSpace& space, const SpaceWeights& weights,
                const SpaceTokens& tokens, const linalg::Matrix& sums);

/// RMS norms of the outputs of each group. sums: sum_groups over all ranks.
void norm_groups(const ExecutionSpace& exec, const StateSpace& space, const SpaceWeights& weights,
                 const SpaceTokens& tokens, const linalg::ConstMatrix& sums, float eps);

}  // namespace kvzap::engine
