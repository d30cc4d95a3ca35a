#include "base/stopwatch.hpp"
#include "engine/decoder_state.hpp"
#include "engine/policy_step.hpp"
#include "model/step_block.hpp"

namespace kvzap {
namespace {

using engine::range;
using linalg::Matrix;
using model::block_tokens;

}  // namespace

// Collects the policies of the spans, their needs, and the memory that they write to.
void Decoder::begin_policies(const StepBatch& batch) {
  Policies& policies = *m_policies;
  policies.steps.clear();
  policies.layers.clear();
  policies.needs.clear();
  policies.append_spans.clear();
  policies.any = std::any_of(batch.spans().begin(), batch.spans().end(),
                             [](const StepBatch::Span& span) { return span.rule.policy; });
  policies.log_sum_exp = false;
  if (!policies.any) return;
  policies.append_spans.reserve(batch.spans().size());
  for (const StepBatch::Span& span : batch.spans()) {
    engine::PolicyStep* const step = span.rule.policy;
    policies.steps.push_back(step);
    policies.needs.push_back(step ? step->policy->needs() : PolicyNeeds());
    policies.log_sum_exp = policies.log_sum_exp || policies.needs.back().log_sum_exp;
    policies.layers.emplace_back();
    if (!step) continue;
    policies.layers.back() = std::make_unique<typename Policies::Layer>(
        m_scratch->exec, m_comm, m_model, m_counted, m_cache, policies.scratch,
        m_scratch->inverse_frequencies);
    step->scores.clear();
    reserve_scores(span);
  }
  if (policies.log_sum_exp) {
    const auto& heads = m_cache.shape().heads;
    const std::int64_t most = *std::max_element(heads.begin(), heads.end());
    base::reserve_scratch(
        policies.scratch.lse,
        std::min<std::int64_t>(batch.tokens().size(), block_tokens(m_model.config())) * most *
            m_model.config().query_group(),
        "kvzap::policy::log_sum_exp");
  }
}

// Reserves the memory that apply_policies writes: an allocation there could fail on one rank alone,
// between two sums over ranks. Also throws Error for a budget that cannot be met.
void Decoder::reserve_scores(const StepBatch::Span& span) {
  engine::PolicyStep& step = *span.rule.policy;
  if (!step.scores_rows()) return;
  const std::int64_t tokens = m_cache.tokens(span.sequence, 0) + step.removed_tokens + span.count;
  std::int64_t largest = 0;
  for (int l = 0; l < static_cast<int>(m_cache.shape().heads.size()); ++l) {
    if (!is_pruned(l)) {
      if (step.keeps_scores) step.scores.emplace_back();
      continue;
    }
    if (step.budget && step.budget->has_amount()) step.budget->rows_per_head(m_counted, l, tokens);
    const int heads = m_cache.shape().heads[l];
    std::int64_t most = 0;
    for (int h = 0; h < heads; ++h) {
      most = std::max(most, step.scores_all ? m_cache.rows(span.sequence, l, h) : 0);
    }
    if (heads > 0) most += span.count;
    largest = std::max(largest, heads * most);
    if (!step.keeps_scores) continue;
    base::before_allocation(heads * most * sizeof(float));
    step.scores.emplace_back(
        Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::policy::step_scores"), heads, most);
  }
  auto& scratch = m_policies->scratch;
  if (!step.keeps_scores) {
    base::reserve_scratch(scratch.scores, largest, "kvzap::policy::scores");
  }
  if (step.chooses) base::reserve_scratch(scratch.keep, largest, "kvzap::policy::keep");
}

void Decoder::show_layer(const StepBatch& batch, int layer) {
  const ArrayView keys = new_rows(m_scratch->new_keys, batch, layer);
  const ArrayView values = new_rows(m_scratch->new_values, batch, layer);
  ArrayView output_weights;
  if (shares_output_weights()) output_weights = gather_output_weights(layer);
  for (std::size_t s = 0; s < batch.spans().size(); ++s) {
    const StepBatch::Span& span = batch.spans()[s];
    if (!span.rule.policy) continue;
    if (output_weights) m_policies->layers[s]->set_output_weights(output_weights);
    m_policies->layers[s]->show(*span.rule.policy, span.sequence, layer, span.count);
    m_policies->layers[s]->set_new_rows(keys.rows(span.first, span.count),
                                        values.rows(span.first, span.count));
  }
}

// Shows a block to the policies that ask for blocks, and keeps the queries of the newest tokens.
void Decoder::observe(const StepBatch& batch, int layer, const Rows& rows) {
  Scratch& scratch = *m_scratch;
  const base::Stopwatch watch(m_seconds.scoring);
  const std::int64_t m = rows.count();
  const std::int64_t kv_heads = m_cache.shape().heads[layer];
  const std::int64_t q_heads = kv_heads * m_model.config().query_group();
  const std::int64_t dim = m_model.config().head_dim;
  const std::int64_t columns = q_heads + 2 * kv_heads;
  const Matrix x = scratch.matrix(Scratch::normed, m, m_model.config().hidden_size);
  const Kokkos::View<const float***, Kokkos::LayoutRight, MemorySpace> qkv(
      scratch.buffers[Scratch::projected].data(), m, columns, dim);
  const Matrix lse(m_policies->scratch.lse.data(), m_policies->log_sum_exp ? m : 0, q_heads);
  for_each_span(batch, rows, [&](std::size_t s, std::int64_t begin, std::int64_t end) {
    engine::PolicyStep* const step = m_policies->steps[s];
    if (!step) return;
    const PolicyNeeds& needs = m_policies->needs[s];
    const auto own = range(begin - rows.begin, end - rows.begin);
    TokenBlock block;
    block.first = scratch.first_positions[s] + begin - batch.spans()[s].first;
    block.count = end - begin;
    block.hidden = Kokkos::subview(x, own, Kokkos::ALL);
    block.queries = Kokkos::subview(qkv, own, range(0, q_heads), Kokkos::ALL);
    if (needs.log_sum_exp) block.log_sum_exp = Kokkos::subview(lse, own, Kokkos::ALL);
    if (step->recent) {
      locally([&] { step->recent->take(scratch.exec, layer, block); });
    }
    if (needs.blocks && !step->only_watches) {
      by_policy([&] { step->policy->observe(*m_policies->layers[s], block); });
    }
  });
}

// Lets the policies score the layer's rows. If a policy chooses, stores the rows that stay.
void Decoder::apply_policies(const StepBatch& batch, int layer) {
  Scratch& scratch = *m_scratch;
  Policies& policies = *m_policies;
  const ExecutionSpace& exec = scratch.exec;
  const int heads = m_cache.shape().heads[layer];
  const Activations all_scores = new_scores(batch, layer);
  policies.append_spans.clear();
  base::fence(exec, "kvzap::policy: only scoring is timed");
  for (std::size_t s = 0; s < batch.spans().size(); ++s) {
    const StepBatch::Span& span = batch.spans()[s];
    engine::PolicyStep* const step = policies.steps[s];
    if (!step || !step->chooses) policies.append_spans.push_back(scratch.append_spans[s]);
    if (!step || !step->scores_rows()) continue;
    auto& shown = *policies.layers[s];
    const std::int64_t most = shown.most_rows();
    const auto own = range(span.first, span.first + span.count);
    const Activations scores = step->keeps_scores
                                   ? step->scores[layer]
                                   : Activations(policies.scratch.scores.data(), heads, most);
    {
      const base::Stopwatch watch(m_seconds.scoring);
      by_policy([&] { step->policy->score(shown, scores); });
      locally([&] {
        for (int h = 0; h < heads; ++h) {
          const std::int64_t rows = shown.rows(h);
          Kokkos::deep_copy(exec, Kokkos::subview(all_scores, h, own),
                            Kokkos::subview(scores, h, range(rows - span.count, rows)));
        }
      });
      base::fence(exec, "kvzap::policy: scoring is timed");
    }
    if (!step->chooses) continue;
    const base::Stopwatch choosing(m_seconds.pruning);
    const decltype(ScoredLayer::keep) keep(policies.scratch.keep.data(), heads, most);
    const auto choose = [&] {
      const ScoredLayer scored = {layer, shown.extents().heads, shown.extents().rows, scores, keep};
      engine::choose_rows(exec, m_comm,
                          {*step->budget, m_counted, shown.extents().tokens + step->removed_tokens,
                           span.rule.eviction.sink},
                          {scored}, {scores});
    };
    if (engine::choice_communicates(*step->budget)) {
      by_policy(choose);
    } else {
      locally(choose);
    }
    // Append now: the choice of the next span overwrites `keep`.
    locally([&] {
      const ArrayView keys = new_rows(scratch.new_keys, batch, layer);
      const ArrayView values = new_rows(scratch.new_values, batch, layer);
      m_cache.append_kept(exec, span.sequence, layer, keys.rows(span.first, span.count),
                          values.rows(span.first, span.count),
                          Kokkos::subview(all_scores, Kokkos::ALL, own), keep);
    });
  }
}

}  // namespace kvzap
