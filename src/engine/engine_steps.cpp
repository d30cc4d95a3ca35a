// Steps of an engine: a policy's part is planned before, and cuts follow.
#include <algorithm>

#include "engine/typed_engine.hpp"

namespace kvzap::engine {

template <class Value>
std::vector<StepResult> TypedEngine<Value>::step(const StepBatch& batch,
                                                 const ProgressCallback& progress) {
  const bool any = std::any_of(
      batch.spans().begin(), batch.spans().end(),
      [&](const StepBatch::Span& span) { return state_with_policy(span.sequence) != nullptr; });
  if (!any) return m_decoder.step(batch, progress);
  plan(batch);
  std::vector<StepResult> results;
  or_begin_anew([&] { results = m_decoder.step(m_batch, progress); });
  finish();
  return results;
}

template <class Value>
void TypedEngine<Value>::begin_step(const StepBatch& batch) {
  for (const StepBatch::Span& span : batch.spans()) {
    const SequenceState* const state = state_with_policy(span.sequence);
    if (state && state->pruning->policy->info->repeats_context) {
      throw Error("policy " + state->pruning->policy->name +
                  ": the model would have to repeat the context, and runs outside of the engine");
    }
  }
  plan(batch);
  or_begin_anew([&] { m_decoder.begin_step(m_batch); });
}

template <class Value>
void TypedEngine<Value>::attend(int layer, const std::vector<ExternalLayer>& spans) {
  or_begin_anew([&] { m_decoder.attend(layer, spans); });
}

template <class Value>
void TypedEngine<Value>::end_step() {
  m_decoder.end_step();
  finish();
}

template <class Value>
void TypedEngine<Value>::cancel_step() {
  m_decoder.cancel_step();
  begin_policies_anew();
}

template <class Value>
void TypedEngine<Value>::plan(const StepBatch& batch) {
  if (m_decoder.cache().in_step()) throw Error("engine: a step has begun already");
  m_batch = batch;
  for (std::size_t s = 0; s < batch.spans().size(); ++s) plan(s);
}

template <class Value>
void TypedEngine<Value>::begin_policies_anew() {
  for (const StepBatch::Span& span : m_batch.spans()) {
    if (SequenceState* const state = planned(span)) state->policy = state->pruning->policy->make();
  }
  m_batch.clear();
}

template <class Value>
void TypedEngine<Value>::finish() {
  for (const StepBatch::Span& span : m_batch.spans()) {
    SequenceState* const state = state_with_policy(span.sequence);
    if (!state) continue;
    if (span.rule.part == StepPart::context && state->pruning->policy->info->repeats_context) {
      const auto first = m_batch.tokens().begin() + span.first;
      state->context.insert(state->context.end(), first, first + span.count);
    }
    if (span.rule.part == StepPart::question || span.rule.part == StepPart::generated) {
      ++state->steps;
    }
    if (planned(span)) finish(span);
  }
}

// NOLINTBEGIN(bugprone-macro-parentheses): a type takes none
#define KVZAP_INSTANTIATE(Value)                                                      \
  template std::vector<StepResult> TypedEngine<Value>::step(const StepBatch& batch,   \
                                                            const ProgressCallback&); \
  template void TypedEngine<Value>::begin_step(const StepBatch&);                     \
  template void TypedEngine<Value>::attend(int, const std::vector<ExternalLayer>&);   \
  template void TypedEngine<Value>::end_step();                                       \
  template void TypedEngine<Value>::cancel_step();
KVZAP_FOR_EACH_VALUE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE
// NOLINTEND(bugprone-macro-parentheses)

}  // namespace kvzap::engine
