// The norm of W_O v: the size of a row's contribution to the residual stream.
#pragma once

#include <kvzap/engine/policy.hpp>
#include <vector>

#include "linalg/gemm.hpp"

namespace kvzap::policy {

/// ||W_O v|| of the values of a KV head, for each query head of its group. For each query head, its
/// part of W_O is reduced once to the triangular factor R of a QR decomposition (||W_O v|| = ||R
/// v||). So a value costs head_dim^2 instead of head_dim * hidden_size operations. The factors of
/// all requested layers are kept: head_dim * min(head_dim, hidden_size) floats for each query head
/// on this rank. An object may serve several sequences in turn, for one model and one head
/// partition.
class OutputNorms {
 public:
  /// Sets norms (query head of the group, row) of rows begin … begin + count - 1 of `head` (on this
  /// rank). A norm is NaN or infinite if the value or W_O is.
  void operator()(PolicyLayer& layer, int head, std::int64_t begin, std::int64_t count,
                  const linalg::Matrix& norms);

 private:
  using Factor = Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>;

  const Factor& factor(PolicyLayer& layer, int head);

  std::vector<std::vector<Factor>> m_factors;  // [layer][KV head on this rank], for its group
  linalg::Vector m_products;                   // scratch
};

}  // namespace kvzap::policy
