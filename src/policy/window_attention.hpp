// The attention that the newest queries give each row of a KV head, normalized over the rows that
// the head has now.
#pragma once

#include <kvzap/engine/policy.hpp>

#include "linalg/gemm.hpp"
#include "policy/row_protection.hpp"

namespace kvzap::policy {

/// packed (query, head_dim) = scale * queries of the group of `head`: all query heads of a token,
/// then those of the next one.
void pack_queries(const ExecutionSpace& exec, const TokenBlock::QueryView& queries, int head,
                  int group, float scale, const linalg::Matrix& packed);

/// Returns the newest `window` tokens, PolicyNeeds::recent. The window of a sequence that is not
/// longer than it is the newer half of the sequence. Call it in `score` only.
TokenBlock observation_window(PolicyLayer& layer, std::int64_t window);

/// The probabilities that some queries, in all query heads of a KV head's group, give each row of
/// that head. They are softmax(q . k / sqrt(head_dim)) over the rows at positions up to the query's
/// own, with the model's soft cap and sinks, in float, computed tile by tile from the head's keys.
/// One product takes as many queries as their logits fit in most_stored. For very many rows these
/// would be only a few queries, so logits are then computed twice. Extra memory is at most 16 MiB
/// and a few numbers per query and tile, beside the head's keys. Cost: 2 * w * g * rows * head_dim
/// operations per KV head for w queries and g query heads in a group, and one exponential per
/// logit.
///
/// Keeps scratch space between calls.
class WindowAttention {
 public:
  /// Largest number of logits in memory.
  static constexpr std::int64_t most_stored = std::int64_t{1} << 22;
  /// Smallest number of queries in a product: products with fewer are slow.
  static constexpr std::int64_t least_queries = 64;

  /// The factor of a query's probabilities before they are summed.
  enum class Factor {
    one,
    rows_before  // rows that it sees before its own: FINCH's normalisation
  };

  /// mass(r) = the sum over queries and the group's query heads of factor * probability, for the
  /// rows r of `head` (on this rank); `mass` has at least rows(head) elements.
  void sum(PolicyLayer& layer, int head, const TokenBlock& queries, Factor factor,
           const RowVector& mass);
  /// counts(r) = number of (query, query head) pairs that see the row and give it a probability
  /// below 1 / (rows that the query sees).
  void count_below_mean(PolicyLayer& layer, int head, const TokenBlock& queries,
                        const RowVector& counts);
  /// The tokens whose queries attend to a row.
  struct Recurrence {
    /// A token attends to a row if a query head of the group gives it at least this probability.
    float probability = 0;
    Kokkos::View<std::int64_t*, MemorySpace> last;  // (row): position of the newest such token
    Kokkos::View<std::int64_t*, MemorySpace>
        longest;  // (row): longest interval between two of them
  };
  /// Goes on with `recurrence`, whose views have at least rows(head) elements, by these tokens.
  void track(PolicyLayer& layer, int head, const TokenBlock& queries, const Recurrence& recurrence);
  /// Frees the scratch space.
  void release() { *this = {}; }

 private:
  struct Reduction {
    enum class Kind { sum, count, track };
    Kind kind;
    Factor factor;
    RowVector result;
    Recurrence recurrence;
  };
  void reduce(PolicyLayer& layer, int head, const TokenBlock& block, const Reduction& reduction);
  void reduce_some(PolicyLayer& layer, const PolicyLayer::RowsView& keys, int head,
                   const TokenBlock& block, std::int64_t first, std::int64_t count,
                   const Reduction& reduction);

  linalg::Vector m_queries;                         // (query, head_dim), scaled
  Kokkos::View<std::int64_t*, MemorySpace> m_seen;  // (token)
  linalg::Vector m_logits;                          // (tile, query, row of it)
  linalg::Vector m_largest;                         // (tile, query)
  linalg::Vector m_sums;                            // (tile, query)
};

}  // namespace kvzap::policy
