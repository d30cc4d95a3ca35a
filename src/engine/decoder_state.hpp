// The state of a decoder and of its current step, for the sources that share it.
#pragma once

#include <algorithm>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "base/kokkos_compat.hpp"
#include "base/scratch.hpp"
#include "engine/decoder.hpp"
#include "engine/expert_routes.hpp"
#include "engine/policy_layer.hpp"
#include "engine/policy_step.hpp"
#include "engine/step.hpp"
#include "engine/value_buffer.hpp"
#include "linalg/gemm.hpp"
#include "parallel/rank_exchange.hpp"

namespace kvzap {
namespace engine {

inline Outcome outcome_of(const std::exception_ptr& failure) {
  if (!failure) return Outcome::done;
  try {
    std::rethrow_exception(failure);
  } catch (const std::bad_alloc&) {
    return Outcome::out_of_memory;
  } catch (const OutOfMemory&) {
    return Outcome::out_of_memory;
  } catch (...) {
    return Outcome::failed;
  }
}

}  // namespace engine

/// A block of the step's rows that passes through a layer in one call.
struct Decoder::Rows {
  std::int64_t begin;
  std::int64_t end;
  std::int64_t count() const { return end - begin; }
};

struct Decoder::Scratch {
  explicit Scratch(DType dtype) : new_keys(dtype), new_values(dtype), joined(dtype) {}

  // Buffers of activations. They grow on demand and stay between steps, so that only a step longer
  // than all before allocates.
  enum Buffer {
    residual,
    normed,
    projected,
    attended,
    gates,
    last_rows,
    last_added,
    squares,         // sums for norms of whole rows of queries and keys; logits of one gate
    query_scales,    // of each token of the step, if the model scales queries
    routed,          // output of experts
    expert_inputs,   // the tokens of one expert
    expert_outputs,  // and what it makes of them
    log_sums,        // log-sum-exp of attention, if the model has sinks or ranks share a head
    beside,          // output of attention that is parallel to the feed-forward part
    delta_rates,     // strengths and decays of a gated delta net
    // Of heads that ranks share (decoder_shared.cpp):
    dealt,            // this rank's outputs of q, k and v, if ranks share the weights
    gathered,         // those of all ranks
    team_rows,        // key and value of the head that this rank helps with
    remote_queries,   // of the heads of remote pages
    remote_norm,      // weights of the norms of these queries
    remote_attended,  // attention over remote pages
    remote_log_sums,  // and its log-sum-exp
    sent,             // parts of attention for other ranks
    received,         // and from them
    n_buffers
  };
  std::vector<linalg::Vector> buffers = std::vector<linalg::Vector>(n_buffers);
  Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace> angles;
  // Of layers with a window, if their RoPE differs.
  Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace> window_angles;
  Kokkos::View<TokenId*, MemorySpace> ids;
  Kokkos::View<std::int64_t*, MemorySpace> positions;
  // If RoPE depends on the length of the text: the frequencies of texts up to the original length.
  linalg::Vector inverse_frequencies;
  linalg::Vector window_frequencies;  // of window_angles; or empty
  // Only for such models: tables of frequencies (table, head_dim / 2), the first for texts up to
  // the original length, and the table of each token (token).
  linalg::Matrix frequency_tables;
  Kokkos::View<std::int64_t*, MemorySpace> tables;
  // Keys and values of the step's tokens in the current layer: (token, head, dim).
  engine::ValueBuffer new_keys, new_values;
  linalg::Vector new_scores;  // (head, token)
  MeteredBytes new_bytes;
  linalg::LinearMap linear;
  linalg::RoundedRows rounded;  // the last norm's output, for the products that follow it
  engine::ExpertRoutes routes;
  parallel::RankExchange exchange;
  std::vector<std::int64_t> logit_counts;  // of each rank

  // The current step.
  std::optional<StepBatch> external;  // of begin_step, until end_step
  int next_layer = 0;                 // of `external`
  linalg::Vector external_sinks;      // of the current layer of `external`
  bool agrees_often = false;          // after each layer
  ExecutionSpace exec;
  linalg::Matrix h;        // (token, hidden), the residual stream
  linalg::Matrix pending;  // output of the last layer that the next norm still has to add to h
  bool scores = false;     // the tokens of at least one span are scored
  bool deferred = false;   // the cache waits for its kernels once, at the end of the step
  std::vector<std::int64_t> first_positions;  // of each span
  std::vector<AttentionSpan> attention_spans;
  std::vector<AppendSpan> append_spans;
  std::vector<AppendSpan> ring_spans;  // for layers that are not pruned
  // Spans whose windows begin in a ring, with the rows that they see in order of position: (row,
  // head, dim), views of `joined`.
  std::vector<AttentionSpan> joined_spans;
  ArrayView joined_keys, joined_values;
  engine::ValueBuffer joined;
  std::vector<SequenceId> sequences;
  // Outputs: the spans that ask for one and the rows of their last tokens. Spans that ask for the
  // argmax come first.
  std::vector<std::int64_t> output_spans, output_rows;
  std::int64_t n_argmax = 0;
  Kokkos::View<std::int64_t*, MemorySpace> device_rows, argmax;
  std::vector<std::int64_t> argmax_keys;  // (output), then the step's outcome
  std::vector<float> local_logits, gathered_logits;
  std::vector<StepResult> results;

  /// Logits of the shared expert's gate: (token, 1).
  linalg::Matrix shared_logits(std::int64_t tokens) { return matrix(squares, tokens, 1); }

  linalg::Matrix matrix(Buffer index, std::int64_t rows, std::int64_t columns) {
    return linalg::Matrix(buffers[index].data(), rows, columns);
  }
  void reserve(Buffer index, std::int64_t count) {
    base::reserve_scratch(buffers[index], count, "kvzap::decoder::activations");
  }

  void reserve_new_rows(std::int64_t values, std::int64_t n_scores, MemoryMeter* meter) {
    if (new_keys.capacity() < values) {
      release_new_rows();
      new_keys.reserve(values, "kvzap::decoder::new_keys");
      new_values.reserve(values, "kvzap::decoder::new_values");
      new_bytes = MeteredBytes(meter, 2 * values * size_of(new_keys.dtype()));
    }
    base::reserve_scratch(new_scores, n_scores, "kvzap::decoder::scores");
  }

  void release() {
    release_new_rows();
    // Not = {}: Clang 14 would emit no destructor for these types.
    angles = decltype(angles)();
    window_angles = decltype(window_angles)();
    tables = decltype(tables)();
    ids = decltype(ids)();
    positions = decltype(positions)();
    h = linalg::Matrix();
    pending = linalg::Matrix();
    for (linalg::Vector& buffer : buffers) buffer = {};
    routes.release();
  }

  void release_new_rows() {
    new_keys.release();
    new_values.release();
    joined.release();
    joined_keys = joined_values = ArrayView();
    new_scores = {};
    new_bytes = {};
  }
};

/// The policies of the current step.
struct Decoder::Policies {
  explicit Policies(DType dtype) : scratch(dtype) {}

  using Layer = engine::DecoderLayer;

  // One entry for each span of the step; null if its rule has no policy.
  std::vector<engine::PolicyStep*> steps;
  std::vector<std::unique_ptr<Layer>> layers;
  std::vector<PolicyNeeds> needs;
  bool any = false;
  bool log_sum_exp = false;
  // The spans whose rows `append` stores; a policy that chooses stores its rows itself.
  std::vector<AppendSpan> append_spans;
  engine::PolicyScratch scratch;

  /// Releases all memory after a failed step, the scores kept in PolicyStep included.
  void release() {
    layers.clear();
    scratch.release();
    for (engine::PolicyStep* step : steps) {
      if (step) step->scores.clear();
    }
    steps.clear();
  }
};

// Runs work that does not communicate, unless an error has occurred before. After an error, this
// rank still takes part in the collective calls up to the next agreement. If it left the step, the
// others would wait for it.
template <class Work>
void Decoder::locally(const Work& work) {
  if (m_failure) return;
  try {
    work();
  } catch (...) {
    m_failure = std::current_exception();
  }
}

// Runs work that may communicate. With several ranks it therefore runs after an error too, on the
// buffers as they are. Its own errors are not caught then and end the program, because the other
// ranks may be waiting within it.
template <class Work>
void Decoder::by_policy(const Work& work) {
  if (m_comm.size() == 1) return locally(work);
  work();
}

// Calls visit(span, first row, end row) for the part of each span within `rows`.
template <class Visit>
void Decoder::for_each_span(const StepBatch& batch, const Rows& rows, const Visit& visit) {
  for (std::size_t s = 0; s < batch.spans().size(); ++s) {
    const StepBatch::Span& span = batch.spans()[s];
    const std::int64_t begin = std::max(rows.begin, span.first);
    const std::int64_t end = std::min(rows.end, span.first + span.count);
    if (begin < end) visit(s, begin, end);
  }
}

// Keys or values of the step's tokens in a layer: (token, head, dim).
inline ArrayView Decoder::new_rows(const engine::ValueBuffer& rows, const StepBatch& batch,
                                   int layer) const {
  return rows.array(static_cast<std::int64_t>(batch.tokens().size()), m_cache.shape().heads[layer],
                    m_model.config().head_dim);
}

// Scores of the step's tokens in a layer: (head, token).
inline auto Decoder::new_scores(const StepBatch& batch, int layer) const -> Activations {
  const bool exist = m_scratch->scores;
  return Activations(m_scratch->new_scores.data(), exist ? m_cache.shape().heads[layer] : 0,
                     exist ? batch.tokens().size() : 0);
}

}  // namespace kvzap
