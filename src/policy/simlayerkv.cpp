#include <fmt/format.h>

#include <algorithm>

#include "base/scratch.hpp"
#include "policy/registry.hpp"
#include "policy/row_protection.hpp"
#include "policy/window_attention.hpp"

namespace kvzap::policy {
namespace {

struct Shape : PolicyParameters {
  static constexpr double most = 1 << 30;
  double lazy_threshold =
      number("lazy-threshold", 1, {0, 1},
             "attention to first and newest rows above which a layer is lazy; 1: no layer is");
  std::int64_t last = integer("last", 1, {1, most}, "newest tokens whose queries count");
  std::int64_t recent =
      integer("recent", 1024, {2, most}, "newest rows that count; recent - last of them stay");
  std::int64_t initial = integer("initial", 4, {0, most}, "first rows that count and stay");

  /// A head with at most this number of rows keeps all of them.
  std::int64_t always_kept() const { return initial + recent + last; }
};

double sum_of_rows(const ExecutionSpace& exec, const RowVector& mass, Rows rows) {
  double sum = 0;
  Kokkos::parallel_reduce(
      "kvzap::simlayerkv::sum", RowRange(exec, rows.first, rows.second),
      KOKKOS_LAMBDA(std::int64_t r, double& partial) { partial += static_cast<double>(mass(r)); },
      sum);
  return sum;
}

void write_scores(const ExecutionSpace& exec, std::int64_t rows, Rows dropped, int head,
                  const Policy::ScoreView& scores) {
  Kokkos::parallel_for(
      "kvzap::simlayerkv::scores", RowRange(exec, 0, rows), KOKKOS_LAMBDA(std::int64_t r) {
        scores(head, r) = r >= dropped.first && r < dropped.second ? 0.0f : 1.0f;
      });
}

/// SimLayerKV (Zhang et al., arXiv 2410.13846): a layer is lazy if its newest queries attend only
/// to the first and the newest rows. A lazy layer keeps only these rows.
///
///   lazy  <=>  mean over the layer's query heads and the `last` newest queries of
///              (attention to the first `initial` rows + to the newest `recent` before the last)
///              > lazy-threshold
///
/// Scores are 1 for rows that stay and 0 for evicted ones; the policy has its own budget. Shapes:
/// queries (last, query heads, head_dim); ranks exchange one number per layer. Cost: 2 last rows
/// head_dim operations per query head.
///
/// As in kvpress: a lazy layer keeps its first `initial` and its newest `recent` - `last` rows.
/// With lazy-threshold 1, or for heads of at most initial + recent + last rows, all stay. The
/// default threshold, 1, evicts nothing: kvpress recommends 0.9 for Llama 3, 0.65 for Llama 2, 0.8
/// for Mistral, 0.85 for Qwen. The paper uses the last 32 queries during prefill (`last=32`).
class SimLayerKV final : public Policy {
 public:
  explicit SimLayerKV(const Shape& shape) : m_shape(shape) {}

  PolicyNeeds needs() const override {
    PolicyNeeds needs;
    needs.recent = m_shape.lazy_threshold < 1 ? m_shape.last : 0;
    return needs;
  }

  void score(PolicyLayer& layer, const ScoreView& scores) override {
    const bool lazy = m_shape.lazy_threshold < 1 && is_lazy(layer);
    for (int h = 0; h < layer.heads(); ++h) {
      const std::int64_t rows = layer.rows(h);
      Rows dropped(0, 0);
      if (lazy && rows > m_shape.always_kept()) {
        dropped = {m_shape.initial, rows - m_shape.recent + m_shape.last};
      }
      write_scores(layer.exec(), rows, dropped, h, scores);
    }
    if (layer.layer() + 1 == layer.extents().layers) m_attention.release();
  }

 private:
  bool is_lazy(PolicyLayer& layer) {
    const TokenBlock newest = layer.recent();
    double sum = 0;
    for (int h = 0; h < layer.heads(); ++h) {
      const std::int64_t rows = layer.rows(h);
      base::reserve_scratch(m_mass, rows, "kvzap::simlayerkv::mass");
      m_attention.sum(layer, h, newest, WindowAttention::Factor::one, m_mass);
      const std::int64_t before = std::max<std::int64_t>(0, rows - m_shape.last);
      const std::int64_t initial = std::min(m_shape.initial, before);
      const std::int64_t recent = std::max(initial, before - m_shape.recent);
      sum += sum_of_rows(layer.exec(), m_mass, {0, initial}) +
             sum_of_rows(layer.exec(), m_mass, {recent, before});
    }
    layer.comm().all_reduce_sum(&sum, 1);
    const auto& extents = layer.extents();
    return sum / (static_cast<double>(newest.count) * extents.kv_heads * extents.group) >
           m_shape.lazy_threshold;
  }

  Shape m_shape;
  WindowAttention m_attention;
  RowVector m_mass;
};

}  // namespace

PolicyInfo simlayerkv() {
  PolicyInfo info;
  info.name = "simlayerkv";
  info.paper = "SimLayerKV, arXiv 2410.13846";
  info.formula =
      "1 for the first and newest rows, else 0, in layers that attend only to those rows";
  info.needs = "queries of the newest tokens, keys";
  info.cost = "time O(last d rows) per query head; memory O(rows)";
  info.has_own_budget = true;
  info.make_with<Shape>([](const Shape& shape, const PolicySetup&) {
    if (shape.recent <= shape.last) {
      throw Error(fmt::format("recent={}: a lazy layer keeps recent - last rows, and last={}",
                              shape.recent, shape.last));
    }
    return [shape] { return std::make_unique<SimLayerKV>(shape); };
  });
  return info;
}

}  // namespace kvzap::policy
