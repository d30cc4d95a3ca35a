#include "linalg/host/blas_threads.hpp"

#include <dlfcn.h>

#include <Kokkos_Core.hpp>
#include <cstdlib>
#include <initializer_list>

namespace kvzap::detail {

void set_blas_threads(int threads) {
  for (const char* name :
       {"OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "OMP_NUM_THREADS"}) {
    if (std::getenv(name)) return;
  }
  // Which BLAS is behind libblas.so is the system's choice at run time, so its setter is looked up,
  // not linked.
  using Setter = void (*)(int);
  // oneDNN follows the OpenMP run time that it was built with.
  if (Kokkos::DefaultHostExecutionSpace().concurrency() == 1) {
    if (void* found = dlsym(RTLD_DEFAULT, "omp_set_num_threads")) {
      reinterpret_cast<Setter>(found)(threads);
    }
  }
  for (const char* name :
       {"openblas_set_num_threads", "MKL_Set_Num_Threads", "bli_thread_set_num_threads"}) {
    if (void* found = dlsym(RTLD_DEFAULT, name)) {
      reinterpret_cast<Setter>(found)(threads);
      return;
    }
  }
}

}  // namespace kvzap::detail
