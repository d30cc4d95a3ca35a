// Attention as the layers of a model compute it.
#pragma once

#include <kvzap/core/attention.hpp>
#include <vector>

namespace kvzap::engine {

/// An Attention with the settings of a model.
class SpanAttention {
 public:
  using Heads = Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace>;

  SpanAttention(DType dtype, double soft_cap)
      : m_attention(dtype), m_soft_cap(static_cast<float>(soft_cap)) {}

  void set_path(AttentionPath path) { m_path = path; }
  void reserve(const AttentionExtents& extents) { m_attention.reserve(extents, m_path); }
  /// See Attention.
  void operator()(const ExecutionSpace& exec, const std::vector<AttentionSpan>& spans,
                  const Attention::QueryView& queries, const ConstArrayView& new_keys,
                  const ConstArrayView& new_values, const Attention::OutputView& output,
                  const LogSumExpView& lse) {
    m_attention(exec, spans, queries, new_keys, new_values, output, {m_path, lse, m_soft_cap});
  }
  bool can_plan(const AttentionExtents& extents) const {
    return Attention::can_plan(extents, m_path);
  }
  void plan(std::size_t number, const std::vector<AttentionSpan>& spans,
            const Attention::QueryView& queries, const ConstArrayView& new_keys,
            const ConstArrayView& new_values, const Attention::OutputView& output,
            const LogSumExpView& lse) {
    m_attention.plan(number, spans, queries, new_keys, new_values, output,
                     {m_path, lse, m_soft_cap});
  }
  /// Returns the attention, for its planned calls.
  Attention& calls() { return m_attention; }
  const Attention& calls() const { return m_attention; }

 private:
  Attention m_attention;
  AttentionPath m_path = AttentionPath::automatic;
  float m_soft_cap;
};

}  // namespace kvzap::engine
