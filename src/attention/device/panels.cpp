#include "attention/device/panels.hpp"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "attention/device/panel_rows.hpp"
#include "base/kokkos_compat.hpp"
#include "base/scratch.hpp"
#include "base/soft_cap.hpp"
#include "base/value_types.hpp"

namespace kvzap::attention {
namespace {

/// The values of a tile's own tokens: the only rows that some of its queries see and others do not.
template <class Value>
struct OwnValues {
  const Value* values;  // of the tile's first token
  std::int64_t row_stride, head_stride, dim_stride;
  std::int64_t count;
  int* flags;  // (head, own token): whether one of its values is not finite
  int* any;    // (head): whether any of those values is not finite

  KOKKOS_INLINE_FUNCTION float at(int head, std::int64_t own, int d) const {
    return static_cast<float>(values[own * row_stride + head * head_stride + d * dim_stride]);
  }
};

/// Flags the tile's own tokens that have a value that is not finite.
template <class Value>
void flag_values(const ExecutionSpace& exec, int kv_heads, int dim, const OwnValues<Value>& own) {
  Kokkos::parallel_for(
      "kvzap::attention::flag_values", DeviceRange(exec, 0, kv_heads * own.count),
      KOKKOS_LAMBDA(std::int64_t i) {
        const int head = static_cast<int>(i / own.count);
        int found = 0;
        for (int d = 0; d < dim; ++d) {
          const float x = own.at(head, i % own.count, d);
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
                    const QueryRows& rows, const OwnValues<Value>& own_values, float* scores,
                    Value* weights) {
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
          const std::int64_t later = own_values.count > 0 ? local % rows.count / seen.group : 0;
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
          if (own_values.any[head] != 0) {
            const std::int64_t first_own = before_first - 1;
            for (std::int64_t r = first_own < begin ? begin : first_own; r < limit; ++r) {
              if (own_values.flags[head * own_values.count + r - first_own] == 0) continue;
              const float w = static_cast<float>(weight[r]);
              Kokkos::parallel_for(Kokkos::ThreadVectorRange(team, rows.dim), [&](int d) {
                rows.sums[i * rows.dim + d] += w * own_values.at(head, r - first_own, d);
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

template <class OutputView>
void store(const ExecutionSpace& exec, int kv_heads, std::int64_t first, const QueryRows& rows,
           const OutputView& output) {
  const int group = static_cast<int>(output.extent(1)) / kv_heads;
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

  PanelSizes(int kv_heads, int group, int dim, std::int64_t tokens) {
    const std::int64_t tile = std::min(tokens, tile_tokens);
    const std::int64_t query_rows = kv_heads * tile * group;
    queries = query_rows * dim;
    keys = kv_heads * most_rows * dim;
    scores = std::max(std::min(most_scores, query_rows * most_rows), query_rows * least_rows);
    rows = 3 * query_rows;
    flags = kv_heads * (tile + 1);
  }
};

}  // namespace

template <class Value>
std::size_t PanelAttention<Value>::scratch_bytes(int kv_heads, int group, int dim,
                                                 std::int64_t tokens) {
  const PanelSizes sizes(kv_heads, group, dim, tokens);
  constexpr std::size_t weight = std::is_same_v<Value, float> ? 0 : sizeof(Value);
  return (sizes.queries + 2 * sizes.keys) * sizeof(Value) +
         (sizes.queries + sizes.rows) * sizeof(float) + sizes.scores * (sizeof(float) + weight) +
         sizes.flags * sizeof(int);
}

template <class Value>
void PanelAttention<Value>::reserve(int kv_heads, int group, int dim, std::int64_t tokens) {
  const PanelSizes sizes(kv_heads, group, dim, tokens);
  base::reserve_scratch(m_queries, sizes.queries, "kvzap::attention::queries");
  base::reserve_scratch(m_keys, sizes.keys, "kvzap::attention::keys");
  base::reserve_scratch(m_values, sizes.keys, "kvzap::attention::values");
  base::reserve_scratch(m_scores, sizes.scores, "kvzap::attention::scores");
  base::reserve_scratch(m_sums, sizes.queries, "kvzap::attention::sums");
  base::reserve_scratch(m_rows, sizes.rows, "kvzap::attention::rows");
  base::reserve_scratch(m_flags, sizes.flags, "kvzap::attention::flags");
  if constexpr (!std::is_same_v<Value, float>) {
    base::reserve_scratch(m_weights, sizes.scores, "kvzap::attention::weights");
  }
}

template <class Value>
void PanelAttention<Value>::operator()(const ExecutionSpace& exec, const Span& span,
                                       const AttentionCall<Value>& call) {
  const auto part = [](const auto& view, std::int64_t begin, std::int64_t count) {
    return Kokkos::subview(view, std::make_pair(begin, begin + count), Kokkos::ALL, Kokkos::ALL);
  };
  const Attention::QueryView queries = part(call.queries, span.first_query, span.queries);
  const Attention::OutputView output = part(call.output, span.first_query, span.queries);
  const RowsView<Value> new_keys = part(call.new_keys, span.first_new, span.new_rows);
  const RowsView<Value> new_values = part(call.new_values, span.first_new, span.new_rows);
  const auto& cached = span.cached;
  const std::int64_t tokens = span.queries;
  const int kv_heads = call.kv_heads;
  const int dim = call.dim;
  const int group = call.group;
  const std::int64_t tile = std::min(tokens, tile_tokens);
  const std::int64_t most_query_rows = kv_heads * tile * group;
  const std::int64_t panel_rows =
      std::clamp(most_scores / most_query_rows / least_rows * least_rows, least_rows, most_rows);
  reserve(kv_heads, group, dim, tokens);
  Value* weights;
  if constexpr (std::is_same_v<Value, float>) {
    weights = m_scores.data();  // a weight replaces its score
  } else {
    weights = m_weights.data();
  }

  for (std::int64_t first = 0; first < tokens; first += tile) {
    const std::int64_t own = std::min(tile, tokens - first);
    QueryRows rows{};
    rows.count = own * group;
    rows.dim = dim;
    rows.maximum = m_rows.data();
    rows.weight = m_rows.data() + most_query_rows;
    rows.unscale = m_rows.data() + 2 * most_query_rows;
    rows.sums = m_sums.data();
    OwnValues<Value> own_values{};
    const std::int64_t seen = span.seen_new_rows(first);  // by the tile's first token
    const std::int64_t first_own = std::max<std::int64_t>(0, seen - 1);
    own_values.values = new_values.data() + first_own * new_values.stride(0);
    own_values.row_stride = new_values.stride(0);
    own_values.head_stride = new_values.stride(1);
    own_values.dim_stride = new_values.stride(2);
    own_values.count = span.new_rows > 0 ? own : 0;
    own_values.flags = m_flags.data();
    own_values.any = m_flags.data() + kv_heads * own;
    load_queries<Value>(exec, queries, kv_heads, first, rows, own_values.any, m_queries.data());
    flag_values(exec, kv_heads, dim, own_values);

    // A head's rows: its retained rows, its ring, and the new rows up to the tile's last token.
    const std::int64_t others = cached.ring_rows() + span.seen_new_rows(first + own - 1);
    std::int64_t longest = 0;
    for (int h = 0; h < kv_heads; ++h) longest = std::max(longest, cached.bounds(h) + others);
    // Whole panels before the window of the tile's first token are left out.
    const std::int64_t left = seen - span.window;
    const std::int64_t skipped = span.window > 0 && left > 0 ? left / panel_rows * panel_rows : 0;
    for (std::int64_t begin = skipped; begin < longest; begin += panel_rows) {
      // Runs of heads that still have rows: after pruning, lengths differ.
      for (int head = 0; head < kv_heads;) {
        if (cached.bounds(head) + others <= begin) {
          ++head;
          continue;
        }
        int end = head + 1;
        while (end < kv_heads && cached.bounds(end) + others > begin) ++end;
        const Panel panel{begin, panel_rows, head, end - head};
        gather<Value>(exec, cached, new_keys, new_values, panel,
                      {first_own, own_values.count, own_values.flags},
                      {m_keys.data(), m_values.data()});

        linalg::Product<Value> scores = head_products<Value>(
            panel.heads, {rows.count, panel_rows, dim}, m_queries.data() + head * rows.count * dim,
            m_keys.data(), true, m_scores.data());
        scores.alpha = 1.0f / std::sqrt(static_cast<float>(dim));
        linalg::multiply(exec, scores);
        if (call.soft_cap > 0) {
          cap_scores(exec, panel, rows, call.soft_cap, m_scores.data());
        }

        online_softmax<Value>(
            exec, {cached.retained, group, cached.ring_rows() + seen - begin, span.window}, panel,
            rows, own_values, m_scores.data(), weights);

        linalg::Product<Value> sums =
            head_products<Value>(panel.heads, {rows.count, dim, panel_rows}, weights,
                                 m_values.data(), false, m_sums.data() + head * rows.count * dim);
        sums.beta = 1;
        linalg::multiply(exec, sums);
        head = end;
      }
    }
    store(exec, kv_heads, first, rows, output);
    if (call.wants_lse()) {
      store_lse(exec, kv_heads, group, span.first_query + first, rows, call.lse);
    }
  }
}

#define KVZAP_INSTANTIATE(Value) template class PanelAttention<Value>;
KVZAP_FOR_EACH_VALUE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE

}  // namespace kvzap::attention
