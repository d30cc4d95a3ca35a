# Writes kvzap.pc, the flags for programs that link kvzap without CMake. All dependencies of the
# library must be imported targets. Their link interfaces are walked here, because CMake has no
# expression for the closure of one.

# Appends the linker's arguments for `item` and all its dependencies to `out`.
function(kvzap_link_flags out item)
  # A private dependency, as static libraries have them.
  string(REGEX REPLACE "^\\$<LINK_ONLY:(.*)>$" "\\1" item "${item}")
  set(flags ${${out}})
  if(TARGET "${item}")
    get_property(seen GLOBAL PROPERTY kvzap_pkg_config_seen)
    if(item IN_LIST seen)
      return()
    endif()
    set_property(GLOBAL APPEND PROPERTY kvzap_pkg_config_seen "${item}")
    get_target_property(type "${item}" TYPE)
    if(NOT type STREQUAL "INTERFACE_LIBRARY")
      list(APPEND flags "$<TARGET_LINKER_FILE:${item}>")
    endif()
    get_target_property(options "${item}" INTERFACE_LINK_OPTIONS)
    if(options)
      list(APPEND flags ${options})
    endif()
    get_target_property(libraries "${item}" INTERFACE_LINK_LIBRARIES)
    if(libraries)
      foreach(library IN LISTS libraries)
        kvzap_link_flags(flags "${library}")
      endforeach()
    endif()
  elseif(item MATCHES "::")
    # A target that does not exist, such as an optional one.
  elseif(item MATCHES "^[-/$]")
    list(APPEND flags "${item}")
  elseif(NOT item STREQUAL "")
    list(APPEND flags "-l${item}")
  endif()
  set(${out} "${flags}" PARENT_SCOPE)
endfunction()

# kvzap_write_pkg_config(FILE targets...): the targets that users of the library link.
function(kvzap_write_pkg_config file)
  set(libraries "")
  foreach(target IN LISTS ARGN)
    kvzap_link_flags(libraries ${target})
  endforeach()
  # For compiler flags, CMake has expressions.
  add_library(kvzap_interface INTERFACE)
  target_link_libraries(kvzap_interface INTERFACE kvzap::kokkos)
  if(KVZAP_HAVE_MPI)
    target_link_libraries(kvzap_interface INTERFACE MPI::MPI_CXX)
  endif()
  # As -isystem, the compiler's own folders would hide the C headers from those of C++.
  set(includes "$<TARGET_PROPERTY:kvzap_interface,INTERFACE_INCLUDE_DIRECTORIES>")
  foreach(folder IN LISTS CMAKE_CXX_IMPLICIT_INCLUDE_DIRECTORIES)
    string(REGEX REPLACE "([+.])" "[\\1]" folder "${folder}")
    set(includes "$<FILTER:${includes},EXCLUDE,^${folder}$>")
  endforeach()
  set(includes "$<REMOVE_DUPLICATES:${includes}>")
  set(definitions "$<TARGET_PROPERTY:kvzap_interface,INTERFACE_COMPILE_DEFINITIONS>")
  set(options "$<TARGET_PROPERTY:kvzap_interface,INTERFACE_COMPILE_OPTIONS>")
  # Expressions with the linker's language exist only for targets; here it is C++.
  string(REPLACE "$<LINK_LANGUAGE:CXX>" "1" link_options "${libraries}")
  string(REGEX REPLACE "\\$<LINK_LANGUAGE:[^>]*>" "0" link_options "${link_options}")
  if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}")
    set(libdir "${CMAKE_INSTALL_LIBDIR}")
  else()
    set(libdir "\${prefix}/${CMAKE_INSTALL_LIBDIR}")
  endif()
  file(RELATIVE_PATH to_prefix "${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig" "${CMAKE_INSTALL_PREFIX}")
  string(REGEX REPLACE "/$" "" to_prefix "${to_prefix}")
  # One file per language, because the flags may depend on it; the one for C++ is installed.
  file(GENERATE OUTPUT "${file}.$<COMPILE_LANGUAGE>" CONTENT
"prefix=\${pcfiledir}/${to_prefix}
libdir=${libdir}
includedir=\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}

Name: kvzap
Description: ${PROJECT_DESCRIPTION}
Version: ${PROJECT_VERSION}
Cflags: -std=c++${CMAKE_CXX_STANDARD} -I\${includedir} $<$<BOOL:${includes}>:-isystem $<JOIN:${includes}, -isystem >> $<$<BOOL:${definitions}>:-D$<JOIN:${definitions}, -D>> $<JOIN:${options}, >
Libs: -L\${libdir} -lkvzap_server -lkvzap_lab -lkvzap_engine -lkvzap_model -lkvzap_core $<JOIN:${link_options}, >
")
endfunction()
