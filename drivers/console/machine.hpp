// Description of the machine, for reports.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace kvzap::driver {

struct Machine {
  std::string backend;  // Kokkos' execution space
  int concurrency = 1;
  std::string processor;
  std::string simd;           // instruction set of the inner loops
  std::string byte_products;  // of few rows with quantised weights
  std::string kokkos;
  std::string mpi;
  std::string compiler;
};

/// Describes the machine of this process. Kokkos must be initialized.
Machine describe_machine();

/// Returns the field `system` of reports.
nlohmann::ordered_json system_json(const Machine& machine, int ranks);

}  // namespace kvzap::driver
