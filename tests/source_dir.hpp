// Where tests find goldens, models and sources.
#pragma once

#include <cstdlib>
#include <filesystem>

namespace kvzap::test {

/// Returns the folder that the environment variable KVZAP_SOURCE_DIR names, else that of the
/// build's sources: programs built on one machine also test another one (scripts/gpu).
inline std::filesystem::path source_dir() {
  const char* const moved = std::getenv("KVZAP_SOURCE_DIR");
  return moved && *moved ? moved : KVZAP_SOURCE_DIR;
}

}  // namespace kvzap::test
