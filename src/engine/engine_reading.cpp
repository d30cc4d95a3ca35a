// Reads a context for many policies, and lets the model repeat a context.
#include <fmt/format.h>

#include "engine/engine_parts.hpp"
#include "engine/joint_policy.hpp"
#include "engine/policy_layer.hpp"

namespace kvzap {

using cache::agree_on_memory;
using engine::EvictionMoment;
using engine::EvictionPlan;
using engine::PolicyStep;
using engine::RecentQueries;
using engine::SequenceState;
namespace {

bool asks_alike(const RepeatPrompt& a, const RepeatPrompt& b) {
  return a.first == b.first && a.later == b.later && a.suffix == b.suffix && a.prefix == b.prefix &&
         a.chunk == b.chunk && a.overlap == b.overlap && a.is_bare == b.is_bare;
}

}  // namespace

void Engine::end_context(SequenceId sequence, const ProgressCallback& progress) {
  SequenceState& state = m_parts->states.at(sequence);
  if (state.pruning->uses_policy) {
    gather_pages(sequence);
    state.steps = 0;
    if (state.pruning->policy->info->repeats_context) repeat_context(sequence, progress);
    if (state.pruning->policy->rerotate) compact_positions(sequence);
  }
  balance({sequence});
}

StepResult Engine::run_with_question(SequenceId sequence, const std::vector<TokenId>& context,
                                     const std::vector<TokenId>& question, StepOutput output,
                                     const std::vector<TokenDraw>& draws,
                                     const ProgressCallback& progress) {
  const Pruning& pruning = m_parts->states.at(sequence).pruning->pruning;
  const auto tokens = static_cast<std::int64_t>(context.size());
  const auto asked = static_cast<std::int64_t>(question.size());
  const auto run = [&](std::int64_t begin, std::int64_t end, const StepRule& rule,
                       StepOutput of_step, const std::vector<TokenDraw>& drawn) {
    const bool is_last = end == tokens;
    std::vector<TokenId> part(context.begin() + begin, context.begin() + end);
    if (is_last) part.insert(part.end(), question.begin(), question.end());
    const auto count = static_cast<std::int64_t>(part.size());
    return std::move(
        step(StepBatch(sequence, part, rule, of_step, drawn), [&](std::string_view what,
                                                                  std::int64_t done,
                                                                  std::int64_t all) {
          if (progress) progress(what, begin + count * done / all, tokens + asked);
        }).front());
  };
  std::int64_t begin = 0;
  if (pruning.prefill == PrefillMode::sparse && asked > 0) {
    for (; tokens - begin > pruning.chunk; begin += pruning.chunk) {
      run(begin, begin + pruning.chunk, StepRule(), StepOutput::none, {});
      cut_by_question(sequence, question, [&](std::string_view what, std::int64_t, std::int64_t) {
        if (progress) progress(what, begin + pruning.chunk, tokens + asked);
      });
    }
  }
  StepResult result = run(begin, tokens, rule(sequence, StepPart::whole, asked), output, draws);
  end_context(sequence, progress);
  return result;
}

void Engine::cut_by_question(SequenceId sequence, const std::vector<TokenId>& question,
                             const ProgressCallback& progress) {
  gather_pages(sequence);
  SequenceState& state = m_parts->states.at(sequence);
  auto& cache = m_parts->decoder.cache();
  const auto count = static_cast<std::int64_t>(question.size());
  state.plan = plan_eviction(*state.pruning,
                             {EvictionMoment::When::step, StepPart::whole, count,
                              cache.tokens(sequence, 0) + state.removed_tokens, state.steps});
  KVCache::Checkpoint before;
  agree_on_memory(communicator(), [&] { before = cache.checkpoint(sequence); });
  PolicyStep step;
  step.policy = state.policy.get();
  step.question = count;
  step.budget = &state.plan.budget;
  step.removed_tokens = state.removed_tokens;
  step.keeps_scores = true;
  StepBatch batch(sequence, question, StepRule(), StepOutput::none);
  batch.set_policy(0, &step);
  m_parts->decoder.step(batch, progress);
  cache.restore(sequence, before);
  const base::Stopwatch watch(m_parts->evict_seconds);
  agree_on_memory(communicator(), [&] { set_row_scores(sequence, step.scores); });
  evict(sequence, state.plan, step.scores, true);
  if (state.pruning->policy->rerotate) compact_positions(sequence);
}

Engine::Reading Engine::read(SequenceId sequence, const std::vector<TokenId>& tokens,
                             std::int64_t question,
                             const std::vector<std::shared_ptr<const PolicyChoice>>& policies,
                             StepOutput output, const ProgressCallback& progress) {
  auto& cache = m_parts->decoder.cache();
  const Budget::Model& counted = m_parts->decoder.counted();
  const auto count = static_cast<std::int64_t>(tokens.size());
  // The first group has the policies that score within the step. Each other group has policies with
  // equal repeats of the context.
  std::vector<std::vector<std::size_t>> groups(1);
  std::vector<std::unique_ptr<engine::JointPolicy>> joint;
  std::optional<RecentQueries> recent;
  agree_on_memory(communicator(), [&] {
    if (m_parts->states.at(sequence).pruning->prunes() || this->tokens(sequence) > 0) {
      throw Error(fmt::format("sequence {} is pruned or has tokens: it cannot be read for others",
                              sequence));
    }
    for (std::size_t i = 0; i < policies.size(); ++i) {
      const PolicyChoice& choice = *policies[i];
      try {  // fails before the context runs
        for (int place = 0; place < counted.layers && choice.budget.has_amount(); ++place) {
          choice.budget.rows_per_head(counted, counted.layer_at(place), count);
        }
        if (choice.info->repeats_context) repeat_steps(tokens, choice.repeat);
      } catch (const Error& error) {
        throw Error(fmt::format("policy {}: {}", choice.name, error.what()));
      }
      std::size_t group = 0;
      if (choice.info->repeats_context) {
        for (group = 1; group < groups.size(); ++group) {
          if (asks_alike(policies[groups[group].front()]->repeat, choice.repeat)) break;
        }
        groups.resize(std::max(groups.size(), group + 1));
      }
      groups[group].push_back(i);
    }
    for (const auto& group : groups) {
      std::vector<std::shared_ptr<const PolicyChoice>> members;
      members.reserve(group.size());
      for (const std::size_t i : group) members.push_back(policies[i]);
      joint.push_back(std::make_unique<engine::JointPolicy>(members, counted));
    }
    joint[0]->reserve(pruned_heads(), count);
    const std::int64_t newest = joint[0]->needs().recent;
    if (newest > 0) recent = recent_queries(std::min(newest, count), false);
  });
  PolicyStep step;
  step.policy = joint[0].get();
  step.recent = recent ? &*recent : nullptr;
  step.question = question;
  StepBatch batch(sequence, tokens, StepRule(), output);
  if (!groups[0].empty()) batch.set_policy(0, &step);
  Reading reading;
  {
    const base::Stopwatch watch(reading.step_seconds);
    reading.result = std::move(m_parts->decoder.step(batch, progress).front());
  }
  reading.scoring_seconds = joint[0]->seconds();
  for (std::size_t g = 1; g < groups.size(); ++g) {
    const PolicyChoice& choice = *policies[groups[g].front()];
    double seconds = 0;
    {
      const base::Stopwatch watch(seconds);
      repeat(
          sequence, tokens, choice, [&] { return joint[g].get(); }, progress);
      base::fence(ExecutionSpace(), "kvzap::engine: the repeat is timed");
    }
    m_parts->repeat_seconds += seconds - joint[g]->seconds();
    joint[g]->add_seconds(seconds - joint[g]->seconds());
    joint[g]->take_context_scores(ExecutionSpace(), communicator(), cache.shape());
  }
  reading.scores.resize(policies.size());
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (std::size_t i = 0; i < groups[g].size(); ++i) {
      reading.scores[groups[g][i]] = joint[g]->scores(i);
    }
  }
  return reading;
}

void Engine::repeat(SequenceId sequence, const std::vector<TokenId>& context,
                    const PolicyChoice& choice, const std::function<Policy*()>& make,
                    const ProgressCallback& progress) {
  auto& cache = m_parts->decoder.cache();
  const std::vector<RepeatStep> steps = repeat_steps(context, choice.repeat);
  std::int64_t all = 0;
  for (const RepeatStep& repeat : steps) all += static_cast<std::int64_t>(repeat.tokens.size());
  KVCache::Checkpoint before;
  Policy* policy = nullptr;
  agree_on_memory(communicator(), [&] {
    const std::vector<int> heads = pruned_heads();
    for (int l = 0; l < static_cast<int>(heads.size()); ++l) {
      for (int h = 0; h < heads[l]; ++h) {
        if (cache.rows(sequence, l, h) == static_cast<std::int64_t>(context.size())) continue;
        throw Error(fmt::format("policy {}: sequence {} does not have all rows of its context",
                                choice.name, sequence));
      }
    }
    policy = make();
    before = cache.checkpoint(sequence);
  });
  std::int64_t done = 0;
  for (const RepeatStep& repeat : steps) {
    PolicyStep step;
    step.policy = policy;
    step.only_observes = true;
    step.repeats_begin = repeat.begin;
    step.repeats_end = repeat.end;
    const auto count = static_cast<std::int64_t>(repeat.tokens.size());
    StepBatch batch(sequence, repeat.tokens, StepRule(), StepOutput::none);
    batch.set_policy(0, &step);
    m_parts->decoder.step(batch, [&](std::string_view, std::int64_t part, std::int64_t parts) {
      if (progress) progress("repeat", done + count * part / parts, all);
    });
    cache.restore(sequence, before);
    done += count;
  }
}

void Engine::repeat_context(SequenceId sequence, const ProgressCallback& progress) {
  SequenceState& state = m_parts->states.at(sequence);
  const PolicyChoice& choice = *state.pruning->policy;
  auto& cache = m_parts->decoder.cache();
  const ExecutionSpace exec;
  // The decoder counts the policy's own time in these steps.
  const double scoring_before = m_parts->decoder.seconds().scoring;
  double seconds = 0;
  LayerScores scores;
  EvictionPlan plan = plan_eviction(*state.pruning, {EvictionMoment::When::context_repeated});
  {
    const base::Stopwatch watch(seconds);
    std::unique_ptr<Policy> policy;
    const auto make = [&] {
      policy = choice.make();
      return policy.get();
    };
    repeat(sequence, state.context, choice, make, progress);
    for (int l = 0; l < static_cast<int>(cache.shape().heads.size()); ++l) {
      if (!cache.shape().has_pages(l)) {
        scores.emplace_back();
        continue;
      }
      scores.push_back(policy->context_scores(exec, communicator(), l));
      if (m_parts->observer) m_parts->observer->scores(sequence, l, 0, scores.back());
    }
    plan.merger = policy->context_merger();
    base::fence(exec, "kvzap::engine: the repeat is timed");
  }
  m_parts->repeat_seconds += seconds - (m_parts->decoder.seconds().scoring - scoring_before);
  const base::Stopwatch watch(m_parts->evict_seconds);
  agree_on_memory(communicator(), [&] { set_row_scores(sequence, scores); });
  evict(sequence, plan, scores, true);
  state.context = {};
}

}  // namespace kvzap
