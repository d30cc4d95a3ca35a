// The components of this build, for --version and for reports of measurements.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace kvzap::engine {

/// Returns the version of Kokkos, such as "3.4.1".
std::string kokkos_version();
/// Returns name and version of the compiler that built the library, or "unknown".
std::string compiler_name();
/// Returns the MPI library's own name and version without the packager's additions, or "none".
std::string mpi_library();
/// Returns the library that computes dense products on the host at run time, or "none".
std::string blas_library();

/// Returns each component with its description, in the order for printing: Kokkos with its
/// backends, Kokkos Kernels, MPI, HDF5, BLAS, oneDNN, instruction set, compiler.
std::vector<std::pair<std::string, std::string>> build_info();

}  // namespace kvzap::engine
