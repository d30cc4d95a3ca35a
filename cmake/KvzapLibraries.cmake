# The libraries, each on top of the one before it. A room (a folder of src with its public headers)
# includes its own headers and those of rooms before it: tests/unit/base/test_rooms.cpp.
#
#   kvzap::core    ragged paged cache, attention over it, products, ranks
#   kvzap::model   files, checkpoints, tokenizers, chat templates
#   kvzap::engine  policies, the forward pass, sequences, snapshots
#   kvzap::lab     training of surrogates, evaluation
#   kvzap::server  scheduler and protocol of kvzap serve
#   kvzap::kvzap   all of them
set(kvzap_core_rooms base linalg parallel cache attention selection)
set(kvzap_model_rooms files gguf jinja text grammar model)
set(kvzap_engine_rooms policy io engine session)
set(kvzap_lab_rooms train eval)
set(kvzap_server_rooms server)

set(kvzap_core_links fmt::fmt ${CMAKE_THREAD_LIBS_INIT} ${CMAKE_DL_LIBS})
set(kvzap_model_links fmt::fmt kvzap::pcre2 kvzap::utf8proc)
set(kvzap_engine_links fmt::fmt ${CMAKE_THREAD_LIBS_INIT} ${CMAKE_DL_LIBS})
set(kvzap_lab_links fmt::fmt kvzap::utf8proc kvzap::lapack)
set(kvzap_server_links fmt::fmt)
if(KVZAP_HAVE_HDF5)
  list(APPEND kvzap_engine_links kvzap::hdf5)
  list(APPEND kvzap_lab_links kvzap::hdf5)
endif()
foreach(target kvzap::onednn kvzap::nccl CUDA::cublas CUDA::cublasLt)
  if(TARGET ${target})
    list(APPEND kvzap_core_links ${target})
  endif()
endforeach()
# Threaded loops, if Kokkos' host backend has no threads of its own. (Only one file: elsewhere
# Kokkos would use the pragmas.)
if(KVZAP_HAVE_OPENMP)
  list(APPEND kvzap_core_links ${OpenMP_CXX_LIBRARIES})
  set_source_files_properties(src/base/host_threads.cpp PROPERTIES COMPILE_OPTIONS "${OpenMP_CXX_FLAGS}"
                              SKIP_PRECOMPILE_HEADERS ON)
endif()

# Kernels for tensor cores need compute capability 8.0.
set(KVZAP_HAVE_TENSOR_CORES OFF)
if(KVZAP_KOKKOS_BACKENDS MATCHES "CUDA"
   AND NOT (KVZAP_KOKKOS_CUDA_ARCHITECTURE AND KVZAP_KOKKOS_CUDA_ARCHITECTURE LESS 80))
  set(KVZAP_HAVE_TENSOR_CORES ON)
endif()

# Sources of a room that need an option that is off, and their replacements.
function(kvzap_room_sources out room)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS src/${room}/*.cpp)
  set(without "")
  if(room STREQUAL "parallel")
    if(KVZAP_HAVE_MPI)
      set(without "/communicator_serial\\.cpp$")
    else()
      set(without "/communicator_mpi\\.cpp$")
    endif()
    if(TARGET kvzap::nccl)
      string(APPEND without "|/nccl_ranks_none\\.cpp$")
    else()
      string(APPEND without "|/nccl_ranks\\.cpp$")
    endif()
  elseif(room STREQUAL "attention")
    set(without "/device/(panel_mass|panels|split_kv|split_quantised)\\.cpp$")
    if(KVZAP_HAVE_DEVICE_KERNELS)
      set(without "/device/absent\\.cpp$")
    endif()
    if(KVZAP_HAVE_TENSOR_CORES)
      string(APPEND without "|/cuda/absent\\.cpp$")
    else()
      string(APPEND without "|/cuda/(flash|flash_quantised|split_latent|split_quantised|split_wide)\\.cpp$")
    endif()
  elseif(room STREQUAL "linalg")
    if(KVZAP_HAVE_TENSOR_CORES)
      set(without "/cuda/absent\\.cpp$")
    else()
      set(without "/cuda/quantised_products\\.cpp$")
    endif()
  elseif(room STREQUAL "io")
    if(KVZAP_HAVE_HDF5)
      set(without "/snapshot_none\\.cpp$")
    else()
      list(FILTER sources INCLUDE REGEX "/snapshot_(none|names)\\.cpp$")
    endif()
  elseif(room STREQUAL "train")
    if(KVZAP_HAVE_HDF5)
      set(without "/pairs_file_none\\.cpp$")
    else()
      set(without "/pairs_(file|layout|recovery|structure|writer)\\.cpp$")
    endif()
  endif()
  if(without)
    list(FILTER sources EXCLUDE REGEX "${without}")
  endif()
  set(${out} ${sources} PARENT_SCOPE)
endfunction()

# Of programs and tests. nvcc takes no -Og.
set(kvzap_quick_optimization -Og)
if(KVZAP_KOKKOS_BACKENDS MATCHES "CUDA")
  set(kvzap_quick_optimization -O1)
endif()

# Loops of hosts. Clang up to 15 makes calls of OpenMP's library of these pragmas on AMD's devices.
set(kvzap_simd_loops -fopenmp-simd)
if(KVZAP_KOKKOS_BACKENDS MATCHES "HIP")
  set(kvzap_simd_loops "SHELL:-Xarch_host -fopenmp-simd")
endif()

# Cold sources handle text, JSON, files, protocols and plans, without long loops. Releases compile them
# at -O1, in two thirds of the time of -O3. Hot ones in the same rooms encode, decode or compute with
# weights. Hosts run the kernels of devices in tests and benchmarks alone.
set(kvzap_cold gguf/ grammar/ jinja/ model/ io/ session/ train/ eval/ server/)
set(kvzap_hot gguf/block_ grammar/recogniser grammar/token_ model/convert_model model/encoding_store model/gguf_ model/quantise model/random_store
  model/read_ model/weight train/collect\\. train/host_loops train/layer_pairs train/mlp_ train/normal_equations
  train/pair_rows train/query_moments train/ridge)
if(NOT KVZAP_KOKKOS_BACKENDS MATCHES "CUDA|HIP|SYCL" AND NOT KVZAP_ENABLE_PERF)
  list(APPEND kvzap_cold attention/device/)
endif()
list(JOIN kvzap_cold "|" kvzap_cold)
list(JOIN kvzap_hot "|" kvzap_hot)

# GCC 12 attributes undefined operands inside its own intrinsics to this code (GCC bug 105593).
set_source_files_properties(src/attention/host/decode_rows.cpp src/attention/host/tile_kernels.cpp
  src/attention/host/amx_prefill.cpp
  src/linalg/host/packed_kernels.cpp src/linalg/host/row_products.cpp src/cache/row_copy.cpp
  src/linalg/quantised/kernels.cpp
  PROPERTIES COMPILE_OPTIONS "$<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized;-Wno-uninitialized>")
# Otherwise the place of the loop over a row of bf16 weights varies, and its time by 6 % (Zen 1, AVX2).
set_property(SOURCE src/linalg/host/packed_kernels.cpp APPEND PROPERTY
  COMPILE_OPTIONS "$<$<CXX_COMPILER_ID:GNU>:-falign-loops=32>")
set_source_files_properties(src/base/huge_pages.cpp src/linalg/host/blas_threads.cpp
  PROPERTIES SKIP_PRECOMPILE_HEADERS ON)  # they include less than the precompiled header

include(KvzapUnity)
set(kvzap_plain "")
if(CMAKE_BUILD_TYPE MATCHES "^(Sanitize|Debug)$")  # see scripts/sanitize, tests/install
  set(kvzap_plain PLAIN base engine eval files io model parallel policy text train)
endif()

# kvzap_compile(TARGET FIRST): how all libraries compile their sources. FIRST is the target that owns
# their precompiled header; GCC 12 crashes if the two are optimized differently.
function(kvzap_compile target first)
  target_include_directories(${target}
    PUBLIC $<BUILD_INTERFACE:${CMAKE_CURRENT_SOURCE_DIR}/include>
           $<BUILD_INTERFACE:${CMAKE_CURRENT_BINARY_DIR}/include>
           $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>
    PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/src)
  target_compile_features(${target} PUBLIC cxx_std_17)
  # One set of definitions for all libraries: they share a precompiled header.
  if(KVZAP_HAVE_MPI OR KVZAP_HDF5_INCLUDES_MPI)
    # MPI's deprecated C++ bindings are never used, and old OpenMPI headers warn about themselves.
    target_compile_definitions(${target} PUBLIC OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)
  endif()
  if(TARGET kvzap::onednn)
    target_compile_definitions(${target} PRIVATE KVZAP_HAVE_ONEDNN=1)
  endif()
  # Otherwise a comparison that may trap stays a branch, and a square root that may set errno a call,
  # and GCC does not vectorize their loops.
  target_compile_options(${target} PRIVATE ${kvzap_warnings} ${kvzap_simd_loops}
    $<$<CXX_COMPILER_ID:GNU,Clang>:-fno-trapping-math;-fno-math-errno>)
  if(CMAKE_BUILD_TYPE STREQUAL "Sanitize" OR KVZAP_UNITE_SOURCES)
    # Tests replace these.
    kvzap_unite(${target} ROOT src ALONE attention/cuda/absent.cpp base/cuda/has_tensor_cores.cpp
                base/machine.cpp linalg/cuda/absent.cpp linalg/host/onednn.cpp parallel/nccl_ranks_none.cpp
                ${kvzap_plain})
  endif()
  if(target STREQUAL first)
    kvzap_precompile(${target} Kokkos_Core.hpp fmt/format.h nlohmann/json.hpp algorithm filesystem fstream functional
                     map memory optional string vector)
  elseif(KVZAP_PRECOMPILE_HEADERS)
    target_precompile_headers(${target} REUSE_FROM ${first})
  endif()
endfunction()

add_library(kvzap INTERFACE)
add_library(kvzap::kvzap ALIAS kvzap)
set(kvzap_libraries kvzap)
set(below "")
foreach(component IN LISTS KVZAP_COMPONENTS)
  set(library kvzap_${component})
  set(component_sources "")
  foreach(room IN LISTS kvzap_${component}_rooms)
    kvzap_room_sources(room_sources ${room})
    list(APPEND component_sources ${room_sources})
  endforeach()
  set(cold_sources "")
  set(cold_objects "")
  if(CMAKE_BUILD_TYPE STREQUAL "Release")
    set(cold_sources ${component_sources})
    list(FILTER cold_sources INCLUDE REGEX "/src/(${kvzap_cold})")
    list(FILTER cold_sources EXCLUDE REGEX "/src/(${kvzap_hot})")
  endif()
  set(links ${kvzap_${component}_links} $<BUILD_INTERFACE:nlohmann_json::nlohmann_json>)
  if(cold_sources)
    list(REMOVE_ITEM component_sources ${cold_sources})
    add_library(${library}_cold OBJECT ${cold_sources})
    target_link_libraries(${library}_cold PRIVATE ${kvzap_public_targets} ${below} ${links})
    target_compile_options(${library}_cold PRIVATE -O1)
    if(BUILD_SHARED_LIBS)
      set_target_properties(${library}_cold PROPERTIES POSITION_INDEPENDENT_CODE ON)
    endif()
    if(TARGET kvzap_core_cold)
      kvzap_compile(${library}_cold kvzap_core_cold)
    else()  # others define macros that a header for all must not have
      kvzap_compile(${library}_cold ${library}_cold)
    endif()
    set(cold_objects $<TARGET_OBJECTS:${library}_cold>)
  endif()
  add_library(${library} ${component_sources} ${cold_objects})
  add_library(kvzap::${component} ALIAS ${library})
  target_link_libraries(${library} PUBLIC ${kvzap_public_targets} ${below} PRIVATE ${links})
  set_target_properties(${library} PROPERTIES EXPORT_NAME ${component} INSTALL_RPATH_USE_LINK_PATH ON)
  if(SKBUILD)  # a wheel cannot hold links from one name of a library to another
    set_target_properties(${library} PROPERTIES INSTALL_RPATH "$ORIGIN")
  else()
    set_target_properties(${library} PROPERTIES VERSION ${PROJECT_VERSION}
      SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
  endif()
  kvzap_compile(${library} kvzap_core)
  target_link_libraries(kvzap INTERFACE ${library})
  list(APPEND kvzap_libraries ${library})
  set(below ${library})
endforeach()
