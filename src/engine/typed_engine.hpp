// An engine whose weights and cache have one type of values.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <kvzap/engine/engine.hpp>
#include <kvzap/engine/snapshot.hpp>
#include <map>
#include <numeric>
#include <optional>

#include "base/stopwatch.hpp"
#include "base/value_types.hpp"
#include "engine/agree_on_memory.hpp"
#include "engine/check_pruning.hpp"
#include "engine/page_placement.hpp"
#include "engine/row_scores.hpp"
#include "engine/sequence_state.hpp"

namespace kvzap::engine {

/// The members are defined in five files: engine.cpp (sequences, reports), engine_steps.cpp,
/// engine_cuts.cpp, engine_reading.cpp and engine_snapshots.cpp.
template <class Value>
class TypedEngine final : public Engine {
 public:
  TypedEngine(std::shared_ptr<const Model> model, std::shared_ptr<Scorer> scorer,
              const CacheOptions& options, const Communicator& comm)
      : Engine(options, comm),
        m_model(std::move(model)),
        m_scorer(std::move(scorer)),
        m_decoder(*m_model, m_scorer.get(), comm, options.pruning.window, options.page_rows,
                  &m_meter, options.page_format),
        m_standard(pruning_of(options)) {
    m_decoder.placement().set_limit(options.kv_limit);
  }

  const ModelConfig& config() const override { return m_model->config(); }
  SequenceId add_sequence() override {
    return on_all_ranks([&](std::optional<SequenceId>& made) {
      made = m_decoder.cache().add_sequence();
      m_states[*made] = new_state(m_standard);
    });
  }
  SequenceId fork(SequenceId source) override {
    return on_all_ranks([&](std::optional<SequenceId>& made) {
      made = m_decoder.cache().fork(source);
      m_decoder.placement().fork(source, *made);
      const SequenceState& from = m_states.at(source);
      m_states[*made] = from.copy(new_state(from.pruning));
    });
  }
  SequenceId fork_beginning(SequenceId source, std::int64_t tokens) override {
    gather_pages(source);
    return on_all_ranks([&](std::optional<SequenceId>& made) {
      if (!can_hold(source)) {
        throw Error(
            fmt::format("sequence {}: its policy has state that an earlier state lacks", source));
      }
      made = m_decoder.cache().fork_beginning(ExecutionSpace(), source, tokens);
      const SequenceState& from = m_states.at(source);
      m_states[*made] = from.copy(new_state(from.pruning));
    });
  }
  bool keeps_beginnings(std::int64_t tokens) const override {
    const CacheShape& shape = m_decoder.cache().shape();
    for (int l = 0; l < static_cast<int>(shape.heads.size()); ++l) {
      const OwnRing ring = shape.own_ring(l);
      if (ring.rows > 0 && tokens >= ring.rows + (ring.restarts ? 0 : 1)) return false;
    }
    return true;
  }
  void free_sequence(SequenceId sequence) override {
    m_decoder.cache().free_sequence(sequence);  // throws within a step, which refers to the state
    m_decoder.placement().free(sequence);
    m_states.erase(sequence);
    m_pins.erase(sequence);
  }

  std::unique_ptr<Checkpoint> checkpoint(SequenceId sequence) override;
  void restore(SequenceId sequence, const Checkpoint& checkpoint) override;
  std::int64_t tokens(SequenceId sequence) const override {
    return m_decoder.cache().tokens(sequence, 0);
  }
  StepRule rule(StepPart part, std::int64_t question) const override {
    return rule_of(*m_standard, part, question);
  }
  StepRule rule(SequenceId sequence, StepPart part, std::int64_t question) const override {
    return rule_of(*m_states.at(sequence).pruning, part, question);
  }

  std::vector<StepResult> step(const StepBatch& batch, const ProgressCallback& progress) override;
  void begin_step(const StepBatch& batch) override;
  void attend(int layer, const std::vector<ExternalLayer>& spans) override;
  void end_step() override;
  void cancel_step() override;
  bool needs_hidden() const override { return m_decoder.needs_hidden(); }
  void end_context(SequenceId sequence, const ProgressCallback& progress) override;
  bool can_hold(SequenceId sequence) const override {
    return !m_states.at(sequence).pruning->uses_policy;
  }
  void judge_context(SequenceId sequence) override;

  void check(const LoadedPruning& pruning) const override {
    check_for_engine(pruning, m_scorer != nullptr, m_model->config());
    if (pruning.prunes() && pruning.pruning.window != options().pruning.window) {
      throw Error(fmt::format("window is {}; expected {}, the rows of the engine's rings",
                              pruning.pruning.window, options().pruning.window));
    }
  }
  void set_pruning(SequenceId sequence, const LoadedPruning& pruning) override {
    agree_on_memory(communicator(), [&] {
      check(pruning);
      if (m_decoder.cache().in_step()) throw Error("a pruning cannot change within a step");
      if (tokens(sequence) > 0) {
        throw Error(
            fmt::format("sequence {} has tokens: its pruning cannot change any more", sequence));
      }
      m_states.at(sequence) = new_state(pruning_of(pruning));
    });
  }
  Reading read(SequenceId sequence, const std::vector<TokenId>& tokens, std::int64_t question,
               const std::vector<std::shared_ptr<const PolicyChoice>>& policies, StepOutput output,
               const ProgressCallback& progress) override;
  SequenceId prune(SequenceId source, const LoadedPruning& setting,
                   const ContextScores* scores) override;

  std::size_t trim() override {
    const std::size_t bytes = m_decoder.cache().trim();  // first: placement().trim shares the limit
    return bytes + m_decoder.placement().trim();
  }
  CacheReport report(SequenceId sequence) override { return reports({sequence}).front(); }
  std::vector<CacheReport> reports(const std::vector<SequenceId>& sequences) override;

  std::unique_ptr<SnapshotWriting> begin_snapshot(const std::filesystem::path& file,
                                                  SnapshotInfo info, const SnapshotOptions& options,
                                                  SequenceId sequence,
                                                  const Checkpoint* context) override;
  std::vector<std::string> write_snapshot(const std::filesystem::path& file, SnapshotInfo info,
                                          const SnapshotOptions& options, SequenceId sequence,
                                          const Checkpoint* context) override;
  Resumed resume(const SnapshotReader& reader) override;
  void check_more_context(SequenceId sequence, std::int64_t count) const override;

  void gather_pages(SequenceId sequence) override;
  std::vector<std::int64_t> positions(SequenceId sequence, int layer, int head_on_rank) override {
    require_all_rows(sequence);
    return m_decoder.cache().positions(sequence, layer, head_on_rank);
  }
  std::vector<std::vector<float>> scores(SequenceId sequence, int layer) override;
  std::vector<float> rows(SequenceId sequence, int layer, int head_on_rank, bool values) override;
  std::vector<float> scores_of_rank(SequenceId sequence, int layer) override;
  CacheBytes bytes() const override {
    CacheBytes bytes = m_decoder.cache().bytes();
    const CacheBytes guests = m_decoder.placement().guest_bytes();
    bytes.live += guests.live;
    bytes.allocated += guests.allocated;
    bytes.returned += guests.returned;
    return bytes;
  }
  std::size_t bytes_per_token(const PageFormat& format) const override {
    const std::vector<int> heads = pruned_heads();
    const CacheShape& shape = m_decoder.cache().shape();
    const std::size_t wide = page_row_values(shape.head_dim, sizeof(Value));
    const std::size_t notes = page_row_bytes(shape.head_dim, sizeof(Value)) - wide;
    // Pages of packed rows have some padding.
    const std::size_t row = format.packed()
                                ? PackedPage{format, shape.page_rows, shape.head_dim}.bytes() /
                                      static_cast<std::size_t>(shape.page_rows)
                                : wide;
    return static_cast<std::size_t>(std::accumulate(heads.begin(), heads.end(), 0)) * (row + notes);
  }
  std::size_t bytes_per_sequence() const override { return m_decoder.cache().bytes_per_sequence(); }
  void set_kv_limit(std::size_t bytes) override { m_decoder.placement().set_limit(bytes); }
  std::size_t free_bytes() const override { return m_decoder.cache().pool().free_bytes(); }
  void set_observer(StepObserver* observer) override {
    m_observer = observer;
    m_decoder.set_observer(observer);
  }
  void set_attention_path(AttentionPath path) override { m_decoder.set_attention_path(path); }

 private:
  using CacheState = KVCache::Checkpoint;
  struct TypedCheckpoint final : Checkpoint {
    std::shared_ptr<const CacheState> cache_state;  // shared with a snapshot that is being written
    SequenceState state;
  };

  /// Adds the engine's state of the sequence to `info`. Collective. Returns the cache's part of
  /// `context`, or null without a context.
  std::shared_ptr<const CacheState> describe(SequenceId sequence, const Checkpoint* context,
                                             SnapshotInfo& info);
  std::shared_ptr<const CacheState> with_pages_away(
      const std::shared_ptr<const CacheState>& taken) const;
  /// Reads the fields that `describe` wrote with this prefix.
  SequenceState read_state(const SnapshotReader& reader, const std::string& prefix,
                           const std::vector<SnapshotQueries>& recent);

  /// Returns the heads on this rank, per layer; none of layers that are not pruned.
  std::vector<int> pruned_heads() const {
    const CacheShape& shape = m_decoder.cache().shape();
    std::vector<int> heads = shape.heads;
    for (std::size_t l = 0; l < heads.size(); ++l) {
      if (!shape.has_pages(static_cast<int>(l))) heads[l] = 0;
    }
    return heads;
  }
  SequenceState new_state(const std::shared_ptr<const SequencePruning>& pruning) const;
  RecentQueries recent_queries(std::int64_t count, bool every_layer) const;
  std::shared_ptr<const SequencePruning> pruning_of(const LoadedPruning& pruning) const {
    return std::make_shared<const SequencePruning>(pruning, m_scorer.get());
  }
  /// Returns null for a sequence without a policy, and for an id without a sequence.
  SequenceState* state_with_policy(SequenceId sequence) {
    const auto found = m_states.find(sequence);
    return found == m_states.end() || !found->second.pruning->uses_policy ? nullptr
                                                                          : &found->second;
  }

  /// Copies the batch to m_batch and plans the part of each policy in it.
  void plan(const StepBatch& batch);
  /// Plans the policy's part in a span of m_batch.
  void plan(std::size_t index);
  /// Returns the state whose policy `plan` has given to a span of m_batch, or null.
  SequenceState* planned(const StepBatch::Span& span) {
    SequenceState* const state = state_with_policy(span.sequence);
    return state && span.rule.policy == &state->step ? state : nullptr;
  }
  /// Runs a part of the decoder's step of m_batch. If it fails, the policies of the step begin
  /// anew: in the middle of a layer one may have partial sums. Between steps it holds nothing.
  template <class Work>
  void or_begin_anew(const Work& work) {
    try {
      work();
    } catch (...) {
      begin_policies_anew();
      throw;
    }
  }
  void begin_policies_anew();
  /// Moves pages between ranks after a step, if that is due. Collective.
  void balance(const StepBatch& batch);
  void balance(std::vector<SequenceId> sequences);
  /// Throws Error if rows lie on other ranks than the owners of their heads.
  void require_all_rows(SequenceId sequence) const {
    if (!m_decoder.placement().has_pages_away(sequence)) return;
    throw Error(fmt::format(
        "sequence {}: some rows lie on other ranks; call gather_pages on all ranks first",
        sequence));
  }
  /// Returns the rows of this rank's heads that lie on other ranks: (head of any layer).
  std::vector<std::int64_t> rows_away(SequenceId sequence) const;
  /// Returns the scores of the rows that a cache has of a sequence, head by head.
  static std::vector<std::vector<float>> scores_in(KVCache& cache, SequenceId sequence, int layer);
  /// Returns whether a checkpoint of the sequence exists: it knows the lengths of page lists.
  bool is_pinned(SequenceId sequence);
  /// Lets the states of m_batch's sequences follow a step, and cuts those of which a cut is due.
  void finish();
  /// Stores the scores that a step has left. Cuts the sequence if a cut is due.
  void finish(const StepBatch::Span& span);
  /// Lets the model repeat the context while a policy, which `make` returns, observes. Restores the
  /// sequence afterwards.
  void repeat(SequenceId sequence, const std::vector<TokenId>& context, const PolicyChoice& choice,
              const std::function<Policy*()>& make, const ProgressCallback& progress);
  /// Repeats the context for the sequence's own policy, and cuts the sequence by its scores.
  void repeat_context(SequenceId sequence, const ProgressCallback& progress);

  /// Gives rows their scores, without an agreement between ranks.
  void set_row_scores(SequenceId sequence, const LayerScores& scores);
  /// Pairs layers with their scores; `keep` is still without values.
  std::vector<ScoredLayer> scored_layers(SequenceId sequence, const LayerScores& scores);
  /// Evicts rows by a plan, outside of steps. `scores`: of all rows, for evict_by_flags.
  /// `is_stored`: the cache has these scores. Collective.
  void evict(SequenceId sequence, const EvictionPlan& plan, const LayerScores& scores,
             bool is_stored);
  void evict_by_flags(SequenceId sequence, const EvictionPlan& plan, const LayerScores& scores,
                      bool is_stored);
  void evict_by_cutoffs(SequenceId sequence);
  /// Throws Error unless `scores` has a score of each row of the sequence.
  void check_scores(SequenceId sequence, const ContextScores* scores) const;
  /// Closes up the positions of a sequence whose heads all have the same number of rows.
  void close_up(SequenceId sequence);

  /// Makes a new sequence on every rank or, after an error, on none. `make` must set it first.
  template <class Make>
  SequenceId on_all_ranks(const Make& make) {
    std::optional<SequenceId> made;
    try {
      agree_on_memory(communicator(), [&] { make(made); });
    } catch (...) {
      if (made) free_sequence(*made);
      throw;
    }
    return *made;
  }

  MemoryMeter m_meter;
  std::shared_ptr<const Model> m_model;
  std::shared_ptr<Scorer> m_scorer;
  Decoder<Value> m_decoder;
  std::shared_ptr<const SequencePruning> m_standard;  // of sequences without their own
  std::map<SequenceId, SequenceState> m_states;
  StepBatch m_batch;
  StepObserver* m_observer = nullptr;
  double m_evict_seconds = 0;
  double m_repeat_seconds = 0;  // model time in steps that repeat contexts
  std::map<SequenceId, std::vector<std::weak_ptr<CacheState>>> m_pins;  // live checkpoints
  std::int64_t m_until_balance = 0;                                     // steps
};

}  // namespace kvzap::engine
