// A barrier for ranks that wait for a person's input.
#pragma once

#include <kvzap/core/communicator.hpp>

namespace kvzap::parallel {

/// Waits for all ranks, as Communicator::barrier does, when rank 0 may be minutes late. The other
/// ranks poll every two milliseconds and sleep between, instead of spinning. Collective.
void meet_asleep(const Communicator& comm);

}  // namespace kvzap::parallel
