#include "linalg/host/blas_threads.hpp"

#include <dlfcn.h>

#include <Kokkos_Core.hpp>
#include <cstddef>
#include <cstdlib>
#include <initializer_list>

#include "base/address_space.hpp"

namespace kvzap::linalg {
namespace {

// OpenBLAS maps a buffer of this size for each thread, and asks forever if it gets none.
constexpr std::size_t openblas_buffer_bytes = std::size_t{128} << 20;

bool is_openblas() { return dlsym(RTLD_DEFAULT, "openblas_set_num_threads") != nullptr; }

}  // namespace

void expect_room_for_blas() {
  [[maybe_unused]] static const bool found = [] {
    if (is_openblas()) base::expect_address_space(openblas_buffer_bytes, "OpenBLAS");
    return true;
  }();
}

void set_blas_threads(int threads) {
  // The system chooses the BLAS behind libblas.so at run time, so its setter is looked up and not
  // linked.
  using Setter = void (*)(int);
  // oneDNN uses the OpenMP run time that it was built with.
  if (Kokkos::DefaultHostExecutionSpace().concurrency() == 1) {
    if (void* found = dlsym(RTLD_DEFAULT, "omp_set_num_threads")) {
      reinterpret_cast<Setter>(found)(threads);
    }
  }
  struct Library {
    const char* setter;
    const char* variable;
  };
  for (const auto& [setter, variable] :
       {Library{"openblas_set_num_threads", "OPENBLAS_NUM_THREADS"},
        {"MKL_Set_Num_Threads", "MKL_NUM_THREADS"},
        {"bli_thread_set_num_threads", "BLIS_NUM_THREADS"}}) {
    void* const found = dlsym(RTLD_DEFAULT, setter);
    if (!found) continue;
    if (std::getenv(variable)) return;
    // Each new thread takes its buffer at once.
    if (threads > 1 && is_openblas() &&
        !base::has_address_space(static_cast<std::size_t>(threads) * openblas_buffer_bytes)) {
      threads = 1;
    }
    reinterpret_cast<Setter>(found)(threads);
    return;
  }
}

}  // namespace kvzap::linalg
