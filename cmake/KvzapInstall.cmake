# The files that `cmake --install` installs, and their folders. Components: runtime, development,
# doc, and python in builds with KVZAP_ENABLE_PYTHON.
include(CMakePackageConfigHelpers)
include(KvzapPkgConfig)

set(KVZAP_DATA_DIR ${CMAKE_INSTALL_DATADIR}/kvzap)
set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/kvzap)

# A file of targets for each component: find_package(kvzap COMPONENTS core) needs no other
# component.
foreach(component IN LISTS KVZAP_COMPONENTS ITEMS all)
  set(targets kvzap_${component})
  if(component STREQUAL "all")
    set(targets kvzap)
  endif()
  install(TARGETS ${targets} EXPORT kvzap_${component}
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT runtime NAMELINK_COMPONENT development
    RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT runtime)
  install(EXPORT kvzap_${component} NAMESPACE kvzap:: FILE kvzap_${component}.cmake DESTINATION ${config_dir}
    COMPONENT development)
endforeach()
install(DIRECTORY include/kvzap ${CMAKE_CURRENT_BINARY_DIR}/include/kvzap
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development FILES_MATCHING PATTERN "*.hpp")

# CMake consumers.
get_target_property(kvzap_type kvzap_core TYPE)
set(KVZAP_CONFIG_PRIVATE ON)
if(kvzap_type STREQUAL "SHARED_LIBRARY")
  set(KVZAP_CONFIG_PRIVATE OFF)
endif()
set(KVZAP_CONFIG_ONEDNN OFF)
if(TARGET kvzap::onednn)
  set(KVZAP_CONFIG_ONEDNN REQUIRED)
endif()
set(KVZAP_CONFIG_NCCL OFF)
if(TARGET kvzap::nccl)
  set(KVZAP_CONFIG_NCCL ON)
endif()
configure_package_config_file(cmake/kvzapConfig.cmake.in kvzapConfig.cmake
  INSTALL_DESTINATION ${config_dir} PATH_VARS KVZAP_DATA_DIR)
# Before version 1 a new minor version may change the interface.
write_basic_package_version_file(kvzapConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/kvzapConfig.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/kvzapConfigVersion.cmake
              cmake/KvzapDependencies.cmake
  DESTINATION ${config_dir} COMPONENT development)

# For builds without CMake.
set(pkg_config_targets ${kvzap_public_targets})
if(KVZAP_CONFIG_PRIVATE)
  foreach(component IN LISTS KVZAP_COMPONENTS)
    list(APPEND pkg_config_targets ${kvzap_${component}_links})
  endforeach()
endif()
kvzap_write_pkg_config(${CMAKE_CURRENT_BINARY_DIR}/kvzap.pc ${pkg_config_targets})
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/kvzap.pc.CXX RENAME kvzap.pc
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT development)

# Decks name files relative to the folder above inputs/, both in the sources and here.
install(DIRECTORY inputs DESTINATION ${KVZAP_DATA_DIR} COMPONENT runtime PATTERN eval EXCLUDE
  REGEX "/inputs/README\\.md$" EXCLUDE)
install(DIRECTORY examples DESTINATION ${KVZAP_DATA_DIR} COMPONENT development REGEX "/README\\.md$" EXCLUDE)

# kvzap_install_pages(DESTINATION name pages others): installs pages with links that lead to other installed files, see
# KvzapPages.cmake. They are copied when they are installed, so that changed pages need no new configuration.
function(kvzap_install_pages destination name pages others)
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/pages/${name})
  install(CODE "execute_process(COMMAND \"${CMAKE_COMMAND}\" \"-DSOURCE=${CMAKE_CURRENT_SOURCE_DIR}\" \"-DFOLDER=${folder}\"
    \"-DPAGES=${pages}\" \"-DOTHERS=${others}\" \"-DEXCLUDED=^docs/(notebooks/|Doxyfile)|^inputs/eval/\"
    -P \"${CMAKE_CURRENT_SOURCE_DIR}/cmake/KvzapPages.cmake\" RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR \"kvzap: the pages of the documentation cannot be copied to ${folder}\")
  endif()" COMPONENT doc)
  install(DIRECTORY ${folder}/ DESTINATION ${destination} COMPONENT doc)
endfunction()
file(RELATIVE_PATH kvzap_to_data ${CMAKE_INSTALL_FULL_DOCDIR} ${CMAKE_INSTALL_FULL_DATADIR}/kvzap)
file(RELATIVE_PATH kvzap_to_pages ${CMAKE_INSTALL_FULL_DATADIR}/kvzap ${CMAKE_INSTALL_FULL_DOCDIR})
set(kvzap_main_pages README.md CHANGELOG.md CONTRIBUTING.md LICENSE docs)
set(kvzap_data_pages examples/README.md inputs/README.md)
set(kvzap_page_places ${kvzap_main_pages})
list(TRANSFORM kvzap_page_places REPLACE "(.+)" "\\1=${kvzap_to_pages}/\\1")
list(JOIN kvzap_main_pages "|" kvzap_main_pages)
list(JOIN kvzap_data_pages "|" kvzap_data_pages)
list(JOIN kvzap_page_places "|" kvzap_page_places)
kvzap_install_pages(${CMAKE_INSTALL_DOCDIR} main "${kvzap_main_pages}"
                    "examples=${kvzap_to_data}/examples|inputs=${kvzap_to_data}/inputs")
kvzap_install_pages(${KVZAP_DATA_DIR} data "${kvzap_data_pages}"
                    "examples=examples|inputs=inputs|${kvzap_page_places}")

if(KVZAP_ENABLE_DRIVERS)
  install(TARGETS kvzap_program EXPORT kvzap_program ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development)
  install(EXPORT kvzap_program NAMESPACE kvzap:: FILE kvzap_program.cmake DESTINATION ${config_dir} COMPONENT development)
  install(TARGETS kvzap_driver RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT runtime)
  # The path from the command to its package is relative, so that the prefix can be moved.
  set(plot_package ${KVZAP_DATA_DIR}/plot)
  if(NOT IS_ABSOLUTE "${plot_package}")
    file(RELATIVE_PATH plot_package ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_PREFIX}/${plot_package})
  endif()
  file(READ drivers/kvzap_plot.py plot_command)
  string(REPLACE "PACKAGE = \"plot\"" "PACKAGE = \"${plot_package}\"" plot_command "${plot_command}")
  file(CONFIGURE OUTPUT install/kvzap-plot CONTENT "${plot_command}" @ONLY)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS drivers/kvzap_plot.py)
  install(PROGRAMS ${CMAKE_CURRENT_BINARY_DIR}/install/kvzap-plot DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT runtime)
  install(DIRECTORY drivers/plot DESTINATION ${KVZAP_DATA_DIR} COMPONENT runtime FILES_MATCHING PATTERN "*.py"
    PATTERN __pycache__ EXCLUDE)
  if(TARGET kvzap_documents)
    # Missing if the program does not run on this machine.
    install(FILES ${kvzap_documents}/kvzap.1 ${kvzap_documents}/kvzap-plot.1 OPTIONAL
      DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT doc)
    install(FILES ${kvzap_documents}/kvzap.bash RENAME kvzap OPTIONAL
      DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions COMPONENT runtime)
    install(FILES ${kvzap_documents}/kvzap-plot.bash RENAME kvzap-plot OPTIONAL
      DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions COMPONENT runtime)
    install(FILES ${kvzap_documents}/kvzap.fish ${kvzap_documents}/kvzap-plot.fish OPTIONAL
      DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d COMPONENT runtime)
    install(FILES ${kvzap_documents}/_kvzap ${kvzap_documents}/_kvzap-plot OPTIONAL
      DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions COMPONENT runtime)
  endif()
endif()
