// The current step of a decoder: what its blocks share.
#pragma once

#include <algorithm>
#include <array>
#include <exception>
#include <kvzap/core/cache.hpp>
#include <kvzap/core/communicator.hpp>
#include <kvzap/engine/step_batch.hpp>
#include <kvzap/model/model.hpp>
#include <utility>
#include <vector>

#include "base/machine.hpp"
#include "base/scratch.hpp"
#include "base/staged.hpp"
#include "engine/new_rows.hpp"
#include "engine/policy_step.hpp"
#include "linalg/gemm.hpp"
#include "model/model_weights.hpp"
#include "parallel/rank_exchange.hpp"

namespace kvzap::engine {

/// Outcome of a step on one rank; that of the step is the largest over the ranks.
enum Outcome : std::int64_t { done = 0, out_of_memory = 1, failed = 2 };

/// Whether the span's new pairs get scores, by the scorer or a policy.
inline bool is_scored(const StepRule& rule) {
  return rule.score || (rule.policy && rule.policy->scores_rows());
}

inline std::pair<std::int64_t, std::int64_t> range(std::int64_t begin, std::int64_t end) {
  return {begin, end};
}

/// Rows begin … end - 1 of a step's tokens, which pass a layer in one call.
struct RowRange {
  std::int64_t begin;
  std::int64_t end;
  std::int64_t count() const { return end - begin; }
};

/// The rows of a step after which outputs are asked for, and their spans. Spans that ask for tokens
/// alone, argmaxes or drawn ones, come first, then those that ask for logits, then those that ask
/// for hidden states.
struct StepOutputs {
  std::vector<std::int64_t> spans, rows;  // (output)
  std::vector<std::int64_t> drawn;        // outputs, among the first n_tokens
  std::int64_t n_tokens = 0, n_logits = 0;

  void list(const StepBatch& batch);
  std::int64_t count() const { return static_cast<std::int64_t>(rows.size()); }
  /// Returns the number of rows that the output head reads.
  std::int64_t n_head() const { return n_tokens + n_logits; }
  std::int64_t n_drawn() const { return static_cast<std::int64_t>(drawn.size()); }
  std::int64_t n_hidden() const { return count() - n_head(); }
  /// Whether the rows are consecutive, as with one span or with single tokens.
  bool are_consecutive() const;
};

/// The state of one step, and memory that blocks use one after the other. Blocks keep their own
/// memory beside it. It grows on demand and stays between steps, so that only a step longer than
/// all before allocates.
class Step {
 public:
  /// Model and cache must outlive the step; meter may be null.
  Step(const Model& own_model, const Communicator& ranks, KVCache& rows,
       MemoryMeter* meter = nullptr)
      : model(own_model), config(own_model.config()), comm(ranks), cache(rows) {
    place_new_rows(meter);
  }

  /// Forgets the error of an earlier step.
  void forget_failure() { m_failure = nullptr; }
  /// Begins a step of a batch, which must outlive it.
  void begin(const StepBatch& batch);
  /// Reserves the residual stream, positions and new rows.
  void reserve();
  /// Copies positions to the device.
  void place_positions();
  /// Frees the memory that grows with the tokens.
  void release();

  const StepBatch& batch() const { return *m_batch; }
  const std::vector<StepBatch::Span>& spans() const { return m_batch->spans(); }
  std::int64_t tokens() const { return static_cast<std::int64_t>(m_batch->tokens().size()); }
  /// Returns the most rows that pass a layer in one call.
  std::int64_t most_rows() const;
  /// Calls visit(span, first row, end row) for the part of each span within `rows`.
  template <class Visit>
  void for_each_span(const RowRange& rows, const Visit& visit) const;
  /// Returns the rows that are read after a layer: all, or from the first to the last row whose
  /// output is asked for, if no later layer has keys and values, or a state, of its own.
  RowRange read_rows(int layer, const RowRange& rows) const;
  /// Returns the rows that pass a layer: those that are read after the layer before.
  RowRange passing_rows(int layer, const RowRange& rows) const {
    return layer == 0 ? rows : read_rows(layer - 1, rows);
  }
  /// Returns whether attention is a part of the input of the layer's state space, which needs that
  /// of all rows.
  bool feeds_state(int layer) const {
    return config.layer(layer).mixing == TokenMixing::attention_into_state_space;
  }
  const Model::Weights::Layer& weights(int layer) const { return model.weights().layers[layer]; }
  bool is_pruned(int layer) const { return cache.shape().has_pages(layer); }
  /// Returns whether the span's tokens attend one after the other, each to the rows that its
  /// predecessors have left: rows of a draft's tokens may be evicted or packed before the next
  /// token sees them. Then only the last one is appended at the end of a layer. On hosts all drafts
  /// do so where no layer reads rows of another: the kernel of single tokens gives the same bits as
  /// without a draft, and finds most rows in the processor's caches after the first token.
  bool runs_in_turn(const StepBatch::Span& span) const {
    if (span.rule.part != StepPart::draft || span.count == 1) return false;
    return span.rule.eviction.judges() || cache.shape().format.quantised() ||
           (!base::machine().on_device() && m_new_rows.size() == 1);
  }
  /// Returns the layer whose rows a layer reads, and whether it is another one.
  int rows_of(int layer) const { return static_cast<int>(config.rows_of(layer)); }
  bool shares_rows(int layer) const { return rows_of(layer) != layer; }
  /// Returns the KV heads of a layer on this rank.
  std::int64_t kv_heads(int layer) const { return cache.shape().heads[layer]; }
  std::int64_t head_dim(int layer) const { return config.head_dim_of(layer); }
  std::int64_t query_heads(int layer) const {
    return kv_heads(layer) * config.query_group_of(layer);
  }
  /// Returns keys and values of the step's tokens that a layer reads: (token, head, dim).
  ArrayView new_keys(int layer) const {
    return new_rows(layer).keys().array(tokens(), kv_heads(layer), head_dim(layer));
  }
  ArrayView new_values(int layer) const {
    if (config.row_vectors() == 1) return new_keys(layer);
    return new_rows(layer).values().array(tokens(), kv_heads(layer), head_dim(layer));
  }
  /// Returns their scores: (head, token).
  linalg::Matrix new_scores(int layer) const {
    return linalg::Matrix(new_rows(layer).scores().data(), has_scores ? kv_heads(layer) : 0,
                          has_scores ? tokens() : 0);
  }
  /// Returns those of tokens begin … end - 1: (head, token).
  linalg::Matrix new_scores(int layer, std::int64_t begin, std::int64_t end) const {
    const linalg::Matrix all = new_scores(layer);
    // A rank without heads may have no address to count from.
    if (all.extent(0) == 0) return linalg::Matrix(all.data(), 0, end - begin);
    return Kokkos::subview(all, Kokkos::ALL, range(begin, end));
  }

  /// Memory of values that no two blocks need at the same time.
  enum Buffer {
    normed,     // input of a block, and the output of most
    projected,  // output of a block's first product
    mixed,      // input of a token mixer's last product
    gates,
    n_buffers
  };
  void reserve(Buffer index, std::int64_t count) {
    base::reserve_scratch(m_buffers[index], count, "kvzap::decoder::activations");
  }
  linalg::Matrix matrix(Buffer index, std::int64_t rows, std::int64_t columns) const {
    return linalg::Matrix(m_buffers[index].data(), rows, columns);
  }
  float* data(Buffer index) const { return m_buffers[index].data(); }

  /// Runs work that does not communicate, unless an error has occurred before. After an error, this
  /// rank still takes part in the collective calls up to the next agreement. If it left the step,
  /// the others would wait for it.
  template <class Work>
  void locally(const Work& work);
  /// Runs work that may communicate. With several ranks it therefore runs after an error too, on
  /// the buffers as they are. Its own errors are not caught then and end the program, because the
  /// other ranks may be waiting within it; errors that all ranks have agreed on are noted.
  template <class Work>
  void by_policy(const Work& work);
  /// Notes an error, unless one has occurred before.
  void note(const std::exception_ptr& failure) {
    if (!m_failure) m_failure = failure;
  }
  /// Returns the outcome on this rank so far.
  Outcome outcome() const;
  /// Throws on every rank if any rank has failed. Collective.
  void agree_on_failure() { throw_if(comm.all_reduce_max(outcome())); }
  /// Throws unless the worst outcome over the ranks is `done`. Collective.
  void throw_if(std::int64_t worst);

  const Model& model;
  const ModelConfig& config;
  const Communicator comm;
  KVCache& cache;
  ExecutionSpace exec;
  linalg::LinearMap linear;
  parallel::RankExchange exchange;
  PruneSeconds seconds;  // of all steps

  // The current step.
  std::vector<std::int64_t> first_positions;           // of each span
  Kokkos::View<std::int64_t*, MemorySpace> positions;  // of each token, on the device
  StepOutputs outputs;
  linalg::Matrix h;             // (token, hidden), the residual stream
  linalg::Matrix pending;       // output of the last layer that the next norm still has to add to h
  linalg::RoundedRows rounded;  // the last norm's output, for the products that follow it
  bool has_policies = false;
  bool has_scores = false;  // the tokens of at least one span are scored
  bool deferred = false;    // the cache waits for its kernels once, at the end of the step
  // Attention's calls and the cache's appends have been planned for all layers (Decoder::plan).
  bool is_planned = false;

 private:
  void place_new_rows(MemoryMeter* meter);
  const NewRows& new_rows(int layer) const { return m_new_rows[m_places[rows_of(layer)]]; }

  const StepBatch* m_batch = nullptr;
  // Rows that later layers read have a place of their own; those of all other layers share the
  // first.
  std::vector<NewRows> m_new_rows;
  std::vector<std::size_t> m_places;  // (layer)
  int m_last_own = 0;                 // the last layer with rows, or a state, of its own
  linalg::Vector m_residual;
  base::Staged<std::int64_t> m_positions;
  std::array<linalg::Vector, n_buffers> m_buffers;
  std::exception_ptr m_failure;  // of this rank
};

template <class Visit>
void Step::for_each_span(const RowRange& rows, const Visit& visit) const {
  for (std::size_t s = 0; s < spans().size(); ++s) {
    const StepBatch::Span& span = spans()[s];
    const std::int64_t begin = std::max(rows.begin, span.first);
    const std::int64_t end = std::min(rows.end, span.first + span.count);
    if (begin < end) visit(s, begin, end);
  }
}

template <class Work>
void Step::locally(const Work& work) {
  if (m_failure) return;
  try {
    work();
  } catch (...) {
    m_failure = std::current_exception();
  }
}

template <class Work>
void Step::by_policy(const Work& work) {
  if (comm.size() == 1) return locally(work);
  try {
    work();
  } catch (const AgreedError&) {
    note(std::current_exception());
  }
}

}  // namespace kvzap::engine
