#include "policy/softmax.hpp"

#include <algorithm>

#include "base/host_threads.hpp"
#include "base/soft_cap.hpp"
#include "linalg/host/row_kernels.hpp"
#include "policy/row_math.hpp"

namespace kvzap::policy {

using linalg::Matrix;

void apply_softmax(const ExecutionSpace& exec, const Softmax& softmax) {
  const Matrix logits = softmax.logits;
  const auto queries = static_cast<std::int64_t>(logits.extent(0));
  const auto rows = static_cast<std::int64_t>(logits.extent(1));
  if (base::machine().on_host()) {
    base::host_for("kvzap::policy::softmax", queries, 8 * rows, [=](std::int64_t q) {
      float* const x = &logits(q, 0);
      const std::int64_t count = softmax.seen(q);
      if (softmax.cap > 0) linalg::soft_cap(x, count, softmax.cap);
      const float most = std::max(linalg::max_of(x, count), softmax.sink(q));
      const float sum = linalg::exp_shifted(x, count, most) + std::exp(softmax.sink(q) - most);
      for (std::int64_t r = 0; r < count; ++r) x[r] /= sum;
      std::fill(x + count, x + rows, 0.0f);
    });
    return;
  }
  using Team = Kokkos::TeamPolicy<ExecutionSpace>;
  Kokkos::parallel_for(
      "kvzap::policy::softmax", Team(exec, static_cast<int>(queries), Kokkos::AUTO),
      KOKKOS_LAMBDA(const typename Team::member_type& team) {
        const std::int64_t q = team.league_rank();
        float* const x = &logits(q, 0);
        const std::int64_t count = softmax.seen(q);
        if (softmax.cap > 0) {
          Kokkos::parallel_for(Kokkos::TeamThreadRange(team, count), [&](std::int64_t r) {
            x[r] = base::soft_capped(x[r], softmax.cap);
          });
          team.team_barrier();
        }
        const float sink = softmax.sink(q);
        float most = largest_of(team, x, count);
        if (sink > most) most = sink;
        const float sum =
            exponentials_of<float>(team, x, count, most) + base::math::exp(sink - most);
        Kokkos::parallel_for(Kokkos::TeamThreadRange(team, rows),
                             [&](std::int64_t r) { x[r] = r < count ? x[r] / sum : 0.0f; });
      });
}

}  // namespace kvzap::policy
