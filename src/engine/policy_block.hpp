// The eviction policies of a step.
#pragma once

#include <kvzap/engine/external_layer.hpp>
#include <memory>
#include <vector>

#include "engine/policy_layer.hpp"
#include "engine/step.hpp"

namespace kvzap::engine {

/// Shows layers to the policies of the step's spans, and lets them score and choose rows.
class PolicyBlock {
 public:
  /// counted: the sizes from which budgets compute their counts; must outlive the block.
  PolicyBlock(DType dtype, const Budget::Model& counted) : m_counted(counted), m_scratch(dtype) {}

  /// Collects the policies of the spans, their needs, and the memory that they write to.
  /// frequencies: RoPE's. Throws Error for a budget that cannot be met.
  void reserve(Step& step, const linalg::Vector& frequencies);
  /// Ends the step.
  void end();
  /// Frees the memory that grows with the tokens.
  void release() { m_scratch.release(); }
  /// Ends a failed step, and frees also the scores kept in PolicyStep.
  void cancel();

  /// Returns whether policies see a layer.
  bool see(const Step& step, int layer) const { return step.has_policies && step.is_pruned(layer); }
  /// Returns whether a policy reads the log-sum-exp of a layer's attention, which then goes to
  /// log_sums.
  bool need_log_sums(const Step& step, int layer) const {
    return m_needs_log_sums && step.is_pruned(layer);
  }
  linalg::Matrix log_sums(std::int64_t rows, std::int64_t query_heads) const {
    return linalg::Matrix(m_scratch.lse.data(), rows, query_heads);
  }
  /// Returns whether a policy reads W_O.
  bool need_output_weights() const;
  /// Returns whether a policy reads the input of attention.
  bool need_hidden(const Step& step) const;

  /// Shows a layer before its attention. output_weights: W_O of this rank's heads, (hidden_size,
  /// query heads * head_dim), if ranks share it.
  void show_layer(Step& step, int layer, const ArrayView& output_weights);
  /// Sets what the caller of an external step knows of a layer.
  void show_external(const std::vector<ExternalLayer>& spans, const linalg::Vector& sinks);
  /// Shows rows after attention to the policies that ask for blocks, and keeps the queries of the
  /// newest tokens. x, qkv: see AttentionBlock::Input.
  void observe(Step& step, int layer, const RowRange& rows, const linalg::Matrix& x,
               const linalg::Matrix& qkv);
  /// Lets the policies score the layer's rows. If a policy chooses, stores the rows that stay.
  void apply(Step& step, int layer);

 private:
  void reserve_scores(Step& step, const StepBatch::Span& span);
  void reserve_sums(Step& step, const StepBatch::Span& span);
  void score(Step& step, int layer, std::size_t s, const linalg::Matrix& scores);
  void choose(Step& step, int layer, std::size_t s, const linalg::Matrix& scores);

  const Budget::Model& m_counted;
  // One entry for each span of the step; null if its rule has no policy.
  std::vector<PolicyStep*> m_steps;
  std::vector<std::unique_ptr<DecoderLayer>> m_layers;
  std::vector<PolicyNeeds> m_needs;
  bool m_needs_log_sums = false;
  PolicyScratch m_scratch;
};

}  // namespace kvzap::engine
