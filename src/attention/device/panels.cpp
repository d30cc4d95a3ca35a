#include "attention/device/panels.hpp"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "attention/device/panel_rows.hpp"
#include "base/kokkos_compat.hpp"
#include "base/scratch.hpp"
#include "base/soft_cap.hpp"

namespace kvzap::attention {
namespace {

/// Flags the tile's own tokens that have a value that is not finite.
template <class Value>
void flag_values(const ExecutionSpace& exec, int kv_heads, int dim, const NewRows<Value>& new_rows,
                 const OwnTokens& own) {
  Kokkos::parallel_for(
      "kvzap::attention::flag_values", DeviceRange(exec, 0, kv_heads * own.count),
      KOKKOS_LAMBDA(std::int64_t i) {
        const int head = static_cast<int>(i / own.count);
        const RowRun<Value> row = new_rows.of_head(head, own.first + i % own.count);
        int found = 0;
        for (int d = 0; d < dim; ++d) {
          const auto x = static_cast<float>(row.values[d * row.dim_stride]);
          if ((base::float_bits(x) & 0x7f800000u) == 0x7f800000u) found = 1;
        }
        own.flags[i] = found;
        if (found != 0) Kokkos::atomic_fetch_add(own.any + head, 1);
      });
}

/// The rows of a panel that a tile's queries see: those of token t see the rows before
/// retained(head) + visible + t; the last of these is the token's own row. With a window they see
/// the last `window` of these rows. Without own tokens all see the same rows.
struct SeenRows {
  Kokkos::View<const std::int64_t*, MemorySpace> retained;
  int group;
  std::int64_t visible;
  std::int64_t window;
};

/// Turns scores (head, query row, row of the panel) into weights relative to the largest score so
/// far, and rescales the sums so far. Adds flagged values of the tile's own tokens to those sums.
template <class Value>
void online_softmax(const ExecutionSpace& exec, const SeenRows& seen, const Panel& panel,
                    const QueryRows& rows, const NewRows<Value>& new_rows,
                    const OwnTokens& own_tokens, float* scores, Value* weights) {
  const base::TeamShape shape = base::team_shape(row_team);
  const int threads = shape.threads;
  const std::int64_t total = panel.heads * rows.count;
  Kokkos::parallel_for(
      "kvzap::attention::softmax",
      base::TeamPolicy(exec, static_cast<int>((total + threads - 1) / threads), threads,
                       shape.lanes),
      KOKKOS_LAMBDA(const base::TeamMember& team) {
        const std::int64_t first = std::int64_t{team.league_rank()} * threads;
        const int own = static_cast<int>(total - first < threads ? total - first : threads);
        Kokkos::parallel_for(Kokkos::TeamThreadRange(team, own), [&](int t) {
          const std::int64_t local = first + t;
          // among all heads' query rows
          const std::int64_t i = panel.first_head * rows.count + local;
          const int head = panel.first_head + static_cast<int>(local / rows.count);
          const std::int64_t later = own_tokens.count > 0 ? local % rows.count / seen.group : 0;
          const std::int64_t before_first = seen.retained(head) + seen.visible;
          const std::int64_t most = before_first + later;
          const std::int64_t limit = most < 0 ? 0 : (most < panel.rows ? most : panel.rows);
          const std::int64_t begin = seen.window > 0 && most > seen.window ? most - seen.window : 0;
          float* const score = scores + local * panel.rows;
          Value* const weight = weights + local * panel.rows;
          const float unscale = rows.unscale[i];
          const float before = rows.maximum[i];
          float largest = before;
          Kokkos::parallel_reduce(
              Kokkos::ThreadVectorRange(team, limit),
              [&](std::int64_t r, float& found) {
                const float s = score[r] * unscale;
                if (r >= begin && s > found) found = s;
              },
              Kokkos::Max<float>(largest));
          if (before > largest) largest = before;
          const float shift = shift_of(largest);
          float sum = 0;
          Kokkos::parallel_reduce(
              Kokkos::ThreadVectorRange(team, panel.rows),
              [&](std::int64_t r, float& partial) {
                const Value w(r >= begin && r < limit ? base::math::exp(score[r] * unscale - shift)
                                                      : 0.0f);
                weight[r] = w;
                partial += static_cast<float>(w);
              },
              sum);
          const float factor = largest > before ? base::math::exp(before - shift) : 1.0f;
          if (factor != 1.0f) {
            Kokkos::parallel_for(Kokkos::ThreadVectorRange(team, rows.dim),
                                 [&](int d) { rows.sums[i * rows.dim + d] *= factor; });
          }
          // (After this, all lanes see the weights that the other lanes have written.)
          Kokkos::single(Kokkos::PerThread(team), [&] {
            rows.maximum[i] = largest;
            rows.weight[i] = rows.weight[i] * factor + sum;
          });
          base::fence_lanes();
          if (own_tokens.any[head] != 0) {
            const std::int64_t first_own = before_first - 1;
            for (std::int64_t r = first_own < begin ? begin : first_own; r < limit; ++r) {
              if (own_tokens.flags[head * own_tokens.count + r - first_own] == 0) continue;
              const float w = static_cast<float>(weight[r]);
              const RowRun<Value> row = new_rows.of_head(head, own_tokens.first + r - first_own);
              Kokkos::parallel_for(Kokkos::ThreadVectorRange(team, rows.dim), [&](int d) {
                rows.sums[i * rows.dim + d] +=
                    w * static_cast<float>(row.values[d * row.dim_stride]);
              });
            }
          }
        });
      });
}

/// Caps scores (head, query row, row of the panel). They are multiples of scaled scores by powers
/// of two.
void cap_scores(const ExecutionSpace& exec, const Panel& panel, const QueryRows& rows, float cap,
                float* scores) {
  Kokkos::parallel_for(
      "kvzap::attention::soft_cap", DeviceRange(exec, 0, panel.heads * rows.count * panel.rows),
      KOKKOS_LAMBDA(std::int64_t i) {
        const float unscale = rows.unscale[panel.first_head * rows.count + i / panel.rows];
        scores[i] = base::soft_capped(scores[i] * unscale, cap) / unscale;
      });
}

void store(const ExecutionSpace& exec, int kv_heads, int group, std::int64_t first,
           const QueryRows& rows, const Attention::OutputView& output) {
  Kokkos::parallel_for(
      "kvzap::attention::store", DeviceRange(exec, 0, kv_heads * rows.count * rows.dim),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t row = i / rows.dim;
        const std::int64_t own = row % rows.count;
        output(first + own / group, row / rows.count * group + own % group, i % rows.dim) =
            rows.sums[i] * inverse_of(rows.weight[row]);
      });
}

void store_lse(const ExecutionSpace& exec, int kv_heads, int group, std::int64_t first,
               const QueryRows& rows, const LogSumExpView& lse) {
  Kokkos::parallel_for(
      "kvzap::attention::store_lse", DeviceRange(exec, 0, kv_heads * rows.count),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t own = i % rows.count;
        lse(first + own / group, i / rows.count * group + own % group) =
            log_sum_exp(rows.maximum[i], rows.weight[i]);
      });
}

/// Elements of each buffer, for at most these numbers of KV heads, query heads and tokens.
struct PanelSizes {
  std::int64_t queries, keys, scores, rows, flags;

  explicit PanelSizes(const AttentionExtents& extents) {
    const std::int64_t tile = std::min(extents.tokens, tile_tokens);
    const std::int64_t query_rows = extents.kv_heads * tile * extents.group;
    queries = query_rows * extents.head_dim;
    keys = extents.kv_heads * most_rows * extents.head_dim;
    scores = std::max(std::min(most_scores, query_rows * most_rows), query_rows * least_rows);
    rows = 3 * query_rows;
    flags = extents.kv_heads * (tile + 1);
  }
};

}  // namespace

std::size_t PanelAttention::scratch_bytes(DType dtype, const AttentionExtents& extents) {
  const PanelSizes sizes(extents);
  const std::size_t value = size_of(dtype);
  const std::size_t weight = dtype == DType::f32 ? 0 : value;
  return (sizes.queries + 2 * sizes.keys) * value + (sizes.queries + sizes.rows) * sizeof(float) +
         sizes.scores * (sizeof(float) + weight) + sizes.flags * sizeof(int);
}

void PanelAttention::reserve(DType dtype, const AttentionExtents& extents) {
  const PanelSizes sizes(extents);
  const auto value = static_cast<std::int64_t>(size_of(dtype));
  base::reserve_scratch(m_queries, sizes.queries * value, "kvzap::attention::queries");
  base::reserve_scratch(m_keys, sizes.keys * value, "kvzap::attention::keys");
  base::reserve_scratch(m_values, sizes.keys * value, "kvzap::attention::values");
  base::reserve_scratch(m_scores, sizes.scores, "kvzap::attention::scores");
  base::reserve_scratch(m_sums, sizes.queries, "kvzap::attention::sums");
  base::reserve_scratch(m_rows, sizes.rows, "kvzap::attention::rows");
  base::reserve_scratch(m_flags, sizes.flags, "kvzap::attention::flags");
  if (dtype != DType::f32) {
    base::reserve_scratch(m_weights, sizes.scores * value, "kvzap::attention::weights");
  }
}

void PanelAttention::operator()(const ExecutionSpace& exec, const Span& span,
                                const AttentionCall& call) {
  reserve(call.dtype(), {call.kv_heads, call.group, call.dim, 1, span.queries});
  with_value_type(call.dtype(), [&](auto zero) { attend<decltype(zero)>(exec, span, call); });
}

template <class Value>
void PanelAttention::attend(const ExecutionSpace& exec, const Span& span,
                            const AttentionCall& call) {
  const NewRows<Value> new_rows(span, call.new_keys, call.new_values);
  const auto& cached = span.cached;
  const int kv_heads = call.kv_heads;
  const int dim = call.dim;
  const int group = call.group;
  const std::int64_t tile = std::min(span.queries, tile_tokens);
  const std::int64_t most_query_rows = kv_heads * tile * group;
  const std::int64_t panel_rows =
      std::clamp(most_scores / most_query_rows / least_rows * least_rows, least_rows, most_rows);
  auto* const queries = reinterpret_cast<Value*>(m_queries.data());
  auto* const keys = reinterpret_cast<Value*>(m_keys.data());
  auto* const values = reinterpret_cast<Value*>(m_values.data());
  auto* const weights = std::is_same_v<Value, float> ? reinterpret_cast<Value*>(m_scores.data())
                                                     : reinterpret_cast<Value*>(m_weights.data());

  for (std::int64_t first = 0; first < span.queries; first += tile) {
    const std::int64_t own = std::min(tile, span.queries - first);
    const std::int64_t first_query = span.first_query + first;
    QueryRows rows{};
    rows.count = own * group;
    rows.dim = dim;
    rows.maximum = m_rows.data();
    rows.weight = m_rows.data() + most_query_rows;
    rows.unscale = m_rows.data() + 2 * most_query_rows;
    rows.sums = m_sums.data();
    const std::int64_t seen = span.seen_new_rows(first);  // by the tile's first token
    const OwnTokens own_tokens{std::max<std::int64_t>(0, seen - 1), span.new_rows > 0 ? own : 0,
                               m_flags.data(), m_flags.data() + kv_heads * own};
    load_queries<Value>(exec, call.queries, kv_heads, first_query, rows, own_tokens.any, queries);
    flag_values(exec, kv_heads, dim, new_rows, own_tokens);

    // A head's rows: its retained rows, its ring, and the new rows up to the tile's last token.
    const std::int64_t others = cached.ring_rows() + span.seen_new_rows(first + own - 1);
    const auto attend_panel = [&](const Panel& panel) {
      const std::int64_t first_row = panel.first_head * rows.count;
      gather<Value>(exec, cached, new_rows, panel, own_tokens, {keys, values});
      linalg::Product scores =
          head_products<Value>(panel.heads, {rows.count, panel_rows, dim},
                               queries + first_row * dim, keys, true, m_scores.data());
      scores.alpha = 1.0f / std::sqrt(static_cast<float>(dim));
      linalg::multiply(exec, scores);
      if (call.soft_cap > 0) cap_scores(exec, panel, rows, call.soft_cap, m_scores.data());
      online_softmax<Value>(
          exec, {cached.retained, group, cached.ring_rows() + seen - panel.begin, span.window},
          panel, rows, new_rows, own_tokens, m_scores.data(), weights);
      linalg::Product sums =
          head_products<Value>(panel.heads, {rows.count, dim, panel_rows}, weights, values, false,
                               m_sums.data() + first_row * dim);
      sums.beta = 1;
      linalg::multiply(exec, sums);
    };
    // Whole panels before the window of the tile's first token are left out.
    const std::int64_t left = seen - span.window;
    std::int64_t begin = span.window > 0 && left > 0 ? left / panel_rows * panel_rows : 0;
    while (for_each_panel(cached, others, begin, panel_rows, attend_panel)) begin += panel_rows;
    store(exec, kv_heads, group, first_query, rows, call.output);
    if (call.wants_lse()) store_lse(exec, kv_heads, group, first_query, rows, call.lse);
  }
}

}  // namespace kvzap::attention
