#include "engine/build_info.hpp"

#include <KokkosKernels_config.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include <Kokkos_Core.hpp>
#include <cstdlib>
#include <kvzap/config.hpp>
#include <kvzap/core/types.hpp>
#include <memory>

#include "base/machine.hpp"
#include "linalg/host/onednn.hpp"
#include "linalg/quantised/products.hpp"
#include "parallel/gpu_aware.hpp"
#include "parallel/nccl_ranks.hpp"

#if KVZAP_HAVE_MPI
#include <mpi.h>
#endif
#if KVZAP_HAVE_HDF5
#include <hdf5.h>
#endif

namespace kvzap::engine {
namespace {

std::string version_text(int number) {
  return fmt::format("{}.{}.{}", number / 10000, number / 100 % 100, number % 100);
}

std::string kokkos_backends() {
  std::string names;
  [[maybe_unused]] const auto add = [&](const char* name) {
    names += names.empty() ? name : fmt::format(", {}", name);
  };
#ifdef KOKKOS_ENABLE_CUDA
  add("Cuda");
#endif
#ifdef KOKKOS_ENABLE_HIP
  add("HIP");
#endif
#ifdef KOKKOS_ENABLE_SYCL
  add("SYCL");
#endif
#ifdef KOKKOS_ENABLE_OPENMP
  add("OpenMP");
#endif
#ifdef KOKKOS_ENABLE_THREADS
  add("Threads");
#endif
#ifdef KOKKOS_ENABLE_SERIAL
  add("Serial");
#endif
  return fmt::format("{} (default {})", names, ExecutionSpace::name());
}

std::string kokkos_kernels_version() {
#ifdef KOKKOSKERNELS_VERSION
  return version_text(KOKKOSKERNELS_VERSION);
#else
  return "of the same release";  // version 3.4 does not name the release
#endif
}

std::string mpi_text() {
  if (!KVZAP_HAVE_MPI) return "none, one rank";
  return fmt::format("{}, {}GPU-aware", mpi_library(), parallel::mpi_is_gpu_aware() ? "" : "not ");
}

std::string hdf5_text() {
#if KVZAP_HAVE_HDF5
  unsigned major = 0, minor = 0, release = 0;
  H5get_libversion(&major, &minor, &release);
#ifdef H5_HAVE_PARALLEL
  const char* kind = "parallel";
#else
  const char* kind = "serial";
#endif
  return fmt::format("{}.{}.{}, {}", major, minor, release, kind);
#else
  return "none, no snapshots";
#endif
}

}  // namespace

std::string compiler_name() {
#if defined(__clang__)
  return __VERSION__;
#elif defined(__GNUC__)
  return fmt::format("GCC {}", __VERSION__);
#else
  return "unknown";
#endif
}

std::string kokkos_version() { return version_text(KOKKOS_VERSION); }

std::string mpi_library() {
#if KVZAP_HAVE_MPI
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  MPI_Get_library_version(text, &length);
  // Text after the first comma or line is the packager's.
  const std::string name(text, length);
  return name.substr(0, name.find_first_of(",\n"));
#else
  return "none";
#endif
}

std::string blas_library() {
#ifdef KOKKOSKERNELS_ENABLE_TPL_BLAS
  // At run time the system chooses the BLAS behind libblas.so, so this process asks for it.
  if (void* found = dlsym(RTLD_DEFAULT, "openblas_get_config")) {
    const std::string config = reinterpret_cast<char* (*)()>(found)();
    // "OpenBLAS 0.3.21 NO_LAPACK DYNAMIC_ARCH ..."
    const auto name = config.find(' ');
    return config.substr(0, name == std::string::npos ? name : config.find(' ', name + 1));
  }
  void* const gemm = dlsym(RTLD_DEFAULT, "sgemm_");
  Dl_info info{};
  if (!gemm || !dladdr(gemm, &info) || !info.dli_fname) return "linked statically";
  const std::unique_ptr<char, decltype(&std::free)> path(realpath(info.dli_fname, nullptr),
                                                         &std::free);
  return path ? path.get() : info.dli_fname;
#else
  return "none";
#endif
}

std::vector<std::pair<std::string, std::string>> build_info() {
  return {
      {"Kokkos", fmt::format("{}, {}", kokkos_version(), kokkos_backends())},
      {"Kokkos Kernels", kokkos_kernels_version()},
      {"MPI", mpi_text()},
      {"NCCL", parallel::NcclRanks::version()},
      {"HDF5", hdf5_text()},
      {"BLAS", blas_library()},
      {"oneDNN", linalg::onednn::is_available() ? linalg::onednn::version() : "none"},
      {"instruction set", std::string(name_of(base::machine().simd()))},
      {"byte products", linalg::quantised::byte_products_text()},
      {"compiler", compiler_name()},
  };
}

}  // namespace kvzap::engine
