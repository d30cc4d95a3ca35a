// The attention that every pair of a layer receives from selected queries.
#pragma once

#include <kvzap/core/attention.hpp>
#include <memory>

namespace kvzap {

namespace attention {
struct MassKernels;
}

/// How the probabilities that many queries give a pair are reduced to one number.
enum class MassReduction { sum, max };

/// Factors that multiply the probabilities before they are reduced; none may be negative. An empty
/// view stands for factors of 1. KVzip+ uses the norm of W_O v for each pair and 1 / the norm of
/// each hidden state.
struct MassFactors {
  /// (query head, row): the factor of each row, in the row order of the mass.
  Kokkos::View<const float**, Kokkos::LayoutRight, MemorySpace> rows;
  /// (M): the factor of each query token. A factor of 0 omits a token, unless one of its
  /// probabilities is NaN.
  Kokkos::View<const float*, Kokkos::LayoutStride, MemorySpace> queries;
};

/// Settings of a call of AttentionMass.
struct MassOptions {
  MassReduction reduction = MassReduction::sum;
  MassFactors factors = {};
  float soft_cap = 0;  // that of the call of Attention
};

/// A second pass over attention. For each pair of a KV head it computes the sum or the maximum of
/// its softmax probabilities, over the group's query heads and the tokens of a span. It works tile
/// by tile: scratch space does not grow with the number of rows or tokens. Scores are the products
/// that the paths flash_prefill and panels compute, with the same rounding. Scores of other paths
/// differ within the bounds that Attention states.
///
/// A query whose log-sum-exp is -infinity contributes nothing. A score of -infinity has probability
/// 0. A score or a log-sum-exp that is NaN makes the mass of its rows NaN. After Attention, these
///    are all rows that the query sees.
class AttentionMass {
 public:
  using Span = AttentionSpan;
  using QueryView = Attention::QueryView;
  using MassView = Kokkos::View<float**, Kokkos::LayoutStride, MemorySpace>;

  /// For keys and values of this type.
  explicit AttentionMass(DType dtype);
  ~AttentionMass();

  /// Adds the probabilities of a span's queries to `mass` (KV head, row), or takes their maximum.
  /// The caller fills `mass` with 0 before the first call. Calls for the blocks of one step
  /// accumulate, because the rows of a head keep their order, by position: retained rows, ring
  /// rows, then the span's new rows. Columns after a head's rows are left unchanged.
  ///
  /// queries: (M, query head, dim), as in Attention. To select tokens that are not the last ones,
  /// let the span end with the last of them.
  /// new_keys: (C, KV head, dim).
  /// lse: (M, query head), from Attention.
  ///
  /// Does not wait for `exec` on devices. Throws Error if extents do not fit, for example if the
  /// mass has fewer columns than the longest head has rows.
  void operator()(const ExecutionSpace& exec, const Span& span, const QueryView& queries,
                  const ConstArrayView& new_keys, const LogSumExpView& lse, const MassView& mass,
                  const MassOptions& options = {});

 private:
  DType m_dtype;
  std::unique_ptr<attention::MassKernels> m_kernels;
};

}  // namespace kvzap
