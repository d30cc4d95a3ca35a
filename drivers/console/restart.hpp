// Settings that libraries read before main.
#pragma once

namespace kvzap::driver {

/// Runs the program again, once, with settings that libgomp and OpenBLAS read only while they are
/// loaded. Variables that the user has set keep their values. Returns in the second process, and if
/// the program cannot be run again.
void restart_with_settings(char** argv);

}  // namespace kvzap::driver
