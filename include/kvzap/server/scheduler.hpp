// Continuous batching over one pruned cache: the scheduler selects the sequences of each step.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <kvzap/server/executor.hpp>
#include <kvzap/server/histogram.hpp>
#include <kvzap/server/request.hpp>
#include <memory>
#include <vector>

namespace kvzap::server {

class PrefixStore;

/// Thrown if the queue is full, or the server is stopping.
class QueueFull : public Error {
 public:
  using Error::Error;
};

/// Limits of a Scheduler.
struct SchedulerOptions {
  /// Tokens of a step: generated ones and prompt chunks together. Chunks of sparse prefill may
  /// exceed it.
  std::int64_t max_batch_tokens = 512;
  /// Sequences that a step runs. As many again may hold memory: long prompts that pause.
  std::int64_t max_sequences = 256;
  /// Requests that wait, beside those for which there are places. A client without a waiting
  /// request finds room in an eighth more.
  std::int64_t max_queue = 1024;
  /// Tokens of a sequence; 0: no limit.
  std::int64_t max_tokens = 0;
  /// Whether the cache states of prompts are kept for later requests.
  bool keeps_prefixes = true;
  /// Bytes of rank 0 that kept states may take beside running sequences. 0: all free memory.
  std::size_t max_prefix_bytes = 0;
  /// Files of kept states, which outlive the server; null: none. It must outlive the scheduler.
  PrefixStore* store = nullptr;
  /// The most tokens that the drafts of a step have together (PromptLookup), divided evenly among
  /// the decoding sequences; 0: none. Answers stay the same.
  std::int64_t lookup = 0;
  /// Tokens of a prompt whose rows are counted for a client (Ending::kept): they bound the reply.
  std::int64_t max_kept_tokens = 65536;
};

/// Totals since the start, and the current state.
struct SchedulerCounts {
  std::int64_t waiting = 0, running = 0, prefixes = 0;
  std::int64_t finished = 0, cancelled = 0, failed = 0, refused = 0, preempted = 0;
  std::int64_t steps = 0;
  std::int64_t prompt_tokens = 0;  // that ran
  std::int64_t cached_tokens = 0;  // that did not run, because a kept state has them
  std::int64_t new_tokens = 0;
  std::int64_t drafted_tokens = 0;   // that drafts have had
  std::int64_t accepted_tokens = 0;  // of these, the ones that became a part of the answer
  std::int64_t prefixes_evicted = 0;
  double step_seconds = 0;                     // in the engine
  double own_seconds = 0;                      // planning, sampling, calls of listeners
  std::int64_t kv_allocated = 0, kv_free = 0;  // bytes of rank 0
  double keep_ratio = 1;                       // running mean over finished answers
  std::int64_t kv_used = 0;                    // bytes of rank 0, kept states included
  std::int64_t stopped = 0;                    // answers that ended by themselves or a stop text
  std::int64_t cut_by_length = 0;              // answers that ended at a maximum
  Histogram queue_seconds;                     // of requests, from `submit` to the first step
  Histogram first_token_seconds;               // of answers, from `submit` on
  Histogram between_tokens_seconds;
  Histogram answer_seconds;                                 // from `submit` to the end of an answer
  std::int64_t prefixes_stored = 0, prefixes_restored = 0;  // written to files, read from them
  std::int64_t stored_prefixes = 0, stored_prefix_bytes = 0;  // files that exist now
};

/// The current state of a sequence.
struct SequenceStatus {
  std::int64_t request = 0;
  int choice = 0;
  const char* phase = "";  // "waiting", "prefill" or "decode"
  std::int64_t tokens = 0;
  std::int64_t new_tokens = 0;
  double evict_ratio = 0;
  std::int64_t kv_bytes = 0, full_kv_bytes = 0;  // over all ranks
};

/// Serves many requests with one engine. Runs on rank 0; the other ranks call Executor::follow.
///
/// Each step runs the next token of every decoding sequence, and prompt chunks up to
/// max_batch_tokens, which get at least one eighth of the step. Short prompts, of at most an eighth
/// of max_batch_tokens, are first, and a step with some of them stays small. Otherwise the client
/// with the fewest prompt tokens so far is first, and of its prompts the one with the fewest tokens
/// left; the oldest prompt gets rows in every fourth step at least. A prompt starts when the page
/// pool is expected to have space for its kept rows, at the keep ratio observed so far. It waits if
/// another sequence is about to leave a state from which it can continue. A short prompt that finds
/// no place takes that of a long one, which pauses while it is being read.
///
/// When memory runs out, the scheduler frees the least recently used states of earlier prompts.
/// Then it preempts the newest sequence, and computes it again later. An answer does not depend on
/// the other sequences, except for the order of floating-point sums.
class Scheduler {
  class Impl;

 public:
  /// A submitted request.
  class Ticket {
   public:
    /// Cancels the request: its listener is not called after the current step. Call it from any
    /// thread while the scheduler exists.
    void cancel();
    std::int64_t id() const { return m_id; }

   private:
    friend class Scheduler;
    std::atomic<bool> m_is_cancelled{false};
    std::int64_t m_id = 0;
    Impl* m_scheduler = nullptr;
  };

  /// The executor must outlive the scheduler. Throws Error for limits below 1.
  Scheduler(Executor& executor, const SchedulerOptions& options);
  ~Scheduler();

  /// Queues a request. From any thread. Throws QueueFull. Throws Error for a request that cannot be
  /// answered: no tokens, more than max_tokens, ids outside the vocabulary, invalid sampling.
  std::shared_ptr<Ticket> submit(GenerationRequest request, std::shared_ptr<Listener> listener);
  /// A request and its listener.
  struct Submission {
    GenerationRequest request;
    std::shared_ptr<Listener> listener;
  };
  /// Queues several requests, or none of them. Returns their tickets. Throws as for one request;
  /// the error names a wrong request by its place, as "prompt[1]: …".
  std::vector<std::shared_ptr<Ticket>> submit(std::vector<Submission> submissions);
  /// Finishes the submitted requests and accepts no others: `submit` throws QueueFull. Call it from
  /// any thread.
  void drain();
  /// Ends all requests with an error, and then `run`. Call it from any thread.
  void stop();

  /// Serves until `drain` or `stop`, then ends the other ranks. Call it from the thread that drives
  /// MPI and Kokkos.
  void run();
  /// Runs at most one step, for tests. Returns whether there was work.
  bool step();
  /// Frees the kept states of prompts. Call it from the thread that calls `step`.
  void forget_prefixes();

  /// Call it from any thread.
  SchedulerCounts counts() const;
  /// Call it from any thread. Calls at least every 5 seconds get states that are at most half a
  /// second and one step old.
  std::vector<SequenceStatus> sequences() const;

 private:
  std::unique_ptr<Impl> m_impl;
};

}  // namespace kvzap::server
