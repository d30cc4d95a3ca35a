// Steps of an engine: a policy's part is planned before, and cuts follow.
#include <algorithm>

#include "engine/engine_parts.hpp"

namespace kvzap {

using engine::SequenceState;

std::vector<StepResult> Engine::step(const StepBatch& batch, const ProgressCallback& progress) {
  const bool any = std::any_of(
      batch.spans().begin(), batch.spans().end(),
      [&](const StepBatch::Span& span) { return state_with_policy(span.sequence) != nullptr; });
  std::vector<StepResult> results;
  const auto run = [&] {
    if (!any) {
      results = m_parts->decoder.step(batch, progress);
      return;
    }
    plan(batch);
    // Policies see all rows of a head.
    try {
      for (const StepBatch::Span& span : m_parts->batch.spans()) {
        if (span.rule.policy && !span.rule.policy->only_watches) gather_pages(span.sequence);
      }
    } catch (const AgreedOutOfMemory& error) {
      begin_policies_anew();
      throw StepOutOfMemory(error.what());
    }
    or_begin_anew([&] { results = m_parts->decoder.step(m_parts->batch, progress); });
    finish();
  };
  try {
    run();
  } catch (const StepOutOfMemory&) {
    // Ranks whose heads are fewer have less memory: pages of other ranks' heads make room for the
    // new rows of their own.
    engine::PagePlacement& placement = m_parts->decoder.placement();
    if (placement.is_plain()) throw;
    for (const auto& [sequence, state] : m_parts->states) {
      try {
        gather_pages(sequence);
      } catch (const AgreedOutOfMemory&) {
        continue;  // the owner has less room than the ranks that hold its pages
      }
    }
    placement.trim();
    m_parts->keeps_pages = true;
    run();
  }
  balance(batch);
  return results;
}

bool Engine::is_pinned(SequenceId sequence) {
  const auto found = m_parts->pins.find(sequence);
  if (found == m_parts->pins.end()) return false;
  auto& pins = found->second;
  pins.erase(
      std::remove_if(pins.begin(), pins.end(), [](const auto& pin) { return pin.expired(); }),
      pins.end());
  return !pins.empty();
}

void Engine::balance(const StepBatch& batch) {
  if (communicator().size() == 1 || options().balance <= 0 || m_parts->keeps_pages) return;
  // A decode step adds at most one row to a head.
  const bool is_long = batch.tokens().size() > batch.spans().size();
  if (!is_long && --m_parts->until_balance > 0) return;
  m_parts->until_balance = options().page_rows;
  std::vector<SequenceId> sequences;
  for (const StepBatch::Span& span : batch.spans()) {
    // A policy that sees each part of a context would call the pages back at once.
    if (engine::is_context(span.rule.part) && state_with_policy(span.sequence)) continue;
    sequences.push_back(span.sequence);
  }
  balance(std::move(sequences));
}

void Engine::balance(std::vector<SequenceId> sequences) {
  if (communicator().size() == 1 || options().balance <= 0) return;
  std::vector<std::int64_t> pinned;
  for (const SequenceId sequence : sequences) pinned.push_back(is_pinned(sequence) ? 1 : 0);
  communicator().all_reduce_max(pinned.data(), pinned.size());
  for (std::size_t i = sequences.size(); i-- > 0;) {
    if (pinned[i] != 0) sequences.erase(sequences.begin() + static_cast<std::ptrdiff_t>(i));
  }
  constexpr std::int64_t most_bytes = std::int64_t{64} << 20;
  const std::int64_t before = m_parts->decoder.placement().pages_moved();
  m_parts->decoder.placement().balance(sequences, options().balance, most_bytes);
  // Soon again while pages move: one call may not suffice.
  if (m_parts->decoder.placement().pages_moved() > before) {
    m_parts->until_balance = std::min<std::int64_t>(m_parts->until_balance, 8);
  }
}

void Engine::begin_step(const StepBatch& batch) {
  for (const StepBatch::Span& span : batch.spans()) {
    const SequenceState* const state = state_with_policy(span.sequence);
    if (state && state->pruning->policy->info->repeats_context) {
      throw Error("policy " + state->pruning->policy->name +
                  ": the model would have to repeat the context, and runs outside of the engine");
    }
  }
  plan(batch);
  or_begin_anew([&] { m_parts->decoder.begin_step(m_parts->batch); });
}

void Engine::attend(int layer, const std::vector<ExternalLayer>& spans) {
  or_begin_anew([&] { m_parts->decoder.attend(layer, spans); });
}

void Engine::end_step() {
  m_parts->decoder.end_step();
  finish();
}

void Engine::cancel_step() {
  m_parts->decoder.cancel_step();
  begin_policies_anew();
}

void Engine::plan(const StepBatch& batch) {
  if (m_parts->decoder.cache().in_step()) throw Error("engine: a step has begun already");
  m_parts->batch = batch;
  for (std::size_t s = 0; s < batch.spans().size(); ++s) plan(s);
}

void Engine::begin_policies_anew() {
  for (const StepBatch::Span& span : m_parts->batch.spans()) {
    if (SequenceState* const state = planned(span)) state->policy = state->pruning->policy->make();
  }
  m_parts->batch.clear();
}

void Engine::finish() {
  for (const StepBatch::Span& span : m_parts->batch.spans()) {
    SequenceState* const state = state_with_policy(span.sequence);
    if (!state) continue;
    if (span.rule.part == StepPart::context && state->pruning->policy->info->repeats_context) {
      const auto first = m_parts->batch.tokens().begin() + span.first;
      state->context.insert(state->context.end(), first, first + span.count);
    }
    if (span.rule.part == StepPart::question || span.rule.part == StepPart::generated) {
      ++state->steps;
    }
    if (planned(span)) finish(span);
  }
}

engine::SequenceState* Engine::planned(const StepBatch::Span& span) {
  SequenceState* const state = state_with_policy(span.sequence);
  return state && span.rule.policy == &state->step ? state : nullptr;
}

}  // namespace kvzap
