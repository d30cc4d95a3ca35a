#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <kvzap/engine/comparison.hpp>
#include <numeric>
#include <optional>

#include "base/host_threads.hpp"
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
  StepResult result;                 // of the last step
  std::int64_t predicted = 0;        // tokens of a continuation whose logits `result` has
  std::optional<Continuation> said;  // if tokens are generated
  std::vector<TokenId> tokens;       // of the answer, or of the continuation so far
  std::vector<double> log_probabilities;
  StopReason reason = StopReason::max_new_tokens;
  CacheReport cache;  // at the end
  double decode_seconds = 0;
};

/// Returns whether the question decides what a setting evicts.
bool reads_question(const LoadedPruning& setting) {
  return prunes(setting) && setting.pruning.moment == PruneMoment::question;
}

// Returns whether new tokens of a setting's sequence may run together: nothing is evicted between
// two of them.
bool reads_chunks(const LoadedPruning& setting) {
  return !prunes(setting) ||
         (setting.pruning.mode != PruneMode::always && setting.pruning.decode.every == 0);
}

[[noreturn]] void reject_logits(const LoadedPruning& setting) {
  throw AgreedError(fmt::format(
      "policy {}: the logits are not finite: weights or activations overflow (try dtype bf16 "
      "or f32, or check the checkpoint)",
      name_of(setting)));
}

}  // namespace

PrefillShare prefill_share(const LoadedPruning& setting) {
  if (!prunes(setting)) return PrefillShare::context;
  // Later cuts need the newest queries and the rows' scores. A shared reading does not store them.
  const bool is_alone =
      setting.pruning.prefill == PrefillMode::sparse || setting.pruning.decode.every > 0;
  if (is_alone) return PrefillShare::none;
  return reads_question(setting) ? PrefillShare::whole : PrefillShare::context;
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
  void read_alone(std::size_t setting, const std::vector<TokenId>& question, Borrowed& owner,
                  Start& start, const ProgressCallback& progress);
  StepResult run_context(SequenceId sequence, const Pruning& pruning,
                         const ProgressCallback& progress);
  void find_argmax(StepResult& result) const;
  std::vector<CacheReport> reports_of(const std::vector<Job*>& jobs) const;
  void answer_wave(std::vector<Job>& jobs, const std::vector<TokenId>& question,
                   const ComparisonOptions& options, const std::vector<Start>& from,
                   std::vector<SettingAnswer>& answers);
  void generate(std::vector<Job>& jobs, const ComparisonOptions& options, Borrowed& owner);
  void measure_likelihoods(std::vector<Job>& jobs, const ComparisonOptions& options,
                           Borrowed& owner);
  void take_tokens(const std::vector<Job*>& active);
  void take_likelihoods(const std::vector<Job*>& read, const std::vector<TokenId>& given);
  void finish(std::vector<Job*>& active, std::vector<Job*>::iterator ended, Borrowed& owner) const;
  void run(const StepBatch& step, const std::vector<Job*>& active);
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
    if (setting.pruning.decode.every > 0 && setting.pruning.moment == PruneMoment::question) {
      throw Error(
          fmt::format("{}: cuts while the answer is generated follow a context that is "
                      "pruned before the question",
                      name_of(setting)));
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

// Runs the context, or context and question, of a setting that shares no reading.
void Comparison::State::read_alone(std::size_t setting, const std::vector<TokenId>& question,
                                   Borrowed& owner, Start& start,
                                   const ProgressCallback& progress) {
  start = Start();
  start.sequence = owner.add(engine->add_sequence());
  engine->set_pruning(start.sequence, settings[setting]);
  const CacheReport before = engine->report(start.sequence);
  {
    const Stopwatch watch(start.prefill_seconds);
    start.next = reads_question(settings[setting])
                     ? engine->run_with_question(start.sequence, context, question,
                                                 StepOutput::logits, {}, progress)
                     : run_context(start.sequence, settings[setting].pruning, progress);
  }
  find_argmax(start.next);
  comm().all_reduce_max(&start.prefill_seconds, 1);
  const CacheReport after = engine->report(start.sequence);
  start.score_seconds = after.score_seconds - before.score_seconds;
  start.prune_seconds = after.prune_seconds - before.prune_seconds;
}

StepResult Comparison::State::run_context(SequenceId sequence, const Pruning& pruning,
                                          const ProgressCallback& progress) {
  const auto count = static_cast<std::int64_t>(context.size());
  const std::int64_t chunk =
      pruning.prefill == PrefillMode::sparse ? std::min(pruning.chunk, count) : count;
  const StepRule rule = engine->rule(sequence, StepPart::context);
  StepResult next;
  for (std::int64_t begin = 0; begin < count; begin += chunk) {
    const std::int64_t end = std::min(count, begin + chunk);
    const auto of_chunk = [&](std::string_view what, std::int64_t done, std::int64_t total) {
      // In tokens, so that chunks add up independently of their inner steps.
      if (progress) progress(what, begin + (end - begin) * done / total, count);
    };
    const StepBatch step(sequence, {context.begin() + begin, context.begin() + end}, rule,
                         end == count ? StepOutput::logits : StepOutput::none);
    next = std::move(engine->step(step, of_chunk).front());
  }
  engine->end_context(sequence, progress);
  return next;
}

void Comparison::prefill(const std::vector<TokenId>& context, const ProgressCallback& progress) {
  State& state = *m_state;
  if (context.empty()) throw Error("the context is empty; expected at least one token");
  state.forget();
  try {
    state.context = context;
    state.read(context, 0, PrefillShare::context, state.kept, state.starts, progress);
    for (std::size_t s = 0; s < state.settings.size(); ++s) {
      if (prefill_share(state.settings[s]) != PrefillShare::none) continue;
      if (reads_question(state.settings[s])) continue;
      state.read_alone(s, {}, state.kept, state.starts[s], progress);
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
      const bool is_whole = reads_question(state.settings[s]);
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

  Borrowed owner(*state.engine, answers.size() + 1);
  std::vector<Start> whole(answers.size());
  std::vector<TokenId> tokens = state.context;
  tokens.insert(tokens.end(), question.begin(), question.end());
  state.read(tokens, static_cast<std::int64_t>(question.size()), PrefillShare::whole, owner, whole,
             progress);
  for (std::size_t s = 0; s < answers.size(); ++s) {
    if (prefill_share(state.settings[s]) != PrefillShare::none) continue;
    if (reads_question(state.settings[s])) {
      state.read_alone(s, question, owner, whole[s], progress);
    }
  }
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
    const bool is_whole = reads_question(state.settings[s]);
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
  if (!options.continuation.empty()) {
    measure_likelihoods(jobs, options, owner);
  } else if (generates) {
    generate(jobs, options, owner);
  }

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
void Comparison::State::take_tokens(const std::vector<Job*>& active) {
  const bool draws = active.front()->said->output() == StepOutput::logits;
  std::vector<TokenId> next(active.size());
  for (std::size_t i = 0; i < active.size(); ++i) {
    Job& job = *active[i];
    if (!draws || comm().is_root()) next[i] = job.said->draw(job.result);
  }
  if (draws) comm().broadcast(next.data(), next.size() * sizeof(TokenId), 0);
  for (std::size_t i = 0; i < active.size(); ++i) {
    if (next[i] < 0) reject_logits(settings[active[i]->setting]);
    active[i]->said->append(next[i]);
  }
}

// Reports the sequences from `ended` on, and frees them.
void Comparison::State::finish(std::vector<Job*>& active, std::vector<Job*>::iterator ended,
                               Borrowed& owner) const {
  std::vector<Job*> first;  // tries; one of them is reported
  std::copy_if(ended, active.end(), std::back_inserter(first),
               [](const Job* job) { return job->attempt == 0; });
  if (!first.empty()) {
    std::vector<CacheReport> reports = reports_of(first);
    for (std::size_t i = 0; i < first.size(); ++i) first[i]->cache = std::move(reports[i]);
  }
  for (auto job = ended; job != active.end(); ++job) owner.free((*job)->sequence);
  active.erase(ended, active.end());
}

// Runs a step of the active sequences, in their order.
void Comparison::State::run(const StepBatch& step, const std::vector<Job*>& active) {
  double seconds = 0;
  {
    const Stopwatch watch(seconds);
    auto results = engine->step(step);
    for (std::size_t i = 0; i < active.size(); ++i) active[i]->result = std::move(results[i]);
  }
  for (Job* const job : active) {
    job->decode_seconds += seconds / static_cast<double>(active.size());
  }
}

// Generates one token after the other for all sequences; finished sequences leave.
void Comparison::State::generate(std::vector<Job>& jobs, const ComparisonOptions& options,
                                 Borrowed& owner) {
  std::vector<Job*> active;
  for (Job& job : jobs) {
    SamplingOptions sampling = options.sampling;
    sampling.seed += static_cast<std::uint64_t>(job.attempt);
    job.said.emplace(sampling, options);
    job.said->append_prompt(context);
    job.said->append_prompt(asked);
    active.push_back(&job);
  }
  const auto has_ended = [&](Job& job) {
    const auto end = job.said->end(engine->tokens(job.sequence));
    if (!end) return false;
    job.reason = *end;
    job.tokens = job.said->tokens();
    return true;
  };
  StepBatch step;
  while (true) {
    take_tokens(active);
    finish(active,
           std::stable_partition(active.begin(), active.end(),
                                 [&](Job* job) { return !has_ended(*job); }),
           owner);
    if (active.empty()) return;
    step.clear();
    for (const Job* const job : active) {
      const StepOutput output = job->said->output(engine->draws_tokens());
      step.add(job->sequence, {job->said->tokens().back()},
               engine->rule(job->sequence, StepPart::generated), output, job->said->draws(output));
    }
    run(step, active);
  }
}

// Records the likelihoods of the tokens that the last step of these sequences has predicted.
void Comparison::State::take_likelihoods(const std::vector<Job*>& read,
                                         const std::vector<TokenId>& given) {
  const std::int64_t vocabulary = engine->config().vocab_size;
  struct Row {
    const float* logits;
    TokenId token;
  };
  std::vector<Row> rows;
  for (const Job* const job : read) {
    const auto next = given.begin() + static_cast<std::ptrdiff_t>(job->tokens.size());
    for (std::int64_t r = 0; r < job->predicted; ++r) {
      const float* logits = comm().is_root() ? job->result.logits.data() + r * vocabulary : nullptr;
      rows.push_back({logits, next[r]});
    }
  }
  std::vector<double> values(rows.size());
  if (comm().is_root()) {
    base::for_each_on_threads(static_cast<std::int64_t>(rows.size()), [&](std::int64_t i) {
      values[i] = rows[i].logits[rows[i].token] - log_normalizer(rows[i].logits, vocabulary);
    });
  }
  comm().broadcast(values.data(), values.size() * sizeof(double), 0);
  std::size_t value = 0;
  for (Job* const job : read) {
    for (std::int64_t r = 0; r < job->predicted; ++r, ++value) {
      if (std::isnan(values[value])) reject_logits(settings[job->setting]);
      job->tokens.push_back(rows[value].token);
      job->log_probabilities.push_back(values[value]);
    }
    job->result = StepResult();
  }
}

// Measures the likelihood of the continuation for all sequences, as far as it fits into them.
void Comparison::State::measure_likelihoods(std::vector<Job>& jobs,
                                            const ComparisonOptions& options, Borrowed& owner) {
  const std::vector<TokenId>& given = options.continuation;
  std::vector<Job*> active;
  for (Job& job : jobs) {
    job.predicted = 1;
    active.push_back(&job);
  }
  take_likelihoods(active, given);
  // The tokens of a sequence that run together depend on the model alone, because quantised rows
  // do: a row is quantised after the step in which it leaves the window. A step takes as many
  // sequences as 32 MiB of logits allow.
  constexpr std::int64_t most_bytes = std::int64_t{32} << 20, most_tokens = 64;
  const auto row_bytes = static_cast<std::int64_t>(sizeof(float)) * engine->config().vocab_size;
  const std::int64_t most_rows = std::max<std::int64_t>(1, most_bytes / row_bytes);
  const std::int64_t chunk = std::min(most_rows, most_tokens);
  // Returns the number of tokens that a sequence reads next; 0: it has ended.
  const auto next_count = [&](Job& job) {
    // The last token has no successor whose probability is asked for.
    auto count = static_cast<std::int64_t>(given.size() - job.tokens.size());
    if (options.max_tokens > 0 && count > 0) {
      count = std::min(count, options.max_tokens - engine->tokens(job.sequence));
      if (count <= 0) job.reason = StopReason::context_full;
    }
    const std::int64_t most = reads_chunks(settings[job.setting]) ? chunk : 1;
    return std::max<std::int64_t>(0, std::min(count, most));
  };
  StepBatch step;
  while (true) {
    for (Job* const job : active) job->predicted = next_count(*job);
    finish(active,
           std::stable_partition(active.begin(), active.end(),
                                 [](const Job* job) { return job->predicted > 0; }),
           owner);
    if (active.empty()) return;
    for (auto begin = active.begin(); begin != active.end();) {
      step.clear();
      auto end = begin;
      for (std::int64_t rows = 0; end != active.end(); ++end) {
        rows += (*end)->predicted;
        if (end != begin && rows > most_rows) break;
        const Job& job = **end;
        const auto first = given.begin() + static_cast<std::ptrdiff_t>(job.tokens.size()) - 1;
        step.add(job.sequence, {first, first + job.predicted},
                 engine->rule(job.sequence, StepPart::generated), StepOutput::all_logits);
      }
      const std::vector<Job*> some(begin, end);
      run(step, some);
      take_likelihoods(some, given);
      begin = end;
    }
  }
}

}  // namespace kvzap
