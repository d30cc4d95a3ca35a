#include "attention/device/panel_mass.hpp"

#include <algorithm>
#include <cmath>

#include "attention/device/panel_rows.hpp"
#include "base/scratch.hpp"
#include "base/soft_cap.hpp"
#include "linalg/product.hpp"

namespace kvzap::attention {
namespace {

// Query rows that one thread reduces.
constexpr std::int64_t slice_rows = 64;

/// One panel of some heads and one tile of query tokens.
struct PanelOfMass {
  const std::int64_t* retained;
  const float* scores;   // (own head, query row, panel)
  const float* unscale;  // (head, query row)
  float* partial;        // (slice, own head, panel)
  float soft_cap;        // 0: none
  std::int64_t rows;     // query rows
  std::int64_t panel;
  std::int64_t begin;    // row of the panel's first column
  std::int64_t visible;  // the tile's first token sees this many rows beyond a head's retained rows
  std::int64_t first_token;
  int first_head, heads, group;
  bool is_max, has_row_factors, has_query_factors;

  KOKKOS_INLINE_FUNCTION std::int64_t slices() const {
    return (rows + slice_rows - 1) / slice_rows;
  }
};

void reduce_slices(const ExecutionSpace& exec, const PanelOfMass& p, const LogSumExpView& lse,
                   const MassFactors& factors) {
  const auto kernel = KOKKOS_LAMBDA(std::int64_t i) {
    const std::int64_t column = i % p.panel;
    const int own_head = static_cast<int>(i / p.panel % p.heads);
    const int head = p.first_head + own_head;
    const std::int64_t from = i / p.panel / p.heads * slice_rows;
    const std::int64_t to = from + slice_rows < p.rows ? from + slice_rows : p.rows;
    const std::int64_t row = p.begin + column;
    float mass = 0;
    for (std::int64_t q = from; q < to; ++q) {
      const std::int64_t token = q / p.group;
      if (row >= p.retained[head] + p.visible + token) continue;
      const int query_head = head * p.group + static_cast<int>(q % p.group);
      const float shift = lse(p.first_token + token, query_head);
      if (shift == minus_infinity) continue;
      float score =
          p.scores[(own_head * p.rows + q) * p.panel + column] * p.unscale[head * p.rows + q];
      if (p.soft_cap > 0) score = base::soft_capped(score, p.soft_cap);
      float probability = base::math::exp(score - shift);
      if (p.has_query_factors) probability *= factors.queries(p.first_token + token);
      if (p.has_row_factors) probability *= factors.rows(query_head, row);
      take_mass(probability, p.is_max, mass);
    }
    p.partial[i] = mass;
  };
  static_assert(sizeof(kernel) <= base::most_arguments, "Kokkos would wait");
  Kokkos::parallel_for("kvzap::mass::slices", DeviceRange(exec, 0, p.slices() * p.heads * p.panel),
                       kernel);
}

void reduce_panel(const ExecutionSpace& exec, const PanelOfMass& p,
                  const AttentionMass::MassView& mass) {
  Kokkos::parallel_for(
      "kvzap::mass::reduce", DeviceRange(exec, 0, p.heads * p.panel),
      KOKKOS_LAMBDA(std::int64_t i) {
        const int head = p.first_head + static_cast<int>(i / p.panel);
        const std::int64_t row = p.begin + i % p.panel;
        const std::int64_t seen_by_last = p.retained[head] + p.visible + p.rows / p.group - 1;
        if (row >= seen_by_last) return;
        for (std::int64_t slice = 0; slice < p.slices(); ++slice) {
          take_mass(p.partial[slice * p.heads * p.panel + i], p.is_max, mass(head, row));
        }
      });
}

}  // namespace

void PanelMass::operator()(const ExecutionSpace& exec, const AttentionSpan& span,
                           const MassCall& call) {
  with_value_type(call.dtype(), [&](auto zero) { compute<decltype(zero)>(exec, span, call); });
}

template <class Value>
void PanelMass::compute(const ExecutionSpace& exec, const AttentionSpan& span,
                        const MassCall& call) {
  const auto& cached = span.cached;
  const int kv_heads = call.kv_heads;
  const int dim = call.dim;
  const int group = call.group;
  const NewRows<Value> new_rows(span, call.new_keys, call.new_keys);
  const std::int64_t before = span.new_rows - span.queries;
  const std::int64_t tile = std::min(span.queries, tile_tokens);
  const std::int64_t most_query_rows = kv_heads * tile * group;
  const std::int64_t panel =
      std::clamp(most_scores / most_query_rows / least_rows * least_rows, least_rows, most_rows);
  const std::int64_t slices = (tile * group + slice_rows - 1) / slice_rows;
  auto* const queries =
      base::scratch_of<Value>(m_queries, most_query_rows * dim, "kvzap::mass::queries");
  auto* const keys = base::scratch_of<Value>(m_keys, kv_heads * panel * dim, "kvzap::mass::keys");
  base::reserve_scratch(m_scores, most_query_rows * panel, "kvzap::mass::scores");
  base::reserve_scratch(m_unscale, most_query_rows, "kvzap::mass::unscale");
  base::reserve_scratch(m_partial, slices * kv_heads * panel, "kvzap::mass::partial");

  for (std::int64_t first = 0; first < span.queries; first += tile) {
    const std::int64_t own = std::min(tile, span.queries - first);
    QueryRows rows{};
    rows.unscale = m_unscale.data();
    rows.count = own * group;
    rows.dim = dim;
    load_queries<Value>(exec, call.queries, kv_heads, span.first_query + first, rows, nullptr,
                        queries);
    const std::int64_t others = cached.ring_rows() + before + first + own;
    const auto take_panel = [&](const Panel& of) {
      gather<Value>(exec, cached, new_rows, of, {}, {keys, nullptr});
      linalg::Product scores = head_products<Value>(of.heads, {rows.count, panel, dim},
                                                    queries + of.first_head * rows.count * dim,
                                                    keys, true, m_scores.data());
      scores.alpha = 1.0f / std::sqrt(static_cast<float>(dim));
      linalg::multiply(exec, scores);

      PanelOfMass p{};
      p.retained = cached.retained.data();
      p.scores = m_scores.data();
      p.unscale = m_unscale.data();
      p.partial = m_partial.data();
      p.soft_cap = call.soft_cap;
      p.rows = rows.count;
      p.panel = panel;
      p.begin = of.begin;
      p.visible = cached.ring_rows() + before + first + 1;
      p.first_token = span.first_query + first;
      p.first_head = of.first_head;
      p.heads = of.heads;
      p.group = group;
      p.is_max = call.reduction == MassReduction::max;
      p.has_row_factors = call.factors.rows.extent(0) > 0;
      p.has_query_factors = call.factors.queries.extent(0) > 0;
      reduce_slices(exec, p, call.lse, call.factors);
      reduce_panel(exec, p, call.mass);
    };
    std::int64_t begin = 0;
    while (for_each_panel(cached, others, begin, panel, take_panel)) begin += panel;
  }
}

}  // namespace kvzap::attention
