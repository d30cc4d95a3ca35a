#include <algorithm>
#include <utility>
#include <vector>

#include "server/scheduler_impl.hpp"

namespace kvzap::server {
namespace {

// Tokens for which a decoding sequence reserves memory when others are admitted.
constexpr std::int64_t headroom_tokens = 64;
// Tokens between the states that sparse prefill keeps inside a context, for prompts that differ
// from there on.
constexpr std::int64_t kept_every_tokens = 4096;
// Waiting sequences that a plan tries to begin: each is compared with kept states.
constexpr std::size_t looked_at = 64;
// Steps after which the oldest prompt without rows is first, and after which no other begins.
constexpr int first_after = 3, alone_after = 64;
// Logits of short and of other prompts in a step: 32 MiB each.
constexpr std::int64_t most_prompt_logits = std::int64_t{1} << 23;

/// Returns the output after each token for that after the last.
StepOutput each_of(StepOutput output) {
  if (output == StepOutput::argmax) return StepOutput::all_argmax;
  return output == StepOutput::drawn ? StepOutput::all_drawn : StepOutput::all_logits;
}

}  // namespace

/// Whether states of a sequence are kept for others, and it continues from kept states. A policy
/// that cannot score again, after another context or an answer, leaves that of its only context.
bool Scheduler::Impl::keeps_states(const Sequence& sequence) const {
  const Job& job = *sequence.job;
  if (job.request.pooling) return false;  // nothing follows the prompt
  return m_options.keeps_prefixes && (job.traits.goes_on || job.has_one_context);
}

/// Whether a context leaves its unjudged state, to cut beginnings from.
bool Scheduler::Impl::leaves_spare(const Sequence& sequence, std::size_t segment) const {
  const Pruning& pruning = *sequence.request().pruning;
  const Segment& context = sequence.request().prompt[segment];
  return keeps_states(sequence) && pruning.prunes() && sequence.job->traits.holds &&
         m_executor.engine().options().pruning.prefill == PrefillMode::dense &&
         context.kind == Segment::Kind::context && context.branches &&
         sequence.fresh_tokens(segment) >= least_shared_tokens;
}

/// Whether a state from which any beginning of this context can be cut is kept at its end.
bool Scheduler::Impl::leaves_whole_state(const Sequence& sequence, std::size_t segment) const {
  const GenerationRequest& request = sequence.request();
  if (request.prompt[segment].kind != Segment::Kind::context) return false;
  std::int64_t tokens = 0;
  for (std::size_t s = 0; s <= segment; ++s) {
    tokens += static_cast<std::int64_t>(request.prompt[s].tokens.size());
  }
  if (!m_executor.engine().keeps_beginnings(tokens)) return false;
  return !request.pruning->prunes() || leaves_spare(sequence, segment);
}

/// Returns the kept state from which a prompt can continue, or none.
PrefixTree::Found Scheduler::Impl::best_start(const Job& job) {
  // A state has neither logits nor hidden states.
  if (job.request.prompt_logprobs || job.request.pooling) return {};
  const std::int64_t most = longest_start(job.key);
  const PrefixTree::Found exact = m_tree.longest(job.key, most);
  const PrefixTree::Found cut = m_tree.longest_cut(job.key, most);
  const std::int64_t base = std::max(exact.length, job.key_begin);
  return cut.length - base >= least_shared_tokens ? cut : exact;
}

/// Bytes that a sequence is expected to take from the pool.
std::int64_t Scheduler::Impl::bytes_to_come(const Sequence& sequence) const {
  const Engine& engine = m_executor.engine();
  const CacheOptions& options = engine.options();
  const GenerationRequest& request = sequence.request();
  const bool prunes = request.pruning->prunes();
  auto rows = static_cast<double>(sequence.prompt_left());
  if (prunes && options.pruning.prefill == PrefillMode::sparse) {
    rows = m_keep_ratio * rows + static_cast<double>(options.pruning.chunk);
  }
  rows += static_cast<double>(
      std::min(headroom_tokens,
               request.max_new_tokens - static_cast<std::int64_t>(sequence.answered().size())));
  return static_cast<std::int64_t>(
             rows * static_cast<double>(engine.bytes_per_token(sequence.page_format()))) +
         (sequence.handle < 0 ? static_cast<std::int64_t>(engine.bytes_per_sequence()) : 0);
}

/// Whether the memory is expected to hold a sequence beside the running ones. A short prompt does
/// not wait for memory that long ones will take later.
bool Scheduler::Impl::is_admitted(const Sequence& sequence) const {
  if (m_running.empty() || m_executor.engine().options().kv_limit == 0) return true;
  std::int64_t wanted = bytes_to_come(sequence);
  for (const auto& other : m_running) {
    const bool is_later = !other->is_prompt_run() && !is_short(*other);
    if (!is_later || !is_short(sequence)) wanted += bytes_to_come(*other);
  }
  return static_cast<std::int64_t>(m_executor.engines().free_bytes()) >= wanted;
}

/// Whether a running sequence will soon leave a better state to start from. The first of several
/// questions about a document then runs the document for all.
bool Scheduler::Impl::waits_for_prefix(const Sequence& sequence) {
  if (!keeps_states(sequence) || sequence.request().prompt_logprobs) return false;
  const PrefixKey& whole = sequence.job->key;
  const std::int64_t most = longest_start(whole);
  const std::int64_t there = std::max(best_start(*sequence.job).length, sequence.job->key_begin);
  return std::any_of(m_running.begin(), m_running.end(), [&](const auto& other) {
    if (other->is_prompt_run() || other->job->is_dead || !keeps_states(*other)) return false;
    const PrefixKey& theirs = other->job->key;
    const auto differs = std::mismatch(whole.begin(), whole.end(), theirs.begin(), theirs.end());
    const std::int64_t common = std::min<std::int64_t>(most, differs.first - whole.begin());
    if (common <= there) return false;
    const auto has_run = static_cast<std::int64_t>(other->key.size());
    const std::vector<Segment>& prompt = other->request().prompt;
    std::int64_t place = other->job->key_begin;
    for (std::size_t s = 0; s < prompt.size(); ++s) {
      place += key_length(prompt[s]);
      if (place <= has_run) continue;
      if (place > common) {
        // A short beginning is not worth the wait for a long context.
        const std::int64_t saved = common - there;
        const bool is_older = other->job->ticket->id() < sequence.job->ticket->id();
        return is_older && saved >= least_shared_tokens && place - has_run <= 2 * saved &&
               leaves_whole_state(*other, s);
      }
      if (prompt[s].kind == Segment::Kind::context && place > there) return true;
    }
    return false;
  });
}

/// Gives a sequence a handle and the longest kept state of its prompt. Returns false if it has to
/// wait for memory.
bool Scheduler::Impl::begin(Sequence& sequence, Plan& plan) {
  while (!is_admitted(sequence)) {
    // Free kept states before a request waits. Free them now, to see the memory that this gives,
    // except for the sources of sequences in the plan.
    if (!free_prefix()) return false;
    Plan ahead;
    ahead.frees = take_frees(plan);
    if (!ahead.frees.empty()) carry_out(ahead);
  }
  const Job& job = *sequence.job;
  restore(sequence, plan);
  PrefixTree::Found found;
  if (keeps_states(sequence)) found = best_start(job);
  while (found.state >= 0 && !sequence.skip(found.length)) {
    // One token has to run before a context is judged.
    found.is_cut = found.whole_from < found.length;
    if (found.is_cut) {
      --found.length;
    } else {
      found = m_tree.longest(job.key, found.length - 1);
    }
  }
  if (found.state < 0) sequence.key = key_of(job.request);
  sequence.whole_from = found.state < 0 ? job.key_begin : found.whole_from;
  sequence.handle = new_handle();
  std::optional<Pruning> own = sequence.request().pruning;
  if (own == m_executor.standard()) own.reset();
  plan.creates.push_back({sequence.handle, found.state, std::move(own), sequence.page_format(),
                          found.is_cut ? sequence.tokens : -1});
  sequence.to_read =
      job.prompt_tokens - sequence.cached + static_cast<std::int64_t>(sequence.answered().size());
  sequence.start = base::Clock::now();
  report_progress(sequence);
  const std::lock_guard<std::mutex> lock(m_mutex);
  m_counts.cached_tokens += sequence.cached;
  ++m_counts.running;
  if (!job.has_run) m_counts.queue_seconds.add(base::seconds_since(job.start));
  leave_queue(*sequence.job);
  return true;
}

/// Asks for what the next token of an answer is drawn from, or for that token.
void Scheduler::Impl::ask_for_token(Sequence& sequence, PlannedSpan& span) {
  const GenerationRequest& request = sequence.request();
  const Engine& engine = m_executor.engine();
  begin_answer(sequence);
  // The first tokens of other choices are drawn from the same logits.
  const bool is_shared = sequence.choice == 0 && request.choices > 1 && sequence.answered().empty();
  span.output = request.top_logprobs >= 0
                    ? StepOutput::logits
                    : sequence.said->output(engine.draws_tokens() && !is_shared);
  span.draws = sequence.said->draws(span.output);
}

/// Asks for the output after the last token of an answer, and adds a draft of its next tokens.
void Scheduler::Impl::add_draft(Sequence& sequence, const Room& room, PlannedSpan& span) {
  ask_for_token(sequence, span);
  const std::int64_t most = std::min(room.draft, m_executor.engine().most_draft(sequence.tokens));
  if (most < 1 || !sequence.drafts()) return;
  const std::vector<TokenId> draft = sequence.said->draft(sequence.tokens, most);
  if (draft.empty()) return;
  span.part = StepPart::draft;
  span.tokens.insert(span.tokens.end(), draft.begin(), draft.end());
  span.output = each_of(span.output);
  span.draws = sequence.said->draws(span.output, span.tokens.size());
}

/// Adds the next token of an answer. After a preemption: several known tokens at once, unless each
/// is judged.
void Scheduler::Impl::add_answer_span(Sequence& sequence, Room& room, Plan& plan) {
  const GenerationRequest& request = sequence.request();
  const bool judges_all = request.pruning->mode == PruneMode::always;
  const auto known = static_cast<std::int64_t>(sequence.answered().size() - sequence.fed);
  std::int64_t count = 1;
  if (known > 1 && !judges_all) count = std::min(known - 1, std::max<std::int64_t>(room.rows, 1));
  PlannedSpan span;
  span.handle = sequence.handle;
  span.part = StepPart::generated;
  const auto first = sequence.answered().begin() + static_cast<std::ptrdiff_t>(sequence.fed);
  span.tokens.assign(first, first + count);
  if (known == 1) add_draft(sequence, room, span);
  room.rows -= static_cast<std::int64_t>(span.tokens.size());
  plan.spans.push_back(std::move(span));
}

/// Adds the next tokens of a sequence. Returns false if the step has no space for them.
bool Scheduler::Impl::add_span(Sequence& sequence, Room& room, Plan& plan) {
  if (sequence.is_prompt_run()) {
    add_answer_span(sequence, room, plan);
    return true;
  }
  const Engine& engine = m_executor.engine();
  const GenerationRequest& request = sequence.request();
  const bool judges_all = request.pruning->mode == PruneMode::always;
  PlannedSpan span;
  span.handle = sequence.handle;
  const Segment& segment = request.prompt[sequence.segment];
  const auto left = static_cast<std::int64_t>(segment.tokens.size() - sequence.offset);
  const auto offset = static_cast<std::int64_t>(sequence.offset);
  std::int64_t count = std::min(left, room.rows);
  const bool reports = sequence.reports_prompt();
  if (reports && room.logit_rows == 0) return false;
  if (reports) count = std::min(count, room.logit_rows);
  bool is_cut = false;
  const bool prunes = request.pruning->prunes();
  switch (segment.kind) {
    case Segment::Kind::context:
      span.part = StepPart::context;
      if (prunes && engine.options().pruning.prefill == PrefillMode::sparse) {
        count = std::min(left, engine.options().pruning.chunk);
      } else if (sequence.job->traits.takes_parts) {
        if (count < left) span.part = StepPart::held;
      } else if (!sequence.job->traits.holds) {
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
      if (judges_all) count = left;  // in one step: its tokens attend to one another
      break;
    case Segment::Kind::generated:
      span.part = StepPart::generated;
      if (judges_all) count = left;
      break;
  }
  if (count > room.rows && room.has_chunk) return false;
  room.rows -= count;
  if (reports) room.logit_rows = std::max<std::int64_t>(0, room.logit_rows - count);
  room.has_chunk = true;
  const auto first = segment.tokens.begin() + static_cast<std::ptrdiff_t>(sequence.offset);
  span.tokens.assign(first, first + count);
  const bool ends_segment = count == left;
  const bool ends_prompt = ends_segment && sequence.segment + 1 == request.prompt.size();
  if (reports) {
    span.output = StepOutput::all_logits;
  } else if (ends_prompt && sequence.answered().empty() && !request.pooling) {
    ask_for_token(sequence, span);
  }
  if (request.pooling == Pooling::mean) {
    span.output = StepOutput::all_hidden;
  } else if (request.pooling) {
    span.output = ends_prompt ? StepOutput::hidden : StepOutput::none;
  }
  span.ends_context = ends_segment && segment.kind == Segment::Kind::context;
  span.context_follows =
      std::any_of(request.prompt.begin() + static_cast<std::ptrdiff_t>(sequence.segment) + 1,
                  request.prompt.end(),
                  [](const Segment& later) { return later.kind == Segment::Kind::context; });
  plan_states(sequence, span, is_cut);
  plan.spans.push_back(std::move(span));
  return true;
}

/// Plans which states a span of a context leaves. `is_cut`: it ends where Segment::cuts says.
void Scheduler::Impl::plan_states(const Sequence& sequence, PlannedSpan& span, bool is_cut) {
  if (span.part != StepPart::context && span.part != StepPart::held) return;
  if (!keeps_states(sequence)) return;
  const auto count = static_cast<std::int64_t>(span.tokens.size());
  const std::int64_t place = static_cast<std::int64_t>(sequence.offset) + count;
  const bool is_due = span.part == StepPart::context && sequence.job->traits.goes_on &&
                      sequence.request().pruning->prunes() &&
                      place / kept_every_tokens > (place - count) / kept_every_tokens;
  if (!span.ends_context && !is_cut && !is_due) return;
  PrefixKey key = sequence.prompt_key_after(count);
  if (!m_tree.contains(key)) span.keep_as = new_handle();
  if (!span.ends_context || !leaves_spare(sequence, sequence.segment)) return;
  key.pop_back();  // the mark of the end
  if (!m_tree.contains(key)) span.spare_as = new_handle();
}

/// Returns the formats of the sequences that run or may begin, in the order in which they get a
/// step: a step has sequences of one format.
std::vector<PageFormat> Scheduler::Impl::formats_by_turn() const {
  std::vector<PageFormat> formats;
  const auto add = [&](const Sequence& sequence) {
    const PageFormat& format = sequence.page_format();
    if (std::find(formats.begin(), formats.end(), format) == formats.end()) {
      formats.push_back(format);
    }
  };
  for (const auto& sequence : m_running) add(*sequence);
  for (const auto& sequence : m_waiting) add(*sequence);
  if (formats.empty()) formats.push_back(m_turn);
  // Behind the one of the last step.
  const auto number = [](const PageFormat& f) { return std::make_pair(f.keys, f.values); };
  std::sort(formats.begin(), formats.end(),
            [&](const PageFormat& a, const PageFormat& b) { return number(a) < number(b); });
  const auto next = std::find_if(formats.begin(), formats.end(), [&](const PageFormat& format) {
    return number(format) > number(m_turn);
  });
  std::rotate(formats.begin(), next, formats.end());
  return formats;
}

/// Estimates how much a waiting sequence has to read.
void Scheduler::Impl::estimate(Sequence& sequence) {
  const Job& job = *sequence.job;
  const PrefixTree::Found found = best_start(job);
  const std::int64_t cached = found.state < 0 ? 0 : found.length - job.key_begin;
  sequence.to_read = std::max<std::int64_t>(1, job.prompt_tokens - cached) +
                     static_cast<std::int64_t>(sequence.answered().size());
}

/// Returns the prompts of a format that may get rows, in the order in which they get them. Sets
/// `oldest` to the oldest one that does not wait for a shared prefix.
std::vector<Reader> Scheduler::Impl::readers_of(const PageFormat& format, Sequence*& oldest) {
  std::vector<Reader> readers;
  const auto add = [&](Sequence& sequence) {
    if (sequence.page_format() != format || !is_wanted(sequence)) return;
    const Job& job = *sequence.job;
    readers.push_back({&sequence, job.ticket->id(), sequence.to_read, sequence.left_to_read(),
                       job.share->served});
  };
  for (const auto& sequence : m_running) {
    if (!sequence->is_decoding()) add(*sequence);
  }
  if (!m_is_full) {
    for (const auto& sequence : m_waiting) add(*sequence);
  }
  std::sort(readers.begin(), readers.end(),
            [](const Reader& a, const Reader& b) { return a.id < b.id; });
  const auto found = std::find_if(
      readers.begin(),
      readers.begin() + static_cast<std::ptrdiff_t>(std::min(readers.size(), looked_at)),
      [&](const Reader& one) {
        return one.sequence->handle >= 0 || !waits_for_prefix(*one.sequence);
      });
  oldest = found == readers.end() ? nullptr : found->sequence;
  if (oldest) found->is_first = oldest->passed_over >= first_after;
  m_order.sort(readers);
  return readers;
}

/// Begins a waiting sequence, if it has a place and memory. A short prompt may take the place of a
/// long one that is being read: that one pauses and keeps its state.
bool Scheduler::Impl::admit(Sequence& sequence, Plan& plan) {
  const std::int64_t places = m_options.max_sequences * (is_short(sequence) ? 2 : 1);
  if (static_cast<std::int64_t>(m_running.size()) >= places) return false;
  const bool is_barred = std::any_of(m_waiting.begin(), m_waiting.end(), [&](const auto& other) {
    return other.get() != &sequence && other->passed_over >= alone_after;
  });
  if (is_barred || !begin(sequence, plan)) return false;
  const auto place = std::find_if(m_waiting.begin(), m_waiting.end(),
                                  [&](const auto& other) { return other.get() == &sequence; });
  m_running.push_back(std::move(*place));
  m_waiting.erase(place);
  return true;
}

/// Adds chunks of prompts, as PrefillOrder says. `rows`: those that the step has for them.
void Scheduler::Impl::add_prompts(const PageFormat& format, std::int64_t rows, Plan& plan,
                                  std::vector<Sequence*>& in_step) {
  Sequence* oldest = nullptr;
  const std::vector<Reader> readers = readers_of(format, oldest);
  const PrefillRows share = m_order.rows(readers, rows);
  Room brief{share.brief}, others{share.others};
  brief.logit_rows = others.logit_rows =
      std::max<std::int64_t>(1, most_prompt_logits / m_executor.engine().config().vocab_size);
  std::size_t looked = 0;
  bool may_begin = true;  // a prompt that is not short
  for (const Reader& reader : readers) {
    if (static_cast<std::int64_t>(in_step.size()) >= m_options.max_sequences) break;
    Sequence& sequence = *reader.sequence;
    const bool is_brief = m_order.is_short(reader.fresh);
    Room& room = is_brief ? brief : others;
    if (room.rows <= 0) continue;
    if (sequence.handle < 0) {
      if (looked++ >= looked_at || (!is_brief && !may_begin)) continue;
      if (waits_for_prefix(sequence)) continue;
      estimate(sequence);
      if (!admit(sequence, plan)) {
        may_begin = may_begin && is_brief;
        continue;
      }
    }
    const std::int64_t before = room.rows;
    if (!add_span(sequence, room, plan)) continue;
    sequence.job->share->served += before - room.rows;
    // A chunk that cannot be split would keep short prompts waiting.
    if (is_brief) others.has_chunk = true;
    in_step.push_back(&sequence);
  }
  if (!oldest || in_step.empty()) return;
  const bool has_rows = std::find(in_step.begin(), in_step.end(), oldest) != in_step.end();
  oldest->passed_over = has_rows ? 0 : oldest->passed_over + 1;
}

/// Returns the sequence of a format that runs alone next, if there is one.
Sequence* Scheduler::Impl::next_alone(const PageFormat& format) const {
  const auto is_next = [&](const auto& sequence) {
    return sequence->runs_alone() && sequence->page_format() == format;
  };
  const auto running = std::find_if(m_running.begin(), m_running.end(), is_next);
  if (running != m_running.end()) return running->get();
  const auto waiting = std::find_if(m_waiting.begin(), m_waiting.end(), is_next);
  return waiting == m_waiting.end() ? nullptr : waiting->get();
}

/// Whether a sequence may be in the step that is planned.
bool Scheduler::Impl::is_wanted(const Sequence& sequence) const {
  return m_alone ? &sequence == m_alone : !sequence.runs_alone();
}

/// Adds spans of the sequences that are decoding, then of prompts.
void Scheduler::Impl::add_spans(const PageFormat& format, Room room, Plan& plan,
                                std::vector<Sequence*>& in_step) {
  for (const auto& sequence : m_running) {
    if (!sequence->is_decoding() || sequence->page_format() != format) continue;
    if (!is_wanted(*sequence)) continue;
    add_span(*sequence, room, plan);
    in_step.push_back(sequence.get());
  }
  // Prompts make progress even if many sequences decode.
  add_prompts(format, std::max({room.rows, m_options.max_batch_tokens / 8, std::int64_t{1}}), plan,
              in_step);
}

Plan Scheduler::Impl::make_plan(const PageFormat& format, std::vector<Sequence*>& in_step) {
  Plan plan;
  Room room{m_options.max_batch_tokens};
  m_alone = next_alone(format);
  const auto decoding =
      std::count_if(m_running.begin(), m_running.end(), [&](const auto& sequence) {
        return sequence->is_decoding() && sequence->page_format() == format;
      });
  // A step of many sequences is limited by arithmetic, and guesses would cost as much as tokens.
  if (!m_omits_drafts) room.draft = m_options.lookup / std::max<std::int64_t>(1, decoding);
  if (m_alone) add_spans(format, room, plan, in_step);
  if (in_step.empty()) {
    m_alone = nullptr;
    add_spans(format, room, plan, in_step);
  }
  plan.frees = take_frees(plan);
  return plan;
}

}  // namespace kvzap::server
