#include <kvzap/server/executor.hpp>

#include "parallel/meet_asleep.hpp"
#include "server/plan.hpp"

namespace kvzap::server {

Executor::Executor(Engine& engine, Load load, TraitsOf traits)
    : m_engine(engine),
      m_standard(engine.options().pruning),
      m_load(std::move(load)),
      m_traits(std::move(traits)) {
  m_standard.mode = engine.options().mode();
  if (!m_traits) m_traits = [this](const Pruning& pruning) { return traits_of(pruning); };
}

/// As the engine decides for a sequence (Engine::can_hold, check_more_context).
Executor::Traits Executor::traits_of(const Pruning& pruning) const {
  Traits traits;
  if (!pruning.prunes()) return traits;
  const LoadedPruning loaded = load(pruning);
  m_engine.check(loaded);
  if (!loaded.policy || loaded.is_judged_by_scorer()) return traits;
  const PolicyChoice& choice = *loaded.policy;
  traits.repeats = choice.info->repeats_context;
  traits.holds = false;
  traits.goes_on = pruning.prefill == PrefillMode::sparse && !choice.info->repeats_context &&
                   choice.info->scores_again && !choice.info->has_own_budget && !choice.rerotate;
  return traits;
}

LoadedPruning Executor::load(const Pruning& pruning) const {
  return m_load ? m_load(pruning) : m_engine.options().with_amount_of(pruning);
}

void Executor::create(const PlannedSequence& wanted) {
  if (wanted.source >= 0) {
    const SequenceId source = m_sequences.at(wanted.source);
    m_sequences[wanted.handle] =
        wanted.tokens < 0 ? m_engine.fork(source) : m_engine.fork_beginning(source, wanted.tokens);
    return;
  }
  const SequenceId sequence = m_engine.add_sequence();
  if (wanted.pruning && *wanted.pruning != m_standard) {
    try {
      m_engine.set_pruning(sequence, load(*wanted.pruning));
    } catch (...) {
      m_engine.free_sequence(sequence);
      throw;
    }
  }
  m_sequences[wanted.handle] = sequence;
}

void Executor::free(int handle) {
  m_engine.free_sequence(m_sequences.at(handle));
  m_sequences.erase(handle);
}

/// Forks a sequence. Without memory returns false.
bool Executor::fork(int handle, int source, Outcome& outcome) {
  try {
    create({handle, source, {}, -1});
  } catch (const AgreedOutOfMemory&) {
    outcome.not_kept.push_back(handle);
    return false;
  }
  return true;
}

void Executor::end_context(const PlannedSpan& span, Outcome& outcome) {
  const SequenceId sequence = m_sequences.at(span.handle);
  if (span.part != StepPart::held) return m_engine.end_context(sequence);
  const bool has_spare = span.spare_as >= 0 && fork(span.spare_as, span.handle, outcome);
  try {
    m_engine.judge_context(sequence);
  } catch (const AgreedOutOfMemory&) {
    if (!has_spare) throw;
    // Rows that stay need pages of their own beside the spare state. Without it they do not.
    free(span.spare_as);
    outcome.not_kept.push_back(span.spare_as);
    m_engine.judge_context(sequence);
  }
}

StepRule Executor::rule_of(const PlannedSpan& span) const {
  return m_engine.rule(m_sequences.at(span.handle), span.part);
}

void Executor::step(const Plan& plan, Outcome& outcome) {
  m_batch.clear();
  for (const PlannedSpan& span : plan.spans) {
    m_batch.add(m_sequences.at(span.handle), span.tokens, rule_of(span), span.output);
  }
  try {
    outcome.results = m_engine.step(m_batch);
  } catch (const StepOutOfMemory&) {
    outcome.out_of_memory = true;
    return;
  } catch (const AgreedError& error) {
    // A policy's cut after the step failed, and some layers may have been cut already.
    outcome.failure = error.what();
    for (const PlannedSpan& span : plan.spans) {
      free(span.handle);
      outcome.lost.push_back(span.handle);
      if (span.keep_as >= 0) outcome.not_kept.push_back(span.keep_as);
    }
    return;
  }
  for (const PlannedSpan& span : plan.spans) {
    try {
      if (span.ends_context) end_context(span, outcome);
    } catch (const AgreedError& error) {
      const bool has_memory = dynamic_cast<const AgreedOutOfMemory*>(&error) == nullptr;
      if (has_memory) outcome.failures[span.handle] = error.what();
      free(span.handle);
      outcome.lost.push_back(span.handle);
      if (span.keep_as >= 0) outcome.not_kept.push_back(span.keep_as);
      continue;
    }
    if (span.keep_as >= 0) fork(span.keep_as, span.handle, outcome);
  }
}

Outcome Executor::operator()(const Plan& plan) {
  Outcome outcome;
  if (!plan.reports.empty()) {
    std::vector<SequenceId> ids;
    for (const int handle : plan.reports) ids.push_back(m_sequences.at(handle));
    outcome.reports = m_engine.reports(ids);
  }
  for (const int handle : plan.frees) free(handle);
  if (plan.trims) m_engine.trim();
  for (const PlannedSequence& wanted : plan.creates) {
    try {
      create(wanted);
    } catch (const AgreedOutOfMemory&) {
      outcome.not_made.push_back(wanted.handle);
    }
  }
  if (!plan.spans.empty() && outcome.not_made.empty()) step(plan, outcome);
  return outcome;
}

void Executor::follow() {
  const Communicator& comm = m_engine.communicator();
  for (Plan plan; !plan.ends;) {
    if (plan.sleeps) parallel::meet_asleep(comm);
    share(plan, comm);
    (*this)(plan);
  }
}

}  // namespace kvzap::server
