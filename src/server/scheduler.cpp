#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <kvzap/server/protocol.hpp>
#include <utility>

#include "base/stopwatch.hpp"
#include "files/counted.hpp"
#include "parallel/meet_asleep.hpp"
#include "server/scheduler_impl.hpp"

namespace kvzap::server {
namespace {

// Seconds after a call of `sequences` in which their states are collected, and between collections.
constexpr double looks_for = 5, looks_every = 0.5;

double now() {
  return std::chrono::duration<double>(base::Clock::now().time_since_epoch()).count();
}

void check(const GenerationRequest& request, const SchedulerOptions& options,
           std::int64_t vocabulary) {
  const std::int64_t count = tokens_of(request.prompt);
  if (count == 0) throw Error("the prompt has no tokens");
  if (options.max_tokens > 0 && count > options.max_tokens) {
    throw Error(
        fmt::format("the prompt has {} tokens; expected at most {}, the length of the context",
                    count, options.max_tokens));
  }
  if (request.choices < 1 || request.choices > options.max_sequences) {
    throw Error(fmt::format("the request asks for {} answers; expected 1 to {}", request.choices,
                            options.max_sequences));
  }
  if (request.max_new_tokens < 0) {
    throw Error(fmt::format("the request asks for {} new tokens; expected at least 0",
                            request.max_new_tokens));
  }
  if (request.pooling && (request.max_new_tokens != 0 || request.choices != 1)) {
    throw Error("a vector of the prompt needs one answer without tokens");
  }
  for (const Segment& segment : request.prompt) {
    for (const TokenId token : segment.tokens) {
      if (token >= 0 && token < vocabulary) continue;
      throw Error(
          fmt::format("the prompt has token id {}; expected 0 to {}", token, vocabulary - 1));
    }
  }
  (void)Sampler(request.sampling);
}

}  // namespace

void Scheduler::Ticket::cancel() {
  m_is_cancelled = true;
  m_scheduler->note_cancelled();
}

Scheduler::Scheduler(Executor& executor, const SchedulerOptions& options)
    : m_impl(std::make_unique<Impl>(executor, options)) {}
Scheduler::~Scheduler() = default;
std::shared_ptr<Scheduler::Ticket> Scheduler::submit(GenerationRequest request,
                                                     std::shared_ptr<Listener> listener) {
  std::vector<Submission> one;
  one.push_back({std::move(request), std::move(listener)});
  return m_impl->submit(std::move(one)).front();
}
std::vector<std::shared_ptr<Scheduler::Ticket>> Scheduler::submit(
    std::vector<Submission> submissions) {
  return m_impl->submit(std::move(submissions));
}
void Scheduler::drain() { m_impl->drain(); }
void Scheduler::stop() { m_impl->stop(); }
void Scheduler::run() { m_impl->run(); }
bool Scheduler::step() { return m_impl->step(); }
void Scheduler::forget_prefixes() { m_impl->forget_prefixes(); }
SchedulerCounts Scheduler::counts() const { return m_impl->counts(); }
std::vector<SequenceStatus> Scheduler::sequences() const { return m_impl->sequences(); }

Scheduler::Impl::Impl(Executor& executor, const SchedulerOptions& options)
    : m_executor(executor), m_options(options), m_order(options.max_batch_tokens) {
  const auto check_count = [](const char* name, std::int64_t value) {
    if (value < 1) throw Error(fmt::format("{} is {}; expected at least 1", name, value));
  };
  check_count("max_batch_tokens", options.max_batch_tokens);
  check_count("max_sequences", options.max_sequences);
  check_count("max_queue", options.max_queue);
}

std::shared_ptr<Job> Scheduler::Impl::make_job(Submission submission) {
  GenerationRequest& request = submission.request;
  auto& prompt = request.prompt;
  prompt.erase(std::remove_if(prompt.begin(), prompt.end(),
                              [](const Segment& segment) { return segment.tokens.empty(); }),
               prompt.end());
  if (!request.pruning) request.pruning = m_executor.standard();
  const PageFormat& standard = m_executor.engine().options().page_format;
  if (!request.page_format) request.page_format = standard;
  if (!m_executor.engines().can_have(*request.page_format)) {
    throw Error("the server has one type of keys and values, and the request wants another");
  }
  check(request, m_options, m_executor.engine().config().vocab_size);
  auto job = std::make_shared<Job>();
  job->prompt_tokens = tokens_of(prompt);
  job->key = key_of(request);
  job->key_begin = static_cast<std::int64_t>(job->key.size());
  for (const Segment& segment : prompt) append_segment(job->key, segment);
  job->open = request.choices;
  job->request = std::move(request);
  job->listener = std::move(submission.listener);
  job->ticket = std::make_shared<Ticket>();
  job->ticket->m_scheduler = this;
  return job;
}

std::vector<std::shared_ptr<Scheduler::Ticket>> Scheduler::Impl::submit(
    std::vector<Submission> submissions) {
  std::vector<std::shared_ptr<Job>> jobs;
  for (Submission& submission : submissions) {
    try {
      jobs.push_back(make_job(std::move(submission)));
    } catch (const Error& error) {
      if (submissions.size() == 1) throw;
      throw Error(fmt::format("prompt[{}]: {}", jobs.size(), error.what()));
    }
  }
  std::vector<std::shared_ptr<Ticket>> tickets;
  {
    const std::lock_guard<std::mutex> lock(m_mutex);
    try {
      check_room(jobs);
    } catch (const QueueFull&) {
      ++m_counts.refused;
      throw;
    }
    m_queued += static_cast<std::int64_t>(jobs.size());
    m_counts.waiting += static_cast<std::int64_t>(jobs.size());
    for (std::shared_ptr<Job>& job : jobs) {
      ++m_queued_of[job->request.client];
      job->ticket->m_id = m_next_request++;
      tickets.push_back(job->ticket);
      m_submitted.push_back(std::move(job));
    }
  }
  wake();
  return tickets;
}

/// Throws QueueFull if the queue has no room for requests of a client. Needs the mutex.
void Scheduler::Impl::check_room(const std::vector<std::shared_ptr<Job>>& jobs) const {
  if (m_is_draining || m_is_stopping) throw QueueFull("the server is shutting down");
  // Requests for which there are places begin with the next step.
  std::int64_t most =
      m_options.max_queue + std::max<std::int64_t>(0, m_options.max_sequences - m_counts.running);
  // One client cannot keep the others out of the queue.
  const bool is_others = m_queued > 0 && m_queued_of.count(jobs.front()->request.client) == 0;
  if (is_others) most += std::max<std::int64_t>(1, m_options.max_queue / 8);
  const auto count = static_cast<std::int64_t>(jobs.size());
  if (m_queued + count <= most) return;
  throw QueueFull(
      count == 1
          ? fmt::format("the queue is full with {}", files::counted(m_queued, "request"))
          : fmt::format("the queue has {} requests and no room for {} more", m_queued, count));
}

void Scheduler::Impl::note_cancelled() {
  {
    const std::lock_guard<std::mutex> lock(m_mutex);
    m_has_cancelled = true;
  }
  wake();
}

void Scheduler::Impl::drain() {
  {
    const std::lock_guard<std::mutex> lock(m_mutex);
    m_is_draining = true;
  }
  wake();
}

void Scheduler::Impl::stop() {
  {
    const std::lock_guard<std::mutex> lock(m_mutex);
    m_is_stopping = true;
  }
  wake();
}

void Scheduler::Impl::run() {
  for (;;) {
    bool stops = false;
    {
      const std::lock_guard<std::mutex> lock(m_mutex);
      stops = m_is_stopping;
    }
    if (stops) break;
    if (step()) continue;
    {
      const std::lock_guard<std::mutex> lock(m_mutex);
      if (m_is_draining && m_submitted.empty()) break;
    }
    if (!store_when_idle()) wait_for_work();
  }
  finish_storing();
  take_submitted();
  const auto end = [&](Sequence& sequence) {
    fail(*sequence.job, {"the server is shutting down", true});
  };
  for (const auto& sequence : m_waiting) end(*sequence);
  for (const auto& sequence : m_running) end(*sequence);
  drop_dead();
  forget_prefixes();
  Plan plan;
  plan.ends = true;
  carry_out(plan);
  note_counts();
}

void Scheduler::Impl::wait_for_work() {
  if (!m_is_asleep) {
    Plan plan;
    plan.trims = true;
    plan.sleeps = true;
    carry_out(plan);
    note_counts();
    note_phases();
  }
  std::unique_lock<std::mutex> lock(m_mutex);
  m_work.wait(lock, [&] {
    return !m_submitted.empty() || m_is_draining || m_is_stopping || m_has_cancelled;
  });
}

/// Finds out how the sequences of a job can run. Throws Error if they cannot.
void Scheduler::Impl::prepare(Job& job) const {
  job.traits = m_executor.traits(*job.request.pruning);
  const Engine& engine = m_executor.engine();
  const std::size_t limit = engine.options().kv_limit;
  if (limit > 0 && static_cast<std::size_t>(job.prompt_tokens) *
                           engine.bytes_per_token(*job.request.page_format) >
                       limit) {
    job.traits.takes_parts = false;  // all rows of a context are stored before its last part
  }
  if (job.request.prompt_logprobs && !job.traits.holds && !job.traits.takes_parts &&
      engine.options().pruning.prefill == PrefillMode::dense) {
    throw BadRequest(
        "echo",
        "echo with logprobs needs a prompt that runs in steps, but the policy takes it as a whole; "
        "set kvzap.prune to \"none\"");
  }
  const std::vector<Segment>& prompt = job.request.prompt;
  const auto contexts = std::count_if(prompt.begin(), prompt.end(), [](const Segment& segment) {
    return segment.kind == Segment::Kind::context;
  });
  job.has_one_context = contexts == 1 && prompt.front().kind == Segment::Kind::context;
  if (job.traits.why_one.empty() || contexts < 2) return;
  throw BadRequest(
      "kvzap.policy",
      fmt::format("the policy takes one context, but the prompt has {}: {}; expected one "
                  "message of the user, with at most one part before its question",
                  contexts, job.traits.why_one));
}

void Scheduler::Impl::take_submitted() {
  std::deque<std::shared_ptr<Job>> submitted;
  {
    const std::lock_guard<std::mutex> lock(m_mutex);
    submitted.swap(m_submitted);
  }
  for (std::shared_ptr<Job>& job : submitted) {
    try {
      prepare(*job);
    } catch (const BadRequest& error) {
      fail(*job, {error.what(), false, error.field});
      continue;
    } catch (const Error& error) {
      fail(*job, {error.what()});
      continue;
    }
    job->share = m_shares.of(job->request.client);
    auto sequence = std::make_unique<Sequence>();
    sequence->job = std::move(job);
    estimate(*sequence);
    m_waiting.push_back(std::move(sequence));
  }
}

void Scheduler::Impl::take_cancelled() {
  {
    const std::lock_guard<std::mutex> lock(m_mutex);
    if (!m_has_cancelled) return;
    m_has_cancelled = false;
  }
  const auto look = [&](const std::unique_ptr<Sequence>& sequence) {
    Job& job = *sequence->job;
    if (job.is_dead || !job.ticket->m_is_cancelled) return;
    job.is_dead = true;
    const std::lock_guard<std::mutex> lock(m_mutex);
    ++m_counts.cancelled;
    leave_queue(job);
  };
  for (const auto& sequence : m_running) look(sequence);
  for (const auto& sequence : m_waiting) look(sequence);
  drop_dead();
}

/// Call it when the first sequence of a job runs, or none ever will. Needs the mutex.
void Scheduler::Impl::leave_queue(Job& job) {
  if (std::exchange(job.has_run, true)) return;
  --m_queued;
  const auto own = m_queued_of.find(job.request.client);
  if (--own->second == 0) m_queued_of.erase(own);
}

/// Puts a sequence before those that arrived later.
void Scheduler::Impl::back_to_queue(std::unique_ptr<Sequence> sequence) {
  estimate(*sequence);
  const auto place = std::find_if(m_waiting.begin(), m_waiting.end(), [&](const auto& other) {
    return other->job->ticket->id() > sequence->job->ticket->id();
  });
  m_waiting.insert(place, std::move(sequence));
}

void Scheduler::Impl::fail(Job& job, const RequestError& error) {
  if (job.is_dead) return;
  job.is_dead = true;
  {
    const std::lock_guard<std::mutex> lock(m_mutex);
    ++m_counts.failed;
    // Their places are free before the client knows.
    m_counts.running -= std::count_if(
        m_running.begin(), m_running.end(),
        [&](const auto& sequence) { return sequence && sequence->job.get() == &job; });
    leave_queue(job);
  }
  job.listener->on_error(error);
}

void Scheduler::Impl::drop_dead() {
  const auto is_dead = [&](const std::unique_ptr<Sequence>& sequence) {
    if (!sequence->job->is_dead) return false;
    if (sequence->handle >= 0) {
      m_to_free.push_back(sequence->handle);
      m_is_full = false;
    }
    return true;
  };
  m_running.erase(std::remove_if(m_running.begin(), m_running.end(), is_dead), m_running.end());
  m_waiting.erase(std::remove_if(m_waiting.begin(), m_waiting.end(), is_dead), m_waiting.end());
}

bool Scheduler::Impl::step() {
  const auto start = base::Clock::now();
  const double in_model = m_counts.step_seconds;
  take_submitted();
  take_cancelled();
  std::vector<Sequence*> in_step;
  Plan plan;
  bool has_work = false;
  for (const PageFormat& format : formats_by_turn()) {
    plan = make_plan(format, in_step);
    has_work = !plan.spans.empty() || !plan.creates.empty() || !plan.frees.empty();
    m_turn = format;
    if (has_work) break;
  }
  if (has_work) {
    // The step may take minutes.
    note_counts();
    if (!plan.creates.empty()) note_phases();
    plan_files(plan);
    const Outcome outcome = carry_out(plan);
    take_results(plan, outcome, in_step);
    end_answers();
    drop_dead();
    limit_prefixes();
    note_sequences();
  }
  {
    const std::lock_guard<std::mutex> lock(m_mutex);
    m_counts.own_seconds += base::seconds_since(start) - (m_counts.step_seconds - in_model);
  }
  note_counts();
  return has_work;
}

/// The sequences to free now. Those that the plan forks are freed later.
std::vector<int> Scheduler::Impl::take_frees(const Plan& plan) {
  std::vector<int> frees, later;
  for (const int handle : m_to_free) {
    const bool is_source =
        std::any_of(plan.creates.begin(), plan.creates.end(),
                    [&](const PlannedSequence& create) { return create.source == handle; });
    (is_source ? later : frees).push_back(handle);
  }
  m_to_free = std::move(later);
  return frees;
}

Outcome Scheduler::Impl::carry_out(Plan& plan) {
  const Communicator& comm = m_executor.engine().communicator();
  if (m_is_asleep) parallel::meet_asleep(comm);
  plan.take_backs = std::exchange(m_to_take_back, {});
  share(plan, comm);
  const auto start = base::Clock::now();
  Outcome outcome = m_executor(plan);
  m_is_asleep = plan.sleeps;
  take_stored(plan, outcome);
  const std::lock_guard<std::mutex> lock(m_mutex);
  m_counts.step_seconds += base::seconds_since(start);
  if (!plan.spans.empty()) ++m_counts.steps;
  return outcome;
}

void Scheduler::Impl::forget_prefixes() {
  m_to_store.clear();
  const std::vector<int> states = m_tree.clear();
  m_to_free.insert(m_to_free.end(), states.begin(), states.end());
  Plan plan;
  plan.frees = take_frees(plan);
  plan.trims = true;
  if (!plan.frees.empty()) carry_out(plan);
}

void Scheduler::Impl::note_counts() {
  EngineSet& engines = m_executor.engines();
  const std::size_t free = engines.free_bytes(), used = engines.used_bytes();
  const std::lock_guard<std::mutex> lock(m_mutex);
  m_counts.waiting = static_cast<std::int64_t>(m_waiting.size() + m_submitted.size());
  m_counts.running = static_cast<std::int64_t>(m_running.size());
  m_counts.prefixes = m_tree.size();
  if (m_options.store) {
    m_counts.stored_prefixes = m_options.store->size();
    m_counts.stored_prefix_bytes = m_options.store->bytes();
  }
  m_counts.kv_allocated = static_cast<std::int64_t>(engines.allocated_bytes());
  m_counts.kv_free = static_cast<std::int64_t>(free);
  m_counts.kv_used = static_cast<std::int64_t>(used);
  m_counts.keep_ratio = m_keep_ratio;
}

/// Collects the states of sequences if `sequences` was called lately.
void Scheduler::Impl::note_sequences() {
  const double time = now();
  {
    const std::lock_guard<std::mutex> lock(m_mutex);
    if (time - m_last_asked > looks_for) return;
  }
  if (time - m_last_look < looks_every && !m_running.empty()) return;
  m_last_look = time;
  Plan plan;
  for (const auto& sequence : m_running) plan.reports.push_back(sequence->handle);
  if (!plan.reports.empty()) {
    const Outcome outcome = carry_out(plan);
    for (std::size_t i = 0; i < m_running.size(); ++i) {
      Sequence& sequence = *m_running[i];
      sequence.evict_ratio = outcome.reports[i].evict_ratio();
      sequence.full_kv_bytes = outcome.reports[i].full_bytes;
      sequence.kv_bytes = outcome.reports[i].own_bytes;
    }
  }
  note_phases();
}

/// Publishes the sequences, with the bytes that note_sequences has collected.
void Scheduler::Impl::note_phases() {
  std::vector<SequenceStatus> statuses;
  const auto add = [&](const Sequence& sequence, const char* phase) {
    statuses.push_back({sequence.job->ticket->id(), sequence.choice, phase, sequence.tokens,
                        static_cast<std::int64_t>(sequence.answered().size()), sequence.evict_ratio,
                        sequence.kv_bytes, sequence.full_kv_bytes});
  };
  for (const auto& sequence : m_running) {
    add(*sequence, sequence->is_decoding() ? "decode" : "prefill");
  }
  for (const auto& sequence : m_waiting) add(*sequence, "waiting");
  const std::lock_guard<std::mutex> lock(m_mutex);
  m_statuses = std::move(statuses);
}

SchedulerCounts Scheduler::Impl::counts() const {
  const std::lock_guard<std::mutex> lock(m_mutex);
  return m_counts;
}

std::vector<SequenceStatus> Scheduler::Impl::sequences() const {
  const std::lock_guard<std::mutex> lock(m_mutex);
  m_last_asked = now();
  return m_statuses;
}

}  // namespace kvzap::server
