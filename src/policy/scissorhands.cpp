#include <algorithm>

#include "base/scratch.hpp"
#include "policy/registry.hpp"
#include "policy/row_protection.hpp"
#include "policy/window_attention.hpp"

namespace kvzap::policy {
namespace {

void write_scores(const ExecutionSpace& exec, const RowVector& counts, std::int64_t rows,
                  std::int64_t window, float group, int head, const Policy::ScoreView& scores) {
  Kokkos::parallel_for(
      "kvzap::scissorhands::scores", RowRange(exec, 0, rows), KOKKOS_LAMBDA(std::int64_t r) {
        scores(head, r) = r + window >= rows ? 1.0f : -counts(r) / group;
      });
}

/// Scissorhands (Liu et al., arXiv 2305.17118, algorithm 2): importance persists, so a row can be
/// evicted if the queries of a history window gave it little attention.
///
///   s(r) = -mean over the group of #{q in history : q sees r and p(q, r) < 1 / t(q)}
///
/// Here p are the softmax probabilities over the t(q) rows that a query sees: each query that gives
/// a row less than the average counts against it. The newest `window` rows have the score 1, above
/// all others. Shapes: queries (history, query heads, head_dim). Cost: 2 history rows head_dim
/// operations per query head; see WindowAttention for memory.
///
/// The history has 400 tokens and the window 10, as in the paper's experiments. The paper stores
/// the probabilities of the history's queries when they are computed. Here they are computed from
/// the rows that exist when scores are needed. This is the same unless rows within the history were
/// evicted. The paper decides for each query head. Here the query heads of a group share their
/// pairs, so counts are averaged. The paper drops a fraction of the budget at a time (m = 0.5 B);
/// here the decode cadence sets it. kvpress has no such press.
class Scissorhands final : public Policy {
 public:
  struct Parameters : PolicyParameters {
    std::int64_t history =
        integer("history", 400, {1, 1 << 20}, "newest tokens whose queries count");
    std::int64_t window = integer("window", 10, {0, 1 << 30}, "newest rows that stay");
  };

  explicit Scissorhands(const Parameters& parameters)
      : m_history(parameters.history), m_window(parameters.window) {}

  PolicyNeeds needs() const override {
    PolicyNeeds needs;
    needs.recent = m_history;
    return needs;
  }

  void score(PolicyLayer& layer, const ScoreView& scores) override {
    const TokenBlock history = layer.recent();
    for (int h = 0; h < layer.heads(); ++h) {
      base::reserve_scratch(m_counts, layer.rows(h), "kvzap::scissorhands::counts");
      m_attention.count_below_mean(layer, h, history, m_counts);
      write_scores(layer.exec(), m_counts, layer.rows(h), m_window,
                   static_cast<float>(layer.extents().group), h, scores);
    }
    if (layer.layer() + 1 == layer.extents().layers) m_attention.release();
  }

 private:
  std::int64_t m_history;
  std::int64_t m_window;
  WindowAttention m_attention;
  RowVector m_counts;
};

}  // namespace

PolicyInfo scissorhands() {
  PolicyInfo info;
  info.name = "scissorhands";
  info.paper = "Scissorhands, arXiv 2305.17118";
  info.formula = "minus the number of queries in a history that paid less than average attention";
  info.needs = "queries of the newest tokens, keys";
  info.cost = "time O(history d rows) per query head; memory O(rows), at most 16 MiB more";
  info.make_class<Scissorhands>();
  return info;
}

}  // namespace kvzap::policy
