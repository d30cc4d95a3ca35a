#include "base/address_space.hpp"

#include <fmt/format.h>
#include <sys/mman.h>

#include <kvzap/core/types.hpp>
#include <mutex>
#include <thread>
#include <vector>

#include "base/start_thread.hpp"

namespace kvzap::base {

bool has_address_space(std::size_t bytes) {
  void* const room =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return room != MAP_FAILED && munmap(room, bytes) == 0;
}

void expect_address_space(std::size_t bytes, const char* library) {
  if (has_address_space(bytes)) return;
  throw Error(fmt::format("out of memory: no room for {} MiB of address space that {} needs",
                          bytes >> 20, library));
}

void expect_threads(int threads) {
  thread_local int had = 1;
  if (threads <= had) return;
  std::vector<std::thread> team;
  std::mutex all_run;  // threads end together, so that all exist at once
  std::unique_lock starting(all_run);
  const auto join = [&] {
    starting.unlock();
    for (std::thread& thread : team) thread.join();
  };
  try {
    team.reserve(static_cast<std::size_t>(threads - had));
    for (int t = had; t < threads; ++t) {
      team.push_back(start_thread("runs loops", [&] { const std::lock_guard waiting(all_run); }));
    }
  } catch (...) {
    join();
    throw;
  }
  join();
  had = threads;
}

}  // namespace kvzap::base
