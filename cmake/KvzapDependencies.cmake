# Finds what kvzap builds on and wraps each package that has no CMake target of its own.
#   kvzap_kokkos    Kokkos and Kokkos Kernels, either generation (see below)
#   kvzap_hdf5      parallel HDF5
#   kvzap_pcre2     PCRE2, 8-bit code units
#   kvzap_utf8proc  utf8proc (Unicode normal forms)

find_package(MPI REQUIRED COMPONENTS CXX)
find_package(Threads REQUIRED)

# Kokkos bridge. Kokkos Kernels 4 and newer exports Kokkos::kokkoskernels. The 3.4 of
# Debian's and Ubuntu's Trilinos packages sets KokkosKernels_LIBRARIES and
# KokkosKernels_INCLUDE_DIRS, and has no Kokkos::kokkos target. Its config also overwrites CMAKE
# variables through includes, so that it is read in a function of its own.
add_library(kvzap_kokkos INTERFACE)
find_package(KokkosKernels REQUIRED)
if(TARGET Kokkos::kokkoskernels)
  target_link_libraries(kvzap_kokkos INTERFACE Kokkos::kokkoskernels Kokkos::kokkos)
  message(STATUS "kvzap: Kokkos by its exported targets")
else()
  target_include_directories(kvzap_kokkos SYSTEM INTERFACE ${KokkosKernels_INCLUDE_DIRS})
  target_link_libraries(kvzap_kokkos INTERFACE ${KokkosKernels_LIBRARIES} dl)
  message(STATUS "kvzap: Kokkos of the distribution's Trilinos packages")
endif()

# Products on CUDA devices go to cuBLAS.
if("CUDA" IN_LIST Kokkos_DEVICES)
  find_package(CUDAToolkit REQUIRED)
  add_library(kvzap_cublas INTERFACE)
  target_link_libraries(kvzap_cublas INTERFACE CUDA::cublas)
  message(STATUS "kvzap: cuBLAS of the CUDA toolkit ${CUDAToolkit_VERSION}")
endif()

find_package(PkgConfig REQUIRED)

pkg_check_modules(KVZAP_PCRE2 REQUIRED IMPORTED_TARGET libpcre2-8)
add_library(kvzap_pcre2 INTERFACE)
target_link_libraries(kvzap_pcre2 INTERFACE PkgConfig::KVZAP_PCRE2)

pkg_check_modules(KVZAP_UTF8PROC REQUIRED IMPORTED_TARGET libutf8proc)
add_library(kvzap_utf8proc INTERFACE)
target_link_libraries(kvzap_utf8proc INTERFACE PkgConfig::KVZAP_UTF8PROC)

set(HDF5_PREFER_PARALLEL TRUE)
find_package(HDF5 REQUIRED COMPONENTS C)
if(NOT HDF5_IS_PARALLEL)
  message(FATAL_ERROR "kvzap needs a parallel HDF5 (Debian: libhdf5-openmpi-dev); "
                      "found ${HDF5_C_LIBRARIES}")
endif()
add_library(kvzap_hdf5 INTERFACE)
target_include_directories(kvzap_hdf5 SYSTEM INTERFACE ${HDF5_INCLUDE_DIRS})
target_link_libraries(kvzap_hdf5 INTERFACE ${HDF5_C_LIBRARIES})

# Optional: without it the dense products go to Kokkos Kernels and the BLAS behind it. On CUDA devices
# they go to cuBLAS.
if(KVZAP_ENABLE_ONEDNN AND NOT TARGET kvzap_cublas)
  # Not by its own config: Debian's requires the OpenCL headers, which only GPU use needs.
  find_path(KVZAP_ONEDNN_INCLUDE_DIR oneapi/dnnl/dnnl.hpp)
  find_library(KVZAP_ONEDNN_LIBRARY dnnl)
  if(KVZAP_ONEDNN_INCLUDE_DIR AND KVZAP_ONEDNN_LIBRARY)
    add_library(kvzap_onednn INTERFACE)
    target_include_directories(kvzap_onednn SYSTEM INTERFACE ${KVZAP_ONEDNN_INCLUDE_DIR})
    target_link_libraries(kvzap_onednn INTERFACE ${KVZAP_ONEDNN_LIBRARY})
    message(STATUS "kvzap: oneDNN ${KVZAP_ONEDNN_LIBRARY}")
  else()
    message(STATUS "kvzap: oneDNN not found; dense products by Kokkos Kernels")
  endif()
endif()

find_package(fmt REQUIRED)
find_package(nlohmann_json REQUIRED)
if(KVZAP_ENABLE_DRIVERS)
  find_package(CLI11 REQUIRED)
  find_package(tomlplusplus REQUIRED)
endif()
if(KVZAP_ENABLE_TESTS)
  find_package(GTest REQUIRED)
endif()
