#include "policy/leverage.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/host_threads.hpp"
#include "base/scratch.hpp"
#include "base/simd.hpp"
#include "linalg/host/row_kernels.hpp"
#include "policy/inverse_factor.hpp"
#include "policy/registry.hpp"
#include "policy/row_products.hpp"

namespace kvzap::policy {
namespace {

using Floats = Kokkos::View<float*, MemorySpace>;
using PositionView = PolicyLayer::PositionView;
using RowsView = PolicyLayer::RowsView;

// Positions between two coarse ones.
constexpr std::int64_t fine_positions = 128;

/// Cosines and sines of coarse and fine positions, which together give those of any position.
struct KeyTurns {
  const float* coarse;  // (position / fine_positions, 2, pairs)
  const float* fine;    // (position % fine_positions, 2, pairs)
  const float* frequencies;
  std::int64_t pairs;
};

// Rows that one work item rotates and adds up on a host.
constexpr std::int64_t turned_rows = 256;

// target = key, rotated back by its position. The angle is the float that RoPE computes, position *
// frequency. Sine and cosine of the exact product are combined from a coarse and a fine part. The
// rounding of the angle adds a small rotation. sums += target.
KVZAP_BODY void turn_key_back_body(const KeyTurns& turns, const float* key, std::int64_t position,
                                   float* target, double* sums) {
  const std::int64_t pairs = turns.pairs;
  const float* const a = turns.coarse + position / fine_positions * 2 * pairs;
  const float* const b = turns.fine + position % fine_positions * 2 * pairs;
  const float* const frequencies = turns.frequencies;
  const auto at = static_cast<float>(position);
#pragma omp simd
  for (std::int64_t d = 0; d < pairs; ++d) {
    const float angle = at * frequencies[d];
    const auto error =
        static_cast<float>(static_cast<double>(angle) - static_cast<double>(at) * frequencies[d]);
    const float exact_cosine = a[d] * b[d] - a[pairs + d] * b[pairs + d];
    const float exact_sine = a[pairs + d] * b[d] + a[d] * b[pairs + d];
    const float cosine = exact_cosine - error * exact_sine;
    const float sine = exact_sine + error * exact_cosine;
    const float x = key[d] * cosine + key[pairs + d] * sine;
    const float y = key[pairs + d] * cosine - key[d] * sine;
    target[d] = x;
    target[pairs + d] = y;
    sums[d] += x;
    sums[pairs + d] += y;
  }
}
KVZAP_KERNEL(void, turn_key_back,
             (const KeyTurns& turns, const float* key, std::int64_t position, float* target,
              double* sums),
             (turns, key, position, target, sums))

// rows = keys before RoPE, minus their mean. partial has a row for each turned_rows rows, and one.
void center_on_host(const RowsView& keys, const PositionView& positions, const KeyTurns& turns,
                    const linalg::Matrix& rows, double* partial) {
  const auto count = static_cast<std::int64_t>(rows.extent(0));
  const std::int64_t dim = 2 * turns.pairs;
  const std::int64_t slices = (count + turned_rows - 1) / turned_rows;
  base::host_for("kvzap::policy::leverage_turn_back", slices, [=](std::int64_t slice) {
    double* const sums = partial + slice * dim;
    std::fill_n(sums, dim, 0.0);
    const std::int64_t end = std::min(count, (slice + 1) * turned_rows);
    for (std::int64_t r = slice * turned_rows; r < end; ++r) {
      turn_key_back(turns, &keys(r, 0), positions(r), &rows(r, 0), sums);
    }
  });
  auto* const opposite = reinterpret_cast<float*>(partial + slices * dim);
  base::host_for("kvzap::policy::leverage_mean", 1, [=](std::int64_t) {
    for (std::int64_t d = 0; d < dim; ++d) {
      double sum = 0;
      for (std::int64_t slice = 0; slice < slices; ++slice) sum += partial[slice * dim + d];
      opposite[d] = static_cast<float>(-sum / static_cast<double>(count));
    }
  });
  base::host_for("kvzap::policy::leverage_center", slices, [=](std::int64_t slice) {
    const std::int64_t end = std::min(count, (slice + 1) * turned_rows);
    for (std::int64_t r = slice * turned_rows; r < end; ++r) {
      linalg::add(&rows(r, 0), opposite, dim);
    }
  });
}

// rows = keys, rotated back as by turn_key_back.
void rotate_back(const ExecutionSpace& exec, const RowsView& keys, const PositionView& positions,
                 const KeyTurns& turns, const linalg::Matrix& rows) {
  const std::int64_t pairs = turns.pairs;
  Kokkos::parallel_for(
      "kvzap::policy::leverage_rotate_back", PolicyRange(exec, 0, keys.extent(0) * pairs),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t r = i / pairs;
        const std::int64_t d = i % pairs;
        const std::int64_t position = positions(r);
        const float* const a = turns.coarse + position / fine_positions * 2 * pairs;
        const float* const b = turns.fine + position % fine_positions * 2 * pairs;
        const float frequency = turns.frequencies[d];
        const auto at = static_cast<float>(position);
        const float angle = at * frequency;
        const auto error =
            static_cast<float>(static_cast<double>(angle) - static_cast<double>(at) * frequency);
        const float exact_cosine = a[d] * b[d] - a[pairs + d] * b[pairs + d];
        const float exact_sine = a[pairs + d] * b[d] + a[d] * b[pairs + d];
        const float cosine = exact_cosine - error * exact_sine;
        const float sine = exact_sine + error * exact_cosine;
        rows(r, d) = keys(r, d) * cosine + keys(r, pairs + d) * sine;
        rows(r, pairs + d) = keys(r, pairs + d) * cosine - keys(r, d) * sine;
      });
}

void subtract_mean(const ExecutionSpace& exec, const ColumnSums::Sums& sums,
                   const linalg::Matrix& rows) {
  const std::int64_t columns = rows.extent(1);
  const auto count = static_cast<double>(rows.extent(0));
  const std::int64_t items = (columns + columns_per_item - 1) / columns_per_item;
  Kokkos::parallel_for(
      "kvzap::policy::leverage_center", PolicyRange(exec, 0, rows.extent(0) * items),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t first = i % items * columns_per_item;
        const std::int64_t end =
            first + columns_per_item < columns ? first + columns_per_item : columns;
        float* const row = &rows(i / items, 0);
        for (std::int64_t d = first; d < end; ++d) row[d] -= static_cast<float>(sums(d) / count);
      });
}

// scores(head, begin + r) = norms(r)^2
void square_norms(const ExecutionSpace& exec, const Kokkos::View<float*, MemorySpace>& norms,
                  const RowPart& part, int head, const Policy::ScoreView& scores) {
  Kokkos::parallel_for(
      "kvzap::policy::leverage_squares", PolicyRange(exec, 0, part.count),
      KOKKOS_LAMBDA(std::int64_t r) { scores(head, part.begin + r) = norms(r) * norms(r); });
}

// Returns the inverse factor of each of `heads` Gram matrices (n, n), one after the other, with the
// same jitter for all of the layer. Collective.
std::vector<float> invert_factors(const Communicator& comm, const std::vector<float>& grams,
                                  std::int64_t n) {
  std::vector<float> inverses(grams.size());
  std::vector<double> factor;
  const auto is_finite = [&](std::size_t begin) {
    return std::all_of(&grams[begin], &grams[begin] + n * n,
                       [](float x) { return std::isfinite(x); });
  };
  const double first = 1e-2;
  // A float cannot represent more tries.
  for (double jitter = first; jitter < 1e38; jitter *= 10) {
    std::int64_t failed = 0;
    for (std::size_t begin = 0; begin < grams.size(); begin += n * n) {
      if (!is_finite(begin)) {
        // No jitter helps; the other heads continue without it.
        std::fill_n(&inverses[begin], n * n, std::numeric_limits<float>::quiet_NaN());
      } else if (!invert_factor(&grams[begin], n, jitter, 0, factor, &inverses[begin])) {
        failed = 1;
        break;
      }
    }
    if (comm.all_reduce_max(failed) == 0) break;
  }
  return inverses;
}

}  // namespace

const std::vector<linalg::Matrix>& Sketches::of_layer(const PolicyLayer::Extents& extents) {
  OfLayer& layer = m_layers[extents.layer];
  if (layer.heads == extents.heads && layer.sketches.size() == extents.heads.size()) {
    return layer.sketches;
  }
  const std::int64_t dim = extents.head_dim;
  const std::vector<float> normals =
      m_normals.draw(extents.layer, extents.kv_heads * dim * m_dimension);
  const auto scale = static_cast<float>(1 / std::sqrt(static_cast<double>(m_dimension)));
  layer.heads = extents.heads;
  layer.sketches.clear();
  for (int head : extents.heads) {
    const linalg::Matrix sketch("kvzap::policy::leverage_sketch", m_dimension, dim);
    const auto host = Kokkos::create_mirror_view(sketch);
    for (std::int64_t d = 0; d < dim; ++d) {
      for (std::int64_t k = 0; k < m_dimension; ++k) {
        host(k, d) = normals[(head * dim + d) * m_dimension + k] * scale;
      }
    }
    Kokkos::deep_copy(sketch, host);
    layer.sketches.push_back(sketch);
  }
  return layer.sketches;
}

void LeverageScores::operator()(PolicyLayer& layer, const std::vector<RowPart>& parts,
                                const Policy::ScoreView& scores) {
  const ExecutionSpace& exec = layer.exec();
  const std::int64_t dim = layer.extents().head_dim;
  const std::int64_t n = m_sketches->dimension();
  const std::vector<linalg::Matrix>& sketches = m_sketches->of_layer(layer.extents());
  std::int64_t all = 0, most = 0;
  for (const RowPart& part : parts) {
    all += part.count;
    most = std::max(most, part.count);
  }
  std::vector<float> grams(layer.heads() * n * n);
  const Kokkos::View<float*, MemorySpace> device_grams("kvzap::policy::leverage_grams",
                                                       grams.size());
  const Kokkos::View<float*, Kokkos::HostSpace, Kokkos::MemoryUnmanaged> host_grams(grams.data(),
                                                                                    grams.size());
  if (all > 0) {
    const auto frequencies = layer.inverse_frequencies();
    const std::int64_t coarse = layer.extents().tokens / fine_positions + 1;
    base::reserve_scratch(m_turns, (coarse + fine_positions) * dim,
                          "kvzap::policy::leverage_rotate");
    base::reserve_scratch(m_keys, most * dim, "kvzap::policy::leverage_keys");
    base::reserve_scratch(m_projected, all * n, "kvzap::policy::leverage_projected");
    base::reserve_scratch(m_solved, most * n, "kvzap::policy::leverage_solved");
    base::reserve_scratch(m_norms, most, "kvzap::policy::leverage_norms");
    float* const fine_turns = m_turns.data() + coarse * dim;
    // Rotates keys back and removes RoPE's factor from them.
    fill_turns(exec, 0, fine_positions, coarse, frequencies, 1.0 / layer.extents().rope_scale,
               m_turns.data());
    fill_turns(exec, 0, 1, fine_positions, frequencies, 1, fine_turns);
    const KeyTurns turns{m_turns.data(), fine_turns, frequencies.data(),
                         static_cast<std::int64_t>(frequencies.extent(0))};
    float* projected = m_projected.data();
    for (int h = 0; h < layer.heads(); ++h) {
      const auto [begin, count] = parts[h];
      if (count == 0) continue;
      const linalg::Matrix keys(m_keys.data(), count, dim);
      const RowsView rotated = layer.keys(h, begin, count);
      const PositionView positions = layer.positions(h, begin, count);
      if (base::machine().on_host()) {
        base::reserve_scratch(m_partial, (count / turned_rows + 2) * dim,
                              "kvzap::policy::leverage_sums");
        center_on_host(rotated, positions, turns, keys, m_partial.data());
      } else {
        rotate_back(exec, rotated, positions, turns, keys);
        subtract_mean(exec, m_sums(exec, keys), keys);
      }
      const linalg::Matrix x(projected, count, n);
      linalg::multiply_nt(exec, 1, keys, sketches[h], 0, x);
      linalg::multiply_tn(exec, 1, x, x, 0, linalg::Matrix(device_grams.data() + h * n * n, n, n));
      projected += n * count;
    }
    Kokkos::deep_copy(exec, host_grams, device_grams);
    base::fence(exec, "kvzap::policy::leverage: the host factorizes");
  }
  const std::vector<float> inverses = invert_factors(layer.comm(), grams, n);
  if (all == 0) return;
  Kokkos::deep_copy(exec, device_grams,
                    Kokkos::View<const float*, Kokkos::HostSpace, Kokkos::MemoryUnmanaged>(
                        inverses.data(), inverses.size()));
  base::fence(exec, "kvzap::policy::leverage: the copy's source is about to go");
  const float* projected = m_projected.data();
  for (int h = 0; h < layer.heads(); ++h) {
    const auto [begin, count] = parts[h];
    if (count == 0) continue;
    const linalg::Matrix solved(m_solved.data(), count, n);
    linalg::multiply_nt(exec, 1, linalg::ConstMatrix(projected, count, n),
                        linalg::ConstMatrix(device_grams.data() + h * n * n, n, n), 0, solved);
    row_norms(exec, solved, m_norms.data());
    square_norms(exec, m_norms, parts[h], h, scores);
    projected += n * count;
  }
}

namespace {

/// Keeps rows whose keys, before RoPE, differ from the others of the head: approximate leverage
/// scores (LeverageScores), standardized over all heads of the layer (Chari and Van Durme:
/// "Compactor", arXiv 2507.08143).
///
/// Cost: 2 * k * (head_dim + 2 k) operations per row for a sketch of dimension k. Memory: head_dim
/// + k floats for each row of one head and k for each row of all heads of a layer.
///
/// As in kvpress, a Cholesky factorization with 0.01 on the diagonal replaces the paper's
/// decomposition. In float32, kvpress computes these scores after torch.manual_seed(seed). It
/// computes keys from hidden states. Here they come from the cache, rotated back, so that rows can
/// be scored at any time.
class Leverage final : public Policy {
 public:
  struct Parameters : PolicyParameters {
    std::int64_t dimension =
        integer("sketch-dimension", 48, {1, 4096}, "columns of the random matrix");
    std::int64_t seed = integer("seed", 0, {0, 4294967295.0}, "seed of the random matrix");
  };

  explicit Leverage(std::shared_ptr<Sketches> sketches) : m_leverage(std::move(sketches)) {}

  PolicyNeeds needs() const override {
    PolicyNeeds needs;
    needs.frequencies = true;
    return needs;
  }

  void score(PolicyLayer& layer, const ScoreView& scores) override {
    const auto parts = whole_heads(layer);
    m_leverage(layer, parts, scores);
    standardize(layer, parts, scores);
  }

 private:
  LeverageScores m_leverage;
};

}  // namespace

PolicyInfo leverage() {
  PolicyInfo info;
  info.name = "leverage";
  info.paper = "Compactor, arXiv 2507.08143";
  info.formula = "diag(X (X'X)^-1 X'), X = centered keys before RoPE times a random matrix";
  info.needs = "keys";
  info.cost = "O(rows * k * (head_dim + k)), k floats per row of a layer";
  info.make_with<Leverage::Parameters>([](const auto& p, const PolicySetup&) {
    const auto sketches =
        std::make_shared<Sketches>(p.dimension, static_cast<std::uint32_t>(p.seed));
    return [sketches] { return std::make_unique<Leverage>(sketches); };
  });
  return info;
}

}  // namespace kvzap::policy
