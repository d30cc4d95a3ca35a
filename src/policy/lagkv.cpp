#include <limits>

#include "base/scratch.hpp"
#include "policy/registry.hpp"
#include "policy/row_math.hpp"

namespace kvzap::policy {
namespace {

using Floats = Kokkos::View<float*, MemorySpace>;
using LagRows = PolicyLayer::RowsView;

/// Partitions of `lag` rows each, after the sink.
struct Partitions {
  std::int64_t sink = 0;
  std::int64_t lag = 1;
  std::int64_t count = 0;
};

// Sets ranges (partition, 2, dim) to the smallest and the largest value of each of the first `dim`
// dimensions in partitions 1 … count - 1.
void value_ranges(const ExecutionSpace& exec, const LagRows& rows, std::int64_t dim,
                  const Partitions& p, const Floats& ranges) {
  const float infinity = std::numeric_limits<float>::infinity();
  const std::int64_t items = (dim + columns_per_item - 1) / columns_per_item;
  Kokkos::parallel_for(
      "kvzap::policy::lagkv_ranges", PolicyRange(exec, 0, (p.count - 1) * items),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t partition = i / items + 1;
        const std::int64_t first = i % items * columns_per_item;
        const std::int64_t width = dim - first < columns_per_item ? dim - first : columns_per_item;
        const std::int64_t begin = p.sink + partition * p.lag;
        float* const least = &ranges(partition * 2 * dim + first);
        float* const largest = least + dim;
        for (std::int64_t d = 0; d < width; ++d) least[d] = largest[d] = rows(begin, first + d);
        for (std::int64_t r = begin + 1; r < begin + p.lag; ++r) {
          const float* const row = &rows(r, first);
          for (std::int64_t d = 0; d < width; ++d) {
            least[d] = row[d] < least[d] ? row[d] : least[d];
            largest[d] = row[d] > largest[d] ? row[d] : largest[d];
          }
        }
        for (std::int64_t d = 0; d < width; ++d) {
          const float range = largest[d] - least[d];
          largest[d] = range == 0 ? infinity : range;
        }
      });
}

// Sets deviations(row after the sink) to the standard deviation, as of a sample, over the first
// `dim` dimensions of a row, each scaled by the next partition's range.
void deviations(const ExecutionSpace& exec, const LagRows& rows, std::int64_t dim,
                const Partitions& p, const Floats& ranges, const Floats& result) {
  constexpr int lanes = 8;
  Kokkos::parallel_for(
      "kvzap::policy::lagkv_deviations", PolicyRange(exec, 0, (p.count - 1) * p.lag),
      KOKKOS_LAMBDA(std::int64_t i) {
        const float* const row = &rows(p.sink + i, 0);
        const float* const least = &ranges((i / p.lag + 1) * 2 * dim);
        const float* const range = least + dim;
        double sums[lanes], squares[lanes];
        for (int lane = 0; lane < lanes; ++lane) sums[lane] = squares[lane] = 0;
        std::int64_t d = 0;
        for (; d + lanes <= dim; d += lanes) {
          for (int lane = 0; lane < lanes; ++lane) {
            const double x = (row[d + lane] - least[d + lane]) / range[d + lane];
            sums[lane] += x;
            squares[lane] += x * x;
          }
        }
        for (; d < dim; ++d) {
          const double x = (row[d] - least[d]) / range[d];
          sums[0] += x;
          squares[0] += x * x;
        }
        double sum = 0, square = 0;
        for (int lane = 0; lane < lanes; ++lane) {
          sum += sums[lane];
          square += squares[lane];
        }
        const double variance = dim > 1 ? (square - sum * sum / dim) / (dim - 1) : 0.0;
        // Rounding may make it negative; NaN stays NaN.
        result(i) = static_cast<float>(base::math::sqrt(variance < 0 ? 0.0 : variance));
      });
}

// scores += softmax of a partition's deviations / 2
void add_softmax(const ExecutionSpace& exec, const Partitions& p, const Floats& x, int head,
                 const Policy::ScoreView& scores) {
  Kokkos::parallel_for(
      "kvzap::policy::lagkv_softmax", PolicyRange(exec, 0, p.count - 1),
      KOKKOS_LAMBDA(std::int64_t partition) {
        const std::int64_t begin = partition * p.lag;
        float largest = x(begin);
        for (std::int64_t i = begin + 1; i < begin + p.lag; ++i) {
          if (x(i) > largest) largest = x(i);
        }
        double sum = 0;
        for (std::int64_t i = begin; i < begin + p.lag; ++i) {
          sum += base::math::exp(x(i) - largest);
        }
        for (std::int64_t i = begin; i < begin + p.lag; ++i) {
          scores(head, p.sink + i) +=
              0.5f * static_cast<float>(base::math::exp(x(i) - largest) / sum);
        }
      });
}

// Sets scores to the rank of each score in its partition, divided by the size of a partition. Ranks
// ascend; equal scores are ordered by position.
void rank_in_partitions(const ExecutionSpace& exec, const Partitions& p, const Floats& copy,
                        int head, const Policy::ScoreView& scores) {
  const std::int64_t rows = (p.count - 1) * p.lag;
  Kokkos::parallel_for(
      "kvzap::policy::lagkv_copy", PolicyRange(exec, 0, rows),
      KOKKOS_LAMBDA(std::int64_t i) { copy(i) = scores(head, p.sink + i); });
  Kokkos::parallel_for(
      "kvzap::policy::lagkv_ranks", PolicyRange(exec, 0, rows), KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t begin = i / p.lag * p.lag;
        const float x = copy(i);
        int below = 0;
        for (std::int64_t j = begin; j < i; ++j) below += copy(j) <= x;
        for (std::int64_t j = i + 1; j < begin + p.lag; ++j) below += copy(j) < x;
        scores(head, p.sink + i) = static_cast<float>(below) / static_cast<float>(p.lag);
      });
}

// 0 in the partitions that are judged, 1 elsewhere.
void fill_ends(const ExecutionSpace& exec, const Partitions& p, std::int64_t rows, int head,
               const Policy::ScoreView& scores) {
  const std::int64_t end = p.sink + (p.count - 1) * p.lag;
  Kokkos::parallel_for(
      "kvzap::policy::lagkv_ends", PolicyRange(exec, 0, rows),
      KOKKOS_LAMBDA(std::int64_t r) { scores(head, r) = r >= p.sink && r < end ? 0.0f : 1.0f; });
}

// With too few rows to judge, scores are 1 in the sink and then rise from 0, so that the newest
// stay.
void fill_short(const ExecutionSpace& exec, std::int64_t sink, std::int64_t rows, int head,
                const Policy::ScoreView& scores) {
  Kokkos::parallel_for(
      "kvzap::policy::lagkv_short", PolicyRange(exec, 0, rows), KOKKOS_LAMBDA(std::int64_t r) {
        scores(head, r) =
            r < sink ? 1.0f : static_cast<float>(r - sink) / static_cast<float>(rows - sink);
      });
}

/// Scores the deviation of a row's key and value, on the scale of the following partition of rows
/// (Liang et al.: "LagKV", arXiv 2504.04704). Rows after the first `sink` ones form partitions of
/// `lag` rows. A dimension x of a row is scaled to (x - min) / (max - min), with the smallest and
/// largest value of the next partition in this dimension. The standard deviation over dimensions
/// passes through a softmax over the partition's rows. The score of a row is the mean of its
/// results for keys and values.
///
/// With cross-scoring off, the rank of the score in its partition, divided by lag, replaces it, so
/// that each partition loses the same number of rows. The sink, the last partition and the rows
/// after it have the score 1. If there are fewer than two partitions, the newest rows stay (rising
/// scores).
///
/// Two passes over keys and values, (rows, head_dim) of each head, and lag comparisons per row; a
/// float per row and 2 * head_dim per partition.
///
/// Cross-scoring is an addition of kvpress. The order of equal scores is undefined there; here it
/// is by position.
class LagKv final : public Policy {
 public:
  struct Parameters : PolicyParameters {
    std::int64_t sink = integer("sink", 4, {0, 1e9}, "first tokens that stay");
    std::int64_t lag = integer("lag", 128, {1, 1e9}, "tokens of a partition");
    bool cross_scoring = flag("cross-scoring", false, "partitions compete with one another");
  };

  explicit LagKv(const Parameters& parameters)
      : m_sink(parameters.sink), m_lag(parameters.lag), m_cross_scoring(parameters.cross_scoring) {}

  void score(PolicyLayer& layer, const ScoreView& scores) override {
    const ExecutionSpace& exec = layer.exec();
    for (int h = 0; h < layer.heads(); ++h) {
      const std::int64_t rows = layer.rows(h);
      if (rows < m_sink + 2 * m_lag) {
        fill_short(exec, m_sink, rows, h, scores);
        continue;
      }
      const Partitions p = {m_sink, m_lag, (rows - m_sink) / m_lag};
      base::reserve_scratch(m_ranges, p.count * 2 * layer.extents().head_dim,
                            "kvzap::policy::lagkv_ranges");
      base::reserve_scratch(m_rows, (p.count - 1) * p.lag, "kvzap::policy::lagkv_rows");
      fill_ends(exec, p, rows, h, scores);
      const PolicyLayer::Extents& extents = layer.extents();
      add(exec, layer.keys(h), extents.head_dim, p, h, scores);
      add(exec, layer.values(h), extents.value_dim, p, h, scores);
      if (!m_cross_scoring) rank_in_partitions(exec, p, m_rows, h, scores);
    }
  }

 private:
  void add(const ExecutionSpace& exec, const LagRows& rows, std::int64_t dim, const Partitions& p,
           int head, const ScoreView& scores) {
    value_ranges(exec, rows, dim, p, m_ranges);
    deviations(exec, rows, dim, p, m_ranges, m_rows);
    add_softmax(exec, p, m_rows, head, scores);
  }

  std::int64_t m_sink;
  std::int64_t m_lag;
  bool m_cross_scoring;
  Floats m_ranges;
  Floats m_rows;
};

}  // namespace

PolicyInfo lagkv() {
  PolicyInfo info;
  info.name = "lagkv";
  info.paper = "LagKV, arXiv 2504.04704";
  info.formula = "rank of softmax(std((x - min) / (max - min))), range of the next partition";
  info.needs = "keys, values";
  info.cost = "O(rows * (head_dim + lag)), a float per row";
  info.scores_parts = true;
  info.make_class<LagKv>();
  return info;
}

}  // namespace kvzap::policy
