#include <kvzap/server/executor.hpp>

#include "parallel/meet_asleep.hpp"
#include "server/plan.hpp"

namespace kvzap::server {

Executor::Executor(Engine& engine, const Setting& standard, Settings settings, TraitsOf traits)
    : m_engine(engine),
      m_standard(standard),
      m_settings(std::move(settings)),
      m_traits(std::move(traits)) {}

void Executor::create(const PlannedSequence& create) {
  Sequence sequence;
  if (create.source >= 0) {
    const Sequence& source = m_sequences.at(create.source);
    sequence = {m_engine.fork(source.id), source.setting};
  } else {
    sequence = {m_engine.add_sequence(), create.setting};
    if (!(create.setting == m_standard)) {
      try {
        m_engine.set_pruning(sequence.id, m_settings(create.setting));
      } catch (...) {
        m_engine.free_sequence(sequence.id);
        throw;
      }
    }
  }
  m_sequences[create.handle] = sequence;
}

void Executor::free(int handle) {
  m_engine.free_sequence(m_sequences.at(handle).id);
  m_sequences.erase(handle);
}

StepRule Executor::rule_of(const PlannedSpan& span) const {
  return m_engine.rule(m_sequences.at(span.handle).id, span.part);
}

void Executor::step(const Plan& plan, Outcome& outcome) {
  m_batch.clear();
  for (const PlannedSpan& span : plan.spans) {
    m_batch.add(m_sequences.at(span.handle).id, span.tokens, rule_of(span), span.output);
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
    const Sequence& sequence = m_sequences.at(span.handle);
    try {
      if (span.ends_context && span.part == StepPart::held) m_engine.judge_context(sequence.id);
      if (span.ends_context && span.part != StepPart::held) m_engine.end_context(sequence.id);
    } catch (const AgreedError&) {
      free(span.handle);
      outcome.lost.push_back(span.handle);
      if (span.keep_as >= 0) outcome.not_kept.push_back(span.keep_as);
      continue;
    }
    if (span.keep_as < 0) continue;
    try {
      create({span.keep_as, span.handle, {}});
    } catch (const AgreedOutOfMemory&) {
      outcome.not_kept.push_back(span.keep_as);
    }
  }
}

Outcome Executor::operator()(const Plan& plan) {
  Outcome outcome;
  if (!plan.reports.empty()) {
    std::vector<SequenceId> ids;
    for (const int handle : plan.reports) ids.push_back(m_sequences.at(handle).id);
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
    if (plan.sleeps) detail::meet_asleep(comm);
    share(plan, comm);
    (*this)(plan);
  }
}

}  // namespace kvzap::server
