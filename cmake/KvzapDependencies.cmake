# Finds kvzap's dependencies and gives each package one imported target with a fixed name. Both
# kvzap's own build and the installed kvzapConfig.cmake include this file, so that they find the
# same packages.
#   kvzap::kokkos    Kokkos and Kokkos Kernels, either generation (see below)
#   kvzap::hdf5      HDF5: parallel with MPI; without, serial if it is installed
#   kvzap::pcre2     PCRE2, 8-bit code units
#   kvzap::utf8proc  utf8proc (Unicode normal forms)
#   kvzap::lapack    LAPACK: Cholesky factors of training, on the host
#   kvzap::onednn    oneDNN, if it is enabled and found
#   kvzap::nccl      NCCL, if it is enabled
#
# In: KVZAP_COMPONENTS (core, model, engine, lab, server: components whose dependencies to find),
# KVZAP_WITH_MPI, KVZAP_WITH_HDF5, KVZAP_WITH_NCCL, KVZAP_WITH_ONEDNN (OFF, ON: use it if found, REQUIRED),
# KVZAP_WITH_PRIVATE (whether to find packages that only the library uses: not needed to link a
# shared kvzap), KVZAP_IMPORTED_SCOPE (GLOBAL or nothing), KVZAP_BUILT_WITH_KOKKOS (the only
# KVZAP_KOKKOS_BUILD to accept, or empty), KVZAP_BUILT_WITH_HDF5 (libraries to use if they exist).
# Out: KVZAP_MISSING, one line that names the missing package, or empty; KVZAP_KOKKOS_BUILD,
# KVZAP_HDF5_INCLUDES_MPI.

set(KVZAP_MISSING "")

# Kokkos bridge. Kokkos Kernels 4 and newer exports Kokkos::kokkoskernels. Version 3.4 of Debian's
# and Ubuntu's Trilinos packages sets KokkosKernels_LIBRARIES and KokkosKernels_INCLUDE_DIRS, and
# has no Kokkos::kokkos target. Its config sets other variables, too, so a separate function reads
# it.
function(kvzap_find_kokkos)
  find_package(KokkosKernels QUIET)
  if(NOT KokkosKernels_FOUND)
    set(KVZAP_MISSING "Kokkos Kernels was not found; name its folder in KokkosKernels_ROOT"
        PARENT_SCOPE)
    return()
  endif()
  if(TARGET Kokkos::kokkoskernels)
    set(targets Kokkos::kokkoskernels Kokkos::kokkos)
    set(version ${Kokkos_VERSION})
    string(REPLACE ";" ", " backends "${Kokkos_DEVICES}")
  else()
    set(includes ${KokkosKernels_INCLUDE_DIRS})
    set(targets ${KokkosKernels_LIBRARIES} ${CMAKE_DL_LIBS})
    set(version "of the distribution's Trilinos packages")
    set(backends SERIAL)
  endif()
  # Programs would compile with another Kokkos, but not link.
  string(REGEX REPLACE "^([0-9]+\\.[0-9]+)\\..*" "\\1" build "${version}")
  set(build "${build} (${backends})")
  if(KVZAP_BUILT_WITH_KOKKOS AND NOT build STREQUAL KVZAP_BUILT_WITH_KOKKOS)
    set(KVZAP_MISSING "Kokkos ${KVZAP_BUILT_WITH_KOKKOS}, with which it was built; found ${build} by \
${KokkosKernels_DIR}; name the right folders in KokkosKernels_ROOT and Kokkos_ROOT" PARENT_SCOPE)
    return()
  endif()
  set(KVZAP_KOKKOS_BUILD "${build}" PARENT_SCOPE)
  if(NOT TARGET kvzap::kokkos)
    add_library(kvzap::kokkos INTERFACE IMPORTED ${KVZAP_IMPORTED_SCOPE})
    target_include_directories(kvzap::kokkos SYSTEM INTERFACE ${includes})
    target_link_libraries(kvzap::kokkos INTERFACE ${targets})
  endif()
  set(KVZAP_KOKKOS_VERSION "${version}" PARENT_SCOPE)
  set(KVZAP_KOKKOS_BACKENDS "${backends}" PARENT_SCOPE)
  set(KVZAP_KOKKOS_CUDA_ARCHITECTURE "${Kokkos_CUDA_ARCHITECTURES}" PARENT_SCOPE)
endfunction()
kvzap_find_kokkos()

# Products on CUDA devices use cuBLAS.
if(NOT KVZAP_MISSING AND KVZAP_WITH_PRIVATE AND KVZAP_KOKKOS_BACKENDS MATCHES "CUDA")
  find_package(CUDAToolkit QUIET)
  if(NOT CUDAToolkit_FOUND)
    set(KVZAP_MISSING "the CUDA toolkit was not found; name its folder in CUDAToolkit_ROOT")
  endif()
endif()

if(NOT KVZAP_MISSING AND KVZAP_WITH_MPI)
  find_package(MPI QUIET COMPONENTS CXX)
  if(NOT MPI_CXX_FOUND)
    set(KVZAP_MISSING "MPI was not found; name its compiler in MPI_CXX_COMPILER")
  endif()
endif()

# Optional: without it, ranks exchange values of devices by MPI. Python's package nvidia-nccl has the library's
# versioned name alone.
if(NOT KVZAP_MISSING AND KVZAP_WITH_PRIVATE AND KVZAP_WITH_NCCL)
  set(kvzap_nccl_places ${NCCL_ROOT} $ENV{NCCL_ROOT} ${CUDAToolkit_TARGET_DIR})
  find_path(KVZAP_NCCL_INCLUDE_DIR nccl.h HINTS ${kvzap_nccl_places} PATH_SUFFIXES include)
  find_library(KVZAP_NCCL_LIBRARY NAMES nccl libnccl.so.2 NAMES_PER_DIR HINTS ${kvzap_nccl_places} PATH_SUFFIXES lib lib64)
  mark_as_advanced(KVZAP_NCCL_INCLUDE_DIR KVZAP_NCCL_LIBRARY)
  if(NOT KVZAP_KOKKOS_BACKENDS MATCHES "CUDA" OR NOT KVZAP_WITH_MPI)
    set(KVZAP_MISSING "NCCL (KVZAP_ENABLE_NCCL) needs MPI and a Kokkos with CUDA; found MPI ${KVZAP_WITH_MPI}, Kokkos with \
${KVZAP_KOKKOS_BACKENDS}")
  elseif(NOT KVZAP_NCCL_INCLUDE_DIR OR NOT KVZAP_NCCL_LIBRARY)
    set(KVZAP_MISSING "NCCL (KVZAP_ENABLE_NCCL) was not found; name its folder in NCCL_ROOT, or its parts in \
KVZAP_NCCL_INCLUDE_DIR and KVZAP_NCCL_LIBRARY")
  elseif(NOT TARGET kvzap::nccl)
    add_library(kvzap::nccl INTERFACE IMPORTED ${KVZAP_IMPORTED_SCOPE})
    target_include_directories(kvzap::nccl SYSTEM INTERFACE ${KVZAP_NCCL_INCLUDE_DIR})
    target_link_libraries(kvzap::nccl INTERFACE ${KVZAP_NCCL_LIBRARY})
  endif()
endif()

# Headers and libraries of HDF5. Of several installations, the one that fits is used: parallel with
# MPI, serial without. Debian installs both side by side. The header of a parallel one includes
# mpi.h, so a build without MPI that finds no other needs MPI's headers; it never starts MPI.
function(kvzap_find_hdf5)
  if(KVZAP_BUILT_WITH_HDF5)
    set(there ON)
    foreach(library IN LISTS KVZAP_BUILT_WITH_HDF5)
      if(NOT EXISTS "${library}")
        set(there OFF)
      endif()
    endforeach()
    if(there)
      if(NOT TARGET kvzap::hdf5)
        add_library(kvzap::hdf5 INTERFACE IMPORTED)
        target_link_libraries(kvzap::hdf5 INTERFACE ${KVZAP_BUILT_WITH_HDF5})
      endif()
      return()
    endif()
  endif()
  if(NOT CMAKE_C_COMPILER_LOADED)
    set(KVZAP_MISSING "HDF5 is looked for by compiling C; add C to the project's languages" PARENT_SCOPE)
    return()
  endif()
  set(HDF5_PREFER_PARALLEL ${KVZAP_WITH_MPI})
  find_package(HDF5 QUIET COMPONENTS C)
  # Compressed rows of snapshots are inflated without HDF5, whose own filter trusts its input.
  find_package(ZLIB QUIET)
  list(APPEND HDF5_C_LIBRARIES ${ZLIB_LIBRARIES})
  list(APPEND HDF5_INCLUDE_DIRS ${ZLIB_INCLUDE_DIRS})
  if(HDF5_IS_PARALLEL AND NOT KVZAP_WITH_MPI)
    find_package(MPI QUIET COMPONENTS C)
  endif()
  if(NOT HDF5_FOUND)
    set(KVZAP_MISSING "HDF5 was not found; name its folder in HDF5_ROOT" PARENT_SCOPE)
  elseif(KVZAP_WITH_MPI AND NOT HDF5_IS_PARALLEL)
    set(KVZAP_MISSING "with MPI a parallel HDF5 is needed (Debian: libhdf5-openmpi-dev), found ${HDF5_C_LIBRARIES}"
        PARENT_SCOPE)
  elseif(HDF5_IS_PARALLEL AND NOT KVZAP_WITH_MPI AND NOT MPI_C_FOUND)
    set(KVZAP_MISSING "without MPI a serial HDF5 is needed (Debian: libhdf5-dev), found ${HDF5_C_LIBRARIES}"
        PARENT_SCOPE)
  elseif(NOT ZLIB_FOUND)
    set(KVZAP_MISSING "zlib was not found (Debian: zlib1g-dev)" PARENT_SCOPE)
  elseif(NOT TARGET kvzap::hdf5)
    add_library(kvzap::hdf5 INTERFACE IMPORTED ${KVZAP_IMPORTED_SCOPE})
    target_include_directories(kvzap::hdf5 SYSTEM INTERFACE ${HDF5_INCLUDE_DIRS})
    target_link_libraries(kvzap::hdf5 INTERFACE ${HDF5_C_LIBRARIES})
    if(HDF5_IS_PARALLEL AND NOT KVZAP_WITH_MPI)
      target_link_libraries(kvzap::hdf5 INTERFACE MPI::MPI_C)
      set(KVZAP_HDF5_INCLUDES_MPI ON PARENT_SCOPE)
    endif()
  endif()
  set(KVZAP_HDF5_VERSION "${HDF5_VERSION}" PARENT_SCOPE)
  # For users of an installed build: they need no headers, and the same library.
  set(KVZAP_HDF5_LIBRARIES "" PARENT_SCOPE)
  if(NOT HDF5_C_LIBRARIES MATCHES "(^|;)[^/]")
    set(KVZAP_HDF5_LIBRARIES "${HDF5_C_LIBRARIES}" PARENT_SCOPE)
  endif()
endfunction()
if(NOT KVZAP_MISSING AND KVZAP_WITH_PRIVATE AND KVZAP_WITH_HDF5 AND "engine" IN_LIST KVZAP_COMPONENTS)
  kvzap_find_hdf5()
endif()

# LAPACK by its Fortran names, and its dependencies. OpenBLAS, MKL and others include it.
function(kvzap_find_lapack)
  if(TARGET kvzap::lapack)
    return()
  endif()
  # liblapack.so first: distributions let the user choose the library behind that name, and behind
  # the libblas.so of Kokkos Kernels.
  set(vendor "${BLA_VENDOR}")
  if(vendor STREQUAL "")
    set(BLA_VENDOR Generic)
    find_package(LAPACK QUIET)
    set(BLA_VENDOR All)
  endif()
  if(NOT LAPACK_FOUND)
    find_package(LAPACK QUIET)
  endif()
  if(NOT LAPACK_FOUND)
    set(KVZAP_MISSING "LAPACK was not found (Debian: libopenblas-dev); name its folder in CMAKE_PREFIX_PATH"
        PARENT_SCOPE)
    return()
  endif()
  add_library(kvzap::lapack INTERFACE IMPORTED ${KVZAP_IMPORTED_SCOPE})
  target_link_libraries(kvzap::lapack INTERFACE ${LAPACK_LIBRARIES})
  if(LAPACK_LINKER_FLAGS)
    target_link_options(kvzap::lapack INTERFACE ${LAPACK_LINKER_FLAGS})
  endif()
endfunction()
if(NOT KVZAP_MISSING AND KVZAP_WITH_PRIVATE AND "lab" IN_LIST KVZAP_COMPONENTS)
  kvzap_find_lapack()
endif()

# Optional: without it, dense products use Kokkos Kernels and its BLAS. On CUDA devices they use
# cuBLAS.
if(NOT KVZAP_MISSING AND KVZAP_WITH_PRIVATE AND KVZAP_WITH_ONEDNN AND NOT KVZAP_KOKKOS_BACKENDS MATCHES "CUDA")
  # Without its own config: Debian's requires the OpenCL headers, which only GPU use needs.
  find_path(KVZAP_ONEDNN_INCLUDE_DIR oneapi/dnnl/dnnl.hpp)
  find_library(KVZAP_ONEDNN_LIBRARY dnnl)
  mark_as_advanced(KVZAP_ONEDNN_INCLUDE_DIR KVZAP_ONEDNN_LIBRARY)
  if(KVZAP_ONEDNN_INCLUDE_DIR AND KVZAP_ONEDNN_LIBRARY)
    if(NOT TARGET kvzap::onednn)
      add_library(kvzap::onednn INTERFACE IMPORTED ${KVZAP_IMPORTED_SCOPE})
      target_include_directories(kvzap::onednn SYSTEM INTERFACE ${KVZAP_ONEDNN_INCLUDE_DIR})
      target_link_libraries(kvzap::onednn INTERFACE ${KVZAP_ONEDNN_LIBRARY})
    endif()
  elseif(KVZAP_WITH_ONEDNN STREQUAL "REQUIRED")
    set(KVZAP_MISSING "oneDNN was not found; name it in KVZAP_ONEDNN_INCLUDE_DIR and KVZAP_ONEDNN_LIBRARY")
  endif()
endif()

function(kvzap_find_by_pkg_config name module)
  if(TARGET kvzap::${name})
    return()
  endif()
  string(TOUPPER KVZAP_${name} prefix)
  pkg_check_modules(${prefix} QUIET IMPORTED_TARGET ${KVZAP_IMPORTED_SCOPE} ${module})
  if(NOT ${prefix}_FOUND)
    set(KVZAP_MISSING "${module} was not found by pkg-config" PARENT_SCOPE)
    return()
  endif()
  add_library(kvzap::${name} INTERFACE IMPORTED ${KVZAP_IMPORTED_SCOPE})
  target_link_libraries(kvzap::${name} INTERFACE PkgConfig::${prefix})
endfunction()
if(NOT KVZAP_MISSING AND KVZAP_WITH_PRIVATE AND "model" IN_LIST KVZAP_COMPONENTS)
  find_package(PkgConfig QUIET)
  if(NOT PkgConfig_FOUND)
    set(KVZAP_MISSING "pkg-config was not found")
  else()
    kvzap_find_by_pkg_config(pcre2 libpcre2-8)
    kvzap_find_by_pkg_config(utf8proc libutf8proc)
  endif()
endif()

if(NOT KVZAP_MISSING AND KVZAP_WITH_PRIVATE)
  find_package(fmt QUIET)
  if(NOT fmt_FOUND)
    set(KVZAP_MISSING "fmt was not found; name its folder in fmt_ROOT")
  endif()
endif()
