#include "attention/host/host_mass.hpp"

#include <atomic>
#include <cmath>

#include "attention/host/gemm_tiles.hpp"
#include "attention/host/tile_mass.hpp"
#include "base/host_threads.hpp"
#include "base/scratch.hpp"
#include "linalg/host/row_kernels.hpp"

namespace kvzap::attention {
namespace {

// Query rows and keys of a tile of the gemm path, and columns that one thread reduces.
constexpr std::int64_t gemm_tile = 512;
constexpr std::int64_t columns_at_once = 64;

template <class Value>
void by_tiles(const AttentionSpan& span, const MassCall& call, std::int64_t space,
              float* workspaces) {
  constexpr std::int64_t tile = TileMass::tile_keys;
  const int kv_heads = call.kv_heads;
  std::int64_t longest = 0;
  for (int h = 0; h < kv_heads; ++h) longest = std::max(longest, span.cached.rows(h));
  const std::int64_t items = (longest + span.new_rows + tile - 1) / tile * kv_heads;
  const std::int64_t workers = base::host_threads();
  const NewRows<Value> new_rows(span, call.new_keys, call.new_keys);
  const AttentionSpan* const of = &span;
  const bool is_max = call.reduction == MassReduction::max;
  const float soft_cap = call.soft_cap;
  const bool has_row_factors = call.factors.rows.extent(0) > 0;
  const bool has_query_factors = call.factors.queries.extent(0) > 0;
  std::atomic<std::int64_t> next_item{0};
  std::atomic<std::int64_t>* const queue = &next_item;
  base::host_for("kvzap::mass::tiles", workers, [=](std::int64_t worker) {
    TileMass mass(call.dtype(), call.dim, is_max, workspaces + worker * space, soft_cap);
    // Rows that many queries see come first.
    for (std::int64_t i = (*queue)++; i < items; i = (*queue)++) {
      const int head = static_cast<int>(i % kv_heads);
      const std::int64_t begin = i / kv_heads * tile;
      const std::int64_t rows = of->cached.rows(head) + of->new_rows;
      if (begin >= rows) continue;
      const std::int64_t count = std::min(tile, rows - begin);
      const HeadRows<Value> keys{of->cached, head, RingOrder::positions, new_rows.of_head(head)};
      mass.begin();
      for (std::int64_t r = 0; r < count; ++r) {
        if (of->cached.is_packed(head, begin + r)) {
          const std::int64_t page_rows = of->cached.page_rows;
          mass.add_key(of->cached.quantised(head, (begin + r) / page_rows, false),
                       (begin + r) % page_rows);
          continue;
        }
        const auto row = keys.run(begin + r, begin + r + 1);
        mass.add_key(row.keys, row.dim_stride);
      }
      mass.pack();
      // Rows of this tile that the span's first token sees; each later token sees one more.
      const std::int64_t visible = rows - of->queries + 1 - begin;
      for (std::int64_t t = std::max<std::int64_t>(0, 1 - visible); t < of->queries; ++t) {
        const std::int64_t token = of->first_query + t;
        const float factor = has_query_factors ? call.factors.queries(token) : 1.0f;
        for (int g = 0; g < call.group; ++g) {
          const std::int64_t q = std::int64_t{head} * call.group + g;
          mass.add_query(&call.queries(token, q, 0), call.queries.stride(2),
                         static_cast<int>(std::min(count, visible + t)), call.lse(token, q), factor,
                         has_row_factors ? &call.factors.rows(q, begin) : nullptr);
        }
      }
      const float* const found = mass.finish();
      for (std::int64_t r = 0; r < count; ++r) {
        take_mass(found[r], is_max, call.mass(head, begin + r));
      }
    }
  });
}

}  // namespace

void HostMass::operator()(const ExecutionSpace& exec, const AttentionSpan& span,
                          const MassCall& call) {
  base::fence(exec, "kvzap::mass: host kernels read what the instance wrote");
  if (!TileMass::available()) return by_gemm(exec, span, call);
  const std::int64_t space = TileMass::scratch_size(call.dim);
  base::reserve_scratch(m_workspaces, base::host_threads() * space, "kvzap::mass::workspaces");
  with_value_type(call.dtype(), [&](auto zero) {
    by_tiles<decltype(zero)>(span, call, space, m_workspaces.data());
  });
}

void HostMass::by_gemm(const ExecutionSpace& exec, const AttentionSpan& span,
                       const MassCall& call) {
  const int dim = call.dim;
  const int group = call.group;
  const bool is_max = call.reduction == MassReduction::max;
  const float soft_cap = call.soft_cap;
  const bool has_row_factors = call.factors.rows.extent(0) > 0;
  const bool has_query_factors = call.factors.queries.extent(0) > 0;
  const float scaling = 1.0f / std::sqrt(static_cast<float>(dim));
  const std::int64_t tile_tokens =
      std::min(span.queries, std::max<std::int64_t>(1, gemm_tile / group));
  base::reserve_scratch(m_queries, tile_tokens * group * dim, "kvzap::mass::queries");
  base::reserve_scratch(m_keys, gemm_tile * dim, "kvzap::mass::keys");
  base::reserve_scratch(m_scores, tile_tokens * group * gemm_tile, "kvzap::mass::scores");
  for (int head = 0; head < call.kv_heads; ++head) {
    const std::int64_t rows = span.cached.rows(head) + span.new_rows;
    for (std::int64_t begin = 0; begin < rows; begin += gemm_tile) {
      const std::int64_t count = std::min(gemm_tile, rows - begin);
      const linalg::Matrix k(m_keys.data(), count, dim);
      load_rows(exec, {span, call.new_keys, call.new_keys, RingOrder::positions, head}, begin, k);
      const std::int64_t first_seeing = std::max<std::int64_t>(0, begin - (rows - span.queries));
      for (std::int64_t first = first_seeing; first < span.queries; first += tile_tokens) {
        const std::int64_t tile = std::min(tile_tokens, span.queries - first);
        const std::int64_t visible = rows - span.queries + first + 1 - begin;
        const linalg::Matrix q(m_queries.data(), tile * group, dim);
        const linalg::Matrix s(m_scores.data(), tile * group, count);
        const std::int64_t first_token = span.first_query + first;
        base::host_for("kvzap::mass::load_queries", tile * group, dim, [=](std::int64_t i) {
          for (int d = 0; d < dim; ++d) {
            q(i, d) = scaling * call.queries(first_token + i / group,
                                             std::int64_t{head} * group + i % group, d);
          }
        });
        linalg::multiply_nt(exec, 1, q, k, 0, s);
        base::fence(exec, "kvzap::mass: host kernels read what the instance wrote");
        base::host_for(
            "kvzap::mass::reduce", (count + columns_at_once - 1) / columns_at_once,
            [=](std::int64_t block) {
              const std::int64_t from = block * columns_at_once;
              float found[columns_at_once] = {};
              for (std::int64_t i = 0; i < tile * group; ++i) {
                const std::int64_t token = first_token + i / group;
                const std::int64_t query_head = std::int64_t{head} * group + i % group;
                const std::int64_t limit =
                    std::min({columns_at_once, count - from, visible + i / group - from});
                const float lse = call.lse(token, query_head);
                if (limit <= 0 || lse == minus_infinity) continue;
                float* const p = &s(i, from);
                if (soft_cap > 0) linalg::soft_cap(p, limit, soft_cap);
                linalg::exp_shifted(p, limit, lse);
                const float factor = has_query_factors ? call.factors.queries(token) : 1.0f;
                for (std::int64_t r = 0; r < limit; ++r) {
                  const float by =
                      has_row_factors ? call.factors.rows(query_head, begin + from + r) : 1.0f;
                  take_mass(p[r] * factor * by, is_max, found[r]);
                }
              }
              for (std::int64_t r = 0; r < std::min(columns_at_once, count - from); ++r) {
                take_mass(found[r], is_max, call.mass(head, begin + from + r));
              }
            });
      }
    }
  }
}

}  // namespace kvzap::attention
