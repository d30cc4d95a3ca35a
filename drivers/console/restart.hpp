// Settings that libraries read before main.
#pragma once

namespace kvzap::driver {

/// Runs the program again with settings that libgomp and OpenBLAS read while they are loaded, once:
/// later changes have no effect on them. Variables that the user has set stay. Returns in the
/// second run, and where the program cannot be run again.
void restart_with_settings(char** argv);

}  // namespace kvzap::driver
