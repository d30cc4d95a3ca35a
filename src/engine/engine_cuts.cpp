// Cuts a sequence: chooses the rows that stay, after the steps that require it.
#include <fmt/format.h>

#include <limits>

#include "engine/engine_parts.hpp"
#include "engine/kept_values.hpp"
#include "engine/policy_layer.hpp"

namespace kvzap {

using cache::agree_on_memory;
using engine::EvictionMethod;
using engine::EvictionMoment;
using engine::EvictionPlan;
using engine::PolicyStep;
using engine::SequencePruning;
using engine::SequenceState;
void Engine::judge_context(SequenceId sequence) {
  gather_pages(sequence);
  const base::Stopwatch watch(m_parts->evict_seconds);
  const SequencePruning& pruning = *m_parts->states.at(sequence).pruning;
  evict(sequence, plan_eviction(pruning, {EvictionMoment::When::context_held}), {}, true);
}

SequenceId Engine::prune(SequenceId source, const LoadedPruning& setting,
                         const ContextScores* scores) {
  EvictionPlan plan;
  gather_pages(source);
  const SequenceId sequence = on_all_ranks([&](std::optional<SequenceId>& made) {
    check(setting);
    if (setting.pruning.prefill != PrefillMode::dense) {
      throw Error(
          "a sequence that was read with dense prefill cannot be pruned as sparse prefill "
          "would");
    }
    if (m_parts->states.at(source).pruning->prunes()) {
      throw Error(fmt::format("sequence {} is pruned already", source));
    }
    if (setting.pruning.decode.every > 0) {
      // A reading stores neither the newest queries nor the rows' scores, which later cuts need.
      throw Error("decode_every needs a sequence that is pruned in its own prefill");
    }
    if (setting.policy && setting.prunes()) check_scores(source, scores);
    made = m_parts->decoder.cache().fork(source);
    const SequenceState& state = m_parts->states[*made] = new_state(pruning_of(setting));
    if (!setting.policy) return;
    plan = plan_eviction(*state.pruning, {EvictionMoment::When::context_read});
    if (setting.chooses_rows() || setting.mode() != PruneMode::always) return;
    // Later steps judge the rows of the window.
    set_row_scores(*made, scores->layers);
  });
  if (plan.method == EvictionMethod::none) return sequence;
  try {
    plan.merger = scores->merger;
    evict(sequence, plan, scores->layers, false);
    if (setting.policy->rerotate) compact_positions(sequence);
  } catch (...) {
    free_sequence(sequence);
    throw;
  }
  return sequence;
}

void Engine::plan(std::size_t index) {
  const StepBatch::Span& span = m_parts->batch.spans()[index];
  if (!state_with_policy(span.sequence)) return;
  SequenceState& state = m_parts->states.at(span.sequence);
  const PolicyChoice& choice = *state.pruning->policy;
  const bool is_held = span.rule.part == StepPart::held;
  if (span.rule.part == StepPart::other || choice.info->repeats_context) return;
  const PolicyNeeds needs = state.policy->needs();
  const std::int64_t before = m_parts->decoder.cache().tokens(span.sequence, 0);
  PolicyStep& step = state.step;
  step = PolicyStep();
  step.policy = state.policy.get();
  step.recent = state.recent ? &*state.recent : nullptr;
  step.question = span.rule.question;
  step.removed_tokens = state.removed_tokens;
  state.plan = plan_eviction(*state.pruning,
                             {EvictionMoment::When::step, span.rule.part, span.count,
                              before + state.removed_tokens, state.steps, state.is_in_parts});
  const EvictionMethod method = state.plan.method;
  step.budget = &state.plan.budget;
  step.chooses = method == EvictionMethod::append_kept;
  // append_kept cuts a context, before sums begin.
  step.merger = choice.sums_attention ? nullptr : &choice.merger;
  step.sums = state.plan.is_in_decode && state.sums ? &*state.sums : nullptr;
  if (is_held) {
    step.only_watches = !needs.every_step;
    if (step.only_watches && !step.recent) return;
  } else if (engine::is_context(span.rule.part)) {
    step.scores_all = state.pruning->chooses_rows() || !choice.info->judges_tokens;
  } else if (method == EvictionMethod::append) {
    step.scores_all = false;
  } else if (method == EvictionMethod::none) {
    const bool cuts_answers = state.pruning->pruning.decode.every > 0;
    step.only_watches = !(needs.every_step && (cuts_answers || span.rule.context_follows));
    // Without a cut to come no one asks for their queries.
    if (step.only_watches && !(step.recent && cuts_answers) && !step.sums) return;
  }
  // Cached rows get new scores after the step. With a threshold they keep the score of their own
  // step, by which they are judged once.
  step.keeps_scores = !step.only_watches && step.scores_all && !step.chooses &&
                      (method == EvictionMethod::evict_by_flags ||
                       (before > 0 && method != EvictionMethod::append));
  m_parts->batch.set_policy(index, &step);
}

void Engine::finish(const StepBatch::Span& span) {
  SequenceState& state = m_parts->states.at(span.sequence);
  const bool ends_parts = state.is_in_parts && span.rule.part == StepPart::context;
  if (!state.step.keeps_scores) return;
  const base::Stopwatch watch(m_parts->evict_seconds);
  const LayerScores scores = std::move(state.step.scores);  // released in any case
  state.step.scores.clear();
  agree_on_memory(communicator(), [&] {
    set_row_scores(span.sequence, scores);
    if (ends_parts) keep_queries(state, false);
  });
  if (ends_parts) state.is_in_parts = false;
  evict(span.sequence, state.plan, scores, true);
}

void Engine::set_row_scores(SequenceId sequence, const LayerScores& scores) {
  auto& cache = m_parts->decoder.cache();
  for (int l = 0; l < static_cast<int>(scores.size()); ++l) {
    if (!cache.shape().has_pages(l)) continue;
    cache.set_row_scores(ExecutionSpace(), sequence, l, scores[l]);
  }
}

std::vector<ScoredLayer> Engine::scored_layers(SequenceId sequence, const LayerScores& scores) {
  auto& cache = m_parts->decoder.cache();
  std::vector<ScoredLayer> layers;
  for (int l = 0; l < static_cast<int>(scores.size()); ++l) {
    if (!cache.shape().has_pages(l)) continue;
    ScoredLayer& layer = layers.emplace_back();
    layer.layer = l;
    layer.heads = m_parts->model->partition().heads(l, m_parts->model->rank());
    layer.scores = scores[l];
    for (std::size_t h = 0; h < layer.heads.size(); ++h) {
      layer.rows.push_back(cache.rows(sequence, l, static_cast<int>(h)));
    }
    base::before_allocation(layer.heads.size() * scores[l].extent(1));
    layer.keep =
        decltype(layer.keep)("kvzap::policy::keep", layer.heads.size(), scores[l].extent(1));
  }
  return layers;
}

void Engine::evict(SequenceId sequence, const EvictionPlan& plan, const LayerScores& scores,
                   bool is_stored) {
  switch (plan.method) {
    case EvictionMethod::none:
    case EvictionMethod::append:
    case EvictionMethod::append_kept:
      return;  // the decoder's step is the place
    case EvictionMethod::evict_by_flags:
      return evict_by_flags(sequence, plan, scores, is_stored);
    case EvictionMethod::evict_by_cutoffs:
      return evict_by_cutoffs(sequence);
  }
}

void Engine::evict_by_cutoffs(SequenceId sequence) {
  const SequencePruning& pruning = *m_parts->states.at(sequence).pruning;
  auto& cache = m_parts->decoder.cache();
  const Cutoff cutoff = {pruning.threshold(), std::numeric_limits<std::int64_t>::max()};
  agree_on_memory(communicator(), [&] {
    if (!can_hold(sequence)) {
      throw Error(fmt::format("policy {}: a context cannot be judged after its steps",
                              pruning.policy->name));
    }
    for (int l = 0; l < static_cast<int>(cache.shape().heads.size()); ++l) {
      if (!cache.shape().has_pages(l)) continue;
      const std::vector<Cutoff> cutoffs(cache.shape().heads[l], cutoff);
      cache.evict(ExecutionSpace(), sequence, l, cutoffs,
                  {pruning.pruning.sink, pruning.pruning.window});
    }
  });
}

void Engine::evict_by_flags(SequenceId sequence, const EvictionPlan& plan,
                            const LayerScores& scores, bool is_stored) {
  SequenceState& state = m_parts->states.at(sequence);
  const SequencePruning& pruning = *state.pruning;
  auto& cache = m_parts->decoder.cache();
  const ExecutionSpace exec;
  const std::int64_t tokens = cache.tokens(sequence, 0);
  const std::int64_t sink = pruning.pruning.sink;
  const bool by_budget = pruning.chooses_rows();
  const bool communicates = by_budget && engine::choice_communicates(plan.budget);
  // A threshold does not judge the window.
  const std::int64_t end =
      by_budget ? tokens : std::max<std::int64_t>(0, tokens - pruning.pruning.window);
  std::vector<ScoredLayer> layers;
  LayerScores first;  // the caller's scores serve other prunings too
  const auto choose = [&] {
    if (by_budget) {
      engine::choose_rows(
          exec, communicator(),
          {plan.budget, m_parts->decoder.counted(), tokens + state.removed_tokens, sink}, layers,
          scores);
      engine::put_back(exec, first, scores);
      return;
    }
    for (const ScoredLayer& layer : layers) {
      engine::judge_rows(exec, layer, {pruning.threshold(), sink, true}, end);
    }
  };
  const auto remove = [&] {
    state.non_finite = 0;
    const bool merges = by_budget && (!state.sums || plan.is_in_decode);
    engine::KeptValues values(plan.merger ? plan.merger
                              : merges    ? pruning.policy->merger
                                          : MergerMaker());
    for (const ScoredLayer& layer : layers) {
      engine::CutRows cut = {layer.layer, layer.heads, layer.keep, {}, {}};
      if (merges && state.sums) {
        cut.scores = layer.scores;
        cut.attention = state.sums->sums(exec, layer.layer);
        cut.steps = state.steps;
      }
      values.merge(exec, cache, sequence, cut);
      if (state.sums) state.sums->evict(exec, layer);
      const std::int64_t stored =
          cache.evict(exec, sequence, layer.layer, layer.keep, plan.empties_ring).non_finite;
      state.non_finite += is_stored ? stored : engine::count_non_finite(exec, layer, end);
    }
    state.steps = 0;
  };
  agree_on_memory(communicator(), [&] {
    layers = scored_layers(sequence, scores);
    if (!is_stored) first = engine::copy_first(exec, scores, sink);
    if (communicates) return;
    choose();
    remove();
  });
  if (!communicates) return;
  choose();
  agree_on_memory(communicator(), remove);
}

void Engine::check_scores(SequenceId sequence, const ContextScores* scores) const {
  const std::vector<int> heads = pruned_heads();
  bool fits = scores && scores->layers.size() == heads.size();
  for (std::size_t l = 0; fits && l < heads.size(); ++l) {
    fits = static_cast<int>(scores->layers[l].extent(0)) == heads[l] &&
           (heads[l] == 0 ||
            static_cast<std::int64_t>(scores->layers[l].extent(1)) == tokens(sequence));
  }
  if (!fits) {
    throw Error(fmt::format("there are no scores of the {} rows of sequence {} to prune by",
                            tokens(sequence), sequence));
  }
}

void Engine::compact_positions(SequenceId sequence) {
  SequenceState& state = m_parts->states.at(sequence);
  auto& cache = m_parts->decoder.cache();
  const std::int64_t before = cache.tokens(sequence, 0);
  // A rank without heads does not know the number of rows.
  std::int64_t rows = 0;
  for (int l = 0; l < static_cast<int>(cache.shape().heads.size()); ++l) {
    if (cache.shape().heads[l] > 0) rows = cache.rows(sequence, l, 0);
  }
  rows = communicator().all_reduce_max(rows);
  agree_on_memory(communicator(), [&] {
    cache.compact_positions(ExecutionSpace(), sequence, m_parts->decoder.inverse_frequencies(),
                            rows);
  });
  state.removed_tokens += before - cache.tokens(sequence, 0);
  // The stored queries were rotated for positions that no longer exist.
  if (state.recent) state.recent->restart(cache.tokens(sequence, 0));
}

}  // namespace kvzap
