#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "server/scheduler_impl.hpp"

namespace kvzap::server {
namespace {

// Weight of the newest answer in the mean keep ratio.
constexpr double newest_share = 0.2;

constexpr const char* too_long =
    "the sequence does not fit into the server's memory for keys and values";

/// `logits`: (vocabulary).
TokenLogprobs logprobs_of(const float* logits, std::int64_t vocabulary, TokenId token, int top) {
  const double total = log_normalizer(logits, vocabulary);
  TokenLogprobs result;
  result.logprob = static_cast<float>(logits[token] - total);
  const auto is_before = [&](TokenId a, TokenId b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  };
  std::vector<TokenId> best;  // in order
  const auto most = static_cast<std::size_t>(std::min<std::int64_t>(top, vocabulary));
  for (TokenId id = 0; most > 0 && id < vocabulary; ++id) {
    if (best.size() == most) {
      if (!is_before(id, best.back())) continue;
      best.pop_back();
    }
    best.insert(std::upper_bound(best.begin(), best.end(), id, is_before), id);
  }
  for (const TokenId id : best) {
    result.top.emplace_back(id, static_cast<float>(logits[id] - total));
  }
  return result;
}

/// The result of a span's last token.
StepResult last_of(const StepResult& result, std::int64_t vocabulary) {
  StepResult last;
  last.logits.assign(result.logits.end() - vocabulary, result.logits.end());
  return last;
}

std::int64_t length_of(const PrefixKey& key) { return static_cast<std::int64_t>(key.size()); }

EndReason reason_of(StopReason reason) {
  if (reason == StopReason::stop_id) return EndReason::stop_id;
  return reason == StopReason::max_new_tokens ? EndReason::max_new_tokens : EndReason::context_full;
}

}  // namespace

/// Puts sequences that could not be created back into the queue.
void Scheduler::Impl::take_not_made(const std::vector<int>& handles) {
  Job* job = nullptr;
  for (const int handle : handles) {
    const auto found = std::find_if(m_running.begin(), m_running.end(), [&](const auto& sequence) {
      return sequence->handle == handle;
    });
    if (found == m_running.end()) continue;
    (*found)->rewind();
    std::unique_ptr<Sequence> sequence = std::move(*found);
    m_running.erase(found);
    job = sequence->job.get();
    back_to_queue(std::move(sequence));
  }
  // Without a freed state it waits until another sequence ends.
  const bool has_freed = free_prefix();
  if (!m_running.empty()) {
    m_is_full = !has_freed;
  } else if (!has_freed && job) {
    fail(*job, {"the server has no memory for the ring of one sequence", true});
  }
}

/// Queues a sequence again, or fails it, if it ran out of memory after its step.
void Scheduler::Impl::take_lost(Sequence& sequence) {
  sequence.handle = -1;
  if (free_prefix() || m_running.size() > 1) {
    preempt(sequence);
  } else {
    fail(*sequence.job, {too_long});
  }
}

/// Fails the sequence of a step that has failed. Several are queued again, and then run alone past
/// this place: one policy's error must not end the requests that shared its step.
void Scheduler::Impl::take_failure(const Plan& plan, const std::string& what,
                                   const std::vector<Sequence*>& in_step) {
  for (std::size_t s = 0; s < in_step.size(); ++s) {
    Sequence& sequence = *in_step[s];
    sequence.handle = -1;  // freed
    if (in_step.size() == 1) {
      fail(*sequence.job, {what, true});
      continue;
    }
    sequence.alone_until = sequence.tokens + static_cast<std::int64_t>(plan.spans[s].tokens.size());
    preempt(sequence);
  }
  m_is_full = false;
}

void Scheduler::Impl::take_results(const Plan& plan, const Outcome& outcome,
                                   const std::vector<Sequence*>& in_step) {
  if (!outcome.not_made.empty()) return take_not_made(outcome.not_made);
  m_omits_drafts = outcome.out_of_memory && !m_omits_drafts &&
                   std::any_of(plan.spans.begin(), plan.spans.end(), [](const PlannedSpan& span) {
                     return span.part == StepPart::draft;
                   });
  if (m_omits_drafts) return;
  if (outcome.out_of_memory) {
    if (!make_room()) fail(*m_running.front()->job, {too_long});
    return;
  }
  if (!outcome.failure.empty()) return take_failure(plan, outcome.failure, in_step);
  const auto is_in = [](const std::vector<int>& list, int handle) {
    return std::find(list.begin(), list.end(), handle) != list.end();
  };
  for (std::size_t s = 0; s < plan.spans.size(); ++s) {
    const PlannedSpan& span = plan.spans[s];
    Sequence& sequence = *in_step[s];
    const auto failure = outcome.failures.find(span.handle);
    if (failure != outcome.failures.end()) {
      sequence.handle = -1;  // freed
      fail(*sequence.job, {failure->second});
      continue;
    }
    if (is_in(outcome.lost, span.handle)) {
      take_lost(sequence);
      continue;
    }
    PlannedSpan done = span;
    if (is_in(outcome.not_kept, span.keep_as)) done.keep_as = -1;
    if (is_in(outcome.not_kept, span.spare_as)) done.spare_as = -1;
    try {
      advance(sequence, done, outcome.results[s]);
    } catch (const std::exception& error) {
      fail(*sequence.job, {error.what(), true});
    }
  }
}

/// Whether a span may have evicted rows of its sequence.
bool Scheduler::Impl::evicts(const Sequence& sequence, const PlannedSpan& span) {
  const Pruning& pruning = *sequence.request().pruning;
  if (!pruning.prunes()) return false;
  if (span.part == StepPart::held) return span.ends_context;
  return span.part == StepPart::context || pruning.mode == PruneMode::always ||
         !sequence.job->traits.holds;
}

/// Moves a sequence past the tokens that have run.
void Scheduler::Impl::advance(Sequence& sequence, const PlannedSpan& span,
                              const StepResult& result) {
  if (span.part == StepPart::draft) return advance_draft(sequence, span, result);
  const auto count = static_cast<std::int64_t>(span.tokens.size());
  sequence.tokens += count;
  const bool forgets = !m_executor.engine().keeps_beginnings(sequence.tokens);
  if (sequence.is_prompt_run()) {
    append_answer(sequence.key, span.tokens, sequence.fed == 0);
    if (forgets || evicts(sequence, span)) sequence.whole_from = length_of(sequence.key);
    sequence.fed += span.tokens.size();
    if (sequence.fed == sequence.answered().size()) draw(sequence, result);
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(m_mutex);
    m_counts.prompt_tokens += count;
  }
  report_progress(sequence);
  sequence.key = sequence.prompt_key_after(count);
  if (span.spare_as >= 0) {
    PrefixKey unjudged = sequence.key;
    unjudged.pop_back();  // the mark of the end
    keep(unjudged, span.spare_as, forgets ? length_of(unjudged) : sequence.whole_from, true);
  }
  if (forgets || evicts(sequence, span)) sequence.whole_from = length_of(sequence.key);
  sequence.offset += span.tokens.size();
  if (sequence.offset == sequence.request().prompt[sequence.segment].tokens.size()) {
    ++sequence.segment;
    sequence.offset = 0;
  }
  if (span.keep_as >= 0 && keep(sequence.key, span.keep_as, sequence.whole_from)) {
    // Sparse prefill also keeps states within contexts, which the one at the end replaces.
    if (span.ends_context || span.part == StepPart::held) note_to_store(sequence, span.keep_as);
  }
  if (sequence.request().pooling) pool(sequence, result);
  if (span.output == StepOutput::all_logits) {
    report_prompt(sequence, span, result);
    if (!sequence.is_prompt_run() || !sequence.answered().empty()) return;
    return begin_answers(sequence, last_of(result, m_executor.engine().config().vocab_size));
  }
  if (sequence.is_prompt_run() && sequence.answered().empty()) begin_answers(sequence, result);
}

/// Adds the hidden states of a prompt's tokens to its vector, and reports that of a whole prompt.
void Scheduler::Impl::pool(Sequence& sequence, const StepResult& result) {
  Job& job = *sequence.job;
  const bool is_mean = job.request.pooling == Pooling::mean;
  const auto size = static_cast<std::size_t>(m_executor.engine().config().hidden_size);
  std::vector<double>& pooled = sequence.pooled;
  pooled.resize(size);
  for (std::size_t i = 0; i < result.hidden.size(); ++i) pooled[i % size] += result.hidden[i];
  if (!sequence.is_prompt_run() || job.is_dead) return;
  const double share = is_mean ? 1 / static_cast<double>(job.prompt_tokens) : 1;
  std::vector<float> vector(size);
  for (std::size_t i = 0; i < size; ++i) vector[i] = static_cast<float>(pooled[i] * share);
  if (std::all_of(vector.begin(), vector.end(), [](float x) { return std::isfinite(x); })) {
    return job.listener->on_embedding(std::move(vector));
  }
  fail(job, {"the hidden states of the prompt are not finite", true});
}

/// Reports the log probabilities of a prompt's tokens: those of a span, except for its first, and
/// the one after it.
void Scheduler::Impl::report_prompt(Sequence& sequence, const PlannedSpan& span,
                                    const StepResult& result) const {
  Job& job = *sequence.job;
  const std::int64_t vocabulary = m_executor.engine().config().vocab_size;
  const auto count = static_cast<std::int64_t>(span.tokens.size());
  const std::int64_t first = sequence.tokens - count;
  std::vector<TokenId> tokens;
  std::vector<std::optional<TokenLogprobs>> logprobs;
  if (job.reported == 0) {
    tokens.push_back(span.tokens.front());
    logprobs.emplace_back();
  }
  for (std::int64_t i = 0; i < count; ++i) {
    const bool is_last = i + 1 == count;
    // After a preemption the first tokens run again.
    if (first + i + 1 < job.reported || (is_last && sequence.is_prompt_run())) continue;
    tokens.push_back(is_last ? job.request.prompt[sequence.segment].tokens[sequence.offset]
                             : span.tokens[static_cast<std::size_t>(i + 1)]);
    logprobs.push_back(logprobs_of(result.logits.data() + i * vocabulary, vocabulary, tokens.back(),
                                   job.request.top_logprobs));
  }
  job.reported += static_cast<std::int64_t>(tokens.size());
  if (!job.is_dead && !tokens.empty()) job.listener->on_prompt(tokens, logprobs);
}

/// Begins the answers to a prompt that has run.
void Scheduler::Impl::begin_answers(Sequence& sequence, const StepResult& result) {
  if (sequence.choice == 0 && sequence.request().choices > 1) {
    begin_other_choices(sequence, result);
  }
  draw(sequence, result);
}

/// Draws tokens after a generated token and its draft, up to the first that is not the draft's.
void Scheduler::Impl::advance_draft(Sequence& sequence, const PlannedSpan& span,
                                    const StepResult& result) {
  const std::size_t count = span.tokens.size();
  std::int64_t accepted = 0;
  std::size_t run = 0;  // tokens of the span that the answer has
  for (bool goes_on = true; goes_on; ++run) {
    const std::size_t index = run;
    ++sequence.tokens;
    append_answer(sequence.key, {span.tokens[index]}, sequence.fed == 0);
    const bool forgets = !m_executor.engine().keeps_beginnings(sequence.tokens);
    if (forgets || evicts(sequence, span)) sequence.whole_from = length_of(sequence.key);
    ++sequence.fed;
    draw(sequence, result.after(index, count));
    if (sequence.job->is_dead) return;  // it is freed
    const bool is_accepted =
        index + 1 < count && sequence.answered().back() == span.tokens[index + 1];
    goes_on = is_accepted && !sequence.has_ended;
    accepted += is_accepted ? 1 : 0;
  }
  sequence.said->judge_draft(accepted);
  {
    const std::lock_guard<std::mutex> lock(m_mutex);
    m_counts.drafted_tokens += static_cast<std::int64_t>(count) - 1;
    m_counts.accepted_tokens += accepted;
  }
  if (run < count) {
    m_to_take_back.push_back({sequence.handle, static_cast<std::int64_t>(count - run)});
  }
}

/// Tells the listener how much of the prompt has run, unless that is done again for a known answer
/// or for another choice.
void Scheduler::Impl::report_progress(const Sequence& sequence) {
  const Job& job = *sequence.job;
  if (job.is_dead || sequence.choice != 0 || !sequence.answered().empty()) return;
  job.listener->on_progress(0, {job.prompt_tokens, sequence.cached, sequence.tokens,
                                base::seconds_since(sequence.start)});
}

/// Whether the rows of a sequence's prompt are counted at its end.
bool Scheduler::Impl::returns_kept(const Sequence& sequence) const {
  return sequence.request().returns_kept && sequence.choice == 0 &&
         sequence.job->prompt_tokens <= m_options.max_kept_tokens;
}

/// Returns the tokens of a prompt with the rows that they still have; null if these are not known.
std::shared_ptr<const KeptTokens> Scheduler::Impl::kept_tokens(const Sequence& sequence,
                                                               const TokenRows& counted) {
  if (counted.rows.empty()) return nullptr;
  auto kept = std::make_shared<KeptTokens>();
  for (const Segment& segment : sequence.request().prompt) {
    kept->tokens.insert(kept->tokens.end(), segment.tokens.begin(), segment.tokens.end());
  }
  kept->rows.assign(counted.rows.begin(),
                    counted.rows.begin() + static_cast<std::ptrdiff_t>(kept->tokens.size()));
  kept->full = counted.full;
  return kept;
}

/// Forks the other choices of a request from the first, whose prompt has run.
void Scheduler::Impl::begin_other_choices(Sequence& first, const StepResult& result) {
  Plan plan;
  Sequences others;
  for (int choice = 1; choice < first.request().choices; ++choice) {
    auto other = std::make_unique<Sequence>();
    other->job = first.job;
    other->choice = choice;
    if (static_cast<std::int64_t>(m_running.size() + others.size()) < m_options.max_sequences) {
      other->handle = new_handle();
      other->key = first.key;
      other->whole_from = first.whole_from;
      other->tokens = first.tokens;
      other->cached = first.tokens;
      other->segment = first.segment;
      plan.creates.push_back({other->handle, first.handle, {}, {}, -1});
    }
    others.push_back(std::move(other));
  }
  Outcome outcome;
  if (!plan.creates.empty()) outcome = carry_out(plan);
  // Choices that could not be forked compute the prompt later themselves.
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

/// Makes the answer of a sequence, unless it has begun.
void Scheduler::Impl::begin_answer(Sequence& sequence) const {
  if (sequence.said) return;
  const GenerationRequest& request = sequence.request();
  SamplingOptions sampling = request.sampling;
  sampling.seed += static_cast<std::uint64_t>(sequence.choice);
  sequence.said.emplace(sampling,
                        StopRules{request.max_new_tokens, request.stop_ids, m_options.max_tokens},
                        sequence.drafts() ? m_options.lookup : 0);
  for (const Segment& segment : request.prompt) sequence.said->append_prompt(segment.tokens);
}

/// Samples the next token of an answer and decides whether the answer ends.
void Scheduler::Impl::draw(Sequence& sequence, const StepResult& result) {
  Job& job = *sequence.job;
  if (job.is_dead) return;
  const GenerationRequest& request = job.request;
  if (request.max_new_tokens == 0) {
    sequence.has_ended = true;
    sequence.reason = EndReason::max_new_tokens;
    return;
  }
  begin_answer(sequence);
  TokenId token = -1;
  try {
    token = sequence.said->draw(result);
  } catch (const Error& error) {  // of its grammar
    return fail(job, {error.what()});
  }
  // The model's own logits may be valid: the request forbids all tokens, or has extreme penalties.
  if (token < 0 && Sampler({})(result.logits) >= 0) {
    return fail(
        job, {"no token is left that may follow: a grammar, min_tokens, logit_bias and penalties "
              "forbid all"});
  }
  if (token < 0) return fail(job, {"no token can be sampled: logits are not finite", true});
  sequence.said->append(token);
  const auto before = std::exchange(sequence.last_token, base::Clock::now());
  {
    const std::lock_guard<std::mutex> lock(m_mutex);
    ++m_counts.new_tokens;
    if (sequence.answered().size() == 1) {
      m_counts.first_token_seconds.add(base::seconds_since(job.start));
    } else {
      m_counts.between_tokens_seconds.add(base::seconds_since(before));
    }
  }
  std::optional<TokenLogprobs> logprobs;
  if (request.top_logprobs >= 0) {
    logprobs = logprobs_of(result.logits.data(), static_cast<std::int64_t>(result.logits.size()),
                           token, request.top_logprobs);
  }
  const bool goes_on =
      job.listener->on_token(sequence.choice, token, logprobs ? &*logprobs : nullptr);
  const auto end = sequence.said->end(sequence.tokens);
  sequence.has_ended = end || !goes_on;
  // An answer that its listener cuts may end with its token all the same.
  const bool is_cut = !goes_on && end != StopReason::stop_id;
  if (sequence.has_ended) sequence.reason = is_cut ? EndReason::cut : reason_of(*end);
}

/// Keeps a state, unless the tree has one for its key. Returns whether it does.
bool Scheduler::Impl::keep(const PrefixKey& key, int handle, std::int64_t whole_from,
                           bool is_spare) {
  if (m_tree.contains(key)) {
    m_to_free.push_back(handle);
    return false;
  }
  m_tree.insert(key, handle, whole_from, is_spare);
  return true;
}

/// Reports the ends of answers. Keeps their states for the next turn of a conversation.
void Scheduler::Impl::end_answers() {
  Plan plan;
  for (auto& sequence : m_running) {
    if (!sequence->has_ended || sequence->job->is_dead) continue;
    plan.reports.push_back(sequence->handle);
    if (returns_kept(*sequence)) plan.counts.push_back(sequence->handle);
    m_ended.push_back(std::move(sequence));
  }
  if (m_ended.empty()) return;
  m_running.erase(std::remove(m_running.begin(), m_running.end(), nullptr), m_running.end());
  m_is_full = false;
  {
    // Before the listeners know: a client's next request finds the place of its last one free.
    const std::lock_guard<std::mutex> lock(m_mutex);
    m_counts.running = static_cast<std::int64_t>(m_running.size());
  }
  const Outcome outcome = carry_out(plan);
  auto counted = outcome.counts.begin();
  for (std::size_t i = 0; i < m_ended.size(); ++i) {
    Sequence& sequence = *m_ended[i];
    const CacheReport& report = outcome.reports[i];
    Ending ending;
    ending.reason = sequence.reason;
    ending.prompt_tokens = sequence.job->prompt_tokens;
    ending.cached_tokens = sequence.cached;
    ending.new_tokens = static_cast<std::int64_t>(sequence.answered().size());
    ending.evict_ratio = report.evict_ratio();
    ending.full_kv_bytes = report.full_bytes;
    ending.kv_bytes = report.own_bytes;
    if (sequence.said) ending.drafts = sequence.said->drafts();
    if (returns_kept(sequence)) ending.kept = kept_tokens(sequence, *counted++);
    m_keep_ratio += newest_share * (1 - report.evict_ratio() - m_keep_ratio);
    // First the counts: who has the answer may ask for them.
    {
      const std::lock_guard<std::mutex> lock(m_mutex);
      const bool is_stop =
          sequence.reason == EndReason::stop_id || sequence.reason == EndReason::cut;
      ++(is_stop ? m_counts.stopped : m_counts.cut_by_length);
      m_counts.answer_seconds.add(base::seconds_since(sequence.job->start));
      if (--sequence.job->open == 0) ++m_counts.finished;
    }
    sequence.job->listener->on_end(sequence.choice, ending);
    const Executor::Traits& traits = sequence.job->traits;
    if (m_options.keeps_prefixes && traits.goes_on && traits.answers_go_on &&
        !sequence.request().pooling) {
      keep(sequence.key, sequence.handle, sequence.whole_from);
    } else {
      m_to_free.push_back(sequence.handle);
    }
  }
  m_ended.clear();
}

/// Frees the least recently used state of a prompt. Returns false if there is none.
bool Scheduler::Impl::free_prefix() {
  const int state = m_tree.evict();
  if (state < 0) return false;
  m_to_free.push_back(state);
  m_to_store.erase(std::remove_if(m_to_store.begin(), m_to_store.end(),
                                  [&](const ToStore& one) { return one.handle == state; }),
                   m_to_store.end());
  const std::lock_guard<std::mutex> lock(m_mutex);
  ++m_counts.prefixes_evicted;
  return true;
}

/// Frees kept states beyond max_prefix_bytes. Memory that they share with running sequences counts
/// for these: freeing the states would not free it. States that wait for their files stay.
void Scheduler::Impl::limit_prefixes() {
  if (m_options.max_prefix_bytes == 0 || has_to_store()) return;
  const Engine& engine = m_executor.engine();
  double running = 0;
  for (const auto& sequence : m_running) {
    running += static_cast<double>(sequence->tokens) *
                   static_cast<double>(engine.bytes_per_token(sequence->page_format())) +
               static_cast<double>(engine.bytes_per_sequence());
  }
  const double most = running + static_cast<double>(m_options.max_prefix_bytes);
  while (static_cast<double>(m_executor.engines().used_bytes()) > most && free_prefix()) {
    Plan plan;
    plan.frees = take_frees(plan);
    carry_out(plan);
  }
}

/// Frees memory for a step. Returns false if a single sequence runs and no state is kept.
bool Scheduler::Impl::make_room() {
  if (free_prefix()) return true;
  if (m_running.size() < 2) return false;
  const auto age = [](const Sequence& of) { return std::pair(of.job->ticket->id(), of.choice); };
  const auto newest =
      std::max_element(m_running.begin(), m_running.end(),
                       [&](const auto& a, const auto& b) { return age(*a) < age(*b); });
  preempt(**newest);
  return true;
}

/// Frees a sequence. It is computed again when there is memory.
void Scheduler::Impl::preempt(Sequence& sequence) {
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

}  // namespace kvzap::server
