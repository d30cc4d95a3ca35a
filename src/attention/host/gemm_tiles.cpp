#include "attention/host/gemm_tiles.hpp"

#include <cmath>

#include "attention/host/finite.hpp"
#include "attention/host/load_row.hpp"
#include "base/host_threads.hpp"
#include "base/scratch.hpp"
#include "linalg/host/row_kernels.hpp"
#include "linalg/pack_row.hpp"

namespace kvzap::attention {
namespace {

using Range = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;
// Query rows and keys of a tile.
constexpr std::int64_t tile_queries = 512;
constexpr std::int64_t gemm_tile_keys = 512;

std::int64_t tile_tokens_of(int group, std::int64_t tokens) {
  return std::min(tokens, std::max<std::int64_t>(1, tile_queries / group));
}

/// A tile of query rows of one KV head. Row i belongs to token i / group of the tile and to query
/// head i % group of the KV head.
struct QueryTile {
  linalg::Matrix queries, sums;    // (row, dim)
  linalg::Vector maximum, weight;  // (row), of the softmax so far
  int group;
  std::int64_t first_query;  // row of its first token in the call's views
  std::int64_t first_head;   // the first query head of the KV head
  float soft_cap;            // 0: none
  std::int64_t rows() const { return queries.extent(0); }
};

void load_queries(const ExecutionSpace& exec, const AttentionCall& call, const QueryTile& tile) {
  const auto queries = call.queries;
  const int dim = call.dim;
  const float scaling = 1.0f / std::sqrt(static_cast<float>(dim));
  Kokkos::parallel_for(
      "kvzap::attention::load_queries", Range(exec, 0, tile.rows()), KOKKOS_LAMBDA(std::int64_t i) {
        for (int d = 0; d < dim; ++d) {
          tile.queries(i, d) = scaling * queries(tile.first_query + i / tile.group,
                                                 tile.first_head + i % tile.group, d);
          tile.sums(i, d) = 0;
        }
        tile.maximum(i) = minus_infinity;
        tile.weight(i) = 0;
      });
}

// Adds a tile of rows (row, dim). Token i sees the first visible + i of them, less those before row
// first_seen + i. scores: scratch space (query row, row).
void attend_tile(const ExecutionSpace& exec, const QueryTile& tile, const linalg::Matrix& k,
                 const linalg::Matrix& v, const linalg::Matrix& s, std::int64_t visible,
                 std::int64_t first_seen) {
  const auto rows = static_cast<std::int64_t>(k.extent(0));
  const auto dim = static_cast<int>(k.extent(1));
  const int group = tile.group;
  const float cap = tile.soft_cap;
  const linalg::Matrix o = tile.sums;
  const linalg::Vector row_maximum = tile.maximum;
  const linalg::Vector row_weight = tile.weight;
  linalg::multiply_nt(exec, 1, tile.queries, k, 0, s);
  base::fence(exec, "kvzap::attention: host kernels read what the instance wrote");
  base::host_for("kvzap::attention::softmax", tile.rows(), rows, [=](std::int64_t i) {
    float* row = &s(i, 0);
    const std::int64_t limit = std::min(rows, visible + i / group);
    if (limit > 0) {
      const std::int64_t first = std::clamp<std::int64_t>(first_seen + i / group, 0, rows);
      if (cap > 0) linalg::soft_cap(row, limit, cap);
      std::fill(row, row + first, minus_infinity);  // scores of weight 0
      const float largest = std::max(row_maximum(i), linalg::max_of(row, limit));
      if (largest > row_maximum(i)) {
        const float factor = std::exp(row_maximum(i) - largest);
        row_weight(i) *= factor;
        linalg::scale(&o(i, 0), dim, factor);
        row_maximum(i) = largest;
      }
      row_weight(i) += linalg::exp_shifted(row, limit, shift_of(largest));
    }
    std::fill(row + std::max<std::int64_t>(0, limit), row + rows, 0.0f);
  });
  // The product multiplies values that a token does not see by 0, which must give 0.
  const std::int64_t seen_by_all = std::clamp<std::int64_t>(visible, 0, rows);
  const std::int64_t hidden =
      std::clamp<std::int64_t>(first_seen + (tile.rows() - 1) / group, 0, rows);
  if ((seen_by_all < rows &&
       !all_finite(v.data() + seen_by_all * dim, (rows - seen_by_all) * dim)) ||
      (hidden > 0 && !all_finite(v.data(), hidden * dim))) {
    base::host_for("kvzap::attention::finite_sums", tile.rows(), rows * dim, [=](std::int64_t i) {
      const std::int64_t limit = std::min(rows, visible + i / group);
      for (std::int64_t r = std::clamp<std::int64_t>(first_seen + i / group, 0, rows); r < limit;
           ++r) {
        for (int d = 0; d < dim; ++d) o(i, d) += s(i, r) * v(r, d);
      }
    });
    return;
  }
  linalg::multiply_nn(exec, 1, s, v, 1, o);
}

template <class Value>
void load_typed_rows(const ExecutionSpace& exec, const SpanRows& rows, std::int64_t begin,
                     const linalg::Matrix& k, const linalg::Matrix& v) {
  const RaggedLayer layer = rows.span.cached;  // NOLINT(cppcoreguidelines-slicing): for kernels
  const NewRows<Value> new_rows(rows.span, rows.new_keys, rows.new_values);
  const RingOrder order = rows.order;
  const int head = rows.head;
  const auto dim = static_cast<int>(k.extent(1));
  const bool has_values = v.extent(0) > 0;
  Kokkos::parallel_for(
      "kvzap::attention::load_rows", Range(exec, 0, k.extent(0)), KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t row = begin + i;
        if (layer.is_packed(head, row)) {
          const std::int64_t page = row / layer.page_rows, slot = row % layer.page_rows;
          linalg::unpack_row_to(layer.quantised(head, page, false), slot, &k(i, 0));
          if (has_values) linalg::unpack_row_to(layer.quantised(head, page, true), slot, &v(i, 0));
          return;
        }
        const auto run =
            HeadRows<Value>{layer, head, order, new_rows.of_head(head)}.run(row, row + 1);
        load_row(run.keys, run.dim_stride, &k(i, 0), dim);
        if (has_values) load_row(run.values, run.dim_stride, &v(i, 0), dim);
      });
}

void store(const ExecutionSpace& exec, const QueryTile& tile, const AttentionCall& call) {
  const auto output = call.output;
  const auto lse = call.lse;
  const bool wants_lse = call.wants_lse();
  const int dim = call.dim;
  Kokkos::parallel_for(
      "kvzap::attention::store", Range(exec, 0, tile.rows()), KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t token = tile.first_query + i / tile.group;
        const std::int64_t query_head = tile.first_head + i % tile.group;
        const float inverse = inverse_of(tile.weight(i));
        for (int d = 0; d < dim; ++d) output(token, query_head, d) = tile.sums(i, d) * inverse;
        if (wants_lse) lse(token, query_head) = log_sum_exp(tile.maximum(i), tile.weight(i));
      });
}

}  // namespace

void load_rows(const ExecutionSpace& exec, const SpanRows& rows, std::int64_t begin,
               const linalg::Matrix& k, const linalg::Matrix& v) {
  with_value_type(rows.new_keys.dtype,
                  [&](auto zero) { load_typed_rows<decltype(zero)>(exec, rows, begin, k, v); });
}

std::size_t GemmTiles::scratch_bytes(int group, int dim, std::int64_t tokens) {
  const std::int64_t rows = tile_tokens_of(group, tokens) * group;
  return sizeof(float) *
         (rows * (2 * std::int64_t{dim} + gemm_tile_keys + 2) + 2 * gemm_tile_keys * dim);
}

void GemmTiles::reserve(int group, int dim, std::int64_t tokens) {
  const std::int64_t rows = tile_tokens_of(group, tokens) * group;
  base::reserve_scratch(m_queries, rows * dim, "kvzap::attention::queries");
  base::reserve_scratch(m_keys, gemm_tile_keys * dim, "kvzap::attention::keys");
  base::reserve_scratch(m_values, gemm_tile_keys * dim, "kvzap::attention::values");
  base::reserve_scratch(m_scores, rows * gemm_tile_keys, "kvzap::attention::scores");
  base::reserve_scratch(m_sums, rows * dim, "kvzap::attention::sums");
  base::reserve_scratch(m_maximum, rows, "kvzap::attention::maximum");
  base::reserve_scratch(m_weight, rows, "kvzap::attention::weight");
}

void GemmTiles::operator()(const ExecutionSpace& exec, const AttentionSpan& span,
                           const AttentionCall& call) {
  const int dim = call.dim;
  const std::int64_t tile_tokens = tile_tokens_of(call.group, span.queries);
  reserve(call.group, dim, span.queries);
  base::fence(exec, "kvzap::attention: the host reads lengths that the instance wrote");
  const auto for_each_tile = [&](std::int64_t all, const QueryTile& tile, const auto& work) {
    for (std::int64_t begin = 0; begin < all; begin += gemm_tile_keys) {
      const std::int64_t rows = std::min(gemm_tile_keys, all - begin);
      work(begin, linalg::Matrix(m_keys.data(), rows, dim),
           linalg::Matrix(m_values.data(), rows, dim),
           linalg::Matrix(m_scores.data(), tile.rows(), rows));
    }
  };
  for (int head = 0; head < call.kv_heads; ++head) {
    const SpanRows rows{span, call.new_keys, call.new_values, RingOrder::slots, head};
    const std::int64_t cached = span.cached.rows(head);
    for (std::int64_t first = 0; first < span.queries; first += tile_tokens) {
      const std::int64_t tokens = std::min(tile_tokens, span.queries - first);
      const QueryTile tile = {linalg::Matrix(m_queries.data(), tokens * call.group, dim),
                              linalg::Matrix(m_sums.data(), tokens * call.group, dim),
                              m_maximum,
                              m_weight,
                              call.group,
                              span.first_query + first,
                              std::int64_t{head} * call.group,
                              call.soft_cap};
      load_queries(exec, call, tile);
      for_each_tile(cached, tile,
                    [&](std::int64_t begin, const linalg::Matrix& k, const linalg::Matrix& v,
                        const linalg::Matrix& s) {
                      load_rows(exec, rows, begin, k, v);
                      attend_tile(exec, tile, k, v, s, k.extent(0), no_window);
                    });
      for_each_tile(span.seen_new_rows(first + tokens - 1), tile,
                    [&](std::int64_t begin, const linalg::Matrix& k, const linalg::Matrix& v,
                        const linalg::Matrix& s) {
                      load_rows(exec, rows, cached + begin, k, v);
                      const std::int64_t visible = span.seen_new_rows(first) - begin;
                      attend_tile(exec, tile, k, v, s, visible,
                                  span.window > 0 ? visible - span.window : no_window);
                    });
      store(exec, tile, call);
    }
  }
}

}  // namespace kvzap::attention
