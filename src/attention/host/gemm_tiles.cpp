#include "attention/host/gemm_tiles.hpp"

#include <cmath>

#include "attention/host/finite.hpp"
#include "attention/host/load_row.hpp"
#include "base/host_threads.hpp"
#include "base/scratch.hpp"
#include "base/value_types.hpp"
#include "linalg/host/row_kernels.hpp"

namespace kvzap::detail {
namespace {

using Range = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;
// Query rows and rows of a tile.
constexpr std::int64_t tile_queries = 512;
constexpr std::int64_t gemm_tile_keys = 512;

std::int64_t tile_tokens_of(int group, std::int64_t tokens) {
  return std::min(tokens, std::max<std::int64_t>(1, tile_queries / group));
}

}  // namespace

template <class Value, PageOrder order>
std::size_t GemmTiles<Value, order>::scratch_bytes(int group, int dim, std::int64_t tokens) {
  const std::int64_t rows = tile_tokens_of(group, tokens) * group;
  return sizeof(float) *
         (rows * (2 * std::int64_t{dim} + gemm_tile_keys + 2) + 2 * gemm_tile_keys * dim);
}

template <class Value, PageOrder order>
void GemmTiles<Value, order>::reserve(int group, int dim, std::int64_t tokens) {
  const std::int64_t rows = tile_tokens_of(group, tokens) * group;
  reserve_scratch(m_queries, rows * dim, "kvzap::attention::queries");
  reserve_scratch(m_keys, gemm_tile_keys * dim, "kvzap::attention::keys");
  reserve_scratch(m_values, gemm_tile_keys * dim, "kvzap::attention::values");
  reserve_scratch(m_scores, rows * gemm_tile_keys, "kvzap::attention::scores");
  reserve_scratch(m_sums, rows * dim, "kvzap::attention::sums");
  reserve_scratch(m_maximum, rows, "kvzap::attention::maximum");
  reserve_scratch(m_weight, rows, "kvzap::attention::weight");
}

template <class Value, PageOrder order>
void GemmTiles<Value, order>::operator()(const ExecutionSpace& exec,
                                         const AttentionSpan<Value, order>& span,
                                         const AttentionCall<Value, order>& call) {
  const std::int64_t tokens = span.queries;
  const int dim = call.dim;
  const int group = call.group;
  const RaggedLayer<Value, order> cached = span.cached;  // NOLINT(cppcoreguidelines-slicing)
  const auto query_view = call.queries;
  const auto new_keys = call.new_keys;
  const auto new_values = call.new_values;
  const auto output = call.output;
  const auto lse = call.lse;
  const bool wants_lse = call.wants_lse();
  const std::int64_t first_query = span.first_query;
  const std::int64_t first_new = span.first_new;
  const std::int64_t before = span.new_rows - tokens;
  const float scaling = 1.0f / std::sqrt(static_cast<float>(dim));
  const std::int64_t tile_tokens = tile_tokens_of(group, tokens);
  reserve(group, dim, tokens);
  const auto row_maximum = m_maximum;
  const auto row_weight = m_weight;
  fence(exec, "kvzap::attention: the host reads lengths that the instance wrote");

  for (int head = 0; head < call.kv_heads; ++head) {
    const std::int64_t retained = cached.retained(head);
    const std::int64_t cached_rows = cached.rows(head);
    const std::int64_t pages = cached.pages(head);
    for (std::int64_t first = 0; first < tokens; first += tile_tokens) {
      const std::int64_t tile = std::min(tile_tokens, tokens - first);
      const Matrix q(m_queries.data(), tile * group, dim);
      const Matrix o(m_sums.data(), tile * group, dim);
      Kokkos::parallel_for(
          "kvzap::attention::load_queries", Range(exec, 0, tile * group),
          KOKKOS_LAMBDA(std::int64_t i) {
            for (int d = 0; d < dim; ++d) {
              q(i, d) = scaling * query_view(first_query + first + i / group,
                                             std::int64_t{head} * group + i % group, d);
              o(i, d) = 0;
            }
            row_maximum(i) = minus_infinity;
            row_weight(i) = 0;
          });

      // Row i of the tile is token first + i / group. It sees every cached row and the new ones up
      // to its own: `visible` is how many rows of a tile of rows the first token sees, each later
      // token one more.
      const auto attend_tile = [&](std::int64_t rows, std::int64_t visible) {
        const Matrix k(m_keys.data(), rows, dim);
        const Matrix v(m_values.data(), rows, dim);
        const Matrix s(m_scores.data(), tile * group, rows);
        multiply_nt(exec, 1, q, k, 0, s);
        fence(exec, "kvzap::attention: host kernels read what the instance wrote");
        host_for("kvzap::attention::softmax", tile * group, rows, [=](std::int64_t i) {
          float* row = &s(i, 0);
          const std::int64_t limit = std::min(rows, visible + i / group);
          if (limit > 0) {
            const float largest = std::max(row_maximum(i), max_of(row, limit));
            if (largest > row_maximum(i)) {
              const float factor = std::exp(row_maximum(i) - largest);
              row_weight(i) *= factor;
              scale(&o(i, 0), dim, factor);
              row_maximum(i) = largest;
            }
            row_weight(i) += exp_shifted(row, limit, shift_of(largest));
          }
          std::fill(row + std::max<std::int64_t>(0, limit), row + rows, 0.0f);
        });
        // The product multiplies values that a token does not see by 0, which must give 0.
        const std::int64_t seen_by_all = std::clamp<std::int64_t>(visible, 0, rows);
        if (seen_by_all < rows &&
            !all_finite(v.data() + seen_by_all * dim, (rows - seen_by_all) * dim)) {
          host_for("kvzap::attention::finite_sums", tile * group, rows * dim, [=](std::int64_t i) {
            const std::int64_t limit = std::min(rows, visible + i / group);
            for (std::int64_t r = 0; r < limit; ++r) {
              for (int d = 0; d < dim; ++d) o(i, d) += s(i, r) * v(r, d);
            }
          });
          return;
        }
        multiply_nn(exec, 1, s, v, 1, o);
      };

      for (std::int64_t begin = 0; begin < cached_rows; begin += gemm_tile_keys) {
        const std::int64_t rows = std::min(gemm_tile_keys, cached_rows - begin);
        const Matrix k(m_keys.data(), rows, dim);
        const Matrix v(m_values.data(), rows, dim);
        Kokkos::parallel_for(
            "kvzap::attention::load_cached", Range(exec, 0, rows), KOKKOS_LAMBDA(std::int64_t i) {
              const std::int64_t row = begin + i;
              const bool in_page = row < retained;
              const auto run = cached.span(head, in_page ? row / cached.page_rows : pages);
              const std::int64_t offset =
                  (in_page ? row % cached.page_rows : row - retained) * run.row_stride;
              load_row(run.keys + offset, run.dim_stride, &k(i, 0), dim);
              load_row(run.values + offset, run.dim_stride, &v(i, 0), dim);
            });
        attend_tile(rows, rows);
      }
      const std::int64_t new_rows = before + first + tile;
      for (std::int64_t begin = 0; begin < new_rows; begin += gemm_tile_keys) {
        const std::int64_t rows = std::min(gemm_tile_keys, new_rows - begin);
        const Matrix k(m_keys.data(), rows, dim);
        const Matrix v(m_values.data(), rows, dim);
        Kokkos::parallel_for(
            "kvzap::attention::load_new", Range(exec, 0, rows), KOKKOS_LAMBDA(std::int64_t i) {
              const std::int64_t row = first_new + begin + i;
              load_row(&new_keys(row, head, 0), new_keys.stride(2), &k(i, 0), dim);
              load_row(&new_values(row, head, 0), new_values.stride(2), &v(i, 0), dim);
            });
        attend_tile(rows, before + first + 1 - begin);
      }
      Kokkos::parallel_for(
          "kvzap::attention::store", Range(exec, 0, tile * group), KOKKOS_LAMBDA(std::int64_t i) {
            const std::int64_t token = first_query + first + i / group;
            const std::int64_t query_head = std::int64_t{head} * group + i % group;
            const float inverse = inverse_of(row_weight(i));
            for (int d = 0; d < dim; ++d) output(token, query_head, d) = o(i, d) * inverse;
            if (wants_lse) lse(token, query_head) = log_sum_exp(row_maximum(i), row_weight(i));
          });
    }
  }
}

#define KVZAP_INSTANTIATE(Value, order) template class GemmTiles<Value, order>;
KVZAP_FOR_EACH_CACHE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE

}  // namespace kvzap::detail
