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
  /// Values of B and C.
  std::int64_t inputs() const { return 2 * groups * config.state_dim; }
  /// Channels of the convolution: x of each head, then B and C of each group; of Mamba-1 x alone.
  std::int64_t channels() const { return values() + (config.is_mamba1() ? 0 : inputs()); }
  /// Columns of a row: the channels, z and d of each head; of Mamba-1 x, z, B and C of each group,
  /// and d of each channel.
  std::int64_t columns() const { return steps() + (config.is_mamba1() ? values() : heads); }
  /// Columns of the first product: all, or x and z.
  std::int64_t projections() const { return config.is_mamba1() ? 2 * values() : columns(); }
  std::int64_t first_input() const { return config.is_mamba1() ? 2 * values() : values(); }
  std::int64_t gates() const { return channels(); }
  std::int64_t steps() const { return 2 * values() + inputs(); }
};

/// A rank's part of a state space's weights, as Model::Weights::Layer has them.
struct SpaceWeights {
  linalg::ConstVector convolution, convolution_bias;
  linalg::ConstVector rates, shifts, skips, norm;
  ConstIndices first_heads;  // (group + 1)
  ConstIndices group;        // (head)
  ConstIndices numbers;      // (group)
};

/// Tokens that pass the state space: rows (token, StateSpace::columns()), decays (token, head; not
/// of Mamba-1), and outputs (token, StateSpace::values()) for the last product.
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

/// Lets a sequence's tokens pass the convolution and SiLU. Overwrites the channels of their rows,
/// and writes these inputs to the state after them (head, StateSpaceConfig::state_values()), which
/// may be that before them.
void convolve_inputs(const ExecutionSpace& exec, const StateSpace& space,
                     const SpaceWeights& weights, const SpaceTokens& tokens,
                     const LayerState& before, const LayerState& after);

/// Mamba-1: copies B and C of a group of this rank from its latents (token,
/// StateSpaceConfig::latents()) to the rows.
void place_inputs(const ExecutionSpace& exec, const StateSpace& space, std::int64_t group,
                  const linalg::ConstMatrix& latents, const linalg::Matrix& rows);

/// Lets a sequence's tokens pass the recurrence, after convolve_inputs. Overwrites the steps of
/// their rows and the decays; writes their outputs and the rest of the state.
void update_state(const ExecutionSpace& exec, const StateSpace& space, const SpaceWeights& weights,
                  const SpaceTokens& tokens, const LayerState& before, const LayerState& after);

/// Multiplies the outputs by silu of their gates.
void gate_outputs(const ExecutionSpace& exec, const StateSpace& space, const SpaceTokens& tokens);

/// sums (token, group of all ranks) = sums of squares of this rank's outputs in each group.
void sum_groups(const ExecutionSpace& exec, const StateSpace& space, const SpaceWeights& weights,
                const SpaceTokens& tokens, const linalg::Matrix& sums);

/// RMS norms of the outputs of each group. sums: sum_groups over all ranks.
void norm_groups(const ExecutionSpace& exec, const StateSpace& space, const SpaceWeights& weights,
                 const SpaceTokens& tokens, const linalg::ConstMatrix& sums, float eps);

}  // namespace kvzap::engine
