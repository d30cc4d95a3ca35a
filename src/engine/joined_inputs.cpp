#include "engine/joined_inputs.hpp"

namespace kvzap::engine {

using linalg::Matrix;

void JoinedInputs::reserve(Step& step) {
  base::reserve_scratch(m_embedding, step.tokens() * step.config.hidden_size,
                        "kvzap::decoder::embedding");
}

void JoinedInputs::take_embedding(const Step& step) {
  Kokkos::deep_copy(step.exec, Matrix(m_embedding.data(), step.h.extent(0), step.h.extent(1)),
                    step.h);
}

void JoinedInputs::join(const Step& step, const RowRange& rows, const Matrix& x) const {
  const std::int64_t hidden = step.config.hidden_size;
  const auto own = range(rows.begin, rows.end);
  const Matrix embedding(m_embedding.data() + rows.begin * hidden, rows.count(), hidden);
  Kokkos::deep_copy(step.exec, Kokkos::subview(x, Kokkos::ALL, range(0, hidden)),
                    Kokkos::subview(step.h, own, Kokkos::ALL));
  Kokkos::deep_copy(step.exec, Kokkos::subview(x, Kokkos::ALL, range(hidden, 2 * hidden)),
                    embedding);
}

}  // namespace kvzap::engine
