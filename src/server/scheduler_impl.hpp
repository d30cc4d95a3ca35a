// The parts of a scheduler: queue and loop (scheduler.cpp), plans (step_plan.cpp), results
// (step_results.cpp).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <kvzap/server/prefix_store.hpp>
#include <kvzap/server/scheduler.hpp>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/stopwatch.hpp"
#include "server/plan.hpp"
#include "server/prefill_order.hpp"
#include "server/prefix_tree.hpp"
#include "server/sequence.hpp"

namespace kvzap::server {

// A beginning that prompts share within a context is cut from a kept state, and one is read from a
// file, if this saves as many tokens. A context with fewer new tokens leaves no state for it.
constexpr std::int64_t least_shared_tokens = 128;

class Scheduler::Impl {
 public:
  Impl(Executor& executor, const SchedulerOptions& options);

  std::vector<std::shared_ptr<Ticket>> submit(std::vector<Submission> submissions);
  void note_cancelled();
  void drain();
  void stop();
  void run();
  bool step();
  void forget_prefixes();
  SchedulerCounts counts() const;
  std::vector<SequenceStatus> sequences() const;

 private:
  using Sequences = std::vector<std::unique_ptr<Sequence>>;
  /// The space that a step has left for prompts.
  struct Room {
    std::int64_t rows = 0;
    std::int64_t logit_rows = 0;  // of prompts whose log probabilities are reported
    bool has_chunk = false;
    std::int64_t draft = 0;  // most tokens of a sequence's draft
  };

  // Queue and loop.
  std::shared_ptr<Job> make_job(Submission submission);
  void wake() { m_work.notify_all(); }
  void wait_for_work();
  void take_cancelled();
  void take_submitted();
  void prepare(Job& job) const;
  void leave_queue(Job& job);
  void check_room(const std::vector<std::shared_ptr<Job>>& jobs) const;
  void back_to_queue(std::unique_ptr<Sequence> sequence);
  void fail(Job& job, const RequestError& error);
  void drop_dead();
  Outcome carry_out(Plan& plan);
  std::vector<int> take_frees(const Plan& plan);
  void note_counts();
  void note_sequences();
  void note_phases();

  // Plans.
  std::vector<PageFormat> formats_by_turn() const;
  Plan make_plan(const PageFormat& format, std::vector<Sequence*>& in_step);
  Sequence* next_alone(const PageFormat& format) const;
  bool is_wanted(const Sequence& sequence) const;
  void add_spans(const PageFormat& format, Room room, Plan& plan, std::vector<Sequence*>& in_step);
  void estimate(Sequence& sequence);
  bool is_short(const Sequence& sequence) const { return m_order.is_short(sequence.to_read); }
  std::vector<Reader> readers_of(const PageFormat& format, Sequence*& oldest);
  void add_prompts(const PageFormat& format, std::int64_t rows, Plan& plan,
                   std::vector<Sequence*>& in_step);
  bool admit(Sequence& sequence, Plan& plan);
  bool add_span(Sequence& sequence, Room& room, Plan& plan);
  void add_answer_span(Sequence& sequence, Room& room, Plan& plan);
  void ask_for_token(Sequence& sequence, PlannedSpan& span);
  void add_draft(Sequence& sequence, const Room& room, PlannedSpan& span);
  PrefixTree::Found best_start(const Job& job);
  bool waits_for_prefix(const Sequence& sequence);
  bool leaves_whole_state(const Sequence& sequence, std::size_t segment) const;
  bool begin(Sequence& sequence, Plan& plan);
  bool is_admitted(const Sequence& sequence) const;
  std::int64_t bytes_to_come(const Sequence& sequence) const;
  bool keeps_states(const Sequence& sequence) const;
  bool leaves_spare(const Sequence& sequence, std::size_t segment) const;
  void plan_states(const Sequence& sequence, PlannedSpan& span, bool is_cut);

  // Results.
  void take_results(const Plan& plan, const Outcome& outcome,
                    const std::vector<Sequence*>& in_step);
  void take_not_made(const std::vector<int>& handles);
  void take_lost(Sequence& sequence);
  void take_failure(const Plan& plan, const std::string& what,
                    const std::vector<Sequence*>& in_step);
  void advance(Sequence& sequence, const PlannedSpan& span, const StepResult& result);
  void report_prompt(Sequence& sequence, const PlannedSpan& span, const StepResult& result) const;
  void advance_draft(Sequence& sequence, const PlannedSpan& span, const StepResult& result);
  void begin_answer(Sequence& sequence) const;
  void draw(Sequence& sequence, const StepResult& result);
  void begin_answers(Sequence& sequence, const StepResult& result);
  void pool(Sequence& sequence, const StepResult& result);
  static void report_progress(const Sequence& sequence);
  bool returns_kept(const Sequence& sequence) const;
  static std::shared_ptr<const KeptTokens> kept_tokens(const Sequence& sequence,
                                                       const TokenRows& counted);
  void begin_other_choices(Sequence& first, const StepResult& result);
  void end_answers();
  static bool evicts(const Sequence& sequence, const PlannedSpan& span);
  bool keep(const PrefixKey& key, int handle, std::int64_t whole_from, bool is_spare = false);
  bool free_prefix();
  void limit_prefixes();
  bool make_room();
  void preempt(Sequence& sequence);

  // Files of kept states.
  void restore(const Sequence& sequence, const Plan& plan);
  void note_to_store(const Sequence& sequence, int handle);
  bool has_to_store() const;
  void plan_files(Plan& plan);
  void take_stored(const Plan& plan, const Outcome& outcome);
  bool store_when_idle();
  void finish_storing();

  int new_handle() { return m_next_handle++; }

  Executor& m_executor;
  SchedulerOptions m_options;
  PrefixTree m_tree;
  PrefillOrder m_order;
  ClientShares m_shares;
  Sequences m_running;                              // in order of admission
  std::deque<std::unique_ptr<Sequence>> m_waiting;  // in order of arrival
  Sequences m_ended;
  std::vector<int> m_to_free;
  std::vector<PlannedTakeBack> m_to_take_back;
  int m_next_handle = 0;
  double m_keep_ratio = 1;
  PageFormat m_turn;                  // of the sequences of the last step
  bool m_is_asleep = false;           // the other ranks
  bool m_omits_drafts = false;        // the last step had no memory for them
  const Sequence* m_alone = nullptr;  // alone in the step that is planned
  bool m_is_full = false;             // a sequence was preempted, and none has ended since
  double m_last_look = -1;
  /// A kept state that shall get a file.
  struct ToStore {
    int handle;
    PrefixStore::Place place;
  };
  std::deque<ToStore> m_to_store;
  std::optional<StoredPrefix> m_storing;  // that is being written
  base::Clock::time_point m_store_from;   // after a failure: not before

  mutable std::mutex m_mutex;  // guards all below
  std::condition_variable m_work;
  std::deque<std::shared_ptr<Job>> m_submitted;
  std::int64_t m_next_request = 1;
  std::int64_t m_queued = 0;                        // requests without a running sequence
  std::map<std::string, std::int64_t> m_queued_of;  // of each client
  bool m_is_draining = false;
  bool m_is_stopping = false;
  bool m_has_cancelled = false;
  SchedulerCounts m_counts;
  std::vector<SequenceStatus> m_statuses;
  mutable double m_last_asked = -1;  // time of the latest call of `sequences`
};

}  // namespace kvzap::server
