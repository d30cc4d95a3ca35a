// How much each row of a KV head writes into the residual stream: the norm of W_O v.
#pragma once

#include <kvzap/engine/policy.hpp>
#include <vector>

#include "linalg/gemm.hpp"

namespace kvzap::policy {

/// ||W_O v|| of the values of a KV head, for each query head of its group. W_O's part of a query
/// head is reduced once, to the triangular factor R of a QR decomposition (||W_O v|| = ||R v||), so
/// that a value costs head_dim^2 instead of head_dim * hidden_size operations. Factors are kept for
/// all layers that were asked for: head_dim * min(head_dim, hidden_size) floats for each query head
/// on this rank. An object may serve several sequences one after the other, of one model and one
/// partition of its heads.
class OutputNorms {
 public:
  /// norms (query head of the group, row) of rows begin … begin + count - 1 of `head` (on this
  /// rank). NaN or infinite where the value or W_O is.
  void operator()(PolicyLayer& layer, int head, std::int64_t begin, std::int64_t count,
                  const detail::Matrix& norms);

 private:
  using Factor = Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>;

  const Factor& factor(PolicyLayer& layer, int head);

  std::vector<std::vector<Factor>> m_factors;  // [layer][KV head on this rank], of its group
  detail::Vector m_products;                   // scratch
};

}  // namespace kvzap::policy
