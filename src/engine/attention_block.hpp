// Attention over the ragged cache as a layer's token mixer.
#pragma once

#include "engine/adapters.hpp"
#include "engine/attention_gates.hpp"
#include "engine/attention_spans.hpp"
#include "engine/latent_maps.hpp"
#include "engine/mixers.hpp"
#include "engine/policy_block.hpp"
#include "engine/rope_angles.hpp"
#include "engine/shared_heads_block.hpp"
#include "engine/span_attention.hpp"

namespace kvzap::engine {

/// q, k, v → norm and RoPE → attention → gates. Leaves the new keys and values in Step::new_keys
/// and new_values. A layer that reads another one's rows (LayerConfig::rows_of) has q alone.
class AttentionBlock final : public TokenMixer {
 public:
  /// `shared`: null with one rank. It and policies must outlive the block.
  AttentionBlock(const Model& model, PolicyBlock& policies, SharedHeadsBlock* shared,
                 const ReadPages& read = {})
      : m_policies(policies),
        m_shared(shared),
        m_angles(model.config()),
        m_spans(model.dtype(), shared, read),
        m_attention(model.dtype(), model.config().attention_soft_cap) {}

  void reserve(Step& step) override;
  void begin(Step& step) override { m_angles.fill(step); }
  linalg::Matrix run(Step& step, int layer, const RowRange& rows, const linalg::Matrix& x) override;
  void release() override;

  /// The input of `attend`.
  struct Input {
    linalg::Matrix x;  // (row, attention_inputs): the norm of the layer's input, for policies
    // (row, (query heads + KV heads * row_vectors) * dim, or less); only queries are read
    linalg::Matrix qkv;
    linalg::ConstVector sinks;  // (query head): logits, or empty
  };
  /// Writes attention of the queries of rows over the cache, and over the new rows up to their
  /// own, to Step::mixed. Shows the block to policies. Collective if ranks share heads.
  void attend(Step& step, int layer, const RowRange& rows, const Input& input);
  /// Returns room for Input::qkv.
  linalg::Matrix room_for_qkv(const Step& step, int layer, const RowRange& rows) const;

  /// Returns whether all calls of attention in the step can be planned (Attention::plan).
  bool can_plan(const Step& step) const;
  /// Forgets all plans. Then plans a layer's call.
  void begin_plans(const Step& step);
  void plan(Step& step, int layer);
  void copy_plans(const Step& step) { m_attention.calls().copy_plans(step.exec); }
  void add_planned_shape(std::vector<std::int64_t>& shape) const {
    m_attention.calls().add_planned_shape(shape);
  }

  void set_path(AttentionPath path) { m_attention.set_path(path); }
  const RopeAngles& angles() const { return m_angles; }

 private:
  bool is_shared(const Step& step, int layer) const {
    return m_shared && m_shared->is_shared(step, layer);
  }
  std::int64_t columns(const Step& step, int layer) const;
  std::int64_t qkv_columns(const Step& step, int layer) const;
  linalg::Matrix gates(const Step& step, int layer, std::int64_t m) const;
  GateRule gate_rule(const Step& step, int layer) const;
  void reserve_attention(const Step& step);
  AttentionExtents extents(const Step& step, int layer, std::int64_t kv_heads) const;
  void project(Step& step, int layer, const RowRange& rows, const linalg::Matrix& x);
  void norm_tokens(Step& step, int layer, const linalg::Matrix& qkv, const linalg::Matrix& sums);
  linalg::Matrix log_sums(const Step& step, int layer, std::int64_t m) const;
  /// The arrays of a call of attention.
  struct Attended {
    Attention::QueryView queries;
    SpanAttention::Heads output;
    LogSumExpView lse;
  };
  Attended arrays(const Step& step, int layer, const RowRange& rows, const Input& input) const;
  void attend_spans(Step& step, int layer, const RowRange& rows, const Attended& heads);
  void attend_in_turn(Step& step, int layer, const RowRange& rows, const Attended& heads);

  PolicyBlock& m_policies;
  SharedHeadsBlock* m_shared;
  RopeAngles m_angles;
  AttentionSpans m_spans;
  SpanAttention m_attention;
  std::vector<AppendSpan> m_appended;  // by spans that run in turn
  LatentMaps m_latent;                 // if the model has latent attention
  Adapters m_adapters;                 // of layers with shared weights
  linalg::Vector m_squares;            // sums for norms of whole rows of queries and keys
  linalg::Vector m_log_sums;           // of attention, if the model has sinks or ranks share a head
};

}  // namespace kvzap::engine
