#include <algorithm>

#include "base/scratch.hpp"
#include "policy/registry.hpp"
#include "policy/row_protection.hpp"
#include "policy/window_attention.hpp"

namespace kvzap::policy {
namespace {

using Queries = Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace>;

void copy_queries(const ExecutionSpace& exec, const TokenBlock::QueryView& source,
                  std::int64_t begin, std::int64_t count, std::int64_t target_begin,
                  const Queries& target) {
  const auto heads = static_cast<std::int64_t>(target.extent(1));
  const auto dim = static_cast<std::int64_t>(target.extent(2));
  Kokkos::parallel_for(
      "kvzap::finch::queries", RowRange(exec, 0, count * heads), KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t token = i / heads;
        const std::int64_t head = i % heads;
        for (std::int64_t d = 0; d < dim; ++d) {
          target(target_begin + token, head, d) = source(begin + token, head, d);
        }
      });
}

void write_scores(const ExecutionSpace& exec, const RowVector& mass, float factor,
                  const HeadScores& scores) {
  Kokkos::parallel_for(
      "kvzap::finch::scores", RowRange(exec, 0, scores.extent(0)),
      KOKKOS_LAMBDA(std::int64_t r) { scores(r) = factor * mass(r); });
}

/// FINCH (Corallo and Papotti, TACL 2024, 10.1162/tacl_a_00716): keeps the rows to which the
/// question attends.
///
///   s(r) = mean over the question's tokens q and the group of n(q) p(q, r),  r a row before it
///
/// Here p are the softmax probabilities of the query over all rows that it sees. n(q) is the number
/// of rows before its own, because a later query divides its attention among more rows. The
/// question's own rows have the layer's largest score + 1. Shapes: queries (question, query heads,
/// head_dim), collected while context and question run as one step. Cost: 2 question rows head_dim
/// operations per query head; see WindowAttention for memory.
///
/// Sparse prefill is the paper's method: the context runs in parts, each followed by the question,
/// and later parts see only the earlier rows that stayed (Engine::run_with_question). Its share of
/// the tokens so far stays after each part. Dense prefill is kvpress': one pass over the whole
/// context, and a budget for each part of `chunk` rows if that is not 0. Without `normalize`, n(q)
/// is 1. The paper and kvpress renumber positions after a cut: add "+rerotate".
///
/// A step without a question gives all rows the score 0.
class Finch final : public Policy {
 public:
  struct Parameters : PolicyParameters {
    bool normalizes =
        flag("normalize", true, "whether a query's attention is multiplied by the rows before it");
    std::int64_t chunk = integer("chunk", 0, {0, 1 << 30},
                                 "rows of a part of the context with its own budget; 0: one part");
  };

  explicit Finch(const Parameters& parameters) : m_normalizes(parameters.normalizes) {}

  PolicyNeeds needs() const override {
    PolicyNeeds needs;
    // The length of the question varies, so its queries are taken block by block.
    needs.blocks = true;
    return needs;
  }

  void observe(PolicyLayer& layer, const TokenBlock& block) override {
    const auto& extents = layer.extents();
    if (extents.question == 0) return;
    // Does not rely on the state that `score` left: a failed step may not have reached it.
    if (block.first == extents.tokens - extents.new_tokens) {
      m_observed = 0;
      m_queries = {};
      m_queries = Queries(Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::finch::queries"),
                          extents.question, static_cast<std::size_t>(layer.heads()) * extents.group,
                          extents.head_dim);
    }
    // The question is the last part of the step's tokens.
    const std::int64_t context = extents.new_tokens - extents.question;
    const std::int64_t begin = std::clamp<std::int64_t>(context - m_observed, 0, block.count);
    const std::int64_t target = m_observed + begin - context;
    if (begin < block.count) {
      if (target == 0) m_first = block.first + begin;
      copy_queries(layer.exec(), block.queries, begin, block.count - begin, target, m_queries);
    }
    m_observed += block.count;
  }

  void score(PolicyLayer& layer, const ScoreView& scores) override {
    const auto& extents = layer.extents();
    if (extents.question == 0) {
      for (int h = 0; h < layer.heads(); ++h) {
        fill_rows(layer.exec(), scores, h, {0, layer.rows(h)}, 0);
      }
      return;
    }
    TokenBlock question;
    question.first = m_first;
    question.count = extents.question;
    question.queries = m_queries;
    const auto factor =
        m_normalizes ? WindowAttention::Factor::rows_before : WindowAttention::Factor::one;
    std::vector<Rows> protected_rows;
    for (int h = 0; h < layer.heads(); ++h) {
      const std::int64_t rows = layer.rows(h);
      const std::int64_t before = rows_before(layer, h, question.first);
      base::reserve_scratch(m_mass, rows, "kvzap::finch::mass");
      m_attention.sum(layer, h, question, factor, m_mass);
      write_scores(layer.exec(), m_mass, 1.0f / static_cast<float>(question.count * extents.group),
                   scores_of(scores, h, 0, before));
      protected_rows.emplace_back(before, rows);
    }
    protect_rows(layer, scores, protected_rows);
    if (layer.layer() + 1 == extents.layers) m_attention.release();
  }

 private:
  bool m_normalizes;
  Queries m_queries;            // queries of the question
  std::int64_t m_first = 0;     // its position
  std::int64_t m_observed = 0;  // tokens of this step in this layer
  WindowAttention m_attention;
  RowVector m_mass;
};

}  // namespace

PolicyInfo finch() {
  PolicyInfo info;
  info.name = "finch";
  info.paper = "FINCH, TACL 2024, 10.1162/tacl_a_00716";
  info.formula = "mean attention of the question's queries, times the rows before each";
  info.needs = "queries of the question, keys";
  info.cost = "time O(question d rows) per query head; memory O(rows), at most 16 MiB more";
  info.needs_question = true;
  // While the model generates there is no question from which to score.
  info.scores_again = false;
  info.make_class<Finch>();
  info.set_up_with<Finch::Parameters>([](PolicyChoice& choice, const auto& p, const PolicySetup&) {
    choice.budget.chunk = p.chunk;
  });
  return info;
}

}  // namespace kvzap::policy
