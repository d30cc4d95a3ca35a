// Description of the machine, for reports.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace kvzap::driver {

struct Machine {
  std::string backend;  // Kokkos' execution space
  int concurrency = 1;
  std::string processor;
  std::string simd;                               // instruction set of the inner loops
  std::string byte_products;                      // of rows with quantised weights
  std::optional<std::int64_t> byte_product_rows;  // the most that take them; none: any number
  std::string kokkos;
  std::string mpi;
  std::string compiler;
};

/// Describes the machine of this process. Kokkos must be initialized.
Machine describe_machine();

/// Returns the field `system` of reports.
nlohmann::ordered_json system_json(const Machine& machine, int ranks);

}  // namespace kvzap::driver
