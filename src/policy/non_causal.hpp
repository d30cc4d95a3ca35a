// Attention within chunks of tokens that sees both ways, for the policies non-causal and compactor.
#pragma once

#include <kvzap/engine/policy.hpp>

#include "policy/row_math.hpp"

namespace kvzap::detail {

/// The tokens of a step that are scored: those at positions begin … end - 1.
struct TokenRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t count() const { return end - begin; }
};

/// Of each token's row, the attention that all queries of its chunk give it.
class ChunkAttention {
 public:
  /// Chunks of `chunk` tokens each, counted from the first token that is scored. Products of
  /// queries and keys are divided by sqrt(head_dim) if `scaled`.
  ChunkAttention(std::int64_t chunk, bool scaled) : m_chunk(chunk), m_scaled(scaled) {}

  /// Takes those tokens of a block that are in `tokens`, of the step. Keeps the queries of at most
  /// one chunk.
  void observe(PolicyLayer& layer, const TokenBlock& block, const TokenRange& tokens);

  /// Whether all these tokens of the layer have been observed in this step.
  bool is_complete(const PolicyLayer& layer, const TokenRange& tokens) const;

  /// scores(head, row) of the tokens observed: attention times the norm of the row's value, then
  /// the mean over the row and its two neighbours, of which there is 0 beyond the ends.
  void scores(PolicyLayer& layer, const Policy::ScoreView& scores);

  /// The rows of the tokens observed, of each head.
  std::vector<RowPart> parts(const PolicyLayer& layer) const;

 private:
  void finish_chunk(PolicyLayer& layer, std::int64_t begin, std::int64_t count);

  std::int64_t m_chunk;
  bool m_scaled;
  int m_layer = -1;
  TokenRange m_tokens;
  std::int64_t m_next = 0;                        // position of the token that comes next
  Kokkos::View<float*, MemorySpace> m_queries;    // (head, token of the chunk, group, head_dim)
  Kokkos::View<float*, MemorySpace> m_products;   // (query of a head's group, key) of a chunk
  Kokkos::View<float*, MemorySpace> m_inverse;    // (query): 1 / sum of exponentials
  Kokkos::View<float*, MemorySpace> m_attention;  // (head, token)
  Kokkos::View<float*, MemorySpace> m_raw;        // (token): of one head, times norms
};

/// Gives rows that have no score of this step one: those of earlier tokens that which they had, and
/// the rest, with the tokens outside of `scored`, the largest of the layer (0 if there is none).
/// Collective; waits for the layer's exec.
void complete_scores(PolicyLayer& layer, const TokenRange& scored, const Policy::ScoreView& scores);

}  // namespace kvzap::detail
