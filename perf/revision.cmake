# Writes the revision of the sources to a header, touching it only when it changed.
cmake_minimum_required(VERSION 3.18)
set(revision "unknown")
if(GIT)
  execute_process(COMMAND ${GIT} -C ${SOURCE} describe --always --dirty
                  OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(found)
    set(revision "${found}")
  endif()
endif()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT "#pragma once\n#define KVZAP_REVISION \"@revision@\"\n" @ONLY)
