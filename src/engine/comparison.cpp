#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <kvzap/engine/comparison.hpp>
#include <numeric>
#include <optional>

#include "base/stopwatch.hpp"

namespace kvzap {
namespace {

using base::Stopwatch;

bool prunes(const LoadedPruning& setting) { return setting.policy && setting.prunes(); }

std::string name_of(const LoadedPruning& setting) {
  return prunes(setting) ? setting.policy->name : "none";
}

/// Sequences that the destructor frees, at most `most` of them.
class Borrowed {
 public:
  Borrowed(Engine& engine, std::size_t most) : m_engine(engine) { m_sequences.reserve(most); }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;
  ~Borrowed() { clear(); }

  /// Does not allocate: without memory, the sequence would be lost.
  SequenceId add(SequenceId sequence) {
    m_sequences.push_back(sequence);
    return sequence;
  }
  void free(SequenceId sequence) {
    m_sequences.erase(std::find(m_sequences.begin(), m_sequences.end(), sequence));
    m_engine.free_sequence(sequence);
  }
  void clear() {
    for (const SequenceId sequence : m_sequences) m_engine.free_sequence(sequence);
    m_sequences.clear();
  }

 private:
  Engine& m_engine;
  std::vector<SequenceId> m_sequences;
};

/// The starting point of settings: a context that has run, and its time.
struct Start {
  SequenceId sequence = -1;
  StepResult next;  // the token that follows: argmax on every rank, logits on rank 0
  /// Scores of the context by its policies, for dense settings.
  std::shared_ptr<const ContextScores> scores;
  double prefill_seconds = 0;  // without the time of other policies and of later pruning
  double score_seconds = 0;
  double prune_seconds = 0;  // in the prefill
};

/// An answer in progress.
struct Job {
  std::size_t setting = 0;
  int attempt = 0;
  SequenceId sequence = -1;
  StepResult result;  // of the last step
  std::vector<TokenId> tokens;
  std::vector<double> log_probabilities;
  StopReason reason = StopReason::max_new_tokens;
  CacheReport cache;  // at the end
  double decode_seconds = 0;
};

// Returns the natural logarithm of a token's probability.
double log_probability(const std::vector<float>& logits, TokenId token) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - largest);
  return static_cast<double>(logits.at(static_cast<std::size_t>(token))) - largest - std::log(sum);
}

}  // namespace

PrefillShare prefill_share(const LoadedPruning& setting) {
  if (!prunes(setting)) return PrefillShare::context;
  if (setting.pruning.prefill == PrefillMode::sparse) return PrefillShare::none;
  return setting.pruning.moment == PruneMoment::question ? PrefillShare::whole
                                                         : PrefillShare::context;
}

struct Comparison::State {
  State(std::unique_ptr<Engine> the_engine, std::vector<LoadedPruning> the_settings,
        std::int64_t the_batch)
      : engine(std::move(the_engine)),
        settings(std::move(the_settings)),
        batch(the_batch),
        kept(*engine, settings.size() + 1) {}

  std::unique_ptr<Engine> engine;
  std::vector<LoadedPruning> settings;
  std::int64_t batch;
  std::vector<TokenId> context;
  std::vector<TokenId> asked;  // the current question
  Borrowed kept;               // the context's sequences
  std::vector<Start> starts;   // (setting); empty yet for settings that read the question too

  const Communicator& comm() const { return engine->communicator(); }
  void forget() {
    kept.clear();
    context.clear();
    starts.assign(settings.size(), Start());
  }

  void read(const std::vector<TokenId>& tokens, std::int64_t question, PrefillShare share,
            Borrowed& owner, std::vector<Start>& into, const ProgressCallback& progress);
  void prefill_sparse(std::size_t setting, const ProgressCallback& progress);
  void find_argmax(StepResult& result) const;
  std::vector<CacheReport> reports_of(const std::vector<Job*>& jobs) const;
  void answer_wave(std::vector<Job>& jobs, const std::vector<TokenId>& question,
                   const ComparisonOptions& options, const std::vector<Start>& from,
                   std::vector<SettingAnswer>& answers);
  void generate(std::vector<Job>& jobs, const ComparisonOptions& options, Borrowed& owner);
  void take_tokens(std::vector<Job*>& active, const ComparisonOptions& options,
                   std::vector<Sampler>& samplers, const Job* first);
};

Comparison::Comparison(std::unique_ptr<Engine> engine, std::vector<LoadedPruning> settings,
                       std::int64_t batch) {
  if (engine->options().prunes()) {
    throw Error("a comparison needs an engine that prunes nothing by itself");
  }
  if (settings.empty()) throw Error("there is nothing to compare: no setting is given");
  if (batch < 0) throw Error(fmt::format("batch is {}; expected 0 or more", batch));
  for (const LoadedPruning& setting : settings) {
    try {
      engine->check(setting);
    } catch (const Error& error) {
      throw Error(fmt::format("{}: {}", name_of(setting), error.what()));
    }
  }
  m_state = std::make_unique<State>(std::move(engine), std::move(settings), batch);
}

Comparison::~Comparison() = default;

const std::vector<LoadedPruning>& Comparison::settings() const { return m_state->settings; }
Engine& Comparison::engine() { return *m_state->engine; }

// The logits are on rank 0.
void Comparison::State::find_argmax(StepResult& result) const {
  if (comm().is_root()) result.argmax = Sampler({})(result.logits);
  comm().broadcast(&result.argmax, sizeof(result.argmax), 0);
}

// Runs one dense step for all settings of a group.
void Comparison::State::read(const std::vector<TokenId>& tokens, std::int64_t question,
                             PrefillShare share, Borrowed& owner, std::vector<Start>& into,
                             const ProgressCallback& progress) {
  std::vector<std::size_t> members;
  std::vector<std::shared_ptr<const PolicyChoice>> policies;
  for (std::size_t s = 0; s < settings.size(); ++s) {
    if (prefill_share(settings[s]) != share) continue;
    members.push_back(s);
    if (prunes(settings[s])) policies.push_back(settings[s].policy);
  }
  if (members.empty()) return;
  const SequenceId sequence = owner.add(engine->add_sequence());
  Engine::Reading reading =
      engine->read(sequence, tokens, question, policies, StepOutput::logits, progress);
  find_argmax(reading.result);
  // Seconds of the slowest rank, for which others wait: the step, all its policies, each policy.
  std::vector<double> times = {reading.step_seconds, reading.scoring_seconds};
  for (const auto& scores : reading.scores) times.push_back(scores->seconds);
  comm().all_reduce_max(times.data(), times.size());
  std::size_t policy = 0;
  for (const std::size_t s : members) {
    Start& start = into[s];
    start = Start();
    start.sequence = sequence;
    start.next = reading.result;
    if (prunes(settings[s])) {
      start.scores = reading.scores[policy];
      start.score_seconds = times[2 + policy];
      ++policy;
    }
    start.prefill_seconds = std::max(0.0, times[0] - times[1]) + start.score_seconds;
  }
}

void Comparison::State::prefill_sparse(std::size_t setting, const ProgressCallback& progress) {
  Start& start = starts[setting];
  start.sequence = kept.add(engine->add_sequence());
  engine->set_pruning(start.sequence, settings[setting]);
  const CacheReport before = engine->report(start.sequence);
  {
    const Stopwatch watch(start.prefill_seconds);
    const auto count = static_cast<std::int64_t>(context.size());
    const std::int64_t chunk = std::min(settings[setting].pruning.chunk, count);
    const StepRule rule = engine->rule(start.sequence, StepPart::context);
    for (std::int64_t begin = 0; begin < count; begin += chunk) {
      const std::int64_t end = std::min(count, begin + chunk);
      const auto of_chunk = [&](std::string_view what, std::int64_t done, std::int64_t total) {
        // In tokens, so that chunks add up independently of their inner steps.
        if (progress) progress(what, begin + (end - begin) * done / total, count);
      };
      const StepBatch step(start.sequence, {context.begin() + begin, context.begin() + end}, rule,
                           end == count ? StepOutput::logits : StepOutput::none);
      start.next = std::move(engine->step(step, of_chunk).front());
    }
    engine->end_context(start.sequence, progress);
  }
  find_argmax(start.next);
  comm().all_reduce_max(&start.prefill_seconds, 1);
  const CacheReport after = engine->report(start.sequence);
  start.score_seconds = after.score_seconds - before.score_seconds;
  start.prune_seconds = after.prune_seconds - before.prune_seconds;
}

void Comparison::prefill(const std::vector<TokenId>& context, const ProgressCallback& progress) {
  State& state = *m_state;
  if (context.empty()) throw Error("the context is empty; expected at least one token");
  state.forget();
  try {
    state.context = context;
    state.read(context, 0, PrefillShare::context, state.kept, state.starts, progress);
    for (std::size_t s = 0; s < state.settings.size(); ++s) {
      if (prefill_share(state.settings[s]) == PrefillShare::none) state.prefill_sparse(s, progress);
    }
  } catch (...) {
    state.forget();  // the caller can retry
    throw;
  }
}

// Returns the kept rows and the bytes of each sequence alone.
std::vector<CacheReport> Comparison::State::reports_of(const std::vector<Job*>& jobs) const {
  std::vector<SequenceId> sequences;
  sequences.reserve(jobs.size());
  for (const Job* const job : jobs) sequences.push_back(job->sequence);
  std::vector<CacheReport> reports = engine->reports(sequences);
  for (CacheReport& report : reports) report.live_bytes = report.own_bytes;
  return reports;
}

std::vector<SettingAnswer> Comparison::answer(const std::vector<TokenId>& question,
                                              const ComparisonOptions& options,
                                              const ProgressCallback& progress) {
  State& state = *m_state;
  if (state.context.empty()) throw Error("answer was called before prefill");
  if (options.tries < 1) {
    throw Error(fmt::format("tries is {}; expected at least 1", options.tries));
  }
  const Sampler checked(options.sampling);
  for (const TokenId token : options.continuation) {
    if (token < 0 || token >= state.engine->config().vocab_size) {
      throw Error(
          fmt::format("token {} of a continuation is not in the vocabulary; expected an id "
                      "in [0, {})",
                      token, state.engine->config().vocab_size));
    }
  }
  state.asked = question;
  // Without sampling every try gives the same answer.
  const bool draws = options.sampling.temperature != 0 && options.continuation.empty();
  const int attempts = draws ? options.tries : 1;
  std::vector<SettingAnswer> answers(state.settings.size());
  const auto total = static_cast<std::int64_t>(answers.size()) * attempts;
  std::int64_t done = 0;

  const auto answer_group = [&](bool has_question_in_context, const std::vector<Start>& from) {
    std::vector<Job> all;
    for (std::size_t s = 0; s < answers.size(); ++s) {
      const bool is_whole = prefill_share(state.settings[s]) == PrefillShare::whole;
      for (int t = 0; t < attempts && is_whole == has_question_in_context; ++t) {
        Job job;
        job.setting = s;
        job.attempt = t;
        all.push_back(std::move(job));
      }
    }
    const auto count = static_cast<std::int64_t>(all.size());
    std::int64_t wave = state.batch == 0 ? count : state.batch;
    for (std::int64_t begin = 0; begin < count;) {
      const std::int64_t size = std::min(wave, count - begin);
      std::vector<Job> jobs(all.begin() + begin, all.begin() + begin + size);
      try {
        state.answer_wave(jobs, has_question_in_context ? std::vector<TokenId>() : question,
                          options, from, answers);
      } catch (const AgreedOutOfMemory&) {
        if (size == 1) throw;
        wave = size / 2;
        continue;
      }
      begin += size;
      done += size;
      if (progress) progress("answer", done, total);
    }
  };
  answer_group(false, state.starts);

  Borrowed owner(*state.engine, 1);
  std::vector<Start> whole(answers.size());
  std::vector<TokenId> tokens = state.context;
  tokens.insert(tokens.end(), question.begin(), question.end());
  state.read(tokens, static_cast<std::int64_t>(question.size()), PrefillShare::whole, owner, whole,
             progress);
  answer_group(true, whole);

  std::vector<double> seconds;
  for (SettingAnswer& answer : answers) {
    seconds.insert(seconds.end(), {answer.pruned.prune_seconds, answer.decode_seconds});
    for (int t = attempts; t < options.tries; ++t) {
      answer.tokens.push_back(answer.tokens.front());
      answer.stop_reasons.push_back(answer.stop_reasons.front());
    }
  }
  state.comm().all_reduce_max(seconds.data(), seconds.size());
  for (std::size_t s = 0; s < answers.size(); ++s) {
    const bool is_whole = prefill_share(state.settings[s]) == PrefillShare::whole;
    const Start& start = is_whole ? whole[s] : state.starts[s];
    SettingAnswer& answer = answers[s];
    answer.prefill_seconds = start.prefill_seconds + seconds[2 * s];
    answer.pruned.score_seconds = start.score_seconds;
    answer.pruned.prune_seconds = start.prune_seconds + seconds[2 * s];
    answer.decode_seconds = seconds[2 * s + 1];
  }
  return answers;
}

// Sequences that generate together. Writes to `answers` when all have succeeded.
void Comparison::State::answer_wave(std::vector<Job>& jobs, const std::vector<TokenId>& question,
                                    const ComparisonOptions& options,
                                    const std::vector<Start>& from,
                                    std::vector<SettingAnswer>& answers) {
  const bool generates = options.max_new_tokens > 0 || !options.continuation.empty();
  const bool by_logits = !options.sampling.is_plain() || !options.continuation.empty();
  Borrowed owner(*engine, jobs.size());
  std::vector<Job*> first;  // of each setting; further tries are its forks
  std::vector<double> prune_seconds(jobs.size(), 0);
  for (std::size_t j = 0; j < jobs.size(); ++j) {
    Job& job = jobs[j];
    if (!first.empty() && first.back()->setting == job.setting) continue;
    first.push_back(&job);
    const Stopwatch watch(prune_seconds[j]);
    const LoadedPruning& setting = settings[job.setting];
    const Start& start = from[job.setting];
    const bool is_pruned = prefill_share(setting) == PrefillShare::none;
    job.sequence =
        owner.add(is_pruned ? engine->fork(start.sequence)
                            : engine->prune(start.sequence, setting, start.scores.get()));
    job.result = start.next;
  }
  if (!question.empty()) {
    StepBatch step;
    const StepOutput output = !generates  ? StepOutput::none
                              : by_logits ? StepOutput::logits
                                          : StepOutput::argmax;
    for (const Job* const job : first) {
      step.add(job->sequence, question, engine->rule(job->sequence, StepPart::question), output);
    }
    double seconds = 0;
    {
      const Stopwatch watch(seconds);
      auto results = engine->step(step);
      for (std::size_t i = 0; i < first.size(); ++i) first[i]->result = std::move(results[i]);
    }
    for (Job* const job : first) job->decode_seconds += seconds / static_cast<double>(first.size());
  }
  std::vector<CacheReport> reports = reports_of(first);
  const Job* source = nullptr;
  for (Job& job : jobs) {
    if (job.sequence >= 0) {
      source = &job;
      continue;
    }
    job.sequence = owner.add(engine->fork(source->sequence));
    job.result = source->result;
  }
  if (generates) generate(jobs, options, owner);

  for (std::size_t j = 0; j < jobs.size(); ++j) {
    Job& job = jobs[j];
    SettingAnswer& answer = answers[job.setting];
    answer.tokens.push_back(std::move(job.tokens));
    answer.stop_reasons.push_back(job.reason);
    answer.decode_seconds += job.decode_seconds;
    if (job.attempt > 0) continue;
    const auto place = std::find(first.begin(), first.end(), &job) - first.begin();
    answer.pruned = std::move(reports[static_cast<std::size_t>(place)]);
    answer.pruned.prune_seconds = prune_seconds[j];
    answer.cache = generates ? std::move(job.cache) : answer.pruned;
    answer.log_probabilities = std::move(job.log_probabilities);
  }
}

// Takes the next token of each active sequence.
void Comparison::State::take_tokens(std::vector<Job*>& active, const ComparisonOptions& options,
                                    std::vector<Sampler>& samplers, const Job* first) {
  const bool draws = !options.sampling.is_plain();
  std::vector<TokenId> next(active.size());
  std::vector<double> log_probabilities(options.continuation.empty() ? 0 : active.size());
  for (std::size_t i = 0; i < active.size(); ++i) {
    const StepResult& result = active[i]->result;
    if (!options.continuation.empty()) {
      next[i] = options.continuation[active[i]->tokens.size()];
      if (!comm().is_root()) continue;
      log_probabilities[i] = log_probability(result.logits, next[i]);
      if (std::isnan(log_probabilities[i])) next[i] = -1;
    } else if (!draws) {
      next[i] = result.argmax;
    } else if (comm().is_root()) {
      next[i] = samplers[static_cast<std::size_t>(active[i] - first)](result.logits);
    }
  }
  if (draws || !options.continuation.empty()) {
    comm().broadcast(next.data(), next.size() * sizeof(TokenId), 0);
    comm().broadcast(log_probabilities.data(), log_probabilities.size() * sizeof(double), 0);
  }
  for (std::size_t i = 0; i < active.size(); ++i) {
    Job& job = *active[i];
    if (next[i] < 0) {
      throw AgreedError(fmt::format(
          "policy {}: the logits are not finite: weights or activations overflow (try dtype bf16 "
          "or f32, or check the checkpoint)",
          name_of(settings[job.setting])));
    }
    job.tokens.push_back(next[i]);
    samplers[static_cast<std::size_t>(active[i] - first)].append(next[i]);
    if (!log_probabilities.empty()) job.log_probabilities.push_back(log_probabilities[i]);
  }
}

// Generates one token after the other for all sequences; finished sequences leave.
void Comparison::State::generate(std::vector<Job>& jobs, const ComparisonOptions& options,
                                 Borrowed& owner) {
  const bool is_given = !options.continuation.empty();
  const auto most =
      is_given ? static_cast<std::int64_t>(options.continuation.size()) : options.max_new_tokens;
  const bool by_logits = is_given || !options.sampling.is_plain();
  std::vector<Sampler> samplers;
  std::vector<Job*> active;
  for (Job& job : jobs) {
    SamplingOptions sampling = options.sampling;
    sampling.seed += static_cast<std::uint64_t>(job.attempt);
    samplers.emplace_back(sampling);
    samplers.back().append_prompt(context);
    samplers.back().append_prompt(asked);
    active.push_back(&job);
  }
  const auto has_ended = [&](Job& job) {
    const bool stops = !is_given && std::find(options.stop_ids.begin(), options.stop_ids.end(),
                                              job.tokens.back()) != options.stop_ids.end();
    if (stops) {
      job.reason = StopReason::stop_id;
    } else if (static_cast<std::int64_t>(job.tokens.size()) < most) {
      // The last token that fits still gets a successor, but that successor does not run.
      if (options.max_tokens == 0 || engine->tokens(job.sequence) < options.max_tokens) {
        return false;
      }
      job.reason = StopReason::context_full;
    }
    return true;
  };
  const auto leave = [&](const std::vector<Job*>& ended) {
    std::vector<Job*> first;  // tries; one of them is reported
    std::copy_if(ended.begin(), ended.end(), std::back_inserter(first),
                 [](const Job* job) { return job->attempt == 0; });
    if (!first.empty()) {
      std::vector<CacheReport> reports = reports_of(first);
      for (std::size_t i = 0; i < first.size(); ++i) first[i]->cache = std::move(reports[i]);
    }
    for (const Job* const job : ended) owner.free(job->sequence);
  };
  StepBatch step;
  while (true) {
    take_tokens(active, options, samplers, jobs.data());
    const auto ended = std::stable_partition(active.begin(), active.end(),
                                             [&](Job* job) { return !has_ended(*job); });
    leave({ended, active.end()});
    active.erase(ended, active.end());
    if (active.empty()) return;
    double seconds = 0;
    {
      const Stopwatch watch(seconds);
      step.clear();
      for (const Job* const job : active) {
        step.add(job->sequence, {job->tokens.back()},
                 engine->rule(job->sequence, StepPart::generated),
                 by_logits ? StepOutput::logits : StepOutput::argmax);
      }
      auto results = engine->step(step);
      for (std::size_t i = 0; i < active.size(); ++i) active[i]->result = std::move(results[i]);
    }
    for (Job* const job : active) {
      job->decode_seconds += seconds / static_cast<double>(active.size());
    }
  }
}

}  // namespace kvzap
