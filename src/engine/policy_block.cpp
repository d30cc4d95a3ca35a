#include "engine/policy_block.hpp"

#include <algorithm>

#include "base/kokkos_compat.hpp"
#include "base/stopwatch.hpp"
#include "engine/kept_values.hpp"

namespace kvzap::engine {

using linalg::Matrix;

void PolicyBlock::reserve(Step& step, const linalg::Vector& frequencies) {
  m_steps.clear();
  m_layers.clear();
  m_needs.clear();
  m_needs_log_sums = false;
  if (!step.has_policies) return;
  for (const StepBatch::Span& span : step.spans()) {
    PolicyStep* const policy = span.rule.policy;
    m_steps.push_back(policy);
    m_needs.push_back(policy ? policy->policy->needs() : PolicyNeeds());
    if (policy && policy->sums) {
      m_needs.back().log_sum_exp = true;
      reserve_sums(step, span);
    }
    m_needs_log_sums = m_needs_log_sums || m_needs.back().log_sum_exp;
    m_layers.emplace_back();
    if (!policy) continue;
    m_layers.back() = std::make_unique<DecoderLayer>(step.exec, step.comm, step.model, m_counted,
                                                     step.cache, m_scratch, frequencies);
    policy->scores.clear();
    reserve_scores(step, span);
  }
  if (m_needs_log_sums) {
    const auto& heads = step.cache.shape().heads;
    const std::int64_t most = *std::max_element(heads.begin(), heads.end());
    base::reserve_scratch(m_scratch.lse, step.most_rows() * most * step.config.query_group(),
                          "kvzap::policy::log_sum_exp");
  }
}

// Reserves the memory that `apply` writes: an allocation there could fail on one rank alone,
// between two sums over ranks.
void PolicyBlock::reserve_scores(Step& step, const StepBatch::Span& span) {
  PolicyStep& policy = *span.rule.policy;
  if (!policy.scores_rows()) return;
  const KVCache& cache = step.cache;
  const std::int64_t tokens = cache.tokens(span.sequence, 0) + policy.removed_tokens + span.count;
  std::int64_t largest = 0;
  for (int l = 0; l < static_cast<int>(cache.shape().heads.size()); ++l) {
    if (!step.is_pruned(l)) {
      if (policy.keeps_scores) policy.scores.emplace_back();
      continue;
    }
    if (policy.budget && policy.budget->has_amount()) {
      policy.budget->rows_per_head(m_counted, l, tokens);
    }
    const int heads = cache.shape().heads[l];
    std::int64_t most = 0;
    for (int h = 0; h < heads; ++h) {
      most = std::max(most, policy.scores_all ? cache.rows(span.sequence, l, h) : 0);
    }
    if (heads > 0) most += span.count;
    largest = std::max(largest, heads * most);
    if (!policy.keeps_scores) continue;
    base::before_allocation(heads * most * sizeof(float));
    policy.scores.emplace_back(
        Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::policy::step_scores"), heads, most);
  }
  if (!policy.keeps_scores) {
    base::reserve_scratch(m_scratch.scores, largest, "kvzap::policy::scores");
  }
  if (policy.chooses) base::reserve_scratch(m_scratch.keep, largest, "kvzap::policy::keep");
}

void PolicyBlock::reserve_sums(Step& step, const StepBatch::Span& span) {
  const KVCache& cache = step.cache;
  for (int l = 0; l < static_cast<int>(cache.shape().heads.size()); ++l) {
    if (!step.is_pruned(l)) continue;
    const int heads = cache.shape().heads[l];
    std::int64_t most = 0;
    for (int h = 0; h < heads; ++h) most = std::max(most, cache.rows(span.sequence, l, h));
    span.rule.policy->sums->reserve(step.exec, l, heads, most + span.count);
  }
}

void PolicyBlock::end() {
  m_layers.clear();
  m_steps.clear();
}

void PolicyBlock::cancel() {
  m_layers.clear();
  m_scratch.release();
  for (PolicyStep* policy : m_steps) {
    if (policy) policy->scores.clear();
  }
  m_steps.clear();
}

bool PolicyBlock::need_output_weights() const {
  return std::any_of(m_needs.begin(), m_needs.end(),
                     [](const PolicyNeeds& needs) { return needs.output_weights; });
}

bool PolicyBlock::need_hidden(const Step& step) const {
  for (std::size_t s = 0; s < step.spans().size(); ++s) {
    const PolicyStep* const policy = step.spans()[s].rule.policy;
    if (policy && m_needs[s].blocks && !policy->only_watches) return true;
  }
  return false;
}

void PolicyBlock::show_layer(Step& step, int layer, const ArrayView& output_weights) {
  const ArrayView keys = step.new_keys(layer);
  const ArrayView values = step.new_values(layer);
  for (std::size_t s = 0; s < step.spans().size(); ++s) {
    const StepBatch::Span& span = step.spans()[s];
    if (!span.rule.policy) continue;
    if (output_weights) m_layers[s]->set_output_weights(output_weights);
    m_layers[s]->show(*span.rule.policy, span.sequence, layer, span.count);
    m_layers[s]->set_new_rows(keys.rows(span.first, span.count),
                              values.rows(span.first, span.count));
  }
}

void PolicyBlock::show_external(const std::vector<ExternalLayer>& spans,
                                const linalg::Vector& sinks) {
  for (std::size_t s = 0; s < spans.size(); ++s) {
    if (!m_layers[s]) continue;
    m_layers[s]->set_output_weights(spans[s].output_weights);
    m_layers[s]->set_sinks(sinks);
  }
}

void PolicyBlock::observe(Step& step, int layer, const RowRange& rows, const Matrix& x,
                          const Matrix& qkv) {
  const base::Stopwatch watch(step.seconds.scoring);
  const std::int64_t m = rows.count(), dim = step.config.head_dim;
  const std::int64_t kv_heads = step.kv_heads(layer);
  const std::int64_t q_heads = kv_heads * step.config.query_group();
  const Kokkos::View<const float***, Kokkos::LayoutRight, MemorySpace> heads(
      qkv.data(), m, q_heads + step.config.row_vectors() * kv_heads, dim);
  const Matrix lse = log_sums(m_needs_log_sums ? m : 0, q_heads);
  step.for_each_span(rows, [&](std::size_t s, std::int64_t begin, std::int64_t end) {
    PolicyStep* const policy = m_steps[s];
    if (!policy) return;
    const auto own = range(begin - rows.begin, end - rows.begin);
    TokenBlock block;
    block.first = step.first_positions[s] + begin - step.spans()[s].first;
    block.count = end - begin;
    block.hidden = Kokkos::subview(x, own, Kokkos::ALL);
    block.queries = Kokkos::subview(heads, own, range(0, q_heads), Kokkos::ALL);
    if (m_needs[s].log_sum_exp) block.log_sum_exp = Kokkos::subview(lse, own, Kokkos::ALL);
    if (policy->recent) {
      step.locally([&] { policy->recent->take(step.exec, layer, block); });
    }
    if (policy->sums) {
      step.locally([&] { policy->sums->add(*m_layers[s], block); });
    }
    if (m_needs[s].blocks && !policy->only_watches) {
      step.by_policy([&] { policy->policy->observe(*m_layers[s], block); });
    }
  });
}

void PolicyBlock::apply(Step& step, int layer) {
  base::fence(step.exec, "kvzap::policy: only scoring is timed");
  for (std::size_t s = 0; s < step.spans().size(); ++s) {
    PolicyStep* const policy = m_steps[s];
    if (!policy || !policy->scores_rows()) continue;
    const Matrix scores =
        policy->keeps_scores
            ? policy->scores[layer]
            : Matrix(m_scratch.scores.data(), step.kv_heads(layer), m_layers[s]->most_rows());
    score(step, layer, s, scores);
    if (policy->chooses) choose(step, layer, s, scores);
  }
}

// Lets the policy of a span score the layer's rows, and copies the scores of new ones.
void PolicyBlock::score(Step& step, int layer, std::size_t s, const Matrix& scores) {
  const StepBatch::Span& span = step.spans()[s];
  DecoderLayer& shown = *m_layers[s];
  const base::Stopwatch watch(step.seconds.scoring);
  step.by_policy([&] { m_steps[s]->policy->score(shown, scores); });
  step.locally([&] {
    const Matrix all = step.new_scores(layer);
    for (int h = 0; h < step.kv_heads(layer); ++h) {
      const std::int64_t rows = shown.rows(h);
      Kokkos::deep_copy(step.exec,
                        Kokkos::subview(all, h, range(span.first, span.first + span.count)),
                        Kokkos::subview(scores, h, range(rows - span.count, rows)));
    }
  });
  base::fence(step.exec, "kvzap::policy: scoring is timed");
}

// Stores the rows of a span that its budget keeps.
void PolicyBlock::choose(Step& step, int layer, std::size_t s, const Matrix& scores) {
  const StepBatch::Span& span = step.spans()[s];
  const DecoderLayer& shown = *m_layers[s];
  const PolicyStep& policy = *m_steps[s];
  const base::Stopwatch watch(step.seconds.pruning);
  const decltype(ScoredLayer::keep) keep(m_scratch.keep.data(), step.kv_heads(layer),
                                         shown.most_rows());
  const auto choose = [&] {
    const ScoredLayer scored = {layer, shown.extents().heads, shown.extents().rows, scores, keep};
    choose_rows(step.exec, step.comm,
                {*policy.budget, m_counted, shown.extents().tokens + policy.removed_tokens,
                 span.rule.eviction.sink},
                {scored}, {scores});
  };
  if (choice_communicates(*policy.budget)) {
    step.by_policy(choose);
  } else {
    step.locally(choose);
  }
  // Append now: the choice of the next span overwrites `keep`.
  step.locally([&] {
    const ArrayView keys = step.new_keys(layer).rows(span.first, span.count);
    const ArrayView values = step.new_values(layer).rows(span.first, span.count);
    step.cache.append_kept(step.exec, span.sequence, layer, keys, values,
                           step.new_scores(layer, span.first, span.first + span.count), keep);
    if (!policy.merger || !*policy.merger) return;
    KeptValues(*policy.merger)
        .merge(step.exec, step.cache, span.sequence,
               {layer, shown.extents().heads, keep, keys, values});
  });
}

}  // namespace kvzap::engine
