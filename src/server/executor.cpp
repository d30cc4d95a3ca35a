#include <kvzap/server/executor.hpp>

#include "parallel/meet_asleep.hpp"
#include "server/plan.hpp"

namespace kvzap::server {

Executor::Executor(Engine& engine, Load load, TraitsOf traits, EngineSet::Make make)
    : m_engines(engine, std::move(make)),
      m_standard(engine.options().pruning),
      m_load(std::move(load)),
      m_traits(std::move(traits)) {
  m_standard.mode = engine.options().mode();
  if (!m_traits) m_traits = [this](const Pruning& pruning) { return traits_of(pruning); };
}

Executor::~Executor() = default;

/// As the engine decides for a sequence (Engine::can_hold, check_more_context).
Executor::Traits Executor::traits_of(const Pruning& pruning) const {
  Traits traits;
  LoadedPruning loaded;
  loaded.pruning = pruning;
  if (pruning.prunes()) loaded = load(pruning);
  PageFormat packed;
  packed.keys = packed.values = RowType::q8;
  traits.drafts = engine().why_no_drafts(loaded, {}).empty();
  traits.drafts_packed = engine().why_no_drafts(loaded, packed).empty();
  if (!pruning.prunes()) return traits;
  engine().check(loaded);
  if (!loaded.policy || loaded.is_judged_by_scorer()) return traits;
  const PolicyChoice& choice = *loaded.policy;
  traits.why_one = choice.info->repeats_context
                       ? "it has the model run the context again as a whole"
                       : choice.why_once;
  traits.holds = false;
  traits.takes_parts = engine().takes_parts(loaded);
  traits.goes_on = pruning.prefill == PrefillMode::sparse && traits.why_one.empty() &&
                   choice.info->scores_again && !choice.info->has_own_budget && !choice.rerotate;
  traits.answers_go_on = pruning.decode.every > 0 || !choice.make()->needs().every_step;
  return traits;
}

LoadedPruning Executor::load(const Pruning& pruning) const {
  return m_load ? m_load(pruning) : engine().options().with_amount_of(pruning);
}

void Executor::create(const PlannedSequence& wanted) {
  if (wanted.source >= 0) {
    const Held source = m_sequences.at(wanted.source);
    const SequenceId made = m_engines.within_limit(*source.engine, [&] {
      return wanted.tokens < 0 ? source.engine->fork(source.id)
                               : source.engine->fork_beginning(source.id, wanted.tokens);
    });
    m_sequences[wanted.handle] = {source.engine, made};
    return;
  }
  Engine& engine = m_engines.of(wanted.page_format.value_or(this->engine().options().page_format));
  const SequenceId made = m_engines.within_limit(engine, [&] { return engine.add_sequence(); });
  if (wanted.pruning && *wanted.pruning != m_standard) {
    try {
      engine.set_pruning(made, load(*wanted.pruning));
    } catch (...) {
      engine.free_sequence(made);
      throw;
    }
  }
  m_sequences[wanted.handle] = {&engine, made};
}

/// Makes a sequence of a stored state.
void Executor::read(const PlannedSequence& wanted, Outcome& outcome) {
  try {
    std::optional<SnapshotReader> reader;
    std::optional<LoadedPruning> own;
    this->engine().communicator().agree([&] {
      reader.emplace(wanted.file);
      if (wanted.pruning && *wanted.pruning != m_standard) own = load(*wanted.pruning);
    });
    Engine& engine =
        m_engines.of(wanted.page_format.value_or(this->engine().options().page_format));
    const SequenceId made = m_engines.within_limit(
        engine, [&] { return engine.resume(*reader, own ? &*own : nullptr).sequence; });
    m_sequences[wanted.handle] = {&engine, made};
  } catch (const AgreedOutOfMemory&) {
    outcome.not_made.push_back(wanted.handle);
  } catch (const AgreedError& error) {
    outcome.not_read[wanted.handle] = error.what();
  }
}

/// Begins to write a sequence, or continues with one.
void Executor::store(const Plan& plan, Outcome& outcome) {
  try {
    if (plan.stores) {
      const Held& held = m_sequences.at(plan.stores->handle);
      const std::shared_ptr<const SnapshotInfo> info = plan.stores->info;
      m_writing = held.engine->begin_snapshot(plan.stores->file, info ? *info : SnapshotInfo(), {},
                                              held.id);
    } else if (m_writing && plan.advances && m_writing->advance()) {
      outcome.has_stored = true;
      outcome.store_notes = m_writing->notes();
      m_writing.reset();
    }
  } catch (const AgreedError& error) {
    outcome.store_failure = error.what();
    m_writing.reset();
  }
}

void Executor::free(int handle) {
  const Held& held = m_sequences.at(handle);
  held.engine->free_sequence(held.id);
  m_sequences.erase(handle);
}

/// Forks a sequence. Without memory returns false.
bool Executor::fork(int handle, int source, Outcome& outcome) {
  try {
    create({handle, source, {}, {}, -1});
  } catch (const AgreedOutOfMemory&) {
    outcome.not_kept.push_back(handle);
    return false;
  }
  return true;
}

void Executor::end_context(const PlannedSpan& span, Outcome& outcome) {
  const auto& [engine, sequence] = m_sequences.at(span.handle);
  if (span.part != StepPart::held) return engine->end_context(sequence);
  const bool has_spare = span.spare_as >= 0 && fork(span.spare_as, span.handle, outcome);
  try {
    engine->judge_context(sequence);
  } catch (const AgreedOutOfMemory&) {
    if (!has_spare) throw;
    // Rows that stay need pages of their own beside the spare state. Without it they do not.
    free(span.spare_as);
    outcome.not_kept.push_back(span.spare_as);
    engine->judge_context(sequence);
  }
}

StepRule Executor::rule_of(const PlannedSpan& span) const {
  const Held& held = m_sequences.at(span.handle);
  StepRule rule = held.engine->rule(held.id, span.part);
  rule.context_follows = span.context_follows;
  return rule;
}

void Executor::step(const Plan& plan, Outcome& outcome) {
  Engine& engine = *m_sequences.at(plan.spans.front().handle).engine;
  m_batch.clear();
  for (const PlannedSpan& span : plan.spans) {
    m_batch.add(m_sequences.at(span.handle).id, span.tokens, rule_of(span), span.output,
                span.draws);
  }
  try {
    outcome.results =
        m_engines.within_limit<StepOutOfMemory>(engine, [&] { return engine.step(m_batch); });
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
      if (!has_memory) m_engines.trim();  // for the next attempt, by whatever engine
      outcome.lost.push_back(span.handle);
      if (span.keep_as >= 0) outcome.not_kept.push_back(span.keep_as);
      continue;
    }
    if (span.keep_as >= 0) fork(span.keep_as, span.handle, outcome);
  }
}

/// Returns the reports of sequences, with one communication for each engine.
std::vector<CacheReport> Executor::report(const std::vector<int>& handles) const {
  std::vector<CacheReport> reports(handles.size());
  for (Engine* const engine : m_engines.all()) {
    std::vector<SequenceId> ids;
    std::vector<std::size_t> places;
    for (std::size_t i = 0; i < handles.size(); ++i) {
      const Held& held = m_sequences.at(handles[i]);
      if (held.engine != engine) continue;
      ids.push_back(held.id);
      places.push_back(i);
    }
    if (ids.empty()) continue;
    std::vector<CacheReport> own = engine->reports(ids);
    for (std::size_t i = 0; i < own.size(); ++i) reports[places[i]] = std::move(own[i]);
  }
  return reports;
}

TokenRows Executor::count(int handle) const {
  const Held& held = m_sequences.at(handle);
  try {
    return held.engine->token_rows(held.id);
  } catch (const AgreedOutOfMemory&) {
    return {};
  }
}

Outcome Executor::operator()(const Plan& plan) {
  Outcome outcome;
  for (const PlannedTakeBack& taken : plan.take_backs) {
    const Held& held = m_sequences.at(taken.handle);
    held.engine->take_back(held.id, taken.tokens);
  }
  outcome.reports = report(plan.reports);
  for (const int handle : plan.counts) outcome.counts.push_back(count(handle));
  for (const int handle : plan.frees) free(handle);
  if (plan.trims) m_engines.trim();
  for (const PlannedSequence& wanted : plan.creates) {
    if (!wanted.file.empty()) {
      read(wanted, outcome);
      continue;
    }
    try {
      create(wanted);
    } catch (const AgreedOutOfMemory&) {
      outcome.not_made.push_back(wanted.handle);
    }
  }
  if (!plan.spans.empty() && outcome.not_made.empty()) step(plan, outcome);
  if (plan.stores || plan.advances) store(plan, outcome);
  if (plan.ends) m_writing.reset();  // collective
  return outcome;
}

void Executor::follow() {
  const Communicator& comm = engine().communicator();
  for (Plan plan; !plan.ends;) {
    if (plan.sleeps) parallel::meet_asleep(comm);
    share(plan, comm);
    (*this)(plan);
  }
}

}  // namespace kvzap::server
