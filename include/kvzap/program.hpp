// The program kvzap as a function, for programs with policies of their own.
#pragma once

namespace kvzap {

/// Runs the program kvzap on the arguments of main: each of its commands, on all ranks. Policies
/// that were added before (kvzap::add_policy in kvzap/engine/policies.hpp) are among its own, in
/// `run`, `serve`, `eval` and `policies`. MPI and Kokkos must not run yet, for it starts and ends
/// them. Returns 0. A failure ends the process with the program's exit status.
///
/// Link kvzap::program.
int run_program(int argc, char** argv);

}  // namespace kvzap
