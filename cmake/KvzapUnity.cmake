# One translation unit for each folder of a library's sources, as scripts/sanitize builds it, and the test
# of add_subdirectory: nearly all that these compile is templates of Kokkos, the standard library and JSON,
# the same in every file.
# (scripts/tidy does the same. Other builds compile file by file: those compile again what changed alone.)
# Hence names in anonymous namespaces differ within a folder.
#
# kvzap_unite(TARGET [PLAIN folders...]): folders of src, each with those below it. Sources with options
# of their own stay alone. Those of PLAIN folders, which have no loop that takes long, are not optimized.
function(kvzap_unite target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "PLAIN")
  get_target_property(sources ${target} SOURCES)
  set(alone "")
  set(folders "")
  foreach(source IN LISTS sources)
    get_filename_component(source ${source} ABSOLUTE BASE_DIR ${PROJECT_SOURCE_DIR})
    get_source_file_property(options ${source} COMPILE_OPTIONS)
    file(RELATIVE_PATH path ${PROJECT_SOURCE_DIR}/src ${source})
    if(options OR NOT path MATCHES "^([a-z]+)/")
      list(APPEND alone ${source})
    else()
      list(APPEND folders ${CMAKE_MATCH_1})
      list(APPEND sources_of_${CMAKE_MATCH_1} ${source})
    endif()
  endforeach()
  list(REMOVE_DUPLICATES folders)
  foreach(folder IN LISTS folders)
    list(SORT sources_of_${folder})
    list(JOIN sources_of_${folder} "\"\n#include \"" includes)
    set(unit ${PROJECT_BINARY_DIR}/units/${folder}.cpp)
    # A local name may be one of another file's namespace: -Wshadow is for builds file by file. And GCC takes
    # the sources for headers, whose lambdas should not capture what is of an anonymous namespace.
    file(CONFIGURE OUTPUT ${unit} @ONLY
         CONTENT "#pragma GCC diagnostic ignored \"-Wshadow\"
#ifndef __clang__
#pragma GCC diagnostic ignored \"-Wsubobject-linkage\"
#endif
#include \"${includes}\"\n")
    if(folder IN_LIST arg_PLAIN)
      # (Optimized otherwise than the precompiled header.)
      set_source_files_properties(${unit} PROPERTIES COMPILE_OPTIONS -O0 SKIP_PRECOMPILE_HEADERS ON)
    endif()
    list(APPEND alone ${unit})
  endforeach()
  set_property(TARGET ${target} PROPERTY SOURCES ${alone})
endfunction()
