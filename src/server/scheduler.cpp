#include "server/scheduler.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/stopwatch.hpp"
#include "parallel/meet_asleep.hpp"

namespace kvzap::server {
namespace {

// Marks in keys (PrefixKey).
constexpr std::int32_t context_begins = -1;
constexpr std::int32_t context_ends = -2;
constexpr std::int32_t question_begins = -3;
constexpr std::int32_t generated_begins = -4;

// Tokens for which a sequence that decodes gets memory ahead when others are admitted.
constexpr std::int64_t headroom_tokens = 64;
// In sparse prefill a state is kept every so many tokens of a context, for others that go on
// differently from there.
constexpr std::int64_t kept_every_tokens = 4096;
// Of those who wait, the first so many may overtake others that wait for a prompt to be run.
constexpr std::size_t looked_at = 64;
// How much the newest observation counts in the keep ratio.
constexpr double newest_share = 0.2;
// Seconds for which somebody who looks at sequences is thought to go on looking, and between looks.
constexpr double looks_for = 5, looks_every = 0.5;

double now() {
  return std::chrono::duration<double>(detail::Clock::now().time_since_epoch()).count();
}

constexpr const char* too_long =
    "the sequence does not fit into the memory that the server has for keys and values";

/// The beginning of a key: sequences that are pruned otherwise have nothing in common.
PrefixKey key_of(const Setting& setting) {
  PrefixKey key(4);
  key[0] = static_cast<std::int32_t>(setting.prune);
  std::memcpy(&key[1], &setting.threshold, sizeof(float));
  std::memcpy(&key[2], &setting.evict_ratio, sizeof(double));
  return key;
}

std::int32_t mark_of(Segment::Kind kind) {
  switch (kind) {
    case Segment::Kind::context:
      return context_begins;
    case Segment::Kind::question:
      return question_begins;
    case Segment::Kind::generated:
      break;
  }
  return generated_begins;
}

void append_segment(PrefixKey& key, const Segment& segment) {
  key.push_back(mark_of(segment.kind));
  key.insert(key.end(), segment.tokens.begin(), segment.tokens.end());
  if (segment.kind == Segment::Kind::context) key.push_back(context_ends);
}

/// Of the rows that are kept, over all ranks.
std::int64_t kv_bytes_of(const CacheReport& report) {
  return std::llround(static_cast<double>(report.full_bytes) * (1 - report.evict_ratio()));
}

/// Of the states that a prompt may go on from: at least one token has to be run, from whose logits
/// the answer comes.
std::int64_t longest_start(const PrefixKey& prompt) {
  return static_cast<std::int64_t>(prompt.size()) - (prompt.back() == context_ends ? 2 : 1);
}

bool needs_logits(const GenerationRequest& request) {
  return !request.sampling.is_plain() || request.top_logprobs >= 0;
}

TokenLogprobs logprobs_of(const std::vector<float>& logits, TokenId token, int top) {
  double largest = -std::numeric_limits<double>::infinity();
  for (const float logit : logits) largest = std::max(largest, static_cast<double>(logit));
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - largest);
  const double total = largest + std::log(sum);
  TokenLogprobs result;
  result.logprob = static_cast<float>(logits[static_cast<std::size_t>(token)] - total);
  std::vector<TokenId> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto count = std::min<std::ptrdiff_t>(top, static_cast<std::ptrdiff_t>(order.size()));
  std::partial_sort(order.begin(), order.begin() + count, order.end(), [&](TokenId a, TokenId b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  });
  for (std::ptrdiff_t i = 0; i < count; ++i) {
    result.top.emplace_back(order[i], static_cast<float>(logits[order[i]] - total));
  }
  return result;
}

}  // namespace

std::int64_t tokens_of(const std::vector<Segment>& prompt) {
  std::int64_t count = 0;
  for (const Segment& segment : prompt) count += static_cast<std::int64_t>(segment.tokens.size());
  return count;
}

struct Scheduler::Job {
  GenerationRequest request;
  std::shared_ptr<Listener> listener;
  std::shared_ptr<Ticket> ticket;
  std::int64_t prompt_tokens = 0;
  PrefixKey key;         // of the whole prompt
  int open = 0;          // answers that have not ended
  bool has_run = false;  // a sequence of it
  bool is_dead = false;  // cancelled or failed: nothing more is said of it
};

struct Scheduler::Sequence {
  std::shared_ptr<Job> job;
  int choice = 0;
  int handle = -1;  // none: it waits
  PrefixKey key;    // of what has been run
  std::int64_t tokens = 0;
  std::int64_t cached = 0;
  // What comes next of the prompt.
  std::size_t segment = 0;
  std::size_t offset = 0;
  std::vector<TokenId> answered;
  std::size_t fed = 0;  // of the answered
  std::optional<Sampler> sampler;
  bool has_ended = false;
  EndReason reason = EndReason::stop_id;
  double evict_ratio = 0;
  std::int64_t kv_bytes = 0, full_kv_bytes = 0;

  const GenerationRequest& request() const { return job->request; }
  bool is_prompt_run() const { return segment == request().prompt.size(); }
  /// The next token that is run is the first one that nobody knows yet.
  bool is_decoding() const { return is_prompt_run() && fed + 1 == answered.size(); }
  std::int64_t prompt_left() const { return is_prompt_run() ? 0 : job->prompt_tokens - tokens; }

  /// The key when so many more tokens of the segment under way have been run: like all keys until
  /// the prompt's end, a beginning of the prompt's.
  PrefixKey prompt_key_after(std::int64_t count) const {
    const Segment& part = request().prompt[segment];
    std::size_t length = key.size() + static_cast<std::size_t>(count);
    if (offset == 0) ++length;  // the mark of its beginning
    const bool is_context = part.kind == Segment::Kind::context;
    if (is_context && offset + static_cast<std::size_t>(count) == part.tokens.size()) ++length;
    return {job->key.begin(), job->key.begin() + static_cast<std::ptrdiff_t>(length)};
  }

  /// As if nothing had been run.
  void rewind() {
    handle = -1;
    key.clear();
    tokens = cached = 0;
    segment = offset = 0;
    fed = 0;
  }

  /// Goes over a beginning of the prompt's key. Returns false, and changes nothing, if that ends
  /// where nothing of a context is left to be run but its end.
  bool skip(std::int64_t length) {
    std::size_t place = key_of(request().setting).size();
    const auto end = static_cast<std::size_t>(length);
    std::int64_t count = 0;
    std::size_t s = 0, from = 0;
    for (; s < request().prompt.size() && place < end; ++s) {
      const Segment& part = request().prompt[s];
      const bool is_context = part.kind == Segment::Kind::context;
      const std::size_t whole = 1 + part.tokens.size() + (is_context ? 1 : 0);
      if (place + whole <= end) {
        place += whole;
        count += static_cast<std::int64_t>(part.tokens.size());
        continue;
      }
      from = end - place - 1;
      if (from == part.tokens.size()) return false;
      count += static_cast<std::int64_t>(from);
      break;
    }
    segment = s;
    offset = from;
    tokens = cached = count;
    key.assign(job->key.begin(), job->key.begin() + length);
    return true;
  }
};

void Scheduler::Ticket::cancel() {
  m_is_cancelled = true;
  {
    const std::lock_guard<std::mutex> lock(m_scheduler->m_mutex);
    m_scheduler->m_has_cancelled = true;
  }
  m_scheduler->wake();
}

Scheduler::Scheduler(Executor& executor, const SchedulerOptions& options)
    : m_executor(executor), m_options(options) {
  if (options.max_batch_tokens < 1 || options.max_sequences < 1 || options.max_queue < 1) {
    throw Error("a server takes at least one token, one sequence and one request");
  }
}

Scheduler::~Scheduler() = default;

void Scheduler::wake() { m_work.notify_all(); }

std::shared_ptr<Scheduler::Ticket> Scheduler::submit(GenerationRequest request,
                                                     std::shared_ptr<Listener> listener) {
  auto job = std::make_shared<Job>();
  auto& prompt = request.prompt;
  prompt.erase(std::remove_if(prompt.begin(), prompt.end(),
                              [](const Segment& segment) { return segment.tokens.empty(); }),
               prompt.end());
  job->prompt_tokens = tokens_of(prompt);
  if (prompt.empty()) throw Error("the prompt has no tokens");
  if (m_options.max_tokens > 0 && job->prompt_tokens > m_options.max_tokens) {
    throw Error(fmt::format("the prompt has {} tokens; at most {} fit the context",
                            job->prompt_tokens, m_options.max_tokens));
  }
  if (request.choices < 1 || request.choices > m_options.max_sequences) {
    throw Error(fmt::format("{} answers are asked for; expected 1 to {}", request.choices,
                            m_options.max_sequences));
  }
  if (request.max_new_tokens < 1) {
    throw Error(
        fmt::format("{} new tokens are asked for; expected at least 1", request.max_new_tokens));
  }
  const auto vocabulary = m_executor.engine().config().vocab_size;
  for (const Segment& segment : prompt) {
    for (const TokenId token : segment.tokens) {
      if (token >= 0 && token < vocabulary) continue;
      throw Error(
          fmt::format("the prompt has token id {}; expected 0 to {}", token, vocabulary - 1));
    }
  }
  (void)Sampler(request.sampling);
  job->key = key_of(request.setting);
  for (const Segment& segment : prompt) append_segment(job->key, segment);
  job->open = request.choices;
  job->request = std::move(request);
  job->listener = std::move(listener);
  job->ticket = std::make_shared<Ticket>();
  job->ticket->m_scheduler = this;
  {
    const std::lock_guard<std::mutex> lock(m_mutex);
    if (m_is_draining || m_is_stopping || m_queued >= m_options.max_queue) {
      ++m_counts.refused;
      throw QueueFull(m_is_draining || m_is_stopping
                          ? std::string("the server is about to stop")
                          : fmt::format("{} requests wait already", m_queued));
    }
    job->ticket->m_id = m_next_request++;
    ++m_queued;
    m_submitted.push_back(job);
  }
  wake();
  return job->ticket;
}

void Scheduler::drain() {
  {
    const std::lock_guard<std::mutex> lock(m_mutex);
    m_is_draining = true;
  }
  wake();
}

void Scheduler::stop() {
  {
    const std::lock_guard<std::mutex> lock(m_mutex);
    m_is_stopping = true;
  }
  wake();
}

void Scheduler::run() {
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
    wait_for_work();
  }
  take_submitted();
  const auto end = [&](Sequence& sequence) {
    fail(*sequence.job, "the server is about to stop", true);
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

void Scheduler::wait_for_work() {
  if (!m_is_asleep) {
    Plan plan;
    plan.trims = true;
    plan.sleeps = true;
    carry_out(plan);
    note_counts();
    note_sequences();
  }
  std::unique_lock<std::mutex> lock(m_mutex);
  m_work.wait(lock, [&] {
    return !m_submitted.empty() || m_is_draining || m_is_stopping || m_has_cancelled;
  });
}

void Scheduler::take_submitted() {
  std::deque<std::shared_ptr<Job>> submitted;
  {
    const std::lock_guard<std::mutex> lock(m_mutex);
    submitted.swap(m_submitted);
  }
  for (std::shared_ptr<Job>& job : submitted) {
    auto sequence = std::make_unique<Sequence>();
    sequence->job = std::move(job);
    m_waiting.push_back(std::move(sequence));
  }
}

void Scheduler::take_cancelled() {
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

/// A sequence of it runs, or none ever will. Under the mutex.
void Scheduler::leave_queue(Job& job) {
  if (!std::exchange(job.has_run, true)) --m_queued;
}

void Scheduler::fail(Job& job, const std::string& what, bool is_servers) {
  if (job.is_dead) return;
  job.is_dead = true;
  {
    const std::lock_guard<std::mutex> lock(m_mutex);
    ++m_counts.failed;
    leave_queue(job);
  }
  job.listener->on_error(what, is_servers);
}

void Scheduler::drop_dead() {
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

bool Scheduler::step() {
  const auto start = detail::Clock::now();
  const double in_model = m_counts.step_seconds;
  take_submitted();
  take_cancelled();
  std::vector<Sequence*> in_step;
  Plan plan = make_plan(in_step);
  const bool has_work = !plan.spans.empty() || !plan.creates.empty() || !plan.frees.empty();
  if (has_work) {
    const Outcome outcome = carry_out(plan);
    take_results(plan, outcome, in_step);
    end_answers();
    drop_dead();
    note_sequences();
  }
  {
    const std::lock_guard<std::mutex> lock(m_mutex);
    m_counts.own_seconds += detail::seconds_since(start) - (m_counts.step_seconds - in_model);
  }
  note_counts();
  return has_work;
}

/// What is to be freed, but for what the plan forks: that later.
std::vector<int> Scheduler::take_frees(const Plan& plan) {
  std::vector<int> frees, later;
  for (const int handle : m_to_free) {
    const bool is_source =
        std::any_of(plan.creates.begin(), plan.creates.end(),
                    [&](const Plan::Create& create) { return create.source == handle; });
    (is_source ? later : frees).push_back(handle);
  }
  m_to_free = std::move(later);
  return frees;
}

Outcome Scheduler::carry_out(Plan& plan) {
  const Communicator& comm = m_executor.engine().communicator();
  if (m_is_asleep) detail::meet_asleep(comm);
  share(plan, comm);
  const auto start = detail::Clock::now();
  Outcome outcome = m_executor(plan);
  m_is_asleep = plan.sleeps;
  const std::lock_guard<std::mutex> lock(m_mutex);
  m_counts.step_seconds += detail::seconds_since(start);
  if (!plan.spans.empty()) ++m_counts.steps;
  return outcome;
}

std::int64_t Scheduler::bytes_to_come(const Sequence& sequence) const {
  const Engine& engine = m_executor.engine();
  const CacheOptions& options = engine.options();
  const GenerationRequest& request = sequence.request();
  const bool prunes = request.setting.prune != PruneMode::none;
  auto rows = static_cast<double>(sequence.prompt_left());
  if (prunes && options.prefill == PrefillMode::sparse) {
    rows = m_keep_ratio * rows + static_cast<double>(options.chunk);
  }
  rows += static_cast<double>(
      std::min(headroom_tokens,
               request.max_new_tokens - static_cast<std::int64_t>(sequence.answered.size())));
  return static_cast<std::int64_t>(rows * static_cast<double>(engine.bytes_per_token())) +
         (sequence.handle < 0 ? static_cast<std::int64_t>(engine.bytes_per_sequence()) : 0);
}

/// Whether the pool is expected to hold it beside those that run.
bool Scheduler::is_admitted(const Sequence& sequence) const {
  const Engine& engine = m_executor.engine();
  if (m_running.empty() || engine.options().kv_limit == 0) return true;
  std::int64_t wanted = bytes_to_come(sequence);
  for (const auto& other : m_running) wanted += bytes_to_come(*other);
  return static_cast<std::int64_t>(engine.free_bytes()) >= wanted;
}

/// Whether one that runs is about to leave a state from which this one would rather begin: of
/// several who ask about the same document, the first runs it for all.
bool Scheduler::waits_for_prefix(const Sequence& sequence) {
  if (!m_options.keeps_prefixes || !m_executor.can_go_on(sequence.request().setting)) return false;
  const PrefixKey& whole = sequence.job->key;
  const std::int64_t most = longest_start(whole);
  const std::int64_t there = m_tree.longest(whole, most).length;
  return std::any_of(m_running.begin(), m_running.end(), [&](const auto& other) {
    if (other->is_prompt_run() || other->job->is_dead) return false;
    const PrefixKey& theirs = other->job->key;
    const auto differs = std::mismatch(whole.begin(), whole.end(), theirs.begin(), theirs.end());
    const std::int64_t common = std::min<std::int64_t>(most, differs.first - whole.begin());
    const auto has_run = static_cast<std::int64_t>(other->key.size());
    const std::int64_t beyond = std::max(there, has_run);
    if (common <= beyond) return false;
    auto place = static_cast<std::int64_t>(key_of(other->request().setting).size());
    for (const Segment& segment : other->request().prompt) {
      const bool is_context = segment.kind == Segment::Kind::context;
      place += 1 + static_cast<std::int64_t>(segment.tokens.size()) + (is_context ? 1 : 0);
      if (place > common) return false;
      if (is_context && place > beyond) return true;
    }
    return false;
  });
}

/// Gives a sequence a handle, and what an earlier one has left of its prompt.
bool Scheduler::begin(Sequence& sequence, Plan& plan) {
  while (!is_admitted(sequence)) {
    // What is kept for others goes before somebody waits for it: at once, to see what that gives,
    // but for what a sequence of the plan begins from.
    if (!free_prefix()) return false;
    Plan ahead;
    ahead.frees = take_frees(plan);
    if (!ahead.frees.empty()) carry_out(ahead);
  }
  const PrefixKey& whole = sequence.job->key;
  PrefixTree::Found found;
  for (found = m_tree.longest(whole, longest_start(whole)); found.state >= 0;) {
    if (sequence.skip(found.length)) break;
    found = m_tree.longest(whole, found.length - 1);
  }
  if (found.state < 0) sequence.key = key_of(sequence.request().setting);
  sequence.handle = new_handle();
  plan.creates.push_back({sequence.handle, found.state, sequence.request().setting});
  const std::lock_guard<std::mutex> lock(m_mutex);
  m_counts.cached_tokens += sequence.cached;
  leave_queue(*sequence.job);
  return true;
}

/// The next tokens of a sequence. Returns false if there is no room for them.
bool Scheduler::add_span(Sequence& sequence, Room& room, Plan& plan) {
  const Engine& engine = m_executor.engine();
  const GenerationRequest& request = sequence.request();
  const StepOutput output = needs_logits(request) ? StepOutput::logits : StepOutput::argmax;
  const bool judges_all = request.setting.prune == PruneMode::always;
  PlannedSpan span;
  span.handle = sequence.handle;
  if (sequence.is_prompt_run()) {
    // One at a time, or, of those that are run a second time, as many as nothing depends on.
    const std::int64_t known = static_cast<std::int64_t>(sequence.answered.size() - sequence.fed);
    std::int64_t count = 1;
    if (known > 1 && !judges_all) count = std::min(known - 1, std::max<std::int64_t>(room.rows, 1));
    span.part = StepPart::generated;
    const auto first = sequence.answered.begin() + static_cast<std::ptrdiff_t>(sequence.fed);
    span.tokens.assign(first, first + count);
    if (known == 1) span.output = output;
    room.rows -= count;
    plan.spans.push_back(std::move(span));
    return true;
  }
  const Segment& segment = request.prompt[sequence.segment];
  const auto left = static_cast<std::int64_t>(segment.tokens.size() - sequence.offset);
  const auto offset = static_cast<std::int64_t>(sequence.offset);
  std::int64_t count = std::min(left, room.rows);
  bool is_cut = false;
  const bool prunes = request.setting.prune != PruneMode::none;
  switch (segment.kind) {
    case Segment::Kind::context:
      span.part = StepPart::context;
      if (prunes && engine.options().prefill == PrefillMode::sparse) {
        count = std::min(left, engine.options().chunk);
      } else if (!m_executor.can_hold(request.setting)) {
        count = left;
      } else {
        span.part = StepPart::held;
        const auto& cuts = segment.cuts;
        const auto cut = std::upper_bound(cuts.begin(), cuts.end(), offset);
        if (cut != cuts.end() && *cut - offset <= count) {
          count = *cut - offset;
          is_cut = true;
        }
      }
      break;
    case Segment::Kind::question:
      span.part = StepPart::question;
      if (judges_all) count = left;  // one step, as everywhere: its tokens see one another
      break;
    case Segment::Kind::generated:
      span.part = StepPart::generated;
      if (judges_all) count = left;
      break;
  }
  if (count > room.rows && room.has_chunk) return false;
  room.rows -= count;
  room.has_chunk = true;
  const auto first = segment.tokens.begin() + static_cast<std::ptrdiff_t>(sequence.offset);
  span.tokens.assign(first, first + count);
  const bool ends_segment = count == left;
  const bool ends_prompt = ends_segment && sequence.segment + 1 == request.prompt.size();
  if (ends_prompt && sequence.answered.empty()) span.output = output;
  if (segment.kind == Segment::Kind::context) {
    span.ends_context = ends_segment;
    const bool is_state = ends_segment || is_cut ||
                          (span.part == StepPart::context && prunes &&
                           (offset + count) / kept_every_tokens > offset / kept_every_tokens);
    if (is_state && m_options.keeps_prefixes && m_executor.can_go_on(request.setting)) {
      if (!m_tree.contains(sequence.prompt_key_after(count))) span.keep_as = new_handle();
    }
  }
  plan.spans.push_back(std::move(span));
  return true;
}

Plan Scheduler::make_plan(std::vector<Sequence*>& in_step) {
  Plan plan;
  Room room{m_options.max_batch_tokens};
  for (const auto& sequence : m_running) {
    if (!sequence->is_decoding()) continue;
    add_span(*sequence, room, plan);
    in_step.push_back(sequence.get());
  }
  // Prompts get on however many decode.
  room.rows = std::max({room.rows, m_options.max_batch_tokens / 8, std::int64_t{1}});
  std::vector<Sequence*> prompts;
  for (const auto& sequence : m_running) {
    if (!sequence->is_decoding()) prompts.push_back(sequence.get());
  }
  std::sort(prompts.begin(), prompts.end(), [](const Sequence* a, const Sequence* b) {
    return a->job->ticket->id() < b->job->ticket->id();
  });
  bool is_room = true;
  for (Sequence* const sequence : prompts) {
    is_room = room.rows > 0 && add_span(*sequence, room, plan);
    if (!is_room) break;
    in_step.push_back(sequence);
  }
  std::size_t place = 0;  // of the first that does not wait for another's prompt
  while (is_room && room.rows > 0 && place < std::min(m_waiting.size(), looked_at) && !m_is_full &&
         static_cast<std::int64_t>(m_running.size()) < m_options.max_sequences) {
    Sequence& sequence = *m_waiting[place];
    if (waits_for_prefix(sequence)) {
      ++place;
      continue;
    }
    if (!begin(sequence, plan)) break;
    m_running.push_back(std::move(m_waiting[place]));
    m_waiting.erase(m_waiting.begin() + static_cast<std::ptrdiff_t>(place));
    is_room = add_span(sequence, room, plan);
    if (is_room) in_step.push_back(&sequence);
  }
  plan.frees = take_frees(plan);
  return plan;
}

void Scheduler::take_results(const Plan& plan, const Outcome& outcome,
                             const std::vector<Sequence*>& in_step) {
  if (!outcome.not_made.empty()) {
    for (const int handle : outcome.not_made) {
      const auto found =
          std::find_if(m_running.begin(), m_running.end(),
                       [&](const auto& sequence) { return sequence->handle == handle; });
      if (found == m_running.end()) continue;
      (*found)->rewind();
      std::unique_ptr<Sequence> sequence = std::move(*found);
      m_running.erase(found);
      back_to_queue(std::move(sequence));
    }
    // With others it waits until one of them ends.
    const bool has_freed = free_prefix();
    if (!m_running.empty()) {
      m_is_full = !has_freed;
    } else if (!has_freed) {
      fail(*m_waiting.front()->job, "there is no memory for the rings of one sequence", true);
    }
    return;
  }
  if (outcome.out_of_memory) {
    if (!make_room()) fail(*m_running.front()->job, too_long, false);
    return;
  }
  if (!outcome.failure.empty()) {
    for (Sequence* const sequence : in_step) {
      sequence->handle = -1;  // gone
      fail(*sequence->job, outcome.failure, true);
    }
    return;
  }
  const auto is_in = [](const std::vector<int>& list, int handle) {
    return std::find(list.begin(), list.end(), handle) != list.end();
  };
  for (std::size_t s = 0; s < plan.spans.size(); ++s) {
    const PlannedSpan& span = plan.spans[s];
    Sequence& sequence = *in_step[s];
    if (is_in(outcome.lost, span.handle)) {
      sequence.handle = -1;
      if (free_prefix() || m_running.size() > 1) {
        preempt(sequence);
      } else {
        fail(*sequence.job, too_long, false);
      }
      continue;
    }
    PlannedSpan done = span;
    if (is_in(outcome.not_kept, span.keep_as)) done.keep_as = -1;
    try {
      advance(sequence, done, outcome.results[s]);
    } catch (const std::exception& error) {
      fail(*sequence.job, error.what(), true);
    }
  }
}

/// Tokens have been run.
void Scheduler::advance(Sequence& sequence, const PlannedSpan& span, const StepResult& result) {
  const auto count = static_cast<std::int64_t>(span.tokens.size());
  sequence.tokens += count;
  if (sequence.is_prompt_run()) {
    if (sequence.fed == 0) sequence.key.push_back(generated_begins);
    sequence.key.insert(sequence.key.end(), span.tokens.begin(), span.tokens.end());
    sequence.fed += span.tokens.size();
    if (sequence.fed == sequence.answered.size()) draw(sequence, result);
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(m_mutex);
    m_counts.prompt_tokens += count;
  }
  sequence.key = sequence.prompt_key_after(count);
  sequence.offset += span.tokens.size();
  if (sequence.offset == sequence.request().prompt[sequence.segment].tokens.size()) {
    ++sequence.segment;
    sequence.offset = 0;
  }
  if (span.keep_as >= 0) keep(sequence.key, span.keep_as);
  if (!sequence.is_prompt_run() || !sequence.answered.empty()) return;
  if (sequence.choice == 0 && sequence.request().choices > 1) {
    begin_other_choices(sequence, result);
  }
  draw(sequence, result);
}

void Scheduler::begin_other_choices(Sequence& first, const StepResult& result) {
  Plan plan;
  Sequences others;
  for (int choice = 1; choice < first.request().choices; ++choice) {
    auto other = std::make_unique<Sequence>();
    other->job = first.job;
    other->choice = choice;
    if (static_cast<std::int64_t>(m_running.size() + others.size()) < m_options.max_sequences) {
      other->handle = new_handle();
      other->key = first.key;
      other->tokens = first.tokens;
      other->cached = first.tokens;
      other->segment = first.segment;
      plan.creates.push_back({other->handle, first.handle, {}});
    }
    others.push_back(std::move(other));
  }
  Outcome outcome;
  if (!plan.creates.empty()) outcome = carry_out(plan);
  // What could not be made computes the prompt by itself, later.
  for (auto& other : others) {
    const bool is_made =
        other->handle >= 0 && std::find(outcome.not_made.begin(), outcome.not_made.end(),
                                        other->handle) == outcome.not_made.end();
    if (!is_made) {
      other->rewind();
      back_to_queue(std::move(other));
      continue;
    }
    m_running.push_back(std::move(other));
    draw(*m_running.back(), result);
  }
}

/// The next token of an answer, and what ends with it.
void Scheduler::draw(Sequence& sequence, const StepResult& result) {
  Job& job = *sequence.job;
  if (job.is_dead) return;
  const GenerationRequest& request = job.request;
  if (!sequence.sampler) {
    SamplingOptions options = request.sampling;
    options.seed += static_cast<std::uint64_t>(sequence.choice);
    sequence.sampler.emplace(options);
    for (const Segment& segment : request.prompt) sequence.sampler->append_prompt(segment.tokens);
  }
  const TokenId token = request.sampling.is_plain() && result.logits.empty()
                            ? result.argmax
                            : (*sequence.sampler)(result.logits);
  if (token < 0) {
    return fail(job, "no token can be drawn: logits are not finite, or all tokens are forbidden",
                true);
  }
  sequence.answered.push_back(token);
  sequence.sampler->append(token);
  {
    const std::lock_guard<std::mutex> lock(m_mutex);
    ++m_counts.new_tokens;
  }
  std::optional<TokenLogprobs> logprobs;
  if (request.top_logprobs >= 0) {
    logprobs = logprobs_of(result.logits, token, request.top_logprobs);
  }
  const bool goes_on =
      job.listener->on_token(sequence.choice, token, logprobs ? &*logprobs : nullptr);
  const bool is_stop =
      std::find(request.stop_ids.begin(), request.stop_ids.end(), token) != request.stop_ids.end();
  const auto answered = static_cast<std::int64_t>(sequence.answered.size());
  const bool is_full = m_options.max_tokens > 0 && sequence.tokens >= m_options.max_tokens;
  sequence.has_ended = is_stop || !goes_on || answered >= request.max_new_tokens || is_full;
  sequence.reason = is_stop                              ? EndReason::stop_id
                    : !goes_on                           ? EndReason::cut
                    : answered >= request.max_new_tokens ? EndReason::max_new_tokens
                                                         : EndReason::context_full;
}

void Scheduler::keep(const PrefixKey& key, int handle) {
  if (m_tree.contains(key)) {
    m_to_free.push_back(handle);
    return;
  }
  m_tree.insert(key, handle);
}

/// Says so of answers that have come to their end. Their states stay for what a client says next.
void Scheduler::end_answers() {
  Plan plan;
  for (auto& sequence : m_running) {
    if (!sequence->has_ended || sequence->job->is_dead) continue;
    plan.reports.push_back(sequence->handle);
    m_ended.push_back(std::move(sequence));
  }
  if (m_ended.empty()) return;
  m_running.erase(std::remove(m_running.begin(), m_running.end(), nullptr), m_running.end());
  m_is_full = false;
  const Outcome outcome = carry_out(plan);
  for (std::size_t i = 0; i < m_ended.size(); ++i) {
    Sequence& sequence = *m_ended[i];
    const CacheReport& report = outcome.reports[i];
    Ending ending;
    ending.reason = sequence.reason;
    ending.prompt_tokens = sequence.job->prompt_tokens;
    ending.cached_tokens = sequence.cached;
    ending.new_tokens = static_cast<std::int64_t>(sequence.answered.size());
    ending.evict_ratio = report.evict_ratio();
    ending.full_kv_bytes = report.full_bytes;
    ending.kv_bytes = kv_bytes_of(report);
    m_keep_ratio += newest_share * (1 - report.evict_ratio() - m_keep_ratio);
    sequence.job->listener->on_end(sequence.choice, ending);
    if (--sequence.job->open == 0) {
      const std::lock_guard<std::mutex> lock(m_mutex);
      ++m_counts.finished;
    }
    if (m_options.keeps_prefixes && m_executor.can_go_on(sequence.request().setting)) {
      keep(sequence.key, sequence.handle);
    } else {
      m_to_free.push_back(sequence.handle);
    }
  }
  m_ended.clear();
}

/// Frees the state of an earlier prompt. Returns false if there is none.
bool Scheduler::free_prefix() {
  const int state = m_tree.evict();
  if (state < 0) return false;
  m_to_free.push_back(state);
  const std::lock_guard<std::mutex> lock(m_mutex);
  ++m_counts.prefixes_evicted;
  return true;
}

/// For a step. Returns false if there is but one sequence.
bool Scheduler::make_room() {
  if (free_prefix()) return true;
  if (m_running.size() < 2) return false;
  const auto age = [](const Sequence& of) { return std::pair(of.job->ticket->id(), of.choice); };
  const auto newest =
      std::max_element(m_running.begin(), m_running.end(),
                       [&](const auto& a, const auto& b) { return age(*a) < age(*b); });
  preempt(**newest);
  return true;
}

/// Frees a sequence, which is computed anew when there is room again.
void Scheduler::preempt(Sequence& sequence) {
  if (sequence.handle >= 0) m_to_free.push_back(sequence.handle);
  sequence.rewind();
  m_is_full = true;
  const auto found = std::find_if(m_running.begin(), m_running.end(),
                                  [&](const auto& other) { return other.get() == &sequence; });
  std::unique_ptr<Sequence> owned = std::move(*found);
  m_running.erase(found);
  back_to_queue(std::move(owned));
  if (m_running.empty()) m_is_full = false;
  const std::lock_guard<std::mutex> lock(m_mutex);
  ++m_counts.preempted;
}

/// Before all that came later.
void Scheduler::back_to_queue(std::unique_ptr<Sequence> sequence) {
  const auto place = std::find_if(m_waiting.begin(), m_waiting.end(), [&](const auto& other) {
    return other->job->ticket->id() > sequence->job->ticket->id();
  });
  m_waiting.insert(place, std::move(sequence));
}

void Scheduler::forget_prefixes() {
  const std::vector<int> states = m_tree.clear();
  m_to_free.insert(m_to_free.end(), states.begin(), states.end());
  Plan plan;
  plan.frees = take_frees(plan);
  plan.trims = true;
  if (!plan.frees.empty()) carry_out(plan);
}

void Scheduler::note_counts() {
  const Engine& engine = m_executor.engine();
  const std::lock_guard<std::mutex> lock(m_mutex);
  m_counts.waiting = static_cast<std::int64_t>(m_waiting.size() + m_submitted.size());
  m_counts.running = static_cast<std::int64_t>(m_running.size());
  m_counts.prefixes = m_tree.size();
  m_counts.kv_allocated = static_cast<std::int64_t>(engine.bytes().allocated);
  m_counts.kv_free = static_cast<std::int64_t>(engine.free_bytes());
  m_counts.keep_ratio = m_keep_ratio;
}

/// If somebody looks.
void Scheduler::note_sequences() {
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
      sequence.kv_bytes = kv_bytes_of(outcome.reports[i]);
    }
  }
  std::vector<SequenceStatus> statuses;
  const auto add = [&](const Sequence& sequence, const char* phase) {
    statuses.push_back({sequence.job->ticket->id(), sequence.choice, phase, sequence.tokens,
                        static_cast<std::int64_t>(sequence.answered.size()), sequence.evict_ratio,
                        sequence.kv_bytes, sequence.full_kv_bytes});
  };
  for (const auto& sequence : m_running) {
    add(*sequence, sequence->is_decoding() ? "decode" : "prefill");
  }
  for (const auto& sequence : m_waiting) add(*sequence, "waiting");
  const std::lock_guard<std::mutex> lock(m_mutex);
  m_statuses = std::move(statuses);
}

SchedulerCounts Scheduler::counts() const {
  const std::lock_guard<std::mutex> lock(m_mutex);
  return m_counts;
}

std::vector<SequenceStatus> Scheduler::sequences() const {
  const std::lock_guard<std::mutex> lock(m_mutex);
  m_last_asked = now();
  return m_statuses;
}

}  // namespace kvzap::server
