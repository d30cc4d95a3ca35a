// Decode attention on a device: one query token per span; teams share the rows of every head.
#pragma once

#include "attention/call.hpp"
#include "attention/device/split_parts.hpp"
#include "base/staged.hpp"
#include "linalg/gemm.hpp"

namespace kvzap::attention {

/// Softmax attention of all spans of one query token. In the first kernel a team takes a part of
/// the rows of one KV head. It reads each key and value once for all query heads of the group (up
/// to 8 at a time). Its results are their largest score, sum of weights and weighted sums of
/// values. A kernel of its own does this for quantised rows, which remain rotated. The last kernel
/// merges the parts of each query head exactly.
///
/// A part has 128 rows. In heads of more than 16,384 rows it has the smallest multiple of 128 with
/// which 128 parts suffice. Only the head's own length decides, so the result of a span does not
/// depend on other spans. Queries, exponentials and sums are float. Runs on any backend, and waits
/// only when the memory for parts has to grow.
class SplitKV {
 public:
  using Span = AttentionSpan;

  /// Computes the spans of one query token and skips the others.
  void operator()(const ExecutionSpace& exec, const std::vector<Span>& spans,
                  const AttentionCall& call);

  /// reserve() allocates scratch space of scratch_bytes(), whatever the lengths of heads: about 64
  /// MiB, or the need of one span if that is more. One span needs at most 512 bytes (with quantised
  /// pages 1 KiB) x query heads x (head_dim + 2).
  void reserve(const AttentionExtents& extents);
  static std::size_t scratch_bytes(const AttentionExtents& extents);

  /// Attention::plan_calls and the functions after it. All spans have one query token.
  static bool can_plan(const AttentionExtents& extents);
  void plan_calls(std::size_t calls);
  void plan(std::size_t number, const std::vector<Span>& spans, const AttentionCall& call);
  void copy_plans(const ExecutionSpace& exec);
  void run_planned(const ExecutionSpace& exec, std::size_t number);
  /// Adds what decides the launches of the planned calls.
  void add_shape(std::vector<std::int64_t>& shape) const;

 private:
  /// A launch of spans. Those of a planned call have their places in m_places from `first` on.
  struct Planned {
    SplitSpans spans = {};
    std::int64_t quantised_parts = 0;
    std::size_t first = 0;

    /// Gives the last span so many more parts of each head.
    void pad(SplitSpan& last, std::int64_t quantised, std::int64_t wide);
    CachedLayer cached;
    AttentionCall call;
  };

  linalg::Vector m_partials;
  // The spans' places, if there are too many for a kernel's arguments.
  Kokkos::View<char*, MemorySpace> m_table;
  void pad_plans();

  std::vector<Planned> m_planned;  // (number)
  /// Parts of a head over all spans of a launch, with those that the last span has too many.
  struct Padded {
    std::int64_t quantised, wide;
  };
  std::vector<Padded> m_padded;  // (number); of the step before
  std::vector<SplitSpan> m_places;
  base::Staged<SplitSpan> m_staged_places;
};

}  // namespace kvzap::attention
