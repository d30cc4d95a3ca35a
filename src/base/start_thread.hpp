// Starts a thread, with an error that says which one could not start.
#pragma once

#include <fmt/format.h>

#include <kvzap/core/types.hpp>
#include <system_error>
#include <thread>
#include <utility>

namespace kvzap::base {

/// Starts a thread that does `work`. Throws Error that names `task` if the system refuses: "the
/// thread that …".
template <class Work>
std::thread start_thread(const char* task, Work&& work) {
  try {
    return std::thread(std::forward<Work>(work));
  } catch (const std::system_error& error) {
    throw Error(
        fmt::format("the thread that {} cannot start: {}; raise the limit of memory (ulimit -v) or "
                    "of processes (ulimit -u), or use fewer threads",
                    task, error.code().message()));
  }
}

}  // namespace kvzap::base
