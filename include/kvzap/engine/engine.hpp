// A model with its pruned cache, for any number of sequences.
#pragma once

#include <filesystem>
#include <functional>
#include <kvzap/core/attention.hpp>
#include <kvzap/core/cache.hpp>
#include <kvzap/core/communicator.hpp>
#include <kvzap/core/head_partition.hpp>
#include <kvzap/engine/external_layer.hpp>
#include <kvzap/engine/pruning.hpp>
#include <kvzap/engine/scorer.hpp>
#include <kvzap/engine/snapshot.hpp>
#include <kvzap/engine/step_batch.hpp>
#include <kvzap/engine/step_observer.hpp>
#include <kvzap/model/model.hpp>
#include <memory>
#include <string>
#include <vector>

namespace kvzap {
namespace engine {
struct SequencePruning;
struct SequenceState;
class RecentQueries;
struct EvictionPlan;
}  // namespace engine

/// The default of CacheOptions::balance.
inline constexpr double default_balance = 0.05;

/// How an engine fills and prunes its cache. The pruning applies to all sequences that have no
/// pruning of their own (Engine::set_pruning). All sequences have the pruning's window.
struct CacheOptions : LoadedPruning {
  /// Return unused pool memory to the system after the context and after each answer.
  bool trim = true;
  int page_rows = 64;
  /// How pages store rows.
  PageFormat page_format = {};
  /// The full pages that a step of one token reads of each KV head, except in the first two layers
  /// of the model (Quest, arXiv 2406.10774). A token that a policy observes by
  /// attention weights reads all. If not all are read, pages stay with the owners of their heads,
  /// whatever `balance` is. Only with kernels of the host.
  ReadPages read_pages = {};
  /// Limit on the bytes of this rank's rings and pages; 0: no limit.
  std::size_t kv_limit = 0;
  /// Full pages move between ranks when the rank with most rows of a layer has more than 1 +
  /// balance times the mean; 0: rows stay with the owners of their heads.
  double balance = default_balance;
};

/// Returns "all", a number of pages such as "16", or a share such as "0.25".
std::string name_of(const ReadPages& read);
/// Returns what such a text says. A number with a point is a share: "1" is one page. Throws Error
/// for any other text: a number of pages is at least 1, a share above 0 and at most 1.
ReadPages read_pages_from_name(const std::string& text);

/// Scores that a policy gives to the rows of a context without pruning it.
struct ContextScores {
  /// Scores of each layer: (head on this rank, position).
  std::vector<Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>> layers;
  /// Makes the ValueMerger of this policy's cut; empty if values stay as they are. Engine::prune
  /// takes it whatever the setting's own modifiers are.
  MergerMaker merger;
  /// Seconds of scoring on this rank, with the steps that repeat the context.
  double seconds = 0;
};

/// State of the whole cache, over all ranks. Complete on every rank.
struct CacheReport {
  std::int64_t tokens = 0;                      // seen so far, kept or not
  std::vector<std::vector<std::int64_t>> kept;  // rows, [layer][KV head]
  // [layer]: whether its rows can be evicted. Layers with windows keep what they see. Empty: all.
  std::vector<bool> prunes;
  std::int64_t non_finite_scores = 0;  // judged pairs kept because their score is not finite
  // Bytes, summed over ranks.
  std::int64_t full_bytes = 0;       // keys and values without eviction, all wide
  std::int64_t live_bytes = 0;       // keys and values of kept rows, of all sequences
  std::int64_t own_bytes = 0;        // the same of this sequence
  std::int64_t moved_pages = 0;      // that balancing has moved between ranks so far
  std::int64_t allocated_bytes = 0;  // pages, in use or free, and rings
  std::int64_t returned_bytes = 0;   // returned to the system so far
  // the maximum, including the dense keys and values of prefill
  std::int64_t peak_allocated_bytes = 0;
  // Seconds of the whole engine so far, on the slowest rank.
  double score_seconds = 0;  // scoring pairs, and the steps of a repeated context
  double prune_seconds = 0;  // choosing rows, evicting the others, and storing scores

  bool is_pruned(int layer) const { return prunes.empty() || prunes.at(layer); }
  /// Evicted pairs / all pairs that the sequence had; 0 for a layer that is not pruned.
  double evict_ratio(int layer) const;
  /// Mean over the layers that are pruned.
  double evict_ratio() const;
  /// Rows of all layers and heads.
  std::int64_t rows() const;
  /// Rows of all layers and heads without eviction.
  std::int64_t full_rows() const;
};

/// How many rows of each token a cache still has, over all ranks.
struct TokenRows {
  /// Rows by token: pairs of layer and KV head whose row of the token was not evicted. Only layers
  /// whose rows can be evicted count. Empty if no layer's can, or if a policy has renumbered
  /// positions.
  std::vector<std::int64_t> rows;
  /// Rows of a token without eviction.
  std::int64_t full = 0;
};

/// Runs a model for any number of sequences, with a type of values that is chosen at run time. Each
/// step runs any mix of sequences through the model. A Generator and a server use it. All ranks
/// make the same calls in the same order.
class Engine {
 public:
  /// A state to which a sequence can return.
  class Checkpoint {
   public:
    ~Checkpoint();
    Checkpoint(const Checkpoint&) = delete;
    Checkpoint& operator=(const Checkpoint&) = delete;

   private:
    friend class Engine;
    struct State;
    Checkpoint();
    std::unique_ptr<State> m_state;
  };

  /// Makes an engine. Its `scorer` (usually a Surrogate) judges pairs; without one every pruning
  /// needs a policy. The cache has the model's value type. Does not communicate. Throws Error as
  /// check does, and if an option is out of range.
  static std::unique_ptr<Engine> create(std::shared_ptr<const Model> model,
                                        std::shared_ptr<Scorer> scorer, const CacheOptions& options,
                                        const Communicator& comm);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine();

  const CacheOptions& options() const { return m_options; }
  const Communicator& communicator() const { return m_comm; }
  const ModelConfig& config() const;
  /// Returns the rule of a step that the scorer scores and the options' threshold judges, or of a
  /// step without either.
  StepRule rule(bool judges) const;
  /// Returns the rule of the engine's own pruning for a part of a sequence. `question`: see
  /// StepRule.
  StepRule rule(StepPart part, std::int64_t question = 0) const;
  /// Returns the rule for a sequence that may have a pruning of its own.
  StepRule rule(SequenceId sequence, StepPart part, std::int64_t question = 0) const;

  /// Adds an empty sequence. `add_sequence`, `fork` and `checkpoint` are collective. They throw
  /// AgreedOutOfMemory on every rank if one of them has no memory.
  SequenceId add_sequence();
  /// Returns a second sequence with the same content. The two share pages.
  SequenceId fork(SequenceId source);
  /// Returns a sequence that equals the source after its first `tokens` tokens, if the source has
  /// evicted no row since (KVCache::fork_beginning). The two share pages. Collective. Throws
  /// AgreedOutOfMemory, and AgreedError for a sequence that a policy scores or that lacks a row.
  SequenceId fork_beginning(SequenceId source, std::int64_t tokens);
  /// Returns whether fork_beginning can fork every beginning of a sequence of `tokens` tokens that
  /// has evicted no row. It cannot once a layer's window or chunk has forgotten rows.
  bool keeps_beginnings(std::int64_t tokens) const;
  void free_sequence(SequenceId sequence);
  std::unique_ptr<Checkpoint> checkpoint(SequenceId sequence);
  /// Does the same as KVCache::restore.
  void restore(SequenceId sequence, const Checkpoint& checkpoint);
  /// Returns the number of positions of a sequence so far, kept or not. It equals the number of
  /// tokens unless a policy has renumbered positions.
  std::int64_t tokens(SequenceId sequence) const;

  /// Runs the batch's tokens through the model, layer by layer, and appends their pairs to the
  /// cache under their spans' rules. In each layer the tokens of a span attend causally to one
  /// another, and to the rows in their sequence's cache. Then cuts the sequences whose policy cuts
  /// after the step. Returns one result for each span. Other spans change the result of a span only
  /// through the order of sums in products.
  ///
  /// Collective. Throws StepOutOfMemory if a rank runs out of memory. Throws Error for an empty
  /// batch, for a token id outside the vocabulary, and for a span that scores without a scorer.
  /// After these errors, the sequences are in their state before the step, on every rank.
  ///
  /// A cut needs memory to copy pages that a fork shares. Without this memory every rank throws an
  /// AgreedError that is not a StepOutOfMemory. The sequence then has the step's tokens, some of
  /// its layers may be cut, and the caller must free it.
  std::vector<StepResult> step(const StepBatch& batch, const ProgressCallback& progress = {});

  /// Takes back the last `count` tokens of a span of the last step with StepPart::draft. The
  /// sequence becomes what it would be if its other tokens had run alone, one by one: the same rows
  /// stay. Call it before any other function changes the sequence or another step runs; also
  /// several times. Does not communicate. Throws Error if the step has left fewer tokens.
  void take_back(SequenceId sequence, std::int64_t count);
  /// Returns why a step cannot check drafts (StepPart::draft) of a sequence with this pruning and
  /// these pages, or an empty text if it can. A draft is refused if its tokens would not run as
  /// they run one by one, or could not be taken back exactly.
  std::string why_no_drafts(const LoadedPruning& pruning, const PageFormat& format) const;
  /// Returns the same for the engine's own pruning and pages.
  std::string why_no_drafts() const { return why_no_drafts(options(), options().page_format); }
  /// Returns the most tokens that a draft may have behind a generated token, which follows `tokens`
  /// tokens: rings and positions bound it.
  std::int64_t most_draft(std::int64_t tokens) const;

  /// Begins a step of a model that runs outside of the library. The caller computes everything but
  /// attention: after begin_step it calls `attend` once for each layer, in order, then end_step.
  /// The ids of the batch's tokens are not used, and no span has an output. Attention, scoring,
  /// pruning and memory are those of `step`. The model has one rank, and may be of
  /// Model::without_weights. Throws as `step` does, and Error within another step and for policies
  /// that have the model repeat the context. A step that fails before end_step, or that is
  /// cancelled, leaves the sequences as they were.
  void begin_step(const StepBatch& batch);
  /// Appends the step's pairs of a layer, writes the output of their attention, and prunes the
  /// layer. spans: of each span of the batch. Waits. After an error there is no step any more.
  /// Throws the errors of `step`, and Error for arrays that do not fit or that the step needs and
  /// lacks (see needs_hidden).
  void attend(int layer, const std::vector<ExternalLayer>& spans);
  /// Ends the step, and cuts sequences as `step` does, with its errors. Throws Error unless all
  /// layers have run; the step then continues.
  void end_step();
  void cancel_step();
  /// Returns whether the step needs ExternalLayer::hidden.
  bool needs_hidden() const;

  /// Ends a context that has run, whole or in chunks. A policy may then have the model repeat it,
  /// and renumber positions. Collective. A repeat throws as `step` does, and `progress` receives
  /// "repeat" and tokens.
  void end_context(SequenceId sequence, const ProgressCallback& progress = {});
  /// Runs a context and its question for PruneMoment::question, and ends the context. The result
  /// is that of the question's last token.
  ///
  /// With dense prefill they are one step, after which the policy cuts. With sparse prefill the
  /// context comes in parts of Pruning::chunk tokens (FINCH, 10.1162/tacl_a_00716, section 3): each
  /// part reads the rows that stay of earlier ones. After it the question runs, the policy scores
  /// all rows by it and cuts them to the budget of the tokens so far, and the question's rows
  /// leave. The last part and the question are one step; so is all without a question. With
  /// `rerotate` positions are renumbered after every cut. `progress` receives tokens of both
  /// together. Collective. Throws as `step` does; the caller must then free the sequence.
  StepResult run_with_question(SequenceId sequence, const std::vector<TokenId>& context,
                               const std::vector<TokenId>& question, StepOutput output,
                               const std::vector<TokenDraw>& draws = {},
                               const ProgressCallback& progress = {});

  /// Returns whether a context of the sequence can run in parts (StepPart::held) and be judged at
  /// its end, with the result of one dense step. This needs the engine's scorer and a threshold, or
  /// no pruning.
  bool can_hold(SequenceId sequence) const;
  /// Returns whether a policy can take a context in parts: all but the last as StepPart::held, the
  /// last as StepPart::context. The rows that stay are then those of one dense step. It needs a
  /// policy that has the model repeat the context, or dense prefill, a budget, and a policy whose
  /// scores depend on rows, on the newest queries, or on what accumulates
  /// (PolicyNeeds::accumulates).
  bool takes_parts(const LoadedPruning& pruning) const;
  /// Judges the pairs of a context whose last part has run as StepPart::held: all but the newest
  /// `window`. The same rows stay as after one dense step; rows that were judged earlier stay, too.
  /// Collective. Throws AgreedOutOfMemory if a rank has no memory to copy pages that another
  /// sequence shares. Some layers may then be judged, and the caller must free the sequence.
  void judge_context(SequenceId sequence);

  /// Throws Error for a pruning that the engine cannot carry out: PruningError as kvzap::check
  /// does, and Error for a window other than the engine's or a policy that does not work with the
  /// model's RoPE.
  void check(const LoadedPruning& pruning) const;
  /// Prunes an empty sequence, and forks of it, by `pruning` instead of the engine's own pruning.
  /// Its spans need the rule of this sequence. Collective. Throws, on every rank, Error as check
  /// does, and AgreedOutOfMemory.
  void set_pruning(SequenceId sequence, const LoadedPruning& pruning);

  /// The results of `read`.
  struct Reading {
    StepResult result;
    /// Scores of each policy. Equal policies share theirs.
    std::vector<std::shared_ptr<const ContextScores>> scores;
    /// Seconds of the step on this rank, and the part in which policies scored. Neither includes
    /// the steps that repeat the context.
    double step_seconds = 0;
    double scoring_seconds = 0;
  };
  /// Runs a context as the first step of a sequence that is not pruned. Its last `question` tokens
  /// are a question. Each of `policies` scores it as the sequence's own policy would. Policies with
  /// PolicyInfo::repeats_context have the model repeat it, once for all with equal prompts. The
  /// sequence holds all rows afterwards. Collective. Throws the errors of `step` and `end_context`;
  /// the caller must then free the sequence.
  Reading read(SequenceId sequence, const std::vector<TokenId>& tokens, std::int64_t question,
               const std::vector<std::shared_ptr<const PolicyChoice>>& policies, StepOutput output,
               const ProgressCallback& progress = {});
  /// Returns a fork of a sequence, pruned by `pruning`. The fork has the same rows and positions,
  /// and treats later tokens in the same way, as if its own prefill had been pruned. `source` holds
  /// all rows of a context, as `read` leaves it. `scores` are those that `read` returned for the
  /// policy; they are not used without one. `pruning` needs dense prefill and no decode cuts.
  /// Collective. Throws, on every rank, Error as check does, and AgreedOutOfMemory; there is then
  /// no new sequence.
  SequenceId prune(SequenceId source, const LoadedPruning& pruning, const ContextScores* scores);

  /// Returns whether steps can draw tokens (StepOutput::drawn): with one rank, and a vocabulary of
  /// at most 2^20 tokens.
  bool draws_tokens() const;
  /// Returns unused pool memory to the system. Returns the number of this rank's bytes.
  std::size_t trim();
  /// Reports the kept rows of a sequence and the bytes of the whole cache. Collective.
  CacheReport report(SequenceId sequence);
  /// Returns reports of several sequences, with the communication of one. Collective.
  std::vector<CacheReport> reports(const std::vector<SequenceId>& sequences);
  /// Counts the rows that each token of a sequence still has, wherever they lie. Collective. Waits.
  /// Throws AgreedOutOfMemory.
  TokenRows token_rows(SequenceId sequence);

  /// Begins to write a sequence to a file (kvzap::begin_snapshot), with all state that the engine
  /// needs to continue it. Sets prune, threshold, sink and recent_queries of `info`, and the
  /// engine's names in `state` and `further`. If the policy has the model repeat the context
  /// (PolicyInfo::repeats_context) and the context has not ended, `info` must have its tokens.
  /// `context`: a checkpoint of this sequence, which is written, too.
  ///
  /// The engine writes a fork, so the sequence can continue. It frees the fork when the file is
  /// complete, when writing fails, or when the returned object is destroyed. That object must not
  /// outlive the engine. Collective, as are advance, finish and the destructor of that object.
  /// Throws AgreedOutOfMemory without memory for the fork, Error for a context of another sequence,
  /// and the errors of kvzap::begin_snapshot.
  std::unique_ptr<SnapshotWriting> begin_snapshot(const std::filesystem::path& file,
                                                  SnapshotInfo info, const SnapshotOptions& options,
                                                  SequenceId sequence,
                                                  const Checkpoint* context = nullptr);
  /// Writes a sequence to a file and returns when the file is complete. Makes no fork and needs no
  /// memory of the cache, unless some rows lie on other ranks than the owners of their heads.
  /// Returns the notes of kvzap::write_snapshot.
  std::vector<std::string> write_snapshot(const std::filesystem::path& file, SnapshotInfo info,
                                          const SnapshotOptions& options, SequenceId sequence,
                                          const Checkpoint* context = nullptr);
  /// Does the same for callers that know only the model's name.
  std::vector<std::string> write_snapshot(const std::filesystem::path& file,
                                          const std::string& model_name, SequenceId sequence);

  /// The result of `resume`.
  struct Resumed {
    SequenceId sequence = -1;
    /// The state of the context, if the file has one beside the state of the sequence.
    std::unique_ptr<Checkpoint> context;
  };
  /// Returns a new sequence that continues the sequence of a snapshot: its cache, counts and policy
  /// state. The engine must have the options with which the file was written, and the sequence gets
  /// the pruning with which it was written: `pruning`, or the engine's own if that is null. The
  /// type of values, pages, ranks and memory limits may differ. Collective; every rank needs its
  /// own reader of the same file. Throws on every rank the errors of load_snapshot and of
  /// set_pruning, and AgreedError if the file lacks state that the policy needs (another policy
  /// wrote it). There is then no new sequence.
  Resumed resume(const SnapshotReader& reader, const LoadedPruning* pruning = nullptr);
  /// Throws Error if `count` more tokens of context cannot follow a context that has ended. As in
  /// sparse prefill, the policy must be able to score again after each chunk, and must not renumber
  /// positions.
  void check_more_context(SequenceId sequence, std::int64_t count) const;

  /// Brings rows of a sequence that balancing has moved to other ranks back to the owners of their
  /// heads. Collective. Throws AgreedOutOfMemory.
  void gather_pages(SequenceId sequence);
  /// Returns the positions of the rows that a head on this rank has, ascending. For tests and
  /// analyses. Throws Error if rows of the sequence lie on other ranks (gather_pages), as do the
  /// next two functions.
  std::vector<std::int64_t> positions(SequenceId sequence, int layer, int head_on_rank);
  /// Returns the scores of these rows of each head on this rank, in the same order. NaN: the row
  /// has no score.
  std::vector<std::vector<float>> scores(SequenceId sequence, int layer);
  /// Returns the keys, or the values, of these rows of a head on this rank, in the same order:
  /// (row, head_dim). Waits.
  std::vector<float> rows(SequenceId sequence, int layer, int head_on_rank, bool values);
  /// Returns the scores of all rows of a layer that lie on this rank, whoever owns their heads, in
  /// no order.
  std::vector<float> scores_of_rank(SequenceId sequence, int layer);
  /// Returns the bytes of this rank's part of the cache. Does not communicate.
  CacheBytes bytes() const;
  /// Returns the bytes of this rank's rows of one token in pages of a format, over all layers.
  std::size_t bytes_per_token(const PageFormat& format) const;
  /// Returns the same for the engine's own pages.
  std::size_t bytes_per_token() const { return bytes_per_token(options().page_format); }
  /// Returns the bytes of this rank's rings of one sequence.
  std::size_t bytes_per_sequence() const;
  /// Limits the bytes of this rank's rings and pages from now on, to at least 1, instead of
  /// options().kv_limit. What is allocated stays.
  void set_kv_limit(std::size_t bytes);
  /// Returns the bytes that this rank can still take within its limit; without one, the bytes of
  /// free pages.
  std::size_t free_bytes() const;
  void set_observer(StepObserver* observer);
  void set_attention_path(AttentionPath path);

 private:
  struct Parts;
  using LayerScores = decltype(ContextScores::layers);
  using CacheState = KVCache::Checkpoint;

  Engine(std::shared_ptr<const Model> model, std::shared_ptr<Scorer> scorer,
         const CacheOptions& options, const Communicator& comm);

  template <class Make>
  SequenceId on_all_ranks(const Make& make);
  engine::SequenceState new_state(
      const std::shared_ptr<const engine::SequencePruning>& pruning) const;
  engine::RecentQueries recent_queries(std::int64_t count, bool every_layer) const;
  /// Has the newest queries stored from step to step if the sequence's pruning needs that or a
  /// context comes in parts, and else within a step. Forgets stored ones if that changes.
  void keep_queries(engine::SequenceState& state, bool is_in_parts) const;
  std::shared_ptr<const engine::SequencePruning> pruning_of(const LoadedPruning& pruning) const;
  engine::SequenceState* state_with_policy(SequenceId sequence);
  std::vector<int> pruned_heads() const;
  // Returns whether a checkpoint of the sequence exists: it knows the lengths of page lists.
  bool is_pinned(SequenceId sequence);

  // A step without what follows on ranks.
  std::vector<StepResult> step_of_policies(const StepBatch& batch,
                                           const ProgressCallback& progress);
  std::string why_not_in_turn(bool is_needed) const;
  // Copies the batch and plans the part of each policy in it.
  void plan(const StepBatch& batch);
  // Plans the policy's part in a span of the batch.
  void plan(std::size_t index);
  // Returns the state whose policy `plan` has given to a span of the batch, or null.
  engine::SequenceState* planned(const StepBatch::Span& span);
  template <class Work>
  void or_begin_anew(const Work& work);
  void begin_policies_anew();
  // Lets the states of the batch's sequences follow a step, and cuts those of which a cut is due.
  void finish();
  // Stores the scores that a step has left. Cuts the sequence if a cut is due.
  void finish(const StepBatch::Span& span);
  // Lets the model repeat the context while a policy, which `make` returns, observes. Restores the
  // sequence afterwards.
  void repeat(SequenceId sequence, const std::vector<TokenId>& context, const PolicyChoice& choice,
              const std::function<Policy*()>& make, const ProgressCallback& progress);
  // Scores the rows of a context so far by a question that follows, and cuts them.
  void cut_by_question(SequenceId sequence, const std::vector<TokenId>& question,
                       const ProgressCallback& progress);
  // Repeats the context for the sequence's own policy, and cuts the sequence by its scores.
  void repeat_context(SequenceId sequence, const ProgressCallback& progress);

  // Gives rows their scores, without an agreement between ranks.
  void set_row_scores(SequenceId sequence, const LayerScores& scores);
  // Pairs layers with their scores; `keep` is still without values.
  std::vector<ScoredLayer> scored_layers(SequenceId sequence, const LayerScores& scores);
  // Evicts rows by a plan, outside of steps. `scores`: of all rows, for evict_by_flags.
  // `is_stored`: the cache has these scores. Collective.
  void evict(SequenceId sequence, const engine::EvictionPlan& plan, const LayerScores& scores,
             bool is_stored);
  void evict_by_flags(SequenceId sequence, const engine::EvictionPlan& plan,
                      const LayerScores& scores, bool is_stored);
  void evict_by_cutoffs(SequenceId sequence);
  // Throws Error unless `scores` has a score of each row of the sequence.
  void check_scores(SequenceId sequence, const ContextScores* scores) const;
  // Closes up the positions of a sequence whose heads all have the same number of rows.
  void compact_positions(SequenceId sequence);

  // Moves pages between ranks after a step, if that is due. Collective.
  void balance(const StepBatch& batch);
  void balance(std::vector<SequenceId> sequences);
  void require_all_rows(SequenceId sequence) const;
  // Returns the rows of this rank's heads that lie on other ranks: (head of any layer).
  std::vector<std::int64_t> rows_away(SequenceId sequence) const;
  // Returns the scores of the rows that a cache has of a sequence, head by head.
  static std::vector<std::vector<float>> scores_in(KVCache& cache, SequenceId sequence, int layer);

  // Adds the engine's state of the sequence to `info`. Collective. Returns the cache's part of
  // `context`, or null without a context.
  std::shared_ptr<const CacheState> describe(SequenceId sequence, const Checkpoint* context,
                                             SnapshotInfo& info);
  std::shared_ptr<const CacheState> with_pages_away(
      const std::shared_ptr<const CacheState>& taken) const;
  // Reads the fields that `describe` wrote with this prefix.
  engine::SequenceState read_state(const SnapshotReader& reader, const std::string& prefix,
                                   const std::vector<SnapshotQueries>& recent,
                                   const std::shared_ptr<const engine::SequencePruning>& pruning);

  CacheOptions m_options;
  Communicator m_comm;
  std::unique_ptr<Parts> m_parts;
};

}  // namespace kvzap
