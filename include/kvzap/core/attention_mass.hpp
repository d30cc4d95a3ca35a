// How much attention every pair of a layer gets from chosen queries.
#pragma once

#include <kvzap/core/attention.hpp>
#include <memory>

namespace kvzap {

namespace detail {
template <class Value, PageOrder order>
struct MassScratch;
}

/// How the probabilities that many queries give a pair become one number.
enum class MassReduction { sum, max };

/// Factors by which probabilities are multiplied before they are reduced, each an empty view for 1;
/// not negative. KVzip+ has the norm of W_O v of each pair, and 1 over that of each hidden state.
struct MassFactors {
  /// (query head, row): of each row, in the order of the mass.
  Kokkos::View<const float**, Kokkos::LayoutRight, MemorySpace> rows;
  /// (M): of each query token; 0 leaves a token out, unless a probability of it is NaN.
  Kokkos::View<const float*, Kokkos::LayoutStride, MemorySpace> queries;
};

/// A second pass over attention: for each pair of a KV head the sum, or the largest, of the softmax
/// probabilities that the query heads of its group give it in the tokens of a span. Tile by tile:
/// scratch space does not grow with the number of rows or tokens. Scores are products of what the
/// paths flash_prefill and panels multiply, rounded as there; those of other paths differ as
/// Attention says.
///
/// A query whose log-sum-exp is -infinity contributes nothing. A score of -infinity has the
/// probability 0. A score, or a log-sum-exp, that is NaN makes the mass of the rows concerned NaN:
/// after Attention, that of all rows that such a query sees.
template <class Value, PageOrder order>
class AttentionMass {
 public:
  using Span = AttentionSpan<Value, order>;
  using QueryView = typename Attention<Value, order>::QueryView;
  using RowsView = typename Attention<Value, order>::RowsView;
  using MassView = Kokkos::View<float**, Kokkos::LayoutStride, MemorySpace>;

  AttentionMass();
  ~AttentionMass();

  /// Takes the probabilities of a span's queries into `mass` (KV head, row), which the caller fills
  /// with 0 before the first call; the calls of one step's blocks add up, since the rows of a head
  /// come in the same order: by position (its retained rows, those of the ring, then the span's new
  /// rows). Columns behind a head's rows are left alone.
  ///
  /// queries: (M, query head, dim), as in Attention. To choose tokens that are not the last ones,
  /// let the span end with the last of them. new_keys: (C, KV head, dim). lse: (M, query head),
  /// from Attention. Does not wait for `exec` on devices. Throws Error on extents that do not fit,
  /// such as a mass with fewer columns than the longest head may have rows.
  void operator()(const ExecutionSpace& exec, const Span& span, const QueryView& queries,
                  const RowsView& new_keys, const LogSumExpView& lse, MassReduction reduction,
                  const MassView& mass, const MassFactors& factors = {});

 private:
  std::unique_ptr<detail::MassScratch<Value, order>> m_scratch;
};

}  // namespace kvzap
