// The number of cores that processes may use.
#pragma once

namespace kvzap::detail {

/// Returns the cores of the node that its container leaves to all ranks together: those that the
/// container's first process may run on, limited by the quota of CPU time. At least 1.
int cores_of_node();

}  // namespace kvzap::detail
