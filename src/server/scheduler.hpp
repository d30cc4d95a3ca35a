// Which sequences take part in which step: continuous batching over one pruned cache.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <kvzap/engine/sampler.hpp>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "server/plan.hpp"
#include "server/prefix_tree.hpp"

namespace kvzap::server {

/// A stretch of a prompt.
struct Segment {
  enum class Kind {
    context,   // judged at its end, or in sparse prefill chunk by chunk
    question,  // runs over the pruned context; judged with PruneMode::always alone
    generated  // what the model said earlier; treated as if it said it now
  };
  Kind kind = Kind::context;
  std::vector<TokenId> tokens;
  /// Of a context: numbers of its first tokens, ascending, with which other prompts are expected to
  /// begin. Where the context is judged as a whole, states are kept there too, of all their pairs.
  std::vector<std::int64_t> cuts = {};
};

std::int64_t tokens_of(const std::vector<Segment>& prompt);

/// What a client asks for.
struct GenerationRequest {
  /// At least one token in all.
  std::vector<Segment> prompt;
  /// Answers to the same prompt. The i-th draws with seed + i.
  int choices = 1;
  /// 1 or more.
  std::int64_t max_new_tokens = 128;
  /// An answer ends with one of these, which is its last token.
  std::vector<TokenId> stop_ids;
  SamplingOptions sampling;
  /// Log probabilities of each token and of so many of the likeliest ones; negative: of none.
  int top_logprobs = -1;
  Setting setting;
};

/// Natural logarithms of probabilities, before temperature, penalties and filters.
struct TokenLogprobs {
  float logprob = 0;
  /// The likeliest, ties by id.
  std::vector<std::pair<TokenId, float>> top;
};

/// Why an answer ends; cut: its listener wanted no more (a stop text).
enum class EndReason { stop_id, cut, max_new_tokens, context_full };

/// What there is to say of an answer at its end.
struct Ending {
  EndReason reason = EndReason::stop_id;
  std::int64_t prompt_tokens = 0;
  /// Of them, those that an earlier prompt had brought into the cache.
  std::int64_t cached_tokens = 0;
  std::int64_t new_tokens = 0;
  double evict_ratio = 0;
  /// Keys and values of the sequence over all ranks, and had none been evicted.
  std::int64_t kv_bytes = 0;
  std::int64_t full_kv_bytes = 0;
};

/// Hears of a request. Called by the thread that runs the scheduler, which it must not hold up.
class Listener {
 public:
  virtual ~Listener() = default;
  /// A token of answer `choice`. False: the answer ends with it.
  virtual bool on_token(int choice, TokenId token, const TokenLogprobs* logprobs) = 0;
  virtual void on_end(int choice, const Ending& ending) = 0;
  /// In place of all that is still to come. `is_servers`: the request is not to blame.
  virtual void on_error(const std::string& what, bool is_servers) = 0;
};

/// As many requests wait as may.
class QueueFull : public Error {
 public:
  using Error::Error;
};

struct SchedulerOptions {
  /// Rows of a step, tokens that are generated and chunks of prompts together; a chunk of sparse
  /// prefill is not cut for it.
  std::int64_t max_batch_tokens = 512;
  /// Sequences that run at once.
  std::int64_t max_sequences = 256;
  /// Requests that wait.
  std::int64_t max_queue = 1024;
  /// Positions of a sequence; 0: no limit.
  std::int64_t max_tokens = 0;
  /// Whether states of prompts are kept for others.
  bool keeps_prefixes = true;
};

/// What has been so far, and what is.
struct SchedulerCounts {
  std::int64_t waiting = 0, running = 0, prefixes = 0;
  std::int64_t finished = 0, cancelled = 0, failed = 0, refused = 0, preempted = 0;
  std::int64_t steps = 0;
  std::int64_t prompt_tokens = 0;  // run
  std::int64_t cached_tokens = 0;  // spared
  std::int64_t new_tokens = 0;
  std::int64_t prefixes_evicted = 0;
  double step_seconds = 0;                     // in the model
  double own_seconds = 0;                      // deciding, drawing, telling
  std::int64_t kv_allocated = 0, kv_free = 0;  // bytes of this rank
  double keep_ratio = 1;                       // of contexts, observed
};

/// What a page shows of a sequence.
struct SequenceStatus {
  std::int64_t request = 0;
  int choice = 0;
  const char* phase = "";  // "waiting", "prefill" or "decode"
  std::int64_t tokens = 0;
  std::int64_t new_tokens = 0;
  double evict_ratio = 0;
  std::int64_t kv_bytes = 0, full_kv_bytes = 0;  // over all ranks
};

/// Runs on rank 0; the other ranks carry out its plans (Executor::follow).
///
/// Each step takes the next token of every sequence that decodes, and chunks of prompts, first
/// come, first served, up to max_batch_tokens, of which they have an eighth at least. A prompt is
/// begun when the pool is expected to hold what will stay of it, at the keep ratio observed so far,
/// and when no other is about to leave a state from which it can go on.
/// Where memory runs out all the same, states of earlier prompts go, least recently used first,
/// then the newest sequence, which is computed anew later. What a sequence answers does not depend
/// on the others but for the order of sums.
class Scheduler {
 public:
  /// A request on its way.
  class Ticket {
   public:
    /// Ends it: the listener hears nothing more after the step under way. From any thread.
    void cancel();
    std::int64_t id() const { return m_id; }

   private:
    friend class Scheduler;
    std::atomic<bool> m_is_cancelled{false};
    std::int64_t m_id = 0;
    Scheduler* m_scheduler = nullptr;
  };

  Scheduler(Executor& executor, const SchedulerOptions& options);
  ~Scheduler();

  /// From any thread. Throws QueueFull, or Error for a request that can never be answered: no
  /// tokens, more than max_tokens, ids outside of the vocabulary, options that a Sampler refuses.
  std::shared_ptr<Ticket> submit(GenerationRequest request, std::shared_ptr<Listener> listener);
  /// What is there, and then nothing more: submit throws QueueFull from now on. From any thread.
  void drain();
  /// Ends all requests with an error, and `run`. From any thread.
  void stop();

  /// Serves until drain or stop, then ends the other ranks. Called by the thread that drives MPI.
  void run();
  /// One step, or less; for tests. Returns whether there was anything to do.
  bool step();
  /// Frees what is kept for other prompts. By the thread of `step`.
  void forget_prefixes();

  /// From any thread.
  SchedulerCounts counts() const;
  /// From any thread; sequences' rows are those of at most a second ago, if it is called often.
  std::vector<SequenceStatus> sequences() const;

 private:
  struct Job;
  struct Sequence;
  using Sequences = std::vector<std::unique_ptr<Sequence>>;
  /// Of a step, for prompts.
  struct Room {
    std::int64_t rows = 0;
    bool has_chunk = false;
  };

  void wake();
  void wait_for_work();
  void take_cancelled();
  void take_submitted();
  Plan make_plan(std::vector<Sequence*>& in_step);
  bool add_span(Sequence& sequence, Room& room, Plan& plan);
  bool waits_for_prefix(const Sequence& sequence);
  bool begin(Sequence& sequence, Plan& plan);
  bool is_admitted(const Sequence& sequence) const;
  std::int64_t bytes_to_come(const Sequence& sequence) const;
  std::vector<int> take_frees(const Plan& plan);
  Outcome carry_out(Plan& plan);
  void take_results(const Plan& plan, const Outcome& outcome,
                    const std::vector<Sequence*>& in_step);
  void advance(Sequence& sequence, const PlannedSpan& span, const StepResult& result);
  void draw(Sequence& sequence, const StepResult& result);
  void begin_other_choices(Sequence& first, const StepResult& result);
  void end_answers();
  bool free_prefix();
  bool make_room();
  void preempt(Sequence& sequence);
  void back_to_queue(std::unique_ptr<Sequence> sequence);
  void leave_queue(Job& job);
  void fail(Job& job, const std::string& what, bool is_servers);
  void drop_dead();
  void keep(const PrefixKey& key, int handle);
  void note_counts();
  void note_sequences();
  int new_handle() { return m_next_handle++; }

  Executor& m_executor;
  SchedulerOptions m_options;
  PrefixTree m_tree;
  Sequences m_running;                              // in order of admission
  std::deque<std::unique_ptr<Sequence>> m_waiting;  // in order of arrival
  Sequences m_ended;
  std::vector<int> m_to_free;
  int m_next_handle = 0;
  double m_keep_ratio = 1;
  bool m_is_asleep = false;  // the other ranks
  bool m_is_full = false;    // a sequence was preempted, and none has ended since
  double m_last_look = -1;

  mutable std::mutex m_mutex;  // of what follows
  std::condition_variable m_work;
  std::deque<std::shared_ptr<Job>> m_submitted;
  std::int64_t m_next_request = 1;
  std::int64_t m_queued = 0;  // requests of which no sequence runs yet
  bool m_is_draining = false;
  bool m_is_stopping = false;
  bool m_has_cancelled = false;
  SchedulerCounts m_counts;
  std::vector<SequenceStatus> m_statuses;
  mutable double m_last_asked = -1;  // when somebody last wanted to see sequences
};

}  // namespace kvzap::server
