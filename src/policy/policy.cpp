#include <algorithm>
#include <kvzap/engine/policy.hpp>

namespace kvzap {

std::int64_t PolicyLayer::most_rows() const {
  const auto& rows = m_extents.rows;
  return rows.empty() ? 0 : *std::max_element(rows.begin(), rows.end());
}

Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> Policy::context_scores(
    const ExecutionSpace& /*exec*/, const Communicator& /*comm*/, int /*layer*/) {
  throw Error("policy: it does not look at how the context is repeated");
}

}  // namespace kvzap
