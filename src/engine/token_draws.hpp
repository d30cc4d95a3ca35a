// Draws of tokens from rows of logits, where the logits are.
#pragma once

#include <cstdint>
#include <kvzap/engine/token_draw.hpp>

#include "base/kokkos_compat.hpp"
#include "base/staged.hpp"
#include "linalg/gemm.hpp"

namespace kvzap::engine {

/// Draws tokens of some rows of a matrix of logits, each as its own settings say, as draw_token
/// does. On devices sums of weights have another order, which depends on the number of tokens
/// alone: a draw differs if its random number is within about 1e-12 of a boundary.
///
/// On devices, teams sort chunks of 2,048 tokens and sum their weights. Then a team for each row
/// looks for the tokens where the filters cut and where the random number lies: by bisection of the
/// logits, with the sums of all chunks.
class TokenDraws {
 public:
  /// The most tokens of a vocabulary: a team has numbers of each chunk in its scratch memory.
  static constexpr std::int64_t most_tokens = std::int64_t{1} << 20;

  /// A row of the logits.
  struct Row {
    std::int64_t row = 0;
    TokenDraw draw = {};
  };

  /// Reserves memory for draws of `rows` rows of `vocabulary` logits each. On devices that is 14
  /// bytes for each logit of some rows, at most 64 MiB unless one row needs more.
  void reserve(std::int64_t rows, std::int64_t vocabulary);
  /// Returns the next draws, for the host to write: (rows).
  Row* rows() const { return m_rows.host(); }
  /// Brings them to the device. The host must not write them again before the draws are complete.
  void place(const ExecutionSpace& exec) const;
  /// Draws the tokens of the rows: tokens(row), -1 if a logit is NaN or the largest is not finite.
  /// Other elements of `tokens` stay.
  void run(const ExecutionSpace& exec, const linalg::ConstMatrix& logits,
           const Kokkos::View<std::int64_t*, MemorySpace>& tokens) const;

 private:
  std::int64_t m_count = 0;  // of rows
  base::Staged<Row> m_rows;
  // Of the rows of a launch, chunks in the order of their logits: keys, tokens, and sums of weights
  // up to each token.
  Kokkos::View<std::uint32_t*, MemorySpace> m_keys;
  Kokkos::View<std::uint16_t*, MemorySpace> m_places;
  Kokkos::View<double*, MemorySpace> m_sums;
};

}  // namespace kvzap::engine
