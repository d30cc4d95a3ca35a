#include "console/launcher.hpp"

#include <algorithm>
#include <cstdlib>

namespace kvzap::driver {

int launched_ranks() {
  int ranks = 0;
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE",
                           "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS"}) {
    const char* const size = std::getenv(name);
    if (size) ranks = std::max({ranks, 1, std::atoi(size)});
  }
  return ranks;
}

}  // namespace kvzap::driver
