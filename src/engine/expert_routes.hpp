// Which experts serve which tokens.
#pragma once

#include <kvzap/core/types.hpp>
#include <kvzap/model/model_config.hpp>
#include <vector>

#include "base/kokkos_compat.hpp"
#include "linalg/gemm.hpp"

namespace kvzap::engine {

/// The experts of each token of a block, and the tokens of each expert. Keeps its memory.
class ExpertRoutes {
 public:
  using Rows = Kokkos::View<const std::int64_t*, MemorySpace>;

  /// Tokens of one expert: rows of the block in ascending order, and the expert's weight for each.
  struct Tokens {
    Rows rows;
    linalg::ConstVector weights;
  };

  /// Allocates what blocks of up to `tokens` tokens need.
  void reserve(const ExpertsConfig& config, std::int64_t tokens);
  /// Returns room for the router's logits: (token, expert).
  linalg::Matrix logits(std::int64_t tokens) const;
  /// Learned numbers of each expert; or empty.
  struct Learned {
    linalg::ConstVector correction = {};  // see ExpertsConfig::has_correction
    linalg::ConstVector bias = {};        // of the logits
    linalg::ConstVector scales = {};      // of the weights, after all else
  };
  /// Chooses by the logits plus bias, and overwrites them. Equal scores go to the expert of the
  /// smaller number.
  void choose(const ExecutionSpace& exec, const ExpertsConfig& config, std::int64_t tokens,
              const Learned& learned);
  /// Returns the experts that `choose` has chosen for each token, one after the other, and their
  /// weights: (token * per_token).
  Rows chosen(std::int64_t choices) const {
    return Kokkos::subview(m_chosen, std::make_pair(std::int64_t{0}, choices));
  }
  linalg::ConstVector chosen_weights(std::int64_t choices) const {
    return Kokkos::subview(m_chosen_weights, std::make_pair(std::int64_t{0}, choices));
  }
  /// Sorts these tokens by expert, for tokens_of. Waits.
  void sort(const ExecutionSpace& exec, std::int64_t tokens, std::int64_t per_token);
  Tokens tokens_of(std::int64_t expert) const;
  void release();

 private:
  std::int64_t m_experts = 0;
  linalg::Vector m_logits;        // (token, expert); then scores
  linalg::Vector m_ranking;       // (token, expert): scores by which experts are chosen
  linalg::Vector m_group_scores;  // (token, group)
  Kokkos::View<std::int64_t*, MemorySpace> m_chosen;  // (token, choice): experts
  linalg::Vector m_chosen_weights;                    // (token, choice)
  // Sorted by expert.
  Kokkos::View<std::int64_t*, MemorySpace> m_rows;
  linalg::Vector m_weights;
  std::vector<std::int64_t> m_begin;  // of each expert in m_rows; then the end
};

/// y (row, column) = 0
void clear(const ExecutionSpace& exec, const linalg::Matrix& y);

/// y (rows(i), column) += weights(i) * x (i, column), or x without weights. The rows differ from
/// each other.
void add_weighted_rows(const ExecutionSpace& exec, const linalg::ConstMatrix& x,
                       const ExpertRoutes::Tokens& tokens, const linalg::Matrix& y);

/// y (token, column) += the sum over choices of weight * x(choice, column), or of x without
/// weights: x (token * choices, column).
void add_choices(const ExecutionSpace& exec, const linalg::ConstMatrix& x,
                 const linalg::ConstVector& weights, const linalg::Matrix& y);

/// y (row, column) *= weights (row)
void scale_rows(const ExecutionSpace& exec, const linalg::ConstVector& weights,
                const linalg::Matrix& y);

/// y (row, column) *= 1 / (1 + exp(-logits(row, 0)))
void gate_rows(const ExecutionSpace& exec, const linalg::ConstMatrix& logits,
               const linalg::Matrix& y);

}  // namespace kvzap::engine
