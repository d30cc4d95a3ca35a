#include "policy/snapkv.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/scratch.hpp"
#include "policy/registry.hpp"
#include "policy/row_protection.hpp"
#include "policy/window_attention.hpp"

namespace kvzap::policy {
namespace {

struct Pooling {
  std::int64_t kernel;
  bool is_max;
};

// scores(head, r) = factor * mass(r), pooled over neighbouring rows below `rows`.
void pool_rows(const ExecutionSpace& exec, const RowVector& mass, std::int64_t rows, float factor,
               const Pooling& pooling, int head, const Policy::ScoreView& scores) {
  const std::int64_t reach = pooling.kernel / 2;
  const bool is_max = pooling.is_max;
  if (!is_max) factor /= static_cast<float>(pooling.kernel);
  Kokkos::parallel_for(
      "kvzap::snapkv::pool", RowRange(exec, 0, rows), KOKKOS_LAMBDA(std::int64_t r) {
        const std::int64_t begin = r < reach ? 0 : r - reach;
        const std::int64_t end = r + reach < rows ? r + reach + 1 : rows;
        float pooled = 0;
        for (std::int64_t i = begin; i < end; ++i) {
          const float x = mass(i);
          pooled = is_max ? (x > pooled ? x : pooled) : pooled + x;
        }
        scores(head, r) = factor * pooled;
      });
}

/// SnapKV (Li et al., arXiv 2404.14469): later tokens attend to the same rows as the newest w
/// tokens, the observation window.
///
///   s(r) = pool_k(mean over window and group of p(q, r)),  r a row before the window
///
/// Here p are the softmax probabilities of the query over all rows that it sees, and pool_k is the
/// mean over k rows around r (zeros beyond the ends). The window's own rows have the layer's
/// largest score + 1. Shapes: queries (w, query heads, head_dim), one score per row of each head.
/// Cost: 2 w g rows head_dim operations per KV head of g query heads; see WindowAttention for
/// memory.
///
/// As in kvpress, the mean over the group is taken before rows are chosen. The paper chooses for
/// each query head separately; here a group shares its pairs. The paper pools with a maximum in its
/// retrieval test (`pooling=max`; here of the group's mean) and a mean elsewhere. Its windows have
/// 16 to 32 tokens, its kernels 5 to 7.
///
/// kvpress refuses sequences that are not longer than the window. Here, the window of such a
/// sequence is its newer half.
class SnapKV final : public Policy {
 public:
  explicit SnapKV(const SnapKvParameters& parameters)
      : m_window(parameters.window), m_pooling{parameters.kernel, parameters.pooling == "max"} {}

  PolicyNeeds needs() const override {
    PolicyNeeds needs;
    needs.recent = m_window;
    return needs;
  }

  void score(PolicyLayer& layer, const ScoreView& scores) override {
    const TokenBlock window = observation_window(layer, m_window);
    const auto queries = static_cast<float>(window.count * layer.extents().group);
    std::vector<Rows> protected_rows;
    for (int h = 0; h < layer.heads(); ++h) {
      const std::int64_t rows = layer.rows(h);
      const std::int64_t before = rows_before(layer, h, window.first);
      base::reserve_scratch(m_mass, rows, "kvzap::snapkv::mass");
      m_attention.sum(layer, h, window, WindowAttention::Factor::one, m_mass);
      pool_rows(layer.exec(), m_mass, before, 1 / queries, m_pooling, h, scores);
      protected_rows.emplace_back(before, rows);
    }
    protect_rows(layer, scores, protected_rows);
    if (layer.layer() + 1 == layer.extents().layers) m_attention.release();
  }

 private:
  std::int64_t m_window;
  Pooling m_pooling;
  WindowAttention m_attention;
  RowVector m_mass;
};

}  // namespace

PolicyMaker make_snapkv(const SnapKvParameters& parameters, const PolicySetup&) {
  if (parameters.kernel % 2 == 0) {
    throw Error(fmt::format("kernel={}: the rows pooled around a row are an odd number",
                            parameters.kernel));
  }
  return [parameters] { return std::make_unique<SnapKV>(parameters); };
}

PolicyInfo snapkv() {
  PolicyInfo info;
  info.name = "snapkv";
  info.paper = "SnapKV, arXiv 2404.14469";
  info.formula = "mean attention of the newest w queries, pooled over k neighbouring rows";
  info.needs = "queries of the newest w tokens, keys";
  info.cost = "time O(w d rows) per query head; memory O(rows), at most 16 MiB more";
  info.make_with<SnapKvParameters>(make_snapkv);
  return info;
}

}  // namespace kvzap::policy
