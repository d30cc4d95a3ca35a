// Modifier fit: kept values are fitted to the attention that a repeat of the context pays to all.
#include <algorithm>
#include <cmath>
#include <utility>

#include "base/kokkos_compat.hpp"
#include "base/scratch.hpp"
#include "linalg/gemm.hpp"
#include "policy/registry.hpp"
#include "policy/row_loops.hpp"
#include "policy/row_math.hpp"
#include "policy/softmax.hpp"
#include "policy/window_attention.hpp"

namespace kvzap::policy {
namespace {

using linalg::ConstMatrix;
using linalg::Matrix;

/// Logits that exist at a time, if a tile has more queries than `least_queries`.
constexpr std::int64_t tile_logits = base::runs_on_host ? std::int64_t{1} << 19 : 1 << 24;
constexpr std::int64_t least_queries = 16;
/// Steps of the search. With the default ridge, half as many leave the outputs of a real model as
/// close to the full cache's as the exact solution does; 16 also give its values, within 1 to 3 %.
constexpr int search_steps = 16;

/// Queries of the repeat in one layer, and how the layer attends.
struct FitLayer {
  std::vector<int> heads;  // on this rank: index of each head in the model
  /// (head on this rank, query, head_dim), over sqrt(head_dim), those of a group side by side.
  Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace> queries;
  std::int64_t count = 0;  // queries that are there, of each head
  int group = 1;
  float soft_cap = 0;
  Kokkos::View<const float*, MemorySpace> sinks;  // (query head on this rank), or empty

  float* row(std::int64_t head, std::int64_t query) const {
    const auto most = static_cast<std::int64_t>(queries.extent(1));
    return queries.data() + (head * most + query) * static_cast<std::int64_t>(queries.extent(2));
  }
};

using FitLayers = std::vector<FitLayer>;

// taken(q, k) = all(q, rows(k))
void take_columns(const ExecutionSpace& exec, const Matrix& all, const std::int32_t* rows,
                  const Matrix& taken) {
  const auto count = static_cast<std::int64_t>(taken.extent(1));
  each_row(
      exec, "kvzap::fit::columns", static_cast<std::int64_t>(taken.extent(0)),
      KOKKOS_LAMBDA(std::int64_t q) {
        for (std::int64_t k = 0; k < count; ++k) taken(q, k) = all(q, rows[k]);
      });
}

// diagonal(k) = w + sum over the queries of shares(q, k)^2, where w is `ridge` times the mean of
// these sums. Returns w.
float set_diagonal(const ExecutionSpace& exec, const Matrix& shares, double ridge,
                   const linalg::Vector& diagonal) {
  const auto queries = static_cast<std::int64_t>(shares.extent(0));
  const auto rows = static_cast<std::int64_t>(shares.extent(1));
  constexpr std::int64_t slice = columns_per_item;
  double sum = 0;
  Kokkos::parallel_reduce(
      "kvzap::fit::diagonal", PolicyRange(exec, 0, (rows + slice - 1) / slice),
      KOKKOS_LAMBDA(std::int64_t i, double& partial) {
        const std::int64_t end = (i + 1) * slice < rows ? (i + 1) * slice : rows;
        for (std::int64_t k = i * slice; k < end; ++k) diagonal(k) = 0;
        for (std::int64_t q = 0; q < queries; ++q) {
          for (std::int64_t k = i * slice; k < end; ++k) {
            diagonal(k) += shares(q, k) * shares(q, k);
          }
        }
        for (std::int64_t k = i * slice; k < end; ++k) partial += diagonal(k);
      },
      sum);
  const auto weight = static_cast<float>(ridge * sum / static_cast<double>(rows));
  Kokkos::parallel_for(
      "kvzap::fit::weight", PolicyRange(exec, 0, rows),
      KOKKOS_LAMBDA(std::int64_t k) { diagonal(k) += weight; });
  return weight;
}

/// A search for X, (row, dim): what it goes through, (row, dim), and the diagonal of its matrix.
struct Search {
  Matrix added;  // X so far
  Matrix residual, direction, product;
  linalg::Vector diagonal;  // (row)
};

// direction = residual / diagonal + by * direction
void update_direction(const ExecutionSpace& exec, float by, const Search& search) {
  const auto dim = static_cast<std::int64_t>(search.added.extent(1));
  const Search s = search;
  Kokkos::parallel_for(
      "kvzap::fit::direction", PolicyRange(exec, 0, static_cast<std::int64_t>(s.added.size())),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t k = i / dim, d = i % dim;
        s.direction(k, d) = s.residual(k, d) / s.diagonal(k) + by * s.direction(k, d);
      });
}

// product += weight * direction. Returns its product with the direction.
double finish_product(const ExecutionSpace& exec, float weight, const Search& search) {
  const auto dim = static_cast<std::int64_t>(search.added.extent(1));
  const Search s = search;
  double sum = 0;
  Kokkos::parallel_reduce(
      "kvzap::fit::product", PolicyRange(exec, 0, static_cast<std::int64_t>(s.added.size())),
      KOKKOS_LAMBDA(std::int64_t i, double& partial) {
        const std::int64_t k = i / dim, d = i % dim;
        s.product(k, d) += weight * s.direction(k, d);
        partial += static_cast<double>(s.product(k, d)) * s.direction(k, d);
      },
      sum);
  return sum;
}

// added += by * direction, residual -= by * product. Returns the product of the residual with
// itself, over the diagonal.
double advance(const ExecutionSpace& exec, float by, const Search& search) {
  const auto dim = static_cast<std::int64_t>(search.added.extent(1));
  const Search s = search;
  double sum = 0;
  Kokkos::parallel_reduce(
      "kvzap::fit::advance", PolicyRange(exec, 0, static_cast<std::int64_t>(s.added.size())),
      KOKKOS_LAMBDA(std::int64_t i, double& partial) {
        const std::int64_t k = i / dim, d = i % dim;
        s.added(k, d) += by * s.direction(k, d);
        s.residual(k, d) -= by * s.product(k, d);
        partial += static_cast<double>(s.residual(k, d)) * s.residual(k, d) / s.diagonal(k);
      },
      sum);
  return sum;
}

/// Finds what to add to the values: X of (S^T S + w I) X = S^T M, for shares S (query, row), by
/// conjugate gradients for all columns of X at once, scaled by the diagonal. Keeps its memory.
class ConjugateGradients {
 public:
  /// added (row, dim) = X. missing: M (query, dim). ridge: w over the mean of the diagonal of S^T
  /// S.
  void operator()(const ExecutionSpace& exec, const Matrix& shares, const Matrix& missing,
                  double ridge, const Matrix& added) {
    const auto queries = static_cast<std::int64_t>(shares.extent(0));
    const auto rows = static_cast<std::int64_t>(shares.extent(1));
    const auto dim = static_cast<std::int64_t>(missing.extent(1));
    base::reserve_scratch(m_diagonal, rows, "kvzap::fit::diagonal");
    const Search search = {added, scratch_matrix(m_residual, rows, dim),
                           scratch_matrix(m_direction, rows, dim),
                           scratch_matrix(m_product, rows, dim),
                           Kokkos::subview(m_diagonal, std::make_pair(std::int64_t{0}, rows))};
    const float weight = set_diagonal(exec, shares, ridge, search.diagonal);
    // S^T S costs queries * rows^2 operations once, and then rows^2 * dim a step; without it a step
    // takes 2 * queries * rows * dim.
    const bool squares = rows * (queries + search_steps * dim) < 2 * search_steps * queries * dim;
    const Matrix between =
        scratch_matrix(m_between, squares ? rows : queries, squares ? rows : dim);
    if (squares) linalg::multiply_tn(exec, 1, shares, shares, 0, between);

    for (const Matrix& each : {added, search.direction, search.product}) {
      Kokkos::deep_copy(exec, each, 0.0F);
    }
    linalg::multiply_tn(exec, 1, shares, missing, 0, search.residual);
    double before = advance(exec, 0, search);
    update_direction(exec, 0, search);
    for (int step = 0; step < search_steps && before > 0; ++step) {
      if (squares) {
        linalg::multiply_nn(exec, 1, between, search.direction, 0, search.product);
      } else {
        linalg::multiply_nn(exec, 1, shares, search.direction, 0, between);
        linalg::multiply_tn(exec, 1, shares, between, 0, search.product);
      }
      const double along = finish_product(exec, weight, search);
      if (!(along > 0)) return;  // also for NaN
      const double now = advance(exec, static_cast<float>(before / along), search);
      update_direction(exec, static_cast<float>(now / before), search);
      before = now;
    }
  }

 private:
  static Matrix scratch_matrix(linalg::Vector& memory, std::int64_t rows, std::int64_t columns) {
    base::reserve_scratch(memory, rows * columns, "kvzap::fit::search");
    return Matrix(memory.data(), rows, columns);
  }

  linalg::Vector m_residual, m_direction, m_product, m_between, m_diagonal;
};

struct FitParameters : PolicyParameters {
  std::int64_t queries = integer("queries", 1024, {1, 8192},
                                 "largest number of queries of the repeat, of a KV head's group");
  double ridge =
      number("ridge", 0.1, {1e-6, 1e6},
             "weight of the distance to the original values, relative to the mean squared share");
};

// values += added, where the sum is finite.
void add(const ExecutionSpace& exec, const Matrix& added, const Matrix& values) {
  const auto dim = static_cast<std::int64_t>(values.extent(1));
  Kokkos::parallel_for(
      "kvzap::fit::add", PolicyRange(exec, 0, static_cast<std::int64_t>(values.size())),
      KOKKOS_LAMBDA(std::int64_t i) {
        const float sum = values(i / dim, i % dim) + added(i / dim, i % dim);
        if (sum - sum == 0) values(i / dim, i % dim) = sum;
      });
}

/// Fits the values of kept rows (Attention Matching, arXiv 2602.16284). With the
/// queries q of the repeat, shares S(q, k) = softmax over the rows that stay, and a(q) the output
/// of attention to all rows of the context, the new values V' minimise
///
///     sum over q of |a(q) - sum over k of S(q, k) V'(k)|^2 + w sum over k of |V'(k) - V(k)|^2,
///
/// where w is `ridge` times the mean over k of sum over q of S(q, k)^2.
class ValueFit final : public ValueMerger {
 public:
  ValueFit(std::shared_ptr<const FitLayers> layers, double ridge)
      : m_layers(std::move(layers)), m_ridge(ridge) {}

  const MergedValues& merge(const CutHead& head) override {
    m_merged.rows.clear();
    const FitLayer& layer = m_layers->at(head.layer);
    if (layer.count == 0) return m_merged;
    for (std::int64_t row = 0; row < head.rows(); ++row) {
      if (head.keep[row]) m_merged.rows.push_back(row);
    }
    const auto kept = static_cast<std::int64_t>(m_merged.rows.size());
    const auto dim = static_cast<std::int64_t>(head.values.extent(1));
    m_kept.reserve(kept, "kvzap::fit::kept");
    std::copy(m_merged.rows.begin(), m_merged.rows.end(), m_kept.host());
    m_kept.to_kernels(head.exec);
    base::reserve_scratch(m_shares, layer.count * kept, "kvzap::fit::shares");
    base::reserve_scratch(m_missing, layer.count * dim, "kvzap::fit::missing");
    base::reserve_scratch(m_values, kept * dim, "kvzap::fit::values");
    base::reserve_scratch(m_added, kept * dim, "kvzap::fit::added");
    const Matrix shares(m_shares.data(), layer.count, kept);
    const Matrix missing(m_missing.data(), layer.count, dim);
    const Matrix values(m_values.data(), kept, dim), added(m_added.data(), kept, dim);
    attend(head, layer, shares, missing);
    gather_rows(head.exec, "kvzap::fit::rows", head.values, m_kept.device(), values);
    linalg::multiply_nn(head.exec, -1, shares, values, 1, missing);
    m_search(head.exec, shares, missing, m_ridge, added);
    add(head.exec, added, values);
    m_merged.values = values;
    return m_merged;
  }

 private:
  // Fills the shares of the rows that stay, and `missing` with the outputs of attention to all.
  void attend(const CutHead& head, const FitLayer& layer, const Matrix& shares,
              const Matrix& missing) {
    const ExecutionSpace& exec = head.exec;
    const std::int64_t rows = head.rows();
    const auto kept = static_cast<std::int64_t>(shares.extent(1));
    const auto dim = static_cast<std::int64_t>(head.keys.extent(1));
    const auto local =
        std::find(layer.heads.begin(), layer.heads.end(), head.head) - layer.heads.begin();
    Softmax softmax;
    softmax.group = layer.group;
    softmax.cap = layer.soft_cap;
    if (layer.sinks.extent(0) > 0) {
      softmax.sinks = Kokkos::subview(
          layer.sinks, std::make_pair(local * layer.group, (local + 1) * layer.group));
    }
    // A tile begins with the first query head of the group, as sinks do.
    const std::int64_t tokens = std::max(least_queries, tile_logits / rows) / layer.group;
    const std::int64_t tile =
        std::min(layer.count, std::max<std::int64_t>(1, tokens) * layer.group);
    base::reserve_scratch(m_logits, tile * rows, "kvzap::fit::logits");
    for (std::int64_t first = 0; first < layer.count; first += tile) {
      const std::int64_t count = std::min(tile, layer.count - first);
      const auto part = std::make_pair(first, first + count);
      const Matrix logits(m_logits.data(), count, rows);
      const Matrix of_kept(shares.data() + first * kept, count, kept);
      linalg::multiply_nt(exec, 1, ConstMatrix(layer.row(local, first), count, dim), head.keys, 0,
                          logits);
      take_columns(exec, logits, m_kept.device(), of_kept);
      for (const Matrix& each : {of_kept, logits}) {
        softmax.logits = each;
        apply_softmax(exec, softmax);
      }
      linalg::multiply_nn(exec, 1, logits, head.values, 0,
                          Kokkos::subview(missing, part, Kokkos::ALL));
    }
  }

  std::shared_ptr<const FitLayers> m_layers;
  double m_ridge;
  Mirrored<std::int32_t> m_kept;
  linalg::Vector m_shares, m_missing, m_values, m_added, m_logits;
  ConjugateGradients m_search;
  MergedValues m_merged;
};

/// Returns the queries of every n-th token of a block, `count` in all, from token `first` on.
TokenBlock::QueryView every_nth(const TokenBlock::QueryView& queries, std::int64_t first,
                                std::int64_t every, std::int64_t count) {
  const Kokkos::LayoutStride layout(count, every * queries.stride(0), queries.extent(1),
                                    queries.stride(1), queries.extent(2), queries.stride(2));
  return TokenBlock::QueryView(queries.data() + first * queries.stride(0), layout);
}

/// A policy that repeats the context, and also takes queries of the repeat.
class FittedPolicy final : public Policy {
 public:
  FittedPolicy(std::unique_ptr<Policy> scores, const FitParameters& parameters)
      : m_scores(std::move(scores)),
        m_queries(parameters.queries),
        m_ridge(parameters.ridge),
        m_layers(std::make_shared<FitLayers>()) {}

  PolicyNeeds needs() const override {
    PolicyNeeds needs = m_scores->needs();
    needs.blocks = true;
    return needs;
  }

  void observe(PolicyLayer& layer, const TokenBlock& block) override {
    if (m_scores->needs().blocks) m_scores->observe(layer, block);
    take(layer, block);
  }

  void score(PolicyLayer& layer, const ScoreView& scores) override {
    m_scores->score(layer, scores);
  }

  Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> context_scores(const ExecutionSpace& exec,
                                                                         const Communicator& comm,
                                                                         int layer) override {
    return m_scores->context_scores(exec, comm, layer);
  }

  MergerMaker context_merger() override {
    if (m_scores->context_merger()) {
      throw Error("fit: the policy changes kept values itself; leave out one of the two");
    }
    return
        [layers = m_layers, ridge = m_ridge] { return std::make_unique<ValueFit>(layers, ridge); };
  }

 private:
  // Takes the queries of the last of every n tokens of the context, where n is at most its length.
  // So there are some, and no result depends on how steps divide into blocks.
  void take(PolicyLayer& layer, const TokenBlock& block) {
    const PolicyLayer::Extents& extents = layer.extents();
    const std::int64_t context = extents.tokens - extents.new_tokens;
    m_layers->resize(std::max<std::size_t>(m_layers->size(), layer.layer() + 1));
    FitLayer& own = (*m_layers)[layer.layer()];
    if (layer.heads() == 0) return;
    const std::int64_t group = extents.group, dim = extents.head_dim;
    const std::int64_t wanted = std::max<std::int64_t>(1, m_queries / group);  // tokens
    const std::int64_t every = (context + wanted - 1) / wanted;
    if (own.queries.data() == nullptr) {
      own.heads = extents.heads;
      own.group = extents.group;
      own.soft_cap = extents.soft_cap;
      own.sinks = extents.sinks;
      const std::int64_t most = context / every * group;
      base::before_allocation(static_cast<std::size_t>(layer.heads() * most * dim) * sizeof(float));
      own.queries = decltype(own.queries)(
          Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::fit::queries"), layer.heads(),
          most, dim);
    }
    // A step ends with the tokens that it repeats.
    const std::int64_t shift = extents.repeats_end - extents.tokens;  // of the cache to the context
    const std::int64_t begin = std::max(block.first + shift, extents.repeats_begin);
    const std::int64_t end = block.first + block.count + shift;
    const std::int64_t first = begin / every * every + every - 1;
    const std::int64_t count = first < end ? (end - first + every - 1) / every : 0;
    if (count == 0) return;
    if (own.count + count * group > static_cast<std::int64_t>(own.queries.extent(1))) {
      throw Error("fit: the steps of a repeat overlap; expected each token of the context once");
    }
    const auto taken = every_nth(block.queries, first - shift - block.first, every, count);
    const auto scaling = 1 / std::sqrt(static_cast<float>(dim));
    for (int head = 0; head < layer.heads(); ++head) {
      pack_queries(layer.exec(), taken, head, extents.group, scaling,
                   Matrix(own.row(head, own.count), count * group, dim));
    }
    own.count += count * group;
  }

  std::unique_ptr<Policy> m_scores;
  std::int64_t m_queries;
  double m_ridge;
  std::shared_ptr<FitLayers> m_layers;
};

}  // namespace

/// Attention Matching (Zweiger et al., arXiv 2602.16284) without its biases: see ValueFit. The
/// queries are those with which the model repeats the context: of each head's group, those of every
/// n-th token, `queries` of them at most (or those of one token, if the group is larger).
///
/// Deviations: the paper also chooses keys by the queries, and adds a bias to the scores of each
/// kept row, such that the rows have the mass of all; here the policy chooses, and rows have no
/// bias. The least squares have a ridge here. Where layers share rows, the queries of the layer
/// that stores them decide.
///
/// Cost, of a head with n rows of which K stay, and Q queries: 4 Q n head_dim operations, and at
/// most 68 Q K head_dim for the search. Memory: 4 Q head_dim bytes for each KV head from the repeat
/// to the cut; in it, for one head at a time, 4 Q K bytes, 5 vectors of K head_dim floats, and the
/// logits of a tile (2 MiB on hosts, or 16 rows of them).
ModifierInfo fit() {
  ModifierInfo info;
  info.name = "fit";
  info.paper = "Attention Matching, arXiv 2602.16284";
  info.effect = "kept values are fitted to the attention that the repeat pays to the whole context";
  info.needs_repeat = true;
  info.keeps_shape = true;
  info.apply_with<FitParameters>(
      [](PolicyChoice& choice, const FitParameters& p, const PolicySetup& setup) {
        if (setup.config.row_vectors() == 1) {
          throw Error(
              "fit has no meaning here: with latent attention a row has no value beside its key");
        }
        choice.make = [make = choice.make, p] { return std::make_unique<FittedPolicy>(make(), p); };
      });
  return info;
}

}  // namespace kvzap::policy
