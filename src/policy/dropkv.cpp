#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/scratch.hpp"
#include "linalg/gemm.hpp"
#include "policy/registry.hpp"
#include "policy/row_math.hpp"
#include "policy/row_protection.hpp"
#include "policy/softmax.hpp"
#include "policy/window_attention.hpp"

namespace kvzap::policy {
namespace {

using linalg::Matrix;

// Of the authors' code: keeps the factor finite for a row with all of the attention.
constexpr float epsilon = 1e-6f;

// squares(i) = |x(i, :)|^2
template <class Rows>
void square_rows(const ExecutionSpace& exec, const Rows& x, const RowVector& squares) {
  const auto columns = static_cast<std::int64_t>(x.extent(1));
  Kokkos::parallel_for(
      "kvzap::dropkv::squares", RowRange(exec, 0, x.extent(0)),
      KOKKOS_LAMBDA(std::int64_t i) { squares(i) = dot(&x(i, 0), &x(i, 0), columns); });
}

/// Changes of the outputs of some queries.
struct Changes {
  Matrix probabilities;  // (query, row)
  Matrix products;       // (query, row): output * value
  RowVector outputs;     // (query): squares
  RowVector values;      // (row): squares
  float factor = 1;
  bool begins = true;  // replaces the old sums
};

// sums(r) += factor * sum over queries of (p / (1 - p))^2 |v(r) - output|^2
void add_changes(const ExecutionSpace& exec, const Changes& of, const RowVector& sums) {
  const auto queries = static_cast<std::int64_t>(of.probabilities.extent(0));
  Kokkos::parallel_for(
      "kvzap::dropkv::changes", RowRange(exec, 0, of.probabilities.extent(1)),
      KOKKOS_LAMBDA(std::int64_t r) {
        float sum = 0;
        for (std::int64_t q = 0; q < queries; ++q) {
          const float p = of.probabilities(q, r);
          const float weight = p / (1 - p + epsilon);
          const float distance = of.values(r) - 2 * of.products(q, r) + of.outputs(q);
          // Rounding may leave less than 0.
          sum += distance > 0 ? weight * weight * distance : 0.0f;
        }
        sums(r) = of.factor * sum + (of.begins ? 0.0f : sums(r));
      });
}

// scores(r) = mean of `kernel` sums around r, with zeros beyond the ends.
void pool(const ExecutionSpace& exec, const RowVector& sums, std::int64_t rows, std::int64_t kernel,
          const HeadScores& scores) {
  const std::int64_t reach = kernel / 2;
  Kokkos::parallel_for(
      "kvzap::dropkv::pool", RowRange(exec, 0, scores.extent(0)), KOKKOS_LAMBDA(std::int64_t r) {
        const std::int64_t begin = r < reach ? 0 : r - reach;
        const std::int64_t end = r + reach < rows ? r + reach + 1 : rows;
        float sum = 0;
        for (std::int64_t i = begin; i < end; ++i) sum += sums(i);
        scores(r) = sum / static_cast<float>(kernel);
      });
}

struct DropKvParameters : PolicyParameters {
  std::int64_t window = integer("window", 8, {1, 256}, "newest tokens whose queries count");
  std::int64_t kernel = integer("kernel", 11, {1, 1 << 20}, "number of rows that are pooled; odd");
};

/// DropKV (Zhang et al., NeurIPS 2026, openreview UVbaJoD3Qa): keeps rows without which the output
/// of attention would change most.
///
///   s(r) = pool_k(1/g sum over window and group of (p / (1 - p))^2 |v(r) - o|^2)
///
/// for a row r before the newest w tokens, the window. p is the softmax probability that a query
/// gives the row over all rows that it sees, o its output, the sum of p v. The summand is the exact
/// square of the output's change if r alone goes. pool_k is the mean over k rows around r (zeros
/// beyond the ends). The window's own rows have the layer's largest score + 1.
///
/// Shapes: queries (w, query heads, head_dim), keys and values of each head. Cost: 6 w rows
/// head_dim operations per query head. Memory: at most 32 MiB of logits and products, and two
/// numbers per row.
///
/// As in the authors' code, 1e-6 is added to 1 - p, and the pooling includes the window's rows.
/// Their budget has at least the window's rows. The window of a sequence that is not longer than it
/// is the newer half of the sequence. Sinks of the model (has_sinks) take part in the softmax.
/// kvpress has no such press.
class DropKv final : public Policy {
 public:
  explicit DropKv(const DropKvParameters& parameters) : m_parameters(parameters) {}

  PolicyNeeds needs() const override {
    PolicyNeeds needs;
    needs.recent = m_parameters.window;
    return needs;
  }

  void score(PolicyLayer& layer, const ScoreView& scores) override {
    const TokenBlock window = observation_window(layer, m_parameters.window);
    std::vector<Rows> protected_rows;
    for (int h = 0; h < layer.heads(); ++h) {
      const std::int64_t rows = layer.rows(h);
      const std::int64_t before = rows_before(layer, h, window.first);
      protected_rows.emplace_back(before, rows);
      if (before == 0) continue;
      find_changes(layer, h, window, rows);
      pool(layer.exec(), m_scratch.sums, rows, m_parameters.kernel,
           scores_of(scores, h, 0, before));
    }
    protect_rows(layer, scores, protected_rows);
    if (layer.layer() + 1 == layer.extents().layers) m_scratch = {};
  }

 private:
  void find_changes(PolicyLayer& layer, int head, const TokenBlock& window, std::int64_t rows) {
    const ExecutionSpace& exec = layer.exec();
    const auto& extents = layer.extents();
    const int group = extents.group;
    const std::int64_t dim = extents.head_dim;
    const std::int64_t tokens =
        std::clamp<std::int64_t>(WindowAttention::most_stored / (group * rows), 1, window.count);
    Scratch& s = m_scratch;
    base::reserve_scratch(s.queries, tokens * group * dim, "kvzap::dropkv::queries");
    base::reserve_scratch(s.outputs, tokens * group * dim, "kvzap::dropkv::outputs");
    base::reserve_scratch(s.squares, tokens * group, "kvzap::dropkv::squares");
    base::reserve_scratch(s.logits, tokens * group * rows, "kvzap::dropkv::logits");
    base::reserve_scratch(s.products, tokens * group * rows, "kvzap::dropkv::products");
    base::reserve_scratch(s.values, rows, "kvzap::dropkv::values");
    base::reserve_scratch(s.sums, rows, "kvzap::dropkv::sums");
    const PolicyLayer::RowsView keys = layer.keys(head), values = layer.values(head);
    const PolicyLayer::PositionView positions = layer.positions(head);
    square_rows(exec, values, s.values);
    for (std::int64_t first = 0; first < window.count; first += tokens) {
      const std::int64_t count = std::min(tokens, window.count - first) * group;
      const Matrix queries(s.queries.data(), count, dim), outputs(s.outputs.data(), count, dim);
      const Matrix logits(s.logits.data(), count, rows), products(s.products.data(), count, rows);
      pack_queries(exec,
                   Kokkos::subview(window.queries, std::make_pair(first, first + count / group),
                                   Kokkos::ALL, Kokkos::ALL),
                   head, group, 1.0f / std::sqrt(static_cast<float>(dim)), queries);
      linalg::multiply_nt(exec, 1, queries, keys, 0, logits);
      Softmax softmax{logits, positions, {}, window.first + first, group, extents.soft_cap};
      if (extents.sinks.extent(0) > 0) {
        softmax.sinks =
            Kokkos::subview(extents.sinks, std::make_pair(head * group, (head + 1) * group));
      }
      apply_softmax(exec, softmax);
      linalg::multiply_nn(exec, 1, logits, values, 0, outputs);
      square_rows(exec, outputs, s.squares);
      linalg::multiply_nt(exec, 1, outputs, values, 0, products);
      add_changes(
          exec,
          {logits, products, s.squares, s.values, 1.0f / static_cast<float>(group), first == 0},
          s.sums);
    }
  }

  struct Scratch {
    linalg::Vector queries, outputs;  // (query, head_dim)
    linalg::Vector logits, products;  // (query, row)
    RowVector squares;                // (query)
    RowVector values, sums;           // (row)
  };

  DropKvParameters m_parameters;
  Scratch m_scratch;
};

}  // namespace

PolicyInfo dropkv() {
  PolicyInfo info;
  info.name = "dropkv";
  info.paper = "DropKV, NeurIPS 2026, openreview UVbaJoD3Qa";
  info.formula =
      "squared change of the newest w queries' outputs without the row, pooled over k neighbouring "
      "rows";
  info.needs = "queries of the newest w tokens, keys, values";
  info.cost = "time O(w d rows) per query head; memory O(rows), at most 32 MiB more";
  info.make_with<DropKvParameters>([](const auto& p, const PolicySetup&) -> PolicyMaker {
    if (p.kernel % 2 == 0) {
      throw Error(
          fmt::format("kernel={}: the rows pooled around a row are an odd number", p.kernel));
    }
    return [=] { return std::make_unique<DropKv>(p); };
  });
  return info;
}

}  // namespace kvzap::policy
