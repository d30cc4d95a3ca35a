#include <fmt/format.h>

#include <algorithm>
#include <kvzap/engine/generate.hpp>
#include <utility>

#include "base/stopwatch.hpp"
#include "engine/throw_not_finite.hpp"

namespace kvzap {
namespace {

using base::Clock;
using base::seconds_since;
using engine::throw_not_finite;

/// The generator's state in a snapshot, beside token ids and logits.
struct RunState {
  std::int64_t phase = 0;
  std::int64_t whole = 0;  // every question runs the context
  std::int64_t context_run = 0;
  std::int64_t question_tokens = 0;
  std::int64_t answer_ended = 0;
  std::int64_t seed = 0;  // the bits of an unsigned number

  template <class Visit>
  static void each(RunState& state, const Visit& visit) {
    visit("phase", state.phase);
    visit("whole", state.whole);
    visit("context_run", state.context_run);
    visit("question_tokens", state.question_tokens);
    visit("answer_ended", state.answer_ended);
    visit("seed", state.seed);
  }
};

/// Root attribute with the text of Sampler::state.
const char* const sampler_name = "sampler";

RunState read_state(const SnapshotInfo& info) {
  RunState state;
  RunState::each(state, [&](const char* name, std::int64_t& value) {
    const auto found = info.state.find(name);
    if (found == info.state.end()) {
      throw Error(fmt::format(
          "/state lacks {}: a run can resume from the file of a run, not from a cache alone",
          name));
    }
    value = found->second;
  });
  return state;
}

/// Returns how many tokens of an answer are in the cache. The last token has been sampled but not
/// run.
std::int64_t run_of(std::int64_t answered) { return std::max<std::int64_t>(0, answered - 1); }

/// Returns the state, checked against everything else in the file.
RunState check_state(const SnapshotHeader& header, bool runs_whole, std::int64_t vocab_size) {
  const SnapshotInfo& info = header.info;
  const RunState state = read_state(info);
  const auto check = [](bool fits, const char* what, std::int64_t found, std::int64_t expected) {
    if (!fits) throw Error(fmt::format("{} is {}; expected {}", what, found, expected));
  };
  const auto ids = static_cast<std::int64_t>(info.token_ids.size());
  const std::int64_t context = info.context_tokens;
  if (state.phase < 1 || state.phase > 3) {
    throw Error(fmt::format("/state: phase is {}; expected 1, 2 or 3", state.phase));
  }
  const bool answers = state.phase == 3;
  if (context < 1 || context > ids) {
    throw Error(fmt::format("context_tokens is {}, and there are {} token_ids", context, ids));
  }
  check(state.whole == (runs_whole ? 1 : 0),
        "/state: whole (1: the context runs with each question, prune_after question)", state.whole,
        runs_whole ? 1 : 0);
  if (state.context_run < 0 || state.context_run > context) {
    throw Error(fmt::format("/state: context_run is {} of {} tokens", state.context_run, context));
  }
  if (state.phase > 1) {
    check(state.context_run == context, "/state: context_run", state.context_run, context);
  }
  if (state.question_tokens < 0 || state.question_tokens > ids - context ||
      (!answers && ids != context)) {
    throw Error(fmt::format("{} token_ids are not a context of {}, a question of {} and an answer",
                            ids, context, state.question_tokens));
  }
  const auto removed_tokens = info.state.find("closed_up");
  const std::int64_t gone = removed_tokens == info.state.end() ? 0 : removed_tokens->second;
  check(gone >= 0 && gone <= ids, "/state: closed_up", gone, ids);
  const std::int64_t seen = header.tokens + gone;
  const std::int64_t answered = ids - context - state.question_tokens;
  const std::int64_t run = answers ? context + state.question_tokens + run_of(answered)
                                   : (runs_whole ? 0 : state.context_run);
  check(seen == run, "the number of tokens that the cache was given", seen, run);
  const auto logits = static_cast<std::int64_t>(info.logits.size());
  if (!runs_whole && state.context_run == context) {
    check(logits == vocab_size, "the number of logits", logits, vocab_size);
  }
  return state;
}

}  // namespace

struct Generator::SnapshotParts {
  SnapshotInfo info;
  SequenceId sequence = -1;
  const Engine::Checkpoint* context = nullptr;
  bool is_temporary = false;  // whether the sequence is temporary
};

Generator::Generator(std::unique_ptr<Engine> engine) : m_engine(std::move(engine)) {}

bool Generator::runs_whole() const {
  const CacheOptions& options = m_engine->options();
  return options.policy && options.pruning.moment == PruneMoment::question;
}

// Returns to the state before prefill.
void Generator::forget() {
  while (!m_kept.empty()) discard_oldest_state();
  if (m_pristine >= 0 && m_pristine != m_sequence) m_engine->free_sequence(m_pristine);
  if (m_sequence >= 0) m_engine->free_sequence(m_sequence);
  m_sequence = m_pristine = -1;
  m_checkpoint.reset();
  m_phase = Phase::empty;
  m_context.clear();
  m_context_run = 0;
  m_context_logits.clear();
}

void Generator::prefill(const std::vector<TokenId>& context, bool reusable,
                        const ProgressCallback& progress,
                        const std::function<void()>& after_chunk) {
  if (context.empty()) throw Error("the context is empty; expected at least one token");
  if (m_phase != Phase::empty) throw Error("prefill was called twice");
  m_is_reusable = reusable;
  if (runs_whole()) {
    m_context = context;
    m_context_run = static_cast<std::int64_t>(context.size());
    m_phase = Phase::ready;
    return;
  }
  m_sequence = m_engine->add_sequence();
  m_context = context;
  m_tokens = 0;
  m_phase = Phase::context;
  run_context(progress, after_chunk);
}

void Generator::prefill_rest(const ProgressCallback& progress,
                             const std::function<void()>& after_chunk) {
  if (m_phase == Phase::empty) throw Error("there is no context to continue; prefill or resume");
  if (m_phase == Phase::context) run_context(progress, after_chunk);
}

void Generator::run_context(const ProgressCallback& progress,
                            const std::function<void()>& after_chunk) {
  const CacheOptions& options = m_engine->options();
  const auto count = static_cast<std::int64_t>(m_context.size());
  const StepRule rule = m_engine->rule(StepPart::context);
  const bool repeats = options.prunes() && options.policy && options.policy->info->repeats_context;
  const auto or_forget = [&](const auto& work) {
    try {
      work();
    } catch (...) {
      forget();  // so that prefill can be tried again
      throw;
    }
  };
  while (m_context_run < count) {
    const std::int64_t begin = m_context_run;
    const std::int64_t end =
        options.pruning.prefill == PrefillMode::sparse && options.pruning.chunk < count - begin
            ? begin + options.pruning.chunk
            : count;
    const auto chunk_progress = [&](std::string_view what, std::int64_t done, std::int64_t total) {
      // Reports tokens, so that chunks add up, whatever the steps within them.
      if (progress) progress(what, begin + (end - begin) * done / total, count);
    };
    or_forget([&] {
      const StepBatch batch(m_sequence, {m_context.begin() + begin, m_context.begin() + end}, rule,
                            end == count  ? StepOutput::logits
                            : after_chunk ? StepOutput::argmax
                                          : StepOutput::none);
      StepResult result = std::move(m_engine->step(batch, chunk_progress).front());
      // If weights are not finite, their rows must not replace a good snapshot. The logits show it,
      // at the cost of one row of the output head.
      if (end == count) check_finite(result.logits);
      if (end < count && after_chunk && result.argmax < 0) throw_not_finite();
      m_context_logits = std::move(result.logits);
    });
    m_context_run = end;
    m_tokens = m_engine->tokens(m_sequence);
    if (after_chunk && (end < count || repeats)) after_chunk();
  }
  or_forget([&] {
    m_engine->end_context(m_sequence, progress);
    trim();
    keep_context();
  });
  m_tokens = m_engine->tokens(m_sequence);
  m_phase = Phase::ready;
  if (after_chunk) after_chunk();
}

// Rank 0 has the logits. All ranks throw.
void Generator::check_finite(const std::vector<float>& logits) const {
  const Communicator& comm = m_engine->communicator();
  TokenId best = comm.is_root() ? Sampler({})(logits) : 0;
  comm.broadcast(&best, sizeof(best), 0);
  if (best < 0) throw_not_finite();
}

// The sequence has the state from which each answer starts.
void Generator::keep_context() {
  if (!m_is_reusable) return;
  if (m_engine->options().pruning.decode.every > 0) {
    m_pristine = m_sequence;  // a sequence cannot be cut back past an eviction
  } else {
    m_checkpoint = m_engine->checkpoint(m_sequence);
  }
}

void Generator::append_context(const std::vector<TokenId>& more) {
  if (more.empty()) throw Error("there is nothing to add to the context");
  if (m_phase == Phase::empty) throw Error("there is no context to add to; prefill or resume");
  const auto count = static_cast<std::int64_t>(m_context.size() + more.size()) - m_context_run;
  if (!runs_whole()) {
    // If sparse prefill has not ended the context yet, more context only extends it.
    if (m_phase != Phase::context || m_engine->options().pruning.prefill != PrefillMode::sparse) {
      m_engine->check_more_context(m_sequence, count);
    }
    if (m_pristine >= 0) {
      if (m_sequence != m_pristine) m_engine->free_sequence(m_sequence);
      m_sequence = m_pristine;
      m_pristine = -1;
    } else if (m_phase == Phase::answering) {
      check_context_is_kept();
      m_engine->restore(m_sequence, *m_checkpoint);
    } else if (m_phase == Phase::ready) {
      check_whole();
    }
    m_checkpoint.reset();
    m_tokens = m_engine->tokens(m_sequence);
    m_phase = Phase::context;
  } else {
    m_context_run += static_cast<std::int64_t>(more.size());
    m_phase = Phase::ready;
  }
  m_context.insert(m_context.end(), more.begin(), more.end());
  forget_answer();
}

void Generator::forget_answer() {
  m_question.clear();
  m_answer.reset();
  m_has_ended = false;
}

void Generator::reset() {
  forget();
  forget_answer();
  m_tokens = 0;
}

void Generator::keep_answer(const std::vector<TokenId>& more, bool with_last_token) {
  if (m_phase != Phase::answering) throw Error("there is no answer to keep");
  if (runs_whole()) {
    throw Error("the context runs anew with each question: no answer can become a part of it");
  }
  if (more.empty()) throw Error("there is nothing after the answer; expected at least one token");
  check_whole();
  std::vector<TokenId> said = answered();
  std::vector<TokenId> tokens;
  if (!said.empty()) {
    if (with_last_token) {
      tokens.push_back(said.back());
    } else {
      said.pop_back();
    }
  }
  tokens.insert(tokens.end(), more.begin(), more.end());
  const StepBatch batch(m_sequence, tokens, m_engine->rule(StepPart::question), StepOutput::logits);
  StepResult result = std::move(m_engine->step(batch).front());
  check_finite(result.logits);
  if (m_pristine >= 0 && m_pristine != m_sequence) m_engine->free_sequence(m_pristine);
  m_pristine = -1;
  m_checkpoint.reset();
  m_context_logits = std::move(result.logits);
  for (const std::vector<TokenId>* part :
       {&std::as_const(m_question), &std::as_const(said), &more}) {
    m_context.insert(m_context.end(), part->begin(), part->end());
  }
  m_context_run = static_cast<std::int64_t>(m_context.size());
  forget_answer();
  m_tokens = m_engine->tokens(m_sequence);
  m_phase = Phase::ready;
  keep_context();
}

void Generator::discard_oldest_state() {
  if (m_kept.front().fork >= 0) m_engine->free_sequence(m_kept.front().fork);
  m_kept.pop_front();
}

void Generator::keep_state(std::size_t most) {
  if (m_phase != Phase::ready || runs_whole()) {
    throw Error("the state can be kept at the end of a context that has run alone");
  }
  check_whole();
  // First: the new state may use the memory of the oldest.
  while (!m_kept.empty() && m_kept.size() >= most) discard_oldest_state();
  if (most == 0) return;
  KeptState state;
  if (m_engine->options().pruning.decode.every > 0) {
    state.fork = m_engine->fork(m_sequence);  // a sequence cannot be cut back past an eviction
  } else {
    state.checkpoint = m_engine->checkpoint(m_sequence);
  }
  state.context = m_context.size();
  state.logits = m_context_logits;
  m_kept.push_back(std::move(state));
}

void Generator::go_back() {
  if (m_kept.empty()) throw Error("there is no state to go back to");
  KeptState state = std::move(m_kept.back());
  m_kept.pop_back();
  if (m_pristine >= 0 && m_pristine != m_sequence) m_engine->free_sequence(m_pristine);
  m_pristine = -1;
  m_checkpoint.reset();
  if (state.fork >= 0) {
    m_engine->free_sequence(m_sequence);
    m_sequence = state.fork;
  } else {
    m_engine->restore(m_sequence, *state.checkpoint);
  }
  m_context.resize(state.context);
  m_context_run = static_cast<std::int64_t>(state.context);
  m_context_logits = std::move(state.logits);
  forget_answer();
  m_tokens = m_engine->tokens(m_sequence);
  m_phase = Phase::ready;
  trim();
  keep_context();
}

// A step that failed halfway may have left tokens that the generator does not know.
void Generator::check_whole() const {
  if (m_engine->tokens(m_sequence) == m_tokens) return;
  throw Error(
      fmt::format("a step has failed halfway and left {} tokens in the cache; expected {}: the "
                  "sequence cannot continue",
                  m_engine->tokens(m_sequence), m_tokens));
}

void Generator::check_context_is_kept() const {
  if (m_checkpoint) return;
  throw Error(
      "a second question needs a prefill that is reusable: the context's state has not been kept "
      "beside that of the answer");
}

// Returns the sequence to its state after the context.
void Generator::begin_answer() {
  if (m_phase == Phase::empty) throw Error("there is no context; prefill or resume");
  if (m_phase == Phase::context) {
    throw Error(
        fmt::format("{} of {} tokens of the context have been run; prefill_rest comes "
                    "before an answer",
                    m_context_run, m_context.size()));
  }
  // The old sequence is freed even if there is no memory for a new one.
  const auto leave = [&](SequenceId rest) {
    if (m_sequence != rest) m_engine->free_sequence(m_sequence);
    m_sequence = rest;
  };
  if (runs_whole()) {
    leave(-1);
    m_sequence = m_engine->add_sequence();
  } else if (m_pristine >= 0) {
    leave(m_pristine);
    m_sequence = m_engine->fork(m_pristine);
  } else if (m_phase == Phase::answering || m_engine->tokens(m_sequence) != m_tokens) {
    check_context_is_kept();
    m_engine->restore(m_sequence, *m_checkpoint);
  }
  m_tokens = m_engine->tokens(m_sequence);
  m_phase = Phase::ready;
}

Answer Generator::answer(const std::vector<TokenId>& question, const AnswerOptions& options) {
  Continuation begun(options.sampling, options, options.lookup);
  begin_answer();
  std::vector<TokenId> asked = question;  // may be m_question
  forget_answer();
  m_question = std::move(asked);
  m_answer.emplace(std::move(begun));
  m_seed = options.sampling.seed;
  return generate(options, {});
}

Answer Generator::resume_answer(const AnswerOptions& options) {
  if (m_phase != Phase::answering) throw Error("there is no answer in progress");
  const std::vector<TokenId> earlier = answered();
  if (earlier.empty()) throw Error("the answer has no token from which to continue");
  check_whole();
  Continuation resumed(options.sampling, options, options.lookup);
  if (m_seed == options.sampling.seed) resumed.set_random_state(m_answer->random_state());
  m_answer.emplace(std::move(resumed));
  m_seed = options.sampling.seed;
  m_has_ended = false;
  return generate(options, earlier);
}

/// Draws a token from logits on rank 0. Returns it on all ranks, or -1 if there is none.
TokenId Generator::draw(const StepResult& result, const AnswerOptions& options) {
  const Communicator& comm = m_engine->communicator();
  if (options.on_logits) options.on_logits(result.logits);
  constexpr TokenId none_left = -2, too_ambiguous = -3;
  TokenId token = 0;
  if (comm.is_root()) {
    try {
      token = m_answer->draw(result);
    } catch (const Error&) {  // thrown by a grammar alone
      token = too_ambiguous;
    }
  }
  // The model's own logits may be valid.
  if (token == -1 && options.sampling.changes_logits() && Sampler({})(result.logits) >= 0) {
    token = none_left;
  }
  comm.broadcast(&token, sizeof(token), 0);
  if (token == none_left) {
    throw AgreedError(
        "no token is left that may follow: a grammar, suppress_tokens and bad_words_ids forbid all "
        "that the model has (generation_config.json may name them), or penalties take logits past "
        "float's range");
  }
  if (token == too_ambiguous) {
    throw AgreedError(
        "the grammar of the answer is too ambiguous, or forbids one of its earlier tokens");
  }
  return token;
}

// Runs the question, unless the answer has begun with `earlier` tokens, and generates tokens.
Answer Generator::generate(const AnswerOptions& options, const std::vector<TokenId>& earlier) {
  const Communicator& comm = m_engine->communicator();
  Continuation& said = *m_answer;
  // The sampler's state does not include earlier tokens; the generator has them.
  said.append_prompt(m_context);
  said.append_prompt(m_question);
  for (const TokenId token : earlier) said.append(token);
  // Any rank may request logits; all ranks take part in gathering them.
  const StepOutput wanted = said.output(m_engine->draws_tokens());
  const bool wants_logits = options.on_logits || wanted == StepOutput::logits;
  const bool by_logits = comm.all_reduce_max(wants_logits ? 1 : 0) != 0;
  m_ends_by_text = comm.all_reduce_max(options.ends_after || options.sampling.grammar ? 1 : 0) != 0;
  const StepOutput output = by_logits ? StepOutput::logits : wanted;
  const auto run = [&](const std::vector<TokenId>& tokens, StepPart part, StepOutput after) {
    if (part == StepPart::question && runs_whole()) {
      return run_whole(tokens, after, options.progress);
    }
    const StepBatch batch(m_sequence, tokens, m_engine->rule(part), after, said.draws(after));
    if (part != StepPart::question || !options.progress) return m_engine->step(batch);
    return m_engine->step(batch, [&](std::string_view, std::int64_t done, std::int64_t total) {
      const auto count = static_cast<std::int64_t>(tokens.size());
      options.progress("question", count * done / total, count);
    });
  };
  const auto next = [&](const std::vector<TokenId>& tokens, StepPart part) {
    const auto results = run(tokens, part, output);
    return by_logits ? draw(results.front(), options) : said.draw(results.front());
  };
  // From here on, the members describe the sequence.
  const auto note = [&] {
    m_phase = Phase::answering;
    m_tokens = m_engine->tokens(m_sequence);
  };
  Answer answer;
  answer.question_tokens = static_cast<std::int64_t>(m_question.size());
  auto start = Clock::now();
  TokenId token = 0;
  if (earlier.empty()) {
    const bool has_step = !m_question.empty() || runs_whole();
    if (options.max_new_tokens < 1) {
      if (has_step) {
        const auto results = run(m_question, StepPart::question, StepOutput::argmax);
        if (results.front().argmax < 0) throw_not_finite();
      }
      note();
    } else {
      token = has_step ? next(m_question, StepPart::question)
                       : draw({-1, m_context_logits, {}}, options);
    }
    answer.question_seconds = seconds_since(start);
  }
  answer.pruned = report();
  start = Clock::now();
  auto end = said.end(m_engine->tokens(m_sequence));
  const StepOutput after_each = output == StepOutput::argmax  ? StepOutput::all_argmax
                                : output == StepOutput::drawn ? StepOutput::all_drawn
                                                              : StepOutput::all_logits;
  const bool drafts = options.lookup > 0 && m_engine->why_no_drafts().empty();
  for (; !end; end = said.end(m_engine->tokens(m_sequence))) {
    if (drafts && !said.tokens().empty()) {
      const std::vector<TokenId> draft = said.draft(m_tokens, m_engine->most_draft(m_tokens));
      if (!draft.empty() && run_draft(draft, options, after_each)) continue;
    }
    if (!said.tokens().empty()) token = next({said.tokens().back()}, StepPart::generated);
    if (token < 0) throw_not_finite();
    note();
    take(token, options);
  }
  answer.stop_reason = *end;
  m_has_ended = true;
  answer.tokens = said.tokens();
  answer.drafts = said.drafts();
  answer.decode_seconds = seconds_since(start);
  trim();
  answer.cache = report();
  return answer;
}

// Runs the context and the question, by which the policy chooses.
std::vector<StepResult> Generator::run_whole(const std::vector<TokenId>& question,
                                             StepOutput output, const ProgressCallback& progress) {
  StepResult result = m_engine->run_with_question(m_sequence, m_context, question, output,
                                                  m_answer->draws(output), progress);
  trim();
  return {std::move(result)};
}

// Returns the sequence to write, and its context. Collective if a sequence must be made for it.
Generator::SnapshotParts Generator::snapshot_parts(SnapshotInfo info) {
  if (m_phase == Phase::empty) throw Error("there is no context yet that could be written");
  take_back_draft();
  SnapshotParts parts;
  const Phase phase = m_pristine >= 0 ? Phase::ready : m_phase;
  const bool answers = phase == Phase::answering;
  RunState state;
  state.phase = static_cast<std::int64_t>(phase);
  state.whole = runs_whole() ? 1 : 0;
  state.context_run = m_context_run;
  info.token_ids = m_context;
  info.context_tokens = static_cast<std::int64_t>(m_context.size());
  info.logits = m_context_logits;
  if (answers) {
    state.question_tokens = static_cast<std::int64_t>(m_question.size());
    state.answer_ended = m_has_ended ? 1 : 0;
    info.token_ids.insert(info.token_ids.end(), m_question.begin(), m_question.end());
    info.token_ids.insert(info.token_ids.end(), answered().begin(), answered().end());
    if (m_answer) {
      state.seed = static_cast<std::int64_t>(m_seed);
      info.further[sampler_name] = m_answer->random_state();
    }
    parts.context = m_checkpoint.get();
  }
  RunState::each(state, [&](const char* name, std::int64_t& value) { info.state[name] = value; });
  parts.info = std::move(info);
  if (runs_whole() && !answers) {
    parts.sequence = m_engine->add_sequence();
    parts.is_temporary = true;
  } else if (m_pristine >= 0) {
    parts.sequence = m_pristine;
  } else {
    check_whole();
    parts.sequence = m_sequence;
  }
  return parts;
}

template <class Write>
auto Generator::with_parts(SnapshotInfo info, const Write& write) {
  SnapshotParts parts = snapshot_parts(std::move(info));
  const auto free_temporary = [&] {
    if (parts.is_temporary) m_engine->free_sequence(parts.sequence);
  };
  try {
    auto result = write(parts);
    free_temporary();
    return result;
  } catch (...) {
    free_temporary();
    throw;
  }
}

std::unique_ptr<SnapshotWriting> Generator::begin_snapshot(const std::filesystem::path& file,
                                                           SnapshotInfo info,
                                                           const SnapshotOptions& options) {
  return with_parts(std::move(info), [&](SnapshotParts& parts) {
    return m_engine->begin_snapshot(file, std::move(parts.info), options, parts.sequence,
                                    parts.context);
  });
}

std::vector<std::string> Generator::write_snapshot(const std::filesystem::path& file,
                                                   SnapshotInfo info,
                                                   const SnapshotOptions& options) {
  return with_parts(std::move(info), [&](SnapshotParts& parts) {
    return m_engine->write_snapshot(file, std::move(parts.info), options, parts.sequence,
                                    parts.context);
  });
}

std::vector<std::string> Generator::write_snapshot(const std::filesystem::path& file,
                                                   const std::string& model_name) {
  SnapshotInfo info;
  info.model = model_name;
  return write_snapshot(file, std::move(info), {});
}

void Generator::resume(const SnapshotReader& reader, bool reusable) {
  const SnapshotHeader& header = reader.header();
  const SnapshotInfo& info = header.info;
  const Communicator& comm = m_engine->communicator();
  RunState state;
  std::optional<Continuation> answer;
  comm.agree([&] {
    try {
      state = check_state(header, runs_whole(), m_engine->config().vocab_size);
      const auto found = info.further.find(sampler_name);
      if (found != info.further.end() && std::holds_alternative<std::string>(found->second)) {
        answer.emplace(SamplingOptions(), StopRules());
        answer->set_random_state(std::get<std::string>(found->second));
      }
    } catch (const Error& error) {
      throw Error(fmt::format("snapshot {}: {}", reader.file().string(), error.what()));
    }
  });
  Engine::Resumed resumed = m_engine->resume(reader);
  reset();
  m_sequence = resumed.sequence;
  m_checkpoint = std::move(resumed.context);
  m_is_reusable = reusable;
  m_phase = static_cast<Phase>(state.phase);
  const auto context_end = info.token_ids.begin() + info.context_tokens;
  const auto question_end = context_end + state.question_tokens;
  m_context.assign(info.token_ids.begin(), context_end);
  m_context_run = state.context_run;
  if (comm.is_root()) m_context_logits = info.logits;
  m_question.assign(context_end, question_end);
  if (!answer && question_end != info.token_ids.end()) {
    SamplingOptions sampling;
    sampling.seed = static_cast<std::uint64_t>(state.seed);
    answer.emplace(sampling, StopRules());
  }
  m_answer = std::move(answer);
  std::for_each(question_end, info.token_ids.end(),
                [&](TokenId token) { m_answer->append(token); });
  m_has_ended = state.answer_ended != 0;
  m_seed = static_cast<std::uint64_t>(state.seed);
  if (m_phase == Phase::ready && runs_whole()) {
    m_engine->free_sequence(m_sequence);
    m_sequence = -1;
    return;
  }
  m_tokens = m_engine->tokens(m_sequence);
  if (m_phase != Phase::ready) return;
  try {
    keep_context();
  } catch (...) {
    forget();
    throw;
  }
}

void Generator::trim() {
  if (m_engine->options().trim) m_engine->trim();
}

bool Generator::is_answer_complete() const {
  return m_answer && m_answer->end(m_engine->tokens(m_sequence)).has_value();
}

const std::vector<TokenId>& Generator::answered() const {
  static const std::vector<TokenId> none;
  return m_answer ? m_answer->tokens() : none;
}

}  // namespace kvzap
