#include <algorithm>

#include "base/scratch.hpp"
#include "policy/registry.hpp"
#include "policy/row_protection.hpp"

namespace kvzap::policy {
namespace {

// A protected row's score is multiplied by a power of two. This puts it above all others and can be
// undone exactly, so that sums that continue from it lose nothing.
constexpr float protection = 18446744073709551616.0f;  // 2^64
constexpr float least_protected = 4294967296.0f;  // 2^32: every sum of probabilities is smaller

/// The conversion of sums to scores, and of scores back to sums.
struct H2OScore {
  bool normalizes = true;
  std::int64_t tokens_before = 0;    // position of the step's first token
  std::int64_t tokens = 0;           // position after its last token
  std::int64_t first_protected = 0;  // row
  float group = 1;

  KOKKOS_INLINE_FUNCTION float operator()(float mass, float cached, std::int64_t position,
                                          std::int64_t row) const {
    double sum = static_cast<double>(mass) / group;
    if (cached == cached) {
      const double before = cached >= least_protected ? cached / protection : cached;
      sum += normalizes ? before * static_cast<double>(tokens_before - position) : before;
    }
    const double seen_by = static_cast<double>(tokens - position);
    const auto score = static_cast<float>(normalizes ? sum / seen_by : sum);
    if (row < first_protected) return score;
    return (score * protection < least_protected ? least_protected / protection : score) *
           protection;
  }
};

void write_scores(const ExecutionSpace& exec, const H2OScore& score,
                  const PolicyLayer::MassView& mass,
                  const Kokkos::View<const float*, MemorySpace>& cached,
                  const PolicyLayer::PositionView& positions, int head, const HeadScores& scores) {
  const auto n_cached = static_cast<std::int64_t>(cached.extent(0));
  Kokkos::parallel_for(
      "kvzap::h2o::scores", RowRange(exec, 0, scores.extent(0)), KOKKOS_LAMBDA(std::int64_t r) {
        const std::int64_t position = positions(r);
        const float before = r < n_cached && position < score.tokens_before ? cached(r) : NAN;
        scores(r) = score(mass(head, r), before, position, r);
      });
}

/// H2O (Zhang et al., arXiv 2306.14048), as in kvpress' ObservedAttentionPress: keeps heavy
/// hitters, the rows that got most attention from all queries so far.
///
///   s(r) = mean over the group of (sum over all queries q that see r of p(q, r)) / (number of
///   them)
///
/// Here p are the softmax probabilities over the rows that existed when q was computed. The number
/// of queries that see a row is the number of tokens from its own on. Later steps continue from the
/// scores of the cached rows: the sum is the score times the number of queries before the step.
/// Shapes: probabilities are computed tile by tile (PolicyLayer::attention_mass), their sums are
/// (KV head, row). Cost: a second pass over the attention of every step, 2 rows head_dim operations
/// per query and query head; 4 bytes per row and KV head.
///
/// The paper uses plain sums (`normalize=off`), which favour old rows, and gives half of the budget
/// to the newest rows (`local=on`). Their scores are then multiplied by 2^64, above all others. The
/// factor is removed when they are no longer the newest.
class H2O final : public Policy {
 public:
  struct Parameters : PolicyParameters {
    bool normalizes = flag("normalize", true,
                           "whether sums are divided by the number of queries that see the row");
    bool local = flag("local", false, "whether half of the budget is for the newest rows");
  };

  explicit H2O(const Parameters& parameters)
      : m_normalizes(parameters.normalizes), m_local(parameters.local) {}

  PolicyNeeds needs() const override {
    PolicyNeeds needs;
    needs.blocks = true;
    needs.log_sum_exp = true;
    needs.every_step = needs.accumulates = true;
    needs.ages = m_normalizes;
    needs.budget = m_local;
    return needs;
  }

  void observe(PolicyLayer& layer, const TokenBlock& block) override {
    const auto& extents = layer.extents();
    // Does not rely on the state that `score` left: a failed step may not have reached it.
    if (block.first == extents.tokens - extents.new_tokens) start(layer, block);
    m_end = block.first + block.count;
    if (layer.heads() > 0) layer.attention_mass(block, MassReduction::sum, m_mass);
  }

  void score(PolicyLayer& layer, const ScoreView& scores) override {
    H2OScore score;
    score.normalizes = m_normalizes;
    score.tokens_before = m_first;
    score.tokens = m_end;
    score.group = static_cast<float>(layer.extents().group);
    for (int h = 0; h < layer.heads(); ++h) {
      const std::int64_t rows = layer.rows(h);
      score.first_protected = m_local ? rows - layer.extents().keep / 2 : rows;
      write_scores(layer.exec(), score, m_mass, layer.cached_scores(h), layer.positions(h), h,
                   scores_of(scores, h, 0, rows));
    }
  }

 private:
  void start(PolicyLayer& layer, const TokenBlock& block) {
    m_first = block.first;
    // The rows of the layer are those up to this block or up to the step's end.
    const std::int64_t columns = layer.heads() > 0 ? most_rows(layer) : 0;
    const std::int64_t size = layer.heads() * columns;
    base::reserve_scratch(m_sums, size, "kvzap::h2o::sums");
    const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> mass(m_sums.data(), layer.heads(),
                                                                       columns);
    Kokkos::deep_copy(layer.exec(), mass, 0.0f);
    m_mass = mass;
  }
  static std::int64_t most_rows(const PolicyLayer& layer) {
    std::int64_t most = 0;
    for (int h = 0; h < layer.heads(); ++h) most = std::max(most, layer.rows(h));
    return most + layer.extents().new_tokens;
  }

  bool m_normalizes;
  bool m_local;
  std::int64_t m_first = 0;  // position of the step's first token
  std::int64_t m_end = 0;    // position after its last token
  RowVector m_sums;
  PolicyLayer::MassView m_mass;  // (head, row): sums of this step
};

}  // namespace

PolicyInfo h2o() {
  PolicyInfo info;
  info.name = "h2o";
  info.paper = "H2O, arXiv 2306.14048 (kvpress: observed attention)";
  info.formula = "mean attention of all queries that see the row";
  info.needs = "attention of all queries";
  info.cost = "time O(tokens d rows) per query head, as attention itself; memory O(rows)";
  info.make_class<H2O>();
  return info;
}

}  // namespace kvzap::policy
