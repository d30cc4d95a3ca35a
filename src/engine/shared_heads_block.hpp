// Layers in which several ranks work on a head: with more ranks than KV heads, which share the
// weights of q, k, v and o, or if pages of a head lie on other ranks than its owner's.
#pragma once

#include <kvzap/core/attention.hpp>
#include <vector>

#include "engine/latent_maps.hpp"
#include "engine/page_placement.hpp"
#include "engine/shared_heads.hpp"
#include "engine/span_attention.hpp"
#include "engine/step.hpp"
#include "engine/step_kernels.hpp"

namespace kvzap::engine {

/// The part of attention that concerns heads of other ranks. AttentionBlock calls it in the layers
/// that is_shared names, on all ranks of a step.
class SharedHeadsBlock {
 public:
  /// model and placement must outlive the block.
  SharedHeadsBlock(const Model& model, PagePlacement& placement);

  /// Finds the layers that have shared heads in this step, and reserves their buffers.
  /// gives_output_weights: a policy of the step reads W_O.
  void reserve(Step& step, bool gives_output_weights);
  void release();

  bool is_shared(const Step& step, int layer) const {
    return m_layers[layer].is_shared && step.cache.shape().has_rows(layer);
  }
  /// Returns the inputs of o on this rank, in a layer that is shared.
  std::int64_t inputs(int layer) const { return m_places.inputs(layer, m_rank); }
  /// Returns the largest number of heads in a layer that this rank helps with.
  int most_remote_heads() const;
  /// Returns whether teams share tokens of the step.
  bool splits_spans() const { return !m_split_spans.empty(); }
  /// Returns whether a team shares the tokens of a span in a layer.
  bool is_split(const Step& step, std::size_t span, int layer) const {
    return splits_spans() && m_split_spans[span] && step.is_pruned(layer) &&
           m_teams.of_rank(layer).size > 1;
  }
  /// Adds the parts of a span's tokens that this rank's place in a team gives: cached rows for all
  /// of them, new rows for its own part.
  void push_split(std::vector<AttentionSpan>& spans, const AttentionSpan& whole, int layer) const;

  /// Returns whether ranks have parts of a head's W_O, which gather_output_weights brings together.
  bool gives_output_weights() const { return m_gives_output_weights; }
  /// Returns W_O of this rank's own heads: (hidden_size, query heads * head_dim). Collective.
  ArrayView gather_output_weights(Step& step, int layer);

  /// Returns where this rank's outputs of q, k and v go: into qkv, or with shared weights into a
  /// buffer for gather_projections.
  linalg::Matrix computed(int layer, const linalg::Matrix& qkv) const;
  /// Gathers the outputs of q, k and v, and takes those of this rank's own heads, unless it has
  /// computed them itself, and the queries of its remote heads. Collective.
  void gather_projections(Step& step, int layer, const linalg::Matrix& computed,
                          const linalg::Matrix& qkv);
  /// Norms and turns the queries of remote heads as those of own heads. sums: see norm_rows.
  void transform_queries(Step& step, int layer, const RowRange& rows,
                         const HeadTransform& transform, const linalg::Matrix& sums);
  /// Computes attention of rows over the remote pages.
  void attend(Step& step, int layer, const RowRange& rows, SpanAttention& attention);
  /// Merges the ranks' attention over their parts of the rows: Step::mixed, of this rank's own
  /// heads with their log-sum-exp (row, query head), becomes this rank's inputs of o. Collective.
  void merge(Step& step, int layer, const linalg::Matrix& lse);

 private:
  struct LayerPlan {
    bool is_shared = false;
    std::vector<int> remote_heads;  // heads that this rank helps with
    // Floats of a token's records that each rank gets from this one, and gives to it.
    std::vector<std::int64_t> sent, received;
  };

  struct RemoteHeads {
    int first, count;
    bool of_team;  // the head of this rank's team
  };

  void plan(const Step& step);
  void plan_helpers(const Step& step);
  void plan_records(int layer);
  void reserve_output_weights(Step& step, std::int64_t inputs, std::int64_t own);
  bool helps(int layer, int head, int rank) const;
  /// Returns whether this rank attends to a part of a step's tokens of another rank's head.
  bool helps_team(int layer) const {
    return splits_spans() && m_teams.of_rank(layer).place > 0 && has_own_rows(layer);
  }
  /// Returns whether a layer has keys and values of its own. Teams share the tokens of such layers
  /// alone: they keep no new rows for later ones.
  bool has_own_rows(int layer) const { return m_places.sizes(layer).kv_dim > 0; }
  template <class Visit>
  void for_each_record(int layer, int source, int target, const Visit& visit) const;
  /// Columns of the query heads of a KV head.
  std::int64_t head_size(int layer) const {
    const SharedHeads::Sizes& sizes = m_places.sizes(layer);
    return sizes.group * sizes.head_dim;
  }
  linalg::Matrix remote_queries(int layer, std::int64_t m) const;
  void transform_team_rows(Step& step, int layer, const RowRange& block,
                           const HeadTransform& transform, const linalg::Matrix& sums);
  void list_remote_spans(const Step& step, int layer, const RowRange& rows,
                         const RemoteHeads& heads);
  void pack_records(Step& step, int layer, const linalg::Matrix& lse);
  void merge_records(Step& step, int layer, std::int64_t m);

  const HeadPartition& m_partition;
  PagePlacement& m_placement;
  int m_rank;
  std::int64_t m_vectors;  // of a row
  SharedHeads m_places;
  HeadTeams m_teams;
  // (layer * KV heads + head): ranks that have pages of sequences of the step, beside the owner.
  std::vector<std::vector<int>> m_helpers;
  std::vector<LayerPlan> m_layers;
  // (span): whether a team shares its tokens. Empty: it shares none.
  std::vector<bool> m_split_spans;
  bool m_gives_output_weights = false;

  linalg::Vector m_computed;   // this rank's outputs of q, k and v, if ranks share the weights
  linalg::Vector m_gathered;   // those of all ranks
  linalg::Vector m_team_rows;  // key and value of the head that this rank helps with
  // The same of the step's tokens: (token, dim).
  ValueBuffer m_team_keys, m_team_values;
  linalg::Vector m_queries;                           // of the heads of remote pages
  linalg::Vector m_norm;                              // weights of the norms of these queries
  linalg::Vector m_attended;                          // attention over remote pages
  linalg::Vector m_log_sums;                          // and its log-sum-exp
  linalg::Vector m_sent_records, m_received_records;  // parts of attention
  // For policies that read W_O: this rank's inputs, as they are sent, and those of its own heads:
  // (input, hidden_size).
  linalg::Vector m_o_inputs, m_o_sent, m_o_of_heads;
  LatentOutputWeights m_latent;

  // Reused by every layer.
  std::vector<ColumnCopy> m_copies;
  std::vector<AttendedMerge> m_merges;
  std::vector<const float*> m_records;
  std::vector<std::int64_t> m_sent, m_received;  // of a call
  std::vector<AttentionSpan> m_spans;
};

}  // namespace kvzap::engine
