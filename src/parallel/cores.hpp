// The number of cores that processes may use.
#pragma once

namespace kvzap::parallel {

/// Returns the number of cores that the container gives all ranks of the node together. These are
/// the cores on which the container's first process may run, limited by the quota of CPU time. At
/// least 1.
int cores_of_node();

}  // namespace kvzap::parallel
