// Cuts a sequence: chooses the rows that stay, after the steps that require it.
#include <fmt/format.h>

#include <limits>

#include "engine/policy_layer.hpp"
#include "engine/typed_engine.hpp"

namespace kvzap::detail {
namespace {

/// Returns the rows per head that a cut leaves after `tokens` tokens. A question of at least this
/// length is cut at once, as in kvpress' DecodingPress.
std::int64_t decode_target(const Pruning::DecodeCuts& cuts, std::int64_t tokens) {
  if (cuts.keep) return *cuts.keep;
  return std::max<std::int64_t>(
      1, static_cast<std::int64_t>(tokens * (1 - cuts.evict_ratio.value_or(0))));
}

}  // namespace

template <class Value>
void TypedEngine<Value>::judge_context(SequenceId sequence) {
  const SequencePruning& pruning = *m_states.at(sequence).pruning;
  if (!pruning.prunes()) return;
  const Stopwatch watch(m_evict_seconds);
  auto& cache = m_decoder.cache();
  const ExecutionSpace exec;
  agree_on_memory(communicator(), [&] {
    if (!can_hold(sequence)) {
      throw Error(fmt::format("policy {}: a context cannot be judged after its steps",
                              pruning.policy->name));
    }
    const Cutoff cutoff = {pruning.threshold(), std::numeric_limits<std::int64_t>::max()};
    for (std::size_t l = 0; l < cache.shape().heads.size(); ++l) {
      const std::vector<Cutoff> cutoffs(cache.shape().heads[l], cutoff);
      cache.evict(exec, sequence, static_cast<int>(l), cutoffs,
                  {pruning.pruning.sink, pruning.pruning.window});
    }
  });
}

template <class Value>
SequenceId TypedEngine<Value>::prune(SequenceId source, const LoadedPruning& setting,
                                     const ContextScores* scores) {
  const bool prunes = setting.policy && setting.prunes();
  const bool chooses = prunes && setting.chooses_rows();
  // An engine that chooses in each layer before the next one runs leaves no row of the context in a
  // ring.
  const bool empties_ring =
      chooses && (setting.policy->rerotate ||
                  (setting.policy->budget.by_layer() && !setting.policy->info->repeats_context));
  const bool communicates = chooses && choice_communicates(setting.policy->budget);
  const ExecutionSpace exec;
  std::vector<ScoredLayer> layers;
  LayerScores first;  // other settings share the scores
  const SequenceId sequence = on_all_ranks([&](std::optional<SequenceId>& made) {
    check(setting);
    if (setting.pruning.prefill != PrefillMode::dense) {
      throw Error(
          "a sequence that was read with dense prefill cannot be pruned as sparse prefill "
          "would");
    }
    if (m_states.at(source).pruning->prunes()) {
      throw Error(fmt::format("sequence {} is pruned already", source));
    }
    if (setting.pruning.decode.every > 0) {
      // A reading stores neither the newest queries nor the rows' scores, which later cuts need.
      throw Error("decode_every needs a sequence that is pruned in its own prefill");
    }
    if (prunes) check_scores(source, scores);
    made = m_decoder.cache().fork(source);
    SequenceState& state = m_states[*made] = new_state(pruning_of(setting));
    if (!prunes) return;
    if (!chooses) return judge(*made, scores->layers);
    state.budget = setting.policy->budget;
    layers = scored_layers(*made, scores->layers);
    first = copy_first(exec, scores->layers, setting.pruning.sink);
    if (communicates) return;
    choose(*made, layers, scores->layers);
    put_back(exec, first, scores->layers);
    evict(*made, layers, empties_ring, false);
  });
  try {
    if (communicates) {
      choose(sequence, layers, scores->layers);
      put_back(exec, first, scores->layers);
      agree_on_memory(communicator(), [&] { evict(sequence, layers, empties_ring, false); });
    }
    if (prunes && setting.policy->rerotate) close_up(sequence);
  } catch (...) {
    free_sequence(sequence);
    throw;
  }
  return sequence;
}

template <class Value>
void TypedEngine<Value>::plan(std::size_t index) {
  const StepBatch::Span& span = m_batch.spans()[index];
  if (!state_with_policy(span.sequence)) return;
  SequenceState& state = m_states.at(span.sequence);
  const PolicyChoice& choice = *state.pruning->policy;
  if (span.rule.part == StepPart::other || choice.info->repeats_context) return;
  const PolicyNeeds needs = state.policy->needs();
  const std::int64_t before = m_decoder.cache().tokens(span.sequence, 0);
  PolicyStep& step = state.step;
  step = PolicyStep();
  step.policy = state.policy.get();
  step.recent = state.recent ? &*state.recent : nullptr;
  step.question = span.rule.question;
  step.closed_up = state.closed_up;
  state.cuts = false;
  const bool is_context = span.rule.part == StepPart::context || span.rule.part == StepPart::whole;
  if (is_context && state.pruning->chooses_rows()) {
    state.budget = choice.budget;
    step.budget = &state.budget;
    step.chooses = before == 0 && state.budget.by_layer();
    state.cuts = !step.chooses;
  } else if (is_context) {
    step.scores_all = !choice.info->judges_tokens;
  } else {
    const std::int64_t tokens = before + state.closed_up + span.count;
    const Pruning::DecodeCuts& cuts = state.pruning->pruning.decode;
    state.budget = choice.budget;
    state.budget.amount = cuts.keep ? Budget::Amount::keep_tokens : Budget::Amount::evict_ratio;
    state.budget.keep_tokens = cuts.keep.value_or(0);
    state.budget.evict_ratio = cuts.evict_ratio.value_or(0);
    state.budget.layer_ratios.clear();
    step.budget = &state.budget;
    state.cuts = cuts.every > 0 &&
                 (state.steps + 1 >= cuts.every || span.count >= decode_target(cuts, tokens));
    if (!state.cuts && span.rule.eviction.judge) {
      step.scores_all = false;
    } else if (!state.cuts && !(needs.every_step && cuts.every > 0)) {
      // If no cut follows, the queries are not needed.
      if (!step.recent || cuts.every == 0) return;
      step.only_watches = true;
    }
  }
  // Cached rows get new scores after the step. With a threshold they keep the score of their own
  // step, by which they are judged once.
  step.keeps_scores = !step.only_watches && step.scores_all && !step.chooses &&
                      (state.cuts || (before > 0 && !span.rule.eviction.judge));
  m_batch.set_policy(index, &step);
}

template <class Value>
void TypedEngine<Value>::finish(const StepBatch::Span& span) {
  SequenceState& state = m_states.at(span.sequence);
  if (!state.step.keeps_scores) return;
  const Stopwatch watch(m_evict_seconds);
  const auto scores = std::move(state.step.scores);  // dropped even if the rest fails
  state.step.scores.clear();
  auto& cache = m_decoder.cache();
  const ExecutionSpace exec;
  const int layers = static_cast<int>(scores.size());
  agree_on_memory(communicator(), [&] {
    for (int l = 0; l < layers; ++l) {
      cache.set_row_scores(exec, span.sequence, l, scores[l]);
    }
  });
  if (state.cuts) cut(span.sequence, scores);
}

template <class Value>
std::vector<ScoredLayer> TypedEngine<Value>::scored_layers(SequenceId sequence,
                                                           const LayerScores& scores) {
  auto& cache = m_decoder.cache();
  std::vector<ScoredLayer> layers(scores.size());
  for (std::size_t l = 0; l < layers.size(); ++l) {
    layers[l].layer = static_cast<int>(l);
    layers[l].heads = m_model->partition().heads(static_cast<int>(l), m_model->rank());
    layers[l].scores = scores[l];
    for (std::size_t h = 0; h < layers[l].heads.size(); ++h) {
      layers[l].rows.push_back(cache.rows(sequence, static_cast<int>(l), static_cast<int>(h)));
    }
    before_allocation(layers[l].heads.size() * scores[l].extent(1));
    layers[l].keep = decltype(layers[l].keep)("kvzap::policy::keep", layers[l].heads.size(),
                                              scores[l].extent(1));
  }
  return layers;
}

template <class Value>
void TypedEngine<Value>::cut(SequenceId sequence, const LayerScores& scores) {
  const bool empties_ring = m_states.at(sequence).pruning->policy->rerotate;
  std::vector<ScoredLayer> layers;
  if (!choice_communicates(m_states.at(sequence).budget)) {
    agree_on_memory(communicator(), [&] {
      layers = scored_layers(sequence, scores);
      choose(sequence, layers, scores);
      evict(sequence, layers, empties_ring, true);
    });
    return;
  }
  agree_on_memory(communicator(), [&] { layers = scored_layers(sequence, scores); });
  choose(sequence, layers, scores);
  agree_on_memory(communicator(), [&] { evict(sequence, layers, empties_ring, true); });
}

template <class Value>
void TypedEngine<Value>::choose(SequenceId sequence, const std::vector<ScoredLayer>& layers,
                                const LayerScores& scores) {
  const SequenceState& state = m_states.at(sequence);
  const std::int64_t tokens = m_decoder.cache().tokens(sequence, 0) + state.closed_up;
  choose_rows(ExecutionSpace(), communicator(), state.budget,
              budget_model<Value>(m_model->config()), tokens, state.pruning->pruning.sink, layers,
              scores);
}

template <class Value>
void TypedEngine<Value>::evict(SequenceId sequence, const std::vector<ScoredLayer>& layers,
                               bool empties_ring, bool is_stored) {
  SequenceState& state = m_states.at(sequence);
  auto& cache = m_decoder.cache();
  const ExecutionSpace exec;
  const std::int64_t tokens = cache.tokens(sequence, 0);
  state.non_finite = 0;
  for (const ScoredLayer& layer : layers) {
    const std::int64_t stored =
        cache.evict(exec, sequence, layer.layer, layer.keep, empties_ring).non_finite;
    state.non_finite += is_stored ? stored : count_non_finite(exec, layer, tokens);
  }
  state.steps = 0;
}

template <class Value>
void TypedEngine<Value>::check_scores(SequenceId sequence, const ContextScores* scores) const {
  const auto& heads = m_decoder.cache().shape().heads;
  bool fits = scores && scores->layers.size() == heads.size();
  for (std::size_t l = 0; fits && l < heads.size(); ++l) {
    fits = static_cast<int>(scores->layers[l].extent(0)) == heads[l] &&
           static_cast<std::int64_t>(scores->layers[l].extent(1)) == tokens(sequence);
  }
  if (!fits) {
    throw Error(fmt::format("there are no scores of the {} rows of sequence {} to prune by",
                            tokens(sequence), sequence));
  }
}

template <class Value>
void TypedEngine<Value>::judge(SequenceId sequence, const LayerScores& scores) {
  SequenceState& state = m_states.at(sequence);
  auto& cache = m_decoder.cache();
  const ExecutionSpace exec;
  const EvictionRule eviction = rule(sequence, StepPart::context, 0).eviction;
  if (state.pruning->mode() == PruneMode::always) {
    // Rows of the window keep their scores, because they are judged later.
    for (std::size_t l = 0; l < scores.size(); ++l) {
      cache.set_row_scores(exec, sequence, static_cast<int>(l), scores[l]);
    }
  }
  const std::int64_t judged = cache.tokens(sequence, 0) - state.pruning->pruning.window;
  if (judged <= 0) return;
  for (const ScoredLayer& layer : scored_layers(sequence, scores)) {
    judge_rows(exec, layer, eviction, judged);
    state.non_finite += count_non_finite(exec, layer, judged);
    cache.evict(exec, sequence, layer.layer, layer.keep);
  }
}

template <class Value>
void TypedEngine<Value>::close_up(SequenceId sequence) {
  SequenceState& state = m_states.at(sequence);
  auto& cache = m_decoder.cache();
  const std::int64_t before = cache.tokens(sequence, 0);
  // A rank without heads does not know the number of rows.
  std::int64_t rows = 0;
  for (int l = 0; l < static_cast<int>(cache.shape().heads.size()); ++l) {
    if (cache.shape().heads[l] > 0) rows = cache.rows(sequence, l, 0);
  }
  rows = communicator().all_reduce_max(rows);
  agree_on_memory(communicator(), [&] {
    cache.close_up(ExecutionSpace(), sequence, m_decoder.inverse_frequencies(), rows);
  });
  state.closed_up += before - cache.tokens(sequence, 0);
  // The stored queries were rotated for positions that no longer exist.
  if (state.recent) state.recent->restart(cache.tokens(sequence, 0));
}

// NOLINTBEGIN(bugprone-macro-parentheses): a type takes none
#define KVZAP_INSTANTIATE(Value)                                                                   \
  template void TypedEngine<Value>::judge_context(SequenceId sequence);                            \
  template SequenceId TypedEngine<Value>::prune(SequenceId source, const LoadedPruning& setting,   \
                                                const ContextScores* scores);                      \
  template void TypedEngine<Value>::plan(std::size_t index);                                       \
  template void TypedEngine<Value>::finish(const StepBatch::Span& span);                           \
  template std::vector<ScoredLayer> TypedEngine<Value>::scored_layers(SequenceId sequence,         \
                                                                      const LayerScores& scores);  \
  template void TypedEngine<Value>::cut(SequenceId sequence, const LayerScores& scores);           \
  template void TypedEngine<Value>::choose(                                                        \
      SequenceId sequence, const std::vector<ScoredLayer>& layers, const LayerScores& scores);     \
  template void TypedEngine<Value>::evict(SequenceId sequence,                                     \
                                          const std::vector<ScoredLayer>& layers,                  \
                                          bool empties_ring, bool is_stored);                      \
  template void TypedEngine<Value>::check_scores(SequenceId sequence, const ContextScores* scores) \
      const;                                                                                       \
  template void TypedEngine<Value>::judge(SequenceId sequence, const LayerScores& scores);         \
  template void TypedEngine<Value>::close_up(SequenceId sequence);
KVZAP_FOR_EACH_VALUE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE
// NOLINTEND(bugprone-macro-parentheses)

}  // namespace kvzap::detail
