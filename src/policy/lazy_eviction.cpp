#include <algorithm>

#include "base/scratch.hpp"
#include "policy/registry.hpp"
#include "policy/row_protection.hpp"
#include "policy/window_attention.hpp"

namespace kvzap::policy {
namespace {

using Recurrence = WindowAttention::Recurrence;

// Before the first of the observed tokens a row counts as attended to by the token before it, or, a
// row of an observed token, by the token before its own.
void begin_recurrence(const ExecutionSpace& exec, const PolicyLayer::PositionView& positions,
                      std::int64_t rows, std::int64_t first, const Recurrence& recurrence) {
  Kokkos::parallel_for(
      "kvzap::lazy_eviction::begin", RowRange(exec, 0, rows), KOKKOS_LAMBDA(std::int64_t r) {
        recurrence.last(r) = (positions(r) < first ? first : positions(r)) - 1;
        recurrence.longest(r) = 0;
      });
}

void score_recurrence(const ExecutionSpace& exec, const Recurrence& recurrence, std::int64_t newest,
                      const HeadScores& scores) {
  Kokkos::parallel_for(
      "kvzap::lazy_eviction::scores", RowRange(exec, 0, scores.extent(0)),
      KOKKOS_LAMBDA(std::int64_t r) {
        const auto longest = static_cast<float>(recurrence.longest(r));
        const auto since = static_cast<float>(newest - recurrence.last(r));
        scores(r) = longest == 0 ? 0.0f
                                 : 2 / (1 + base::math::exp(since / longest)) +
                                       2 / (1 + base::math::exp(longest - 1));
      });
}

/// LazyEviction (Zhang et al., arXiv 2506.15969): long reasoning returns to a row after many
/// tokens. A row that was attended to again and again stays as long as its longest pause has not
/// passed.
///
///   s(r) = 2 sigmoid(-(t - last(r)) / longest(r)) + 2 sigmoid(1 - longest(r)),  0 if longest(r) =
///   0
///
/// t is the newest token; last(r) the newest token that attends to r, longest(r) the largest
/// interval between two such tokens. A token attends to r if one of the group's query heads gives
/// r a probability of at least alpha. The newest `window` rows have the layer's largest score + 1.
///
/// Shapes: queries (history, query heads, head_dim), two numbers per row. Cost: 2 history rows
/// head_dim operations per query head and cut; with a cut every `history` tokens as much as one
/// pass of attention's scores per token. See WindowAttention for memory.
///
/// The paper observes every token from the first one on. Here the newest `history` tokens are
/// observed when scores are needed, by the rows that exist then. This is the same since the last
/// cut if cuts are not further apart; longer pauses are not seen (the paper: 80 % of pauses are
/// below 175 tokens). The paper decides for each query head and sets `window` and the decode
/// cadence to that length; alpha is 5e-4 for a model of Llama and 1e-4 for models of Qwen. The
/// authors' code adds 1 within the first sigmoid, the paper does not. kvpress has no such press.
class LazyEviction final : public Policy {
 public:
  struct Parameters : PolicyParameters {
    std::int64_t history =
        integer("history", 256, {1, 1 << 20}, "newest tokens whose attention is observed");
    std::int64_t window = integer("window", 32, {1, 1 << 30}, "newest rows that stay");
    double alpha = number("alpha", 1e-4, {1e-30, 1}, "least probability that counts as attention");
  };

  explicit LazyEviction(const Parameters& parameters) : m_parameters(parameters) {}

  PolicyNeeds needs() const override {
    PolicyNeeds needs;
    needs.recent = m_parameters.history;
    return needs;
  }

  void score(PolicyLayer& layer, const ScoreView& scores) override {
    const ExecutionSpace& exec = layer.exec();
    const TokenBlock history = layer.recent();
    std::vector<Rows> protected_rows;
    for (int h = 0; h < layer.heads(); ++h) {
      const std::int64_t rows = layer.rows(h);
      // At most half of a short head is protected, so that the others compete.
      const std::int64_t before = rows - std::min(m_parameters.window, (rows + 1) / 2);
      protected_rows.emplace_back(before, rows);
      base::reserve_scratch(m_last, rows, "kvzap::lazy_eviction::last");
      base::reserve_scratch(m_longest, rows, "kvzap::lazy_eviction::longest");
      const Recurrence recurrence{static_cast<float>(m_parameters.alpha), m_last, m_longest};
      begin_recurrence(exec, layer.positions(h), rows, history.first, recurrence);
      m_attention.track(layer, h, history, recurrence);
      score_recurrence(exec, recurrence, history.first + history.count - 1,
                       scores_of(scores, h, 0, before));
    }
    protect_rows(layer, scores, protected_rows);
    if (layer.layer() + 1 == layer.extents().layers) m_attention.release();
  }

 private:
  Parameters m_parameters;
  WindowAttention m_attention;
  Kokkos::View<std::int64_t*, MemorySpace> m_last;     // (row)
  Kokkos::View<std::int64_t*, MemorySpace> m_longest;  // (row)
};

}  // namespace

PolicyInfo lazy_eviction() {
  PolicyInfo info;
  info.name = "lazy-eviction";
  info.paper = "LazyEviction, arXiv 2506.15969";
  info.formula =
      "2 sigmoid(-(t - last) / longest) + 2 sigmoid(1 - longest): the newest token that "
      "attended to the row, and the longest pause between two";
  info.needs = "queries of the newest tokens, keys";
  info.cost = "time O(history d rows) per query head; memory O(rows), at most 16 MiB more";
  info.make_class<LazyEviction>();
  return info;
}

}  // namespace kvzap::policy
