#include "policy/query_statistics.hpp"

#include <algorithm>

#include "base/device_kernels.hpp"
#include "base/scratch.hpp"
#include "base/simd.hpp"

namespace kvzap::policy {
namespace {

using detail::Matrix;
using Angles = Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace>;
using Frequencies = Kokkos::View<const float*, MemorySpace>;
using Covariances = QueryStatistics::Covariances;
using HostRange =
    Kokkos::RangePolicy<Kokkos::DefaultHostExecutionSpace, Kokkos::IndexType<std::int64_t>>;

// Tokens whose angles come from that of the first by one rotation each: sines are dear, and each
// rotation adds but a rounding error.
constexpr std::int64_t run = 32;

bool on_host() { return detail::runs_on_host && !detail::uses_device_kernels(); }

// angles(t, d) = cosine and sine of (first + t) * frequencies(d), each half of a row together.
void fill_angles(const ExecutionSpace& exec, std::int64_t first, std::int64_t count,
                 const Frequencies& frequencies, const Angles& angles) {
  const auto pairs = static_cast<std::int64_t>(frequencies.extent(0));
  const std::int64_t runs = (count + run - 1) / run;
  Kokkos::parallel_for(
      "kvzap::query_statistics::angles", RowRange(exec, 0, runs * pairs),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t d = i % pairs;
        const std::int64_t begin = i / pairs * run;
        const std::int64_t end = begin + run < count ? begin + run : count;
        const auto frequency = static_cast<double>(frequencies(d));
        const double angle = static_cast<double>(first + begin) * frequency;
        double cosine = detail::math::cos(angle);
        double sine = detail::math::sin(angle);
        const double step_cosine = detail::math::cos(frequency);
        const double step_sine = detail::math::sin(frequency);
        for (std::int64_t t = begin; t < end; ++t) {
          angles(t, 0, d) = static_cast<float>(cosine);
          angles(t, 1, d) = static_cast<float>(sine);
          const double next = cosine * step_cosine - sine * step_sine;
          sine = sine * step_cosine + cosine * step_sine;
          cosine = next;
        }
      });
}

// target = query turned back by its angle - shift; sums += target.
KVZAP_BODY void turn_back_body(const float* query, const float* angles, const float* shift,
                               int half, float* target, float* sums) {
  const float* const cosines = angles;
  const float* const sines = angles + half;
  for (int d = 0; d < half; ++d) {
    const float x = query[d];
    const float y = query[d + half];
    const float a = x * cosines[d] + y * sines[d] - shift[d];
    const float b = y * cosines[d] - x * sines[d] - shift[d + half];
    target[d] = a;
    target[d + half] = b;
    sums[d] += a;
    sums[d + half] += b;
  }
}
KVZAP_KERNEL(void, turn_back,
             (const float* query, const float* angles, const float* shift, int half, float* target,
              float* sums),
             (query, angles, shift, half, target, sums))

/// Queries of a block, by query head.
struct Turned {
  float* values;  // (query head, token, head_dim)
  std::int64_t count;
  std::int64_t heads;
  std::int64_t dim;
};

// values = queries turned back - shift, sums(head, d) += their sum over tokens.
void turn_queries(const ExecutionSpace& exec, const TokenBlock::QueryView& queries,
                  const Angles& angles, const Matrix& shift, const Turned& turned,
                  const Matrix& sums) {
  const std::int64_t half = turned.dim / 2;
  if (on_host() && queries.stride(2) == 1) {
    Kokkos::parallel_for("kvzap::query_statistics::turn", HostRange(0, turned.heads),
                         [=](std::int64_t head) {
                           float* target = turned.values + head * turned.count * turned.dim;
                           for (std::int64_t t = 0; t < turned.count; ++t) {
                             turn_back(&queries(t, head, 0), &angles(t, 0, 0), &shift(head, 0),
                                       static_cast<int>(half), target, &sums(head, 0));
                             target += turned.dim;
                           }
                         });
    return;
  }
  Kokkos::parallel_for(
      "kvzap::query_statistics::turn", RowRange(exec, 0, turned.heads * turned.count * half),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t d = i % half;
        const std::int64_t t = i / half % turned.count;
        const std::int64_t head = i / half / turned.count;
        const float x = queries(t, head, d);
        const float y = queries(t, head, d + half);
        const float cosine = angles(t, 0, d);
        const float sine = angles(t, 1, d);
        float* const target = turned.values + (head * turned.count + t) * turned.dim;
        target[d] = x * cosine + y * sine - shift(head, d);
        target[d + half] = y * cosine - x * sine - shift(head, d + half);
      });
  Kokkos::parallel_for(
      "kvzap::query_statistics::sum", RowRange(exec, 0, turned.heads * turned.dim),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t head = i / turned.dim;
        const std::int64_t d = i % turned.dim;
        const float* const values = turned.values + head * turned.count * turned.dim + d;
        float sum = 0;
        for (std::int64_t t = 0; t < turned.count; ++t) sum += values[t * turned.dim];
        sums(head, d) += sum;
      });
}

// Moves what is subtracted to the mean of the first block.
void shift_to_mean(const ExecutionSpace& exec, const Turned& turned, const Matrix& shift,
                   const Matrix& sums) {
  Kokkos::parallel_for(
      "kvzap::query_statistics::shift", RowRange(exec, 0, turned.heads * turned.dim),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t head = i / turned.dim;
        const std::int64_t d = i % turned.dim;
        shift(head, d) = sums(head, d) / static_cast<float>(turned.count);
        sums(head, d) = 0;
      });
  Kokkos::parallel_for(
      "kvzap::query_statistics::subtract", RowRange(exec, 0, turned.heads * turned.count),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t head = i / turned.count;
        float* const values = turned.values + i * turned.dim;
        for (std::int64_t d = 0; d < turned.dim; ++d) values[d] -= shift(head, d);
      });
}

// Sums around the shift become means and covariances.
void finish_moments(const ExecutionSpace& exec, std::int64_t count, const Matrix& shift,
                    const Matrix& means, const Covariances& covariances) {
  const auto heads = static_cast<std::int64_t>(means.extent(0));
  const auto dim = static_cast<std::int64_t>(means.extent(1));
  const float by = count > 0 ? 1.0f / static_cast<float>(count) : 0.0f;
  if (covariances.size() > 0) {
    Kokkos::parallel_for(
        "kvzap::query_statistics::covariance", RowRange(exec, 0, heads * dim),
        KOKKOS_LAMBDA(std::int64_t i) {
          const std::int64_t head = i / dim;
          const std::int64_t row = i % dim;
          const float mean = means(head, row) * by;
          for (std::int64_t d = 0; d < dim; ++d) {
            covariances(head, row, d) =
                covariances(head, row, d) * by - mean * (means(head, d) * by);
          }
        });
  }
  Kokkos::parallel_for(
      "kvzap::query_statistics::mean", RowRange(exec, 0, heads * dim),
      KOKKOS_LAMBDA(std::int64_t i) {
        means(i / dim, i % dim) = means(i / dim, i % dim) * by + shift(i / dim, i % dim);
      });
}

void mean_angles(const ExecutionSpace& exec, std::int64_t begin, std::int64_t count,
                 const Frequencies& frequencies,
                 const Kokkos::View<double**, Kokkos::LayoutRight, MemorySpace>& mean) {
  Kokkos::parallel_for(
      "kvzap::average_rope::mean",
      RowRange(exec, 0, static_cast<std::int64_t>(frequencies.extent(0))),
      KOKKOS_LAMBDA(std::int64_t d) {
        double cosine = 0;
        double sine = 0;
        for (std::int64_t t = begin; t < begin + count; ++t) {
          const float angle = static_cast<float>(t) * frequencies(d);
          cosine += static_cast<double>(detail::math::cos(angle));
          sine += static_cast<double>(detail::math::sin(angle));
        }
        mean(d, 0) = cosine / static_cast<double>(count);
        mean(d, 1) = sine / static_cast<double>(count);
      });
}

}  // namespace

void QueryStatistics::begin(PolicyLayer& layer) {
  const auto& extents = layer.extents();
  const std::int64_t heads = std::int64_t{layer.heads()} * extents.group;
  const std::int64_t dim = extents.head_dim;
  m_started = true;
  m_count = 0;
  m_end = 0;
  if (static_cast<std::int64_t>(m_means.extent(0)) != heads ||
      static_cast<std::int64_t>(m_means.extent(1)) != dim) {
    m_shift = Matrix("kvzap::query_statistics::shift", heads, dim);
    m_means = Matrix("kvzap::query_statistics::means", heads, dim);
    if (m_has_covariance) {
      m_covariances = Covariances("kvzap::query_statistics::covariances", heads, dim, dim);
    }
  }
  Kokkos::deep_copy(layer.exec(), m_shift, 0.0f);
  Kokkos::deep_copy(layer.exec(), m_means, 0.0f);
  if (m_has_covariance) Kokkos::deep_copy(layer.exec(), m_covariances, 0.0f);
}

void QueryStatistics::observe(PolicyLayer& layer, const TokenBlock& block) {
  if (!m_started) begin(layer);
  const auto& extents = layer.extents();
  m_end = block.first + block.count;
  // finish takes the newest tokens instead.
  if (extents.new_tokens < std::min(m_history, extents.tokens)) return;
  add(layer, block);
}

void QueryStatistics::add(PolicyLayer& layer, const TokenBlock& block) {
  const std::int64_t skipped = std::clamp<std::int64_t>(m_sink - block.first, 0, block.count);
  const std::int64_t count = block.count - skipped;
  if (count == 0 || layer.heads() == 0) return;
  const ExecutionSpace& exec = layer.exec();
  const std::int64_t dim = layer.extents().head_dim;
  Turned turned{};
  turned.count = count;
  turned.heads = std::int64_t{layer.heads()} * layer.extents().group;
  turned.dim = dim;
  detail::reserve_scratch(m_queries, turned.heads * count * dim,
                          "kvzap::query_statistics::queries");
  turned.values = m_queries.data();
  if (static_cast<std::int64_t>(m_angles.extent(0)) < count) {
    m_angles = {};
    m_angles = Angles("kvzap::query_statistics::angles", count, 2, dim / 2);
  }
  fill_angles(exec, block.first + skipped, count, layer.inverse_frequencies(), m_angles);
  const TokenBlock::QueryView queries = Kokkos::subview(
      block.queries, std::make_pair(skipped, block.count), Kokkos::ALL, Kokkos::ALL);
  turn_queries(exec, queries, m_angles, m_shift, turned, m_means);
  if (m_has_covariance) {
    if (m_count == 0) shift_to_mean(exec, turned, m_shift, m_means);
    for (std::int64_t head = 0; head < turned.heads; ++head) {
      const Matrix of_head(turned.values + head * count * dim, count, dim);
      const Matrix products(m_covariances.data() + head * dim * dim, dim, dim);
      detail::multiply_tn(exec, 1, of_head, of_head, 1, products);
    }
  }
  m_count += count;
}

void QueryStatistics::finish(PolicyLayer& layer) {
  if (!m_started) begin(layer);
  const auto& extents = layer.extents();
  if (extents.new_tokens < std::min(m_history, extents.tokens)) {
    const TokenBlock newest = layer.recent();
    m_end = newest.first + newest.count;
    add(layer, newest);
  }
  finish_moments(layer.exec(), m_count, m_shift, m_means, m_covariances);
  m_started = false;
}

void AverageRope::prepare(PolicyLayer& layer, std::int64_t begin, std::int64_t count) {
  if (begin == m_begin && count == m_count) return;  // of the layer before
  const auto frequencies = layer.inverse_frequencies();
  if (m_mean.extent(0) != frequencies.extent(0)) {
    m_mean = Kokkos::View<double**, Kokkos::LayoutRight, MemorySpace>("kvzap::average_rope::mean",
                                                                      frequencies.extent(0), 2);
  }
  mean_angles(layer.exec(), begin, count, frequencies, m_mean);
  m_begin = begin;
  m_count = count;
}

void AverageRope::turn(const ExecutionSpace& exec, const Matrix& means) const {
  const auto mean = m_mean;
  const auto half = static_cast<std::int64_t>(mean.extent(0));
  Kokkos::parallel_for(
      "kvzap::average_rope::means",
      RowRange(exec, 0, static_cast<std::int64_t>(means.extent(0)) * half),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t head = i / half;
        const std::int64_t d = i % half;
        const auto x = static_cast<double>(means(head, d));
        const auto y = static_cast<double>(means(head, d + half));
        means(head, d) = static_cast<float>(mean(d, 0) * x - mean(d, 1) * y);
        means(head, d + half) = static_cast<float>(mean(d, 1) * x + mean(d, 0) * y);
      });
}

void AverageRope::turn(const ExecutionSpace& exec,
                       const QueryStatistics::Covariances& covariances) const {
  const auto mean = m_mean;
  const auto half = static_cast<std::int64_t>(mean.extent(0));
  // A pair of rows and a pair of columns at a time: the four numbers where they meet.
  Kokkos::parallel_for(
      "kvzap::average_rope::covariances",
      RowRange(exec, 0, static_cast<std::int64_t>(covariances.extent(0)) * half * half),
      KOKKOS_LAMBDA(std::int64_t index) {
        const std::int64_t head = index / (half * half);
        const std::int64_t i = index / half % half;
        const std::int64_t j = index % half;
        const double a = mean(i, 0), b = mean(i, 1), c = mean(j, 0), s = mean(j, 1);
        const auto xx = static_cast<double>(covariances(head, i, j));
        const auto xy = static_cast<double>(covariances(head, i, j + half));
        const auto yx = static_cast<double>(covariances(head, i + half, j));
        const auto yy = static_cast<double>(covariances(head, i + half, j + half));
        const double left_xx = a * xx - b * yx, left_xy = a * xy - b * yy;
        const double left_yx = b * xx + a * yx, left_yy = b * xy + a * yy;
        covariances(head, i, j) = static_cast<float>(c * left_xx - s * left_xy);
        covariances(head, i, j + half) = static_cast<float>(s * left_xx + c * left_xy);
        covariances(head, i + half, j) = static_cast<float>(c * left_yx - s * left_yy);
        covariances(head, i + half, j + half) = static_cast<float>(s * left_yx + c * left_yy);
      });
}

}  // namespace kvzap::policy
