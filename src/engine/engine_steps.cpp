// Steps of an engine: a policy's part is planned before, and cuts follow.
#include <algorithm>
#include <limits>

#include "engine/engine_parts.hpp"

namespace kvzap {

using engine::PolicyStep;
using engine::SequencePruning;
using engine::SequenceState;

std::vector<StepResult> Engine::step(const StepBatch& batch, const ProgressCallback& progress) {
  // The rows of a draft stay where they are until the caller has taken some of them back.
  const bool has_drafts =
      std::any_of(batch.spans().begin(), batch.spans().end(),
                  [](const StepBatch::Span& span) { return span.rule.part == StepPart::draft; });
  if (has_drafts) balance(batch);
  std::vector<StepResult> results = step_of_policies(batch, progress);
  if (!has_drafts) balance(batch);
  return results;
}

std::vector<StepResult> Engine::step_of_policies(const StepBatch& batch,
                                                 const ProgressCallback& progress) {
  const bool any = std::any_of(
      batch.spans().begin(), batch.spans().end(),
      [&](const StepBatch::Span& span) { return state_with_policy(span.sequence) != nullptr; });
  std::vector<StepResult> results;
  const auto run = [&] {
    if (!any) {
      results = m_parts->decoder.step(batch, progress);
      return;
    }
    try {
      for (const StepBatch::Span& span : batch.spans()) {
        SequenceState* const state = state_with_policy(span.sequence);
        if (!state || span.rule.part != StepPart::held) continue;
        if (!state->recent || state->recent->lasts()) continue;  // as on all ranks
        cache::agree_on_memory(communicator(), [&] { keep_queries(*state, true); });
      }
    } catch (const AgreedOutOfMemory& error) {
      throw StepOutOfMemory(error.what());
    }
    plan(batch);
    // Policies see all rows of a head.
    try {
      for (const StepBatch::Span& span : m_parts->batch.spans()) {
        const PolicyStep* const policy = span.rule.policy;
        if (policy && (!policy->only_watches || policy->sums)) gather_pages(span.sequence);
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
  return results;
}

bool Engine::draws_tokens() const { return m_parts->decoder.draws_tokens(); }

void Engine::take_back(SequenceId sequence, std::int64_t count) {
  m_parts->decoder.cache().take_back(sequence, count);
}

std::string Engine::why_no_drafts(const LoadedPruning& pruning, const PageFormat& format) const {
  const CacheShape& shape = m_parts->decoder.cache().shape();
  const ModelConfig& config = m_parts->model->config();
  if (!shape.states.empty()) {
    return "layers of the model have states, which cannot go back to an earlier token";
  }
  if (config.rope_depends_on_length()) {
    return "the model's RoPE depends on the length of the text";
  }
  if (most_draft(0) < 1) return "a ring of the cache holds one token alone";
  if (!pruning.prunes()) return why_not_in_turn(format.quantised());
  if (pruning.pruning.decode.every > 0) return "rows are cut while the answer is generated";
  const SequencePruning own(pruning, m_parts->scorer.get());
  const bool judges = engine::rule_of(own, StepPart::draft, 0).eviction.judges();
  if (judges && own.uses_policy) {
    return fmt::format("policy {} judges generated tokens after attention", pruning.policy->name);
  }
  return why_not_in_turn(judges || format.quantised());
}

// See Step::runs_in_turn.
std::string Engine::why_not_in_turn(bool is_needed) const {
  const ModelConfig& config = m_parts->model->config();
  for (std::int64_t l = 0; is_needed && l < config.num_hidden_layers; ++l) {
    if (config.rows_of(l) != l && m_parts->decoder.cache().shape().has_pages(config.rows_of(l))) {
      return "rows that several layers read change while the answer is generated";
    }
  }
  return {};
}

std::int64_t Engine::most_draft(std::int64_t tokens) const {
  const CacheShape& shape = m_parts->decoder.cache().shape();
  const ModelConfig& config = m_parts->model->config();
  std::int64_t most = std::numeric_limits<std::int64_t>::max();
  for (int l = 0; l < static_cast<int>(shape.heads.size()); ++l) {
    if (shape.keeps_rows(l)) most = std::min<std::int64_t>(most, shape.ring_rows(l));
  }
  if (config.embeds_positions) {
    most = std::min<std::int64_t>(most, config.max_position_embeddings - tokens);
  }
  if (config.attention_top_k > 0) most = std::min(most, config.attention_top_k - tokens);
  return std::max<std::int64_t>(0, most - 1);
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
  // A decode step adds at most one row to a head, a draft a few.
  const bool is_long =
      std::any_of(batch.spans().begin(), batch.spans().end(), [](const StepBatch::Span& span) {
        return span.count > 1 && span.rule.part != StepPart::draft;
      });
  if (!is_long && --m_parts->until_balance > 0) return;
  m_parts->until_balance = options().page_rows;
  std::vector<SequenceId> sequences;
  for (const StepBatch::Span& span : batch.spans()) {
    // A policy that sees each part of a context would call the pages back at once.
    const bool is_part = engine::is_context(span.rule.part) || span.rule.part == StepPart::held;
    if (is_part && state_with_policy(span.sequence)) continue;
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
    SequenceState* const state = planned(span);
    if (!state) continue;
    state->policy = state->pruning->policy->make();
    if (state->sums) state->sums->cancel(ExecutionSpace(), tokens(span.sequence));
  }
  m_parts->batch.clear();
}

void Engine::finish() {
  for (const StepBatch::Span& span : m_parts->batch.spans()) {
    SequenceState* const state = state_with_policy(span.sequence);
    if (!state) continue;
    const bool is_held = span.rule.part == StepPart::held;
    const bool repeats = state->pruning->policy->info->repeats_context;
    if (is_held && !repeats) state->is_in_parts = true;
    if ((is_held || span.rule.part == StepPart::context) && repeats) {
      const auto first = m_parts->batch.tokens().begin() + span.first;
      state->context.insert(state->context.end(), first, first + span.count);
    }
    const bool is_answer = span.rule.part == StepPart::question ||
                           span.rule.part == StepPart::generated ||
                           span.rule.part == StepPart::draft;
    const bool is_scored = planned(span) && state->step.scores_rows();
    if (is_answer && (state->pruning->pruning.decode.every > 0 || !is_scored)) ++state->steps;
    if (planned(span)) finish(span);
  }
}

engine::SequenceState* Engine::planned(const StepBatch::Span& span) {
  SequenceState* const state = state_with_policy(span.sequence);
  return state && span.rule.policy == &state->step ? state : nullptr;
}

}  // namespace kvzap
