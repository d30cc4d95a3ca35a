// Ranks that wait for one another for as long as a person thinks.
#pragma once

#include <kvzap/core/communicator.hpp>

namespace kvzap::detail {

/// As Communicator::barrier where rank 0 may be minutes late: the others sleep meanwhile, in naps
/// of two milliseconds, in place of asking all the time. Collective.
void meet_asleep(const Communicator& comm);

}  // namespace kvzap::detail
