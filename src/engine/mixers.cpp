#include "engine/mixers.hpp"

#include "engine/step_kernels.hpp"

namespace kvzap::engine {

void norm_inputs(Step& step, const linalg::Matrix& x, const linalg::ConstVector& weights, float eps,
                 std::int64_t columns, const linalg::Matrix& sums) {
  const auto own = static_cast<std::int64_t>(x.extent(1));
  step.locally([&] { sum_squares(step.exec, x, own, 0, sums); });
  step.exchange.sum(step.exec, step.comm, sums);
  step.locally([&] { norm_rows(step.exec, x, sums, {weights, {}, columns, 1, eps}); });
}

}  // namespace kvzap::engine
