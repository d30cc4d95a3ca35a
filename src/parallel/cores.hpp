// Cores that processes may use.
#pragma once

namespace kvzap::detail {

/// Cores of the node that its containers' limits leave to all ranks together: those that the first
/// process of the container may run on, and no more than the quota of time. At least 1.
int cores_of_node();

}  // namespace kvzap::detail
