#include "parallel/gpu_aware.hpp"

#include <cstdlib>
#include <kvzap/config.hpp>
#include <kvzap/core/types.hpp>

#if KVZAP_HAVE_MPI
#include <mpi.h>
#if defined(OPEN_MPI) || defined(MPICH) || defined(MVAPICH2_VERSION)
#if __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif
#endif
#endif

namespace kvzap::parallel {
namespace {

// ExecutionSpace::name() differs between versions of Kokkos.
#if defined(KOKKOS_ENABLE_CUDA)
constexpr std::string_view backend_of_build = "Cuda";
constexpr const char* variable_of_backend = "MV2_USE_CUDA";
#elif defined(KOKKOS_ENABLE_HIP)
constexpr std::string_view backend_of_build = "HIP";
constexpr const char* variable_of_backend = "MV2_USE_ROCM";
#elif defined(KOKKOS_ENABLE_SYCL)
constexpr std::string_view backend_of_build = "SYCL";
constexpr const char* variable_of_backend = "I_MPI_OFFLOAD";
#else
constexpr std::string_view backend_of_build = "host";
constexpr const char* variable_of_backend = "";
#endif

[[maybe_unused]] bool is_switched_on(const char* variable) {
  const char* const value = std::getenv(variable);
  return value && std::string_view(value) == "1";
}

#if KVZAP_HAVE_MPI && defined(MPIX_GPU_SUPPORT_CUDA)
// The query of MPICH, for all kinds of GPU.
std::optional<bool> ask(int kind) {
  int is_supported = 0;
  if (MPIX_GPU_query_support(kind, &is_supported) != MPI_SUCCESS) return std::nullopt;
  return is_supported != 0;
}
#endif

}  // namespace

bool takes_device_memory(std::string_view backend, const GpuAnswers& answers) {
  std::optional<bool> answer;
  if (backend == "Cuda") {
    answer = answers.cuda;
  } else if (backend == "HIP") {
    answer = answers.rocm;
  } else if (backend == "SYCL") {
    answer = answers.level_zero;
  } else {
    return false;
  }
  return answer.value_or(answers.variable);
}

GpuAnswers ask_mpi() {
  GpuAnswers answers;
#if KVZAP_HAVE_MPI
#if defined(MPIX_GPU_SUPPORT_CUDA)
  answers.cuda = ask(MPIX_GPU_SUPPORT_CUDA);
#elif defined(MPIX_CUDA_AWARE_SUPPORT)
  answers.cuda = MPIX_Query_cuda_support() == 1;
#endif
#if defined(MPIX_GPU_SUPPORT_HIP)
  answers.rocm = ask(MPIX_GPU_SUPPORT_HIP);
#elif defined(MPIX_ROCM_AWARE_SUPPORT)
  answers.rocm = MPIX_Query_rocm_support() == 1;
#endif
#if defined(MPIX_GPU_SUPPORT_ZE)
  answers.level_zero = ask(MPIX_GPU_SUPPORT_ZE);
#elif defined(MPIX_ZE_AWARE_SUPPORT)
  answers.level_zero = MPIX_Query_ze_support() == 1;
#endif
  // Cray's MPICH has no query, but is built for the GPU of its machine. MVAPICH2 has a variable for
  // each kind of GPU; Intel's MPI has one that stands for Level Zero.
  answers.variable =
      is_switched_on("MPICH_GPU_SUPPORT_ENABLED") || is_switched_on(variable_of_backend);
#endif
  return answers;
}

bool mpi_is_gpu_aware() { return takes_device_memory(backend_of_build, ask_mpi()); }

}  // namespace kvzap::parallel
