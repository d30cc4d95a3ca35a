// Eviction policies: what gives the rows of a layer their scores once attention has passed over it.
#pragma once

#include <functional>
#include <kvzap/core/attention_mass.hpp>
#include <kvzap/core/communicator.hpp>
#include <kvzap/core/types.hpp>
#include <memory>
#include <vector>

namespace kvzap {

/// What a Policy asks of the decoder, which gathers nothing that no one asked for.
struct PolicyNeeds {
  /// `observe` is called with each block of new tokens.
  bool blocks = false;
  /// Attention keeps the log-sum-exp of each query: TokenBlock::log_sum_exp is there.
  bool log_sum_exp = false;
  /// PolicyLayer::recent has the so many newest tokens.
  std::int64_t recent = 0;
  /// It is asked in every step, those of generated tokens included, and the scores it gave before
  /// are in PolicyLayer::cached_scores: running sums.
  bool every_step = false;
  /// It calls PolicyLayer::inverse_frequencies: refused for models where these depend on the length
  /// of the text (ModelConfig::rope_depends_on_length), whose cached keys have been turned by
  /// different ones.
  bool frequencies = false;
  /// Scores depend on how much is to stay: PolicyLayer::Extents::keep and evict_ratio.
  bool budget = false;
};

/// Consecutive new tokens of one sequence after attention of a layer. Views are valid during the
/// call that hands them over.
struct TokenBlock {
  using HiddenView = Kokkos::View<const float**, Kokkos::LayoutStride, MemorySpace>;
  using QueryView = Kokkos::View<const float***, Kokkos::LayoutStride, MemorySpace>;

  /// Position of the first one.
  std::int64_t first = 0;
  std::int64_t count = 0;
  /// (token, hidden_size): what enters attention, after the norm; the same on all ranks. Empty in
  /// PolicyLayer::recent.
  HiddenView hidden;
  /// (token, query head on this rank, head_dim): after RoPE, unscaled.
  QueryView queries;
  /// (token, query head): of the scores scaled by 1/sqrt(head_dim) of all rows that the query saw.
  /// Empty unless the policy needs it, and in PolicyLayer::recent.
  LogSumExpView log_sum_exp;
};

/// One layer of one sequence in a step, as a policy sees it. A head's rows are those that its cache
/// holds, then those of the step's tokens: in order of position. Where a policy judges new tokens
/// by themselves (PolicyInfo::judges_tokens, with a threshold), they are those of the step's tokens
/// alone.
class PolicyLayer {
 public:
  using RowsView = Kokkos::View<const float**, Kokkos::LayoutRight, MemorySpace>;
  using PositionView = Kokkos::View<const std::int64_t*, MemorySpace>;
  using MassView = Kokkos::View<float**, Kokkos::LayoutStride, MemorySpace>;

  /// What does not change during a step.
  struct Extents {
    int layer = 0;
    int layers = 1;          // of the model
    std::vector<int> heads;  // on this rank: number of each in the model
    int kv_heads = 1;        // of the model, over all ranks
    int group = 1;           // query heads of a KV head
    int head_dim = 1;
    std::int64_t hidden_size = 1;
    float rope_scale = 1;         // RoPE multiplies queries and keys by it (rope_attention_factor)
    std::int64_t tokens = 0;      // of the sequence, this step's included, kept or not
    std::int64_t new_tokens = 0;  // of this step
    std::int64_t question = 0;    // of these the last so many are the question's
    /// Positions that the step repeats, for policies that look at how the model does that
    /// (PolicyInfo::repeats_context): from repeats_begin to before repeats_end.
    std::int64_t repeats_begin = 0, repeats_end = 0;
    std::vector<std::int64_t> rows;  // (head on this rank): cached ones, then the step's
    /// Rows of each head that the budget will keep (the mean over heads where heads compete), and
    /// the evict ratio that this amounts to; all rows and 0 if a threshold decides.
    std::int64_t keep = 0;
    double evict_ratio = 0;
  };

  virtual ~PolicyLayer() = default;

  const Extents& extents() const { return m_extents; }
  int layer() const { return m_extents.layer; }
  int heads() const { return static_cast<int>(m_extents.heads.size()); }
  std::int64_t rows(int head) const { return m_extents.rows.at(head); }
  /// Of the head with the most.
  std::int64_t most_rows() const;
  const ExecutionSpace& exec() const { return m_exec; }
  const Communicator& comm() const { return m_comm; }

  // In `observe` the rows up to the block's last token are there. What these return is valid until
  // the same function is called again; `exec` has filled it once kernels on it are done.

  /// (count): positions of rows begin … begin + count - 1 of a head.
  virtual PositionView positions(int head, std::int64_t begin, std::int64_t count) = 0;
  PositionView positions(int head) { return positions(head, 0, rows(head)); }
  /// (count, head_dim): keys, after RoPE at their own position.
  virtual RowsView keys(int head, std::int64_t begin, std::int64_t count) = 0;
  RowsView keys(int head) { return keys(head, 0, rows(head)); }
  /// (count, head_dim).
  virtual RowsView values(int head, std::int64_t begin, std::int64_t count) = 0;
  RowsView values(int head) { return values(head, 0, rows(head)); }

  /// (rows(head) - new_tokens, or fewer): the scores that cached rows have, NaN for those that have
  /// none.
  virtual Kokkos::View<const float*, MemorySpace> cached_scores(int head) = 0;

  /// The newest tokens, of this step and, if it has too few, of steps before it: as many as
  /// PolicyNeeds::recent, fewer if the sequence has no more. In `score` alone.
  virtual TokenBlock recent() = 0;

  /// Takes the probabilities that queries of this step give each row into mass (head, row), which
  /// the caller has filled with 0 before: see AttentionMass. `queries` is the block of `observe`,
  /// or a part of it, with log_sum_exp.
  virtual void attention_mass(const TokenBlock& queries, MassReduction reduction,
                              const MassView& mass, const MassFactors& factors = {}) = 0;

  /// (head_dim, hidden_size): the part of W_O that takes a query head's output; its transpose
  /// applied to a value v gives W_O v.
  virtual RowsView output_weights(int query_head) = 0;
  /// (head_dim / 2): RoPE turns dimensions (i, i + head_dim/2) by position *
  /// inverse_frequencies(i), and multiplies them by Extents::rope_scale. For policies with
  /// PolicyNeeds::frequencies.
  virtual Kokkos::View<const float*, MemorySpace> inverse_frequencies() = 0;

 protected:
  PolicyLayer(const ExecutionSpace& exec, Communicator comm) : m_exec(exec), m_comm(comm) {}
  Extents m_extents;

 private:
  ExecutionSpace m_exec;
  Communicator m_comm;
};

/// Scores the rows of the heads on this rank, higher meaning more worth keeping. An object serves
/// one sequence and sees the layers of a step one after the other: in each, `observe` for all
/// blocks of its tokens, if it needs them, then `score`.
///
/// What it holds serves one step: forks, checkpoints and failed steps go on with a new object. What
/// lasts is in cached_scores and recent.
///
/// Both are called on every rank, in the same order, also where it owns no head of the layer; a
/// policy that compares over heads or layers communicates on every rank. An exception that leaves
/// it on one rank alone ends the program if it communicates.
class Policy {
 public:
  /// (head on this rank, row), with as many columns as the longest head has rows; what stands
  /// behind a head's rows is ignored.
  using ScoreView = Kokkos::View<float**, Kokkos::LayoutStride, MemorySpace>;

  Policy() = default;
  Policy(const Policy&) = delete;
  Policy& operator=(const Policy&) = delete;
  virtual ~Policy() = default;

  virtual PolicyNeeds needs() const { return {}; }
  virtual void observe(PolicyLayer& /*layer*/, const TokenBlock& /*block*/) {}
  /// A score that is NaN or infinite keeps its row, and is counted.
  virtual void score(PolicyLayer& layer, const ScoreView& scores) = 0;

  /// Scores (head on this rank, position) of a layer's rows of the context, once `observe` has seen
  /// all steps that repeat it; only for policies with PolicyInfo::repeats_context, whose objects
  /// live as long as those steps and are never asked to `score`. Collective; the layers come one
  /// after the other, each once.
  virtual Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> context_scores(
      const ExecutionSpace& exec, const Communicator& comm, int layer);
};

/// Makes a policy for a new sequence; several may share what it has loaded.
using PolicyMaker = std::function<std::unique_ptr<Policy>()>;

}  // namespace kvzap
