// Whether a launcher of MPI has started this process.
#pragma once

namespace kvzap::driver {

/// Returns the number of ranks that a launcher (mpirun, srun) started together, as far as its
/// environment tells; 0 without one.
int launched_ranks();

}  // namespace kvzap::driver
