#include "base/scratch.hpp"
#include "policy/registry.hpp"
#include "policy/row_math.hpp"

namespace kvzap::policy {
namespace {

using Floats = Kokkos::View<float*, MemorySpace>;

// The anchor's length does not affect a cosine. It is scaled to length 1 (in kvpress, to the length
// of a mean), so that sums over many rows stay in range.
void unit_anchor(const ExecutionSpace& exec, const ColumnSums::Sums& sums, std::int64_t dim,
                 const Floats& anchor) {
  Kokkos::parallel_for(
      "kvzap::policy::keydiff_anchor", PolicyRange(exec, 0, 1), KOKKOS_LAMBDA(std::int64_t) {
        double squares = 0;
        for (std::int64_t d = 0; d < dim; ++d) squares += sums(d) * sums(d);
        const double length = base::math::sqrt(squares);
        for (std::int64_t d = 0; d < dim; ++d) {
          anchor(d) = length > 0 ? static_cast<float>(sums(d) / length) : 0.0f;
        }
      });
}

void negative_cosines(const ExecutionSpace& exec, const PolicyLayer::RowsView& keys,
                      const Floats& anchor, const Floats& inverse, int head,
                      const Policy::ScoreView& scores) {
  const std::int64_t dim = keys.extent(1);
  Kokkos::parallel_for(
      "kvzap::policy::keydiff", PolicyRange(exec, 0, keys.extent(0)),
      KOKKOS_LAMBDA(std::int64_t r) {
        scores(head, r) = -dot(&keys(r, 0), anchor.data(), dim) * inverse(r);
      });
}

/// Keeps keys that differ from the others. The score of a row is the negative cosine of the angle
/// between its key, after RoPE, and the mean of all keys of the head. The keys of the mean are
/// scaled to length 1 (Park et al.: "KeyDiff", arXiv 2504.15364).
///
/// Two passes over the keys, (rows, head_dim) of each head; one float per row.
///
/// The paper evicts block by block. kvpress' press alone does not; sparse prefill does.
class KeyDiff final : public Policy {
 public:
  void score(PolicyLayer& layer, const ScoreView& scores) override {
    const std::int64_t dim = layer.extents().head_dim;
    base::reserve_scratch(m_anchor, dim, "kvzap::policy::keydiff_anchor");
    for (int h = 0; h < layer.heads(); ++h) {
      const std::int64_t rows = layer.rows(h);
      if (rows == 0) continue;
      const auto keys = layer.compared_keys(h);
      base::reserve_scratch(m_inverse, rows, "kvzap::policy::keydiff_norms");
      inverse_norms(layer.exec(), keys, m_inverse);
      unit_anchor(layer.exec(), m_sums(layer.exec(), keys, m_inverse), dim, m_anchor);
      negative_cosines(layer.exec(), keys, m_anchor, m_inverse, h, scores);
    }
  }

 private:
  ColumnSums m_sums;
  Floats m_inverse;  // (row): 1 / norm
  Floats m_anchor;   // (head_dim)
};

}  // namespace

PolicyInfo keydiff() {
  PolicyInfo info;
  info.name = "keydiff";
  info.paper = "KeyDiff, arXiv 2504.15364";
  info.formula = "-cos(k, mean of k / ||k||)";
  info.needs = "keys";
  info.cost = "O(rows * head_dim), a float per row";
  info.scores_parts = true;
  info.make = [](const PolicyArguments&, const PolicySetup&) -> PolicyMaker {
    return [] { return std::make_unique<KeyDiff>(); };
  };
  return info;
}

}  // namespace kvzap::policy
