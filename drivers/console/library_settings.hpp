// Settings that libraries read before main.
#pragma once

namespace kvzap::driver {

/// Returns the environment to the user's own. A function that runs before all constructors has put
/// settings for libgomp and OpenBLAS into it. If it could not, runs the program again, once, with
/// these settings. Variables that the user has set keep their values. Returns if the settings are
/// in force, or if the program cannot be run again.
void settle_library_settings(char** argv);

}  // namespace kvzap::driver
