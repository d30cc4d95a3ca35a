#include "policy/row_math.hpp"

#include <algorithm>
#include <cmath>

#include "base/host_threads.hpp"
#include "base/scratch.hpp"
#include "linalg/host/row_kernels.hpp"

namespace kvzap::policy {
namespace {

// Rows that one work item adds up.
constexpr std::int64_t block_rows = 256;

using Doubles = Kokkos::View<double*, MemorySpace>;

void sum_blocks(const ExecutionSpace& exec, const PolicyLayer::RowsView& rows,
                const Kokkos::View<const float*, MemorySpace>& factors, const Doubles& partial) {
  const std::int64_t count = rows.extent(0);
  const std::int64_t columns = rows.extent(1);
  const std::int64_t blocks = (count + block_rows - 1) / block_rows;
  const std::int64_t items = (columns + columns_per_item - 1) / columns_per_item;
  const bool weighted = factors.extent(0) > 0;
  Kokkos::parallel_for(
      "kvzap::policy::sum_blocks", PolicyRange(exec, 0, blocks * items),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t block = i / items;
        const std::int64_t first = i % items * columns_per_item;
        const std::int64_t width =
            columns - first < columns_per_item ? columns - first : columns_per_item;
        const std::int64_t end =
            (block + 1) * block_rows < count ? (block + 1) * block_rows : count;
        double* const sums = &partial(block * columns + first);
        for (std::int64_t d = 0; d < width; ++d) sums[d] = 0;
        for (std::int64_t r = block * block_rows; r < end; ++r) {
          const float* const row = &rows(r, first);
          const double factor = weighted ? factors(r) : 1.0f;
          for (std::int64_t d = 0; d < width; ++d) sums[d] += factor * row[d];
        }
      });
}

void sum_partial(const ExecutionSpace& exec, std::int64_t blocks, std::int64_t columns,
                 const Doubles& partial, const Doubles& sums) {
  Kokkos::parallel_for(
      "kvzap::policy::sum_partial", PolicyRange(exec, 0, columns), KOKKOS_LAMBDA(std::int64_t d) {
        double sum = 0;
        for (std::int64_t block = 0; block < blocks; ++block) sum += partial(block * columns + d);
        sums(d) = sum;
      });
}

// sum_r (scores(head, r) - shift)^power over a part, power 1 or 2.
double sum_of_powers(const ExecutionSpace& exec, const Policy::ScoreView& scores, int head,
                     const RowPart& part, double shift, int power) {
  double sum = 0;
  Kokkos::parallel_reduce(
      "kvzap::policy::sum_of_powers", PolicyRange(exec, part.begin, part.begin + part.count),
      KOKKOS_LAMBDA(std::int64_t r, double& partial) {
        const double x = scores(head, r) - shift;
        partial += power == 2 ? x * x : x;
      },
      sum);
  return sum;
}

// Sums over all heads of the layer. One rank computes each head's sum, and every rank adds them in
// the order of heads. So the result does not depend on the placement.
double sum_over_layer(const PolicyLayer& layer, const std::vector<RowPart>& parts,
                      const Policy::ScoreView& scores, double shift, int power) {
  std::vector<double> sums(layer.extents().kv_heads);
  for (int h = 0; h < layer.heads(); ++h) {
    if (parts[h].count == 0) continue;
    sums.at(layer.extents().heads[h]) =
        sum_of_powers(layer.exec(), scores, h, parts[h], shift, power);
  }
  layer.comm().all_reduce_sum(sums.data(), sums.size());
  double sum = 0;
  for (double of_head : sums) sum += of_head;
  return sum;
}

void shift_and_scale(const ExecutionSpace& exec, const Policy::ScoreView& scores, int head,
                     const RowPart& part, double mean, double deviation) {
  Kokkos::parallel_for(
      "kvzap::policy::standardize", PolicyRange(exec, part.begin, part.begin + part.count),
      KOKKOS_LAMBDA(std::int64_t r) {
        scores(head, r) = static_cast<float>((scores(head, r) - mean) / deviation);
      });
}

}  // namespace

void inverse_norms(const ExecutionSpace& exec, const PolicyLayer::RowsView& rows,
                   const Kokkos::View<float*, MemorySpace>& inverse) {
  const std::int64_t dim = rows.extent(1);
  Kokkos::parallel_for(
      "kvzap::policy::inverse_norms", PolicyRange(exec, 0, rows.extent(0)),
      KOKKOS_LAMBDA(std::int64_t r) {
        const float length = norm(&rows(r, 0), dim);
        inverse(r) = 1.0f / (length < 1e-12f ? 1e-12f : length);
      });
}

void soften(const ExecutionSpace& exec, float* logits, std::int64_t rows, std::int64_t count,
            const Kokkos::View<float*, MemorySpace>& factors) {
  if (base::machine().on_host()) {
    float* const of_vectors = factors.data();
    base::host_for("kvzap::policy::soften", count, [=](std::int64_t i) {
      constexpr std::int64_t slice = 1024;
      float* const vector = logits + i * rows;
      const float largest = linalg::max_of(vector, rows);
      double sum = 0;
      for (std::int64_t r = 0; r < rows; r += slice) {
        sum += linalg::exp_shifted(vector + r, std::min(slice, rows - r), largest);
      }
      of_vectors[i] = static_cast<float>(1 / (sum * static_cast<double>(count)));
    });
    return;
  }
  using Team = Kokkos::TeamPolicy<ExecutionSpace>;
  Kokkos::parallel_for(
      "kvzap::policy::soften", Team(exec, static_cast<int>(count), Kokkos::AUTO),
      KOKKOS_LAMBDA(const typename Team::member_type& team) {
        const std::int64_t i = team.league_rank();
        float* const vector = logits + i * rows;
        const float largest = largest_of(team, vector, rows);
        const auto sum = exponentials_of<double>(team, vector, rows, largest);
        Kokkos::single(Kokkos::PerTeam(team), [&] {
          factors(i) = static_cast<float>(1 / (sum * static_cast<double>(count)));
        });
      });
}

void fill_turns(const ExecutionSpace& exec, std::int64_t first, std::int64_t stride,
                std::int64_t count, const Kokkos::View<const float*, MemorySpace>& frequencies,
                double scale, float* turns) {
  const std::int64_t pairs = frequencies.extent(0);
  Kokkos::parallel_for(
      "kvzap::policy::turns", PolicyRange(exec, 0, count * pairs), KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t t = i / pairs;
        const std::int64_t d = i % pairs;
        const double angle =
            static_cast<double>(first + stride * t) * static_cast<double>(frequencies(d));
        turns[t * 2 * pairs + d] = static_cast<float>(scale * base::math::cos(angle));
        turns[t * 2 * pairs + pairs + d] = static_cast<float>(scale * base::math::sin(angle));
      });
}

std::vector<RowPart> whole_heads(const PolicyLayer& layer) {
  std::vector<RowPart> parts;
  parts.reserve(layer.heads());
  for (int h = 0; h < layer.heads(); ++h) parts.push_back({0, layer.rows(h)});
  return parts;
}

ColumnSums::Sums ColumnSums::operator()(const ExecutionSpace& exec,
                                        const PolicyLayer::RowsView& rows,
                                        const Kokkos::View<const float*, MemorySpace>& factors) {
  const std::int64_t columns = rows.extent(1);
  const std::int64_t blocks = (rows.extent(0) + block_rows - 1) / block_rows;
  base::reserve_scratch(m_partial, blocks * columns, "kvzap::policy::partial_sums");
  base::reserve_scratch(m_sums, columns, "kvzap::policy::sums");
  sum_blocks(exec, rows, factors, m_partial);
  sum_partial(exec, blocks, columns, m_partial, m_sums);
  return m_sums;
}

void standardize(const PolicyLayer& layer, const std::vector<RowPart>& parts,
                 const Policy::ScoreView& scores) {
  std::int64_t count = 0;
  for (const RowPart& part : parts) count += part.count;
  count = layer.comm().all_reduce_sum(count);
  if (count == 0) return;
  const double mean = sum_over_layer(layer, parts, scores, 0, 1) / static_cast<double>(count);
  const double squares = sum_over_layer(layer, parts, scores, mean, 2);
  const double deviation = count > 1 ? std::sqrt(squares / static_cast<double>(count - 1)) : 0.0;
  for (int h = 0; h < layer.heads(); ++h) {
    if (parts[h].count == 0) continue;
    // std::max(deviation, …) would turn NaN into a number.
    shift_and_scale(layer.exec(), scores, h, parts[h], mean, deviation < 1e-6 ? 1e-6 : deviation);
  }
}

}  // namespace kvzap::policy
