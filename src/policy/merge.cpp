// Modifier merge: kept values take up those of evicted rows whose keys are similar.
#include <algorithm>
#include <cmath>

#include "base/host_threads.hpp"
#include "base/scratch.hpp"
#include "linalg/gemm.hpp"
#include "linalg/host/row_kernels.hpp"
#include "policy/merged_rows.hpp"
#include "policy/registry.hpp"
#include "policy/row_math.hpp"
#include "policy/row_products.hpp"

namespace kvzap::policy {
namespace {

/// Keeps norms and their sums away from 0, as in kvpress.
constexpr float merge_epsilon = 1e-6f;

/// Evicted and kept rows whose products exist at a time. On a host they fit a core's cache.
constexpr std::int64_t tile_gone = base::runs_on_host ? 256 : 1024;
constexpr std::int64_t tile_kept = base::runs_on_host ? 1024 : 8192;

// units(i) = keys(rows(i)), scaled to length 1; zeros if the length is not finite.
void take_units(const ExecutionSpace& exec, const CutHead::Rows& keys, const std::int32_t* rows,
                std::int64_t count, float* units) {
  const std::int64_t dim = keys.extent(1);
  each_row(
      exec, "kvzap::policy::merge_units", count, KOKKOS_LAMBDA(std::int64_t i) {
        const float* const key = &keys(rows[i], 0);
        float* const unit = units + i * dim;
        const float length = norm(key, dim);
        const bool is_finite = length - length == 0;
        const float by = is_finite ? 1 / (length > merge_epsilon ? length : merge_epsilon) : 0;
        for (std::int64_t d = 0; d < dim; ++d) unit[d] = is_finite ? key[d] * by : 0;
      });
}

/// The most similar kept row of each evicted one.
struct Nearest {
  float* similarity;
  std::int32_t* kept;  // among the rows that stay
};

// nearest(i) becomes the largest product of row i, if it exceeds the one that it had. Of equal ones
// the first counts. `first`: the kept row of the first column.
void take_largest(const ExecutionSpace& exec, const linalg::Matrix& products, std::int64_t first,
                  const Nearest& nearest) {
  const auto rows = static_cast<std::int64_t>(products.extent(0));
  const auto columns = static_cast<std::int64_t>(products.extent(1));
  const auto found = nearest;
  if (base::machine().on_host()) {
    base::host_for("kvzap::policy::merge_nearest", rows, [=](std::int64_t i) {
      const float* const row = &products(i, 0);
      const float largest = linalg::max_of(row, columns);
      if (!(largest > found.similarity[i])) return;
      found.similarity[i] = largest;
      found.kept[i] =
          static_cast<std::int32_t>(first + (std::find(row, row + columns, largest) - row));
    });
    return;
  }
  using Team = Kokkos::TeamPolicy<ExecutionSpace>;
  Kokkos::parallel_for(
      "kvzap::policy::merge_nearest", Team(exec, static_cast<int>(rows), Kokkos::AUTO),
      KOKKOS_LAMBDA(const typename Team::member_type& team) {
        const std::int64_t i = team.league_rank();
        float largest = 0;
        Kokkos::parallel_reduce(
            Kokkos::TeamThreadRange(team, columns),
            [&](std::int64_t c, float& most) {
              if (products(i, c) > most) most = products(i, c);
            },
            Kokkos::Max<float>(largest));
        std::int64_t place = 0;
        Kokkos::parallel_reduce(
            Kokkos::TeamThreadRange(team, columns),
            [&](std::int64_t c, std::int64_t& least) {
              if (products(i, c) == largest && c < least) least = c;
            },
            Kokkos::Min<std::int64_t>(place));
        Kokkos::single(Kokkos::PerTeam(team), [&] {
          if (!(largest > found.similarity[i])) return;
          found.similarity[i] = largest;
          found.kept[i] = static_cast<std::int32_t>(first + place);
        });
      });
}

struct MergeParameters : PolicyParameters {
  double similarity =
      number("similarity", 0, {0, 1}, "cosine of two keys below which no value is taken up");
  double fraction = number("fraction", 1, {1e-6, 1},
                           "share of a head's evicted rows, the most similar ones, whose values "
                           "are taken up");
};

/// Kept values take up those of evicted rows (kvpress' MergingPress, after ToMe, arXiv 2210.09461,
/// and D2O, arXiv 2406.13035). Evicted row e of a head goes to the row k that stays with the
/// largest cosine of their keys, s = max(0, cos), with weight
///
///     w(e) = s |v(e)| / (|v(e)| + |v(k)| + 1e-6), or 0 if cos < similarity or by `fraction`,
///     v(k) = (v(k) + sum over its rows of w(e) v(e)) / (1 + sum of w(e)).
///
/// `fraction` keeps the rows whose cosine is at least the (1 - fraction) quantile of the head's
/// evicted rows; rows below `similarity` count as the least similar. (kvpress merges nothing in a
/// head if that quantile lies among those.) Of equal cosines the oldest kept row counts. A key of
/// length 0, or whose length is not finite, has cosine 0 to all; an evicted value whose length is
/// not finite is dropped. Sums run by position, in float.
///
/// Cost of a head with E evicted and K kept rows: a product of E * K * head_dim, by tiles; of a
/// context of n tokens at most n^2 * head_dim / 4 multiplications, a quarter of those of one query
/// head's causal attention. A cut that evicts few rows reads all K anyway. Memory: E + K keys and
/// values of one head as floats, the K keys once more, and a tile (1 MiB on hosts).
class ValueMerge final : public ValueMerger {
 public:
  using Parameters = MergeParameters;
  explicit ValueMerge(const Parameters& parameters)
      : m_similarity(static_cast<float>(parameters.similarity)), m_fraction(parameters.fraction) {}

  const MergedValues& merge(const CutHead& head) override {
    divide(head);
    find_nearest(head);
    m_norms.reserve(head.rows(), "kvzap::policy::merge_norms");
    row_norms(head.exec, head.values, m_norms.device());
    m_norms.to_host(head.exec);
    m_similarities.to_host(head.exec);
    m_nearest.to_host(head.exec);
    base::fence(head.exec, "kvzap::policy: the host weighs the rows to merge");
    weigh();
    // The keys have served; there are no more targets than kept rows.
    return m_rows.add(head, m_entries, m_kept.host(), m_count_kept, true, m_units);
  }

 private:
  // Lists kept rows and evicted ones.
  void divide(const CutHead& head) {
    const std::int64_t rows = head.rows();
    m_kept.reserve(rows, "kvzap::policy::merge_kept");
    m_gone.reserve(rows, "kvzap::policy::merge_gone");
    m_count_kept = m_count_gone = 0;
    for (std::int64_t row = 0; row < rows; ++row) {
      if (head.keep[row]) {
        m_kept.host()[m_count_kept++] = static_cast<std::int32_t>(row);
      } else {
        m_gone.host()[m_count_gone++] = static_cast<std::int32_t>(row);
      }
    }
    m_kept.to_kernels(head.exec);
    m_gone.to_kernels(head.exec);
  }

  void find_nearest(const CutHead& head) {
    const ExecutionSpace& exec = head.exec;
    const auto dim = static_cast<std::int64_t>(head.keys.extent(1));
    base::reserve_scratch(m_units, m_count_kept * dim, "kvzap::policy::merge_units");
    base::reserve_scratch(m_tile, tile_gone * dim, "kvzap::policy::merge_tile");
    const std::int64_t most_kept = std::min(tile_kept, m_count_kept);
    base::reserve_scratch(m_products, std::min(tile_gone, m_count_gone) * most_kept,
                          "kvzap::policy::merge_products");
    m_similarities.reserve(m_count_gone, "kvzap::policy::merge_similarities");
    m_nearest.reserve(m_count_gone, "kvzap::policy::merge_nearest");
    for (std::int64_t i = 0; i < m_count_gone; ++i) {
      m_similarities.host()[i] = -2;  // below all
      m_nearest.host()[i] = 0;
    }
    m_similarities.to_kernels(exec);
    m_nearest.to_kernels(exec);
    take_units(exec, head.keys, m_kept.device(), m_count_kept, m_units.data());
    for (std::int64_t begin = 0; begin < m_count_gone; begin += tile_gone) {
      const std::int64_t gone = std::min(tile_gone, m_count_gone - begin);
      take_units(exec, head.keys, m_gone.device() + begin, gone, m_tile.data());
      for (std::int64_t first = 0; first < m_count_kept; first += tile_kept) {
        const std::int64_t kept = std::min(tile_kept, m_count_kept - first);
        const linalg::Matrix products(m_products.data(), gone, kept);
        linalg::multiply_nt(exec, 1, linalg::ConstMatrix(m_tile.data(), gone, dim),
                            linalg::ConstMatrix(m_units.data() + first * dim, kept, dim), 0,
                            products);
        take_largest(exec, products, first,
                     {m_similarities.device() + begin, m_nearest.device() + begin});
      }
    }
  }

  // The least cosine that counts.
  float least_similarity() {
    if (m_fraction >= 1) return m_similarity;
    m_sorted.assign(m_similarities.host(), m_similarities.host() + m_count_gone);
    // The rank is computed as torch.quantile does.
    const float rank = static_cast<float>(1 - m_fraction) * static_cast<float>(m_count_gone - 1);
    const auto place = static_cast<std::ptrdiff_t>(std::ceil(rank));
    std::nth_element(m_sorted.begin(), m_sorted.begin() + place, m_sorted.end());
    return std::max(m_similarity, m_sorted[static_cast<std::size_t>(place)]);
  }

  // Weight of evicted row i; 0: it is dropped.
  float weight(std::int64_t i, float least) const {
    const float similarity = m_similarities.host()[i];
    if (!(similarity >= least)) return 0;
    const float own = m_norms.host()[m_gone.host()[i]];
    const float target = m_norms.host()[m_kept.host()[m_nearest.host()[i]]];
    const float weight = std::max(similarity, 0.0f) * own / (own + target + merge_epsilon);
    return weight > 0 ? weight : 0;  // also for NaN
  }

  // Lists the rows that are taken up.
  void weigh() {
    const float least = least_similarity();
    m_entries.clear();
    for (std::int64_t i = 0; i < m_count_gone; ++i) {
      const float by = weight(i, least);
      if (by > 0) m_entries.push_back({m_nearest.host()[i], m_gone.host()[i], by});
    }
  }

  float m_similarity;
  double m_fraction;
  std::int64_t m_count_kept = 0, m_count_gone = 0;
  Mirrored<std::int32_t> m_kept, m_gone;  // rows
  MergeFloats m_units;                    // (kept row, dim), then (target, dim): merged values
  MergeFloats m_tile;                     // (evicted row of the tile, dim)
  MergeFloats m_products;                 // (evicted row of the tile, kept row of the tile)
  Mirrored<float> m_similarities;         // (evicted row)
  Mirrored<std::int32_t> m_nearest;       // (evicted row): number of the kept row
  Mirrored<float> m_norms;                // (row): of values
  std::vector<float> m_sorted;
  std::vector<MergeEntry> m_entries;
  MergedRows m_rows;
};

}  // namespace

ModifierInfo merge() {
  ModifierInfo info;
  info.name = "merge";
  info.paper = "kvpress' MergingPress, after ToMe (arXiv 2210.09461) and D2O (arXiv 2406.13035)";
  info.effect = "kept values take up those of evicted rows, each that of the most similar key";
  info.apply_with<MergeParameters>([](PolicyChoice& choice, const MergeParameters& p,
                                      const PolicySetup& setup) {
    if (!choice.budget.has_amount()) {
      throw Error(
          "merge takes up the rows that a cut evicts; give an evict ratio, a number of tokens or a "
          "size instead of a threshold, which judges rows one by one");
    }
    if (setup.config.row_vectors() == 1) {
      throw Error(
          "merge has no meaning here: with latent attention a row has no value beside its key");
    }
    choice.merger = [p] { return std::make_unique<ValueMerge>(p); };
  });
  return info;
}

}  // namespace kvzap::policy
