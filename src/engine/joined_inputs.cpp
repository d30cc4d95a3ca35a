#include "engine/joined_inputs.hpp"

#include "base/launch.hpp"

namespace kvzap::engine {

using linalg::Matrix;

void JoinedInputs::reserve(Step& step) {
  base::reserve_scratch(m_embedding, step.tokens() * step.config.hidden_size,
                        "kvzap::decoder::embedding");
}

void JoinedInputs::take_embedding(const Step& step) {
  const Matrix to(m_embedding.data(), step.h.extent(0), step.h.extent(1));
  base::launch([exec = step.exec, to, from = step.h] { Kokkos::deep_copy(exec, to, from); });
}

void JoinedInputs::join(const Step& step, const RowRange& rows, const Matrix& x) const {
  const std::int64_t hidden = step.config.hidden_size;
  const auto own = range(rows.begin, rows.end);
  const Matrix embedding(m_embedding.data() + rows.begin * hidden, rows.count(), hidden);
  const Matrix h = Kokkos::subview(step.h, own, Kokkos::ALL);
  base::launch([exec = step.exec, x, h, embedding, hidden] {
    Kokkos::deep_copy(exec, Kokkos::subview(x, Kokkos::ALL, range(0, hidden)), h);
    Kokkos::deep_copy(exec, Kokkos::subview(x, Kokkos::ALL, range(hidden, 2 * hidden)), embedding);
  });
}

}  // namespace kvzap::engine
