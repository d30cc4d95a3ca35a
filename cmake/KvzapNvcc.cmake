# Included before project() where KVZAP_REQUIRE_BACKEND is Cuda and no compiler is named: nvcc compiles C++ through the
# nvcc_wrapper that Kokkos installs. Sets CMAKE_CXX_COMPILER, and the architecture of Kokkos as an initial flag.
set(kvzap_prefixes ${Kokkos_ROOT} ${Kokkos_DIR}/../../.. $ENV{Kokkos_ROOT} ${CMAKE_PREFIX_PATH})
string(REPLACE ":" ";" kvzap_environment_prefixes "$ENV{CMAKE_PREFIX_PATH}")
list(APPEND kvzap_prefixes ${kvzap_environment_prefixes} $ENV{CONDA_PREFIX})
find_program(KVZAP_NVCC_WRAPPER nvcc_wrapper HINTS ${kvzap_prefixes} PATH_SUFFIXES bin)
mark_as_advanced(KVZAP_NVCC_WRAPPER)
if(NOT KVZAP_NVCC_WRAPPER)
  message(FATAL_ERROR "kvzap: nvcc_wrapper of a Kokkos with CUDA was not found; name Kokkos' folder in Kokkos_ROOT or "
                      "CMAKE_PREFIX_PATH, or a compiler in CMAKE_CXX_COMPILER")
endif()
set(CMAKE_CXX_COMPILER ${KVZAP_NVCC_WRAPPER})

# CMake first tries the compiler without Kokkos' flags, and the wrapper then takes an architecture of its own: up to
# Kokkos 4.7 sm_70, which CUDA 13 refuses.
find_file(kvzap_kokkos_common KokkosConfigCommon.cmake HINTS ${kvzap_prefixes}
          PATH_SUFFIXES lib/cmake/Kokkos lib64/cmake/Kokkos)
mark_as_advanced(kvzap_kokkos_common)
if(kvzap_kokkos_common)
  file(STRINGS ${kvzap_kokkos_common} kvzap_architecture REGEX "Kokkos_CUDA_ARCHITECTURES +[0-9]+")
  if(kvzap_architecture MATCHES "Kokkos_CUDA_ARCHITECTURES +([0-9]+)")
    set(CMAKE_CXX_FLAGS_INIT "-arch=sm_${CMAKE_MATCH_1}")
  endif()
endif()
