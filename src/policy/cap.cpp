#include <algorithm>
#include <cmath>
#include <vector>

#include "base/scratch.hpp"
#include "linalg/gemm.hpp"
#include "policy/inverse_factor.hpp"
#include "policy/query_statistics.hpp"
#include "policy/registry.hpp"
#include "policy/row_products.hpp"
#include "policy/row_protection.hpp"

namespace kvzap::policy {
namespace {

using linalg::ConstMatrix;
using linalg::Matrix;

// Rows whose weighted values exist at the same time.
constexpr std::int64_t cap_tile_rows = 1024;

struct CapParameters : PolicyParameters {
  double tau = number("tau", 5, {0, 1e6}, "sharpness of the weights");
  std::int64_t future_positions = integer("future-positions", 512, {1, 1 << 24},
                                          "future positions over which RoPE is averaged");
  std::int64_t sink = integer("sink", 4, {0, 1 << 30},
                              "first positions: they stay and are excluded from statistics");
  double epsilon = number("epsilon", 1e-6, {0, 1}, "added to the weights in A");
  bool normalizes = flag("normalize", true, "whether keys and mean query have unit length");
  std::int64_t history =
      integer("history", 256, {1, 1 << 20},
              "newest tokens that give the mean query while the model generates");
};

// weights(r) = tau * (k_r . mu), of unit vectors if `normalizes`. On entry, `weights` is k_r . mu.
void align(const ExecutionSpace& exec, std::int64_t rows, const float* mean_norm, float tau,
           bool normalizes, const RowVector& key_norms, const RowVector& weights) {
  Kokkos::parallel_for(
      "kvzap::cap::align", RowRange(exec, 0, rows), KOKKOS_LAMBDA(std::int64_t r) {
        float product = weights(r);
        if (normalizes) {
          constexpr float least = 1e-12f;
          const float norm = *mean_norm;
          product /= (key_norms(r) > least ? key_norms(r) : least) * (norm > least ? norm : least);
          product = product > 1 ? 1 : (product < -1 ? -1 : product);
        }
        weights(r) = tau * product;
      });
}

// weights = exp(weights - maximum)
void exponentials(const ExecutionSpace& exec, std::int64_t rows, const RowVector& weights) {
  float largest = 0;
  Kokkos::parallel_reduce(
      "kvzap::cap::largest", RowRange(exec, 0, rows),
      KOKKOS_LAMBDA(std::int64_t r, float& most) {
        if (weights(r) > most) most = weights(r);
      },
      Kokkos::Max<float>(largest));
  Kokkos::parallel_for(
      "kvzap::cap::exp", RowRange(exec, 0, rows),
      KOKKOS_LAMBDA(std::int64_t r) { weights(r) = base::math::exp(weights(r) - largest); });
}

// weighted(r, d) = (weights(first + r) + epsilon) * values(r, d)
void weigh_values(const ExecutionSpace& exec, const ConstMatrix& values, const RowVector& weights,
                  std::int64_t first, float epsilon, const Matrix& weighted) {
  const auto dim = static_cast<std::int64_t>(values.extent(1));
  Kokkos::parallel_for(
      "kvzap::cap::weigh", RowRange(exec, 0, static_cast<std::int64_t>(values.extent(0))),
      KOKKOS_LAMBDA(std::int64_t r) {
        const float weight = weights(first + r) + epsilon;
        for (std::int64_t d = 0; d < dim; ++d) weighted(r, d) = weight * values(r, d);
      });
}

// scores(r) += by * weights(r) * norms(r)^2; `begins` replaces += by =.
void add_scores(const ExecutionSpace& exec, const RowVector& norms, const RowVector& weights,
                float by, bool begins, const HeadScores& scores) {
  Kokkos::parallel_for(
      "kvzap::cap::scores", RowRange(exec, 0, scores.extent(0)), KOKKOS_LAMBDA(std::int64_t r) {
        const float score = by * weights(r) * norms(r) * norms(r);
        scores(r) = begins ? score : scores(r) + score;
      });
}

/// CapKV (arXiv 2604.25975), as in kvpress: keeps the rows that add most capacity, the volume that
/// the weighted values span.
///
///   s(r) = mean over the group of w_r v_r' A^-1 v_r,  A = I + sum_r (w_r + epsilon) v_r v_r',
///   w_r = exp(tau (cos(k_r, mu) - max_r cos(k_r, mu)))
///
/// Here mu is the mean query without the first `sink` tokens, rotated by RoPE's rotation averaged
/// over the next `future-positions` positions. Rows of the first `sink` positions are excluded and
/// get the layer's largest score + 1. Shapes: A (query heads, head_dim, head_dim). Cost per query
/// head: 4 rows head_dim^2 operations, and head_dim^3 for the factor of A (in double, on the host);
/// memory O(rows).
///
/// The paper uses k . mu instead of kvpress' cosine (`normalize=off`), a mean query without
/// averaged RoPE, and no + 1 for the first rows. In steps that add fewer than `history` tokens to a
/// longer sequence, mu is computed from the newest `history` tokens.
class Cap final : public Policy {
 public:
  using Parameters = CapParameters;
  explicit Cap(const CapParameters& parameters)
      : m_parameters(parameters), m_statistics(false, parameters.sink, parameters.history) {}

  PolicyNeeds needs() const override {
    PolicyNeeds needs;
    needs.blocks = true;
    needs.frequencies = true;
    needs.recent = m_parameters.history;
    return needs;
  }

  void observe(PolicyLayer& layer, const TokenBlock& block) override {
    m_statistics.observe(layer, block);
  }

  void score(PolicyLayer& layer, const ScoreView& scores) override {
    m_statistics.finish(layer);
    m_rope.prepare(layer, m_statistics.end(), m_parameters.future_positions);
    m_rope.turn(layer.exec(), m_statistics.means());
    base::reserve_scratch(m_mean_norms, m_statistics.means().extent(0), "kvzap::cap::mean_norms");
    row_norms(layer.exec(), m_statistics.means(), m_mean_norms.data());
    std::vector<Rows> protected_rows;
    for (int h = 0; h < layer.heads(); ++h) {
      const std::int64_t first = rows_before(layer, h, m_parameters.sink);
      protected_rows.emplace_back(0, first);
      const std::int64_t rows = layer.rows(h) - first;
      if (rows > 0) score_head(layer, h, first, rows, scores);
    }
    protect_rows(layer, scores, protected_rows);
  }

 private:
  void score_head(PolicyLayer& layer, int head, std::int64_t first, std::int64_t rows,
                  const ScoreView& scores) {
    const ExecutionSpace& exec = layer.exec();
    const int group = layer.extents().group;
    const std::int64_t dim = layer.extents().head_dim;
    base::reserve_scratch(m_weights, rows, "kvzap::cap::weights");
    base::reserve_scratch(m_key_norms, rows, "kvzap::cap::key_norms");
    base::reserve_scratch(m_norms, rows, "kvzap::cap::norms");
    base::reserve_scratch(m_tile, std::min(rows, cap_tile_rows) * dim, "kvzap::cap::tile");
    if (static_cast<std::int64_t>(m_capacity.extent(0)) != dim) {
      m_capacity = Matrix("kvzap::cap::capacity", dim, dim);
    }
    const PolicyLayer::RowsView keys = layer.keys(head, first, rows);
    const PolicyLayer::RowsView values = layer.values(head, first, rows);
    const auto tile_of = [&](std::int64_t begin) -> ConstMatrix {
      return Kokkos::subview(values, std::make_pair(begin, std::min(rows, begin + cap_tile_rows)),
                             Kokkos::ALL);
    };
    row_norms(exec, keys, m_key_norms.data());
    for (int g = 0; g < group; ++g) {
      const float* const mean =
          m_statistics.means().data() + (static_cast<std::int64_t>(head) * group + g) * dim;
      row_products(exec, keys, nullptr, 0, mean, 1, m_weights.data());
      align(exec, rows, m_mean_norms.data() + static_cast<std::int64_t>(head) * group + g,
            static_cast<float>(m_parameters.tau), m_parameters.normalizes, m_key_norms, m_weights);
      exponentials(exec, rows, m_weights);
      Kokkos::deep_copy(exec, m_capacity, 0.0f);
      for (std::int64_t begin = 0; begin < rows; begin += cap_tile_rows) {
        const ConstMatrix tile = tile_of(begin);
        const Matrix weighted(m_tile.data(), tile.extent(0), dim);
        weigh_values(exec, tile, m_weights, begin, static_cast<float>(m_parameters.epsilon),
                     weighted);
        linalg::multiply_tn(exec, 1, weighted, tile, 1, m_capacity);
      }
      invert_capacity(exec);
      for (std::int64_t begin = 0; begin < rows; begin += cap_tile_rows) {
        const ConstMatrix tile = tile_of(begin);
        const Matrix solved(m_tile.data(), tile.extent(0), dim);
        linalg::multiply_nt(exec, 1, tile, m_capacity, 0, solved);
        row_norms(exec, solved, m_norms.data() + begin);
      }
      add_scores(exec, m_norms, m_weights, 1.0f / static_cast<float>(group), g == 0,
                 scores_of(scores, head, first, rows));
    }
  }

  void invert_capacity(const ExecutionSpace& exec) {
    const auto host = Kokkos::create_mirror_view(m_capacity);
    Kokkos::deep_copy(exec, host, m_capacity);
    base::fence(exec, "kvzap::cap: the host factorizes");
    // The identity keeps pivots at 1 or above, apart from the rounding of the sums.
    if (!invert_factor(host.data(), static_cast<std::int64_t>(host.extent(0)), 1, 1, m_factor,
                       host.data())) {
      // If values are not finite, their rows stay.
      std::fill_n(host.data(), host.size(), std::nanf(""));
    }
    Kokkos::deep_copy(exec, m_capacity, host);
    base::fence(exec, "kvzap::cap: the copy on the host ends here");
  }

  CapParameters m_parameters;
  QueryStatistics m_statistics;
  AverageRope m_rope;
  RowVector m_mean_norms;  // (query head)
  RowVector m_weights;     // (row)
  RowVector m_key_norms;   // (row)
  RowVector m_norms;       // (row): norm of L^-1 v
  RowVector m_tile;        // (row of a tile, head_dim)
  std::vector<double> m_factor;
  Matrix m_capacity;  // A - I, then the inverse of A's factor
};

}  // namespace

PolicyInfo cap() {
  PolicyInfo info;
  info.name = "cap";
  info.paper = "CapKV, arXiv 2604.25975";
  info.formula = "leverage of a row's value, weighted by its key's similarity to the mean query";
  info.needs = "all queries, keys, values";
  info.cost = "time O(rows d^2) per query head; memory O(rows)";
  info.make_class<Cap>();
  return info;
}

}  // namespace kvzap::policy
