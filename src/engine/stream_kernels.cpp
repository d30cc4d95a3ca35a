#include "engine/stream_kernels.hpp"

#include <cmath>

#include "base/host_threads.hpp"
#include "base/kokkos_compat.hpp"
#include "base/launch.hpp"
#include "base/machine.hpp"
#include "base/team.hpp"

namespace kvzap::engine {
namespace {

using Team = Kokkos::TeamPolicy<ExecutionSpace>;
using TeamMember = typename Team::member_type;

constexpr int stream_threads = 256;  // of a team that processes one row

Team team_of_rows(const ExecutionSpace& exec, std::int64_t rows) {
  const base::TeamShape shape = base::team_shape({stream_threads, 1});
  return Team(exec, static_cast<int>(rows), shape.threads, shape.lanes);
}

/// Calls work(row, column) for all elements.
template <class Work>
void for_elements(const char* label, const ExecutionSpace& exec, std::int64_t rows,
                  std::int64_t columns, const Work& work) {
  if (rows == 0 || columns == 0) return;
  if (base::machine().on_host()) {
    return base::host_for(label, rows, columns, [=](std::int64_t row) {
      for (std::int64_t c = 0; c < columns; ++c) work(row, c);
    });
  }
  base::parallel_for(
      label,
      Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>(exec, 0, rows * columns),
      KOKKOS_LAMBDA(std::int64_t i) { work(i / columns, i % columns); });
}

/// Calls store(row, sum over columns of term(row, column)) for all rows. Hosts sum in double.
template <class Term, class Store>
void sum_columns(const char* label, const ExecutionSpace& exec, std::int64_t rows,
                 std::int64_t columns, const Term& term, const Store& store) {
  if (rows == 0) return;
  if (base::machine().on_host()) {
    return base::host_for(label, rows, columns, [=](std::int64_t row) {
      double sum = 0;
      for (std::int64_t c = 0; c < columns; ++c) sum += term(row, c);
      store(row, static_cast<float>(sum));
    });
  }
  base::parallel_for(
      label, team_of_rows(exec, rows), KOKKOS_LAMBDA(const TeamMember& team) {
        const std::int64_t row = team.league_rank();
        float sum = 0;
        Kokkos::parallel_reduce(
            Kokkos::TeamThreadRange(team, columns),
            [&](std::int64_t c, float& partial) { partial += term(row, c); }, sum);
        Kokkos::single(Kokkos::PerTeam(team), [&] { store(row, sum); });
      });
}

}  // namespace

void join_inputs(const ExecutionSpace& exec, const InputsOfLayer& inputs,
                 const linalg::Matrix& joined) {
  const InputsOfLayer from = inputs;
  const std::int64_t columns = from.gates.extent(1);
  for_elements(
      "kvzap::streams::join", exec, joined.extent(0), columns,
      KOKKOS_LAMBDA(std::int64_t row, std::int64_t c) {
        joined(row, c) = from.gates(row, c);
        joined(row, columns + c) =
            (from.projected(row, from.first + c) + from.table_scale * from.table(row, c)) *
            from.scale;
      });
}

void sum_rows(const ExecutionSpace& exec, const linalg::ConstMatrix& x, std::int64_t columns,
              const linalg::ConstMatrix& means, bool squares, const linalg::Matrix& sums) {
  const bool has_means = means.extent(0) > 0;
  sum_columns(
      "kvzap::streams::sum", exec, x.extent(0), columns,
      KOKKOS_LAMBDA(std::int64_t row, std::int64_t c) {
        const float own = x(row, c) - (has_means ? means(row, 0) : 0.0f);
        return squares ? own * own : own;
      },
      KOKKOS_LAMBDA(std::int64_t row, float sum) { sums(row, 0) = sum; });
}

void cut_rows(const ExecutionSpace& exec, const linalg::Matrix& x, std::int64_t columns,
              const linalg::ConstMatrix& means, const linalg::ConstMatrix& variances,
              float cutoff) {
  for_elements(
      "kvzap::streams::cut", exec, x.extent(0), columns,
      KOKKOS_LAMBDA(std::int64_t row, std::int64_t c) {
        const float least = means(row, 0) + cutoff * base::math::sqrt(variances(row, 0));
        const float value = x(row, c) - least;
        x(row, c) = value < 0 ? 0.0f : value;  // a NaN stays
      });
}

void tanh_rows(const ExecutionSpace& exec, const linalg::Matrix& x) {
  for_elements(
      "kvzap::streams::tanh", exec, x.extent(0), x.extent(1),
      KOKKOS_LAMBDA(std::int64_t row, std::int64_t c) { x(row, c) = base::math::tanh(x(row, c)); });
}

void mix_streams(const ExecutionSpace& exec, const StreamRows& streams,
                 const linalg::ConstMatrix& factors, std::int64_t active, const linalg::Matrix& h) {
  const StreamRows all = streams;
  for_elements(
      "kvzap::streams::mix", exec, all.rows, all.columns,
      KOKKOS_LAMBDA(std::int64_t row, std::int64_t c) {
        float before[AltUpConfig::most_streams];
        for (std::int64_t s = 0; s < all.streams; ++s) before[s] = all.at(s, row)[c];
        for (std::int64_t i = 0; i < all.streams; ++i) {
          float sum = 0;
          for (std::int64_t j = 0; j < all.streams; ++j) {
            sum += factors(row, i * all.streams + j) * before[j];
          }
          all.at(i, row)[c] = before[i] + sum;
        }
        h(row, c) = all.at(active, row)[c];
      });
}

void correct_streams(const ExecutionSpace& exec, const StreamRows& streams,
                     const linalg::ConstMatrix& factors, std::int64_t active,
                     const linalg::ConstVector& scale, const linalg::Matrix& h) {
  const StreamRows all = streams;
  const bool scales = scale.extent(0) > 0;
  for_elements(
      "kvzap::streams::correct", exec, all.rows, all.columns,
      KOKKOS_LAMBDA(std::int64_t row, std::int64_t c) {
        const float change = h(row, c) - all.at(active, row)[c];
        for (std::int64_t s = 0; s < all.streams; ++s) {
          all.at(s, row)[c] += (1.0f + factors(row, s)) * change;
        }
        h(row, c) = all.at(active, row)[c] * (scales ? scale(c) : 1.0f);
      });
}

void match_magnitude(const ExecutionSpace& exec, const linalg::ConstMatrix& like,
                     const linalg::Matrix& x) {
  constexpr float least = 1e-5f;
  const std::int64_t rows = x.extent(0), columns = x.extent(1);
  if (rows == 0) return;
  if (base::machine().on_host()) {
    return base::host_for("kvzap::streams::match", rows, columns, [=](std::int64_t row) {
      double wanted = 0, own = 0;
      for (std::int64_t c = 0; c < columns; ++c) {
        wanted += like(row, c) * like(row, c);
        own += x(row, c) * x(row, c);
      }
      const double floor = least * static_cast<double>(columns);
      const auto factor = static_cast<float>(std::sqrt(wanted / (own < floor ? floor : own)));
      for (std::int64_t c = 0; c < columns; ++c) x(row, c) *= factor;
    });
  }
  base::parallel_for(
      "kvzap::streams::match", team_of_rows(exec, rows), KOKKOS_LAMBDA(const TeamMember& team) {
        const std::int64_t row = team.league_rank();
        float wanted = 0, own = 0;
        Kokkos::parallel_reduce(
            Kokkos::TeamThreadRange(team, columns),
            [&](std::int64_t c, float& sum) { sum += like(row, c) * like(row, c); }, wanted);
        Kokkos::parallel_reduce(
            Kokkos::TeamThreadRange(team, columns),
            [&](std::int64_t c, float& sum) { sum += x(row, c) * x(row, c); }, own);
        const float floor = least * static_cast<float>(columns);
        const float factor = base::math::sqrt(wanted / (own < floor ? floor : own));
        Kokkos::parallel_for(Kokkos::TeamThreadRange(team, columns),
                             [&](std::int64_t c) { x(row, c) *= factor; });
      });
}

}  // namespace kvzap::engine
