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
// A beginning that prompts share within a context is cut from a kept state if this saves as many
// tokens. A context with fewer new tokens leaves no state for it.
constexpr std::int64_t least_shared_tokens = 128;
// The number of waiting sequences that may overtake others, which wait for a shared prefix.
constexpr std::size_t looked_at = 64;

StepOutput output_of(const GenerationRequest& request) {
  const bool needs_logits = !request.sampling.is_plain() || request.top_logprobs >= 0;
  return needs_logits ? StepOutput::logits : StepOutput::argmax;
}

}  // namespace

/// Whether the states of a sequence are kept for others.
bool Scheduler::Impl::keeps_states(const Sequence& sequence) const {
  return m_options.keeps_prefixes && sequence.job->traits.goes_on;
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

/// Whether the memory is expected to hold a sequence beside the running ones.
bool Scheduler::Impl::is_admitted(const Sequence& sequence) const {
  if (m_running.empty() || m_executor.engine().options().kv_limit == 0) return true;
  std::int64_t wanted = bytes_to_come(sequence);
  for (const auto& other : m_running) wanted += bytes_to_come(*other);
  return static_cast<std::int64_t>(m_executor.engines().free_bytes()) >= wanted;
}

/// Whether a running sequence will soon leave a better state to start from. The first of several
/// questions about a document then runs the document for all.
bool Scheduler::Impl::waits_for_prefix(const Sequence& sequence) {
  if (!keeps_states(sequence)) return false;
  const PrefixKey& whole = sequence.job->key;
  const std::int64_t most = longest_start(whole);
  const std::int64_t there = std::max(best_start(*sequence.job).length, sequence.job->key_begin);
  return std::any_of(m_running.begin(), m_running.end(), [&](const auto& other) {
    if (other->is_prompt_run() || other->job->is_dead) return false;
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
        // An older prompt runs first in any case.
        const bool is_older = other->job->ticket->id() < sequence.job->ticket->id();
        return is_older && common - there >= least_shared_tokens && leaves_whole_state(*other, s);
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
  PrefixTree::Found found = best_start(job);
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
  const std::lock_guard<std::mutex> lock(m_mutex);
  m_counts.cached_tokens += sequence.cached;
  leave_queue(*sequence.job);
  return true;
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
  if (known == 1) span.output = output_of(request);
  room.rows -= count;
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
  bool is_cut = false;
  const bool prunes = request.pruning->prunes();
  switch (segment.kind) {
    case Segment::Kind::context:
      span.part = StepPart::context;
      if (prunes && engine.options().pruning.prefill == PrefillMode::sparse) {
        count = std::min(left, engine.options().pruning.chunk);
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
  room.has_chunk = true;
  const auto first = segment.tokens.begin() + static_cast<std::ptrdiff_t>(sequence.offset);
  span.tokens.assign(first, first + count);
  const bool ends_segment = count == left;
  const bool ends_prompt = ends_segment && sequence.segment + 1 == request.prompt.size();
  if (ends_prompt && sequence.answered().empty()) span.output = output_of(request);
  span.ends_context = ends_segment && segment.kind == Segment::Kind::context;
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
  const bool is_due = span.part == StepPart::context && sequence.request().pruning->prunes() &&
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
  for (std::size_t i = 0; i < std::min(m_waiting.size(), looked_at); ++i) add(*m_waiting[i]);
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

Plan Scheduler::Impl::make_plan(const PageFormat& format, std::vector<Sequence*>& in_step) {
  Plan plan;
  Room room{m_options.max_batch_tokens};
  for (const auto& sequence : m_running) {
    if (!sequence->is_decoding() || sequence->page_format() != format) continue;
    add_span(*sequence, room, plan);
    in_step.push_back(sequence.get());
  }
  // Prompts make progress even if many sequences decode.
  room.rows = std::max({room.rows, m_options.max_batch_tokens / 8, std::int64_t{1}});
  std::vector<Sequence*> prompts;
  for (const auto& sequence : m_running) {
    if (!sequence->is_decoding() && sequence->page_format() == format) {
      prompts.push_back(sequence.get());
    }
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
  std::size_t place = 0;  // of the first that does not wait for a shared prefix
  while (is_room && room.rows > 0 && place < std::min(m_waiting.size(), looked_at) && !m_is_full &&
         static_cast<std::int64_t>(m_running.size()) < m_options.max_sequences) {
    Sequence& sequence = *m_waiting[place];
    const bool has_turn = sequence.page_format() == format;
    if (!has_turn && !is_admitted(sequence)) break;  // nobody takes the memory that it waits for
    if (!has_turn || waits_for_prefix(sequence)) {
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

}  // namespace kvzap::server
