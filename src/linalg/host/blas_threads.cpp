#include "linalg/host/blas_threads.hpp"

#include <dlfcn.h>

#include <Kokkos_Core.hpp>
#include <cstdlib>
#include <initializer_list>

namespace kvzap::detail {

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
    if (!std::getenv(variable)) reinterpret_cast<Setter>(found)(threads);
    return;
  }
}

}  // namespace kvzap::detail
