#include "console/machine.hpp"

#include <fstream>
#include <kvzap/core/threads.hpp>
#include <kvzap/core/types.hpp>

#include "base/byte_products.hpp"
#include "base/kokkos_compat.hpp"
#include "base/simd.hpp"
#include "engine/build_info.hpp"
#include "linalg/quantised/products.hpp"

namespace kvzap::driver {
namespace {

std::string processor_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const auto colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) {
      return line.substr(colon + 2);
    }
  }
  return "unknown";
}

}  // namespace

Machine describe_machine() {
  Machine machine;
  machine.backend = ExecutionSpace::name();
  machine.concurrency =
      base::runs_on_host ? threads() : static_cast<int>(ExecutionSpace().concurrency());
  machine.processor = processor_name();
  machine.simd = base::name_of(base::machine().simd());
  machine.byte_products = base::name_of(base::byte_products());
  const std::int64_t most_rows = linalg::quantised::most_rows_by_blocks();
  if (most_rows < linalg::quantised::any_rows) machine.byte_product_rows = most_rows;
  machine.kokkos = engine::kokkos_version();
  machine.mpi = engine::mpi_library();
  machine.compiler = engine::compiler_name();
  return machine;
}

nlohmann::ordered_json system_json(const Machine& machine, int ranks) {
  return {{"backend", machine.backend},
          {"concurrency", machine.concurrency},
          {"ranks", ranks},
          {"processor", machine.processor},
          {"simd", machine.simd},
          {"byte_products", machine.byte_products},
          {"byte_product_rows", machine.byte_product_rows
                                    ? nlohmann::ordered_json(*machine.byte_product_rows)
                                    : nlohmann::ordered_json()},
          {"kokkos", machine.kokkos},
          {"mpi", machine.mpi},
          {"compiler", machine.compiler}};
}

}  // namespace kvzap::driver
