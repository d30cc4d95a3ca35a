// Softmax of the attention of a head's queries, as policies compute it from logits.
#pragma once

#include <cmath>
#include <kvzap/engine/policy.hpp>

#include "linalg/gemm.hpp"

namespace kvzap::policy {

/// Logits of queries (token, query head of the group), which become probabilities.
struct Softmax {
  linalg::Matrix logits;                          // (query, row)
  PolicyLayer::PositionView positions;            // (row), or empty: all queries see all rows
  Kokkos::View<const float*, MemorySpace> sinks;  // (query head of the group), or empty
  std::int64_t first = 0;                         // position of the first token
  int group = 1;
  float cap = 0;  // of the model's scores; 0: none

  /// Rows at positions up to the query's own.
  KOKKOS_INLINE_FUNCTION std::int64_t seen(std::int64_t query) const {
    std::int64_t begin = 0, end = logits.extent(1);
    if (positions.data() == nullptr) return end;
    while (begin < end) {
      const std::int64_t middle = begin + (end - begin) / 2;
      if (positions(middle) <= first + query / group) {
        begin = middle + 1;
      } else {
        end = middle;
      }
    }
    return begin;
  }
  KOKKOS_INLINE_FUNCTION float sink(std::int64_t query) const {
    return sinks.extent(0) > 0 ? sinks(query % group) : -INFINITY;
  }
};

/// Replaces logits by probabilities: 0 for rows that a query does not see. Sinks take part in the
/// sum.
void apply_softmax(const ExecutionSpace& exec, const Softmax& softmax);

}  // namespace kvzap::policy
