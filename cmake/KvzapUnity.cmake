# Compiles few translation units instead of many. Nearly all that a source compiles is templates of
# Kokkos, the standard library and JSON, the same in every file. scripts/demo, scripts/check and
# scripts/sanitize build like this, so names in anonymous namespaces of a folder's sources must
# differ. An editor's build compiles file by file, and so only changed files.
#
# kvzap_unite(TARGET ROOT FOLDER [LARGEST n] [TESTS] [ALONE sources...] [PLAIN folders...]): forms
# units of up to n sources (24), each of one folder below ROOT and its subfolders. ALONE sources,
# which have their own options, and sources without a precompiled header are not part of a unit.
# Sources of PLAIN folders, which have no long loops, are not optimized. TESTS give their helpers the
# same names in many sources: a unit has copies of sources test_*, whose anonymous namespaces get
# names.
function(kvzap_unite target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "TESTS" "ROOT;LARGEST" "PLAIN;ALONE")
  set(largest 24)
  if(arg_LARGEST)
    set(largest ${arg_LARGEST})
  endif()
  get_target_property(sources ${target} SOURCES)
  set(alone "")
  set(folders "")
  foreach(source IN LISTS sources)
    if(source MATCHES "^\\$<")  # objects
      list(APPEND alone ${source})
      continue()
    endif()
    get_filename_component(source ${source} ABSOLUTE BASE_DIR ${CMAKE_CURRENT_SOURCE_DIR})
    get_source_file_property(options ${source} COMPILE_OPTIONS)
    get_source_file_property(definitions ${source} COMPILE_DEFINITIONS)
    get_source_file_property(unlike ${source} SKIP_PRECOMPILE_HEADERS)
    file(RELATIVE_PATH path ${PROJECT_SOURCE_DIR}/${arg_ROOT} ${source})
    if(options OR definitions OR unlike OR path IN_LIST arg_ALONE OR (arg_TESTS AND NOT path MATCHES "/test_")
       OR NOT path MATCHES "^([a-z]+)/")
      list(APPEND alone ${source})
    else()
      list(APPEND folders ${CMAKE_MATCH_1})
      list(APPEND sources_of_${CMAKE_MATCH_1} ${source})
    endif()
  endforeach()
  list(REMOVE_DUPLICATES folders)
  foreach(folder IN LISTS folders)
    list(SORT sources_of_${folder})
    list(LENGTH sources_of_${folder} left)
    math(EXPR units "(${left} + ${largest} - 1) / ${largest}")
    math(EXPR each "(${left} + ${units} - 1) / ${units}")
    set(begin 0)
    while(begin LESS left)
      list(SUBLIST sources_of_${folder} ${begin} ${each} members)
      if(arg_TESTS)
        list(TRANSFORM members REPLACE "^${PROJECT_SOURCE_DIR}/" "")
        foreach(member IN LISTS members)
          kvzap_name_namespaces(${member})
        endforeach()
        list(TRANSFORM members PREPEND "${PROJECT_BINARY_DIR}/units/")
      endif()
      list(JOIN members "\"\n#include \"" includes)
      set(unit ${PROJECT_BINARY_DIR}/units/${target}/${folder}_${begin}.cpp)
      # A local name may shadow one of another file's namespace: builds file by file check -Wshadow.
      # GCC takes the sources for headers, whose lambdas should not capture members of an anonymous
      # namespace.
      file(CONFIGURE OUTPUT ${unit} @ONLY
           CONTENT "#pragma GCC diagnostic ignored \"-Wshadow\"
#ifndef __clang__
#pragma GCC diagnostic ignored \"-Wsubobject-linkage\"
#endif
#include \"${includes}\"\n")
      if(folder IN_LIST arg_PLAIN)
        # Not optimized like the precompiled header.
        set_source_files_properties(${unit} PROPERTIES COMPILE_OPTIONS -O0 SKIP_PRECOMPILE_HEADERS ON)
      endif()
      list(APPEND alone ${unit})
      math(EXPR begin "${begin} + ${each}")
    endwhile()
  endforeach()
  set_property(TARGET ${target} PROPERTY SOURCES ${alone})
endfunction()

# kvzap_name_namespaces(SOURCE): copies a source to units/, with a name for its anonymous namespaces.
function(kvzap_name_namespaces source)
  set(original ${PROJECT_SOURCE_DIR}/${source})
  set(copy ${PROJECT_BINARY_DIR}/units/${source})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${original})
  string(MAKE_C_IDENTIFIER ${source} name)
  file(READ ${original} text)
  string(REPLACE "\nnamespace {\n" "\nnamespace ${name} {\n" text "${text}")
  string(PREPEND text "#line 1 \"${original}\"\n")
  set(before "")
  if(EXISTS ${copy})
    file(READ ${copy} before)
  endif()
  if(NOT text STREQUAL before)
    file(WRITE ${copy} "${text}")
  endif()
endfunction()
