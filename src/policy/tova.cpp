#include <algorithm>

#include "base/scratch.hpp"
#include "policy/registry.hpp"
#include "policy/row_protection.hpp"
#include "policy/window_attention.hpp"

namespace kvzap::policy {
namespace {

using Sums = Kokkos::View<double*, MemorySpace>;

void add_by_position(const ExecutionSpace& exec, const PolicyLayer::PositionView& positions,
                     std::int64_t rows, const RowVector& mass, const Sums& sums) {
  Kokkos::parallel_for(
      "kvzap::tova::add", RowRange(exec, 0, rows),
      KOKKOS_LAMBDA(std::int64_t r) { sums(positions(r)) += static_cast<double>(mass(r)); });
}

void take_by_position(const ExecutionSpace& exec, const PolicyLayer::PositionView& positions,
                      std::int64_t rows, const Sums& sums, double query_heads, int head,
                      const Policy::ScoreView& scores) {
  Kokkos::parallel_for(
      "kvzap::tova::take", RowRange(exec, 0, rows), KOKKOS_LAMBDA(std::int64_t r) {
        scores(head, r) = static_cast<float>(sums(positions(r)) / query_heads);
      });
}

/// TOVA (Oren et al., arXiv 2401.06104): keeps rows to which the newest token attends, the same for
/// all heads of a layer.
///
///   s(r) = mean over all query heads of the layer of p(newest query, r)
///
/// Heads may have been pruned separately before. A head that lacks a row gives it no attention.
/// Shapes: queries (1, query heads, head_dim); the sums of a layer have one number per position,
/// and ranks add them up. Cost: 2 rows head_dim operations per query head, 8 bytes per position.
///
/// As in kvpress, the newest row gets the layer's largest score + 1. In the paper its own attention
/// decides (`protect=off`).
class Tova final : public Policy {
 public:
  struct Parameters : PolicyParameters {
    bool protects = flag("protect", true, "whether the newest row always stays");
  };

  explicit Tova(const Parameters& parameters) : m_protects(parameters.protects) {}

  PolicyNeeds needs() const override {
    PolicyNeeds needs;
    needs.recent = 1;
    return needs;
  }

  void score(PolicyLayer& layer, const ScoreView& scores) override {
    const TokenBlock newest = layer.recent();
    const std::int64_t positions = newest.first + newest.count;
    base::reserve_scratch(m_sums, positions, "kvzap::tova::sums");
    const Sums sums = Kokkos::subview(m_sums, std::make_pair(std::int64_t{0}, positions));
    Kokkos::deep_copy(layer.exec(), sums, 0.0);
    for (int h = 0; h < layer.heads(); ++h) {
      base::reserve_scratch(m_mass, layer.rows(h), "kvzap::tova::mass");
      m_attention.sum(layer, h, newest, WindowAttention::Factor::one, m_mass);
      add_by_position(layer.exec(), layer.positions(h), layer.rows(h), m_mass, sums);
    }
    sum_over_ranks(layer, sums);

    const double query_heads =
        static_cast<double>(layer.extents().kv_heads) * layer.extents().group;
    std::vector<Rows> protected_rows;
    for (int h = 0; h < layer.heads(); ++h) {
      take_by_position(layer.exec(), layer.positions(h), layer.rows(h), sums, query_heads, h,
                       scores);
      if (m_protects)
        protected_rows.emplace_back(rows_before(layer, h, newest.first), layer.rows(h));
    }
    if (m_protects) protect_rows(layer, scores, protected_rows);
    if (layer.layer() + 1 == layer.extents().layers) m_attention.release();
  }

 private:
  static void sum_over_ranks(PolicyLayer& layer, const Sums& sums) {
    if (layer.comm().size() == 1) return;
    const auto host = Kokkos::create_mirror_view(sums);
    Kokkos::deep_copy(layer.exec(), host, sums);
    base::fence(layer.exec(), "kvzap::tova: ranks add up what lies on the host");
    layer.comm().all_reduce_sum(host.data(), host.size());
    Kokkos::deep_copy(layer.exec(), sums, host);
    base::fence(layer.exec(), "kvzap::tova: the copy on the host ends here");
  }

  bool m_protects;
  WindowAttention m_attention;
  RowVector m_mass;
  Sums m_sums;
};

}  // namespace

PolicyInfo tova() {
  PolicyInfo info;
  info.name = "tova";
  info.paper = "TOVA, arXiv 2401.06104";
  info.formula = "attention of the newest query, mean over all heads of the layer";
  info.needs = "query of the newest token, keys";
  info.cost = "time O(d rows) per query head; memory O(tokens)";
  info.make_class<Tova>();
  return info;
}

}  // namespace kvzap::policy
