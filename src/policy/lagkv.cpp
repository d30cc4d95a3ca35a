#include "base/host_threads.hpp"
#include "base/scratch.hpp"
#include "base/simd.hpp"
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

// Sets least and inverse (dim) to the smallest value of each dimension in `count` rows, and to 1 /
// (largest - smallest), or 0 without a range.
KVZAP_BODY void find_ranges_body(const float* rows, std::int64_t stride, std::int64_t dim,
                                 std::int64_t count, float* least, float* inverse) {
  float* const largest = inverse;
  for (std::int64_t d = 0; d < dim; ++d) least[d] = largest[d] = rows[d];
  for (std::int64_t r = 1; r < count; ++r) {
    const float* const row = rows + r * stride;
#pragma omp simd
    for (std::int64_t d = 0; d < dim; ++d) {
      least[d] = row[d] < least[d] ? row[d] : least[d];
      largest[d] = row[d] > largest[d] ? row[d] : largest[d];
    }
  }
#pragma omp simd
  for (std::int64_t d = 0; d < dim; ++d) {
    const float range = largest[d] - least[d];
    inverse[d] = range == 0 ? 0.0f : 1.0f / range;
  }
}
KVZAP_KERNEL(void, find_ranges,
             (const float* rows, std::int64_t stride, std::int64_t dim, std::int64_t count,
              float* least, float* inverse),
             (rows, stride, dim, count, least, inverse))

// result[r] = the standard deviation, as of a sample, of (rows[r] - least) * inverse.
KVZAP_BODY void deviations_of_rows_body(const float* rows, std::int64_t stride, std::int64_t dim,
                                        std::int64_t count, const float* ranges, float* result) {
  const float* const least = ranges;
  const float* const inverse = ranges + dim;
  for (std::int64_t r = 0; r < count; ++r) {
    const float* const row = rows + r * stride;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t d = 0; d < dim; ++d) sum += (row[d] - least[d]) * inverse[d];
    const float mean = sum / static_cast<float>(dim);
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (std::int64_t d = 0; d < dim; ++d) {
      const float x = (row[d] - least[d]) * inverse[d] - mean;
      squares += x * x;
    }
    result[r] = dim > 1 ? __builtin_sqrtf(squares / static_cast<float>(dim - 1)) : 0.0f;
  }
}
KVZAP_KERNEL(void, deviations_of_rows,
             (const float* rows, std::int64_t stride, std::int64_t dim, std::int64_t count,
              const float* ranges, float* result),
             (rows, stride, dim, count, ranges, result))

// ranks[i] = number of scores below scores[i], equal ones before it included.
KVZAP_BODY void rank_scores_body(const float* scores, std::int64_t count, float* ranks) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float x = scores[i];
    int below = 0;
#pragma omp simd reduction(+ : below)
    for (std::int64_t j = 0; j < i; ++j) below += scores[j] <= x ? 1 : 0;
#pragma omp simd reduction(+ : below)
    for (std::int64_t j = i + 1; j < count; ++j) below += scores[j] < x ? 1 : 0;
    ranks[i] = static_cast<float>(below);
  }
}
KVZAP_KERNEL(void, rank_scores, (const float* scores, std::int64_t count, float* ranks),
             (scores, count, ranks))

// Sets ranges (partition, 2, dim) to the smallest value of each of the first `dim` dimensions in
// partitions 1 … count - 1, and to 1 / (largest - smallest), or 0 without a range.
void value_ranges(const ExecutionSpace& exec, const LagRows& rows, std::int64_t dim,
                  const Partitions& p, const Floats& ranges) {
  if (base::machine().on_host()) {
    base::host_for("kvzap::policy::lagkv_ranges", p.count - 1, p.lag * dim, [=](std::int64_t i) {
      float* const least = &ranges((i + 1) * 2 * dim);
      find_ranges(&rows(p.sink + (i + 1) * p.lag, 0), static_cast<std::int64_t>(rows.stride(0)),
                  dim, p.lag, least, least + dim);
    });
    return;
  }
  Kokkos::parallel_for(
      "kvzap::policy::lagkv_ranges", PolicyRange(exec, 0, (p.count - 1) * dim),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t partition = i / dim + 1;
        const std::int64_t d = i % dim;
        const std::int64_t begin = p.sink + partition * p.lag;
        float least = rows(begin, d);
        float largest = least;
        for (std::int64_t r = begin + 1; r < begin + p.lag; ++r) {
          least = rows(r, d) < least ? rows(r, d) : least;
          largest = rows(r, d) > largest ? rows(r, d) : largest;
        }
        ranges(partition * 2 * dim + d) = least;
        ranges((partition * 2 + 1) * dim + d) = largest == least ? 0.0f : 1 / (largest - least);
      });
}

// Sets deviations(row after the sink) to the standard deviation, as of a sample, over the first
// `dim` dimensions of a row, each scaled by the next partition's range.
void deviations(const ExecutionSpace& exec, const LagRows& rows, std::int64_t dim,
                const Partitions& p, const Floats& ranges, const Floats& result) {
  if (base::machine().on_host()) {
    base::host_for("kvzap::policy::lagkv_deviations", p.count - 1, p.lag * dim,
                   [=](std::int64_t i) {
                     deviations_of_rows(&rows(p.sink + i * p.lag, 0),
                                        static_cast<std::int64_t>(rows.stride(0)), dim, p.lag,
                                        &ranges((i + 1) * 2 * dim), &result(i * p.lag));
                   });
    return;
  }
  Kokkos::parallel_for(
      "kvzap::policy::lagkv_deviations", PolicyRange(exec, 0, (p.count - 1) * p.lag),
      KOKKOS_LAMBDA(std::int64_t i) {
        const float* const row = &rows(p.sink + i, 0);
        const float* const least = &ranges((i / p.lag + 1) * 2 * dim);
        const float* const inverse = least + dim;
        float sum = 0;
        for (std::int64_t d = 0; d < dim; ++d) sum += (row[d] - least[d]) * inverse[d];
        const float mean = sum / static_cast<float>(dim);
        float squares = 0;
        for (std::int64_t d = 0; d < dim; ++d) {
          const float x = (row[d] - least[d]) * inverse[d] - mean;
          squares += x * x;
        }
        result(i) = dim > 1 ? base::math::sqrt(squares / static_cast<float>(dim - 1)) : 0.0f;
      });
}

// scores += exponentials * by * the factor of their partition
void add_softmax(const ExecutionSpace& exec, const Partitions& p, const Floats& exponentials,
                 const Floats& factors, float by, int head, const Policy::ScoreView& scores) {
  Kokkos::parallel_for(
      "kvzap::policy::lagkv_softmax", PolicyRange(exec, 0, (p.count - 1) * p.lag),
      KOKKOS_LAMBDA(std::int64_t i) {
        scores(head, p.sink + i) += by * factors(i / p.lag) * exponentials(i);
      });
}

// Sets scores to the rank of each score in its partition, divided by the size of a partition. Ranks
// ascend; equal scores are ordered by position. copy and ranks hold (count - 1) * lag values.
void rank_in_partitions(const ExecutionSpace& exec, const Partitions& p, const Floats& copy,
                        const Floats& ranks, int head, const Policy::ScoreView& scores) {
  const std::int64_t rows = (p.count - 1) * p.lag;
  Kokkos::parallel_for(
      "kvzap::policy::lagkv_copy", PolicyRange(exec, 0, rows),
      KOKKOS_LAMBDA(std::int64_t i) { copy(i) = scores(head, p.sink + i); });
  if (base::machine().on_host()) {
    base::host_for("kvzap::policy::lagkv_ranks", p.count - 1, p.lag * p.lag, [=](std::int64_t i) {
      rank_scores(&copy(i * p.lag), p.lag, &ranks(i * p.lag));
    });
  } else {
    Kokkos::parallel_for(
        "kvzap::policy::lagkv_ranks", PolicyRange(exec, 0, rows), KOKKOS_LAMBDA(std::int64_t i) {
          const std::int64_t begin = i / p.lag * p.lag;
          const float x = copy(i);
          int below = 0;
          for (std::int64_t j = begin; j < i; ++j) below += copy(j) <= x;
          for (std::int64_t j = i + 1; j < begin + p.lag; ++j) below += copy(j) < x;
          ranks(i) = static_cast<float>(below);
        });
  }
  Kokkos::parallel_for(
      "kvzap::policy::lagkv_rank_scores", PolicyRange(exec, 0, rows),
      KOKKOS_LAMBDA(std::int64_t i) {
        scores(head, p.sink + i) = ranks(i) / static_cast<float>(p.lag);
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
/// Two passes over keys and values, (rows, head_dim) of each head, and lag comparisons per row; two
/// floats per row and 2 * head_dim per partition.
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
      base::reserve_scratch(m_factors, p.count - 1, "kvzap::policy::lagkv_factors");
      fill_ends(exec, p, rows, h, scores);
      const PolicyLayer::Extents& extents = layer.extents();
      add(exec, layer.keys(h), extents.head_dim, p, h, scores);
      add(exec, layer.values(h), extents.value_dim, p, h, scores);
      if (!m_cross_scoring) {
        base::reserve_scratch(m_ranks, (p.count - 1) * p.lag, "kvzap::policy::lagkv_ranks");
        rank_in_partitions(exec, p, m_rows, m_ranks, h, scores);
      }
    }
  }

 private:
  void add(const ExecutionSpace& exec, const LagRows& rows, std::int64_t dim, const Partitions& p,
           int head, const ScoreView& scores) {
    value_ranges(exec, rows, dim, p, m_ranges);
    deviations(exec, rows, dim, p, m_ranges, m_rows);
    const std::int64_t partitions = p.count - 1;
    soften(exec, m_rows.data(), p.lag, partitions, m_factors);
    // The factors divide by the number of vectors; keys and values have half the weight each.
    add_softmax(exec, p, m_rows, m_factors, 0.5f * static_cast<float>(partitions), head, scores);
  }

  std::int64_t m_sink;
  std::int64_t m_lag;
  bool m_cross_scoring;
  Floats m_ranges;   // (partition, smallest value and inverse range, head_dim)
  Floats m_rows;     // (row of a partition)
  Floats m_factors;  // (partition)
  Floats m_ranks;    // (row of a partition)
};

}  // namespace

PolicyInfo lagkv() {
  PolicyInfo info;
  info.name = "lagkv";
  info.paper = "LagKV, arXiv 2504.04704";
  info.formula = "rank of softmax(std((x - min) / (max - min))), range of the next partition";
  info.needs = "keys, values";
  info.cost = "O(rows * (head_dim + lag)), two floats per row";
  info.scores_parts = true;
  info.make_class<LagKv>();
  return info;
}

}  // namespace kvzap::policy
