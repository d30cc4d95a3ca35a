#include "attention/device/panels.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "attention/device/row_vector.hpp"
#include "base/instantiate.hpp"
#include "base/kokkos_compat.hpp"
#include "base/scratch.hpp"
#include "linalg/product.hpp"
#include "linalg/rounded_rows.hpp"

namespace kvzap::detail {
namespace {

constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

// Query tokens of a tile: as many as a decoder takes through a layer at once.
constexpr std::int64_t tile_tokens = 512;
// Rows of a panel. The fewer query rows there are, the more, up to where a panel's scores (4 bytes)
// and weights (2) still fit a large second-level cache.
constexpr std::int64_t least_rows = 64;
constexpr std::int64_t most_rows = 512;
constexpr std::int64_t most_scores = std::int64_t{1} << 22;

using Range = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;
using Policy = Kokkos::TeamPolicy<ExecutionSpace>;
using Member = typename Policy::member_type;

KOKKOS_INLINE_FUNCTION float shift_of(float maximum) {
  return maximum == minus_infinity ? 0.0f : maximum;
}

/// Arrays over the query rows of a tile, (head, query row).
struct QueryRows {
  float* maximum;
  float* weight;
  float* unscale;
  float* sums;  // (head, query row, dim)
  std::int64_t count;
  int dim;
};

/// Tokens first .. first + count / group - 1 of the queries into a tile, rounded to Value.
template <class Value, class QueryView>
void load_queries(const ExecutionSpace& exec, const QueryView& queries, int kv_heads,
                  std::int64_t first, const QueryRows& rows, Value* target) {
  const int dim = rows.dim;
  const std::int64_t count = rows.count;
  const int group = static_cast<int>(queries.extent(1)) / kv_heads;
  const bool scales = std::is_same_v<Value, half>;
  Kokkos::parallel_for(
      "kvzap::attention::load_queries",
      Policy(exec, static_cast<int>(kv_heads * count), runs_on_host ? 1 : 4, runs_on_host ? 1 : 32),
      KOKKOS_LAMBDA(const Member& team) {
        const std::int64_t i = team.league_rank();
        const std::int64_t token = first + i % count / group;
        const int head = static_cast<int>(i / count) * group + static_cast<int>(i % count % group);
        int shift = 0;
        if (scales) {
          float largest = 0;
          Kokkos::parallel_reduce(
              Kokkos::TeamThreadRange(team, dim),
              [&](int d, float& most) {
                const float size = math::fabs(queries(token, head, d));
                if (size > most) most = size;
              },
              Kokkos::Max<float>(largest));
          shift = half_shift(largest);
        }
        const float scale = power_of_two(shift);
        Kokkos::parallel_for(Kokkos::TeamVectorRange(team, dim), [&](int d) {
          target[i * dim + d] = Value(queries(token, head, d) * scale);
          rows.sums[i * dim + d] = 0;
        });
        Kokkos::single(Kokkos::PerTeam(team), [&] {
          rows.maximum[i] = minus_infinity;
          rows.weight[i] = 0;
          rows.unscale[i] = power_of_two(-shift);
        });
      });
}

/// Rows begin .. begin + panel - 1 of `heads` heads from `first_head` on, counted over pages, ring
/// and chunk; zeros behind a head's last one. keys, values: (head, row, dim).
template <class Value, PageOrder order, class RowsView>
void gather(const ExecutionSpace& exec, const RaggedLayer<Value, order>& cached,
            const RowsView& new_keys, const RowsView& new_values, int first_head, int heads,
            std::int64_t begin, std::int64_t panel, Value* keys, Value* values) {
  constexpr int width = RowVector<Value>::width;
  const int dim = cached.head_dim;
  const std::int64_t new_rows = new_keys.extent(0);
  const std::int64_t vectors = (dim + width - 1) / width;
  Kokkos::parallel_for(
      "kvzap::attention::gather", Range(exec, 0, heads * panel * vectors),
      KOKKOS_LAMBDA(std::int64_t i) {
        const int d0 = static_cast<int>(i % vectors) * width;
        const std::int64_t target = i / vectors * dim + d0;
        const std::int64_t row = begin + i / vectors % panel;
        const int head = first_head + static_cast<int>(i / vectors / panel);
        const std::int64_t retained = cached.retained(head);
        const std::int64_t cached_rows = retained + cached.ring_rows();
        const Value* key = nullptr;
        const Value* value = nullptr;
        std::int64_t stride = 1;
        if (row < cached_rows) {
          const bool in_page = row < retained;
          const auto span =
              cached.span(head, in_page ? row / cached.page_rows : cached.pages(head));
          const std::int64_t offset =
              (in_page ? row % cached.page_rows : row - retained) * span.row_stride;
          key = span.keys + offset;
          value = span.values + offset;
          stride = span.dim_stride;
        } else if (row < cached_rows + new_rows) {
          key = &new_keys(row - cached_rows, head, 0);
          value = &new_values(row - cached_rows, head, 0);
          stride = new_keys.stride(2);
        }
        const bool whole = key && stride == 1 && d0 + width <= dim && dim % width == 0 &&
                           is_vector_aligned(key) && is_vector_aligned(value);
        if (whole) {
          *reinterpret_cast<Bytes16*>(keys + target) = *reinterpret_cast<const Bytes16*>(key + d0);
          *reinterpret_cast<Bytes16*>(values + target) =
              *reinterpret_cast<const Bytes16*>(value + d0);
          return;
        }
        for (int e = 0; e < width && d0 + e < dim; ++e) {
          keys[target + e] = key ? key[(d0 + e) * stride] : Value(0.0f);
          values[target + e] = key ? value[(d0 + e) * stride] : Value(0.0f);
        }
      });
}

/// Scores (head, query row, panel) into weights, relative to the largest score so far, by which the
/// sums so far are scaled. The query rows of a tile's token t see the rows of the panel before
/// retained(head) + visible + t.
template <class Value>
void online_softmax(const ExecutionSpace& exec,
                    const Kokkos::View<const std::int64_t*, MemorySpace>& retained, int first_head,
                    int heads, int group, std::int64_t visible, std::int64_t panel,
                    const QueryRows& rows, float* scores, Value* weights) {
  const int threads = runs_on_host ? 1 : 4;
  const std::int64_t total = heads * rows.count;
  Kokkos::parallel_for(
      "kvzap::attention::softmax",
      Policy(exec, static_cast<int>((total + threads - 1) / threads), threads,
             runs_on_host ? 1 : 32),
      KOKKOS_LAMBDA(const Member& team) {
        const std::int64_t first = std::int64_t{team.league_rank()} * threads;
        const int own = static_cast<int>(total - first < threads ? total - first : threads);
        Kokkos::parallel_for(Kokkos::TeamThreadRange(team, own), [&](int t) {
          const std::int64_t local = first + t;
          const std::int64_t i = first_head * rows.count + local;  // among all heads' query rows
          const std::int64_t most =
              retained(first_head + local / rows.count) + visible + local % rows.count / group;
          const std::int64_t limit = most < 0 ? 0 : (most < panel ? most : panel);
          float* const score = scores + local * panel;
          Value* const weight = weights + local * panel;
          const float unscale = rows.unscale[i];
          const float before = rows.maximum[i];
          float largest = before;
          Kokkos::parallel_reduce(
              Kokkos::ThreadVectorRange(team, limit),
              [&](std::int64_t r, float& found) {
                const float s = score[r] * unscale;
                if (s > found) found = s;
              },
              Kokkos::Max<float>(largest));
          if (before > largest) largest = before;
          const float shift = shift_of(largest);
          float sum = 0;
          Kokkos::parallel_reduce(
              Kokkos::ThreadVectorRange(team, panel),
              [&](std::int64_t r, float& partial) {
                const Value w(r < limit ? math::exp(score[r] * unscale - shift) : 0.0f);
                weight[r] = w;
                partial += static_cast<float>(w);
              },
              sum);
          const float factor = largest > before ? math::exp(before - shift) : 1.0f;
          if (factor != 1.0f) {
            Kokkos::parallel_for(Kokkos::ThreadVectorRange(team, rows.dim),
                                 [&](int d) { rows.sums[i * rows.dim + d] *= factor; });
          }
          Kokkos::single(Kokkos::PerThread(team), [&] {
            rows.maximum[i] = largest;
            rows.weight[i] = rows.weight[i] * factor + sum;
          });
        });
      });
}

template <class OutputView>
void store(const ExecutionSpace& exec, int kv_heads, std::int64_t first, const QueryRows& rows,
           const OutputView& output) {
  const int group = static_cast<int>(output.extent(1)) / kv_heads;
  Kokkos::parallel_for(
      "kvzap::attention::store", Range(exec, 0, kv_heads * rows.count * rows.dim),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t row = i / rows.dim;
        const std::int64_t own = row % rows.count;
        const float weight = rows.weight[row];
        output(first + own / group, row / rows.count * group + own % group, i % rows.dim) =
            rows.sums[i] * (weight == 0 ? 0.0f : 1.0f / weight);
      });
}

}  // namespace

template <class Value, PageOrder order>
void PanelAttention<Value, order>::operator()(const ExecutionSpace& exec, const Layer& cached,
                                              const QueryView& queries, const RowsView& new_keys,
                                              const RowsView& new_values,
                                              const OutputView& output) {
  const std::int64_t tokens = queries.extent(0);
  const int kv_heads = cached.heads;
  const int dim = cached.head_dim;
  const int group = static_cast<int>(queries.extent(1)) / kv_heads;
  const std::int64_t before = new_keys.extent(0) - tokens;
  const std::int64_t tile = std::min(tokens, tile_tokens);
  const std::int64_t most_query_rows = kv_heads * tile * group;
  const std::int64_t panel =
      std::clamp(most_scores / most_query_rows / least_rows * least_rows, least_rows, most_rows);

  reserve_scratch(m_queries, most_query_rows * dim, "kvzap::attention::queries");
  reserve_scratch(m_keys, kv_heads * panel * dim, "kvzap::attention::keys");
  reserve_scratch(m_values, kv_heads * panel * dim, "kvzap::attention::values");
  reserve_scratch(m_scores, most_query_rows * panel, "kvzap::attention::scores");
  reserve_scratch(m_sums, most_query_rows * dim, "kvzap::attention::sums");
  reserve_scratch(m_rows, 3 * most_query_rows, "kvzap::attention::rows");
  if constexpr (!std::is_same_v<Value, float>) {
    reserve_scratch(m_weights, most_query_rows * panel, "kvzap::attention::weights");
  }
  Value* weights;
  if constexpr (std::is_same_v<Value, float>) {
    weights = m_scores.data();  // a weight takes its score's place
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
    load_queries<Value>(exec, queries, kv_heads, first, rows, m_queries.data());

    // A head's rows are its retained rows, its ring and the chunk's rows that the last token sees.
    const std::int64_t others = cached.ring_rows() + before + first + own;
    std::int64_t longest = 0;
    for (int h = 0; h < kv_heads; ++h) longest = std::max(longest, cached.bounds(h) + others);
    for (std::int64_t begin = 0; begin < longest; begin += panel) {
      // Runs of heads that still have rows: after pruning, lengths differ.
      for (int head = 0; head < kv_heads;) {
        if (cached.bounds(head) + others <= begin) {
          ++head;
          continue;
        }
        int end = head + 1;
        while (end < kv_heads && cached.bounds(end) + others > begin) ++end;
        const int heads = end - head;
        gather<Value, order>(exec, cached, new_keys, new_values, head, heads, begin, panel,
                             m_keys.data(), m_values.data());

        Product<Value> scores;
        scores.m = rows.count;
        scores.n = panel;
        scores.k = dim;
        scores.a = m_queries.data() + head * rows.count * dim;
        scores.a_stride = dim;
        scores.a_step = rows.count * dim;
        scores.b = m_keys.data();
        scores.b_stride = dim;
        scores.b_step = panel * dim;
        scores.transposed = true;
        scores.c = m_scores.data();
        scores.c_stride = panel;
        scores.c_step = rows.count * panel;
        scores.alpha = 1.0f / std::sqrt(static_cast<float>(dim));
        scores.batch = heads;
        multiply(exec, scores);

        online_softmax<Value>(exec, cached.retained, head, heads, group,
                              cached.ring_rows() + before + first + 1 - begin, panel, rows,
                              m_scores.data(), weights);

        Product<Value> sums;
        sums.m = rows.count;
        sums.n = dim;
        sums.k = panel;
        sums.a = weights;
        sums.a_stride = panel;
        sums.a_step = rows.count * panel;
        sums.b = m_values.data();
        sums.b_stride = dim;
        sums.b_step = panel * dim;
        sums.c = m_sums.data() + head * rows.count * dim;
        sums.c_stride = dim;
        sums.c_step = rows.count * dim;
        sums.beta = 1;
        sums.batch = heads;
        multiply(exec, sums);
        head = end;
      }
    }
    store(exec, kv_heads, first, rows, output);
  }
}

#define KVZAP_INSTANTIATE(Value, order) template class PanelAttention<Value, order>;
KVZAP_FOR_EACH_CACHE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE

}  // namespace kvzap::detail
