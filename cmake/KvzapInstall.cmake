# The files that `cmake --install` installs, and their folders.
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
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
    RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  install(EXPORT kvzap_${component} NAMESPACE kvzap:: FILE kvzap_${component}.cmake DESTINATION ${config_dir})
endforeach()
install(DIRECTORY include/kvzap ${CMAKE_CURRENT_BINARY_DIR}/include/kvzap
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.hpp")

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
configure_package_config_file(cmake/kvzapConfig.cmake.in kvzapConfig.cmake
  INSTALL_DESTINATION ${config_dir} PATH_VARS KVZAP_DATA_DIR)
# Before version 1 a new minor version may change the interface.
write_basic_package_version_file(kvzapConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/kvzapConfig.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/kvzapConfigVersion.cmake
              cmake/KvzapDependencies.cmake
  DESTINATION ${config_dir})

# For builds without CMake.
set(pkg_config_targets ${kvzap_public_targets})
if(KVZAP_CONFIG_PRIVATE)
  foreach(component IN LISTS KVZAP_COMPONENTS)
    list(APPEND pkg_config_targets ${kvzap_${component}_links})
  endforeach()
endif()
kvzap_write_pkg_config(${CMAKE_CURRENT_BINARY_DIR}/kvzap.pc ${pkg_config_targets})
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/kvzap.pc.CXX RENAME kvzap.pc
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

install(FILES LICENSE README.md CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
# Decks name files relative to the folder above inputs/, both in the sources and here.
install(DIRECTORY inputs DESTINATION ${KVZAP_DATA_DIR} PATTERN eval EXCLUDE)
install(DIRECTORY examples DESTINATION ${KVZAP_DATA_DIR})

if(KVZAP_ENABLE_DRIVERS)
  install(TARGETS kvzap_driver RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  # The path from the command to its package is relative, so that the prefix can be moved.
  set(plot_package ${KVZAP_DATA_DIR}/plot)
  if(NOT IS_ABSOLUTE "${plot_package}")
    file(RELATIVE_PATH plot_package ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_PREFIX}/${plot_package})
  endif()
  file(READ drivers/kvzap_plot.py plot_command)
  string(REPLACE "PACKAGE = \"plot\"" "PACKAGE = \"${plot_package}\"" plot_command "${plot_command}")
  file(CONFIGURE OUTPUT kvzap-plot CONTENT "${plot_command}" @ONLY)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS drivers/kvzap_plot.py)
  install(PROGRAMS ${CMAKE_CURRENT_BINARY_DIR}/kvzap-plot DESTINATION ${CMAKE_INSTALL_BINDIR})
  install(DIRECTORY drivers/plot DESTINATION ${KVZAP_DATA_DIR} FILES_MATCHING PATTERN "*.py"
    PATTERN __pycache__ EXCLUDE)
  if(TARGET kvzap_documents)
    # Missing if the program does not run on this machine.
    install(FILES ${kvzap_documents}/kvzap.1 ${kvzap_documents}/kvzap-plot.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 OPTIONAL)
    install(FILES ${kvzap_documents}/kvzap.bash RENAME kvzap OPTIONAL
      DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
    install(FILES ${kvzap_documents}/kvzap-plot.bash RENAME kvzap-plot OPTIONAL
      DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
    install(FILES ${kvzap_documents}/kvzap.fish ${kvzap_documents}/kvzap-plot.fish OPTIONAL
      DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d)
    install(FILES ${kvzap_documents}/_kvzap ${kvzap_documents}/_kvzap-plot OPTIONAL
      DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions)
  endif()
endif()
