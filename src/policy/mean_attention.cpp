#include "policy/mean_attention.hpp"

#include <algorithm>
#include <cmath>

#include "base/kokkos_compat.hpp"
#include "policy/query_statistics.hpp"

namespace kvzap::policy {
namespace {

using Partial = Kokkos::View<double**, Kokkos::LayoutRight, MemorySpace>;

// Rows that one work item adds up.
constexpr std::int64_t summed_rows = 256;

// Sets partial(slice, :) to the sum over the slice's rows of keys (row, dim) before RoPE, where row
// r has position r.
//
// With dimensions (d, d + dim/2) as a complex number k_r and w the rotation of one position, this
// is the sum of k_r w^-r. Horner's rule needs no sine for each row, and doubles are exact enough.
void sum_turned_back(const ExecutionSpace& exec, const PolicyLayer::RowsView& keys,
                     const Kokkos::View<const float*, MemorySpace>& frequencies,
                     const Partial& partial) {
  const auto rows = static_cast<std::int64_t>(keys.extent(0));
  const auto pairs = static_cast<std::int64_t>(frequencies.extent(0));
  Kokkos::parallel_for(
      "kvzap::mean_attention::keys",
      RowRange(exec, 0, static_cast<std::int64_t>(partial.extent(0)) * pairs),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t slice = i / pairs;
        const std::int64_t d = i % pairs;
        const std::int64_t begin = slice * summed_rows;
        const std::int64_t end = begin + summed_rows < rows ? begin + summed_rows : rows;
        const auto angle = static_cast<double>(frequencies(d));
        const double cosine = base::math::cos(angle);
        const double sine = base::math::sin(angle);
        double x = 0;
        double y = 0;
        for (std::int64_t row = end - 1; row >= begin; --row) {
          const double turned = x * cosine + y * sine + static_cast<double>(keys(row, d));
          y = y * cosine - x * sine + static_cast<double>(keys(row, d + pairs));
          x = turned;
        }
        const double first = static_cast<double>(begin) * angle;
        const double a = base::math::cos(first);
        const double b = base::math::sin(first);
        partial(slice, d) = x * a + y * b;
        partial(slice, d + pairs) = y * a - x * b;
      });
}

// Returns the mean of the cumulative sum of attention from the last of `tokens` positions if all
// positions have this query and key. Both are (head_dim), before RoPE, which multiplies them by
// rope_scale.
double mean_cumulative_attention(const float* query, const double* key,
                                 const std::vector<double>& frequencies, double rope_scale,
                                 std::int64_t tokens) {
  const std::size_t pairs = frequencies.size();
  // The score of the key `distance` positions before is the sum over pairs of the real part of
  // query * conj(key) * turn^distance.
  std::vector<double> real(pairs), imaginary(pairs), cosines(pairs), sines(pairs);
  const double scale = rope_scale * rope_scale / std::sqrt(2.0 * static_cast<double>(pairs));
  for (std::size_t d = 0; d < pairs; ++d) {
    const double x = query[d];
    const double y = query[d + pairs];
    real[d] = scale * (x * key[d] + y * key[d + pairs]);
    imaginary[d] = scale * (y * key[d] - x * key[d + pairs]);
    cosines[d] = std::cos(frequencies[d]);
    sines[d] = std::sin(frequencies[d]);
  }
  std::vector<double> scores(static_cast<std::size_t>(tokens));
  for (double& score : scores) {
    double sum = 0;
    for (std::size_t d = 0; d < pairs; ++d) {
      sum += real[d];
      const double turned = real[d] * cosines[d] - imaginary[d] * sines[d];
      imaginary[d] = real[d] * sines[d] + imaginary[d] * cosines[d];
      real[d] = turned;
    }
    score = sum;
  }
  // The position `distance` before the last one is part of distance + 1 sums.
  const double largest = *std::max_element(scores.begin(), scores.end());
  double total = 0;
  double weighted = 0;
  for (std::size_t distance = 0; distance < scores.size(); ++distance) {
    const double weight = std::exp(scores[distance] - largest);
    total += weight;
    weighted += weight * static_cast<double>(distance + 1);
  }
  return weighted / (total * static_cast<double>(tokens));
}

}  // namespace

// Observes one text.
class MeanAttention::Watcher final : public Policy {
 public:
  explicit Watcher(MeanAttention& results) : m_results(results), m_queries(false, 0, 0) {}

  PolicyNeeds needs() const override {
    PolicyNeeds needs;
    needs.blocks = true;
    needs.frequencies = true;
    return needs;
  }
  void observe(PolicyLayer& layer, const TokenBlock& block) override {
    m_queries.observe(layer, block);
  }
  void score(PolicyLayer& layer, const ScoreView& scores) override;

 private:
  std::vector<double> mean_key(PolicyLayer& layer, int head);

  MeanAttention& m_results;
  QueryStatistics m_queries;
  Partial m_partial;
};

std::vector<double> MeanAttention::Watcher::mean_key(PolicyLayer& layer, int head) {
  const std::int64_t rows = layer.rows(head);
  const std::int64_t slices = (rows + summed_rows - 1) / summed_rows;
  const std::int64_t dim = layer.extents().head_dim;
  if (static_cast<std::int64_t>(m_partial.extent(0)) != slices) {
    m_partial = Partial("kvzap::mean_attention::partial", slices, dim);
  }
  sum_turned_back(layer.exec(), layer.keys(head), layer.inverse_frequencies(), m_partial);
  const auto sums = Kokkos::create_mirror_view(m_partial);
  Kokkos::deep_copy(layer.exec(), sums, m_partial);
  base::fence(layer.exec(), "kvzap::mean_attention: the host adds up");
  std::vector<double> mean(static_cast<std::size_t>(dim), 0.0);
  const double scale = layer.extents().rope_scale;  // rotating back leaves this factor in the keys
  for (std::int64_t slice = 0; slice < slices; ++slice) {
    for (std::int64_t d = 0; d < dim; ++d) {
      mean[static_cast<std::size_t>(d)] += sums(slice, d) / (static_cast<double>(rows) * scale);
    }
  }
  return mean;
}

void MeanAttention::Watcher::score(PolicyLayer& layer, const ScoreView& scores) {
  const auto& extents = layer.extents();
  m_queries.finish(layer);
  const auto size = static_cast<std::size_t>(extents.layers) * extents.kv_heads;
  m_results.m_kv_heads = extents.kv_heads;
  m_results.m_sums.resize(size, 0.0);
  if (layer.heads() == 0) return;

  const auto frequencies = layer.inverse_frequencies();
  const Kokkos::View<float*, Kokkos::HostSpace> host_frequencies(
      "kvzap::mean_attention::frequencies", frequencies.extent(0));
  Kokkos::deep_copy(layer.exec(), host_frequencies, frequencies);
  const auto queries = Kokkos::create_mirror_view(m_queries.means());
  Kokkos::deep_copy(layer.exec(), queries, m_queries.means());
  base::fence(layer.exec(), "kvzap::mean_attention: the host reads means");
  std::vector<double> turns(frequencies.extent(0));
  for (std::size_t d = 0; d < turns.size(); ++d) turns[d] = host_frequencies(d);
  for (int head = 0; head < layer.heads(); ++head) {
    // The rows are no longer needed. One row stays, because the cache needs a row in each head.
    fill_rows(layer.exec(), scores, head, {0, 1}, 1.0f);
    fill_rows(layer.exec(), scores, head, {1, layer.rows(head)}, 0.0f);
    const std::vector<double> key = mean_key(layer, head);
    double sum = 0;
    for (int q = 0; q < extents.group; ++q) {
      sum += mean_cumulative_attention(&queries(head * extents.group + q, 0), key.data(), turns,
                                       extents.rope_scale, m_results.m_tokens);
    }
    const auto number = static_cast<std::size_t>(layer.layer()) * extents.kv_heads +
                        static_cast<std::size_t>(extents.heads[head]);
    m_results.m_sums[number] += sum / extents.group;
  }
}

void MeanAttention::begin() {
  m_watched = 0;
  m_sums.clear();
  m_scores.clear();
}

std::unique_ptr<Policy> MeanAttention::watch() {
  ++m_watched;
  return std::make_unique<Watcher>(*this);
}

void MeanAttention::finish(const Communicator& comm) {
  // Other ranks have zeros for this rank's heads, so the sum is the same on all ranks.
  comm.all_reduce_sum(m_sums.data(), m_sums.size());
  const auto heads = static_cast<std::size_t>(m_kv_heads);
  m_scores.assign(m_sums.size() / heads, std::vector<double>(heads));
  for (std::size_t i = 0; i < m_sums.size(); ++i) {
    m_scores[i / heads][i % heads] = m_sums[i] / static_cast<double>(m_watched);
  }
}

}  // namespace kvzap::policy
