// Flags that the program passes to Kokkos.
#pragma once

#include <string>

namespace kvzap::driver {

/// Returns the error in a flag that begins with --kokkos-, or "". Kokkos itself would ignore the
/// flag.
std::string fault_of_kokkos_flag(const std::string& flag);

}  // namespace kvzap::driver
