// Prefill attention on hosts whose processor has no AVX2: tiles of scores by gemm.
#pragma once

#include "attention/call.hpp"
#include "linalg/gemm.hpp"

namespace kvzap::attention {

/// Attention of one span of any number of query tokens. For each KV head, tile of query tokens and
/// tile of rows, it computes scores by gemm, an online softmax, and weighted sums by gemm. Rows are
/// gathered into tiles of float, which costs 1/512 of the arithmetic. Kernels run one after the
/// other, each on all threads.
class GemmTiles {
 public:
  void operator()(const ExecutionSpace& exec, const AttentionSpan& span, const AttentionCall& call);

  /// Reserves scratch space for spans of up to `tokens` query tokens.
  void reserve(int group, int dim, std::int64_t tokens);
  static std::size_t scratch_bytes(int group, int dim, std::int64_t tokens);

 private:
  linalg::Vector m_queries;  // (query row, dim): query rows are tokens x query heads of the group
  linalg::Vector m_keys;     // (row, dim)
  linalg::Vector m_values;   // (row, dim)
  linalg::Vector m_scores;   // (query row, row)
  linalg::Vector m_sums;     // (query row, dim)
  linalg::Vector m_maximum;  // (query row)
  linalg::Vector m_weight;   // (query row)
};

/// The rows of a head that a span sees: cached ones, then its new ones.
struct SpanRows {
  const AttentionSpan& span;
  const ConstArrayView& new_keys;
  const ConstArrayView& new_values;
  RingOrder order;
  int head;
};

/// Copies rows, from row `begin` on, to keys and values (row, dim), or to keys alone if there are
/// no values.
void load_rows(const ExecutionSpace& exec, const SpanRows& rows, std::int64_t begin,
               const linalg::Matrix& k, const linalg::Matrix& v = {});

}  // namespace kvzap::attention
