// Agreement of all ranks on work that may run out of memory.
#pragma once

#include <fmt/format.h>

#include <exception>
#include <kvzap/engine/engine.hpp>
#include <stdexcept>

namespace kvzap::engine {

/// Runs work on each rank. Throws AgreedOutOfMemory on all ranks if one of them runs out of memory.
template <class Work>
void agree_on_memory(const Communicator& comm, const Work& work) {
  bool out_of_memory = false;
  try {
    comm.agree([&] {
      try {
        work();
      } catch (const OutOfMemory&) {
        out_of_memory = true;
        throw;
      } catch (const Error&) {
        throw;
      } catch (const std::logic_error&) {
        throw;
      } catch (const std::exception& error) {
        // Kokkos' own allocations throw a runtime_error or bad_alloc, depending on its version.
        out_of_memory = true;
        throw Error(fmt::format("out of memory ({})", error.what()));
      }
    });
  } catch (const AgreedError& error) {
    if (comm.all_reduce_max(out_of_memory ? 1 : 0) == 0) throw;
    throw AgreedOutOfMemory(error.what());
  }
}

}  // namespace kvzap::engine
