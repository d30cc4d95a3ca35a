// Attention within chunks of tokens in both directions, for the policies non-causal and compactor.
#pragma once

#include <kvzap/engine/policy.hpp>

#include "policy/row_math.hpp"

namespace kvzap::policy {

/// The scored tokens of a step: those at positions begin … end - 1.
struct TokenRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t count() const { return end - begin; }
};

/// The attention that all queries of its chunk give each token's row.
class ChunkAttention {
 public:
  /// Chunks of `chunk` tokens each, counted from the first scored token. Products of queries and
  /// keys are divided by sqrt(head_dim) if `scaled`.
  ChunkAttention(std::int64_t chunk, bool scaled) : m_chunk(chunk), m_scaled(scaled) {}

  /// Adds the tokens of a block that are in `tokens`, a range of the step. Holds the queries of at
  /// most one chunk.
  void observe(PolicyLayer& layer, const TokenBlock& block, const TokenRange& tokens);

  /// Returns whether all these tokens of the layer have been observed in this step.
  bool is_complete(const PolicyLayer& layer, const TokenRange& tokens) const;

  /// Fills scores(head, row) of the observed tokens: attention times the norm of the row's value,
  /// then the mean over the row and its two neighbours (0 beyond the ends).
  void scores(PolicyLayer& layer, const Policy::ScoreView& scores);

  /// Returns the rows of the observed tokens, for each head.
  std::vector<RowPart> parts(const PolicyLayer& layer) const;

 private:
  void finish_chunk(PolicyLayer& layer, std::int64_t begin, std::int64_t count);

  std::int64_t m_chunk;
  bool m_scaled;
  int m_layer = -1;
  TokenRange m_tokens;
  std::int64_t m_next = 0;                        // position of the next token
  Kokkos::View<float*, MemorySpace> m_queries;    // (head, token of the chunk, group, head_dim)
  Kokkos::View<float*, MemorySpace> m_products;   // (query of a head's group, key) of a chunk
  Kokkos::View<float*, MemorySpace> m_inverse;    // (query): 1 / sum of exponentials
  Kokkos::View<float*, MemorySpace> m_attention;  // (head, token)
  Kokkos::View<float*, MemorySpace> m_raw;        // (token): for one head, times norms
};

/// Gives a score to rows without a score of this step. Rows of earlier tokens keep their old score.
/// All others, and tokens outside of `scored`, get the largest of the layer (0 if there is none).
/// Collective; waits for the layer's exec.
void complete_scores(PolicyLayer& layer, const TokenRange& scored, const Policy::ScoreView& scores);

}  // namespace kvzap::policy
