// What this build consists of, for --version and for reports of measurements.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace kvzap::detail {

/// "3.4.1", say.
std::string kokkos_version();
/// Name and version of the compiler that the library was built with, or "unknown".
std::string compiler_name();
/// The MPI library's own name and version without the packager's additions, or "none".
std::string mpi_library();
/// Which library does the host's dense products, as it is found at run time, or "none".
std::string blas_library();

/// Component and description, in the order in which to print them: Kokkos with its backends, Kokkos
/// Kernels, MPI, HDF5, BLAS, oneDNN, instruction set, compiler.
std::vector<std::pair<std::string, std::string>> build_info();

}  // namespace kvzap::detail
