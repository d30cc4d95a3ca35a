#include "policy/query_statistics.hpp"

#include <algorithm>

#include "base/host_threads.hpp"
#include "base/scratch.hpp"
#include "base/simd.hpp"

namespace kvzap::policy {
namespace {

using linalg::Matrix;
using Angles = Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace>;
using Frequencies = Kokkos::View<const float*, MemorySpace>;
using Covariances = QueryStatistics::Covariances;

// Tokens of a run. An angle is combined from the angle of the run and the angle within it, because
// sines are slow.
constexpr std::int64_t run = 32;

// angles(t, :, d): the rotation of t's run combined with that of t within it.
void combine_turns(const ExecutionSpace& exec, std::int64_t count, const Angles& runs,
                   const Angles& within, const Angles& angles) {
  const auto pairs = static_cast<std::int64_t>(angles.extent(2));
  Kokkos::parallel_for(
      "kvzap::query_statistics::angles", RowRange(exec, 0, count), KOKKOS_LAMBDA(std::int64_t t) {
        const float* const a = &runs(t / run, 0, 0);
        const float* const b = &within(t % run, 0, 0);
        float* const angle = &angles(t, 0, 0);
        for (std::int64_t d = 0; d < pairs; ++d) {
          angle[d] = a[d] * b[d] - a[pairs + d] * b[pairs + d];
          angle[pairs + d] = a[pairs + d] * b[d] + a[d] * b[pairs + d];
        }
      });
}

/// The query heads of a token.
struct TokenQueries {
  const float* values;
  std::int64_t head_stride;
  std::int64_t heads;
  std::int64_t half;  // head_dim / 2
};

// target = query rotated back by its angle - shift, for each query head of a token; sums += target.
KVZAP_BODY void rotate_back_body(const TokenQueries& queries, const float* angles,
                                 const float* shift, float* target, std::int64_t target_stride,
                                 float* sums) {
  const float* query = queries.values;
  const std::int64_t half = queries.half;
  const float* const cosines = angles;
  const float* const sines = angles + half;
  for (std::int64_t head = 0; head < queries.heads; ++head) {
#pragma omp simd
    for (std::int64_t d = 0; d < half; ++d) {
      const float x = query[d];
      const float y = query[d + half];
      const float a = x * cosines[d] + y * sines[d] - shift[d];
      const float b = y * cosines[d] - x * sines[d] - shift[d + half];
      target[d] = a;
      target[d + half] = b;
      sums[d] += a;
      sums[d + half] += b;
    }
    query += queries.head_stride;
    target += target_stride;
    shift += 2 * half;
    sums += 2 * half;
  }
}
KVZAP_KERNEL(void, rotate_back,
             (const TokenQueries& queries, const float* angles, const float* shift, float* target,
              std::int64_t target_stride, float* sums),
             (queries, angles, shift, target, target_stride, sums))

/// Queries of a block, by query head.
struct Turned {
  float* values;  // (query head, token, head_dim)
  std::int64_t count;
  std::int64_t heads;
  std::int64_t dim;
};

// Tokens that one work item adds up on a host.
constexpr std::int64_t slice_tokens = 64;

std::int64_t slices(std::int64_t count) { return (count + slice_tokens - 1) / slice_tokens; }

// values = queries rotated back - shift, sums(head, d) += their sum over tokens. partial has
// slices(count) * heads * dim elements.
void rotate_queries(const ExecutionSpace& exec, const TokenBlock::QueryView& queries,
                    const Angles& angles, const Matrix& shift, const Turned& turned,
                    const RowVector& partial, const Matrix& sums) {
  const std::int64_t half = turned.dim / 2;
  const std::int64_t size = turned.heads * turned.dim;
  if (base::machine().on_host() && queries.stride(2) == 1) {
    base::host_for("kvzap::query_statistics::turn", slices(turned.count), [=](std::int64_t slice) {
      float* const of_slice = partial.data() + slice * size;
      std::fill_n(of_slice, size, 0.0f);
      const std::int64_t end = std::min(turned.count, (slice + 1) * slice_tokens);
      for (std::int64_t t = slice * slice_tokens; t < end; ++t) {
        rotate_back(
            {&queries(t, 0, 0), static_cast<std::int64_t>(queries.stride(1)), turned.heads, half},
            &angles(t, 0, 0), shift.data(), turned.values + t * turned.dim,
            turned.count * turned.dim, of_slice);
      }
    });
    base::host_for("kvzap::query_statistics::sum", size, [=](std::int64_t i) {
      for (std::int64_t slice = 0; slice < slices(turned.count); ++slice) {
        sums.data()[i] += partial(slice * size + i);
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
      "kvzap::query_statistics::sum", RowRange(exec, 0, size), KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t head = i / turned.dim;
        const std::int64_t d = i % turned.dim;
        const float* const values = turned.values + head * turned.count * turned.dim + d;
        float sum = 0;
        for (std::int64_t t = 0; t < turned.count; ++t) sum += values[t * turned.dim];
        sums(head, d) += sum;
      });
}

// products += x^T x for x (count, dim), except for the upper right quarter, which follows from the
// lower left one.
void add_products(const ExecutionSpace& exec, const Matrix& x, const Matrix& products) {
  const auto dim = static_cast<std::int64_t>(x.extent(1));
  const auto left = std::make_pair(std::int64_t{0}, dim / 2);
  const auto right = std::make_pair(dim / 2, dim);
  const Matrix x_left = Kokkos::subview(x, Kokkos::ALL, left);
  const Matrix x_right = Kokkos::subview(x, Kokkos::ALL, right);
  linalg::multiply_tn(exec, 1, x_left, x_left, 1, Kokkos::subview(products, left, left));
  linalg::multiply_tn(exec, 1, x_right, x, 1, Kokkos::subview(products, right, Kokkos::ALL));
}

// Moves the shift to the mean of the first block.
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

// Turns sums around the shift into means and covariances.
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
          // A row of the lower half is also written to the upper right quarter.
          for (std::int64_t d = 0; d < (row < dim / 2 ? dim / 2 : dim); ++d) {
            const float covariance = covariances(head, row, d) * by - mean * (means(head, d) * by);
            covariances(head, row, d) = covariance;
            if (row >= dim / 2 && d < dim / 2) covariances(head, d, row) = covariance;
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
                 const Frequencies& frequencies, double scale,
                 const Kokkos::View<double**, Kokkos::LayoutRight, MemorySpace>& mean) {
  Kokkos::parallel_for(
      "kvzap::average_rope::mean",
      RowRange(exec, 0, static_cast<std::int64_t>(frequencies.extent(0))),
      KOKKOS_LAMBDA(std::int64_t d) {
        double cosine = 0;
        double sine = 0;
        for (std::int64_t t = begin; t < begin + count; ++t) {
          const float angle = static_cast<float>(t) * frequencies(d);
          cosine += static_cast<double>(base::math::cos(angle));
          sine += static_cast<double>(base::math::sin(angle));
        }
        mean(d, 0) = scale * cosine / static_cast<double>(count);
        mean(d, 1) = scale * sine / static_cast<double>(count);
      });
}

}  // namespace

void QueryStatistics::begin(PolicyLayer& layer) {
  const auto& extents = layer.extents();
  const std::int64_t heads = std::int64_t{layer.heads()} * extents.group;
  const std::int64_t dim = extents.head_dim;
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
  const auto& extents = layer.extents();
  // Does not rely on the state that `finish` left: a failed step may not have reached it.
  if (block.first == extents.tokens - extents.new_tokens) begin(layer);
  m_end = block.first + block.count;
  // `finish` reads the newest tokens instead.
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
  base::reserve_scratch(m_queries, turned.heads * count * dim, "kvzap::query_statistics::queries");
  turned.values = m_queries.data();
  base::reserve_scratch(m_partial, slices(count) * turned.heads * dim,
                        "kvzap::query_statistics::partial");
  const auto frequencies = layer.inverse_frequencies();
  if (m_within.size() == 0) {
    m_within = Angles("kvzap::query_statistics::within", run, 2, dim / 2);
    fill_turns(exec, 0, 1, run, frequencies, 1, m_within.data());
  }
  if (static_cast<std::int64_t>(m_angles.extent(0)) < count) {
    m_angles = {};
    m_angles = Angles("kvzap::query_statistics::angles", count, 2, dim / 2);
    m_runs = Angles("kvzap::query_statistics::runs", (count + run - 1) / run, 2, dim / 2);
  }
  // Queries are rotated back and lose RoPE's factor.
  fill_turns(exec, block.first + skipped, run, (count + run - 1) / run, frequencies,
             1.0 / layer.extents().rope_scale, m_runs.data());
  combine_turns(exec, count, m_runs, m_within, m_angles);
  const TokenBlock::QueryView queries = Kokkos::subview(
      block.queries, std::make_pair(skipped, block.count), Kokkos::ALL, Kokkos::ALL);
  rotate_queries(exec, queries, m_angles, m_shift, turned, m_partial, m_means);
  if (m_has_covariance) {
    if (m_count == 0) shift_to_mean(exec, turned, m_shift, m_means);
    for (std::int64_t head = 0; head < turned.heads; ++head) {
      const Matrix of_head(turned.values + head * count * dim, count, dim);
      const Matrix products(m_covariances.data() + head * dim * dim, dim, dim);
      add_products(exec, of_head, products);
    }
  }
  m_count += count;
}

void QueryStatistics::finish(PolicyLayer& layer) {
  const auto& extents = layer.extents();
  if (extents.new_tokens < std::min(m_history, extents.tokens)) {
    const TokenBlock newest = layer.recent();
    m_end = newest.first + newest.count;
    add(layer, newest);
  }
  finish_moments(layer.exec(), m_count, m_shift, m_means, m_covariances);
}

void AverageRope::prepare(PolicyLayer& layer, std::int64_t begin, std::int64_t count) {
  if (begin == m_begin && count == m_count) return;  // unchanged since the previous layer
  const auto frequencies = layer.inverse_frequencies();
  if (m_mean.extent(0) != frequencies.extent(0)) {
    m_mean = Kokkos::View<double**, Kokkos::LayoutRight, MemorySpace>("kvzap::average_rope::mean",
                                                                      frequencies.extent(0), 2);
  }
  mean_angles(layer.exec(), begin, count, frequencies, layer.extents().rope_scale, m_mean);
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
  // Processes a pair of rows and a pair of columns at a time: the four numbers where they cross.
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
