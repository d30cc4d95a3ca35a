// Mean and covariance of a layer's queries before RoPE, and what the queries of later tokens will
// be like.
#pragma once

#include <kvzap/engine/policy.hpp>

#include "linalg/gemm.hpp"
#include "policy/row_protection.hpp"

namespace kvzap::policy {

/// Gathers, for the query heads of this rank, the mean of their queries before RoPE and, if asked,
/// their covariance (divided by the number of queries), from the tokens that a step brings; or,
/// where a step brings few to a sequence that has more, from the newest tokens. The first tokens of
/// the sequence, whose queries are unlike others, are left out. Queries are turned back by their
/// position's angle, and divided by what RoPE has multiplied them by. Who uses it has
/// PolicyNeeds::frequencies.
///
/// Sums are taken in float around the first block's mean, so that nothing cancels. Cost per query
/// head: 1.5 tokens head_dim^2 operations with the covariance, else a pass over the queries.
/// Memory: (query heads, head_dim, head_dim) sums and a copy of one block's queries.
class QueryStatistics {
 public:
  using Means = detail::Matrix;  // (query head, head_dim)
  using Covariances =
      Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace>;  // (query head, head_dim, head_dim)

  /// sink: tokens left out at the sequence's start. history: tokens whose queries count in steps of
  /// fewer; PolicyNeeds::recent has to be as many, and PolicyNeeds::blocks on.
  QueryStatistics(bool has_covariance, std::int64_t sink, std::int64_t history)
      : m_has_covariance(has_covariance), m_sink(sink), m_history(history) {}

  void observe(PolicyLayer& layer, const TokenBlock& block);
  /// To be called in Policy::score: ends the layer's statistics, makes means() and covariances(),
  /// and is ready for the next layer's.
  void finish(PolicyLayer& layer);

  /// As finish left them; empty covariances if there are none to gather.
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
  detail::Matrix m_shift;     // (query head, head_dim): what is subtracted from each query
  Means m_means;              // sums of what is left; at the end the means
  Covariances m_covariances;  // sums of its products; at the end the covariances
  // (token, cosine or sine, pair): RoPE's angles of a block, of every so many of its tokens, and of
  // the tokens between.
  Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace> m_angles, m_runs, m_within;
  RowVector m_queries;  // (query head, token, head_dim)
  RowVector m_partial;  // (slice of tokens, query head, head_dim)
};

/// RoPE's rotation averaged over positions: it takes dimensions (i, i + head_dim/2) = (x, y) to
/// (a x - b y, b x + a y), with a and b the mean cosine and sine of the angles position *
/// inverse_frequencies(i), both times what RoPE multiplies queries by.
class AverageRope {
 public:
  /// For the positions begin … begin + count - 1, count >= 1.
  void prepare(PolicyLayer& layer, std::int64_t begin, std::int64_t count);
  /// means (query head, head_dim), in place.
  void turn(const ExecutionSpace& exec, const detail::Matrix& means) const;
  /// R C R^T for each query head's C, in place.
  void turn(const ExecutionSpace& exec, const QueryStatistics::Covariances& covariances) const;

 private:
  std::int64_t m_begin = -1;
  std::int64_t m_count = 0;
  Kokkos::View<double**, Kokkos::LayoutRight, MemorySpace> m_mean;  // (pair, cos and sin)
};

}  // namespace kvzap::policy
