#include <algorithm>
#include <kvzap/generate.hpp>

#include "base/stopwatch.hpp"

namespace kvzap {
namespace {

using detail::Clock;
using detail::seconds_since;

}  // namespace

Generator::Generator(std::unique_ptr<Engine> engine) : m_engine(std::move(engine)) {}

void Generator::prefill(const std::vector<TokenId>& context, bool reusable,
                        const ProgressCallback& progress) {
  if (context.empty()) throw Error("the context is empty; expected at least one token");
  if (m_sequence >= 0 || !m_context.empty()) throw Error("prefill was called twice");
  const CacheOptions& options = m_engine->options();
  const std::int64_t count = context.size();
  const std::int64_t chunk =
      options.prefill == PrefillMode::sparse ? std::min(options.chunk, count) : count;
  if (options.policy && options.prune_after == PruneMoment::question) {
    m_context = context;
    return;
  }
  const StepRule rule = m_engine->rule(StepPart::context);
  m_sequence = m_engine->add_sequence();
  try {
    for (std::int64_t begin = 0; begin < count; begin += chunk) {
      const std::int64_t end = std::min(count, begin + chunk);
      const auto chunk_progress = [&](std::string_view what, std::int64_t done,
                                      std::int64_t total) {
        // In tokens, so that chunks add up whatever their inner steps.
        if (progress) progress(what, begin + (end - begin) * done / total, count);
      };
      const StepBatch batch(m_sequence, {context.begin() + begin, context.begin() + end}, rule,
                            end == count ? StepOutput::logits : StepOutput::none);
      m_context_logits = std::move(m_engine->step(batch, chunk_progress).front().logits);
    }
    m_engine->end_context(m_sequence, progress);
  } catch (...) {
    m_engine->free_sequence(m_sequence);  // so that prefill can be tried again
    m_sequence = -1;
    throw;
  }
  trim();
  if (!reusable) return;
  if (options.decode_every > 0) {
    m_pristine = m_sequence;  // a sequence cannot be cut back past an eviction
  } else {
    m_checkpoint = m_engine->checkpoint(m_sequence);
  }
}

// The sequence as it was after the context.
void Generator::begin_answer() {
  const bool is_first = m_answers++ == 0;
  // Without memory for the new sequence the old one is gone all the same.
  const auto leave = [&](SequenceId rest) {
    if (m_sequence != rest) m_engine->free_sequence(m_sequence);
    m_sequence = rest;
  };
  if (!m_context.empty()) {
    leave(-1);
    m_sequence = m_engine->add_sequence();
  } else if (m_pristine >= 0) {
    leave(m_pristine);
    m_sequence = m_engine->fork(m_pristine);
  } else if (!is_first) {
    if (!m_checkpoint) throw Error("a second question needs a prefill that is reusable");
    m_engine->restore(m_sequence, *m_checkpoint);
  }
}

// Context and question in one step, after which the policy chooses.
std::vector<StepResult> Generator::run_whole(const std::vector<TokenId>& question,
                                             StepOutput output) {
  std::vector<TokenId> tokens = m_context;
  tokens.insert(tokens.end(), question.begin(), question.end());
  auto results = m_engine->step(StepBatch(
      m_sequence, tokens,
      m_engine->rule(StepPart::whole, static_cast<std::int64_t>(question.size())), output));
  m_engine->end_context(m_sequence);
  trim();
  return results;
}

Answer Generator::answer(const std::vector<TokenId>& question, const AnswerOptions& options) {
  begin_answer();
  Sampler sampler(options.sampling);
  const Communicator& comm = m_engine->communicator();
  // On all ranks; -1 if there is none.
  const auto draw = [&](const std::vector<float>& logits) {
    if (options.on_logits) options.on_logits(logits);
    TokenId token = comm.is_root() ? sampler(logits) : 0;
    comm.broadcast(&token, sizeof(token), 0);
    return token;
  };
  // Any rank may want to see logits; all take part in bringing them together.
  const bool greedy =
      comm.all_reduce_max(options.on_logits ? 1 : 0) == 0 && options.sampling.temperature == 0;
  const StepOutput output = greedy ? StepOutput::argmax : StepOutput::logits;
  const auto run = [&](const std::vector<TokenId>& tokens, StepPart part, StepOutput wanted) {
    if (part == StepPart::question && !m_context.empty()) return run_whole(tokens, wanted);
    return m_engine->step(StepBatch(m_sequence, tokens, m_engine->rule(part), wanted));
  };
  const auto next = [&](const std::vector<TokenId>& tokens, StepPart part) {
    const auto results = run(tokens, part, output);
    return greedy ? results.front().argmax : draw(results.front().logits);
  };
  Answer answer;
  answer.question_tokens = question.size();
  auto start = Clock::now();
  TokenId token = 0;
  const bool has_step = !question.empty() || !m_context.empty();
  if (options.max_new_tokens < 1) {
    if (has_step) run(question, StepPart::question, StepOutput::none);
  } else {
    token = has_step ? next(question, StepPart::question) : draw(m_context_logits);
  }
  answer.question_seconds = seconds_since(start);
  answer.pruned = report();
  start = Clock::now();
  while (static_cast<std::int64_t>(answer.tokens.size()) < options.max_new_tokens) {
    // The last token that fits is still generated from, not the one after it.
    const bool feeds = !answer.tokens.empty();
    if (feeds && options.max_tokens > 0 && m_engine->tokens(m_sequence) >= options.max_tokens) {
      answer.stop_reason = StopReason::context_full;
      break;
    }
    if (feeds) token = next({answer.tokens.back()}, StepPart::generated);
    if (token < 0) {
      throw AgreedError(
          "the logits are not finite: weights or activations overflow (try --dtype "
          "bf16 or f32, or check the checkpoint)");
    }
    answer.tokens.push_back(token);
    if (options.on_token) options.on_token(token);
    if (std::find(options.stop_ids.begin(), options.stop_ids.end(), token) !=
        options.stop_ids.end()) {
      answer.stop_reason = StopReason::stop_id;
      break;
    }
  }
  answer.decode_seconds = seconds_since(start);
  trim();
  answer.cache = report();
  return answer;
}

void Generator::trim() {
  if (m_engine->options().trim) m_engine->trim();
}

std::string_view name_of(StopReason reason) {
  switch (reason) {
    case StopReason::stop_id:
      return "stop_id";
    case StopReason::max_new_tokens:
      return "max_new_tokens";
    case StopReason::context_full:
      return "context_full";
  }
  return "unknown";
}

}  // namespace kvzap
