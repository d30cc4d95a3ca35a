// A model with its cache and what prunes it, for any number of sequences.
#pragma once

#include <filesystem>
#include <kvzap/core/communicator.hpp>
#include <kvzap/core/head_partition.hpp>
#include <kvzap/engine/decoder.hpp>
#include <kvzap/engine/pruning.hpp>
#include <kvzap/engine/scorer.hpp>
#include <kvzap/engine/snapshot.hpp>
#include <kvzap/engine/step_batch.hpp>
#include <kvzap/model/model.hpp>
#include <memory>
#include <string>
#include <vector>

namespace kvzap {

/// How an engine fills and prunes its cache. The pruning is that of all sequences without one of
/// their own (Engine::set_pruning). Its window is that of every sequence that is pruned.
struct CacheOptions : LoadedPruning {
  /// Hand unused pool memory back to the system after the context and after each answer.
  bool trim = true;
  int page_rows = 64;
  /// Most bytes that rings and pages of this rank may take; 0: no limit.
  std::size_t kv_limit = 0;
};

/// What a policy makes of the rows of a context that it does not prune.
struct ContextScores {
  /// (head on this rank, position) of each layer.
  std::vector<Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>> layers;
  /// That took on this rank, steps that repeat the context included.
  double seconds = 0;
};

/// State of the whole cache, over all ranks. Complete on every rank.
struct CacheReport {
  std::int64_t tokens = 0;                      // seen so far, kept or not
  std::vector<std::vector<std::int64_t>> kept;  // rows, [layer][KV head]
  std::int64_t non_finite_scores = 0;  // judged pairs kept because their score is no number
  // Bytes, summed over ranks.
  std::int64_t full_bytes = 0;       // keys and values, had none been evicted
  std::int64_t live_bytes = 0;       // keys and values of kept rows
  std::int64_t allocated_bytes = 0;  // pages, in use or free, and rings
  std::int64_t returned_bytes = 0;   // handed back to the system so far
  std::int64_t peak_allocated_bytes =
      0;  // most at any time, prefill's dense keys and values included
  // Seconds so far of the whole engine, of the slowest rank.
  double score_seconds = 0;  // scoring pairs, and the steps of a repeated context
  double prune_seconds = 0;  // choosing those that stay, and storing what was judged

  /// Evicted pairs / pairs had none been evicted.
  double evict_ratio(int layer) const;
  /// Mean over layers.
  double evict_ratio() const;
};

/// Drives a decoder whose type of values is chosen at run time: sequences come and go,
/// each step takes any mix of them through the model. What a Generator and a server stand on. All
/// ranks make the same calls in the same order.
class Engine {
 public:
  /// A state of a sequence to which it can be cut back.
  class Checkpoint {
   public:
    Checkpoint() = default;
    Checkpoint(const Checkpoint&) = delete;
    Checkpoint& operator=(const Checkpoint&) = delete;
    virtual ~Checkpoint() = default;
  };

  /// `scorer` (usually a Surrogate) judges pairs; without one every pruning needs a policy. Weights
  /// and cache are of type Value. Does not communicate. Throws Error as check does, and if an
  /// option is out of range.
  template <class Value>
  static std::unique_ptr<Engine> create(std::shared_ptr<const Model<Value>> model,
                                        std::shared_ptr<Scorer> scorer, const CacheOptions& options,
                                        const Communicator& comm);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  virtual ~Engine() = default;

  const CacheOptions& options() const { return m_options; }
  const Communicator& communicator() const { return m_comm; }
  virtual const ModelConfig& config() const = 0;
  /// Scores and judges by the options, or does neither.
  StepRule rule(bool judges) const;
  /// What the options have done to such tokens. `question`: see StepRule.
  virtual StepRule rule(StepPart part, std::int64_t question = 0) const = 0;
  /// The same for a sequence that may have a setting of its own.
  virtual StepRule rule(SequenceId sequence, StepPart part, std::int64_t question = 0) const = 0;

  /// An empty sequence. Collective, as fork and checkpoint are. Throws AgreedOutOfMemory, as fork
  /// and checkpoint do, on every rank if one of them has no memory.
  virtual SequenceId add_sequence() = 0;
  /// A second sequence with the same content, whose pages are shared.
  virtual SequenceId fork(SequenceId source) = 0;
  virtual void free_sequence(SequenceId sequence) = 0;
  virtual std::unique_ptr<Checkpoint> checkpoint(SequenceId sequence) = 0;
  /// As KVCache::restore.
  virtual void restore(SequenceId sequence, const Checkpoint& checkpoint) = 0;
  /// Positions of a sequence so far, kept or not: its tokens, unless a policy has closed up its
  /// positions.
  virtual std::int64_t tokens(SequenceId sequence) const = 0;

  /// As Decoder::step. Where a policy cuts a sequence after the step, that can fail for lack of
  /// memory to copy pages shared with a fork: every rank throws an AgreedError that is no
  /// StepOutOfMemory, and the step's tokens stay in the sequence, whose layers have been cut or
  /// not. It is to be freed.
  virtual std::vector<StepResult> step(const StepBatch& batch,
                                       const ProgressCallback& progress = {}) = 0;

  /// The context has been run, whole or in chunks: does what a policy does then. Collective. Where
  /// the policy has the model repeat the context, what Engine::step says of errors holds, and
  /// `progress` gets "repeat" and tokens.
  virtual void end_context(SequenceId sequence, const ProgressCallback& progress = {}) = 0;

  /// Whether a context of such a sequence can be run in parts (StepPart::held) and judged at its
  /// end, as one dense step would be: with the engine's scorer and a threshold, or unpruned.
  virtual bool can_hold(SequenceId sequence) const = 0;
  /// Judges the pairs of a context that was run in parts, as StepPart::held, once its last part has
  /// been run: all but the newest `window`. The same rows stay as after one dense step, and of
  /// what was judged before all. Collective. Throws AgreedOutOfMemory if a rank has no memory to
  /// copy pages that another sequence shares: layers have been judged or not, and the sequence is
  /// to be freed.
  virtual void judge_context(SequenceId sequence) = 0;

  /// Throws Error for a pruning that the engine cannot carry out: PruningError as kvzap::check
  /// does, and Error for a window other than the engine's, or a policy that the model's RoPE
  /// excludes.
  virtual void check(const LoadedPruning& pruning) const = 0;
  /// Prunes an empty sequence, and forks of it, by `pruning` in place of the engine's own. Its
  /// spans need the rule of this sequence. Collective. Throws, on every rank, Error as check does,
  /// AgreedOutOfMemory.
  virtual void set_pruning(SequenceId sequence, const LoadedPruning& pruning) = 0;

  /// What `read` has found.
  struct Reading {
    StepResult result;
    /// Of each of the policies; equal ones have theirs in common.
    std::vector<std::shared_ptr<const ContextScores>> scores;
    /// That the step took on this rank, and of these what policies took to score in it: steps that
    /// repeat the context are in neither.
    double step_seconds = 0;
    double scoring_seconds = 0;
  };
  /// Runs a context as the first step of a sequence that is not pruned, of whose tokens the last
  /// `question` are a question's, and has it scored by `policies`, as each would score it if it
  /// were the sequence's own. Those with PolicyInfo::repeats_context have the model repeat it, once
  /// for all that ask alike. The sequence holds all rows afterwards. Collective. Throws what step
  /// and end_context throw; the sequence is to be freed then.
  virtual Reading read(SequenceId sequence, const std::vector<TokenId>& tokens,
                       std::int64_t question,
                       const std::vector<std::shared_ptr<const PolicyChoice>>& policies,
                       StepOutput output, const ProgressCallback& progress = {}) = 0;
  /// Returns a fork of a sequence, pruned as `pruning` says: the fork has the rows and positions,
  /// and treats later tokens, as if it had been pruned in its own prefill. `source` holds all rows
  /// of a context, as `read` leaves it; `scores` are those that `read` has returned for the policy
  /// (unused without one). `pruning` needs dense prefill and no decode cuts. Collective. Throws, on
  /// every rank, Error as check does, AgreedOutOfMemory; there is no new sequence then.
  virtual SequenceId prune(SequenceId source, const LoadedPruning& pruning,
                           const ContextScores* scores) = 0;

  /// Hands unused pool memory back to the system; returns this rank's bytes.
  virtual std::size_t trim() = 0;
  /// Kept rows of a sequence; bytes of the whole cache. Collective.
  virtual CacheReport report(SequenceId sequence) = 0;
  /// Those of several sequences at once.
  virtual std::vector<CacheReport> reports(const std::vector<SequenceId>& sequences) = 0;

  /// Begins to write a sequence to a file, see kvzap::begin_snapshot, and all that the engine needs
  /// to go on with it: fills info's prune, threshold, sink, recent_queries, and its own names in
  /// `state` and `further`. `info` has the tokens of a context whose end is still to come if the
  /// policy has the model repeat it (PolicyInfo::repeats_context). `context`: a checkpoint of this
  /// sequence, written too. What is written is a fork, so that the sequence may go on; it is freed
  /// when the file is in its place, when writing fails, or with the object that is returned, which
  /// goes before the engine. Collective, as advance, finish and the end of that object are. Throws
  /// AgreedOutOfMemory for want of memory for the fork, Error for a context of another sequence,
  /// and what kvzap::begin_snapshot throws.
  virtual std::unique_ptr<SnapshotWriting> begin_snapshot(const std::filesystem::path& file,
                                                          SnapshotInfo info,
                                                          const SnapshotOptions& options,
                                                          SequenceId sequence,
                                                          const Checkpoint* context = nullptr) = 0;
  /// The same without a fork, and waits for it: takes no memory of the cache. Returns what
  /// kvzap::write_snapshot returns.
  virtual std::vector<std::string> write_snapshot(const std::filesystem::path& file,
                                                  SnapshotInfo info, const SnapshotOptions& options,
                                                  SequenceId sequence,
                                                  const Checkpoint* context = nullptr) = 0;
  /// The same with nothing but the model's name.
  std::vector<std::string> write_snapshot(const std::filesystem::path& file,
                                          const std::string& model_name, SequenceId sequence);

  /// What `resume` makes of a file.
  struct Resumed {
    SequenceId sequence = -1;
    /// The state of the context, if the file has it beside that of the sequence.
    std::unique_ptr<Checkpoint> context;
  };
  /// A new sequence that goes on where that of a snapshot was: its cache, counts and whatever the
  /// policy will ask for. The engine has the options that the file was written under, but for the
  /// type of values, pages, ranks and limits of memory. Collective; every rank has a reader of its
  /// own of the same file. Throws, on every rank, what load_snapshot throws, and AgreedError if the
  /// file lacks what the policy needs (it was written under another one). There is no new sequence
  /// then.
  virtual Resumed resume(const SnapshotReader& reader) = 0;
  /// Throws Error if no `count` tokens of context can follow a context that has come to its end: as
  /// sparse prefill, this needs a policy that can score again after each chunk, and one that leaves
  /// positions as they are.
  virtual void check_more_context(SequenceId sequence, std::int64_t count) const = 0;

  /// Positions of the rows that a head on this rank still has, ascending; for tests and analyses.
  virtual std::vector<std::int64_t> positions(SequenceId sequence, int layer, int head_on_rank) = 0;
  /// Scores of those rows, in the same order, of each head on this rank; NaN: the row has none.
  virtual std::vector<std::vector<float>> scores(SequenceId sequence, int layer) = 0;
  /// Bytes of this rank's part of the cache. Does not communicate.
  virtual CacheBytes bytes() const = 0;
  /// Bytes of this rank's rows of one token in pages, over all layers.
  virtual std::size_t bytes_per_token() const = 0;
  /// Bytes of this rank's rings of one sequence.
  virtual std::size_t bytes_per_sequence() const = 0;
  /// Bytes that this rank may still take within options().kv_limit; of free pages if there is none.
  virtual std::size_t free_bytes() const = 0;
  virtual void set_observer(StepObserver* observer) = 0;
  virtual void set_attention_path(AttentionPath path) = 0;

 protected:
  Engine(const CacheOptions& options, const Communicator& comm)
      : m_options(options), m_comm(comm) {}

 private:
  CacheOptions m_options;
  Communicator m_comm;
};

}  // namespace kvzap
