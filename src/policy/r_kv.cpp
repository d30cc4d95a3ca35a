#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/host_threads.hpp"
#include "base/scratch.hpp"
#include "base/soft_cap.hpp"
#include "linalg/gemm.hpp"
#include "policy/registry.hpp"
#include "policy/row_math.hpp"
#include "policy/row_protection.hpp"
#include "policy/window_attention.hpp"

namespace kvzap::policy {
namespace {

using linalg::ConstMatrix;
using linalg::Matrix;

// peaks(token, r) = the largest logit that a query head of the group gives the row.
void group_peaks(const ExecutionSpace& exec, const Matrix& logits, int group, float cap,
                 const Matrix& peaks) {
  const auto rows = static_cast<std::int64_t>(peaks.extent(1));
  Kokkos::parallel_for(
      "kvzap::r_kv::peaks", RowRange(exec, 0, peaks.size()), KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t first = i / rows * group;
        const std::int64_t r = i % rows;
        float most = logits(first, r);
        for (int g = 1; g < group; ++g) {
          if (logits(first + g, r) > most) most = logits(first + g, r);
        }
        // The cap rises with the logit, so the largest one stays the largest.
        peaks(i / rows, r) = cap > 0 ? base::soft_capped(most, cap) : most;
      });
}

// importance(r) += weight * sum over tokens of factors(token) * exponentials(token, r); `begins`
// replaces the old value.
void add_importance(const ExecutionSpace& exec, const Matrix& exponentials,
                    const RowVector& factors, float weight, bool begins,
                    const RowVector& importance) {
  const auto tokens = static_cast<std::int64_t>(exponentials.extent(0));
  Kokkos::parallel_for(
      "kvzap::r_kv::importance", RowRange(exec, 0, exponentials.extent(1)),
      KOKKOS_LAMBDA(std::int64_t r) {
        float sum = 0;
        for (std::int64_t t = 0; t < tokens; ++t) sum += factors(t) * exponentials(t, r);
        importance(r) = weight * sum + (begins ? 0.0f : importance(r));
      });
}

// Rows whose similar rows are searched at the same time, and columns of a product with them.
constexpr std::int64_t searched_rows = 256;
constexpr std::int64_t least_columns = 64;
constexpr std::int64_t most_columns = 1024;
// Cosines are added up as multiples of 2^-40, so that the order does not change the sum.
constexpr double cosine_units = 1099511627776.0;

// units(r, :) = keys(r, :) / its norm
void unit_keys(const ExecutionSpace& exec, const PolicyLayer::RowsView& keys,
               const RowVector& inverse, const Matrix& units) {
  const auto dim = static_cast<std::int64_t>(keys.extent(1));
  Kokkos::parallel_for(
      "kvzap::r_kv::units", RowRange(exec, 0, keys.size()), KOKKOS_LAMBDA(std::int64_t i) {
        units(i / dim, i % dim) = keys(i / dim, i % dim) * inverse(i / dim);
      });
}

/// A search for the newest rows that are similar to each row of a block.
struct SimilarRows {
  Matrix cosines;      // (row of the block, column)
  std::int64_t begin;  // first row of the block
  std::int64_t first;  // row of the first column
  std::int64_t retained;
  float threshold;
  Kokkos::View<std::int64_t*, MemorySpace> found;  // (row of the block): number of rows found
  Kokkos::View<std::int64_t*, MemorySpace> sums;   // (row): cosines that do not count
  Kokkos::View<std::int64_t*, MemorySpace> rows;   // (row of the block, retained)
  RowVector values;                                // (row of the block, retained)

  KOKKOS_INLINE_FUNCTION void search(std::int64_t i) const {
    for (std::int64_t c = cosines.extent(1) - 1; c >= 0 && found(i) < retained; --c) {
      if (first + c == begin + i || !(cosines(i, c) > threshold)) continue;
      rows(i * retained + found(i)) = first + c;
      values(i * retained + found(i)++) = cosines(i, c);
    }
  }
};

// Searches the columns for all rows of the block. Returns the number of rows that have not found
// all. Waits for the instance.
std::int64_t search_block(const ExecutionSpace& exec, const SimilarRows& similar) {
  const auto count = static_cast<std::int64_t>(similar.cosines.extent(0));
  if (base::machine().on_host()) {
    base::host_for("kvzap::r_kv::search", count, similar.cosines.extent(1),
                   [=](std::int64_t i) { similar.search(i); });
  } else {
    Kokkos::parallel_for(
        "kvzap::r_kv::search", RowRange(exec, 0, count),
        KOKKOS_LAMBDA(std::int64_t i) { similar.search(i); });
  }
  std::int64_t missing = 0;
  Kokkos::parallel_reduce(
      "kvzap::r_kv::missing", RowRange(exec, 0, count),
      KOKKOS_LAMBDA(std::int64_t i, std::int64_t & sum) {
        sum += similar.found(i) < similar.retained ? 1 : 0;
      },
      missing);
  return missing;
}

void add_retained(const ExecutionSpace& exec, const SimilarRows& similar) {
  const auto count = static_cast<std::int64_t>(similar.cosines.extent(0));
  Kokkos::parallel_for(
      "kvzap::r_kv::retain", RowRange(exec, 0, count * similar.retained),
      KOKKOS_LAMBDA(std::int64_t i) {
        if (i % similar.retained >= similar.found(i / similar.retained)) return;
        Kokkos::atomic_add(&similar.sums(similar.rows(i)),
                           static_cast<std::int64_t>(similar.values(i) * cosine_units));
      });
}

// similarity(j) = mean over all rows of the cosine with row j that counts.
void mean_similarity(const ExecutionSpace& exec, const ConstMatrix& units,
                     const ColumnSums::Sums& directions,
                     const Kokkos::View<std::int64_t*, MemorySpace>& retained,
                     const RowVector& similarity) {
  const auto rows = static_cast<std::int64_t>(units.extent(0));
  const auto dim = static_cast<std::int64_t>(units.extent(1));
  Kokkos::parallel_for(
      "kvzap::r_kv::similarity", RowRange(exec, 0, rows), KOKKOS_LAMBDA(std::int64_t j) {
        double all = 0;
        double own = 0;
        for (std::int64_t d = 0; d < dim; ++d) {
          const double x = units(j, d);
          all += x * directions(d);
          own += x * x;
        }
        all -= own + static_cast<double>(retained(j)) / cosine_units;
        similarity(j) = static_cast<float>(all / static_cast<double>(rows));
      });
}

// The largest importance near row r.
KOKKOS_INLINE_FUNCTION float pooled(const RowVector& importance, std::int64_t r, std::int64_t rows,
                                    std::int64_t reach) {
  const std::int64_t begin = r < reach ? 0 : r - reach;
  const std::int64_t end = r + reach < rows ? r + reach + 1 : rows;
  float most = importance(begin);
  for (std::int64_t i = begin + 1; i < end; ++i) {
    if (importance(i) > most) most = importance(i);
  }
  return most;
}

// scores(r) = lambda * the largest importance near r - (1 - lambda) * redundancy(r)
void join_scores(const ExecutionSpace& exec, const RowVector& importance,
                 const RowVector& exponentials, const RowVector& factor, std::int64_t reach,
                 float lambda, const HeadScores& scores) {
  const auto rows = static_cast<std::int64_t>(scores.extent(0));
  Kokkos::parallel_for(
      "kvzap::r_kv::scores", RowRange(exec, 0, rows), KOKKOS_LAMBDA(std::int64_t r) {
        const std::int64_t begin = r < reach ? 0 : r - reach;
        const std::int64_t end = r + reach < rows ? r + reach + 1 : rows;
        float most = importance(begin);
        for (std::int64_t i = begin + 1; i < end; ++i) {
          if (importance(i) > most) most = importance(i);
        }
        scores(r) = lambda * most - (1 - lambda) * factor(0) * exponentials(r);
      });
}

void pool(const ExecutionSpace& exec, const RowVector& importance, std::int64_t reach,
          const RowVector& scores) {
  const auto rows = static_cast<std::int64_t>(scores.extent(0));
  Kokkos::parallel_for(
      "kvzap::r_kv::pool", RowRange(exec, 0, rows),
      KOKKOS_LAMBDA(std::int64_t r) { scores(r) = pooled(importance, r, rows, reach); });
}

/// Returns the fewest rows whose importance is at least `mass` of the sum, in the order of their
/// positions; of equal rows the older ones.
std::vector<std::int64_t> most_important(const std::vector<float>& importance, double mass) {
  std::vector<std::int64_t> rows(importance.size());
  std::iota(rows.begin(), rows.end(), std::int64_t{0});
  const auto rank = [&](std::int64_t r) {  // a NaN keeps its row
    return std::isnan(importance[r]) ? std::numeric_limits<float>::infinity() : importance[r];
  };
  std::stable_sort(rows.begin(), rows.end(),
                   [&](std::int64_t a, std::int64_t b) { return rank(a) > rank(b); });
  const double all = std::accumulate(importance.begin(), importance.end(), 0.0);
  double sum = 0;
  std::size_t count = 0;
  while (count < rows.size() && !(sum >= mass * all && count > 0)) sum += importance[rows[count++]];
  rows.resize(count);
  std::sort(rows.begin(), rows.end());
  return rows;
}

// means(r) = mean over the rows of the cosine with row r, which counts 0 for itself
void mean_cosines(const ExecutionSpace& exec, const ConstMatrix& units,
                  const ColumnSums::Sums& directions, const RowVector& means) {
  const auto rows = static_cast<std::int64_t>(units.extent(0));
  const auto dim = static_cast<std::int64_t>(units.extent(1));
  Kokkos::parallel_for(
      "kvzap::r_kv::means", RowRange(exec, 0, rows), KOKKOS_LAMBDA(std::int64_t r) {
        double sum = 0;
        for (std::int64_t d = 0; d < dim; ++d) {
          const double x = units(r, d);
          sum += x * (directions(d) - x);
        }
        means(r) = static_cast<float>(sum / static_cast<double>(rows));
      });
}

// likeness(begin + i) += factor * sum of the cosines(i, :) that are at least the row's mean;
// `begins` replaces the old value.
void add_likeness(const ExecutionSpace& exec, const Matrix& cosines, std::int64_t begin,
                  const RowVector& means, float factor, bool begins, const RowVector& likeness) {
  const auto columns = static_cast<std::int64_t>(cosines.extent(1));
  Kokkos::parallel_for(
      "kvzap::r_kv::likeness", RowRange(exec, 0, cosines.extent(0)), KOKKOS_LAMBDA(std::int64_t i) {
        float sum = 0;
        for (std::int64_t c = 0; c < columns; ++c) {
          sum += cosines(i, c) < means(begin + i) ? 0 : cosines(i, c);
        }
        likeness(begin + i) = factor * sum + (begins ? 0.0f : likeness(begin + i));
      });
}

// to(i, :) = from(rows(i), :)
void copy_rows(const ExecutionSpace& exec, const Matrix& from,
               const Kokkos::View<std::int64_t*, MemorySpace>& rows, const Matrix& to) {
  const auto dim = static_cast<std::int64_t>(to.extent(1));
  Kokkos::parallel_for(
      "kvzap::r_kv::gather", RowRange(exec, 0, to.size()),
      KOKKOS_LAMBDA(std::int64_t i) { to(i / dim, i % dim) = from(rows(i / dim), i % dim); });
}

// The first `count` of `rows` have their importance, others less by likeness.
void rank_by_likeness(const ExecutionSpace& exec, const RowVector& likeness,
                      const Kokkos::View<std::int64_t*, MemorySpace>& rows, std::int64_t count,
                      const RowVector& importance, const HeadScores& scores) {
  Kokkos::parallel_for(
      "kvzap::r_kv::diversity", RowRange(exec, 0, scores.extent(0)),
      KOKKOS_LAMBDA(std::int64_t r) { scores(r) = -2 - likeness(r); });
  Kokkos::parallel_for(
      "kvzap::r_kv::important", RowRange(exec, 0, count),
      KOKKOS_LAMBDA(std::int64_t i) { scores(rows(i)) = importance(rows(i)); });
}

struct RKvParameters : PolicyParameters {
  std::int64_t window = integer("window", 8, {1, 256}, "newest tokens whose queries count");
  std::int64_t kernel = integer("kernel", 7, {1, 1 << 20}, "number of rows that are pooled; odd");
  double lambda = number("lambda", 0.1, {0, 1}, "weight of importance against redundancy");
  double similarity = number("similarity", 0.5, {-1, 1}, "cosine above which two keys are similar");
  std::int64_t retained =
      integer("retained", 1, {0, 64}, "newest similar rows that do not count as redundant");
  double mass = number("mass", 0, {0, 1},
                       "the fewest rows with this share of the attention stay first, the others by "
                       "diversity; 0: R-KV's own sum");
};

/// R-KV (Cai et al., arXiv 2505.24133): keeps rows that are important and not redundant, for long
/// answers that repeat themselves.
///
///   s(r) = lambda I(r) - (1 - lambda) R(r),  r a row before the newest `window` tokens
///   I(r) = max over k rows around r of mean_t softmax_r(max_g q_tg . k_r / sqrt(head_dim))
///   R(r) = softmax_r(1/n sum_i S(i, r)),  S(i, j) = cos(k_i, k_j), S(i, i) = 0
///
/// t are the newest `window` tokens, g the query heads of the group. The first softmax is over the
/// rows before the window, the second over all n rows. Of the rows j with S(i, j) > `similarity`,
/// the newest `retained` ones have S(i, j) = 0: one of similar rows stays. The window's own rows
/// have the layer's largest score + 1. The paper's buffer of generated tokens is the decode cadence
/// (Pruning::DecodeCuts; 128 in the paper).
///
/// With `mass` it is Adaptive R-KV (OpenVINO GenAI 2026, for blocks of tokens; here for rows). The
/// fewest rows E before the window whose I sum up to that share stay first, by I. The others
/// follow, those first that are least like E:
///
///   s(r) = -2 - mean over i in E of (S(r, i) if S(r, i) >= mean_j S(r, j), else 0)
///
/// Its cost is 2 n |E| head_dim operations, its memory a copy of E's keys.
///
/// Shapes: keys (n, head_dim) and queries (window, query heads, head_dim) of each head. Cost: 2
/// window n head_dim operations per query head. The sum of S takes O(n head_dim). The newest
/// similar rows are searched from the newest on: 2 n head_dim operations for each 64 columns at
/// first, at most 2 n^2 head_dim. Memory: a copy of a head's keys, a few numbers per row, 1 MiB of
/// cosines and at most 32 MiB of logits.
///
/// As in the authors' code, the mean over the window precedes the pooling, and the score of a row
/// counts the retained similarity of the others to it. If a row has no similar one, their code
/// drops its cosine with the first row; this policy drops none. Their default of lambda is 0.07,
/// the paper's 0.1. Sinks of the model (has_sinks) are ignored: a group has no common one. Latent
/// attention compares latents.
class RKv final : public Policy {
 public:
  explicit RKv(const RKvParameters& parameters) : m_parameters(parameters) {}

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
      const PolicyLayer::RowsView keys = layer.keys(h);
      find_importance(layer, h, window, keys, before);
      const PolicyLayer::RowsView compared = layer.extents().has_latents ? layer.values(h) : keys;
      find_units(layer.exec(), compared);
      if (m_parameters.mass > 0) {
        find_diversity(layer.exec(), before, compared.extent(1), scores_of(scores, h, 0, before));
        continue;
      }
      find_redundancy(layer.exec(), compared);
      join_scores(layer.exec(), m_scratch.importance, m_scratch.similarity, m_scratch.factors,
                  m_parameters.kernel / 2, static_cast<float>(m_parameters.lambda),
                  scores_of(scores, h, 0, before));
    }
    protect_rows(layer, scores, protected_rows);
    if (layer.layer() + 1 == layer.extents().layers) m_scratch = {};
  }

 private:
  void find_importance(PolicyLayer& layer, int head, const TokenBlock& window,
                       const PolicyLayer::RowsView& keys, std::int64_t rows) {
    const ExecutionSpace& exec = layer.exec();
    const int group = layer.extents().group;
    const std::int64_t dim = layer.extents().head_dim;
    const std::int64_t tokens =
        std::clamp<std::int64_t>(WindowAttention::most_stored / (group * rows), 1, window.count);
    Scratch& s = m_scratch;
    base::reserve_scratch(s.queries, tokens * group * dim, "kvzap::r_kv::queries");
    base::reserve_scratch(s.logits, tokens * group * rows, "kvzap::r_kv::logits");
    base::reserve_scratch(s.peaks, tokens * rows, "kvzap::r_kv::peaks");
    base::reserve_scratch(s.factors, tokens, "kvzap::r_kv::factors");
    base::reserve_scratch(s.importance, rows, "kvzap::r_kv::importance");
    const ConstMatrix before =
        Kokkos::subview(keys, std::make_pair(std::int64_t{0}, rows), Kokkos::ALL);
    for (std::int64_t first = 0; first < window.count; first += tokens) {
      const std::int64_t count = std::min(tokens, window.count - first);
      const Matrix queries(s.queries.data(), count * group, dim);
      const Matrix logits(s.logits.data(), count * group, rows);
      const Matrix peaks(s.peaks.data(), count, rows);
      pack_queries(exec,
                   Kokkos::subview(window.queries, std::make_pair(first, first + count),
                                   Kokkos::ALL, Kokkos::ALL),
                   head, group, 1.0f / std::sqrt(static_cast<float>(dim)), queries);
      linalg::multiply_nt(exec, 1, queries, before, 0, logits);
      group_peaks(exec, logits, group, layer.extents().soft_cap, peaks);
      soften(exec, peaks.data(), rows, count, s.factors);
      add_importance(exec, peaks, s.factors,
                     static_cast<float>(count) / static_cast<float>(window.count), first == 0,
                     s.importance);
    }
  }

  void find_units(const ExecutionSpace& exec, const PolicyLayer::RowsView& keys) {
    Scratch& s = m_scratch;
    base::reserve_scratch(s.inverse, keys.extent(0), "kvzap::r_kv::norms");
    base::reserve_scratch(s.units, keys.size(), "kvzap::r_kv::units");
    inverse_norms(exec, keys, s.inverse);
    unit_keys(exec, keys, s.inverse, Matrix(s.units.data(), keys.extent(0), keys.extent(1)));
  }

  // Scores the rows before the window by Adaptive R-KV. Waits for the instance.
  void find_diversity(const ExecutionSpace& exec, std::int64_t rows, std::int64_t dim,
                      const HeadScores& scores) {
    Scratch& s = m_scratch;
    base::reserve_scratch(s.pooled, rows, "kvzap::r_kv::pooled");
    base::reserve_scratch(s.similarity, rows, "kvzap::r_kv::similarity");
    base::reserve_scratch(s.means, rows, "kvzap::r_kv::means");
    base::reserve_scratch(s.cosines, searched_rows * most_columns, "kvzap::r_kv::cosines");
    const RowVector importance(s.pooled.data(), rows);
    pool(exec, s.importance, m_parameters.kernel / 2, importance);
    std::vector<float> on_host(rows);
    Kokkos::deep_copy(exec, Kokkos::View<float*, Kokkos::HostSpace>(on_host.data(), rows),
                      importance);
    base::fence(exec, "kvzap::r_kv: the host chooses by importance");
    const std::vector<std::int64_t> kept = most_important(on_host, m_parameters.mass);
    const auto count = static_cast<std::int64_t>(kept.size());
    const Matrix units(s.units.data(), rows, dim);
    const Matrix kept_units = gather(exec, units, kept);
    mean_cosines(exec, units, s.columns(exec, units), s.means);
    for (std::int64_t begin = 0; begin < rows; begin += searched_rows) {
      const std::int64_t end = std::min(rows, begin + searched_rows);
      const ConstMatrix block = Kokkos::subview(units, std::make_pair(begin, end), Kokkos::ALL);
      for (std::int64_t first = 0; first < count; first += most_columns) {
        const std::int64_t last = std::min(count, first + most_columns);
        const Matrix cosines(s.cosines.data(), end - begin, last - first);
        linalg::multiply_nt(exec, 1, block,
                            Kokkos::subview(kept_units, std::make_pair(first, last), Kokkos::ALL),
                            0, cosines);
        add_likeness(exec, cosines, begin, s.means, 1.0f / static_cast<float>(count), first == 0,
                     s.similarity);
      }
    }
    set_scores(exec, kept, importance, scores);
  }

  // The rows `kept` of `units`, one after the other.
  Matrix gather(const ExecutionSpace& exec, const Matrix& units,
                const std::vector<std::int64_t>& kept) {
    Scratch& s = m_scratch;
    const auto count = static_cast<std::int64_t>(kept.size());
    const auto dim = static_cast<std::int64_t>(units.extent(1));
    base::reserve_scratch(s.rows, count, "kvzap::r_kv::rows");
    base::reserve_scratch(s.kept, count * dim, "kvzap::r_kv::kept");
    Kokkos::deep_copy(exec, Kokkos::View<std::int64_t*, MemorySpace>(s.rows.data(), count),
                      Kokkos::View<const std::int64_t*, Kokkos::HostSpace>(kept.data(), count));
    const Matrix to(s.kept.data(), count, dim);
    copy_rows(exec, units, s.rows, to);
    return to;
  }

  // Rows of `kept`, which m_scratch.rows holds, have their importance, others less by likeness.
  void set_scores(const ExecutionSpace& exec, const std::vector<std::int64_t>& kept,
                  const RowVector& importance, const HeadScores& scores) {
    rank_by_likeness(exec, m_scratch.similarity, m_scratch.rows,
                     static_cast<std::int64_t>(kept.size()), importance, scores);
    base::fence(exec, "kvzap::r_kv: the host's list of rows ends");
  }

  // Sets `similarity` to the exponentials of the rows' mean similarities, and factors(0) to the
  // factor that makes them redundancies.
  void find_redundancy(const ExecutionSpace& exec, const PolicyLayer::RowsView& keys) {
    const auto rows = static_cast<std::int64_t>(keys.extent(0));
    Scratch& s = m_scratch;
    base::reserve_scratch(s.sums, rows, "kvzap::r_kv::sums");
    base::reserve_scratch(s.similarity, rows, "kvzap::r_kv::similarity");
    const Matrix units(s.units.data(), rows, keys.extent(1));
    Kokkos::deep_copy(exec, s.sums, 0);
    for (std::int64_t begin = 0; begin < rows && m_parameters.retained > 0;
         begin += searched_rows) {
      retain_newest(exec, units, begin, std::min(searched_rows, rows - begin));
    }
    mean_similarity(exec, units, s.columns(exec, units), s.sums, s.similarity);
    soften(exec, s.similarity.data(), rows, 1, s.factors);
  }

  // Adds the cosines of each row of a block with the newest rows similar to it to their sums.
  void retain_newest(const ExecutionSpace& exec, const Matrix& units, std::int64_t begin,
                     std::int64_t count) {
    const std::int64_t retained = m_parameters.retained;
    Scratch& s = m_scratch;
    base::reserve_scratch(s.cosines, searched_rows * most_columns, "kvzap::r_kv::cosines");
    base::reserve_scratch(s.found, searched_rows, "kvzap::r_kv::found");
    base::reserve_scratch(s.rows, searched_rows * retained, "kvzap::r_kv::rows");
    base::reserve_scratch(s.values, searched_rows * retained, "kvzap::r_kv::values");
    SimilarRows similar{
        {},      begin,  0,      retained, static_cast<float>(m_parameters.similarity),
        s.found, s.sums, s.rows, s.values};
    Kokkos::deep_copy(exec, s.found, 0);
    const ConstMatrix block =
        Kokkos::subview(units, std::make_pair(begin, begin + count), Kokkos::ALL);
    std::int64_t end = units.extent(0);
    // Similar rows are often near the end, so the first products are small.
    for (std::int64_t columns = least_columns; end > 0;
         columns = std::min(2 * columns, most_columns)) {
      similar.first = std::max<std::int64_t>(0, end - columns);
      similar.cosines = Matrix(s.cosines.data(), count, end - similar.first);
      linalg::multiply_nt(exec, 1, block,
                          Kokkos::subview(units, std::make_pair(similar.first, end), Kokkos::ALL),
                          0, similar.cosines);
      if (search_block(exec, similar) == 0) break;
      end = similar.first;
    }
    add_retained(exec, similar);
  }

  struct Scratch {
    RowVector queries;                              // (query, head_dim), scaled
    RowVector logits;                               // (query, row)
    RowVector peaks;                                // (token, row)
    RowVector factors;                              // (token)
    RowVector importance;                           // (row)
    RowVector inverse;                              // (row)
    RowVector units;                                // (row, head_dim)
    RowVector cosines;                              // (row of a block, column)
    RowVector values;                               // (row of a block, retained)
    RowVector similarity;                           // (row)
    RowVector pooled;                               // (row)
    RowVector means;                                // (row)
    RowVector kept;                                 // (row that stays for its importance, head_dim)
    Kokkos::View<std::int64_t*, MemorySpace> sums;  // (row)
    Kokkos::View<std::int64_t*, MemorySpace> found;  // (row of a block)
    Kokkos::View<std::int64_t*, MemorySpace> rows;   // (row of a block, retained)
    ColumnSums columns;
  };

  RKvParameters m_parameters;
  Scratch m_scratch;
};

}  // namespace

PolicyInfo r_kv() {
  PolicyInfo info;
  info.name = "r-kv";
  info.paper = "R-KV, arXiv 2505.24133";
  info.formula =
      "lambda importance - (1 - lambda) redundancy: attention of the newest queries, "
      "and mean similarity of keys; with mass: importance, then dissimilarity to such rows";
  info.needs = "queries of the newest w tokens, keys";
  info.cost = "time O(w d rows) per query head, at most O(d rows^2) per KV head; memory O(d rows)";
  info.make_with<RKvParameters>([](const RKvParameters& p, const PolicySetup&) -> PolicyMaker {
    if (p.kernel % 2 == 0) {
      throw Error(
          fmt::format("kernel={}: the rows pooled around a row are an odd number", p.kernel));
    }
    return [p] { return std::make_unique<RKv>(p); };
  });
  return info;
}

}  // namespace kvzap::policy
