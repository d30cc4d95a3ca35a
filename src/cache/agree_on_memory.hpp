// Agreement of all ranks on work that may run out of memory.
#pragma once

#include <fmt/format.h>

#include <exception>
#include <kvzap/core/page_pool.hpp>
#include <stdexcept>

#include "parallel/agree_as.hpp"

namespace kvzap::cache {

/// Runs work on each rank. Throws AgreedOutOfMemory on all ranks if one of them runs out of memory.
template <class Work>
void agree_on_memory(const Communicator& comm, const Work& work) {
  parallel::agree_as<AgreedOutOfMemory>(comm, [&](bool& out_of_memory) {
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
}

}  // namespace kvzap::cache
