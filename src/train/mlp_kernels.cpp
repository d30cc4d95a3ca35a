#include "train/mlp_kernels.hpp"

#include <algorithm>

#include "base/host_threads.hpp"
#include "base/kokkos_compat.hpp"
#include "base/machine.hpp"
#include "linalg/host/row_kernels.hpp"

namespace kvzap::train {
namespace {

using Range = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;

// Values in a part of a vector. The order of summation in a part does not depend on the backend.
constexpr std::int64_t part_length = 4096;
// Columns that one host thread sums over all rows. They take a few cache lines of each row.
constexpr std::int64_t column_block = 64;

template <class Value>
void gather_typed(const ExecutionSpace& exec, const Value* source, const Order& order,
                  std::int64_t begin, const linalg::Matrix& target) {
  const std::int64_t rows = target.extent(0), columns = target.extent(1);
  if (base::machine().on_host()) {
    base::host_for("kvzap::train::gather", rows, columns, [=](std::int64_t i) {
      linalg::widen(source + order(begin + i) * columns, &target(i, 0), columns);
    });
    return;
  }
  Kokkos::parallel_for(
      "kvzap::train::gather", Range(exec, 0, rows * columns), KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t row = i / columns, column = i % columns;
        target(row, column) = static_cast<float>(source[order(begin + row) * columns + column]);
      });
}

}  // namespace

void gather_rows(const ExecutionSpace& exec, const ConstArrayView& source, const Order& order,
                 std::int64_t begin, const linalg::Matrix& target) {
  with_value_type(source.dtype, [&](auto zero) {
    gather_typed(exec, source.values<decltype(zero)>(), order, begin, target);
  });
}

void gelu_with_slope(const ExecutionSpace& exec, const linalg::Matrix& values,
                     const linalg::ConstVector& bias, const linalg::Matrix& activation) {
  const std::int64_t rows = values.extent(0), columns = values.extent(1);
  if (base::machine().on_host()) {
    base::host_for("kvzap::train::gelu", rows, columns, [=](std::int64_t i) {
      gelu_and_slope(&values(i, 0), bias.data(), &activation(i, 0), columns);
    });
    return;
  }
  Kokkos::parallel_for(
      "kvzap::train::gelu", Range(exec, 0, rows * columns), KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t row = i / columns, column = i % columns;
        const float x = values(row, column) + bias(column);
        const float phi = 0.5f * (1.0f + base::math::erf(x * 0.70710678f));
        activation(row, column) = x * phi;
        values(row, column) = phi + x * (0.39894228f * base::math::exp(-0.5f * x * x));
      });
}

void residual(const ExecutionSpace& exec, const linalg::Matrix& output,
              const linalg::ConstVector& bias, const linalg::ConstMatrix& scores,
              const Order& order, float factor, const Doubles& row_loss) {
  const std::int64_t heads = output.extent(1);
  Kokkos::parallel_for(
      "kvzap::train::residual", Range(exec, 0, output.extent(0)), KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t row = order(i);
        double loss = 0;
        for (std::int64_t h = 0; h < heads; ++h) {
          const float difference = output(i, h) + bias(h) - scores(row, h);
          loss += static_cast<double>(difference) * difference;
          output(i, h) = difference * factor;
        }
        row_loss(i) = loss;
      });
}

void times_with_sums(const ExecutionSpace& exec, const linalg::Matrix& values,
                     const linalg::ConstMatrix& factors, const linalg::Vector& sums) {
  const std::int64_t rows = values.extent(0), columns = values.extent(1);
  if (base::machine().on_host()) {
    const std::int64_t blocks = (columns + column_block - 1) / column_block;
    base::host_for("kvzap::train::times", blocks, rows * column_block, [=](std::int64_t b) {
      const std::int64_t begin = b * column_block;
      const std::int64_t count = std::min(column_block, columns - begin);
      std::fill_n(&sums(begin), count, 0.0f);
      for (std::int64_t i = 0; i < rows; ++i) {
        times_and_sum(&values(i, begin), &factors(i, begin), &sums(begin), count);
      }
    });
    return;
  }
  Kokkos::parallel_for(
      "kvzap::train::times", Range(exec, 0, columns), KOKKOS_LAMBDA(std::int64_t c) {
        float sum = 0;
        for (std::int64_t i = 0; i < rows; ++i) {
          values(i, c) *= factors(i, c);
          sum += values(i, c);
        }
        sums(c) = sum;
      });
}

void sum_rows(const ExecutionSpace& exec, const linalg::ConstMatrix& values,
              const linalg::Vector& sums) {
  const std::int64_t rows = values.extent(0);
  Kokkos::parallel_for(
      "kvzap::train::sum_rows", Range(exec, 0, values.extent(1)), KOKKOS_LAMBDA(std::int64_t c) {
        float sum = 0;
        for (std::int64_t i = 0; i < rows; ++i) sum += values(i, c);
        sums(c) = sum;
      });
}

void add_bias_rows(const ExecutionSpace& exec, const linalg::Matrix& output,
                   const linalg::ConstVector& bias) {
  const std::int64_t columns = output.extent(1);
  Kokkos::parallel_for(
      "kvzap::train::bias", Range(exec, 0, output.extent(0) * columns),
      KOKKOS_LAMBDA(std::int64_t i) { output(i / columns, i % columns) += bias(i % columns); });
}

void add_sum(const ExecutionSpace& exec, const Doubles& values, std::int64_t count,
             const Doubles& total) {
  Kokkos::parallel_for(
      "kvzap::train::add_sum", Range(exec, 0, 1), KOKKOS_LAMBDA(std::int64_t) {
        double sum = 0;
        for (std::int64_t i = 0; i < count; ++i) sum += values(i);
        total(0) += sum;
      });
}

std::int64_t parts_of(std::int64_t length) { return (length + part_length - 1) / part_length; }

std::int64_t square_parts(const ExecutionSpace& exec, const linalg::ConstVector& values,
                          const Doubles& partial) {
  const std::int64_t length = values.extent(0), parts = parts_of(length);
  if (base::machine().on_host()) {
    base::host_for("kvzap::train::squares", parts, part_length, [=](std::int64_t p) {
      const std::int64_t begin = p * part_length;
      partial(p) = sum_of_squares(&values(begin), std::min(part_length, length - begin));
    });
    return parts;
  }
  using Team = Kokkos::TeamPolicy<ExecutionSpace>;
  Kokkos::parallel_for(
      "kvzap::train::squares", Team(exec, static_cast<int>(parts), Kokkos::AUTO),
      KOKKOS_LAMBDA(const typename Team::member_type& team) {
        const std::int64_t begin = team.league_rank() * part_length;
        const std::int64_t rest = length - begin;
        const std::int64_t count = rest < part_length ? rest : part_length;
        double sum = 0;
        Kokkos::parallel_reduce(
            Kokkos::TeamThreadRange(team, count),
            [&](std::int64_t i, double& value) {
              value += static_cast<double>(values(begin + i)) * values(begin + i);
            },
            sum);
        Kokkos::single(Kokkos::PerTeam(team), [&] { partial(team.league_rank()) = sum; });
      });
  return parts;
}

void clip_factor(const ExecutionSpace& exec, const Doubles& squares, std::int64_t n_parts,
                 double clip) {
  Kokkos::parallel_for(
      "kvzap::train::clip", Range(exec, 0, 1), KOKKOS_LAMBDA(std::int64_t) {
        double sum = 0;
        for (std::int64_t i = 0; i < n_parts; ++i) sum += squares(i);
        const double factor = clip / (base::math::sqrt(sum) + 1e-6);
        squares(0) = clip > 0 && factor < 1 ? factor : 1.0;
      });
}

void adamw_step(const ExecutionSpace& exec, const AdamState& state,
                const linalg::ConstVector& gradient, const Doubles& factor, const AdamStep& step) {
  const linalg::Vector parameters = state.parameters, first = state.first, second = state.second;
  const std::int64_t length = parameters.extent(0);
  if (base::machine().on_host()) {
    base::host_for("kvzap::train::adamw", parts_of(length), part_length, [=](std::int64_t p) {
      const std::int64_t begin = p * part_length;
      adamw(&parameters(begin), &gradient(begin), static_cast<float>(factor(0)), &first(begin),
            &second(begin), step, std::min(part_length, length - begin));
    });
    return;
  }
  Kokkos::parallel_for(
      "kvzap::train::adamw", Range(exec, 0, length), KOKKOS_LAMBDA(std::int64_t i) {
        const float g = gradient(i) * static_cast<float>(factor(0));
        const float m = first(i) + (1.0f - step.beta1) * (g - first(i));
        const float v = step.beta2 * second(i) + (1.0f - step.beta2) * g * g;
        first(i) = m;
        second(i) = v;
        parameters(i) = parameters(i) * step.decay -
                        step.rate * m / (base::math::sqrt(v) * step.root + step.epsilon);
      });
}

}  // namespace kvzap::train
