// Tiles of queries and panels of rows, laid out for batched products.
#pragma once

#include <type_traits>

#include "attention/call.hpp"
#include "base/row_vector.hpp"
#include "base/team.hpp"
#include "linalg/device/lane_rows.hpp"
#include "linalg/product.hpp"
#include "linalg/rounded_rows.hpp"

namespace kvzap::attention {

using base::Bytes16;
using base::is_vector_aligned;
using base::RowVector;

// Most query tokens of a tile.
inline constexpr std::int64_t tile_tokens = 512;
// Rows of a panel. Fewer query rows allow more rows, as long as a panel's scores (4 bytes) and
// weights (2) fit a large second-level cache.
inline constexpr std::int64_t least_rows = 64;
inline constexpr std::int64_t most_rows = 512;
inline constexpr std::int64_t most_scores = std::int64_t{1} << 22;

// Shape of teams on a device.
inline constexpr base::TeamShape row_team{4, 32};

using DeviceRange = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;

/// Arrays over the query rows of a tile, (head, query row).
struct QueryRows {
  float* maximum;
  float* weight;
  float* unscale;
  float* sums;  // (head, query row, dim); may be null
  std::int64_t count;
  int dim;
};

/// The rows begin .. begin + rows - 1 of `heads` heads from `first_head` on.
struct Panel {
  std::int64_t begin;
  std::int64_t rows;
  int first_head;
  int heads;
};

/// Gathered rows of a panel, (head, row, dim); values may be null.
template <class Value>
struct PanelValues {
  Value* keys;
  Value* values;
};

/// The tile's own tokens: the new rows from `first` on. Only their rows are seen by some of its
/// queries and not by others.
struct OwnTokens {
  std::int64_t first;
  std::int64_t count;
  int* flags;  // (head, own token): whether one of its values is not finite
  int* any;    // (head): whether any of those values is not finite
};

/// Calls work(Panel) for the panels from row `begin` on of all runs of heads that still have rows:
/// after pruning, lengths differ. Returns whether there is one. others: a head's rows after its
/// retained ones.
template <class Work>
bool for_each_panel(const CachedLayer& cached, std::int64_t others, std::int64_t begin,
                    std::int64_t rows, const Work& work) {
  bool found = false;
  int end = 0;
  for (int head = 0; head < cached.heads; head = end + 1) {
    end = head;
    while (end < cached.heads && cached.bounds(end) + others > begin) ++end;
    if (end == head) continue;
    work(Panel{begin, rows, head, end - head});
    found = true;
  }
  return found;
}

/// Loads the tokens first .. first + count / group - 1 of the queries into a tile, rounded to
/// Value. any: (head); set to 0 if there are sums.
template <class Value>
void load_queries(const ExecutionSpace& exec, const Attention::QueryView& queries, int kv_heads,
                  std::int64_t first, const QueryRows& rows, int* any, Value* target) {
  const int dim = rows.dim;
  const std::int64_t count = rows.count;
  const int group = static_cast<int>(queries.extent(1)) / kv_heads;
  const bool scales = std::is_same_v<Value, half>;
  const base::TeamShape shape = base::team_shape(row_team);
  Kokkos::parallel_for(
      "kvzap::attention::load_queries",
      base::TeamPolicy(exec, static_cast<int>(kv_heads * count), shape.threads, shape.lanes),
      KOKKOS_LAMBDA(const base::TeamMember& team) {
        const std::int64_t i = team.league_rank();
        const std::int64_t token = first + i % count / group;
        const int head = static_cast<int>(i / count) * group + static_cast<int>(i % count % group);
        int shift = 0;
        if (scales) {
          float largest = 0;
          Kokkos::parallel_reduce(
              Kokkos::TeamThreadRange(team, dim),
              [&](int d, float& most) {
                const float size = base::math::fabs(queries(token, head, d));
                if (size > most) most = size;
              },
              Kokkos::Max<float>(largest));
          shift = linalg::half_shift(largest);
        }
        const float scale = linalg::power_of_two(shift);
        Kokkos::parallel_for(Kokkos::TeamVectorRange(team, dim), [&](int d) {
          target[i * dim + d] = Value(queries(token, head, d) * scale);
          if (rows.sums) rows.sums[i * dim + d] = 0;
        });
        Kokkos::single(Kokkos::PerTeam(team), [&] {
          rows.unscale[i] = linalg::power_of_two(-shift);
          if (!rows.sums) return;
          rows.maximum[i] = minus_infinity;
          rows.weight[i] = 0;
          if (i % count == 0) any[i / count] = 0;
        });
      });
}

/// Unpacks the quantised rows of a panel for gather(): a thread of a team takes a key or a value.
template <class Value>
struct UnpackRows {
  RaggedLayer cached;
  Panel panel;
  PanelValues<Value> target;
  std::int32_t scratch_bytes;

  KOKKOS_FUNCTION void operator()(const base::TeamMember& team) const {
    auto* const scratch =
        static_cast<float*>(team.team_scratch(0).get_shmem_aligned(scratch_bytes, 16));
    const int threads = team.team_size();
    const int kinds = target.values ? 2 : 1;
    Kokkos::parallel_for(Kokkos::TeamThreadRange(team, threads), [&](int t) {
      const std::int64_t i = std::int64_t{team.league_rank()} * threads + t;
      const std::int64_t n = i / kinds;
      const std::int64_t row = panel.begin + n % panel.rows;
      const int head = panel.first_head + static_cast<int>(n / panel.rows);
      if (n >= panel.heads * panel.rows || !cached.is_packed(head, row)) return;
      const bool of_values = i % kinds != 0;
      const int dim = cached.head_dim;
      float* const buffer = scratch + t * dim;
      const linalg::LaneLoops loops{team};
      linalg::unpack_row(loops, cached.quantised(head, row / cached.page_rows, of_values),
                         row % cached.page_rows, buffer);
      Value* const unpacked = (of_values ? target.values : target.keys) + n * dim;
      loops.each(dim, [&](int d) { unpacked[d] = Value(buffer[d]); });
    });
  }
};

/// Gathers the quantised rows of a panel, with the parameters of gather().
template <class Value>
void gather_quantised(const ExecutionSpace& exec, const RaggedLayer& cached, const Panel& panel,
                      const PanelValues<Value>& target) {
  UnpackRows<Value> kernel{cached, panel, target, 0};
  const auto bytes = [&](int threads) { return sizeof(float) * threads * cached.head_dim; };
  const auto policy_of = [&](std::int64_t teams) {
    return base::team_policy(exec, teams, row_team, kernel, bytes);
  };
  const int threads = policy_of(1).team_size();
  kernel.scratch_bytes = static_cast<std::int32_t>(bytes(threads));
  const std::int64_t items = (target.values ? 2 : 1) * panel.heads * panel.rows;
  Kokkos::parallel_for("kvzap::attention::gather_quantised",
                       policy_of((items + threads - 1) / threads), kernel);
}

/// Gathers the rows of a panel in order of position over cache and new rows. Rows past a head's
/// last row become zero. So do flagged values of the tile's own tokens.
template <class Value>
void gather(const ExecutionSpace& exec, const RaggedLayer& cached, const NewRows<Value>& new_rows,
            const Panel& panel, const OwnTokens& own_tokens, const PanelValues<Value>& target) {
  constexpr int width = RowVector<Value>::width;
  const int dim = cached.head_dim;
  const std::int64_t vectors = (dim + width - 1) / width;
  const auto kernel = KOKKOS_LAMBDA(std::int64_t i) {
    const int d0 = static_cast<int>(i % vectors) * width;
    const std::int64_t row = panel.begin + i / vectors % panel.rows;
    const int head = panel.first_head + static_cast<int>(i / vectors / panel.rows);
    Value* const keys = target.keys + i / vectors * dim + d0;
    Value* const values = target.values ? target.values + i / vectors * dim + d0 : nullptr;
    const HeadRows<Value> head_rows{cached, head, RingOrder::positions, new_rows.of_head(head)};
    if (cached.is_packed(head, row)) return;  // see gather_quantised
    const RowRun<Value> run = head_rows.run(row, row + 1);
    const Value* const key = run.keys;
    const Value* const value = run.values;
    const std::int64_t stride = run.dim_stride;
    const std::int64_t own = row - cached.rows(head) - own_tokens.first;
    // (No query of the tile sees rows after its own tokens.)
    const bool dropped =
        values && own >= 0 &&
        (own >= own_tokens.count || own_tokens.flags[head * own_tokens.count + own] != 0);
    const bool whole = key && !dropped && stride == 1 && d0 + width <= dim && dim % width == 0 &&
                       is_vector_aligned(key) && (!values || is_vector_aligned(value));
    if (whole) {
      *reinterpret_cast<Bytes16*>(keys) = *reinterpret_cast<const Bytes16*>(key + d0);
      if (values) {
        *reinterpret_cast<Bytes16*>(values) = *reinterpret_cast<const Bytes16*>(value + d0);
      }
      return;
    }
    for (int e = 0; e < width && d0 + e < dim; ++e) {
      keys[e] = key ? key[(d0 + e) * stride] : Value(0.0f);
      if (values) values[e] = key && !dropped ? value[(d0 + e) * stride] : Value(0.0f);
    }
  };
  static_assert(sizeof(kernel) <= base::most_arguments, "Kokkos would wait");
  Kokkos::parallel_for("kvzap::attention::gather",
                       DeviceRange(exec, 0, panel.heads * panel.rows * vectors), kernel);
  if (cached.format.keys != RowType::wide) {
    gather_quantised(exec, cached, panel, target);
  }
}

struct ProductExtents {
  std::int64_t m, n, k;
};

/// Returns c (m, n) = a (m, k) * b (k, n), or b' if transposed, of `batch` heads. Their operands
/// lie one after the other without gaps.
template <class Value>
linalg::Product head_products(
    int batch, const ProductExtents& extents, const Value* a, const Value* b, bool transposed,
    float* c) {  // NOLINT(readability-non-const-parameter): the product writes it
  const auto [m, n, k] = extents;
  linalg::Product product;
  product.dtype = DTypeOf<Value>::value;
  product.m = m;
  product.n = n;
  product.k = k;
  product.a = a;
  product.a_stride = k;
  product.a_step = m * k;
  product.b = b;
  product.b_stride = transposed ? k : n;
  product.b_step = n * k;
  product.transposed = transposed;
  product.c = c;
  product.c_stride = n;
  product.c_step = m * n;
  product.batch = batch;
  return product;
}

}  // namespace kvzap::attention
