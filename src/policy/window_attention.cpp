#include "policy/window_attention.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/host_threads.hpp"
#include "base/scratch.hpp"
#include "base/simd.hpp"
#include "base/soft_cap.hpp"
#include "linalg/host/row_kernels.hpp"
#include "policy/row_math.hpp"

namespace kvzap::policy {
namespace {

using linalg::ConstMatrix;
using linalg::Matrix;
using Seen = Kokkos::View<std::int64_t*, MemorySpace>;

// Logits of a tile: they fit in a second-level cache.
constexpr std::int64_t tile_logits = std::int64_t{1} << 17;
constexpr std::int64_t least_tile_rows = 128;
constexpr std::int64_t most_tile_rows = 4096;
// Rows that one work item reduces on a host.
constexpr std::int64_t reduced_rows = 256;

/// One tile of rows against all queries of a group.
struct Tile {
  float* logits;             // (query, row); later probabilities times the factor in `largest`
  float* largest;            // (query)
  float* sums;               // (query)
  const std::int64_t* seen;  // (token)
  std::int64_t queries;
  std::int64_t begin;
  std::int64_t rows;
  int group;

  /// Rows of the tile that a query sees.
  KOKKOS_INLINE_FUNCTION std::int64_t seen_by(std::int64_t query) const {
    const std::int64_t count = seen[query / group] - begin;
    return count < 0 ? 0 : (count < rows ? count : rows);
  }
};

// seen(token) = rows at positions up to the token's own.
void find_seen(const ExecutionSpace& exec, const PolicyLayer::PositionView& positions,
               std::int64_t rows, std::int64_t first, std::int64_t count, const Seen& seen) {
  Kokkos::parallel_for(
      "kvzap::window_attention::seen", RowRange(exec, 0, count), KOKKOS_LAMBDA(std::int64_t t) {
        std::int64_t begin = 0;
        std::int64_t end = rows;
        while (begin < end) {
          const std::int64_t middle = begin + (end - begin) / 2;
          if (positions(middle) <= first + t) {
            begin = middle + 1;
          } else {
            end = middle;
          }
        }
        seen(t) = begin;
      });
}

void cap_logits(const ExecutionSpace& exec, const Matrix& logits, float cap) {
  const auto columns = static_cast<std::int64_t>(logits.extent(1));
  if (base::machine().on_host()) {
    return base::host_for("kvzap::window_attention::soft_cap", logits.extent(0), columns,
                          [=](std::int64_t q) { linalg::soft_cap(&logits(q, 0), columns, cap); });
  }
  Kokkos::parallel_for(
      "kvzap::window_attention::soft_cap", RowRange(exec, 0, logits.size()),
      KOKKOS_LAMBDA(std::int64_t i) {
        float& logit = logits(i / columns, i % columns);
        logit = base::soft_capped(logit, cap);
      });
}

// Turns logits into exp(logit - largest of the tile), and into 0 for rows that the query does not
// see.
void exponentials(const ExecutionSpace& exec, const Tile& tile) {
  if (base::machine().on_host()) {
    base::host_for("kvzap::window_attention::exp", tile.queries, [=](std::int64_t q) {
      float* const logits = tile.logits + q * tile.rows;
      const std::int64_t count = tile.seen_by(q);
      float largest = -std::numeric_limits<float>::infinity();
      float sum = 0;
      if (count > 0) {
        largest = linalg::max_of(logits, count);
        sum = linalg::exp_shifted(logits, count, largest);
      }
      std::fill(logits + count, logits + tile.rows, 0.0f);
      tile.largest[q] = largest;
      tile.sums[q] = sum;
    });
    return;
  }
  using Team = Kokkos::TeamPolicy<ExecutionSpace>;
  Kokkos::parallel_for(
      "kvzap::window_attention::exp", Team(exec, static_cast<int>(tile.queries), Kokkos::AUTO),
      KOKKOS_LAMBDA(const typename Team::member_type& team) {
        const std::int64_t q = team.league_rank();
        float* const logits = tile.logits + q * tile.rows;
        const std::int64_t count = tile.seen_by(q);
        const float largest = largest_of(team, logits, count);
        float sum = 0;
        Kokkos::parallel_reduce(
            Kokkos::TeamThreadRange(team, tile.rows),
            [&](std::int64_t r, float& partial) {
              const float e = r < count ? base::math::exp(logits[r] - largest) : 0.0f;
              logits[r] = e;
              partial += e;
            },
            sum);
        Kokkos::single(Kokkos::PerTeam(team), [&] {
          tile.largest[q] = count > 0 ? largest : -INFINITY;
          tile.sums[q] = sum;
        });
      });
}

// Turns the largest logits of all tiles into the factors of a tile's exponentials. For counting,
// turns them into limits instead. first: the first tile; those of the others follow in memory.
// sinks: (query head of the group), or empty.
void finish_factors(const ExecutionSpace& exec, std::int64_t tiles, const Tile& first,
                    const Kokkos::View<const float*, MemorySpace>& sinks, bool counts,
                    bool by_rows_before) {
  const std::int64_t queries = first.queries;
  const int group = first.group;
  const float* const sums = first.sums;
  float* const largest = first.largest;
  Kokkos::parallel_for(
      "kvzap::window_attention::factors", RowRange(exec, 0, queries),
      KOKKOS_LAMBDA(std::int64_t q) {
        const std::int64_t rows = first.seen[q / group];
        float most = -INFINITY;
        for (std::int64_t t = 0; t < tiles; ++t) {
          if (largest[t * queries + q] > most) most = largest[t * queries + q];
        }
        double sum = 0;
        if (sinks.extent(0) > 0) {
          sum = base::math::exp(static_cast<double>(sinks(q % group)) - most);
        }
        for (std::int64_t t = 0; t < tiles; ++t) {
          const float of_tile = largest[t * queries + q];
          if (of_tile > -INFINITY) {
            sum += static_cast<double>(sums[t * queries + q]) *
                   base::math::exp(static_cast<double>(of_tile) - most);
          }
        }
        for (std::int64_t t = 0; t < tiles; ++t) {
          float& of_tile = largest[t * queries + q];
          if (of_tile == -INFINITY) {
            of_tile = 0;
          } else if (counts) {
            of_tile = static_cast<float>(
                sum / static_cast<double>(rows) *
                base::math::exp(static_cast<double>(most) - static_cast<double>(of_tile)));
          } else {
            of_tile = static_cast<float>(
                (by_rows_before ? static_cast<double>(rows - 1) : 1.0) / sum *
                base::math::exp(static_cast<double>(of_tile) - static_cast<double>(most)));
          }
        }
      });
}

// result[r] += sum_q factors[q] * values[q * stride + r]
KVZAP_BODY void add_weighted_body(const float* values, std::int64_t stride, const float* factors,
                                  std::int64_t queries, int count, float* result) {
  float sums[reduced_rows];
  for (int r = 0; r < count; ++r) sums[r] = 0;
  std::int64_t q = 0;
  // Processes several queries at a time, so that each sum is read and written once for all of them.
  for (; q + 4 <= queries; q += 4) {
    const float* const a = values + q * stride;
    const float* const b = a + stride;
    const float* const c = b + stride;
    const float* const d = c + stride;
    const float fa = factors[q], fb = factors[q + 1], fc = factors[q + 2], fd = factors[q + 3];
    for (int r = 0; r < count; ++r) {
      sums[r] += (fa * a[r] + fb * b[r]) + (fc * c[r] + fd * d[r]);
    }
  }
  for (; q < queries; ++q) {
    const float* const a = values + q * stride;
    for (int r = 0; r < count; ++r) sums[r] += factors[q] * a[r];
  }
  for (int r = 0; r < count; ++r) result[r] += sums[r];
}
KVZAP_KERNEL(void, add_weighted,
             (const float* values, std::int64_t stride, const float* factors, std::int64_t queries,
              int count, float* result),
             (values, stride, factors, queries, count, result))

// result[r] = number of q with values[q * stride + r] < limits[q]
KVZAP_BODY void count_below_body(const float* values, float limit, std::int64_t count,
                                 float* result) {
  for (std::int64_t r = 0; r < count; ++r) result[r] += values[r] < limit ? 1.0f : 0.0f;
}
KVZAP_KERNEL(void, count_below,
             (const float* values, float limit, std::int64_t count, float* result),
             (values, limit, count, result))

// Adds the sum of factor * exponential, or the number of exponentials below their limit, to
// result(row) for the tile's rows. `begins` replaces the old result.
void reduce_tile(const ExecutionSpace& exec, const Tile& tile, bool counts, bool begins,
                 float* result) {
  const float* const factors = tile.largest;
  if (base::machine().on_host()) {
    base::host_for("kvzap::window_attention::reduce", (tile.rows + reduced_rows - 1) / reduced_rows,
                   [=](std::int64_t slice) {
                     const std::int64_t first = slice * reduced_rows;
                     const auto count = static_cast<int>(std::min(reduced_rows, tile.rows - first));
                     const float* const values = tile.logits + first;
                     float* const target = result + tile.begin + first;
                     if (begins) std::fill_n(target, count, 0.0f);
                     if (!counts)
                       return add_weighted(values, tile.rows, factors, tile.queries, count, target);
                     for (std::int64_t q = 0; q < tile.queries; ++q) {
                       const std::int64_t seen =
                           std::min<std::int64_t>(count, tile.seen_by(q) - first);
                       if (seen > 0) count_below(values + q * tile.rows, factors[q], seen, target);
                     }
                   });
    return;
  }
  Kokkos::parallel_for(
      "kvzap::window_attention::reduce", RowRange(exec, 0, tile.rows),
      KOKKOS_LAMBDA(std::int64_t r) {
        float sum = 0;
        for (std::int64_t q = 0; q < tile.queries; ++q) {
          const float e = tile.logits[q * tile.rows + r];
          if (!counts) {
            sum += factors[q] * e;
          } else if (r < tile.seen_by(q) && e < factors[q]) {
            sum += 1;
          }
        }
        result[tile.begin + r] = begins ? sum : result[tile.begin + r] + sum;
      });
}

// A query of the token at `position` attends to rows whose exponential times `factor` is at least
// `least`. Both forms take the queries in order.
KOKKOS_INLINE_FUNCTION void attend_once(float exponential, float factor, float least,
                                        std::int64_t position, std::int64_t& last,
                                        std::int64_t& longest) {
  if (!(exponential * factor >= least)) return;
  if (position - last > longest) longest = position - last;
  last = position;
}

// The same for `count` rows, without branches.
KVZAP_BODY void attend_rows_body(const float* exponentials, float factor, float least,
                                 std::int64_t position, std::int64_t count, std::int64_t* last,
                                 std::int64_t* longest) {
#pragma omp simd
  for (std::int64_t r = 0; r < count; ++r) {
    const bool attends = exponentials[r] * factor >= least;
    const std::int64_t interval = attends ? position - last[r] : 0;
    longest[r] = interval > longest[r] ? interval : longest[r];
    last[r] = attends ? position : last[r];
  }
}
KVZAP_KERNEL(void, attend_rows,
             (const float* exponentials, float factor, float least, std::int64_t position,
              std::int64_t count, std::int64_t* last, std::int64_t* longest),
             (exponentials, factor, least, position, count, last, longest))

// first: position of the tile's first token.
void track_tile(const ExecutionSpace& exec, const Tile& tile, std::int64_t first,
                const WindowAttention::Recurrence& recurrence) {
  const float* const factors = tile.largest;
  std::int64_t* const last = recurrence.last.data() + tile.begin;
  std::int64_t* const longest = recurrence.longest.data() + tile.begin;
  const float least = recurrence.probability;
  if (base::machine().on_host()) {
    base::host_for("kvzap::window_attention::track", (tile.rows + reduced_rows - 1) / reduced_rows,
                   [=](std::int64_t slice) {
                     const std::int64_t begin = slice * reduced_rows;
                     const std::int64_t end = std::min(begin + reduced_rows, tile.rows);
                     for (std::int64_t q = 0; q < tile.queries; ++q) {
                       attend_rows(tile.logits + q * tile.rows + begin, factors[q], least,
                                   first + q / tile.group, end - begin, last + begin,
                                   longest + begin);
                     }
                   });
    return;
  }
  Kokkos::parallel_for(
      "kvzap::window_attention::track", RowRange(exec, 0, tile.rows),
      KOKKOS_LAMBDA(std::int64_t r) {
        for (std::int64_t q = 0; q < tile.queries; ++q) {
          attend_once(tile.logits[q * tile.rows + r], factors[q], least, first + q / tile.group,
                      last[r], longest[r]);
        }
      });
}

}  // namespace

void pack_queries(const ExecutionSpace& exec, const TokenBlock::QueryView& queries, int head,
                  int group, float scale, const Matrix& packed) {
  const std::int64_t first = static_cast<std::int64_t>(head) * group;
  const auto dim = static_cast<std::int64_t>(packed.extent(1));
  Kokkos::parallel_for(
      "kvzap::window_attention::pack",
      RowRange(exec, 0, static_cast<std::int64_t>(packed.extent(0)) * dim),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t query = i / dim;
        packed(query, i % dim) = scale * queries(query / group, first + query % group, i % dim);
      });
}

TokenBlock observation_window(PolicyLayer& layer, std::int64_t window) {
  TokenBlock block = layer.recent();
  const std::int64_t end = block.first + block.count;
  if (end > window) return block;
  const std::int64_t count = std::min(std::max<std::int64_t>(1, end / 2), block.count);
  const std::int64_t from = block.count - count;
  block.queries =
      Kokkos::subview(block.queries, std::make_pair(from, block.count), Kokkos::ALL, Kokkos::ALL);
  block.first += from;
  block.count = count;
  return block;
}

void WindowAttention::sum(PolicyLayer& layer, int head, const TokenBlock& queries, Factor factor,
                          const RowVector& mass) {
  reduce(layer, head, queries, {Reduction::Kind::sum, factor, mass, {}});
}

void WindowAttention::count_below_mean(PolicyLayer& layer, int head, const TokenBlock& queries,
                                       const RowVector& counts) {
  reduce(layer, head, queries, {Reduction::Kind::count, Factor::one, counts, {}});
}

void WindowAttention::track(PolicyLayer& layer, int head, const TokenBlock& queries,
                            const Recurrence& recurrence) {
  reduce(layer, head, queries, {Reduction::Kind::track, Factor::one, {}, recurrence});
}

void WindowAttention::reduce(PolicyLayer& layer, int head, const TokenBlock& block,
                             const Reduction& reduction) {
  const std::int64_t rows = layer.rows(head);
  if (rows == 0) return;
  const std::int64_t group = layer.extents().group;
  const std::int64_t queries = std::max(most_stored / rows, least_queries);
  const std::int64_t tokens = std::max<std::int64_t>(1, queries / group);
  const PolicyLayer::RowsView keys = layer.keys(head);
  base::reserve_scratch(m_seen, block.count, "kvzap::window_attention::seen");
  find_seen(layer.exec(), layer.positions(head), rows, block.first, block.count, m_seen);
  for (std::int64_t first = 0; first < block.count; first += tokens) {
    reduce_some(layer, keys, head, block, first, std::min(tokens, block.count - first), reduction);
  }
}

void WindowAttention::reduce_some(PolicyLayer& layer, const PolicyLayer::RowsView& keys, int head,
                                  const TokenBlock& block, std::int64_t first, std::int64_t count,
                                  const Reduction& reduction) {
  const ExecutionSpace& exec = layer.exec();
  const int group = layer.extents().group;
  const std::int64_t dim = layer.extents().head_dim;
  const std::int64_t rows = layer.rows(head);
  const std::int64_t queries = count * group;
  const auto tokens = std::make_pair(first, first + count);
  const std::int64_t tile_rows =
      std::min(rows, std::clamp(tile_logits / queries, least_tile_rows, most_tile_rows));
  const std::int64_t tiles = (rows + tile_rows - 1) / tile_rows;
  const bool stored = queries * rows <= most_stored;
  base::reserve_scratch(m_queries, queries * dim, "kvzap::window_attention::queries");
  base::reserve_scratch(m_logits, queries * (stored ? rows : tile_rows),
                        "kvzap::window_attention::logits");
  base::reserve_scratch(m_largest, tiles * queries, "kvzap::window_attention::largest");
  base::reserve_scratch(m_sums, tiles * queries, "kvzap::window_attention::sums");

  const Matrix packed(m_queries.data(), queries, dim);
  pack_queries(exec, Kokkos::subview(block.queries, tokens, Kokkos::ALL, Kokkos::ALL), head, group,
               1.0f / std::sqrt(static_cast<float>(dim)), packed);
  const auto tile_at = [&](std::int64_t t) {
    Tile tile{};
    tile.begin = t * tile_rows;
    tile.rows = std::min(tile_rows, rows - tile.begin);
    tile.logits = m_logits.data() + (stored ? queries * tile.begin : 0);
    tile.largest = m_largest.data() + t * queries;
    tile.sums = m_sums.data() + t * queries;
    tile.seen = m_seen.data() + first;
    tile.queries = queries;
    tile.group = group;
    return tile;
  };
  const auto multiply = [&](const Tile& tile) {
    const ConstMatrix part =
        Kokkos::subview(keys, std::make_pair(tile.begin, tile.begin + tile.rows), Kokkos::ALL);
    const Matrix logits(tile.logits, queries, tile.rows);
    linalg::multiply_nt(exec, 1, packed, part, 0, logits);
    if (layer.extents().soft_cap > 0) cap_logits(exec, logits, layer.extents().soft_cap);
    exponentials(exec, tile);
  };
  const bool counts = reduction.kind == Reduction::Kind::count;
  for (std::int64_t t = 0; t < tiles; ++t) multiply(tile_at(t));
  Kokkos::View<const float*, MemorySpace> sinks = layer.extents().sinks;
  if (sinks.extent(0) > 0) {
    sinks = Kokkos::subview(sinks, std::make_pair(head * group, (head + 1) * group));
  }
  finish_factors(exec, tiles, tile_at(0), sinks, counts, reduction.factor == Factor::rows_before);
  for (std::int64_t t = 0; t < tiles; ++t) {
    Tile tile = tile_at(t);
    if (!stored) {
      // Computes the same exponentials again with the factors of the first pass.
      tile.largest = m_sums.data();
      tile.sums = m_sums.data();
      multiply(tile);
      tile.largest = m_largest.data() + t * queries;
    }
    if (reduction.kind == Reduction::Kind::track) {
      track_tile(exec, tile, block.first + first, reduction.recurrence);
    } else {
      reduce_tile(exec, tile, counts, first == 0, reduction.result.data());
    }
  }
}

}  // namespace kvzap::policy
