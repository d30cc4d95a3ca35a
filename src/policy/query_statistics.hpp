// Mean and covariance of a layer's queries before RoPE, and their prediction for later tokens.
#pragma once

#include <kvzap/engine/policy.hpp>

#include "linalg/gemm.hpp"
#include "policy/row_protection.hpp"

namespace kvzap::policy {

/// Collects the mean of the queries before RoPE for the query heads of this rank and, if requested,
/// their covariance (divided by the number of queries). The queries are those of the tokens that a
/// step adds, or of the newest tokens if the step adds few to a longer sequence. The first tokens
/// of the sequence are excluded, because their queries differ from all others. Queries are rotated
/// back by the angle of their position, and divided by RoPE's factor. A policy that uses this needs
/// PolicyNeeds::frequencies.
///
/// Sums are float, around the mean of the first block, so that nothing cancels. Cost per query
/// head: 1.5 tokens head_dim^2 operations with the covariance, else a pass over the queries.
/// Memory: (query heads, head_dim, head_dim) sums and a copy of one block's queries.
class QueryStatistics {
 public:
  using Means = linalg::Matrix;  // (query head, head_dim)
  using Covariances =
      Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace>;  // (query head, head_dim, head_dim)

  /// sink: tokens excluded at the start of the sequence. history: number of newest tokens whose
  /// queries count in steps with fewer tokens. PolicyNeeds::recent must equal it, and
  /// PolicyNeeds::blocks must be on.
  QueryStatistics(bool has_covariance, std::int64_t sink, std::int64_t history)
      : m_has_covariance(has_covariance), m_sink(sink), m_history(history) {}

  void observe(PolicyLayer& layer, const TokenBlock& block);
  /// Call it in Policy::score. It ends the layer's statistics, computes means() and covariances(),
  /// and prepares for the next layer.
  void finish(PolicyLayer& layer);

  /// The results of finish; covariances are empty if they were not requested.
  const Means& means() const { return m_means; }
  const Covariances& covariances() const { return m_covariances; }
  /// Position of the token that follows the step.
  std::int64_t end() const { return m_end; }

 private:
  void begin(PolicyLayer& layer);
  void add(PolicyLayer& layer, const TokenBlock& block);

  bool m_has_covariance;
  std::int64_t m_sink;
  std::int64_t m_history;
  std::int64_t m_count = 0;  // queries so far
  std::int64_t m_end = 0;
  linalg::Matrix m_shift;     // (query head, head_dim): subtracted from each query
  Means m_means;              // sums after subtraction; at the end the means
  Covariances m_covariances;  // sums of their products; at the end the covariances
  // (token, cosine or sine, pair): RoPE's angles of a block, of the first token of every run, and
  // of the tokens within a run.
  Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace> m_angles, m_runs, m_within;
  RowVector m_queries;  // (query head, token, head_dim)
  RowVector m_partial;  // (slice of tokens, query head, head_dim)
};

/// RoPE's rotation averaged over positions. It maps dimensions (i, i + head_dim/2) = (x, y) to (a x
/// - b y, b x + a y). a and b are the mean cosine and sine of the angles position *
/// inverse_frequencies(i), both times RoPE's factor.
class AverageRope {
 public:
  /// Prepares the positions begin … begin + count - 1, count >= 1.
  void prepare(PolicyLayer& layer, std::int64_t begin, std::int64_t count);
  /// Rotates means (query head, head_dim) in place.
  void turn(const ExecutionSpace& exec, const linalg::Matrix& means) const;
  /// Computes R C R^T for each query head's C, in place.
  void turn(const ExecutionSpace& exec, const QueryStatistics::Covariances& covariances) const;

 private:
  std::int64_t m_begin = -1;
  std::int64_t m_count = 0;
  Kokkos::View<double**, Kokkos::LayoutRight, MemorySpace> m_mean;  // (pair, cos and sin)
};

}  // namespace kvzap::policy
