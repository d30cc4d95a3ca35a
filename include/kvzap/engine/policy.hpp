// The interface of eviction policies: a policy scores the rows of a layer after its attention.
#pragma once

#include <functional>
#include <kvzap/core/attention_mass.hpp>
#include <kvzap/core/communicator.hpp>
#include <kvzap/core/types.hpp>
#include <kvzap/engine/value_merger.hpp>
#include <memory>
#include <vector>

namespace kvzap {

/// The data that a Policy needs. The decoder collects nothing else.
struct PolicyNeeds {
  /// The decoder calls `observe` with each block of new tokens.
  bool blocks = false;
  /// Attention stores the log-sum-exp of each query in TokenBlock::log_sum_exp.
  bool log_sum_exp = false;
  /// PolicyLayer::recent returns this many newest tokens.
  std::int64_t recent = 0;
  /// The policy scores in every step, generated tokens included. PolicyLayer::cached_scores returns
  /// its earlier scores, which running sums need.
  bool every_step = false;
  /// With `every_step`: the age of a row, the tokens from its own on, leads from its earlier score
  /// to the next one. Renumbered positions (`rerotate`) do not tell it.
  bool ages = false;
  /// With `blocks`: cached_scores hold all that the policy needs of earlier steps, so that its
  /// scores after several steps of a context are those after one step of it.
  bool accumulates = false;
  /// The policy calls PolicyLayer::inverse_frequencies. It is refused for models whose frequencies
  /// depend on the length of the text (ModelConfig::rope_depends_on_length), because different
  /// frequencies have rotated their cached keys.
  bool frequencies = false;
  /// Scores depend on the budget: PolicyLayer::Extents::keep and evict_ratio.
  bool budget = false;
  /// The policy calls PolicyLayer::output_weights.
  bool output_weights = false;
};

/// Consecutive new tokens of one sequence after attention of a layer. The views are valid during
/// the call that passes them.
struct TokenBlock {
  using HiddenView = Kokkos::View<const float**, Kokkos::LayoutStride, MemorySpace>;
  using QueryView = Kokkos::View<const float***, Kokkos::LayoutStride, MemorySpace>;

  /// Position of the first token.
  std::int64_t first = 0;
  std::int64_t count = 0;
  /// (token, hidden_size): the input of attention, after the norm; the same on all ranks. Empty in
  /// PolicyLayer::recent.
  HiddenView hidden;
  /// (token, query head on this rank, head_dim): queries after RoPE, unscaled.
  QueryView queries;
  /// (token, query head): log-sum-exp of the scores, scaled by 1/sqrt(head_dim), of all rows that
  /// the query saw. Empty unless the policy needs it, and in PolicyLayer::recent.
  LogSumExpView log_sum_exp;
};

/// One layer of one sequence in a step, as the policy sees it. The rows of a head are those in its
/// cache, then those of the step's tokens, in order of position. If a policy judges new tokens by
/// themselves (PolicyInfo::judges_tokens, with a threshold), only the step's tokens have rows.
class PolicyLayer {
 public:
  using RowsView = Kokkos::View<const float**, Kokkos::LayoutRight, MemorySpace>;
  using PositionView = Kokkos::View<const std::int64_t*, MemorySpace>;
  using MassView = Kokkos::View<float**, Kokkos::LayoutStride, MemorySpace>;

  /// Sizes that are constant during a step.
  struct Extents {
    int layer = 0;
    int layers = 1;          // of the model
    std::vector<int> heads;  // on this rank: index of each head in the model
    int kv_heads = 1;        // of the model, over all ranks
    int group = 1;           // query heads per KV head
    int head_dim = 1;
    /// Dimensions of a value. The others, up to head_dim, are padding: zeros.
    int value_dim = 1;
    bool has_latents = false;  // keys have RoPE's dimensions beside their value (LatentConfig)
    std::int64_t hidden_size = 1;
    float rope_scale = 1;  // factor of RoPE on queries and keys (rope_attention_factor)
    float soft_cap = 0;    // of the model's scores (attention_soft_cap)
    /// (query head on this rank): sinks of the layer, or empty (has_sinks).
    Kokkos::View<const float*, MemorySpace> sinks;
    std::int64_t tokens = 0;      // tokens of the sequence, this step's included, kept or not
    std::int64_t new_tokens = 0;  // tokens of this step
    std::int64_t question = 0;    // new tokens at the end that belong to the question
    /// For policies that score how the model repeats the context (PolicyInfo::repeats_context): the
    /// step repeats the positions from repeats_begin up to, but not including, repeats_end.
    std::int64_t repeats_begin = 0, repeats_end = 0;
    std::vector<std::int64_t> rows;  // (head on this rank): cached ones, then the step's
    /// Rows of each head that the budget will keep (the mean if heads compete), and the evict ratio
    /// that corresponds to it. If a threshold decides: all rows and 0.
    std::int64_t keep = 0;
    double evict_ratio = 0;
  };

  virtual ~PolicyLayer() = default;

  const Extents& extents() const { return m_extents; }
  int layer() const { return m_extents.layer; }
  int heads() const { return static_cast<int>(m_extents.heads.size()); }
  std::int64_t rows(int head) const { return m_extents.rows.at(head); }
  /// Returns the number of rows of the longest head.
  std::int64_t most_rows() const;
  const ExecutionSpace& exec() const { return m_exec; }
  const Communicator& comm() const { return m_comm; }

  // During `observe`, rows up to the block's last token exist. The view that a function returns is
  // valid until the next call of that function; kernels on `exec` fill it.

  /// (count): positions of rows begin .. begin + count - 1 of a head.
  virtual PositionView positions(int head, std::int64_t begin, std::int64_t count) = 0;
  PositionView positions(int head) { return positions(head, 0, rows(head)); }
  /// (count, head_dim): keys, after RoPE at their own positions.
  virtual RowsView keys(int head, std::int64_t begin, std::int64_t count) = 0;
  RowsView keys(int head) { return keys(head, 0, rows(head)); }
  /// (count, head_dim): values, padded with zeros behind Extents::value_dim.
  virtual RowsView values(int head, std::int64_t begin, std::int64_t count) = 0;
  RowsView values(int head) { return values(head, 0, rows(head)); }
  /// (rows(head), head_dim): what policies compare that measure keys by themselves, without
  /// queries: keys, or with latent attention latents, as kvpress does.
  RowsView compared_keys(int head) { return m_extents.has_latents ? values(head) : keys(head); }

  /// (rows(head) - new_tokens, or fewer): the scores of cached rows, NaN for rows without a score.
  virtual Kokkos::View<const float*, MemorySpace> cached_scores(int head) = 0;

  /// Returns the newest tokens, of this step and, if it has too few, of earlier steps. Their number
  /// is PolicyNeeds::recent, or fewer if the sequence has no more. Call it in `score` only.
  virtual TokenBlock recent() = 0;

  /// Adds the probabilities that queries of this step give each row to mass (head, row), or takes
  /// their maximum. The caller fills `mass` with 0 before: see AttentionMass. `queries` is the
  /// block of `observe`, or a part of it, with log_sum_exp.
  virtual void attention_mass(const TokenBlock& queries, MassReduction reduction,
                              const MassView& mass, const MassFactors& factors = {}) = 0;

  /// (head_dim, hidden_size): the part of W_O for the output of one query head. Its transpose
  /// applied to a value v gives W_O v.
  virtual RowsView output_weights(int query_head) = 0;
  /// (head_dim / 2): RoPE rotates dimensions (i, i + head_dim/2) by position *
  /// inverse_frequencies(i), and multiplies them by Extents::rope_scale. Call it only with
  /// PolicyNeeds::frequencies.
  virtual Kokkos::View<const float*, MemorySpace> inverse_frequencies() = 0;

 protected:
  PolicyLayer(const ExecutionSpace& exec, Communicator comm) : m_exec(exec), m_comm(comm) {}
  Extents m_extents;

 private:
  ExecutionSpace m_exec;
  Communicator m_comm;
};

/// Scores the rows of the heads on this rank; a higher score means more worth keeping. An object
/// serves one sequence and sees the layers of a step one after the other. In each layer the decoder
/// calls `observe` for all blocks of its tokens, if the policy needs blocks, then `score`.
///
/// State in the object lasts for one step: forks, checkpoints and failed steps continue with a new
/// object. Lasting state is in cached_scores and recent.
///
/// Both functions are called on every rank, in the same order, even where the rank owns no head of
/// the layer. A policy that compares heads or layers communicates on every rank. If such a policy
/// throws on one rank alone, the program ends.
class Policy {
 public:
  /// (head on this rank, row). The number of columns is the number of rows of the longest head.
  /// Columns after a head's rows are ignored.
  using ScoreView = Kokkos::View<float**, Kokkos::LayoutStride, MemorySpace>;

  Policy() = default;
  Policy(const Policy&) = delete;
  Policy& operator=(const Policy&) = delete;
  virtual ~Policy() = default;

  virtual PolicyNeeds needs() const { return {}; }
  virtual void observe(PolicyLayer& /*layer*/, const TokenBlock& /*block*/) {}
  /// Fills `scores`. A score that is NaN or infinite keeps its row, and is counted.
  virtual void score(PolicyLayer& layer, const ScoreView& scores) = 0;

  /// Returns the scores (head on this rank, position) of a layer's rows of the context, after
  /// `observe` has seen all steps that repeat it. Only for policies with
  /// PolicyInfo::repeats_context: their objects live through these steps, and `score` is never
  /// called. Collective; called once for each layer, in order.
  virtual Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> context_scores(
      const ExecutionSpace& exec, const Communicator& comm, int layer);
  /// Returns the maker of a ValueMerger for the cut by context_scores, which may outlive the
  /// policy; empty if values stay as they are. Called after context_scores.
  virtual MergerMaker context_merger() { return {}; }
};

/// Makes a policy for a new sequence. Several policies may share loaded data.
using PolicyMaker = std::function<std::unique_ptr<Policy>()>;

}  // namespace kvzap
