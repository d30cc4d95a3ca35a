#include <fmt/format.h>

#include <algorithm>

#include "policy/registry.hpp"

namespace kvzap::policy {
namespace {

/// Rows [begin, end) of each head of a layer, presented as the whole layer.
class PartLayer final : public PolicyLayer {
 public:
  /// budget: the budget that `chunk` splits into parts.
  PartLayer(PolicyLayer& whole, const Budget& budget, std::int64_t begin, std::int64_t end,
            std::int64_t most_rows)
      : PolicyLayer(whole.exec(), whole.comm()), m_whole(&whole), m_begin(begin) {
    const Extents& extents = whole.extents();
    m_extents = extents;
    for (std::int64_t& rows : m_extents.rows) {
      rows = std::clamp<std::int64_t>(rows - begin, 0, end - begin);
    }
    m_extents.tokens = end - begin;
    const std::int64_t first_new = most_rows - extents.new_tokens;
    m_extents.new_tokens = end - std::clamp(first_new, begin, end);
    const Budget::Model model = {extents.layers, extents.kv_heads, 1};
    m_extents.keep =
        budget.rows_of_part(model, extents.layer, extents.tokens, most_rows, begin, end);
  }

  using PolicyLayer::keys;
  using PolicyLayer::positions;
  using PolicyLayer::values;
  PositionView positions(int head, std::int64_t begin, std::int64_t count) override {
    return m_whole->positions(head, row_of(head, begin), count);
  }
  RowsView keys(int head, std::int64_t begin, std::int64_t count) override {
    return m_whole->keys(head, row_of(head, begin), count);
  }
  RowsView values(int head, std::int64_t begin, std::int64_t count) override {
    return m_whole->values(head, row_of(head, begin), count);
  }
  Kokkos::View<const float*, MemorySpace> cached_scores(int head) override {
    const auto all = m_whole->cached_scores(head);
    const auto count = static_cast<std::int64_t>(all.extent(0));
    const std::int64_t begin = std::min(count, m_begin);
    const std::int64_t end = std::min(count, m_begin + rows(head));
    return Kokkos::subview(all, std::make_pair(begin, end));
  }
  TokenBlock recent() override { throw Error("chunk: a part has no recent queries of its own"); }
  void attention_mass(const TokenBlock& /*queries*/, MassReduction /*reduction*/,
                      const MassView& /*mass*/, const MassFactors& /*factors*/) override {
    throw Error("chunk: a part has no attention of its own");
  }
  RowsView output_weights(int query_head) override { return m_whole->output_weights(query_head); }
  Kokkos::View<const float*, MemorySpace> inverse_frequencies() override {
    return m_whole->inverse_frequencies();
  }

 private:
  // A head may end before the part begins.
  std::int64_t row_of(int head, std::int64_t row) const {
    return std::min(m_begin + row, m_whole->rows(head));
  }

  PolicyLayer* m_whole;
  std::int64_t m_begin;
};

class Chunked final : public Policy {
 public:
  Chunked(std::unique_ptr<Policy> inner, const Budget& budget)
      : m_inner(std::move(inner)), m_budget(budget) {}

  PolicyNeeds needs() const override {
    PolicyNeeds needs = m_inner->needs();
    needs.accumulates = false;  // cached scores are its own
    return needs;
  }
  void observe(PolicyLayer& layer, const TokenBlock& block) override {
    m_inner->observe(layer, block);
  }

  void score(PolicyLayer& layer, const ScoreView& scores) override {
    // The same number of parts on every rank, because the policy may communicate.
    const std::int64_t most_rows = layer.comm().all_reduce_max(layer.most_rows());
    const Budget budget = budget_of(layer);
    for (std::int64_t begin = 0; begin < most_rows; begin += budget.chunk) {
      const std::int64_t end = std::min(most_rows, begin + budget.chunk);
      PartLayer part(layer, budget, begin, end, most_rows);
      const auto columns = static_cast<std::int64_t>(scores.extent(1));
      m_inner->score(
          part, Kokkos::subview(scores, Kokkos::ALL,
                                std::make_pair(std::min(begin, columns), std::min(end, columns))));
    }
  }

 private:
  // The budget that the layer has now. It may change while the model generates.
  Budget budget_of(const PolicyLayer& layer) const {
    const PolicyLayer::Extents& extents = layer.extents();
    Budget budget = m_budget;
    const Budget::Model model = {extents.layers, extents.kv_heads, 1};
    if (budget.amount != Budget::Amount::evict_ratio ||
        budget.rows_per_head(model, extents.layer, extents.tokens) != extents.keep) {
      budget.amount = Budget::Amount::keep_tokens;
      budget.keep_tokens = std::max<std::int64_t>(1, extents.keep);
      budget.pyramid = false;
    }
    return budget;
  }

  std::unique_ptr<Policy> m_inner;
  Budget m_budget;
};

struct ChunkParameters : PolicyParameters {
  std::int64_t length = integer("length", 1024, {1, 1 << 24}, "tokens of a part");
};

}  // namespace

/// Scores and prunes parts of `length` consecutive rows one by one, as if each were a sequence
/// (kvpress' ChunkPress; FINCH's setting, TACL 2024). Of a part of n rows, max(1, floor(n (1 -
/// ratio))) stay. Other budgets are divided evenly. A score that depends on neighbouring rows uses
/// those of its own part. Only for policies that can score a part alone.
ModifierInfo chunk() {
  ModifierInfo info;
  info.name = "chunk";
  info.paper = "kvpress' ChunkPress; FINCH, TACL 2024";
  info.effect = "parts of the sequence are scored and pruned one by one";
  info.apply_with<ChunkParameters>([](PolicyChoice& choice, const auto& p, const PolicySetup&) {
    const PolicyInfo& policy = *choice.info;
    if (!choice.budget.has_amount()) {
      throw Error(
          "chunk has no meaning with a threshold, which judges each row by itself; give an evict "
          "ratio, a number of tokens or a size");
    }
    if (choice.budget.pool != Budget::Pool::head) {
      throw Error(
          "chunk has no meaning here: it gives every part of a head a budget of its own, so that "
          "heads cannot compete (ada, global, fastkvzip)");
    }
    choice.budget.chunk = p.length;
    // In a part, a score that depends on its own row alone is the same.
    if (policy.judges_tokens && !choice.scores_are_marked) return;
    if (!policy.scores_parts) {
      throw Error(fmt::format(
          "chunk has no meaning here: policy {} cannot score a part of the sequence alone{}",
          policy.name,
          policy.judges_tokens ? ", as critical's first stage needs it"
                               : ", since it looks at queries or rows of the whole"));
    }
    choice.make = [inner = choice.make, budget = choice.budget] {
      return std::make_unique<Chunked>(inner(), budget);
    };
  });
  return info;
}

}  // namespace kvzap::policy
